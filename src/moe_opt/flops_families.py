"""How each model family is built: which matrices a token meets, what is cached, what is stored.

Readers for the kinds of attention and feed-forward layers, one reader per family on top of them, and their
table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_opt.errors import ConfigError, UnsupportedModelError
from moe_opt.flops_defaults import DEFAULTS

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Attention:
    """One layer's attention. "macs" are multiply-adds."""

    macs: int  # per token, in linear layers
    pair_macs: int  # per query-key pair: scores and values, over all heads
    kv_values: int  # elements that one token leaves in the KV cache
    params: int  # with biases, norms and sinks
    window: int | None = None  # keys that a query sees at most, itself included
    # Latent attention (MLA) alone:
    latent_values: int = 0  # elements per token if the latent is cached instead
    expansion_macs: int = 0  # per cached token, to expand its latent (part of `macs` for new ones)
    absorbed_pair_macs: int = 0  # per pair in latent space


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Feed-forward counts are 0 where a layer lacks the part."""

    attention: Attention
    norm_params: int
    dense_macs: int = 0  # per token; equals its parameters (no biases in these families)
    shared_macs: int = 0  # shared experts and their gate, likewise
    router_macs: int = 0
    router_params: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_macs: int = 0  # of one routed expert
    expert_params: int = 0  # with biases
    extra_macs: int = 0  # gemma4's per-layer inputs

    @property
    def token_macs(self) -> int:
        """Multiply-adds of one token in this layer's matrices."""
        feed_forward = self.dense_macs + self.shared_macs + self.router_macs + self.top_k * self.expert_macs
        return self.attention.macs + feed_forward + self.extra_macs


@dataclass(frozen=True)
class Architecture:
    """A whole language model."""

    model_type: str
    layers: tuple[Layer, ...]
    embedding_params: int
    head_macs: int  # lm_head, per position
    tied: bool  # lm_head shares the embedding's weights
    norm_params: int  # outside the layers
    extra_macs: int = 0  # per token, outside the layers


def read_architecture(fields: Fields) -> Architecture:
    """The architecture behind a config's fields.

    Raises:
        UnsupportedModelError: a family that is not in `FAMILIES`.
        ConfigError: a size is missing, or makes no sense.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("the config has no model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"FLOPs of {model_type!r} models are not known; known families: {', '.join(sorted(FAMILIES))}"
        )
    reader = FAMILIES[model_type]
    given = {key: value for key, value in fields.items() if value is not None or key in _NULLABLE}
    names = [name for name in _EXPERT_NUMBERS if name in given]
    if names:  # Transformers takes each of the three for any of them (`attribute_map`)
        given |= {name: given.get(name, given[names[0]]) for name in _EXPERT_NUMBERS}
    known = {**DEFAULTS[model_type], **given}
    sizes = _Sizes(known, model_type)
    try:
        layers = tuple(reader(sizes, index) for index in range(sizes["num_hidden_layers"]))
    except (TypeError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(f"this {model_type} config makes no sense: {error}") from error
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    embedding, norms, extra = vocabulary * hidden, hidden, 0
    per_layer_input = known.get("hidden_size_per_layer_input") or 0
    if per_layer_input:
        width = len(layers) * per_layer_input
        embedding += sizes["vocab_size_per_layer_input"] * width
        extra = hidden * width
        norms += per_layer_input
    return Architecture(
        model_type=model_type,
        layers=layers,
        embedding_params=embedding,
        head_macs=vocabulary * hidden,
        tied=bool(known["tie_word_embeddings"]),
        norm_params=norms,
        extra_macs=extra,
    )


class _Sizes:
    """A config's fields with their defaults; `sizes[name]` is a whole number of at least 0, or an error."""

    def __init__(self, fields: dict[str, Any], model_type: str):
        self.fields = fields
        self.model_type = model_type

    def __getitem__(self, name: str) -> int:
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"this {self.model_type} config needs a whole number for {name}, got {value!r}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    @property
    def head_dim(self) -> int:
        if self.fields.get("head_dim") is not None:
            return self["head_dim"]
        return self["hidden_size"] // self["num_attention_heads"]

    @property
    def kv_heads(self) -> int:
        return self["num_key_value_heads" if self.get("num_key_value_heads") else "num_attention_heads"]


def _grouped_attention(
    sizes: _Sizes,
    *,
    qkv_bias: bool,
    output_bias: bool,
    norm_params: int = 0,
    window: int | None = None,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    projected: int = 2,
) -> Attention:
    """Multi-head attention with grouped keys and values.

    `projected` counts the KV projections: 2, or 1 where values are the keys, or 0 where another layer's are
    used.
    """
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    dim = sizes.head_dim if head_dim is None else head_dim
    groups = sizes.kv_heads if kv_heads is None else kv_heads
    query, key = heads * dim, groups * dim
    macs = hidden * (2 * query + projected * key)
    biases = (query + projected * key) * qkv_bias + hidden * output_bias
    cached = 2 * key if projected else 0
    return Attention(
        macs=macs,
        pair_macs=2 * query,
        kv_values=cached,
        latent_values=cached,
        params=macs + biases + norm_params,
        window=window or None,
    )


def _latent_attention(sizes: _Sizes) -> Attention:
    """DeepSeek's multi-head latent attention (MLA)."""
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    rank, rope = sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    nope, value = sizes["qk_nope_head_dim"], sizes["v_head_dim"]
    score = nope + rope
    query_rank = sizes.fields.get("q_lora_rank")
    if query_rank is None:
        query, query_norm = hidden * heads * score, 0
    else:
        query, query_norm = hidden * query_rank + query_rank * heads * score, query_rank
    expansion = rank * heads * (nope + value)
    macs = query + hidden * (rank + rope) + expansion + heads * value * hidden
    biases = (query_norm + rank + rope + hidden) * bool(sizes.get("attention_bias"))
    return Attention(
        macs=macs,
        pair_macs=heads * (score + value),
        kv_values=heads * (score + value),
        latent_values=rank + rope,
        params=macs + biases + query_norm + rank,
        expansion_macs=expansion,
        absorbed_pair_macs=heads * (2 * rank + rope),
    )


def _experts(sizes: _Sizes, width: int, number: str, chosen: str = "num_experts_per_tok") -> dict[str, int]:
    """Router and routed experts of gate, up and down projections, `width` wide."""
    hidden, experts, top_k = sizes["hidden_size"], sizes[number], sizes[chosen]
    if not 1 <= top_k <= experts:
        raise ConfigError(f"{chosen} must lie in 1 ... {experts}, got {top_k}")
    return {
        "router_macs": experts * hidden,
        "router_params": experts * hidden,
        "num_experts": experts,
        "top_k": top_k,
        "expert_macs": 3 * hidden * width,
        "expert_params": 3 * hidden * width,
    }


def _swiglu(sizes: _Sizes, width: int) -> int:
    return 3 * sizes["hidden_size"] * width


def _qwen_moe_layer(sizes: _Sizes, index: int) -> bool:
    sparse = (index + 1) % sizes["decoder_sparse_step"] == 0
    return index not in sizes.get("mlp_only_layers", []) and sizes["num_experts"] > 0 and sparse


def _qwen2_moe(sizes: _Sizes, index: int) -> Layer:
    window = None
    if sizes.get("use_sliding_window"):
        types = sizes.get("layer_types")
        sliding = (
            types[index] == "sliding_attention"
            if types
            else bool((index + 1) % 2) and index < sizes["max_window_layers"]
        )
        window = sizes["sliding_window"] if sliding else None
    attention = _grouped_attention(sizes, qkv_bias=bool(sizes.get("qkv_bias")), output_bias=False, window=window)
    norms = 2 * sizes["hidden_size"]
    if not _qwen_moe_layer(sizes, index):
        return Layer(attention, norms, dense_macs=_swiglu(sizes, sizes["intermediate_size"]))
    shared = _swiglu(sizes, sizes["shared_expert_intermediate_size"]) + sizes["hidden_size"]  # with its gate
    return Layer(attention, norms, shared_macs=shared, **_experts(sizes, sizes["moe_intermediate_size"], "num_experts"))


def _qwen3_moe(sizes: _Sizes, index: int) -> Layer:
    bias = bool(sizes.get("attention_bias"))
    attention = _grouped_attention(
        sizes,
        qkv_bias=bias,
        output_bias=bias,
        norm_params=2 * sizes.head_dim,
        window=sizes.get("sliding_window") if sizes.get("use_sliding_window") else None,
    )
    norms = 2 * sizes["hidden_size"]
    if not _qwen_moe_layer(sizes, index):
        return Layer(attention, norms, dense_macs=_swiglu(sizes, sizes["intermediate_size"]))
    return Layer(attention, norms, **_experts(sizes, sizes["moe_intermediate_size"], "num_experts"))


def _mixtral(sizes: _Sizes, index: int) -> Layer:
    attention = _grouped_attention(sizes, qkv_bias=False, output_bias=False, window=sizes.get("sliding_window"))
    experts = _experts(sizes, sizes["intermediate_size"], "num_local_experts")
    return Layer(attention, 2 * sizes["hidden_size"], **experts)


def _olmoe(sizes: _Sizes, index: int) -> Layer:
    bias = bool(sizes.get("attention_bias"))
    hidden = sizes["hidden_size"]
    key_norm = hidden // sizes["num_attention_heads"] * sizes.kv_heads
    attention = _grouped_attention(sizes, qkv_bias=bias, output_bias=bias, norm_params=hidden + key_norm)
    return Layer(attention, 2 * hidden, **_experts(sizes, sizes["intermediate_size"], "num_experts"))


def _granitemoe(sizes: _Sizes, index: int) -> Layer:
    bias = bool(sizes.get("attention_bias"))
    attention = _grouped_attention(sizes, qkv_bias=bias, output_bias=bias)
    experts = _experts(sizes, sizes["intermediate_size"], "num_local_experts")
    return Layer(attention, 2 * sizes["hidden_size"], **experts)


def _minimax_m2(sizes: _Sizes, index: int) -> Layer:
    norms = (sizes["num_attention_heads"] + sizes.kv_heads) * sizes.head_dim
    attention = _grouped_attention(sizes, qkv_bias=False, output_bias=False, norm_params=norms)
    experts = _experts(sizes, sizes["intermediate_size"], "num_local_experts")
    return Layer(attention, 2 * sizes["hidden_size"], **experts)


def _gpt_oss(sizes: _Sizes, index: int) -> Layer:
    bias = bool(sizes.get("attention_bias"))
    types = sizes.get("layer_types")
    sliding = types[index] == "sliding_attention" if types else index % 2 == 0
    attention = _grouped_attention(
        sizes,
        qkv_bias=bias,
        output_bias=bias,
        norm_params=sizes["num_attention_heads"],  # the attention sinks
        window=sizes.get("sliding_window") if sliding else None,
    )
    width = sizes["intermediate_size"]
    experts = _experts(sizes, width, "num_local_experts")
    experts["router_params"] += experts["num_experts"]
    experts["expert_params"] += 2 * width + sizes["hidden_size"]
    return Layer(attention, 2 * sizes["hidden_size"], **experts)


def _with_dense_start(sizes: _Sizes, index: int, attention: Attention) -> Layer:
    """DeepSeek and GLM: the first layers are dense, the others have routed and shared experts."""
    norms = 2 * sizes["hidden_size"]
    if index < sizes["first_k_dense_replace"]:
        return Layer(attention, norms, dense_macs=_swiglu(sizes, sizes["intermediate_size"]))
    width = sizes["moe_intermediate_size"]
    shared = _swiglu(sizes, width * sizes.get("n_shared_experts", 0))
    return Layer(attention, norms, shared_macs=shared, **_experts(sizes, width, "n_routed_experts"))


def _deepseek(sizes: _Sizes, index: int) -> Layer:
    return _with_dense_start(sizes, index, _latent_attention(sizes))


def _glm4_moe(sizes: _Sizes, index: int) -> Layer:
    norms = 2 * sizes.head_dim if sizes.get("use_qk_norm") else 0
    bias = bool(sizes.get("attention_bias"))
    attention = _grouped_attention(sizes, qkv_bias=bias, output_bias=False, norm_params=norms)
    return _with_dense_start(sizes, index, attention)


def _gemma4_text(sizes: _Sizes, index: int) -> Layer:
    if sizes.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError("FLOPs of gemma4 models with bidirectional attention are not known")
    layers, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    types = list(sizes.get("layer_types") or [])
    if not types:
        types = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)]
    full = types[index] == "full_attention" or index == layers - 1  # the last layer is always full
    # What differs in full layers: written layer by layer, or in the fields of the published configs.
    own = sizes.get("per_layer_config")
    if own is None:
        same_kv = bool(sizes.get("attention_k_eq_v"))
        own = {"head_dim": sizes.get("global_head_dim", 512)} if full else {}
        if full and same_kv and sizes.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = sizes["num_global_key_value_heads"]
    else:
        own = own.get(str(index), own.get(index, {}))
    dim = own.get("head_dim", sizes.head_dim)
    borrows = index >= layers - sizes["num_kv_shared_layers"]  # keys and values of an earlier layer
    bias = bool(sizes.get("attention_bias"))
    attention = _grouped_attention(
        sizes,
        qkv_bias=bias,
        output_bias=bias,
        norm_params=dim if borrows else 2 * dim,
        window=None if full else sizes["sliding_window"],
        head_dim=dim,
        kv_heads=own.get("num_key_value_heads", sizes["num_key_value_heads"]),
        projected=0 if borrows else 1 if full and sizes.get("attention_k_eq_v") else 2,
    )
    doubled = 2 if sizes.get("use_double_wide_mlp") and borrows else 1
    parts: dict[str, int] = {"dense_macs": _swiglu(sizes, doubled * sizes["intermediate_size"])}
    norms = 4 * hidden
    if sizes.get("enable_moe_block"):
        parts |= _experts(sizes, sizes["moe_intermediate_size"], "num_experts", "top_k_experts")
        parts["router_params"] += hidden + parts["num_experts"]  # input scale, scale per expert
        norms += 3 * hidden
    per_layer_input = sizes.get("hidden_size_per_layer_input", 0)
    if per_layer_input:
        parts["extra_macs"] = 2 * hidden * per_layer_input
        norms += hidden
    return Layer(attention, norms, **parts)


_NULLABLE = frozenset({"head_dim", "num_key_value_heads", "q_lora_rank", "sliding_window", "n_shared_experts"})
"""Fields whose null is a value: "derive it", or "without"."""

_EXPERT_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts")

Reader = Callable[[_Sizes, int], Layer]

FAMILIES: dict[str, Reader] = {
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "granitemoe": _granitemoe,
    "minimax_m2": _minimax_m2,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4_moe,
    "gemma4_text": _gemma4_text,
}
"""model_type -> reader of one layer."""
