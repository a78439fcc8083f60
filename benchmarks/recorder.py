"""What recording costs: forward passes of the demo model with and without `rt.record`, taking turns in one run.

    python benchmarks/recorder.py [--model PATH]

The bound is 3 % of a forward pass.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from common import interleaved, write_result
from transformers import AutoModelForCausalLM

import moe_opt  # noqa: F401

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo_model"
SHAPES = ((1, 128), (8, 256), (32, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    stock = AutoModelForCausalLM.from_pretrained(args.model)
    ours = AutoModelForCausalLM.from_pretrained(args.model, moe_opt=True)
    rows = []
    print(f"{'batch':>6} {'tokens':>7} {'stock ms':>9} {'moe_opt':>9} {'recording':>10}")
    with torch.inference_mode():
        for batch, length in SHAPES:
            ids = torch.randint(3, 8000, (batch, length), generator=torch.Generator().manual_seed(0))

            def run(model: Any, ids: torch.Tensor = ids) -> None:
                model(input_ids=ids, logits_to_keep=1, use_cache=False)

            def recorded(ids: torch.Tensor = ids, batch: int = batch) -> None:
                with ours.moe_opt.record(num_requests=batch):
                    ours(input_ids=ids, logits_to_keep=1, use_cache=False)

            seconds = interleaved(
                {"stock": lambda: run(stock), "ours": lambda: run(ours), "recorded": recorded}, repeats=args.repeats
            )
            # The median of each turn's ratio: what slows one turn slows its neighbours too.
            turns = list(zip(seconds["stock"], seconds["ours"], seconds["recorded"], strict=True))
            loaded = statistics.median(o / s for s, o, _ in turns)
            recording = statistics.median(r / o for _, o, r in turns)
            stock_ms = 1e3 * statistics.median(seconds["stock"])
            rows.append(
                {
                    "batch": batch, "tokens": batch * length, "stock_ms": round(stock_ms, 3),
                    "moe_opt_over_stock": round(loaded, 4), "recording_over_moe_opt": round(recording, 4),
                }
            )  # fmt: skip
            print(f"{batch:>6} {batch * length:>7} {stock_ms:>9.2f} {loaded:>8.3f}x {recording:>9.3f}x")
    write_result("recorder", {"model": Path(args.model).name, "rows": rows})


if __name__ == "__main__":
    main()
