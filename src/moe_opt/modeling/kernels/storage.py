"""One layer's expert weights as the fused kernels read them, and what those kernels compute in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_opt.errors import ConfigError

ACTIVATIONS = ("silu", "gelu_tanh", "gpt_oss")
_SILU = ("SiLUActivation", "SiLU")
_GELU_TANH = ("GELUTanh", "PytorchGELUTanh")


def activation_of(function: Any) -> int | None:
    """Index in `ACTIVATIONS` of a module between gate and up; None for one that is not fused."""
    kind = type(function).__name__
    return 0 if kind in _SILU else 1 if kind in _GELU_TANH else None


@dataclass(frozen=True)
class FusedWeights:
    """One layer's storage, as the kernels read it.

    Attributes:
        gate_up: [S, 2I, H], or [S, H, 2I] if `transposed`. down: [S, H, I] or [S, I, H].
        gate_up_bias: [S, 2I] or None. down_bias: [S, H] or None.
        interleaved: gate and up alternate in the columns (gpt-oss); else gates come first.
        activation: of `ACTIVATIONS`. alpha, limit: gpt-oss's.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    transposed: bool = False
    interleaved: bool = False
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation {self.activation!r} is not fused; these are: {', '.join(ACTIVATIONS)}")

    @property
    def slots(self) -> int:
        return int(self.gate_up.shape[0])

    @property
    def intermediate(self) -> int:
        return int(self.gate_up.shape[2 if self.transposed else 1]) // 2

    @classmethod
    def of(cls, module: Any) -> FusedWeights | None:
        """Of an experts module of Transformers, or an `ExpertsProxy` over one; None for a layout that is not fused."""
        owner = getattr(module, "module", module)
        if not module.has_gate or getattr(module, "has_post_expert_norm", False):
            return None
        gating = getattr(type(owner), "_apply_gate", None)
        name = getattr(gating, "__qualname__", "")
        interleaved, activation = False, None
        alpha, limit = 1.702, 7.0
        if name.startswith("GptOssExperts."):
            interleaved, activation = True, "gpt_oss"
            alpha, limit = float(owner.alpha), float(owner.limit)
        elif name == "_default_apply_gate":
            number = activation_of(getattr(owner, "act_fn", None))
            activation = None if number is None else ACTIVATIONS[number]
        if activation is None:
            return None
        return cls(
            module.gate_up_proj,
            module.down_proj,
            module.gate_up_proj_bias if module.has_bias else None,
            module.down_proj_bias if module.has_bias else None,
            transposed=bool(module.is_transposed),
            interleaved=interleaved,
            activation=activation,
            alpha=alpha,
            limit=limit,
        )


def experts_reference(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    storage: FusedWeights,
    slot_of_expert: torch.Tensor | None = None,
    sizes: bool = False,
) -> torch.Tensor:
    """What the fused kernels compute, assignment by assignment.

    With `sizes`, the absolute values of the terms that down adds up, in float32: what a rounding error is measured by.
    """
    if slot_of_expert is not None:
        known = (ids >= 0) & (ids < slot_of_expert.shape[0])
        ids = torch.where(known, slot_of_expert[ids.clamp(0, slot_of_expert.shape[0] - 1)], -1)
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for token in range(hidden.shape[0]):
        for slot, weight in zip(ids[token].tolist(), weights[token].float().tolist(), strict=True):
            if not 0 <= slot < storage.slots:
                continue
            gate_up, down = storage.gate_up[slot].float(), storage.down[slot].float()
            if not storage.transposed:
                gate_up, down = gate_up.T, down.T
            inner = hidden[token].float() @ gate_up
            if storage.gate_up_bias is not None:
                inner = inner + storage.gate_up_bias[slot].float()
            gate, up = (inner[::2], inner[1::2]) if storage.interleaved else inner.chunk(2)
            inner = _activate(gate, up, storage).to(hidden.dtype).float()
            if sizes:
                out[token] += weight * (inner.abs() @ down.abs())
                continue
            inner = inner @ down
            if storage.down_bias is not None:
                inner = inner + storage.down_bias[slot].float()
            out[token] += weight * inner
    return out if sizes else out.to(hidden.dtype)


def _activate(gate: torch.Tensor, up: torch.Tensor, storage: FusedWeights) -> torch.Tensor:
    if storage.activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if storage.activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=storage.limit), up.clamp(-storage.limit, storage.limit)
    return (up + 1) * gate * torch.sigmoid(gate * storage.alpha)
