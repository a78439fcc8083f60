"""Tiny random models of every family that the tests cover: real classes, few weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

VOCAB = 96

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}

# family -> what its config needs beyond _SMALL: 8 routed experts, top-2 (or the family's own rule)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "deepseek_v2": {
        **_MLA, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "topk_method": "greedy", "num_key_value_heads": 4,
    },
    "deepseek_v3": {
        **_MLA, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 2, "num_key_value_heads": 4, "head_dim": 8,
    },
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma4_text": {
        "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16, "enable_moe_block": True, "head_dim": 8,
        "global_head_dim": 8, "sliding_window": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm4_moe": {
        "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 8,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 8,
    },
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_intermediate_size": 16, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 2,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 8},
    "lfm2_moe": {
        "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "nemotron_h": {
        "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "head_dim": 8,
        "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1, "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16, "conv_kernel": 4,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
    },
}  # fmt: skip


def make_config(family: str, **overrides: Any) -> PretrainedConfig:
    settings = {**_SMALL, **FAMILIES[family], **overrides}
    if family == "nemotron_h":
        settings.pop("num_hidden_layers")
    return CONFIG_MAPPING[family](**settings)


@functools.cache
def _state(family: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family), dtype=torch.float32)
    state = model.state_dict()
    generator = torch.Generator().manual_seed(1)
    for value in state.values():
        if value.is_floating_point() and value.dim() >= 2:  # the 0.02 of the library leaves routers undecided
            value.copy_(torch.randn(value.shape, generator=generator) * (1.0 / value.shape[-1] ** 0.5))
    return state


def make_stock(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A stock model with weights that depend on the family alone."""
    model = AutoModelForCausalLM.from_config(make_config(family), dtype=torch.float32)
    model.load_state_dict(_state(family))
    return model.to(dtype).eval()


def make_batch(batch: int = 3, length: int = 11, seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded token ids with their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
        ids[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}
