"""`make_policy`: from a name and options to a policy, with errors that list the choices."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from moe_opt.cluster.policies.base import Policy
from moe_opt.errors import ConfigError

_POLICIES = "moe_opt.cluster.policies"

_BUILT_IN: dict[str, tuple[str, str]] = {
    "random": (f"{_POLICIES}.baselines", "RandomPolicy"),
    "round-robin": (f"{_POLICIES}.baselines", "RoundRobinPolicy"),
    "jsq": (f"{_POLICIES}.baselines", "JoinShortestQueuePolicy"),
    "p2c": (f"{_POLICIES}.baselines", "PowerOfTwoPolicy"),
    "least-kv": (f"{_POLICIES}.baselines", "LeastKVPolicy"),
    "vllm-queue": (f"{_POLICIES}.baselines", "VLLMQueuePolicy"),
    "vllm-kv": (f"{_POLICIES}.baselines", "VLLMKVPolicy"),
    "domain": (f"{_POLICIES}.baselines", "DomainPolicy"),
    "eldr": (f"{_POLICIES}.locality", "EldrPolicy"),
    "br-0": (f"{_POLICIES}.balance", "BalanceRoute0Policy"),
    "br-h": (f"{_POLICIES}.balance", "BalanceRouteHPolicy"),
    "eldr+br-0": (f"{_POLICIES}.compose", "EldrBalanceRoute0Policy"),
    "eldr+br-h": (f"{_POLICIES}.compose", "EldrBalanceRouteHPolicy"),
}
_registered: dict[str, type[Policy]] = {}


def register_policy(name: str, policy: type[Policy]) -> None:
    """Make ``policy`` available as ``make_policy(name)``, in the simulator and in the router alike."""
    if name in _BUILT_IN or name in _registered:
        raise ConfigError(f"a routing policy named {name!r} exists already")
    _registered[name] = policy


def policy_names() -> list[str]:
    """Every name that `make_policy` takes."""
    return [*_BUILT_IN, *_registered]


def make_policy(name: str, **options: Any) -> Policy:
    """The policy called ``name``, for example ``make_policy("br-h", predictor="survival", horizon=48)``.

    All randomness comes from ``seed``, which every policy takes and those without randomness ignore. A name
    or an option that does not exist is a `ConfigError` that lists the choices.
    """
    if name in _registered:
        policy = _registered[name]
    elif name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        policy = getattr(importlib.import_module(module), attribute)
    else:
        raise ConfigError(f"unknown routing policy {name!r}; choose one of: {', '.join(policy_names())}")
    parameters = inspect.signature(policy).parameters
    unknown = sorted(set(options) - set(parameters) - {"seed"})
    if unknown:
        raise ConfigError(
            f"routing policy {name!r} has no option {', '.join(map(repr, unknown))}; "
            f"it takes: {', '.join(sorted({'seed', *parameters}))}"
        )
    if "seed" not in parameters:
        options.pop("seed", None)
    return policy(**options)
