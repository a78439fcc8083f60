"""A model whose experts stay on disk: weights of the next layer arrive while this one computes.

python examples/stream_experts.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from moe_opt import MoEOptConfig, MoEOptimizedForCausalLM

MODEL = Path(__file__).parent / "demo_model"


def main() -> None:
    logging.disable_progress_bar()
    settings = MoEOptConfig(async_ep={"mode": "offload", "window": 1})
    model = MoEOptimizedForCausalLM.from_pretrained(MODEL, moe_opt=settings, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    stream = model.moe_opt.async_ep
    resident = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"in memory: {resident / 1e6:.1f} MB of weights and {stream.buffer_bytes / 1e6:.1f} MB of buffers")
    experts = model.moe_opt.num_layers * stream.buffer_bytes / 2
    print(f"streamed in every pass: {experts / 1e6:.1f} MB of experts")
    inputs = tokenizer(["The court held that the contract", "def add(a, b):"], padding=True, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    for text in tokenizer.batch_decode(out, skip_special_tokens=True):
        print(repr(text))
    print(f"{100 * stream.hidden_share:.0f} % of the transfer time was hidden behind computation")


if __name__ == "__main__":
    main()
