"""Trains united experts: `moe-opt distill`, `accelerate launch -m moe_opt.distill`, or `distill(config)` in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_opt.distill.config import DistillConfig
    from moe_opt.distill.pipeline import distill

__all__ = ["DistillConfig", "distill"]


def __getattr__(name: str) -> Any:
    if name == "DistillConfig":
        from moe_opt.distill.config import DistillConfig

        return DistillConfig
    if name == "distill":
        from moe_opt.distill.pipeline import distill

        return distill
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
