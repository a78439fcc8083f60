"""What the paper tables share: replicates of a trace, heavy-load runs, and where results go."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_opt.cluster import make_policy
from moe_opt.report import machine_facts, save_result
from moe_opt.simulate import FleetConfig, SimResult, StepCost, mean_interval, simulate
from moe_opt.workloads import TraceRequest, rotate

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "paper_tables.json"
OFFSETS = 3  # trace offsets per figure: thirds of the trace
HISTORY = 2000  # requests before the offset that predictors learn from


def log(text: str) -> None:
    """Progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def store(section: str, values: dict[str, Any]) -> None:
    """Merge one section into the results file; sections may run side by side."""
    with (Path(tempfile.gettempdir()) / "moe_opt_paper_tables.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _merge(section, values)
    log(f"stored {section}")


def _merge(section: str, values: dict[str, Any]) -> None:
    result: dict[str, Any] = {"kind": "paper_tables", "sections": {}}
    if RESULTS.is_file():
        result = json.loads(RESULTS.read_text(encoding="utf-8"))
    facts = machine_facts()
    facts["command"] = f"python benchmarks/paper_tables/run.py {section}"
    facts["load_average"] = round(os.getloadavg()[0], 1)
    result["sections"][section] = values | {"machine": facts}
    save_result(RESULTS, result)


def offsets(trace: Sequence[TraceRequest], count: int = OFFSETS) -> list[int]:
    """Where the replicates begin."""
    return [i * len(trace) // count for i in range(count)]


def repeated(trace: Sequence[TraceRequest], times: int) -> list[TraceRequest]:
    """The trace over and over, ids kept apart: large fleets need more requests than an hour of trace has."""
    times += times % OFFSETS == 0  # or the offsets would all begin at the same place of the trace
    span = trace[-1].arrival + 1.0
    return [replace(r, id=f"{r.id}x{k}", arrival=r.arrival + k * span) for k in range(times) for r in trace]


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and 95 % confidence interval."""
    return dict(mean_interval([float(v) for v in values])._asdict())


def heavy(
    trace: Sequence[TraceRequest],
    name: str,
    options: dict[str, Any],
    cost: StepCost,
    *,
    workers: int = 8,
    slots: int = 32,
    pool: int = 128,
    steps: int | None = 3000,
    warmup: int = 500,
    record_loads: bool = False,
    replicates: int = OFFSETS,
) -> tuple[dict[str, Any], list[SimResult]]:
    """One policy under heavy load from every offset: the columns of BalanceRoute's tables."""
    runs = []
    for replicate, offset in enumerate(offsets(trace, replicates)):
        rows = rotate(trace, offset)
        seed = {"seed": replicate} if name in ("random", "p2c") else {}
        runs.append(
            simulate(
                rows,
                make_policy(name, **options, **seed),
                FleetConfig.uniform(workers, slots, pool_depth=pool),
                cost,
                history=rows[-HISTORY:] if "predictor" in options else (),
                record_loads=record_loads and replicate == 0,
                max_steps=steps,
            )
        )
    tables = [r.summary(warmup, pool) for r in runs]
    keys = ("imbalance", "throughput", "tpot_p50", "tpot_p95", "kv_tokens_mean", "steps")
    row: dict[str, Any] = {key: interval([t[key] for t in tables]) for key in keys}
    row["imbalance_runs"] = [t["imbalance"] for t in tables]
    row["decision_ms_p50"] = float(np.median(np.concatenate([r.decision_seconds for r in runs])) * 1e3)
    return row, runs
