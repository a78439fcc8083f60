"""Which attention an engine takes: ours in C++ or torch's on a CPU, varlen or gathered on a GPU.

Kernels differ in the dtypes, head sizes and page sizes that they take, so what runs on a GPU is tried on the model's
own shapes, against `GatherAttention`, before it is used.
"""

from __future__ import annotations

import logging

import torch

from moe_opt.modeling.kernels.native import library
from moe_opt.serving.engine.attention import AttentionBackend, GatherAttention, LayerKV, RunsAttention, Span
from moe_opt.serving.engine.attention_cuda import VarlenAttention
from moe_opt.serving.engine.attention_native import NativeAttention

logger = logging.getLogger(__name__)


def choose_backend(
    device: torch.device, page_size: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> AttentionBackend:
    """The fastest attention that computes the right thing for these shapes on this device."""
    if device.type == "cpu":
        loaded = library.load() if NativeAttention.takes(dtype, dim) else None
        return RunsAttention() if loaded is None else NativeAttention(loaded)
    gather = GatherAttention(device, page_size)
    if not VarlenAttention.supported():
        logger.warning("torch %s has no paged varlen_attn: attention copies pages together", torch.__version__)
        return gather
    varlen = VarlenAttention(device, page_size)
    try:
        difference = _difference(varlen, gather, page_size, heads, kv_heads, dim, dtype, device)
    except Exception as error:  # kernels refuse what they cannot do in many ways
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        logger.warning("varlen_attn does not take pages of %d tokens in %s (%s): attention copies pages together",
                       page_size, dtype, reason)  # fmt: skip
        return gather
    if not difference < 2e-2:
        logger.warning("varlen_attn is off by %.3g on this device: attention copies pages together", difference)
        return gather
    return varlen


def _difference(
    varlen: VarlenAttention,
    gather: GatherAttention,
    page_size: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Largest deviation of the two on a decode row, a chunk behind cached tokens, and scattered pages."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    first, second = page_size + page_size // 2 + 1, 2 * page_size
    spans = [Span(0, 1, first, [3, 0], []), Span(1, 3, second, [4, 1], [])]
    slots = [
        page * page_size + at % page_size for page, at in ((0, first - 1), *((1, second - 3 + i) for i in range(3)))
    ]
    where = torch.tensor(slots, device=device)
    keys, values = noise(5 * page_size, kv_heads, dim), noise(5 * page_size, kv_heads, dim)
    query, key, value = noise(4, heads, dim), noise(4, kv_heads, dim), noise(4, kv_heads, dim)
    outs = []
    for backend in (varlen, gather):
        backend.begin(spans, where)
        layer = LayerKV(0, keys.clone(), values.clone(), dim, None, backend)
        with torch.inference_mode():
            outs.append(backend.attend(layer, query, key, value, dim**-0.5, None).float())
    return float((outs[0] - outs[1]).abs().max())
