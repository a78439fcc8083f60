"""`moe-opt simulate`: routing policies side by side on a trace, with confidence intervals over replicates."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_opt.cluster import Policy, make_policy
from moe_opt.devices import DEVICES, device_preset
from moe_opt.errors import ConfigError
from moe_opt.report import format_interval, machine_facts, markdown_table, save_result
from moe_opt.simulate.costs import StepCost
from moe_opt.simulate.engine import simulate
from moe_opt.simulate.experts import BatchExperts
from moe_opt.simulate.fleet import Drain, Fail, FleetConfig, FleetEvent, Recover, ScaleUp, WorkerSpec
from moe_opt.simulate.metrics import SimResult, mean_interval
from moe_opt.simulate.models import MODELS, get_model
from moe_opt.workloads import TraceRequest, load_trace, poisson_arrivals, rescale, rotate, with_arrivals

HELP = "Simulate a fleet of decode workers on a trace, with the very policies that the router runs."
EXAMPLE = """
moe-opt simulate --trace azure-conv --policies jsq,br-0,br-h --workers 8 --slots 32 --pool 128
moe-opt simulate --trace azure-conv --rates 5,10,20 --no-barrier --policies round-robin,jsq,least-kv --out rates.json
moe-opt simulate --trace mooncake-conv --pool 128 --policies br-h --option br-h:horizon=96 --record-loads --out m.json
moe-opt simulate --trace azure-conv --rates 20 --workers 4 --fail 30:1 --recover 60:1 --policies jsq
"""

_SHOWN = ("imbalance", "tpot_p50", "tpot_p99", "ttft_p50", "throughput", "active_experts")
_LOAD_ROWS = 600  # steps of a recorded load history


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-opt simulate`."""
    load = parser.add_argument_group("load")
    load.add_argument("--trace", default="azure-conv", help="name, servegen-MODEL, or a file (Azure, Mooncake, plain)")
    load.add_argument("--limit", type=int, help="use the first so many requests")
    load.add_argument("--pool", type=int, help="heavy load: keep so many requests waiting, ignore arrival times")
    load.add_argument("--rates", help="requests per second, comma-separated; the trace's own pattern is rescaled")
    load.add_argument("--poisson", action="store_true", help="Poisson arrivals instead of the trace's pattern")
    load.add_argument("--replicates", type=int, default=3, help="trace offsets (and seeds) to average over")
    load.add_argument("--max-steps", type=int, help="end each run after so many recorded steps")
    load.add_argument("--warmup", type=int, default=500, help="steps left out of averages under heavy load")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--workers", default="8", help="decode workers; a comma-separated list sweeps them")
    fleet.add_argument("--slots", type=int, default=32, help="requests that run at once on a worker")
    fleet.add_argument("--kv-capacity", type=int, help="KV tokens per worker")
    fleet.add_argument("--no-barrier", action="store_true", help="every worker on its own clock")
    fleet.add_argument("--speeds", help="relative speed per worker, comma-separated")
    fleet.add_argument("--fail", action="append", default=[], metavar="TIME:WORKER", help="a worker dies")
    fleet.add_argument("--recover", action="append", default=[], metavar="TIME:WORKER", help="it comes back")
    fleet.add_argument("--drain", action="append", default=[], metavar="TIME:WORKER", help="it leaves when empty")
    fleet.add_argument("--scale-up", action="append", default=[], metavar="TIME", help="a worker joins")
    cost = parser.add_argument_group("step cost")
    cost.add_argument("--model", default="qwen3-235b-a22b", help=f"{', '.join(MODELS)}, or a config.json")
    cost.add_argument("--device", default="H100", help=", ".join(DEVICES))
    cost.add_argument("--tensor-parallel", type=int, default=1, help="devices per worker")
    cost.add_argument("--overhead-ms", type=float, default=2.0, help="host and launch time per step")
    what = parser.add_argument_group("policies")
    what.add_argument("--policies", default="jsq,br-0,br-h", help="comma-separated names")
    what.add_argument(
        "--option", action="append", default=[], metavar="POLICY:NAME=VALUE", help="an option of a policy"
    )
    what.add_argument("--seed", type=int, default=0, help="first seed of the policies that draw")
    parser.add_argument("--record-loads", action="store_true", help="keep per-worker loads for `moe-opt plot`")
    parser.add_argument("--out", type=Path, help="JSON file for the results")


def _numbers(text: str, name: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{name} is {text!r}, expected numbers separated by commas") from None


def _timed(values: Sequence[str], name: str) -> list[tuple[float, int]]:
    pairs = []
    for value in values:
        moment, _, worker = value.partition(":")
        try:
            pairs.append((float(moment), int(worker)))
        except ValueError:
            raise ConfigError(f"--{name} is {value!r}, expected TIME:WORKER, such as 30:1") from None
    return pairs


def _policy_options(values: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for value in values:
        policy, colon, rest = value.partition(":")
        key, equals, text = rest.partition("=")
        if not colon or not equals or policy not in options:
            raise ConfigError(f"--option is {value!r}, expected POLICY:NAME=VALUE with a policy of --policies")
        try:
            options[policy][key] = json.loads(text)
        except json.JSONDecodeError:
            options[policy][key] = text
    return options


def _make(name: str, options: dict[str, Any], seed: int) -> Policy:
    """Policies that draw get the replicate's seed; the others have no such option."""
    if name in ("random", "p2c") and "seed" not in options:
        return make_policy(name, seed=seed, **options)
    return make_policy(name, **options)


def _fleet(args: argparse.Namespace, workers: int) -> FleetConfig:
    spec = WorkerSpec(args.slots, args.kv_capacity, 1.0, 0)
    joins = _numbers(",".join(args.scale_up), "scale-up", float) if args.scale_up else []
    events: list[FleetEvent] = [Fail(t, w) for t, w in _timed(args.fail, "fail")]
    events += [Recover(t, w) for t, w in _timed(args.recover, "recover")]
    events += [Drain(t, w) for t, w in _timed(args.drain, "drain")]
    for i, moment in enumerate(joins):
        group = workers + i if args.no_barrier else 0
        events.append(ScaleUp(moment, WorkerSpec(spec.slots, spec.kv_capacity, 1.0, group)))
    return FleetConfig.uniform(
        workers,
        args.slots,
        barrier=not args.no_barrier,
        kv_capacity=args.kv_capacity,
        speeds=_numbers(args.speeds, "speeds", float) if args.speeds else None,
        pool_depth=args.pool,
        events=events,
    )


def _load(
    trace: list[TraceRequest], rate: float | None, replicate: int, args: argparse.Namespace
) -> list[TraceRequest]:
    """One replicate: the trace begun at another place, at the wanted rate."""
    rows = rotate(trace, replicate * len(trace) // args.replicates)
    if args.poisson:
        if rate is None:
            raise ConfigError("--poisson needs --rates")
        return with_arrivals(rows, poisson_arrivals(len(rows), rate, args.seed + replicate))
    return rows if rate is None else rescale(rows, rate)


def _thin(loads: np.ndarray, warmup: int) -> list[list[int]]:
    """Consecutive steps after the warm-up: a spread is only seen step by step."""
    start = min(warmup, max(0, len(loads) - _LOAD_ROWS))
    return loads[start : start + _LOAD_ROWS].tolist()


def _summaries(results: Sequence[SimResult], warmup: int, pool: int) -> dict[str, dict[str, float]]:
    if pool:
        for r in results:
            r.imbalance(warmup, pool)  # an empty window is an error, not a dash
    tables = [r.summary(warmup, pool) for r in results]
    return {key: mean_interval([t[key] for t in tables])._asdict() for key in tables[0]}


def run(args: argparse.Namespace) -> int:
    """Run every policy at every setting and print one table."""
    from tqdm import tqdm

    names = [n.strip() for n in args.policies.split(",") if n.strip()]
    if not names or args.replicates < 1:
        raise ConfigError("--policies needs at least one name and --replicates at least 1")
    options = _policy_options(args.option, names)
    rates: list[float | None] = _numbers(args.rates, "rates", float) if args.rates else [None]
    if args.pool is not None and args.rates:
        raise ConfigError("--pool ignores arrival times: give --pool or --rates, not both")
    worker_counts = _numbers(args.workers, "workers", int)
    if len(rates) > 1 and len(worker_counts) > 1:
        raise ConfigError("sweep --rates or --workers, not both")
    for name in names:
        _make(name, options[name], args.seed)  # a wrong name or option fails before the first run
    trace = load_trace(args.trace, limit=args.limit, seed=args.seed)
    model = get_model(args.model)
    device = device_preset(args.device)
    cost = StepCost.of(model, device, overhead=args.overhead_ms / 1e3, tensor_parallel=args.tensor_parallel)
    warmup, pool = (args.warmup, args.pool) if args.pool else (0, 0)
    rows: list[dict[str, Any]] = []
    loads: dict[str, list[list[int]]] = {}
    jobs = [(rate, workers, name) for rate in rates for workers in worker_counts for name in names]
    with tqdm(total=len(jobs) * args.replicates, unit="run", file=sys.stderr, disable=None) as bar:
        for rate, workers, name in jobs:
            fleet = _fleet(args, workers)
            results = []
            for replicate in range(args.replicates):
                bar.set_description(f"{name} x {workers}" + (f" at {rate:g}/s" if rate else ""))
                policy = _make(name, options[name], args.seed + replicate)
                experts = BatchExperts.of(model, 1 if args.no_barrier else workers)
                results.append(
                    simulate(
                        _load(trace, rate, replicate, args),
                        policy,
                        fleet,
                        cost,
                        experts=experts,
                        record_loads=args.record_loads and replicate == 0,
                        max_steps=args.max_steps,
                    )
                )
                bar.update()
            metrics = _summaries(results, warmup, pool)
            rows.append({"policy": name, "rate": rate, "workers": workers, "metrics": metrics})
            recorded = results[0].loads
            if recorded is not None:
                loads[name] = _thin(recorded, warmup)
    swept = "rate" if len(rates) > 1 else "workers" if len(worker_counts) > 1 else None
    print(_table(rows, swept, args.pool is not None))
    if args.out:
        save_result(
            args.out,
            {
                "kind": "simulate",
                "machine": machine_facts(),
                "settings": {k: v for k, v in vars(args).items() if isinstance(v, str | int | float | list | bool)},
                "swept": swept,
                "rows": rows,
                "loads": loads,
            },
        )
        print(f"wrote {args.out}", file=sys.stderr)
    return 0


def _table(rows: Sequence[dict[str, Any]], swept: str | None, heavy: bool) -> str:
    """One line per policy and setting; imbalance relative to the first policy of the setting."""
    headers = ["policy", *([swept] if swept else []), "imbalance (tokens)", "vs first", "TPOT p50 (ms)"]
    headers += ["TPOT p99 (ms)", "TTFT p50 (s)", "tokens/s", "experts/step"]
    body = []
    first: dict[Any, float] = {}
    for row in rows:
        values = row["metrics"]
        setting = row[swept] if swept else None
        base = first.setdefault(setting, values["imbalance"]["mean"])
        change = values["imbalance"]["mean"] / base - 1 if base else float("nan")
        cells: list[object] = [row["policy"], *([setting] if swept else [])]
        for key in _SHOWN:
            scale = 1e3 if key.startswith("tpot") else 1.0
            mean, low, high = (values[key][k] * scale for k in ("mean", "low", "high"))
            cells.append(format_interval(mean, low, high))
            if key == "imbalance":
                cells.append(f"{change:+.1%}")
        body.append(cells)
    note = "" if not heavy else "\n\nHeavy load: averages over steps with a full pool, after the warm-up."
    return markdown_table(headers, body) + "\n\nMean ± half-width of the 95 % confidence interval." + note
