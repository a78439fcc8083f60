"""Weight streaming against accelerate's offload and against a model that is in memory, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/async_ep.py          # about two minutes

A random Qwen3-MoE of a few hundred MB on disk. "in memory" is the stock model, "accelerate" Transformers' disk offload
of the decoder layers (device_map), "window N" async_ep="offload". Forward passes of several sizes: where computing
takes longer than copying, streaming should cost nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import interleaved, median_ms, write_result
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.utils import logging

from moe_opt import MoEOptimizedForCausalLM

PAPER = "MoE-Prefill: 29.8-36.2 % MFU with gathered weights (H100s); no figure for disk offload on a CPU"


def make_checkpoint(folder: Path, layers: int) -> int:
    config = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=384,
        max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(p.numel() * 4 for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        size = make_checkpoint(Path(folder), args.layers)
        device_map: dict[str, Any] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu",
                                      "model.rotary_emb": "cpu"}  # fmt: skip
        for layer in range(args.layers):
            device_map[f"model.layers.{layer}"] = "disk"
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        offloaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map=device_map, offload_folder=f"{folder}/offload"
        ).eval()
        streamed = {
            window: MoEOptimizedForCausalLM.from_pretrained(
                folder, dtype=torch.float32, moe_opt={"async_ep": {"mode": "offload", "window": window}}
            ).eval()
            for window in (1, 2)
        }
        for tokens in (16, 256, 2048):
            ids = torch.randint(3, 1000, (max(1, tokens // 256), min(tokens, 256)))

            def run(model: Any, ids: torch.Tensor = ids) -> torch.Tensor:
                with torch.no_grad():
                    return model(ids, use_cache=False, logits_to_keep=1).logits

            assert torch.equal(run(streamed[1]), run(stock))
            variants = {
                "in memory": lambda: run(stock),
                "accelerate": lambda: run(offloaded),
                "window 1": lambda: run(streamed[1]),
                "window 2": lambda: run(streamed[2]),
            }
            for model in streamed.values():
                model.moe_opt.async_ep.reset_times()
            times = {k: median_ms(v) for k, v in interleaved(variants, repeats=args.repeats, warmup=1).items()}
            row = {
                "tokens": ids.numel(),
                "ms": {key: round(value, 1) for key, value in times.items()},
                "speedup_over_accelerate": round(times["accelerate"] / times["window 1"], 2),
                "of_in_memory": round(times["in memory"] / times["window 1"], 3),
                "hidden_share": round(streamed[1].moe_opt.async_ep.hidden_share, 3),
            }
            rows.append(row)
            print(row, flush=True)
    print(f"paper: {PAPER}")
    write_result("async_ep", {"model_bytes": size, "rows": rows, "paper": PAPER})


if __name__ == "__main__":
    main()
