"""What a step does row by row beside its matrix products (native/rows.cpp).

Each of these is several operations of torch's, of a few microseconds for a decode step's rows: together a third of it.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moe_opt.modeling.kernels.native import library
from moe_opt.modeling.kernels.native_linear import in_memory, product

Forward = Callable[[torch.Tensor], torch.Tensor]
Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

_ROTARY_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """float32 [N] of logits [N, V]: over the last dimension. torch makes four passes and a copy of the logits of it."""
    loaded = library.load() if logits.device.type == "cpu" and logits.dtype == torch.float32 else None
    if loaded is None or logits.dim() != 2 or not logits.is_contiguous():
        return logits.logsumexp(-1)
    out = torch.empty(logits.shape[0])
    loaded.moe_opt_logsumexp(
        logits.data_ptr(), logits.shape[0], logits.shape[1], out.data_ptr(), torch.get_num_threads()
    )
    return out


def norm_or_none(module: nn.Module, loaded: ctypes.CDLL) -> Forward | None:
    """An RMS norm. Families compute theirs in several ways (1 + weight, float32 weights, none at all), so a module is
    taken if it gives what the kernel gives, to a rounding of its dtype."""
    eps, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, nn.Parameter) or len(list(module.parameters())) != 1:
        return None
    if weight.dim() != 1 or weight.dtype not in library.DTYPES or not in_memory(weight):
        return None
    norm, width, dtype = loaded.moe_opt_norm, weight.shape[0], weight.dtype
    number = library.DTYPES[dtype]
    own = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // width
        if x.dtype != dtype or x.shape[-1] != width or torch.is_grad_enabled() or not rows:
            return own(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        norm(x.data_ptr(), rows, width, weight.data_ptr(), eps, out.data_ptr(), number, torch.get_num_threads())
        return out

    trial = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        expected, found = own(trial), forward(trial)
    if expected.shape != found.shape or expected.dtype != dtype:
        return None
    close = torch.allclose(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    return forward if close else None


def router_or_none(module: nn.Module, loaded: ctypes.CDLL) -> Router | None:
    """A router of Qwen's, Mixtral's, OLMoE's and gpt-oss's kind: the top-k of the logits, and the softmax of all or of
    the chosen. Taken if it gives what the kernel gives; of equal logits the kernel takes the first."""
    weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, nn.Parameter) or not isinstance(top_k, int) or list(module.buffers()):
        return None
    if weight.dim() != 2 or weight.dtype not in library.DTYPES or not in_memory(weight):
        return None
    parameters = dict(module.named_parameters())
    if not parameters.keys() <= {"weight", "bias"} or any(part.dtype != weight.dtype for part in parameters.values()):
        return None
    experts, width = weight.shape
    own = module.forward
    if list(inspect.signature(own).parameters) != ["hidden_states"]:  # some are handed a bias as well
        return None
    trial = torch.randn(8, width, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.inference_mode():
        given = own(trial)
        if not isinstance(given, tuple) or len(given) != 3 or not 1 <= top_k <= experts:
            return None
        logits, scores, ids = given
        if [tuple(part.shape) for part in given] != [(8, experts), (8, top_k), (8, top_k)]:
            return None
        if logits.dtype != weight.dtype or ids.dtype != torch.int64 or not scores.is_floating_point():
            return None
        if top_k < experts and float(logits.float().std()) < 1e-3:  # nothing to tell a softmax from anything else by
            return None
        for among in (False, True):
            forward = _router(module, loaded, among, scores.dtype, own)
            found = forward(trial)
            if (
                _close(found[0], logits)
                and _close(found[1], scores)
                and _close(logits.gather(1, found[2]), logits.gather(1, ids))
            ):
                return forward
    return None


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.float(), expected.float(), rtol=4 * torch.finfo(expected.dtype).eps, atol=1e-6)


def _router(module: Any, loaded: ctypes.CDLL, among: bool, scores_dtype: torch.dtype, own: Any) -> Router:
    choose, top_k = loaded.moe_opt_choose, int(module.top_k)
    experts, width = module.weight.shape
    number, dtype = library.DTYPES[module.weight.dtype], module.weight.dtype
    tiles = dtype == torch.bfloat16 and width % 2 == 0 and bool(loaded.moe_opt_has_tiles())

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = x.numel() // width
        if x.dtype != dtype or torch.is_grad_enabled() or not rows:
            return own(x)
        x = x.reshape(-1, width)
        weight, bias = module.weight, getattr(module, "bias", None)
        logits = product(x, weight, bias, loaded) if tiles else nn.functional.linear(x, weight, bias)
        scores = torch.empty(rows, top_k)
        ids = torch.empty(rows, top_k, dtype=torch.int64)
        failed = choose(
            logits.data_ptr(), rows, experts, top_k, among, scores.data_ptr(), ids.data_ptr(), number,
            torch.get_num_threads(),
        )  # fmt: skip
        return own(x) if failed else (logits, scores.to(scores_dtype), ids)

    return forward


def rotary_or_none(function: Callable[..., Any], loaded: ctypes.CDLL) -> Callable[..., Any] | None:
    """`apply_rotary_pos_emb` of a family's module, if it turns halves as Llama's does; every rounding is torch's."""
    try:
        if list(inspect.signature(function).parameters) != _ROTARY_PARAMETERS:
            return None
    except ValueError:  # a builtin without a signature
        return None
    rotate = loaded.moe_opt_rotate

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not _rotates(q, k, cos, sin, unsqueeze_dim):
            return function(q, k, cos, sin, unsqueeze_dim)
        outs = torch.empty_like(q), torch.empty_like(k)
        rotate(
            (library.Heads * 2)(_heads(q), _heads(k)), (library.Heads * 2)(*map(_heads, outs)), 2, q.shape[2],
            q.shape[3], cos.data_ptr(), sin.data_ptr(), library.DTYPES[q.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return outs

    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, heads, 3, 16, generator=generator).to(dtype) for heads in (4, 2))
        cos, sin = (torch.randn(1, 3, 16, generator=generator).to(dtype) for _ in range(2))
        try:
            with torch.inference_mode():
                expected, found = function(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)
        except RuntimeError:  # cosines of another shape (gpt-oss: of half the width)
            return None
        if not all(_close(mine, theirs) for mine, theirs in zip(found, expected, strict=True)):
            return None
    return apply_rotary_pos_emb


def _rotates(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> bool:
    if q.dim() != 4 or unsqueeze_dim != 1 or q.shape[0] != 1 or q.device.type != "cpu" or not q.numel():
        return False
    tokens, dim = q.shape[2:]
    return (
        dim % 2 == 0
        and q.dtype in library.DTYPES
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and tuple(cos.shape) == tuple(sin.shape) == (1, tokens, dim)
        and cos.is_contiguous()
        and sin.is_contiguous()
        and tuple(k.shape[2:]) == (tokens, dim)
        and k.shape[0] == 1
        and q.stride(3) == k.stride(3) == 1
    )


def _heads(tensor: torch.Tensor) -> library.Heads:
    """Of [1, heads, rows, dim]."""
    _, head, row, _ = tensor.stride()
    return library.Heads(tensor.data_ptr(), row, head, tensor.shape[1])
