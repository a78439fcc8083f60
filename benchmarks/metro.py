"""Experts that the busiest rank reads under each replica choice, on recorded routing, and what a choice costs.

    OMP_NUM_THREADS=1 python benchmarks/metro.py             # about a minute; with a CUDA device also the kernel

Routing of DeepSeek-V2-Lite (26 layers, 64 experts, 6 a token). Placements come from the first half of each task,
batches from the second half.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result

from moe_opt.cluster.placement import mean_busiest, place_by_activation, place_by_load, sample_batches
from moe_opt.cluster.replicas import METHODS, ReplicaTable

DATA = Path(os.environ.get("MOE_OPT_DATA", "../shared/data"))
TASKS = ("law", "intent", "summary", "translation")
PAPER = {"greedy over optimal, at most": "10.9 %", "greedy, one choice": "26 us (A100)", "optimal": "116-292 us"}


def quality(samples: int) -> list[dict[str, Any]]:
    """Rows over ranks x replication x batch: mean busiest rank per method, and how far over the optimum."""
    recorded = np.load(DATA / "routing" / "esft_dsv2lite_token_routing.npz")
    routing = {task: recorded[f"{task}_ids"].astype(np.int64) for task in TASKS}
    rows = []
    for ranks in (4, 8):
        for replication in (1.125, 1.25, 1.5):
            slots = -(-int(64 * replication) // ranks)
            for size in (16, 32, 64, 128):
                busiest: dict[str, list[int]] = {method: [] for method in METHODS}
                for task, ids in routing.items():
                    half = len(ids) // 2
                    for layer in range(0, 26, 5):
                        load = np.bincount(ids[:half, layer].ravel(), minlength=64).astype(float)
                        table = ReplicaTable(place_by_load(load, ranks, slots))
                        seed = [TASKS.index(task), layer, size]
                        for tokens in sample_batches(ids[half:, layer], 64, size, samples, int(np.sum(seed))):
                            for method in METHODS:
                                busiest[method].append(table.busiest(tokens, method))
                mean = {method: float(np.mean(values)) for method, values in busiest.items()}
                over = np.array(busiest["metro"]) - np.array(busiest["optimal"])
                rows.append(
                    {
                        "ranks": ranks,
                        "replication": replication,
                        "batch": size,
                        "busiest": {k: round(v, 3) for k, v in mean.items()},
                        "over_optimal_percent": {
                            k: round(100 * (v / mean["optimal"] - 1), 2) for k, v in mean.items() if k != "optimal"
                        },
                        "metro_worst_over": int(over.max()),
                    }
                )
    return rows


def placements(samples: int) -> list[dict[str, Any]]:
    """EPLB's placement against the one that looks at activated experts, under METRO, at 16 tokens a step."""
    ids = np.load(DATA / "routing" / "esft_dsv2lite_token_routing.npz")["law_ids"].astype(np.int64)
    rows = []
    for ranks, replication in ((4, 1.125), (8, 1.125), (8, 1.5)):
        slots = -(-int(64 * replication) // ranks)
        values = []
        for layer in range(0, 26, 5):
            load = np.bincount(ids[:3000, layer].ravel(), minlength=64).astype(float)
            unseen = sample_batches(ids[3000:, layer], 64, 16, 4 * samples, seed=1)
            seen = sample_batches(ids[:3000, layer], 64, 16, 32, seed=0)
            values.append(
                (
                    mean_busiest(unseen, place_by_load(load, ranks, slots)),
                    mean_busiest(unseen, place_by_activation(seen, ranks, slots)),
                )
            )
        by_load, by_activation = np.mean(values, axis=0)
        rows.append(
            {
                "ranks": ranks,
                "replication": replication,
                "eplb": round(float(by_load), 3),
                "activation": round(float(by_activation), 3),
            }
        )
    return rows


def costs(repeats: int) -> list[dict[str, Any]]:
    """Microseconds of one choice on a prepared placement, one core, p50 and p99."""
    random = np.random.default_rng(0)
    rows = []
    for experts, ranks, replication in ((64, 4, 1.25), (128, 8, 1.5), (256, 16, 1.5)):
        slots = -(-int(experts * replication) // ranks)
        table = ReplicaTable(place_by_load(random.random(experts) ** 3, ranks, slots))
        batches = [random.integers(0, 3, experts) for _ in range(repeats)]
        for method in ("metro", "greedy", "optimal"):
            table.choose(batches[0], method)  # compiles
            micros = []
            for tokens in batches:
                start = time.perf_counter()
                table.choose(tokens, method)
                micros.append(1e6 * (time.perf_counter() - start))
            rows.append(
                {
                    "experts": experts,
                    "ranks": ranks,
                    "method": method,
                    "p50_us": round(float(np.median(micros)), 1),
                    "p99_us": round(float(np.percentile(micros, 99)), 1),
                }
            )
    return rows


def kernel_costs() -> list[dict[str, Any]]:
    """Microseconds of the Triton kernel inside a CUDA graph; empty without a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return []
    from moe_opt.modeling.kernels.metro import DeviceReplicas, choose_on_device

    random = np.random.default_rng(0)
    rows = []
    for experts, ranks in ((64, 4), (128, 8), (256, 16)):
        hosts = place_by_load(random.random(experts) ** 3, ranks, -(-int(1.5 * experts) // ranks))
        replicas = DeviceReplicas.from_hosts(torch.from_numpy(hosts), "cuda")
        tokens = torch.from_numpy(random.integers(0, 3, experts)).cuda()
        out = torch.empty(experts, dtype=torch.int32, device="cuda")
        scratch = torch.empty_like(out)
        choose_on_device(tokens, replicas, out, scratch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                choose_on_device(tokens, replicas, out, scratch)
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        rows.append({"experts": experts, "ranks": ranks, "us": round(10.0 * start.elapsed_time(end), 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=25, help="batches per task, layer and setting")
    args = parser.parse_args()
    rows = quality(args.samples)
    print("ranks  replicas  batch   eplb  greedy  metro  optimal   over optimal: eplb, greedy, metro (worst)")
    for row in rows:
        b, o = row["busiest"], row["over_optimal_percent"]
        print(
            f"{row['ranks']:5}  {row['replication']:8}  {row['batch']:5}  {b['eplb']:5.2f}  {b['greedy']:6.2f}  "
            f"{b['metro']:5.2f}  {b['optimal']:7.2f}   {o['eplb']:5.1f} %  {o['greedy']:5.1f} %  {o['metro']:5.2f} % "
            f"(+{row['metro_worst_over']})"
        )
    placed = placements(args.samples)
    for row in placed:
        print(f"placement, {row['ranks']} ranks x {row['replication']}: EPLB {row['eplb']}, ours {row['activation']}")
    spent = costs(2000)
    for row in spent:
        print(
            f"{row['experts']} experts, {row['ranks']} ranks, {row['method']}: {row['p50_us']} us, p99 {row['p99_us']}"
        )
    kernel = kernel_costs()
    for row in kernel:
        print(f"kernel, {row['experts']} experts, {row['ranks']} ranks: {row['us']} us")
    for name, value in PAPER.items():
        print(f"paper: {name} {value}")
    write_result("metro", {"quality": rows, "placements": placed, "cpu": spent, "kernel": kernel, "paper": PAPER})


if __name__ == "__main__":
    main()
