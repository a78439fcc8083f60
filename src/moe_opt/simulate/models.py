"""Models by their published configurations, and the sizes that a step cost needs from them.

The numbers are those of each model's `config.json` on the Hugging Face Hub; the keys are Transformers' names,
so that `FlopsModel.from_config` reads the same mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_opt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of one MoE model. Bytes are those of the published weights unless an argument says otherwise."""

    name: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int
    top_k: int
    expert_width: int  # moe_intermediate_size
    dense_layers: int = 0  # leading layers without experts
    dense_width: int = 0  # their intermediate size
    shared_width: int = 0  # intermediate size of all shared experts together
    kv_lora_rank: int = 0  # > 0: multi-head latent attention (MLA)
    rope_head_dim: int = 0
    q_lora_rank: int = 0
    v_head_dim: int = 0
    sliding_layers: int = 0  # layers whose KV stays within `sliding_window` tokens
    sliding_window: int = 0
    weight_bytes: float = 2.0  # bytes per parameter as published (bf16 2, fp8 1, mxfp4 0.53125)

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_layers - self.dense_layers

    def kv_bytes_per_token(self, kv_bytes: float = 2.0) -> float:
        """KV bytes that one more token adds to every later step; sliding layers are full and add none."""
        layers = self.num_layers - self.sliding_layers
        if self.kv_lora_rank:
            return layers * (self.kv_lora_rank + self.rope_head_dim) * kv_bytes
        return layers * 2 * self.num_kv_heads * self.head_dim * kv_bytes

    def expert_bytes(self) -> float:
        """Weights of one routed expert of one layer: gate, up and down projection."""
        return 3.0 * self.hidden_size * self.expert_width * self.weight_bytes

    def attention_parameters(self) -> float:
        """Attention weights of one layer."""
        h, heads = self.hidden_size, self.num_heads
        if self.kv_lora_rank:
            nope = self.head_dim
            query_in = self.q_lora_rank or h
            query = (h * self.q_lora_rank if self.q_lora_rank else 0) + query_in * heads * (nope + self.rope_head_dim)
            keys = h * (self.kv_lora_rank + self.rope_head_dim)
            keys += self.kv_lora_rank * heads * (nope + self.v_head_dim)
            return float(query + keys + heads * self.v_head_dim * h)
        return float(h * self.head_dim * (2 * heads + 2 * self.num_kv_heads))

    def dense_parameters(self) -> float:
        """Weights that every step reads whatever the router chooses: attention, shared experts, dense
        layers, head."""
        shared = self.moe_layers * (3.0 * self.shared_width + self.num_experts) * self.hidden_size
        dense = self.dense_layers * 3.0 * self.dense_width * self.hidden_size
        head = float(self.vocab_size * self.hidden_size)
        return self.num_layers * self.attention_parameters() + shared + dense + head

    def active_parameters(self) -> float:
        """Weights that one token is multiplied with."""
        routed = self.moe_layers * self.top_k * 3.0 * self.hidden_size * self.expert_width
        return self.dense_parameters() + routed

    def total_parameters(self) -> float:
        """All weights, embedding counted apart from the head."""
        routed = self.moe_layers * self.num_experts * 3.0 * self.hidden_size * self.expert_width
        return self.dense_parameters() + routed + self.vocab_size * self.hidden_size

    def decode_flops_per_token(self) -> float:
        """FLOPs of one decoded token without attention over its context (two per weight)."""
        return 2.0 * self.active_parameters()

    def attention_flops_per_context_token(self) -> float:
        """FLOPs that each token of context adds to a decoded token."""
        if self.kv_lora_rank:  # absorbed MLA: scores on rank + rope, values on rank
            return self.num_layers * 2.0 * self.num_heads * (2 * self.kv_lora_rank + self.rope_head_dim)
        return (self.num_layers - self.sliding_layers) * 4.0 * self.num_heads * self.head_dim

    def prefill_flops(self, suffix_tokens: int, cached_tokens: int = 0) -> float:
        """FLOPs to prefill `suffix_tokens` after `cached_tokens` (MoE-Prefill section 7.3): linear and
        attention.

        Self-attention within the suffix is causal (half of a square), attention to the cached prefix is a
        rectangle.
        """
        linear = self.decode_flops_per_token() * suffix_tokens
        pairs = suffix_tokens * (suffix_tokens + 1) / 2 + suffix_tokens * cached_tokens
        heads_flops = 4.0 * self.num_layers * self.num_heads * (self.v_head_dim or self.head_dim)
        return linear + heads_flops * pairs

    def config(self) -> dict[str, Any]:
        """The mapping under Transformers' names."""
        values: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_width,
            "intermediate_size": self.dense_width or self.expert_width,
            "first_k_dense_replace": self.dense_layers,
            "shared_expert_intermediate_size": self.shared_width,
        }
        if self.kv_lora_rank:
            values |= {
                "kv_lora_rank": self.kv_lora_rank,
                "q_lora_rank": self.q_lora_rank or None,
                "qk_rope_head_dim": self.rope_head_dim,
                "qk_nope_head_dim": self.head_dim,
                "v_head_dim": self.v_head_dim,
            }
        return values


_QWEN_VOCAB = 151936

MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            "qwen1.5-moe-a2.7b",
            "qwen2_moe",
            2048,
            24,
            16,
            16,
            128,
            _QWEN_VOCAB,
            60,
            4,
            1408,
            shared_width=5632,
        ),
        ModelSpec("qwen3-30b-a3b", "qwen3_moe", 2048, 48, 32, 4, 128, _QWEN_VOCAB, 128, 8, 768),
        ModelSpec("qwen3-235b-a22b", "qwen3_moe", 4096, 94, 64, 4, 128, _QWEN_VOCAB, 128, 8, 1536),
        ModelSpec(
            "deepseek-v3",
            "deepseek_v3",
            7168,
            61,
            128,
            128,
            128,
            129280,
            256,
            8,
            2048,
            dense_layers=3,
            dense_width=18432,
            shared_width=2048,
            kv_lora_rank=512,
            rope_head_dim=64,
            q_lora_rank=1536,
            v_head_dim=128,
            weight_bytes=1.0,
        ),
        ModelSpec(
            "deepseek-v2-lite",
            "deepseek_v2",
            2048,
            27,
            16,
            16,
            128,
            102400,
            64,
            6,
            1408,
            dense_layers=1,
            dense_width=10944,
            shared_width=2816,
            kv_lora_rank=512,
            rope_head_dim=64,
            v_head_dim=128,
        ),
        ModelSpec(
            "gpt-oss-20b",
            "gpt_oss",
            2880,
            24,
            64,
            8,
            64,
            201088,
            32,
            4,
            2880,
            sliding_layers=12,
            sliding_window=128,
            weight_bytes=0.53125,
        ),
        ModelSpec(
            "gpt-oss-120b",
            "gpt_oss",
            2880,
            36,
            64,
            8,
            64,
            201088,
            128,
            4,
            2880,
            sliding_layers=18,
            sliding_window=128,
            weight_bytes=0.53125,
        ),
        ModelSpec("mixtral-8x7b", "mixtral", 4096, 32, 32, 8, 128, 32000, 8, 2, 14336),
        ModelSpec("olmoe-1b-7b", "olmoe", 2048, 16, 16, 16, 128, 50304, 64, 8, 1024),
    )
}


def get_model(name: str) -> ModelSpec:
    """The preset called `name`; an unknown name lists the choices."""
    if name not in MODELS:
        raise ConfigError(f"unknown model preset {name!r}; choose one of: {', '.join(MODELS)}")
    return MODELS[name]
