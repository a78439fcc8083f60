"""Linear layers and gated MLPs in bfloat16 on AMX tiles (native/linear.cpp).

torch hands a small bfloat16 product to a library that copies the weight into its own order at every call, which costs
several times the product, and which compiles a kernel for every new number of rows: in a server each step has another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import nn

from moe_opt.modeling.kernels.storage import activation_of

Forward = Callable[[torch.Tensor], torch.Tensor]

_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


def takes_linear(module: nn.Module) -> bool:
    """A plain layer (no quantised subclass) in bfloat16 in memory."""
    if type(module) is not nn.Linear:
        return False
    weight, bias = module.weight, module.bias
    if bias is not None and bias.dtype != torch.bfloat16:
        return False
    return in_memory(weight) and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def in_memory(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.is_contiguous()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, loaded: ctypes.CDLL) -> torch.Tensor:
    """x W^T + b. x: bfloat16 [..., K]. weight: [N, K] and bias: [N] as `takes_linear` wants them."""
    columns, width = weight.shape
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], columns)
    failed = loaded.moe_opt_linear(
        x.data_ptr(), x.numel() // width, width, weight.data_ptr(), None if bias is None else bias.data_ptr(), columns,
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return nn.functional.linear(x, weight, bias) if failed else out


def linear(module: nn.Linear, loaded: ctypes.CDLL) -> Forward:
    """The forward function of a layer that `takes_linear` takes."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        if x.dtype != torch.bfloat16 or torch.is_grad_enabled() or not x.numel():
            return nn.functional.linear(x, weight, bias)
        return product(x, weight, bias, loaded)

    return forward


def mlp_or_none(module: nn.Module, loaded: ctypes.CDLL) -> Forward | None:
    """`down_proj(act(gate_proj(x)) * up_proj(x))` in one call, for modules that are that and no more: it is taken if
    it gives what the kernel gives, to bfloat16's error."""
    layers = [getattr(module, name, None) for name in _MLP_PARTS]
    number = activation_of(getattr(module, "act_fn", None))
    if number is None or not all(isinstance(layer, nn.Linear) and takes_linear(layer) for layer in layers):
        return None
    gate, up, down = (layer for layer in layers if isinstance(layer, nn.Linear))
    if any("forward" in layer.__dict__ or layer.bias is not None for layer in (gate, up, down)):
        return None
    if gate.weight.shape != up.weight.shape or down.weight.shape[1] != gate.weight.shape[0]:
        return None
    if len(list(module.parameters())) != len(_MLP_PARTS):
        return None
    own, call = module.forward, loaded.moe_opt_mlp
    inner, width = gate.weight.shape
    columns = down.weight.shape[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16 or x.shape[-1] != width or torch.is_grad_enabled() or not x.numel():
            return own(x)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], columns)
        failed = call(
            x.data_ptr(), x.numel() // width, width, gate.weight.data_ptr(), up.weight.data_ptr(), inner,
            down.weight.data_ptr(), columns, number, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return own(x) if failed else out

    trial = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.inference_mode():
        expected, found = own(trial).float(), forward(trial).float()
    if expected.shape != found.shape:
        return None
    scale = float(expected.abs().max())
    return forward if float((expected - found).abs().max()) <= 0.02 * scale else None
