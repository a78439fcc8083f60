"""Routing policies by name; users add their own with `register_policy`."""

from __future__ import annotations

from moe_opt.cluster.policies.base import Fleet, OneByOnePolicy, Policy
from moe_opt.cluster.policies.registry import make_policy, policy_names, register_policy

__all__ = ["Fleet", "OneByOnePolicy", "Policy", "make_policy", "policy_names", "register_policy"]
