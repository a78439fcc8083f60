"""FLOPs, parameters and bytes of an MoE language model, from its config alone.

Exact for the families in `FAMILIES`: the linear layers, the router, the top-k experts and the shared ones are
counted as PyTorch's `FlopCounterMode` counts them (two per multiply-add; biases, norms, softmax and rotations
are free), and attention as what a causal kernel must compute: the keys that each query may see, not the full
square.

No torch and no Transformers: a config object is read through its `to_dict`, a `config.json` as JSON.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from moe_opt.errors import ConfigError, UnsupportedModelError
from moe_opt.flops_families import FAMILIES, Architecture, read_architecture

# Bytes per element by the names that configs use.
_DTYPE_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
}
_MXFP4_BYTES = 4.25 / 8  # 32 values of 4 bits share one scale of 8
_MLA_CACHES = ("latent", "expanded")


@dataclass(frozen=True)
class FlopsModel:
    """The cost of running one model. Build it with `from_config`."""

    architecture: Architecture
    """Layer by layer: what is multiplied, cached and stored."""
    weight_bytes: float
    """Bytes per parameter outside the routed experts."""
    expert_weight_bytes: float
    """Bytes per parameter of the routed experts."""
    kv_value_bytes: float
    """Bytes per cached key or value element."""
    mla_cache: str
    """What a model with latent attention caches: "latent" (vLLM, Transformers) or "expanded" keys and values."""

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        weight_bytes: float | None = None,
        expert_weight_bytes: float | None = None,
        kv_value_bytes: float | None = None,
        mla_cache: str = "latent",
    ) -> FlopsModel:
        """Reads a model's sizes.

        Args:
            config: a Transformers config, a dict with the same keys, or the path of a `config.json` (or its
                folder). Keys that are missing have the family's default.
            weight_bytes: bytes per parameter; by default from `dtype` (2 without it) and fp8 quantisation.
            expert_weight_bytes: the same for routed experts; by default also from mxfp4 quantisation.
            kv_value_bytes: bytes per cached element; by default from `dtype`.
            mla_cache: "latent" caches the compressed vector of DeepSeek's attention and expands the keys and
                values of cached tokens in every forward pass; "expanded" caches them expanded. Other families
                ignore it.

        Raises:
            UnsupportedModelError: a family that is not in `FAMILIES`.
            ConfigError: not a config, or sizes that make no sense.
            OSError: the file cannot be read.
        """
        if mla_cache not in _MLA_CACHES:
            raise ConfigError(f"mla_cache must be one of {', '.join(_MLA_CACHES)}, got {mla_cache!r}")
        fields = _as_dict(config)
        text = fields.get("text_config")
        if text is not None:  # gemma4: the language model inside a multimodal one
            outer = fields
            fields = {**_as_dict(text)}
            fields.setdefault("model_type", f"{outer.get('model_type')}_text")
            for key in ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config"):
                if fields.get(key) is None and outer.get(key) is not None:
                    fields[key] = outer[key]
        architecture = read_architecture(fields)
        stored = _DTYPE_BYTES.get(
            str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch."), 2.0
        )
        weights, experts = _quantised_bytes(fields.get("quantization_config"), stored)
        values = {
            "weight_bytes": weights if weight_bytes is None else weight_bytes,
            "expert_weight_bytes": experts if expert_weight_bytes is None else expert_weight_bytes,
            "kv_value_bytes": stored if kv_value_bytes is None else kv_value_bytes,
        }
        for name, value in values.items():
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive, got {value!r}")
        return cls(architecture=architecture, mla_cache=mla_cache, **values)

    # FLOPs.

    def prefill(self, suffix_tokens: int, cached_tokens: int = 0) -> float:
        """FLOPs to prefill `suffix_tokens` of one sequence whose first `cached_tokens` are in the KV cache.

        The logits are those of the last position only. 0 tokens cost nothing. Without latent attention (or
        with `mla_cache="expanded"`) the split does not matter: prefill(a + b) = prefill(a) + prefill(b, a),
        the last position's logits aside, which is what Eq. 2 of MoE-Prefill needs.

        Raises:
            ConfigError: a negative number of tokens.
        """
        if suffix_tokens < 0 or cached_tokens < 0:
            raise ConfigError(f"tokens must be 0 or more, got {suffix_tokens} after {cached_tokens}")
        if suffix_tokens == 0:
            return 0.0
        attention = sum(
            2.0 * macs * causal_pairs(suffix_tokens, cached_tokens, window) for window, macs in self._pair_macs.items()
        )
        expanded = 2.0 * self._expansion_macs * cached_tokens
        return 2.0 * self._token_macs * suffix_tokens + attention + expanded + self._head_flops

    def prefill_parts(self, suffix_tokens: int, cached_tokens: int = 0) -> dict[str, float]:
        """`prefill` by kind; the values sum to it.

        Keys: "projections" (attention's linear layers, and gemma4's per-layer inputs), "attention",
        "dense_mlp", "router", "experts", "shared_experts", "lm_head".
        """
        total = self.prefill(suffix_tokens, cached_tokens)
        if total == 0.0:
            return dict.fromkeys(
                ("projections", "attention", "dense_mlp", "router", "experts", "shared_experts", "lm_head"), 0.0
            )
        layers = self.architecture.layers
        parts = {
            "projections": 2.0
            * suffix_tokens
            * (self.architecture.extra_macs + sum(layer.attention.macs + layer.extra_macs for layer in layers))
            + 2.0 * self._expansion_macs * cached_tokens,
            "dense_mlp": 2.0 * suffix_tokens * sum(layer.dense_macs for layer in layers),
            "router": 2.0 * suffix_tokens * sum(layer.router_macs for layer in layers),
            "experts": 2.0 * suffix_tokens * sum(layer.top_k * layer.expert_macs for layer in layers),
            "shared_experts": 2.0 * suffix_tokens * sum(layer.shared_macs for layer in layers),
            "lm_head": self._head_flops,
        }
        return parts | {"attention": total - sum(parts.values())}

    def decode(self, context_tokens: int) -> float:
        """FLOPs of one decoded token that sees `context_tokens`, itself included.

        With a latent cache the absorbed form is counted, as decode kernels compute it: scores and values in
        the latent space, without expanding the cached tokens.

        Raises:
            ConfigError: fewer than 1 token.
        """
        if context_tokens < 1:
            raise ConfigError(f"a decoded token sees at least itself, got {context_tokens} tokens of context")
        attention = 0.0
        for layer in self.architecture.layers:
            own = layer.attention
            macs = own.absorbed_pair_macs if self._latent and own.absorbed_pair_macs else own.pair_macs
            attention += 2.0 * macs * min(context_tokens, own.window or context_tokens)
        # Absorbing moves the expansion's weights to the query's and the output's side: as many multiply-adds.
        return 2.0 * self._token_macs + attention + self._head_flops

    # Bytes.

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache that one token takes, over all layers."""
        return self.kv_value_bytes * sum(self._kv_values(layer) for layer in self.architecture.layers)

    def kv_bytes(self, context_tokens: int) -> float:
        """Bytes of KV cache that a decode step over `context_tokens` reads: sliding layers read their window."""
        return self.kv_value_bytes * sum(
            self._kv_values(layer) * min(context_tokens, layer.attention.window or context_tokens)
            for layer in self.architecture.layers
        )

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert in one layer."""
        sizes = [layer.expert_params for layer in self.architecture.layers if layer.num_experts]
        return self.expert_weight_bytes * max(sizes, default=0)

    @cached_property
    def resident_bytes(self) -> float:
        """Bytes that every step reads whatever it routes: all weights but routed experts and embedding tables."""
        kinds = self.parameters
        fixed = sum(count for kind, count in kinds.items() if kind not in ("embedding", "routed_experts", "lm_head"))
        return self.weight_bytes * (fixed + self.architecture.head_macs)

    @cached_property
    def model_bytes(self) -> float:
        """Bytes of all weights."""
        routed = self.parameters["routed_experts"]
        return self.weight_bytes * (self.total_parameters - routed) + self.expert_weight_bytes * routed

    # Parameters.

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Parameters by kind. Biases count with their matrix; a tied lm_head counts under "embedding" alone."""
        layers, shape = self.architecture.layers, self.architecture
        return {
            "embedding": shape.embedding_params,
            "attention": sum(layer.attention.params for layer in layers),
            "dense_mlp": sum(layer.dense_macs for layer in layers),
            "router": sum(layer.router_params for layer in layers),
            "routed_experts": sum(layer.num_experts * layer.expert_params for layer in layers),
            "shared_experts": sum(layer.shared_macs for layer in layers),
            "norms": shape.norm_params + sum(layer.norm_params for layer in layers),
            "per_layer_inputs": shape.extra_macs + sum(layer.extra_macs for layer in layers),
            "lm_head": 0 if shape.tied else shape.head_macs,
        }

    @cached_property
    def active_parameters_by_kind(self) -> dict[str, int]:
        """As `parameters`, with only the top-k routed experts that one token uses."""
        routed = sum(layer.top_k * layer.expert_params for layer in self.architecture.layers)
        return self.parameters | {"routed_experts": routed}

    @property
    def total_parameters(self) -> int:
        """All parameters of the language model."""
        return sum(self.parameters.values())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, the whole embedding table included, as model cards count them."""
        return sum(self.active_parameters_by_kind.values())

    # Shape.

    @property
    def model_type(self) -> str:
        """Transformers' name of the family."""
        return self.architecture.model_type

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.architecture.layers)

    @property
    def num_moe_layers(self) -> int:
        """Decoder layers with routed experts."""
        return sum(1 for layer in self.architecture.layers if layer.num_experts)

    @property
    def num_experts(self) -> int:
        """Routed experts per MoE layer; 0 without any."""
        return max((layer.num_experts for layer in self.architecture.layers), default=0)

    @property
    def top_k(self) -> int:
        """Routed experts per token; 0 without any."""
        return max((layer.top_k for layer in self.architecture.layers), default=0)

    # Sums over layers, made once: a scheduler asks for a cost per request.

    @property
    def _latent(self) -> bool:
        return self.mla_cache == "latent"

    def _kv_values(self, layer: Any) -> int:
        return layer.attention.latent_values if self._latent else layer.attention.kv_values

    @cached_property
    def _head_flops(self) -> float:
        return 2.0 * self.architecture.head_macs

    @cached_property
    def _token_macs(self) -> int:
        return self.architecture.extra_macs + sum(layer.token_macs for layer in self.architecture.layers)

    @cached_property
    def _expansion_macs(self) -> int:
        """Multiply-adds per cached token: keys and values expanded again from their latent."""
        if not self._latent:
            return 0
        return sum(layer.attention.expansion_macs for layer in self.architecture.layers)

    @cached_property
    def _pair_macs(self) -> dict[int | None, int]:
        """Multiply-adds of one query-key pair, summed over the layers of each window."""
        sums: Counter[int | None] = Counter()
        for layer in self.architecture.layers:
            sums[layer.attention.window] += layer.attention.pair_macs
        return dict(sums)


def causal_pairs(suffix_tokens: int, cached_tokens: int = 0, window: int | None = None) -> int:
    """Query-key pairs of causal attention: suffix token t sees the cached tokens, those before it, and itself.

    With a window each query sees at most the last `window` of them (itself included).
    """
    first, last = cached_tokens + 1, cached_tokens + suffix_tokens  # keys that the first and the last query see
    if suffix_tokens <= 0:
        return 0
    if window is None or last <= window:
        return (first + last) * suffix_tokens // 2
    if first >= window:
        return suffix_tokens * window
    rising = window - first  # queries that see fewer keys than the window
    return (first + window - 1) * rising // 2 + (suffix_tokens - rising) * window


def _as_dict(config: Any) -> dict[str, Any]:
    """The config's fields, from any of the forms that `from_config` takes."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, PathLike)):
        path = Path(config)
        if path.is_dir():
            path = path / "config.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path} holds no config: a JSON object is expected")
        return fields
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        raise ConfigError(
            f"a Transformers config, a dict or the path of a config.json is expected, got {type(config).__name__}"
        )
    return dict(to_dict())


def _quantised_bytes(quantization: Any, stored: float) -> tuple[float, float]:
    """Bytes per parameter outside and inside the routed experts, by the checkpoint's quantisation."""
    if not isinstance(quantization, Mapping):
        return stored, stored
    method = str(quantization.get("quant_method", "")).lower()
    if method == "mxfp4":  # gpt_oss: the experts alone
        return stored, _MXFP4_BYTES
    if "fp8" in method:
        return 1.0, 1.0
    bits = quantization.get("bits")
    if isinstance(bits, int) and 1 <= bits <= 8:  # gptq, awq
        return bits / 8, bits / 8
    return stored, stored


__all__ = ["FAMILIES", "FlopsModel", "UnsupportedModelError", "causal_pairs"]
