"""The experts of a step on a CPU in one call of ours (native/experts.cpp).

Torch's way is a matrix product per expert and a dozen operations around them; with a handful of tokens per expert the
calls cost more than the arithmetic. Here an expert's weights are read once for all its tokens, on AMX tiles or in
bfloat16 dot products where the processor has them.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from moe_opt.modeling.kernels.native import library
from moe_opt.modeling.kernels.storage import ACTIVATIONS, FusedWeights

# Without AMX tiles (float32, transposed weights), torch's blocked matrix products win beyond this many tokens per
# expert; see benchmarks/native_kernels.py.
MAX_TOKENS_PER_EXPERT = 24

_REMEMBERED = 8
# One layer's storage as the kernel reads it, by the addresses it was made from; None for a layout it does not have.
_prepared: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], library.Experts | None]] = weakref.WeakKeyDictionary()


def native_experts_or_none(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, any_number: bool = False
) -> torch.Tensor | None:
    """The weighted sum over each token's experts, [T, H]; None where this kernel is not the one to take.

    Args:
        module: an experts module of Transformers, or an `ExpertsProxy` over one. hidden: [T, H] on the CPU.
        ids: int64 [T, k]; outside 0 ... num_experts - 1 is dropped. weights: [T, k].
        any_number: also of tokens for which torch's products are expected to be faster.
    """
    tokens, top_k = ids.shape
    loaded = library.load()
    layer = _layer(module, hidden.dtype) if loaded is not None and tokens else None
    if loaded is None or layer is None:
        return None
    tiles = hidden.dtype == torch.bfloat16 and not layer.transposed and loaded.moe_opt_has_tiles()
    if tokens * top_k > MAX_TOKENS_PER_EXPERT * layer.slots and not tiles and not any_number:
        return None
    hidden, ids, shares = hidden.contiguous(), ids.to(torch.int64).contiguous(), weights.float().contiguous()
    out = torch.empty_like(hidden)
    failed = loaded.moe_opt_experts(
        ctypes.byref(layer), hidden.data_ptr(), tokens, ids.data_ptr(), top_k, shares.data_ptr(), out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for {tokens * top_k} assignments of {layer.width} columns")
    return out


def _layer(module: Any, dtype: torch.dtype) -> library.Experts | None:
    gate_up, down = getattr(module, "gate_up_proj", None), module.down_proj
    if gate_up is None:
        return None
    biases = (module.gate_up_proj_bias.data_ptr(), module.down_proj_bias.data_ptr()) if module.has_bias else ()
    key = (gate_up.data_ptr(), down.data_ptr(), gate_up.shape[0], dtype, *biases)
    known = _prepared.setdefault(getattr(module, "module", module), {})
    if key not in known:
        if len(known) >= _REMEMBERED:  # united experts came and went: their addresses mean nothing any more
            known.clear()
        known[key] = _prepare(module, dtype)
    return known[key]


def _prepare(module: Any, dtype: torch.dtype) -> library.Experts | None:
    storage = FusedWeights.of(module)
    if storage is None or dtype not in library.DTYPES:
        return None
    tensors = (storage.gate_up, storage.down, storage.gate_up_bias, storage.down_bias)
    for tensor in tensors:
        if tensor is not None and not (
            tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
        ):
            return None
    return library.Experts(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        storage.slots,
        storage.down.shape[2 if storage.transposed else 1],
        storage.intermediate,
        storage.transposed,
        storage.interleaved,
        ACTIVATIONS.index(storage.activation),
        library.DTYPES[dtype],
        storage.alpha,
        storage.limit,
    )
