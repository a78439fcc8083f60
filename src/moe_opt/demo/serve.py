"""Stage "serve": a burst against the server, without and with brownout; then the server is yours."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_opt.demo.model import find_demo_model
from moe_opt.errors import ConfigError
from moe_opt.serving.burst import (
    BurstPlan,
    BurstRun,
    Capacity,
    burst_requests,
    measure_capacity,
    missed_share,
    recovery_seconds,
    run_burst,
    set_brownout,
)
from moe_opt.serving.load_prompts import PromptPool, load_texts
from moe_opt.serving.load_report import plot_load, summarize_load
from moe_opt.serving.loadgen import Target
from moe_opt.serving.local_server import LocalServer

_PORT = 3000
_NEURONS = 1024  # of a widened expert; see moe_opt.demo.widen
_BATCH = 16
_STAGES = (("half", 6.0, 0.5), ("capacity", 6.0, 1.0), ("double", 8.0, 2.0), ("after", 6.0, 0.25))
_BARS = " ▁▂▃▄▅▆▇█"


def run(args: argparse.Namespace) -> int:
    """Returns 0. With DEMO_EXIT=1, or without a terminal on standard input, the server does not stay up."""
    started = time.perf_counter()
    source = Path(find_demo_model(args.model))
    ways = _widest(source)
    port = int(os.environ.get("PORT") or _PORT)
    with tempfile.TemporaryDirectory() as folder:
        _say(f"widening the experts to {_NEURONS} neurons with zeros: same outputs, but reading them takes time ...")
        from moe_opt.demo.widen import widen_experts

        wide = widen_experts(source, source / "united", Path(folder) / "demo-model", _NEURONS)
        flags = ["--model-id", str(wide), "--united-experts", ".", "--ways", str(ways), "--max-total-tokens", "512"]
        flags += ["--max-batch-size", str(_BATCH), "--max-batch-prefill-tokens", "64", "--slo-headroom", "0.85"]
        flags += ["--max-concurrent-requests", "2048"]
        with _server(flags, port) as server:
            _say(f"server: {server.url}  (united experts: {ways} ways)")
            asyncio.run(_show(server.url, Path(args.output)))
            _say(f"({time.perf_counter() - started:.0f} s)")
            _stay(server)
    return 0


def _widest(source: Path) -> int:
    ways = [int(path.name.removeprefix("ways-")) for path in (source / "united").glob("ways-*")]
    if not ways:
        raise ConfigError(f"{source / 'united'} holds no united experts: run `moe-opt distill` first")
    return max(ways)


@contextmanager
def _server(flags: list[str], port: int) -> Iterator[LocalServer]:
    """On the usual port if it is free, else on another one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            port = 0
    with LocalServer(*flags, port=port) as server:
        yield server


async def _show(url: str, output: Path) -> None:
    target = Target(url=url)
    pool = await PromptPool.build(load_texts(None), target)
    plan = BurstPlan(prompt_tokens=24, output_tokens=48, concurrency=_BATCH, stages=_STAGES)
    _say("measuring what a full batch costs, exact and with united experts only ...")
    await measure_capacity(target, pool, plan, rounds=0.5)  # warm
    exact = await measure_capacity(target, pool, plan)
    await set_brownout(target, threshold=0.0)
    browned = await measure_capacity(target, pool, plan)
    await set_brownout(target, threshold=1.0)
    slo = math.sqrt(exact.gap * browned.gap)
    _print_capacity(exact, browned, slo)
    requests = burst_requests(pool, plan, exact.requests_per_second)
    runs: dict[str, BurstRun] = {}
    updates: dict[str, dict[str, Any]] = {
        "exact": {"threshold": 1.0},
        "brownout": {"slo_tpot": slo, "threshold": "slo"},
    }
    for name, update in updates.items():
        await set_brownout(target, **update)
        _say(f"\n{name}: {len(requests)} requests, 0.5x -> 1x -> 2x of capacity -> 0.25x ...")
        runs[name] = await run_burst(target, requests, settle=8.0 if name == "brownout" else 0.0)
        _print_run(runs[name], slo)
    _print_comparison(runs, slo)
    output.mkdir(parents=True, exist_ok=True)
    thresholds = {"brownout": runs["brownout"].thresholds}
    plot = output / "serve.png"
    plot_load(plot, {name: r.records for name, r in runs.items()}, thresholds=thresholds, slo_tpot=slo)
    _say(f"plot: {plot}")


def _print_capacity(exact: Capacity, browned: Capacity, slo: float) -> None:
    for name, capacity in (("exact", exact), ("united experts only", browned)):
        _say(
            f"  {name:<20} {capacity.requests_per_second:6.2f} requests/s {capacity.tokens_per_second:8.1f} tokens/s  "
            f"{capacity.gap * 1000:7.1f} ms per token"
        )
    _say(f"  objective: {slo * 1000:.1f} ms per output token, between the two")


def _print_run(run: BurstRun, slo: float) -> None:
    summary = summarize_load(run.records, slo_tpot=slo)
    _say(f"  {'stage':<10} {'requests':>8} {'TTFT p50':>10} {'TPOT p50':>10} {'TPOT p90':>10} {'tokens late':>12}")
    for name, part in summary["stages"].items():
        missing = part["slo"]["tokens_missing_tpot"]
        _say(
            f"  {name:<10} {part['ok']:>8} {_ms(part['ttft'], 'p50'):>10} {_ms(part['tpot'], 'p50'):>10} "
            f"{_ms(part['tpot'], 'p90'):>10} {'-' if missing is None else f'{missing * 100:.0f} %':>12}"
        )
    if run.thresholds:
        _say(f"  threshold  {sparkline([sample[2] for sample in run.thresholds])}  (full bar: 1, exact)")


def _ms(figures: dict[str, float] | None, key: str) -> str:
    return "-" if figures is None else f"{figures[key] * 1000:.0f} ms"


def sparkline(values: list[float], width: int = 60) -> str:
    """Values in [0, 1] as bars, averaged to `width` columns."""
    columns = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    return "".join(_BARS[round(sum(c) / len(c) * (len(_BARS) - 1))] for c in columns if c)


def _print_comparison(runs: dict[str, BurstRun], slo: float) -> None:
    lengths = [stage[1] for stage in _STAGES]
    start, end = sum(lengths[:2]), sum(lengths[:3])
    _say("\ntokens above the objective while the load was double the capacity:")
    for name, run in runs.items():
        share = missed_share(run.records, slo, start, end)
        _say(f"  {name:<10} {'no token' if share is None else f'{share * 100:.0f} %'}")
    served = {name: sum(r.output_tokens for r in run.records if r.finished <= end) for name, run in runs.items()}
    _say(f"tokens served until its end: exact {served['exact']}, with brownout {served['brownout']}")
    seconds = recovery_seconds(runs["brownout"].thresholds, max(r.finished for r in runs["brownout"].records))
    _say(
        "threshold " + ("not yet back at 1" if seconds is None else f"back at 1 {seconds:.1f} s after the last answer")
    )


def _stay(server: LocalServer) -> None:
    """Until Ctrl-C; not at all for a script."""
    if os.environ.get("DEMO_EXIT") == "1" or not sys.stdin.isatty():
        return
    body = '{"inputs": "The court", "parameters": {"max_new_tokens": 20}}'
    _say("\nthe server stays up until Ctrl-C; try")
    _say(f"  curl {server.url}/generate -H 'Content-Type: application/json' -d '{body}'")
    _say(f"  curl {server.url}/brownout")
    try:
        while server.process is not None and server.process.poll() is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        _say("\nstopping")


def _say(text: str) -> None:
    print(text, flush=True)
