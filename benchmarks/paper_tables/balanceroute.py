"""BalanceRoute Tables 1 and 2, 6 and 7, and the clairvoyant reference on heavy tails."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import OFFSETS, heavy, interval, log, offsets, repeated, store

from moe_opt.devices import device_preset
from moe_opt.report.plots import plot_loads
from moe_opt.simulate import StepCost, get_model
from moe_opt.simulate.clairvoyant import clairvoyant
from moe_opt.workloads import load_trace, rotate, summarize

# Table 1: policy -> (imbalance in tokens, TPOT P95 in ms, tokens/s), proprietary trace and Azure-2024, K = 8
PAPER_TABLE_1 = {
    "random": ((438225, 85.2, 811), (146564, 90.3, 706)),
    "round-robin": ((254798, 83.2, 847), (110049, 89.1, 771)),
    "p2c": ((262940, 84.0, 836), (109033, 89.3, 794)),
    "jsq": ((215110, 83.2, 843), (104737, 89.3, 785)),
    "br-0": ((51927, 79.3, 943), (54051, 83.3, 854)),
    "br-h oracle": ((23577, 78.0, 1029), (35301, 77.3, 957)),
    "br-h survival": ((40757, 78.7, 979), (44010, 82.1, 893)),
    "br-h exact-match": ((36277, 78.8, 977), (38496, 82.3, 909)),
}
# Tables 6 and 7: "H/gamma" -> trace-mean imbalance in tokens on the proprietary trace
PAPER_SENSITIVITY = {
    8: {"1/0.9": 32304, "24/0.9": 24706, "48/0.9": 25608, "96/0.9": 31862}
    | {"48/0.5": 28327, "48/0.7": 26599, "48/1.0": 29318},
    16: {"1/0.9": 104229, "24/0.9": 117879, "48/0.9": 118396, "96/0.9": 112771}
    | {"48/0.5": 116074, "48/0.7": 109763, "48/1.0": 127207},
}
POLICIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("random", "random", {}),
    ("round-robin", "round-robin", {}),
    ("p2c", "p2c", {}),
    ("jsq", "jsq", {}),
    ("least-kv", "least-kv", {}),
    ("br-0", "br-0", {}),
    ("br-h oracle", "br-h", {}),
    ("br-h survival", "br-h", {"predictor": "survival"}),
    ("br-h exact-match", "br-h", {"predictor": "exact-match"}),
)
CORE = ("jsq", "br-0", "br-h oracle")


def fitted_cost(mean_kv: float) -> StepCost:
    """The step of the paper's cluster, from its own Table 1: TPOT grows linearly with imbalance on
    Azure-2024.

    A worker's largest load lies about half the spread above the mean, so a token of load costs twice the
    slope; what is left of a perfectly balanced step at our mean load is fixed."""
    spread = np.array([azure[0] for _, azure in PAPER_TABLE_1.values()], dtype=float)
    tpot = np.array([azure[1] for _, azure in PAPER_TABLE_1.values()]) / 1e3
    slope, level = np.polyfit(spread, tpot, 1)
    return StepCost(fixed=max(1e-3, level - 2 * slope * mean_kv), per_kv_token=2 * slope)


def preset_cost() -> StepCost:
    """Qwen3-235B-A22B with one H100 per data-parallel rank; experts are read in full and counted as fixed."""
    model = get_model("qwen3-235b-a22b")
    cost = StepCost.of(model, device_preset("H100"))
    experts = cost.per_expert * model.num_moe_layers * model.num_experts / 8  # 8 ranks share them
    return StepCost(cost.fixed + experts, cost.per_kv_token, 0.0, cost.per_request)


def table_1(name: str, section: str, steps: int | None) -> None:
    """Every policy at 8 workers x 32 slots with 128 waiting."""
    trace = load_trace(name)
    rows: dict[str, Any] = {}
    loads = {}
    for label, policy, options in POLICIES:
        keep = label in ("jsq", "br-0", "br-h oracle")
        rows[label], runs = heavy(trace, policy, options, preset_cost(), steps=steps, record_loads=keep)
        log(f"{section} {label}: {rows[label]['imbalance']['mean']:,.0f}")
        if keep and runs[0].loads is not None:
            loads[label] = runs[0].loads[1000:1600]
    mean_kv = rows["jsq"]["kv_tokens_mean"]["mean"]
    fitted = {
        label: heavy(trace, policy, options, fitted_cost(mean_kv), steps=steps and min(steps, 2500))[0]["throughput"]
        for label, policy, options in POLICIES
        if label in CORE
    }
    from common import ROOT

    plot_loads(loads, ROOT / "docs" / "images" / f"loads-{name}.png", title=f"{name}: 8 workers x 32 slots")
    cost, fit = preset_cost(), fitted_cost(mean_kv)
    store(
        section,
        {
            "trace": name,
            "summary": summarize(trace),
            "rows": rows,
            "throughput_with_fitted_cost": fitted,
            "cost": {"fixed": cost.fixed, "per_kv_token": cost.per_kv_token, "per_request": cost.per_request},
            "fitted_cost": {"fixed": fit.fixed, "per_kv_token": fit.per_kv_token},
        },
    )


def table_2(name: str, section: str, counts: tuple[int, ...] = (4, 8, 16, 64, 256)) -> None:
    """Imbalance against the number of workers; 16 requests wait per worker, as 128 do for 8."""
    rows: dict[str, Any] = {}
    for workers in counts:
        steps, warmup = (2000, 500) if workers <= 16 else (700, 350)
        trace = load_trace(name)
        need = workers * (32 + 16) + steps * workers * 32 // 100
        trace = repeated(trace, -(-need * 2 // len(trace)))
        for label, policy, options in POLICIES:
            if label not in CORE:
                continue
            row, _ = heavy(
                trace, policy, options, preset_cost(), workers=workers, pool=16 * workers, steps=steps, warmup=warmup
            )
            rows[f"{label}@{workers}"] = row
            log(f"{section} {label}@{workers}: {row['imbalance']['mean']:,.0f}")
    store(section, {"trace": name, "counts": list(counts), "rows": rows})


def sensitivity(name: str, section: str, workers: int) -> None:
    """The cross of Tables 6 (8 workers) and 7 (16): H at gamma 0.9, gamma at H 48, oracle."""
    rows: dict[str, Any] = {}
    trace = repeated(load_trace(name), 2)
    rows["jsq"], _ = heavy(trace, "jsq", {}, preset_cost(), workers=workers, pool=16 * workers, steps=2000)
    for horizon, gamma in ((1, 0.9), (24, 0.9), (48, 0.9), (96, 0.9), (48, 0.5), (48, 0.7), (48, 1.0)):
        options = {"horizon": horizon, "gamma": gamma}
        rows[f"{horizon}/{gamma}"], _ = heavy(
            trace, "br-h", options, preset_cost(), workers=workers, pool=16 * workers, steps=2000
        )
        log(f"{section} H {horizon} gamma {gamma}: {rows[f'{horizon}/{gamma}']['imbalance']['mean']:,.0f}")
    store(section, {"trace": name, "workers": workers, "rows": rows})


def clairvoyant_gap(
    name: str, section: str, steps: int, warmup: int, tries: int = 400, replicates: int = OFFSETS
) -> None:
    """How much of the way from JSQ to a hindsight plan the routers go, with the same choice and with the
    whole pool."""
    trace = load_trace(name)
    rows: dict[str, Any] = {}
    routers = [entry for entry in POLICIES if entry[0] in CORE]
    routers += [(f"{label}, 32 candidates", policy, {"candidates": 32}) for label, policy, _ in routers[1:3]]
    # as the hindsight plan has it: the whole pool to choose from, and outputs seen to their end
    routers.append(("br-h oracle, 128 candidates, H 200", "br-h", {"candidates": 128, "horizon": 200, "gamma": 0.98}))
    for label, policy, options in routers:
        rows[label], _ = heavy(trace, policy, options, preset_cost(), steps=steps, warmup=warmup, replicates=replicates)
    values = []
    for offset in offsets(trace, replicates):
        plan = clairvoyant(
            rotate(trace, offset), 8, 32, pool_depth=128, steps=steps, candidates=None, window=24, commit=8, tries=tries
        )
        values.append(plan.imbalance(warmup))
        log(f"{section} hindsight from {offset}: {values[-1]:,.0f}")
    bounds = {"whole pool": interval(values) | {"runs": values}}
    store(
        section,
        {
            "trace": name,
            "summary": summarize(trace),
            "rows": rows,
            "bounds": bounds,
            "tries": tries,
            "replicates": replicates,
        },
    )


SECTIONS = {
    "balanceroute-azure": lambda: table_1("azure-conv", "balanceroute-azure", None),
    "balanceroute-mooncake": lambda: table_1("mooncake-conv", "balanceroute-mooncake", 2500),
    "balanceroute-sweep-azure": lambda: table_2("azure-conv", "balanceroute-sweep-azure"),
    "balanceroute-sweep-mooncake": lambda: table_2("mooncake-conv", "balanceroute-sweep-mooncake", (4, 8, 16, 64)),
    "balanceroute-sensitivity-8": lambda: sensitivity("mooncake-conv", "balanceroute-sensitivity-8", 8),
    "balanceroute-sensitivity-16": lambda: sensitivity("mooncake-conv", "balanceroute-sensitivity-16", 16),
    "balanceroute-bound-mooncake": lambda: clairvoyant_gap(
        "mooncake-conv", "balanceroute-bound-mooncake", 1600, 400, tries=1500
    ),
    "balanceroute-bound-servegen": lambda: clairvoyant_gap(
        "servegen-m-large", "balanceroute-bound-servegen", 4000, 1500, replicates=24
    ),
    "balanceroute-bound-servegen-r1": lambda: clairvoyant_gap(
        "servegen-deepseek-r1", "balanceroute-bound-servegen-r1", 6000, 3000, tries=200, replicates=12
    ),
}
