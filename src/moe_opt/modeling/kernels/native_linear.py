"""`nn.Linear` of a few bfloat16 rows on a CPU with AMX (native/linear.cpp), for as long as an engine has the model.

torch hands such products to a library that copies the weight into its own order at every call; for the rows of a decode
step that costs several times the product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import nn

from moe_opt.modeling.kernels.native import library

MAX_ROWS = 64  # from about 100 rows on torch is as fast or faster: benchmarks/native_kernels.py


class NativeLinears:
    """Takes over the linear layers of a model that the kernel has a form for; `remove` gives them back."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[nn.Linear] = []
        loaded = library.load()
        if loaded is None or not loaded.moe_opt_has_linear():
            return
        for module in model.modules():
            if _takes(module):
                assert isinstance(module, nn.Linear)
                module.forward = _forward(module, loaded)  # type: ignore[method-assign]
                self._modules.append(module)

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules.clear()


def _takes(module: nn.Module) -> bool:
    """A plain layer (no hook of accelerate, no quantised subclass) in bfloat16, of a shape that fills tiles."""
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight, bias = module.weight, module.bias
    if not (weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()):
        return False
    if bias is not None and bias.dtype != torch.bfloat16:
        return False
    return weight.shape[0] % 16 == 0 and weight.shape[1] % 2 == 0


def _forward(module: nn.Linear, loaded: ctypes.CDLL) -> Callable[[torch.Tensor], torch.Tensor]:
    product = loaded.moe_opt_linear
    columns, width = module.weight.shape

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // width
        weight, bias = module.weight, module.bias
        if rows > MAX_ROWS or x.dtype != torch.bfloat16 or torch.is_grad_enabled() or not rows:
            return nn.functional.linear(x, weight, bias)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], columns)
        failed = product(
            x.data_ptr(), rows, width, weight.data_ptr(), None if bias is None else bias.data_ptr(), columns,
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return nn.functional.linear(x, weight, bias) if failed else out

    return forward
