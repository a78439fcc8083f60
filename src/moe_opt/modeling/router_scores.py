"""Captures router logits for the "reroute" strategy, which has to know a token's next-best experts.

The experts function sees only the router's top-k. Families name and shape their routers differently, but each returns
its logits or scores `[T, E]` somewhere in its output, and each is a sibling of the experts module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RouterScores:
    """Hooks on the routers of a model while "reroute" is on."""

    def __init__(self, model: nn.Module, layers: list[tuple[str, nn.Module]], num_experts: int) -> None:
        self._num_experts = num_experts
        self._scores: list[torch.Tensor | None] = [None] * len(layers)
        self._handles = []
        for index, (name, experts) in enumerate(layers):
            parent = model.get_submodule(name.rpartition(".")[0])
            for child in parent.children():
                if child is not experts and _looks_like_router(child, num_experts):
                    self._handles.append(child.register_forward_hook(_Capture(self, index)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def of_layer(self, index: int, tokens: int) -> torch.Tensor | None:
        """float [T, E] of the pass under way; None where the layer's router was not found."""
        scores = self._scores[index]
        return scores if scores is not None and scores.shape[0] == tokens else None

    def keep(self, index: int, output: Any) -> None:
        for value in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                flat = value.reshape(-1, value.shape[-1])
                if flat.shape[-1] == self._num_experts:
                    self._scores[index] = flat.detach()
                    return


class _Capture:
    """A hook that can be pickled and copied with its model."""

    def __init__(self, owner: RouterScores, index: int) -> None:
        self.owner = owner
        self.index = index

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.owner.keep(self.index, output)


def _looks_like_router(module: nn.Module, num_experts: int) -> bool:
    """A module with a weight that has one row per expert, itself or one level down."""
    return any(
        parameter.dim() == 2 and parameter.shape[0] == num_experts
        for name, parameter in module.named_parameters()
        if name.count(".") <= 1
    )
