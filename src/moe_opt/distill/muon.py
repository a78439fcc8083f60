"""Muon for the united experts' matrices, AdamW for all else.

Muon (Keller Jordan and others, 2024) replaces a matrix's momentum by the nearest orthogonal matrix, found with a few
Newton-Schulz steps. United experts are stacks `[U, rows, columns]`, so all matrices of one shape go through one batched
iteration. `torch.optim.Muon` takes single matrices only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_UPDATE_RMS = 0.2  # an AdamW update's usual size per element, so that one learning rate serves both


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """[N, rows, columns] with their singular values pushed towards 1, same shape and fp32."""
    a, b, c = _NEWTON_SCHULZ
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.float()
    return x.mT if wide is not matrices else x


class MuonAdamW(torch.optim.Optimizer):
    """Stacks of matrices (three dimensions) take Muon's update, other parameters AdamW's.

    Args:
        learning_rate: AdamW's; Muon's updates are scaled to an RMS of 0.2 per element, which makes it Muon's too.
        momentum: of Muon (Nesterov). betas, eps: of AdamW. weight_decay: decoupled, for both.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        everything = [p for p in parameters if p.requires_grad]
        shared: dict[str, Any] = {"weight_decay": weight_decay, "lr": learning_rate}
        groups = [
            {"params": [p for p in everything if p.dim() == 3], "muon": True, "momentum": momentum, **shared},
            {"params": [p for p in everything if p.dim() != 3], "muon": False, "betas": betas, "eps": eps, **shared},
        ]
        super().__init__([group for group in groups if group["params"]], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["muon"]:
                self._step_muon(group)
            else:
                self._step_adamw(group)
        return loss

    def _step_muon(self, group: dict[str, Any]) -> None:
        by_shape: dict[tuple[torch.Size, torch.device], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault((parameter.shape[1:], parameter.device), []).append(parameter)
        for (shape, _), parameters in by_shape.items():
            directions = []
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                directions.append(parameter.grad.lerp(momentum, group["momentum"]))
            update = orthogonalise(torch.cat(directions))
            # An orthogonal matrix has sqrt(max(shape)) times less than 1 per element.
            update *= _UPDATE_RMS * max(shape) ** 0.5
            for parameter, part in zip(parameters, update.split([len(p) for p in parameters]), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(part, alpha=-group["lr"])

    def _step_adamw(self, group: dict[str, Any]) -> None:
        first_beta, second_beta = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state["first"] = torch.zeros_like(parameter)
                state["second"] = torch.zeros_like(parameter)
            state["step"] += 1
            first = state["first"].lerp_(parameter.grad, 1 - first_beta)
            second = state["second"].lerp_(parameter.grad.square(), 1 - second_beta)
            scale = (second / (1 - second_beta ** state["step"])).sqrt_().add_(group["eps"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.addcdiv_(first, scale, value=-group["lr"] / (1 - first_beta ** state["step"]))
