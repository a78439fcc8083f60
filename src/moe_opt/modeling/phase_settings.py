"""What brownout is asked to do in one phase, and the checks of what a caller asks for."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from moe_opt.errors import ConfigError

PHASES = ("prefill", "decode")


@dataclasses.dataclass(frozen=True)
class PhaseSettings:
    """Brownout of one phase. `threshold` 1 is exact output.

    `active` is a field and not a comparison: compiled code guards on what it reads, and must not be built again for
    each new threshold.
    """

    threshold: float = 1.0
    strategy: str = "partial"
    keep: str = "count"
    layers: frozenset[int] | None = None
    active: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "active", self.threshold < 1.0 and self.strategy != "zero")


def check_phase(phase: str) -> None:
    """Raises: ConfigError, for anything but one of `PHASES`."""
    if phase not in PHASES:
        raise ConfigError(f"unknown phase {phase!r}; choose 'prefill', 'decode' or None for both")


def checked_threshold(threshold: Any) -> float:
    """A number in [0, 1] (a 0-d tensor will do). Raises: ConfigError."""
    if isinstance(threshold, torch.Tensor) and threshold.dim() == 0:
        threshold = threshold.item()
    if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real):
        raise ConfigError(f"threshold must be a number in [0, 1], got {threshold!r}")
    if not 0.0 <= float(threshold) <= 1.0:
        raise ConfigError(f"threshold must lie in [0, 1], got {threshold}")
    return float(threshold)


def checked_layers(layers: Sequence[int], num_layers: int) -> frozenset[int]:
    """Indices of MoE layers, each below `num_layers`. Raises: ConfigError."""
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise ConfigError(f"layers must be indices of MoE layers, got {layers!r}")
    listed = list(layers)
    odd = [layer for layer in listed if isinstance(layer, bool) or not isinstance(layer, numbers.Integral)]
    if odd:
        raise ConfigError(f"layers must be indices of MoE layers, got {odd[0]!r}")
    chosen = frozenset(int(layer) for layer in listed)
    wrong = [layer for layer in chosen if not 0 <= layer < num_layers]
    if wrong:
        raise ConfigError(f"layer {wrong[0]} does not exist: the model has MoE layers 0 to {num_layers - 1}")
    return chosen
