"""Throughput against request rate, exact and at (2, 0), (4, 0.2), (8, 0.4): BrownoutServe's Figs. 8 and 9.

The demo model with widened experts (`moe_opt.demo.widen`), one server for all settings. Rates are multiples of the
exact capacity, measured first. "unfused" is the exact model with its experts in a loop (`--experts-kernels eager`);
brownout always runs the grouped product, so it has no unfused form here.

    python benchmarks/throughput_rate.py
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from common import write_result

from moe_opt.demo.widen import widen_experts
from moe_opt.serving.burst import BurstPlan, burst_requests, measure_capacity, run_burst, set_brownout
from moe_opt.serving.load_prompts import PromptPool, load_texts
from moe_opt.serving.load_report import summarize_load
from moe_opt.serving.loadgen import Target
from moe_opt.serving.local_server import LocalServer

ROOT = Path(__file__).resolve().parent.parent
SETTINGS: tuple[tuple[str, int, float], ...] = (("exact", 8, 1.0), ("(2, 0)", 2, 0.0), ("(4, 0.2)", 4, 0.2),
                                                ("(8, 0.4)", 8, 0.4))  # fmt: skip


async def sweep(
    url: str, args: argparse.Namespace, settings: tuple[tuple[str, int, float], ...], capacity: float | None
):
    """tokens/s and p50 TPOT by setting and rate; returns them with the exact capacity."""
    target = Target(url=url)
    pool = await PromptPool.build(load_texts(None), target)
    plan = BurstPlan(concurrency=args.batch, output_tokens=args.output_tokens)
    await measure_capacity(target, pool, plan, rounds=0.5)  # warm
    if capacity is None:
        capacity = (await measure_capacity(target, pool, plan)).requests_per_second
    figures: dict[str, dict[str, Any]] = {}
    for multiple in args.rates:  # settings take turns, so that a busy machine slows all of them alike
        own = dataclasses.replace(plan, stages=(("load", args.seconds, multiple),))
        for name, ways, threshold in settings:
            await set_brownout(target, ways=ways, threshold=threshold)
            run = await run_burst(target, burst_requests(pool, own, capacity))
            summary = summarize_load(run.records)
            figures.setdefault(name, {})[str(multiple)] = {
                key: summary[key] for key in ("requests", "output_tokens_per_second", "requests_per_second", "tpot")
            }
            print(f"{name:<10} {multiple:.2f}x  {summary['output_tokens_per_second']:8.1f} tokens/s", flush=True)
    return figures, capacity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "demo_model"))
    parser.add_argument("--united", default=str(ROOT / "examples" / "demo_model" / "united"))
    parser.add_argument("--neurons", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals per setting and rate")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0], help="multiples of capacity")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wide = str(widen_experts(args.model, args.united, Path(folder) / "wide", args.neurons))
        flags = ["--model-id", wide, "--united-experts", wide, "--ways", "8", "--max-batch-size", str(args.batch)]
        flags += ["--max-concurrent-requests", "4096", "--max-total-tokens", "512", "--max-batch-prefill-tokens", "64"]
        with LocalServer(*flags) as server:
            fused, capacity = asyncio.run(sweep(server.url, args, SETTINGS, None))
        with LocalServer(*flags, "--experts-kernels", "eager") as server:
            unfused, _ = asyncio.run(sweep(server.url, args, SETTINGS[:1], capacity))
    highest = str(max(args.rates))
    exact = fused["exact"][highest]["output_tokens_per_second"]
    gains = {name: rates[highest]["output_tokens_per_second"] / exact for name, rates in fused.items()}
    print("gain over exact at the highest rate:", {name: round(gain, 2) for name, gain in gains.items()})
    figures = {"exact_capacity_requests_per_second": capacity, "fused": fused, "unfused": unfused, "gain": gains}
    write_result("throughput_rate", {**figures, "settings": {k: v for k, v in vars(args).items() if k[0] not in "mu"}})


if __name__ == "__main__":
    main()
