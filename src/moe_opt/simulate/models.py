"""The papers' models by their published configurations (`config.json` on the Hugging Face Hub).

Sizes, bytes and FLOPs follow from them through `moe_opt.flops.FlopsModel`; keys and names are Transformers'.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from moe_opt.errors import ConfigError
from moe_opt.flops import FlopsModel

_QWEN3 = {"model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4}
_QWEN3 |= {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GPT_OSS = {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880}
_GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4}
_GPT_OSS |= {"sliding_window": 128, "quantization_config": {"quant_method": "mxfp4"}}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

MODELS: dict[str, dict[str, Any]] = {
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "qwen3-235b-a22b": _QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "deepseek-v3": _MLA
    | {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "quantization_config": {"quant_method": "fp8"},
    },
    "deepseek-v2-lite": _MLA
    | {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    },
    "gpt-oss-20b": _GPT_OSS
    | {
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gpt-oss-120b": _GPT_OSS
    | {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
}


@cache
def get_model(name: str) -> FlopsModel:
    """The preset called `name`, or the model of a `config.json` (or its folder) at that path.

    Raises:
        ConfigError: neither; the message lists the presets.
    """
    if name in MODELS:
        return FlopsModel.from_config(MODELS[name])
    if Path(name).exists():
        return FlopsModel.from_config(name)
    raise ConfigError(f"unknown model {name!r}: neither a path nor one of the presets {', '.join(MODELS)}")


def kv_heads(name: str) -> int:
    """Ways in which tensor parallelism can split a preset's KV cache: 1 for latent attention."""
    config = MODELS[name]
    return 1 if config.get("kv_lora_rank") else int(config["num_key_value_heads"])
