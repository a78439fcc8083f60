"""The KV tensors of a model: found by a trial pass, sized to the memory at hand. Refuses families that keep state
which pages cannot hold."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import nn

from moe_opt.errors import ConfigError, UnsupportedModelError
from moe_opt.serving.engine.attention import _TRIAL, LAYER_ATTRIBUTE, AttentionBackend, LayerKV
from moe_opt.serving.engine.config import EngineConfig

_ATTENTION_KINDS = ("full_attention", "sliding_attention")
_CPU_SHARE = 0.1
_CUDA_SHARE = 0.85


@dataclasses.dataclass(slots=True)
class LayerShape:
    """One attention layer, as the trial pass met it."""

    module: nn.Module
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    has_sinks: bool

    @property
    def bytes_per_token(self) -> int:
        """Values are stored as wide as keys: kernels want both the same."""
        return 2 * self.kv_heads * self.key_dim * self.dtype.itemsize


def check_family(model: Any) -> None:
    """Refuse what a paged KV cache cannot serve, by name and with the reason.

    Raises:
        UnsupportedModelError: linear-attention, state-space and convolution layers; attention of another kind than
            full or sliding; encoder-decoder models; classes without the attention interface.
    """
    config = model.config.get_text_config()
    name = f"{type(model).__name__} (model_type {model.config.model_type!r})"
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    foreign = sorted(kinds - set(_ATTENTION_KINDS))
    if foreign or model._is_stateful:
        what = f"has layers of kind {', '.join(foreign)}" if foreign else "keeps recurrent state beside attention"
        raise UnsupportedModelError(
            f"{name} {what}, and the engine keeps a sequence's past in KV pages only: hybrids of attention and "
            "linear-attention, state-space or convolution layers cannot be served yet. Use model.generate."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; the engine serves decoders only")
    if not model._supports_attention_backend:
        raise UnsupportedModelError(
            f"{name} does not use Transformers' attention interface, through which the engine pages the KV cache"
        )


def find_layers(model: Any) -> list[LayerShape]:
    """Pass two tokens through the model, whose attention implementation must be ours, and see which modules attend.

    Raises:
        UnsupportedModelError: attention with a soft cap or a position bias, or no attention at all.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    found: list[LayerShape] = []

    def look(
        module: nn.Module, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, other: dict[str, Any]
    ) -> None:
        for unknown in ("softcap", "position_bias"):
            if other.get(unknown) is not None:
                raise UnsupportedModelError(
                    f"{type(model).__name__} (model_type {model.config.model_type!r}) attends with {unknown}, which "
                    "the engine does not compute. Use model.generate."
                )
        if value.shape[3] > key.shape[3]:
            raise UnsupportedModelError(
                f"{type(model).__name__} has values of {value.shape[3]} dimensions and keys of {key.shape[3]}; the "
                "engine stores values no wider than keys"
            )
        window = other.get("sliding_window")
        index = getattr(module, "layer_idx", None)
        if window is None and kinds is not None and index is not None and kinds[index] == "sliding_attention":
            window = config.sliding_window
        found.append(
            LayerShape(
                module, key.shape[1], key.shape[3], value.shape[3], window, key.dtype, key.device, sinks is not None
            )
        )

    device = model.get_input_embeddings().weight.device
    token = _TRIAL.set(look)
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device),
                position_ids=torch.arange(2, device=device).unsqueeze(0),
                use_cache=False,
            )
    finally:
        _TRIAL.reset(token)
    if len({id(shape.module) for shape in found}) != len(found) or not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) attends {len(found)} times in "
            f"{len({id(shape.module) for shape in found})} modules; the engine needs one attention per module"
        )
    return found


def pages_that_fit(config: EngineConfig, layers: list[LayerShape], max_total_tokens: int) -> int:
    """How many KV pages to make: `kv_pages`, or what `kv_memory` holds, or what the machine has to spare.

    Raises:
        ConfigError: the memory does not hold one page.
    """
    if config.kv_pages is not None:
        return config.kv_pages
    page_bytes = sum(layer.bytes_per_token for layer in layers) * config.page_size
    useful = config.max_batch_size * -(-max_total_tokens // config.page_size)
    if config.prefix_caching:
        useful *= 2  # as much again for prefixes that nobody reads right now
    memory = config.kv_memory
    if memory is None:
        memory = _spare_memory(layers[0].device)
    pages = min(memory // page_bytes, useful) if config.kv_memory is None else memory // page_bytes
    if pages < 1:
        raise ConfigError(f"engine: {memory} bytes of KV memory do not hold one page of {page_bytes} bytes")
    return int(pages)


def _spare_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") * _CPU_SHARE)


def make_pool(layers: list[LayerShape], slots: int, backend: AttentionBackend) -> list[LayerKV]:
    """Allocate keys and values, [slots, kv_heads, dim] per layer, and hand each attention module its part."""
    pool = []
    for index, shape in enumerate(layers):
        size = [slots, shape.kv_heads]
        if backend.by_head:
            size.reverse()
        # zeros, not empty: a slot never written is still multiplied by a weight of 0, and 0 times NaN is NaN
        keys, values = (torch.zeros(*size, shape.key_dim, dtype=shape.dtype, device=shape.device) for _ in range(2))
        if backend.by_head:
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        layer = LayerKV(index, keys, values, shape.value_dim, shape.window, backend)
        shape.module.__dict__[LAYER_ATTRIBUTE] = layer
        pool.append(layer)
    return pool


def release_pool(layers: list[LayerShape]) -> None:
    """Take the pool away from the attention modules."""
    for shape in layers:
        shape.module.__dict__.pop(LAYER_ATTRIBUTE, None)
