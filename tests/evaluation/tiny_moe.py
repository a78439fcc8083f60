"""The sentences and the tiny Qwen2-MoE that the evaluation tests run on."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING

from moe_opt import MoEOptimizedForCausalLM

SENTENCES = [
    f"The {animal} {verb} over the {colour} {place} and then sleeps."
    for animal in ("fox", "dog", "cat", "owl")
    for verb in ("jumps", "runs", "flies")
    for colour in ("red", "green", "grey")
    for place in ("fence", "river", "roof")
]


def build_model(vocab: int) -> Any:
    """Weights large enough that experts differ and the router decides."""
    config = CONFIG_MAPPING["qwen2_moe"](
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = MoEOptimizedForCausalLM.from_config(config, moe_opt=True, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.eval()


def train(model: Any, ids: torch.Tensor, steps: int = 40) -> None:
    """A few steps on the rows [R, S], so that some tokens are predicted right and losses mean something."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
