"""ELDR: TPOT against load balancers, decoder pool sizes (Table 2) and ablations, on published per-token
routing."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from common import ROOT, interval, log, store

from moe_opt.cluster import Policy, make_policy
from moe_opt.cluster.signature import SignatureModel
from moe_opt.devices import device_preset
from moe_opt.report.plots import plot_curves, plot_signature_map
from moe_opt.simulate import FleetConfig, ProfileExperts, SimResult, StepCost, get_model, simulate
from moe_opt.simulate.profiles import RoutingProfiles, load_esft_profiles, split_by_sequence
from moe_opt.workloads import TraceRequest, load_trace, poisson_arrivals

REQUESTS, SEEDS = 2000, 2  # pool sizes and ablations
DECODERS = 16
PER_DECODER = (2.0, 4.0, 8.0)  # requests per second and decode worker
BALANCERS = ("random", "round-robin", "jsq", "p2c")
SKEW = {"intent": 0.1, "law": 0.5, "summary": 0.25, "translation": 0.15}  # a popular domain, as in WildChat


@cache
def halves() -> tuple[RoutingProfiles, RoutingProfiles]:
    """Calibration and measurement requests, without a common sequence."""
    return split_by_sequence(load_esft_profiles())


@cache
def fitted(
    workers: int, weighting: str = "auto", layers: str = "greedy", clustering: str = "balanced"
) -> SignatureModel:
    """A signature model of the calibration half."""
    calibration, _ = halves()
    return SignatureModel.fit(
        calibration.prefill_counts,
        calibration.decode_probs,
        workers,
        weighting=weighting,
        layers=layers,
        clustering=clustering,
    )


def workload(rate: float, seed: int, skewed: bool, requests: int) -> tuple[list[TraceRequest], np.ndarray]:
    """Poisson arrivals with Azure conversation lengths; the second array gives each request's profile."""
    _, measured = halves()
    rng = np.random.default_rng(seed)
    share = {d: measured.domains.count(d) for d in set(measured.domains)}
    weights = np.array([(SKEW[d] if skewed else 0.25) / share[d] for d in measured.domains])
    rows = rng.choice(len(measured), size=requests, p=weights / weights.sum())
    lengths = load_trace("azure-conv")
    picks = rng.integers(len(lengths), size=requests)
    arrivals = poisson_arrivals(requests, rate, seed)
    trace = [
        TraceRequest(
            f"r{i}", float(t), lengths[p].prompt_tokens, lengths[p].output_tokens, domain=measured.domains[row]
        )
        for i, (t, p, row) in enumerate(zip(arrivals, picks, rows, strict=True))
    ]
    return trace, rows


def measure(
    policy_of: Any,
    rate: float,
    workers: int,
    model: SignatureModel,
    *,
    skewed: bool = False,
    cached: str = "none",
    requests: int = REQUESTS,
    seeds: int = SEEDS,
) -> dict[str, Any]:
    """TPOT and active experts of one policy, over seeds.

    `cached` says what half a prompt in the prefix cache does to signatures: "none" counts every token (the paper's
    block signatures do), "lost" counts only what prefill computed.
    """
    _, measured = halves()
    spec = get_model("deepseek-v2-lite")
    cost = StepCost.of(spec, device_preset("MI300X"))
    counts = measured.prefill_counts - (measured.cached_counts if cached == "lost" else 0)
    signatures = model.transform(counts)
    tables = []
    for seed in range(seeds):
        trace, rows = workload(rate, seed, skewed, requests)
        policy: Policy = policy_of(seed)
        result: SimResult = simulate(
            trace,
            policy,
            FleetConfig.uniform(workers, 64, barrier=False),
            cost,
            experts=ProfileExperts(measured.decode_probs[rows]),
            signatures=signatures[rows],
        )
        tables.append(result.summary())
    keys = ("tpot_p50", "tpot_p95", "tpot_p99", "active_experts", "throughput")
    return {key: interval([t[key] for t in tables]) for key in keys}


def _baseline(name: str, workers: int) -> Any:
    if name in ("random", "p2c"):
        return lambda seed: make_policy(name, seed=seed)
    if name == "domain":
        return lambda seed: make_policy("domain", domains=sorted(SKEW))
    if name == "eldr":
        return lambda seed: make_policy("eldr", signature_model=fitted(workers))
    return lambda seed: make_policy(name)


def main_table() -> None:
    """TPOT of every policy at three rates (Figure 11)."""
    rows: dict[str, Any] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    for name in (*BALANCERS, "domain", "eldr"):
        for per_decoder in PER_DECODER:
            rate = per_decoder * DECODERS
            row = measure(
                _baseline(name, DECODERS), rate, DECODERS, fitted(DECODERS), skewed=True, requests=1600, seeds=3
            )
            rows[f"{name}@{rate:g}"] = row
            curves.setdefault(name, []).append((rate, row["tpot_p50"]["mean"] * 1e3))
            log(f"eldr {name} {rate:g}/s: TPOT p50 {row['tpot_p50']['mean'] * 1e3:.3f} ms")
    plot_curves(
        curves,
        ROOT / "docs" / "images" / "eldr-tpot.png",
        xlabel="requests per second",
        ylabel="median TPOT (ms)",
        title="DeepSeek-V2-Lite routing, 16 decode workers (MI300X)",
    )
    model = fitted(DECODERS)
    _, measured = halves()
    signatures = model.transform(measured.prefill_counts)
    plot_signature_map(
        signatures,
        measured.domains,
        ROOT / "docs" / "images" / "signature-map.png",
        centroids=model.centroids,
        title=f"Signatures of held-out requests, rho {model.rho_of(signatures, measured.decode_probs):.2f}",
    )
    store(
        "eldr-tpot",
        {
            "rows": rows,
            "rho": model.rho,
            "held_out_rho": model.rho_of(signatures, measured.decode_probs),
            "weighting": model.weighting,
            "layers": len(model.layers),
        },
    )


def pool_sizes() -> None:
    """Table 2: 8, 16 and 24 decode workers at the same load per worker, against round-robin."""
    rows: dict[str, Any] = {}
    for workers in (8, 16, 24):
        for name in ("round-robin", "jsq", "eldr"):
            rows[f"{name}@{workers}"] = measure(_baseline(name, workers), 12.0 * workers, workers, fitted(workers))
            log(f"eldr pool {name}@{workers}: {rows[f'{name}@{workers}']['tpot_p50']['mean'] * 1e3:.3f} ms")
    store("eldr-pools", {"rows": rows})


def ablations() -> None:
    """tau (Figure 16), K-means (15), signature (14), layers (8) and prefix cache (17)."""
    rate, workers = 12.0 * DECODERS, DECODERS
    rows: dict[str, Any] = {}

    def add(label: str, model: SignatureModel, tau: float = 0.1, cached: str = "none") -> None:
        policy = lambda seed: make_policy("eldr", signature_model=model, tau=tau)  # noqa: E731
        rows[label] = measure(policy, rate, workers, model, skewed=True, cached=cached) | {"rho": model.rho}
        log(f"eldr ablation {label}: {rows[label]['tpot_p50']['mean'] * 1e3:.3f} ms")

    rows["round-robin"] = measure(_baseline("round-robin", workers), rate, workers, fitted(workers), skewed=True)
    rows["jsq"] = measure(_baseline("jsq", workers), rate, workers, fitted(workers), skewed=True)
    for tau in (0.0, 0.1, 0.3, 1.0):
        add(f"tau {tau:g}", fitted(workers), tau)
    for clustering in ("balanced", "vanilla"):
        add(f"{clustering} K-means, tau 0", fitted(workers, clustering=clustering), tau=0.0)
    for weighting in ("count-idf", "binary"):
        add(f"signature {weighting}", fitted(workers, weighting=weighting))
    add("all layers", fitted(workers, layers="all"))
    # with block signatures a cached prefix changes nothing: that is the row of tau 0.1
    add("prefix cache without block signatures", fitted(workers), cached="lost")
    store("eldr-ablations", {"rows": rows})


SECTIONS = {"eldr-tpot": main_table, "eldr-pools": pool_sizes, "eldr-ablations": ablations}
