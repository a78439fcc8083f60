"""`moe-opt bench`: load a server and say how it kept its objectives."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from moe_opt.errors import ConfigError
from moe_opt.report.machine import describe_machine
from moe_opt.serving.load_prompts import PromptPool, load_texts, make_requests
from moe_opt.serving.load_report import plot_load, summarize_load, summary_lines, write_csv, write_json
from moe_opt.serving.loadgen import (
    LoadRequest,
    RequestRecord,
    Target,
    ThresholdWatch,
    check_target,
    run_closed,
    run_load,
)
from moe_opt.workloads import burst_profile_arrivals, gamma_arrivals, load_trace, rescale
from moe_opt.workloads.rows import TraceRequest

HELP = "load a running server and report latencies, throughput and kept objectives"
EXAMPLE = """
moe-opt bench --url http://127.0.0.1:8080 --rate 4 --requests 100
moe-opt bench --url http://127.0.0.1:8080 --burst 10:2,20:8,15:2 --slo-tpot 0.02 --out results/burst
moe-opt bench --url http://127.0.0.1:8080 --trace azure-conv --requests 200 --rate 3
moe-opt bench --url http://127.0.0.1:8000 --dialect openai --model my-model --concurrency 32 --requests 128
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("server")
    target.add_argument("--url", default="http://127.0.0.1:3000", help="address (default: %(default)s)")
    target.add_argument(
        "--dialect", choices=("tgi", "openai"), default="tgi", help="tgi: ours and TGI; openai: vLLM too"
    )
    target.add_argument("--model", default="tgi", help="model name in the OpenAI dialect (default: %(default)s)")
    target.add_argument("--api-key", help="sent as a bearer token")
    target.add_argument("--exact", action="store_true", help="ask for exact output, whatever the server's objectives")
    target.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer (default: %(default)s)")

    load = parser.add_argument_group("arrivals: one of")
    load.add_argument("--rate", type=float, help="requests per second, Poisson; with --trace, its pattern at this rate")
    load.add_argument("--burst", metavar="S:RATE,...", help="Poisson stages: seconds and requests per second of each")
    load.add_argument("--trace", help="replay arrivals and lengths of a trace: a name (azure-conv, ...) or a file")
    load.add_argument("--concurrency", type=int, help="closed loop: this many requests in flight, for capacity")
    load.add_argument("--cv", type=float, default=1.0, help="with --rate: burstiness of the gaps, 1 is Poisson")
    load.add_argument("--requests", type=int, help="how many (default: 100; with --burst: as the stages bring)")

    what = parser.add_argument_group("requests")
    what.add_argument("--prompts", help="JSONL with field prompt, text or inputs (default: the shared prompts)")
    what.add_argument("--prompt-tokens", type=int, default=128, help="without --trace (default: %(default)s)")
    what.add_argument("--output-tokens", type=int, default=64, help="without --trace (default: %(default)s)")
    what.add_argument("--stop-at-eos", action="store_true", help="let the model end early; else lengths are fixed")
    what.add_argument("--seed", type=int, default=0)

    report = parser.add_argument_group("report")
    report.add_argument("--slo-ttft", type=float, help="objective for the time to first token, seconds")
    report.add_argument("--slo-tpot", type=float, help="objective for the time per output token, seconds")
    report.add_argument("--out", help="folder for summary.json, requests.csv and load.png")
    report.add_argument("--no-plot", action="store_true", help="leave load.png out")


def run(args: argparse.Namespace) -> int:
    _check(args)
    summary, records, thresholds = asyncio.run(_bench(args))
    print("\n".join(summary_lines(summary)))
    if args.out is not None:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(folder / "requests.csv", records)
        command = shlex.join(["moe-opt", *sys.argv[1:]])
        write_json(folder / "summary.json", {"machine": describe_machine(command), **summary})
        if not args.no_plot:
            plot_load(
                folder / "load.png", {"run": records},
                thresholds={"run": thresholds} if thresholds else None,
                slo_tpot=args.slo_tpot, slo_ttft=args.slo_ttft,
            )  # fmt: skip
        print(f"written to {folder}")
    return 0 if summary["ok"] else 1


def _check(args: argparse.Namespace) -> None:
    kinds = [name for name in ("burst", "trace", "concurrency") if getattr(args, name) is not None]
    if args.rate is not None and "trace" not in kinds:
        kinds.append("rate")
    if len(kinds) != 1:
        given = ", ".join(f"--{kind}" for kind in kinds) or "none"
        raise ConfigError(f"give one of --rate, --burst, --trace and --concurrency, not {given}")
    for name in ("requests", "concurrency", "prompt_tokens", "output_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("timeout", "slo_ttft", "slo_tpot"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be a positive number of seconds, got {value}")


async def _bench(
    args: argparse.Namespace,
) -> tuple[dict[str, Any], list[RequestRecord], list[tuple[float, float, float]]]:
    target = Target(
        url=args.url, dialect=args.dialect, model=args.model, api_key=args.api_key,
        exact=args.exact, ignore_eos=not args.stop_at_eos, timeout=args.timeout,
    )  # fmt: skip
    await check_target(target)
    pool = await PromptPool.build(load_texts(args.prompts, args.seed), target, args.seed)
    rows, stages = plan_rows(args)
    requests = make_requests(rows, pool, max_total_tokens=await _max_total_tokens(target), stages=stages)
    watch = ThresholdWatch(target)
    watching = asyncio.create_task(watch.run())
    try:
        if args.concurrency is not None:
            records, _ = await run_closed(requests, target, args.concurrency)
        else:
            with tqdm(total=len(requests), desc="answered", disable=not sys.stderr.isatty()) as bar:

                def count(record: RequestRecord) -> None:
                    bar.update()

                records = await run_load(requests, target, on_done=count)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    summary = summarize_load(records, slo_ttft=args.slo_ttft, slo_tpot=args.slo_tpot)
    if watch.samples:
        summary["lowest_threshold"] = {
            "prefill": min(sample[1] for sample in watch.samples),
            "decode": min(sample[2] for sample in watch.samples),
        }
    return summary, records, watch.samples


def plan_rows(args: argparse.Namespace) -> tuple[list[TraceRequest], Sequence[str]]:
    """Arrivals and lengths, and the stage of each row of a burst."""
    if args.trace is not None:
        rows = load_trace(args.trace, limit=args.requests or 100, seed=args.seed)
        start = rows[0].arrival
        if args.rate is not None:
            return rescale(rows, args.rate), ()
        return [_row(r.id, r.arrival - start, r.prompt_tokens, r.output_tokens) for r in rows], ()
    lengths = (args.prompt_tokens, args.output_tokens)
    if args.burst is not None:
        profile = parse_profile(args.burst)
        arrivals = burst_profile_arrivals(profile, seed=args.seed)[: args.requests]
        rows = [_row(str(i), float(t), *lengths) for i, t in enumerate(arrivals)]
        return rows, stage_labels(profile, [row.arrival for row in rows])
    count = args.requests or 100
    if args.concurrency is not None:
        return [_row(str(i), 0.0, *lengths) for i in range(count)], ()
    arrivals = gamma_arrivals(count, args.rate, cv=args.cv, seed=args.seed)
    return [_row(str(i), float(t), *lengths) for i, t in enumerate(arrivals)], ()


def _row(name: str, arrival: float, prompt_tokens: int, output_tokens: int) -> TraceRequest:
    return TraceRequest(id=name, arrival=arrival, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def parse_profile(text: str) -> list[tuple[float, float]]:
    """ "10:2,20:8" -> [(10.0, 2.0), (20.0, 8.0)]."""
    profile = []
    for part in text.split(","):
        seconds, _, rate = part.partition(":")
        try:
            profile.append((float(seconds), float(rate)))
        except ValueError:
            raise ConfigError(f"--burst: {part!r} is not SECONDS:RATE, for instance 10:2,20:8,15:2") from None
    return profile


def stage_labels(profile: Sequence[tuple[float, float]], arrivals: Sequence[float]) -> list[str]:
    """ "1: 2/s", "2: 8/s", ... by arrival time."""
    ends, end = [], 0.0
    for seconds, _ in profile:
        end += seconds
        ends.append(end)
    labels = []
    for arrival in arrivals:
        index = next((i for i, stop in enumerate(ends) if arrival < stop), len(ends) - 1)
        labels.append(f"{index + 1}: {profile[index][1]:g}/s")
    return labels


async def _max_total_tokens(target: Target) -> int | None:
    """What the server says it takes (TGI's /info), None if it does not say."""
    timeout = aiohttp.ClientTimeout(total=10)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError):
        async with (
            aiohttp.ClientSession(headers=target.headers, timeout=timeout) as session,
            session.get(target.url.rstrip("/") + "/info") as response,
        ):
            return int((await response.json())["max_total_tokens"])
    return None


__all__ = ["EXAMPLE", "HELP", "LoadRequest", "add_arguments", "parse_profile", "plan_rows", "run", "stage_labels"]
