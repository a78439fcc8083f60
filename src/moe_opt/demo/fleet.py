"""Stage "fleet": one prefill and two decode workers behind the router; the same burst under several policies."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from moe_opt.demo.model import find_demo_model
from moe_opt.errors import ConfigError
from moe_opt.report.tables import markdown_table
from moe_opt.serving.calibrate import collect, fit
from moe_opt.serving.launcher import FleetPlan, LocalFleet
from moe_opt.serving.loadgen import LoadRequest, RequestRecord, Target, run_closed
from moe_opt.serving.router.app import create_app
from moe_opt.serving.router.config import RouterSettings
from moe_opt.serving.router.fleet import read_metrics
from moe_opt.serving.router.router import Router
from moe_opt.serving.router.server import loop_factory
from moe_opt.serving.router_flags import listen
from moe_opt.workloads.sample_texts import calibration_prompts

_PORT = 3000
POLICIES = ("round-robin", "jsq", "eldr", "br-0")
CONCURRENCY = 20
_PAPER_FEWER = 22.0  # per cent fewer active experts (ELDR, section 6)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyResult:
    """What one policy did with the burst. Latencies are seconds.

    Attributes:
        active_experts: mean over decode steps of the expert weights read per layer, both decode workers.
        experts_per_token: expert weights read per layer for each generated token: what a step reads, its batch shares.
        imbalance: mean over time of the heaviest worker's KV tokens above the mean, as a share of the mean.
    """

    policy: str
    ok: int
    requests: int
    ttft_p90: float
    tpot_p50: float
    tpot_p99: float
    active_experts: float
    experts_per_token: float
    imbalance: float
    tokens_per_second: float


def run(args: argparse.Namespace) -> int:
    """Returns 0. With DEMO_EXIT=1, or without a terminal on standard input, the fleet does not stay up."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_show(find_demo_model(args.model)))


async def _show(model: str) -> int:
    started = time.perf_counter()
    fleet = LocalFleet(FleetPlan(model, prefill=1, decode=2, flags=("--max-batch-size", "16", "--dtype", "float32")))
    _say("starting one prefill and two decode workers ...")
    await fleet.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "signatures.npz"
            prompts = calibration_prompts()
            _say(f"fitting expert signatures on {len(prompts)} texts of ours ...")
            model_ = fit(await collect(fleet.specs[1].url, prompts, output_tokens=24), num_workers=2)
            model_.save(path)
            _say(f"signatures: rho {model_.rho:.2f}, layers {list(model_.layers)}")
            results = []
            for policy in POLICIES:
                last = policy == POLICIES[-1]
                results.append(await measure(fleet, policy, str(path), burst(), stay=last))
            _say(table(results))
            _say(f"({time.perf_counter() - started:.0f} s)")
    finally:
        await fleet.end()
    return 0


def burst(requests: int = 128, seed: int = 0) -> list[LoadRequest]:
    """Prompts of ten domains and languages in random order, with outputs of nearly one length: where lengths differ
    much, round-robin leaves one worker half empty, and small batches read few experts whoever routes."""
    rng = random.Random(seed)
    prompts = calibration_prompts(characters=120)
    rng.shuffle(prompts)
    return [
        LoadRequest(str(index), 0.0, prompts[index % len(prompts)], rng.randrange(60, 69)) for index in range(requests)
    ]


async def measure(
    fleet: LocalFleet, policy: str, signatures: str, requests: list[LoadRequest], *, stay: bool = False
) -> PolicyResult:
    """Send the burst through a router with this policy."""
    settings = RouterSettings(policy=policy, signature_model=signatures, poll=0.25)
    router = Router(settings, fleet.specs)
    await router.start()
    sock = listen("127.0.0.1", _free(_PORT))
    runner = web.AppRunner(create_app(router), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        while not router.ready:
            await asyncio.sleep(0.05)
        _say(f"{policy}: {len(requests)} requests, dashboard at {url}/ui")
        before = await _steps(fleet)
        samples: list[float] = []
        watch = asyncio.create_task(_watch(router, samples))
        # As many at once under every policy: the experts that a step reads depend on the size of its batch.
        records, seconds = await run_closed(requests, Target(url), CONCURRENCY)
        watch.cancel()
        after = await _steps(fleet)
        if stay:
            await _stay(url)
        return _result(policy, records, before, after, samples, seconds)
    finally:
        await runner.cleanup()
        await router.close()
        sock.close()


async def _watch(router: Router, samples: list[float]) -> None:
    """Imbalance of the decode workers' KV load, ten times a second, until cancelled."""
    while True:
        loads = [handle.state.kv_tokens for handle in router.fleet.ready("decode")]
        mean = statistics.fmean(loads) if loads else 0.0
        if mean > 0:
            samples.append((max(loads) - mean) / mean)
        await asyncio.sleep(0.1)


async def _steps(fleet: LocalFleet) -> tuple[float, float]:
    """(experts read, steps) of all decode workers so far."""
    read = steps = 0.0
    async with aiohttp.ClientSession() as session:
        for worker in fleet.workers:
            if worker.role != "decode":
                continue
            async with session.get(worker.spec.url + "/metrics") as answer:
                found = read_metrics(await answer.text())
            read += found.get("active_sum", 0.0)
            steps += found.get("steps", 0.0)
    return read, steps


def _result(
    policy: str,
    records: list[RequestRecord],
    before: tuple[float, float],
    after: tuple[float, float],
    imbalances: list[float],
    seconds: float,
) -> PolicyResult:
    ttft = sorted(record.ttft for record in records if record.ttft is not None)
    tpot = sorted(record.tpot for record in records if record.tpot is not None)
    steps = after[1] - before[1]
    return PolicyResult(
        policy=policy,
        ok=sum(record.status == "ok" for record in records),
        requests=len(records),
        ttft_p90=_quantile(ttft, 0.9),
        tpot_p50=_quantile(tpot, 0.5),
        tpot_p99=_quantile(tpot, 0.99),
        active_experts=(after[0] - before[0]) / steps if steps else float("nan"),
        experts_per_token=(after[0] - before[0]) / max(1, sum(record.output_tokens for record in records)),
        imbalance=statistics.fmean(imbalances) if imbalances else float("nan"),
        tokens_per_second=sum(record.output_tokens for record in records) / seconds,
    )


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def table(results: list[PolicyResult]) -> str:
    """One line per policy, and what the figures say."""
    base = next((r for r in results if r.policy == "round-robin"), results[0])
    rows: list[list[Any]] = [
        [
            r.policy,
            f"{r.ok}/{r.requests}",
            f"{1000 * r.ttft_p90:.0f} ms",
            f"{1000 * r.tpot_p50:.1f} ms",
            f"{1000 * r.tpot_p99:.1f} ms",
            f"{r.active_experts:.2f}",
            f"{100 * (r.active_experts / base.active_experts - 1):+.1f} %",
            f"{r.experts_per_token:.2f}",
            f"{100 * (r.experts_per_token / base.experts_per_token - 1):+.1f} %",
            f"{100 * r.imbalance:.0f} %",
            f"{r.tokens_per_second:,.0f}",
        ]
        for r in results
    ]
    columns = [
        "policy", "answered", "TTFT p90", "TPOT p50", "TPOT p99", "experts / step", "against RR", "experts / token",
        "against RR", "KV imbalance", "tokens/s",
    ]  # fmt: skip
    return (
        "\n" + markdown_table(columns, rows) + "\n\n"
        f"Experts read is a count, per layer of the decode workers; the paper's ELDR reads {_PAPER_FEWER:.0f} % fewer "
        "on\n48 layers of 128 experts with up to 16 workers. Latencies are of processes that share this machine."
    )


def _free(port: int) -> int:
    """The usual port if nobody has it, else any."""
    try:
        listen("127.0.0.1", port).close()
    except ConfigError:
        return 0
    return port


async def _stay(url: str) -> None:
    if os.environ.get("DEMO_EXIT") == "1" or not sys.stdin.isatty():
        return
    _say(f"the fleet stays up: {url}/ui shows it, {url}/generate answers; press Enter to end it")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


def _say(text: str) -> None:
    print(text, flush=True)
