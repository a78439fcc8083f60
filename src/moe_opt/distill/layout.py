"""The neurons of an expert, whatever layout its family stores them in.

Neuron j of a feed-forward expert is a row of the gate and of the up projection, their biases, and a column of the down
projection. Families store `[2I, H]` or its transpose, gate and up one after the other or interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from moe_opt.modeling.experts import ExpertsProxy

Tensors = dict[str, torch.Tensor]


def to_neurons(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Expert tensors `[E, ...]` with the neuron as second dimension.

    Returns: "in" [E, I, P, H] (P = 2 rows, gate and up, or 1), "down" [E, I, H] and, where there are biases,
        "in_bias" [E, I, P] and "down_bias" [E, H].
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    rows = tensors[name].mT if module.is_transposed else tensors[name]  # [E, P * I, H]
    down = tensors["down_proj"] if module.is_transposed else tensors["down_proj"].mT  # [E, I, H]
    found = {"in": _split(module, rows), "down": down}
    if module.has_bias:
        found["in_bias"] = _split(module, tensors[f"{name}_bias"].unsqueeze(-1)).squeeze(-1)
        found["down_bias"] = tensors["down_proj_bias"]
    return found


def from_neurons(module: nn.Module, neurons: Mapping[str, torch.Tensor]) -> Tensors:
    """The inverse of `to_neurons`: contiguous tensors in the module's own layout and names."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    rows = _join(module, neurons["in"])
    down = neurons["down"]
    found = {
        name: rows.mT.contiguous() if module.is_transposed else rows.contiguous(),
        "down_proj": down.contiguous() if module.is_transposed else down.mT.contiguous(),
    }
    if module.has_bias:
        found[f"{name}_bias"] = _join(module, neurons["in_bias"].unsqueeze(-1)).squeeze(-1).contiguous()
        found["down_proj_bias"] = neurons["down_bias"].contiguous()
    return found


def _split(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """[E, P * I, X] -> [E, I, P, X]."""
    if not module.has_gate:
        return rows.unsqueeze(2)
    experts, both, width = rows.shape
    if module.is_concatenated:
        return rows.view(experts, 2, both // 2, width).transpose(1, 2)
    return rows.reshape(experts, both // 2, 2, width)


def _join(module: nn.Module, neurons: torch.Tensor) -> torch.Tensor:
    """[E, I, P, X] -> [E, P * I, X]."""
    experts, count, parts, width = neurons.shape
    if not module.has_gate:
        return neurons.squeeze(2)
    if module.is_concatenated:
        neurons = neurons.transpose(1, 2)
    return neurons.reshape(experts, parts * count, width)


def activations(module: nn.Module, rows: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """What the down projection of one expert reads.

    Args: rows [I, P, H] and bias [I, P] or None of the expert's neurons. hidden: [T, H].

    Returns: [T, I].
    """
    matrix = _join(module, rows.unsqueeze(0))[0]  # [P * I, H]
    projected = hidden @ matrix.mT
    if bias is not None:
        projected = projected + _join(module, bias.unsqueeze(0).unsqueeze(-1))[0, :, 0]
    return module._apply_gate(projected) if module.has_gate else module.act_fn(projected)


def per_assignment(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], hidden: torch.Tensor, ids: torch.Tensor, kernel: str
) -> torch.Tensor:
    """Each assignment's own output, without gate weights.

    Args: tensors `[E, ...]`; hidden [T, H]; ids int64 [T, k], below E, or E for "none" (zeros).

    Returns: [T, k, H].
    """
    from moe_opt.modeling.experts import stock_function

    tokens, top_k = ids.shape
    proxy = ExpertsProxy(module, dict(tensors))
    repeated = hidden.repeat_interleave(top_k, 0) if top_k > 1 else hidden
    ones = hidden.new_ones(tokens * top_k, 1)
    out = stock_function(module, kernel)(proxy, repeated, ids.reshape(-1, 1), ones)
    return out.view(tokens, top_k, -1)
