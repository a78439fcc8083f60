"""What the router costs: time to first token and CPU per chunk, beside a direct connection and beside vllm-router.

    python benchmarks/router_cost.py                                          # direct, and through our router
    python benchmarks/router_cost.py --vllm-router /path/to/bin/vllm-router   # and through vLLM's, same workers

TTFT: one request at a time, the three ways taking turns; the difference of the medians to the direct connection is
what a router adds. Chunk: 64 streams at once; CPU time of the router's process by the chunks that passed through it,
and how much later a chunk comes. The workers do prefill and decode themselves, so that only the way differs. The
hand-off between workers (`--prefill`/`--decode`) is measured apart: it computes a prompt elsewhere and moves its KV.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import aiohttp
from common import write_result

from moe_opt.serving.launcher import free_port
from moe_opt.serving.loadgen import LoadRequest, Target, run_closed

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def process(command: list[str], ready: str, timeout: float = 120.0) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + timeout
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(ready, timeout=2).status == 200:
                    break
            if started.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[0]} did not start")
            time.sleep(0.2)
        yield started
    finally:
        started.terminate()
        started.wait(30)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def ttft(session: aiohttp.ClientSession, url: str, number: int) -> float:
    """Seconds to the first chunk of a stream of four tokens."""
    body = {"model": str(MODEL), "prompt": f"{number} The old lighthouse keeper climbed", "max_tokens": 4,
            "temperature": 0, "stream": True, "ignore_eos": True}  # fmt: skip
    started = time.perf_counter()
    async with session.post(url + "/v1/completions", json=body) as answer:
        first = 0.0
        async for line in answer.content:
            if line.startswith(b"data:") and not first:
                first = time.perf_counter() - started
    return first


async def measure(
    ways: dict[str, str], pids: dict[str, int], repeats: int, streams: int, tokens: int
) -> dict[str, Any]:
    found: dict[str, Any] = {name: {} for name in ways}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    async with aiohttp.ClientSession() as session:
        for round_ in range(repeats + 10):
            for name, url in ways.items():
                seconds = await ttft(session, url, round_)
                if round_ >= 10:
                    samples[name].append(seconds)
    direct = statistics.median(samples["direct"])
    for name, values in samples.items():
        found[name]["ttft_p50_ms"] = 1e3 * statistics.median(values)
        found[name]["ttft_added_ms"] = 1e3 * (statistics.median(values) - direct)
    for name, url in ways.items():
        requests = [LoadRequest(str(i), 0.0, f"{i} A quiet morning in the", tokens) for i in range(streams)]
        target = Target(url, dialect="openai", model=str(MODEL))
        before = cpu_seconds(pids[name]) if name in pids else 0.0
        records, seconds = await run_closed(requests, target, streams)
        used = cpu_seconds(pids[name]) - before if name in pids else None
        chunks = sum(len(record.token_times) for record in records)
        gaps = [gap for record in records for gap in record.gaps]
        found[name].update(
            streams=streams, chunks=chunks, failed=sum(record.status != "ok" for record in records),
            tokens_per_second=chunks / seconds, gap_p50_ms=1e3 * statistics.median(gaps),
            cpu_us_per_chunk=None if used is None else 1e6 * used / chunks,
        )  # fmt: skip
    base = found["direct"]["gap_p50_ms"]
    for figures in found.values():
        figures["gap_added_ms"] = figures["gap_p50_ms"] - base
    return found


def main() -> None:
    global MODEL
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model")
    parser.add_argument("--vllm-router", help="its program (PyPI: vllm-router)")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192, help="of each stream; its set-up is shared by its chunks")
    args = parser.parse_args()
    MODEL = args.model
    worker, ours, theirs, split = free_port(), free_port(), free_port(), free_port()
    prefill = free_port()
    serve = [sys.executable, "-m", "moe_opt.serving.serve_command", "--model-id", str(args.model)]
    serve += ["--dtype", "float32", "--hostname", "127.0.0.1", "--max-batch-size", str(args.streams)]
    router = [sys.executable, "-m", "moe_opt.cli", "router", "--hostname", "127.0.0.1", "--log-level", "warning"]
    at = "http://127.0.0.1:{}".format
    with contextlib.ExitStack() as stack:
        stack.enter_context(process([*serve, "--role", "both", "--port", str(worker)], at(worker) + "/health"))
        stack.enter_context(process([*serve, "--role", "prefill", "--port", str(prefill)], at(prefill) + "/health"))
        ways, pids = {"direct": at(worker)}, {}
        for name, port, flags in (
            ("moe-opt router", ours, ["--both", at(worker)]),
            ("moe-opt router, prefill elsewhere", split, ["--prefill", at(prefill), "--decode", at(worker)]),
        ):
            command = [*router, "--port", str(port), *flags]
            pids[name] = stack.enter_context(process(command, at(port) + "/health")).pid
            ways[name] = at(port)
        if args.vllm_router:
            command = [args.vllm_router, "--worker-urls", at(worker), "--port", str(theirs), "--host", "127.0.0.1",
                       "--policy", "round_robin", "--log-level", "error"]  # fmt: skip
            pids["vllm-router"] = stack.enter_context(process(command, at(theirs) + "/health")).pid
            ways["vllm-router"] = at(theirs)
        found = asyncio.run(measure(ways, pids, args.repeats, args.streams, args.tokens))
    print("way                                 TTFT p50   added   CPU / chunk   chunk later by   tokens/s   failed")
    for name, f in found.items():
        cpu = "" if f["cpu_us_per_chunk"] is None else f"{f['cpu_us_per_chunk']:.0f} us"
        print(
            f"{name:34}  {f['ttft_p50_ms']:6.2f} ms {f['ttft_added_ms']:+6.2f}  {cpu:>10}"
            f"  {f['gap_added_ms']:+12.3f} ms  {f['tokens_per_second']:8,.0f}   {f['failed']}"
        )
    print("wanted of ours: below 1.5 ms, at most 40 us, below 0.15 ms")
    write_result("router_cost", found)


MODEL = Path()

if __name__ == "__main__":
    main()
