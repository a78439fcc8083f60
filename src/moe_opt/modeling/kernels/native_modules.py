"""Linear layers and norms of an engine step on a CPU, for as long as an engine has the model.

torch hands a small bfloat16 product to a library that copies the weight into its own order at every call, which costs
several times the product, and which compiles a kernel for every new number of rows: in a server each step has another.
native/linear.cpp reads the weight as it lies, on AMX tiles. An RMS norm is six operations of a few microseconds each;
native/rows.cpp is one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import nn

from moe_opt.modeling.kernels.native import library

MAX_NORM_ROWS = 256  # beyond, torch's vectorised passes are as fast

_Forward = Callable[[torch.Tensor], torch.Tensor]


class NativeModules:
    """Takes over the modules of a model that a kernel of ours computes as they do; `remove` gives them back."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[nn.Module] = []
        loaded = library.load()
        if loaded is None:
            return
        tiles = bool(loaded.moe_opt_has_tiles())
        for module in model.modules():
            if "forward" in module.__dict__:  # somebody's hook
                continue
            forward = None
            if tiles and _is_linear(module):
                assert isinstance(module, nn.Linear)
                forward = _linear(module, loaded)
            elif "norm" in type(module).__name__.lower():
                forward = _norm_or_none(module, loaded)
            if forward is not None:
                module.forward = forward
                self._modules.append(module)

    def __len__(self) -> int:
        return len(self._modules)

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules.clear()


def _is_linear(module: nn.Module) -> bool:
    """A plain layer (no quantised subclass) in bfloat16 in memory."""
    if type(module) is not nn.Linear:
        return False
    weight, bias = module.weight, module.bias
    if bias is not None and bias.dtype != torch.bfloat16:
        return False
    return _in_memory(weight) and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def _in_memory(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.is_contiguous()


def _linear(module: nn.Linear, loaded: ctypes.CDLL) -> _Forward:
    product = loaded.moe_opt_linear
    columns, width = module.weight.shape

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // width
        weight, bias = module.weight, module.bias
        if x.dtype != torch.bfloat16 or torch.is_grad_enabled() or not rows:
            return nn.functional.linear(x, weight, bias)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], columns)
        failed = product(
            x.data_ptr(), rows, width, weight.data_ptr(), None if bias is None else bias.data_ptr(), columns,
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return nn.functional.linear(x, weight, bias) if failed else out

    return forward


def _norm_or_none(module: nn.Module, loaded: ctypes.CDLL) -> _Forward | None:
    """Families compute their norms in several ways (1 + weight, float32 weights, none at all), so a module is taken if
    it gives what the kernel gives, to a rounding of its dtype."""
    eps, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, nn.Parameter) or len(list(module.parameters())) != 1:
        return None
    if weight.dim() != 1 or weight.dtype not in library.DTYPES or not _in_memory(weight):
        return None
    norm, width, dtype = loaded.moe_opt_norm, weight.shape[0], weight.dtype
    number = library.DTYPES[dtype]
    own = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // width
        if rows > MAX_NORM_ROWS or x.dtype != dtype or x.shape[-1] != width or torch.is_grad_enabled() or not rows:
            return own(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        norm(x.data_ptr(), rows, width, weight.data_ptr(), eps, out.data_ptr(), number)
        return out

    trial = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        expected, found = own(trial), forward(trial)
    if expected.shape != found.shape or expected.dtype != dtype:
        return None
    close = torch.allclose(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    return forward if close else None
