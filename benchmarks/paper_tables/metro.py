"""METRO Table II: the throughput-TPOT Pareto curve of decode, and the gain at a fixed objective."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import ROOT, log, store

from moe_opt.devices import device_preset
from moe_opt.report.plots import plot_curves
from moe_opt.simulate import MODELS, get_model
from moe_opt.simulate.metro import (
    Collectives,
    decode_pareto,
    gain_at_slo,
    pareto_front,
)
from moe_opt.simulate.models import kv_heads

SETUPS = (("qwen3-235b-a22b", 8, (1024, 512, 256, 128, 64)), ("deepseek-v3", 16, (1024, 512, 256, 128)))
METHODS = ("eplb", "metro", "optimal")
OVERHEADS = {"26 us a layer (A100, the paper's highest)": 26e-6, "free": 0.0}


def pareto() -> None:
    """Every configuration of Table II at three replication ratios."""
    rows: list[dict[str, Any]] = []
    for name, devices, batches in SETUPS:
        model, device = get_model(name), device_preset("B200")
        for label, seconds in OVERHEADS.items():
            for replication in (1.0, 1.125, 1.5):
                points = {
                    method: decode_pareto(
                        model,
                        device,
                        devices,
                        batches,
                        replication=replication,
                        method=method,
                        hidden_size=MODELS[name]["hidden_size"],
                        kv_heads=kv_heads(name),
                        collectives=Collectives(metro=seconds),
                    )
                    for method in METHODS
                }
                reach = [p.tpot for p in points["eplb"]]
                slos = np.linspace(min(reach), max(reach), 400)
                gains = np.array(gain_at_slo(points["metro"], points["eplb"], slos))
                full = {
                    m: next(p for p in v if p.expert_parallel == devices and p.batch == 1024) for m, v in points.items()
                }
                best = int(np.nanargmax(gains))
                rows.append(
                    {
                        "model": name,
                        "overhead": label,
                        "replication": replication,
                        "busiest": {m: p.busiest_experts for m, p in full.items()},
                        "tpot_ms": {m: p.tpot * 1e3 for m, p in full.items()},
                        "max_gain": float(gains[best]),
                        "max_gain_slo_ms": float(slos[best] * 1e3),
                        "median_gain": float(np.nanmedian(gains)),
                    }
                )
                log(f"metro {name} {replication} {label}: gain up to {gains[best]:.2f}")
                if replication == 1.5 and seconds == 0.0:
                    plot_curves(
                        {m: [(p.tpot * 1e3, p.throughput / 1e3) for p in pareto_front(v)] for m, v in points.items()},
                        ROOT / "docs" / "images" / f"pareto-{name}.png",
                        xlabel="TPOT (ms)",
                        ylabel="decode throughput (thousand tokens/s)",
                        title=f"{name} on {devices} x B200, 1.5x replication",
                    )
    store("metro", {"rows": rows})


SECTIONS = {"metro": pareto}
