"""Time of one experts layer under brownout against Transformers' `grouped_mm`, in one run.

    python benchmarks/experts_layer.py            # CPU: 64 experts of 1024 x 512, bf16
    python benchmarks/experts_layer.py --device cuda --experts 128 --hidden 2048 --intermediate 768

Prints milliseconds and experts read per threshold and batch, and the ratio to the stock kernel. The claim of the paper
behind it: step time follows the number of distinct experts read.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from common import interleaved, median_ms, write_result
from transformers import Qwen2MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeForCausalLM

import moe_opt
from moe_opt.modeling.auto import MoEOptimizedForCausalLM


def make_layer(args: argparse.Namespace) -> tuple[Any, Any]:
    """(model, experts module): one MoE layer; what surrounds it is as small as can be."""
    config = Qwen2MoeConfig(
        vocab_size=8, hidden_size=args.hidden, moe_intermediate_size=args.intermediate,
        shared_expert_intermediate_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=1, num_experts=args.experts, num_experts_per_tok=args.top_k,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Qwen2MoeForCausalLM = MoEOptimizedForCausalLM.from_config(config, dtype=torch.bfloat16).to(args.device)
    moe_opt.attach_united_experts(model, moe_opt.UnitedExperts.from_average(model, ways=args.ways))
    return model, model.moe_opt.layers[0][1]


def routing(args: argparse.Namespace, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states and a mildly skewed top-k, as real routers give: some experts hot, most cold."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, args.hidden, generator=generator).to(torch.bfloat16)
    logits = torch.randn(tokens, args.experts, generator=generator) + args.skew * torch.randn(
        args.experts, generator=generator
    )
    weights, ids = logits.softmax(-1).topk(args.top_k)
    return hidden.to(args.device), ids.to(args.device), weights.to(torch.bfloat16).to(args.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--ways", type=int, default=8)
    parser.add_argument("--skew", type=float, default=0.5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()

    model, module = make_layer(args)
    runtime = model.moe_opt
    rows = []
    print(f"{'tokens':>6} {'threshold':>9} {'experts':>8} {'ms':>8} {'stock ms':>9} {'speed-up':>9}")
    for tokens in args.batches:
        hidden, ids, weights = routing(args, tokens)
        stock = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

        def stock_run(hidden: Any = hidden, ids: Any = ids, weights: Any = weights, stock: Any = stock) -> None:
            stock(module, hidden, ids, weights)
            if args.device != "cpu":
                torch.cuda.synchronize()

        for threshold in args.thresholds:

            def ours(hidden: Any = hidden, ids: Any = ids, weights: Any = weights) -> None:
                runtime.run_layer(0, module, hidden, ids, weights)
                if args.device != "cpu":
                    torch.cuda.synchronize()

            runtime.set_brownout(threshold=threshold)
            runtime._before_forward(module, (), {"input_ids": SimpleNamespace(shape=(1, tokens))})
            with torch.inference_mode():
                runtime.run_layer(0, module, hidden, ids, weights)
                experts_read = int(runtime.last_step.active_experts[0])
                seconds = interleaved({"stock": stock_run, "ours": ours}, repeats=args.repeats)
            mine, theirs = median_ms(seconds["ours"]), median_ms(seconds["stock"])
            rows.append(
                {
                    "tokens": tokens, "slots": tokens * args.top_k, "threshold": threshold,
                    "experts_read": experts_read, "ms": round(mine, 4), "stock_ms": round(theirs, 4),
                    "speedup": round(theirs / mine, 3),
                }
            )  # fmt: skip
            print(f"{tokens:>6} {threshold:>9} {experts_read:>8} {mine:>8.3f} {theirs:>9.3f} {theirs / mine:>8.2f}x")
    name = "experts_layer" if args.device == "cpu" else f"experts_layer_{args.device}"
    shape = {k: getattr(args, k) for k in ("experts", "hidden", "intermediate", "top_k", "ways")}
    write_result(name, {"shape": {**shape, "dtype": "bfloat16"}, "rows": rows})


if __name__ == "__main__":
    main()
