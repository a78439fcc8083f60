"""A burst above the exact and below the browned capacity, with and without SLO control (BrownoutServe V-D).

The demo model is served with its experts widened by zero neurons (`moe_opt.demo.widen`: same outputs), because reading
experts costs nothing in a model this small. Capacity and objective are measured first, in the same run: the objective
lies between the time per output token of a full exact and of a full browned batch.

    python benchmarks/burst.py
    python benchmarks/burst.py --ways 8 --neurons 2048
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gzip
import json
import math
import os
import random
import statistics
import tempfile
import zlib
from pathlib import Path
from typing import Any

from common import RESULTS, machine

from moe_opt.demo.widen import widen_experts
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
    tokens_by_threshold,
)
from moe_opt.serving.load_prompts import PromptPool, load_texts
from moe_opt.serving.load_report import plot_load, summarize_load
from moe_opt.serving.loadgen import Target
from moe_opt.serving.local_server import LocalServer

ROOT = Path(__file__).resolve().parent.parent
EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def mean_capacity(found: list[Capacity]) -> Capacity:
    return Capacity(*(statistics.mean(values) for values in zip(*map(dataclasses.astuple, found), strict=True)))


async def measure(url: str, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, BurstRun]]:
    target = Target(url=url)
    pool = await PromptPool.build(load_texts(None), target)
    plan = BurstPlan(concurrency=args.batch, output_tokens=args.output_tokens)
    await set_brownout(target, ways=args.ways, threshold=0.0)
    await measure_capacity(target, pool, plan, rounds=0.5)  # warm
    measured: dict[float, list[Capacity]] = {0.0: [], 1.0: []}
    for _ in range(args.calibrations):  # taking turns, so that a busy machine slows both alike
        for threshold, found in measured.items():
            await set_brownout(target, threshold=threshold)
            found.append(await measure_capacity(target, pool, plan, rounds=1.0))
    browned, exact = (mean_capacity(measured[threshold]) for threshold in (0.0, 1.0))
    gain = browned.requests_per_second / exact.requests_per_second
    slo = exact.gap ** (1 - args.depth) * browned.gap**args.depth
    multiple = min(1.5, gain**args.depth)
    print(
        f"exact   {exact}\nbrowned {browned}\ngain {gain:.2f}, objective {slo * 1000:.1f} ms, burst at {multiple:.2f}x"
    )
    plan = dataclasses.replace(
        plan,
        stages=(
            ("calm", args.calm, args.calm_load),
            ("burst", args.burst, multiple),
            ("after", args.after, args.calm_load),
        ),
    )
    requests = burst_requests(pool, plan, exact.requests_per_second)
    runs: dict[str, BurstRun] = {}
    await set_brownout(target, threshold=1.0)
    runs["without"] = await run_burst(target, requests)
    await set_brownout(target, slo_tpot=slo, threshold="slo")
    runs["with"] = await run_burst(target, requests, settle=15.0)
    await set_brownout(target, slo_tpot=0)

    start, end = args.calm + args.settling, args.calm + args.burst
    missed = {name: missed_share(run.records, slo, start, end) for name, run in runs.items()}
    result = {
        "exact_capacity": dataclasses.asdict(exact),
        "browned_capacity": dataclasses.asdict(browned),
        "capacity_gain": gain,
        "slo_tpot_seconds": slo,
        "stages": plan.stages,
        "settling_seconds": args.settling,
        "tokens_missing_objective_in_burst": missed,
        "threshold_back_at_1_seconds_after_burst": recovery_seconds(runs["with"].thresholds, end),
        "lowest_threshold": min((s[2] for s in runs["with"].thresholds), default=None),
        "token_share_by_threshold": dict(zip(map(str, EDGES), tokens_by_threshold(runs["with"], EDGES), strict=True)),
        "runs": {name: summarize_load(run.records, slo_tpot=slo) for name, run in runs.items()},
    }
    return result, runs


def decode_accuracy(model_dir: str, united: str, ways: int, batch: int, steps: int, batches: int) -> dict[str, float]:
    """Next-token accuracy on held-out text, decoded in batches as the server decodes: one token of each of `batch`
    texts a step, the true token fed back. By threshold, over `batches` such batches."""
    import torch
    from transformers import AutoTokenizer, DynamicCache

    from moe_opt import MoEOptimizedForCausalLM, UnitedExperts, attach_united_experts

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = MoEOptimizedForCausalLM.from_pretrained(model_dir, moe_opt=True).eval()
    attach_united_experts(model, UnitedExperts.from_pretrained(united, ways=ways))
    prefix = 32
    rows = []
    for path in sorted((Path(os.environ.get("MOE_OPT_DATA", "../shared/data")) / "corpus").glob("*.jsonl.gz")):
        found = 0
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)["text"]
                if zlib.crc32(text.encode()) % 20 != 0:
                    continue
                ids = tokenizer(text).input_ids[: prefix + steps + 1]
                if len(ids) == prefix + steps + 1:
                    rows.append(ids)
                    found += 1
                if found == math.ceil(batch * batches / 10):
                    break
    random.Random(0).shuffle(rows)  # domains mixed, as in the load
    parts = [torch.tensor(rows[at : at + batch]) for at in range(0, min(len(rows), batch * batches), batch)]
    accuracy = {}
    for threshold in EDGES:
        model.moe_opt.set_brownout(threshold=threshold, strategy="partial")
        right = total = 0
        for ids in parts:
            cache = DynamicCache()
            with torch.no_grad():
                model(ids[:, :prefix], past_key_values=cache)
                for step in range(prefix, prefix + steps):
                    logits = model(ids[:, step : step + 1], past_key_values=cache).logits[:, -1]
                    right += int((logits.argmax(-1) == ids[:, step + 1]).sum())
                    total += len(ids)
        accuracy[str(threshold)] = right / total
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "demo_model"))
    parser.add_argument("--united", default=str(ROOT / "examples" / "demo_model" / "united"))
    parser.add_argument("--ways", type=int, default=8)
    parser.add_argument("--neurons", type=int, default=1536, help="of a widened expert")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument(
        "--depth", type=float, default=0.4,
        help="how far objective and load lie from the exact (0) to the browned capacity (1), geometrically",
    )  # fmt: skip
    parser.add_argument("--calibrations", type=int, default=2, help="capacity measurements of each kind")
    parser.add_argument("--calm", type=float, default=10.0)
    parser.add_argument("--burst", type=float, default=30.0)
    parser.add_argument("--after", type=float, default=20.0)
    parser.add_argument("--calm-load", type=float, default=0.25, help="before and after, of the exact capacity")
    parser.add_argument("--settling", type=float, default=8.0, help="seconds of the burst that do not count")
    parser.add_argument("--headroom", type=float, default=0.85)
    parser.add_argument("--out", default=str(RESULTS / "burst.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wide = widen_experts(args.model, args.united, Path(folder) / "wide", args.neurons)
        flags = ["--model-id", str(wide), "--united-experts", str(wide), "--ways", str(args.ways)]
        flags += ["--max-batch-size", str(args.batch), "--max-concurrent-requests", "4096", "--max-total-tokens", "512"]
        flags += ["--max-batch-prefill-tokens", "64", "--slo-headroom", str(args.headroom)]
        flags += ["--dtype", "bfloat16", "--log-level", "info"]
        with LocalServer(*flags) as server:
            result, runs = asyncio.run(measure(server.url, args))
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    plot_load(
        out.with_suffix(".png"),
        {name: run.records for name, run in runs.items()},
        thresholds={"with": runs["with"].thresholds},
        slo_tpot=result["slo_tpot_seconds"],
    )
    result["settings"] = {k: v for k, v in vars(args).items() if k not in ("out", "model", "united")}
    out.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    # On the narrow model: same outputs, sooner.
    accuracy = decode_accuracy(args.model, args.united, args.ways, args.batch, steps=48, batches=16)
    shares = result["token_share_by_threshold"]
    over_run = sum(shares[edge] * accuracy[edge] for edge in shares)
    result["next_token_accuracy_by_threshold"] = accuracy
    result["next_token_accuracy_loss_over_run"] = 1 - over_run / accuracy["1.0"]
    out.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    for key in ("tokens_missing_objective_in_burst", "threshold_back_at_1_seconds_after_burst", "lowest_threshold",
                "next_token_accuracy_by_threshold", "next_token_accuracy_loss_over_run"):  # fmt: skip
        print(key, result[key])


if __name__ == "__main__":
    main()
