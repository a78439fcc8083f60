"""moe_opt: serve Mixture-of-Experts models from Hugging Face faster.

Importing this package imports neither torch nor Transformers: names are resolved on first use, so that the
routing policies and the simulator stay light (DESIGN: "The house").
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moe_opt.hook import hook, unhook

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moe_opt.config import MoEOptConfig as MoEOptConfig
    from moe_opt.modeling.auto import MoEOptimizedForCausalLM as MoEOptimizedForCausalLM
    from moe_opt.modeling.united import UnitedExperts as UnitedExperts
    from moe_opt.modeling.united import attach_united_experts as attach_united_experts
    from moe_opt.modeling.united import detach_united_experts as detach_united_experts

_LAZY = {
    "MoEOptConfig": "moe_opt.config",
    "MoEOptimizedForCausalLM": "moe_opt.modeling.auto",
    "UnitedExperts": "moe_opt.modeling.united",
    "attach_united_experts": "moe_opt.modeling.united",
    "detach_united_experts": "moe_opt.modeling.united",
}

__all__ = ["__version__", "hook", "unhook", *sorted(_LAZY)]

hook()  # AutoModelForCausalLM.from_pretrained(..., moe_opt=True)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moe_opt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
