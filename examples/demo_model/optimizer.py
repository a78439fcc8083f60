"""Muon for the weight matrices and AdamW for the rest, on fp32 master copies of a bf16 model.

Muon (Keller Jordan and others, 2024) replaces a matrix's momentum by the nearest orthogonal matrix, found with a few
Newton-Schulz steps. Experts are stacks of matrices: all matrices of one shape go through one batched iteration.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """The matrices [N, rows, columns], rows <= columns, with their singular values pushed towards 1."""
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


def as_matrices(name: str, tensor: Tensor) -> Tensor:
    """A parameter as a stack of wide matrices [N, rows, columns]; gate and up halves count as two matrices."""
    stack = tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
    if name.endswith("gate_up_proj"):
        experts, rows, columns = stack.shape
        stack = stack.reshape(experts * 2, rows // 2, columns)
    return stack.mT if stack.shape[-2] > stack.shape[-1] else stack


def from_matrices(name: str, stack: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_matrices`."""
    rows, columns = like.shape[-2:]
    if name.endswith("gate_up_proj"):
        rows //= 2
    return (stack.mT if rows > columns else stack).reshape(like.shape)


class MuonAdamW:
    """`learning_rate` is AdamW's; Muon's updates are scaled to the same size per element (RMS 0.2)."""

    def __init__(
        self,
        model: nn.Module,
        *,
        muon_scale: float = 1.0,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        self.muon_scale = muon_scale
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.betas = betas
        self.steps = 0
        self.parameters = dict(model.named_parameters())
        self.master = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.master.items() if not self._uses_muon(name)}
        self.muon_shapes: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name, value in self.master.items():
            if self._uses_muon(name):
                rows, columns = as_matrices(name, value).shape[-2:]
                self.muon_shapes[rows, columns].append(name)

    @staticmethod
    def _uses_muon(name: str) -> bool:
        return name.endswith(("_proj", "_proj.weight"))

    @torch.no_grad()
    def step(self, learning_rate: float, max_norm: float = 1.0) -> float:
        """One update from the gradients in the model, which it clears; returns their norm before clipping."""
        self.steps += 1
        gradients = {name: p.grad.float() for name, p in self.parameters.items() if p.grad is not None}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        for gradient in gradients.values():
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._step_muon(gradients, learning_rate)
        for name in self.second:
            self._step_adamw(name, gradients[name], learning_rate)
        for name, parameter in self.parameters.items():
            parameter.copy_(self.master[name])
            parameter.grad = None
        return float(norm)

    def _step_muon(self, gradients: dict[str, Tensor], learning_rate: float) -> None:
        for (_, columns), names in self.muon_shapes.items():
            stacks = []
            for name in names:
                self.first[name].mul_(self.momentum).add_(gradients[name])
                nesterov = gradients[name] + self.momentum * self.first[name]
                stacks.append(as_matrices(name, nesterov))
            updates = orthogonalise(torch.cat(stacks)).split([len(stack) for stack in stacks])
            scale = 0.2 * columns**0.5 * self.muon_scale
            for name, update in zip(names, updates, strict=True):
                master = self.master[name]
                master.mul_(1 - learning_rate * self.weight_decay)
                master.sub_(from_matrices(name, update, master), alpha=learning_rate * scale)

    def _step_adamw(self, name: str, gradient: Tensor, learning_rate: float) -> None:
        beta1, beta2 = self.betas
        first, second, master = self.first[name], self.second[name], self.master[name]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (1 - beta2**self.steps) ** 0.5 / (1 - beta1**self.steps)
        if master.dim() > 1 and "embed" not in name:
            master.mul_(1 - learning_rate * self.weight_decay)
        master.addcdiv_(first, second.sqrt().add_(1e-8), value=-learning_rate * scale)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "master": self.master, "first": self.first, "second": self.second}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for mine, stored in (
            (self.master, state["master"]),
            (self.first, state["first"]),
            (self.second, state["second"]),
        ):
            for name, value in mine.items():
                value.copy_(stored[name])
        for name, parameter in self.parameters.items():
            parameter.copy_(self.master[name])
