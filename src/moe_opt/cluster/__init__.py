"""Decisions over a fleet: plain code over state that a caller hands in (no torch, no HTTP, no clock).

The router runs these policies on live state, the simulator on a trace, a test on a literal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_opt.cluster.policies import Policy as Policy
    from moe_opt.cluster.policies import make_policy as make_policy
    from moe_opt.cluster.policies import policy_names as policy_names
    from moe_opt.cluster.policies import register_policy as register_policy
    from moe_opt.cluster.state import Assignment as Assignment
    from moe_opt.cluster.state import Request as Request
    from moe_opt.cluster.state import RunningRequest as RunningRequest
    from moe_opt.cluster.state import Worker as Worker

_LAZY = {
    "Assignment": "moe_opt.cluster.state",
    "Request": "moe_opt.cluster.state",
    "RunningRequest": "moe_opt.cluster.state",
    "Worker": "moe_opt.cluster.state",
    "Policy": "moe_opt.cluster.policies",
    "make_policy": "moe_opt.cluster.policies",
    "policy_names": "moe_opt.cluster.policies",
    "register_policy": "moe_opt.cluster.policies",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moe_opt.cluster' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
