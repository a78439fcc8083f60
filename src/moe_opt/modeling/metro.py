"""Replica choice over tensors: METRO (section IV) beside EPLB's even split and the exact optimum.

On CUDA with Triton, "metro" is one kernel and no sync; everything else, and the CPU, goes through
`moe_opt.cluster.replicas`. Both give the same plan.
"""

from __future__ import annotations

import numpy as np
import torch

from moe_opt.cluster.replicas import METHODS, ReplicaTable
from moe_opt.errors import ConfigError


def choose_replicas(tokens_per_expert: torch.Tensor, hosts: torch.Tensor, method: str = "metro") -> torch.Tensor:
    """Which rank reads which expert in this step.

    Each expert with tokens runs on one of its hosts so that the busiest rank reads as few as possible; under "eplb" it
    runs on as many of its hosts as it has tokens. Placements that stay should be prepared once instead: `ReplicaTable`
    on the CPU, `moe_opt.modeling.kernels.metro.DeviceReplicas` on a GPU.

    Args:
        tokens_per_expert: int64 [E], over all ranks, padding excluded. hosts: bool [E, G].
        method: "metro" (default), "greedy" (Algorithm 1), "optimal" or "eplb".

    Returns: bool [E, G] on the device of `tokens_per_expert`.

    Raises:
        ConfigError: shapes that do not fit, an expert without a host, an unknown method.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if hosts.dim() != 2 or tokens_per_expert.shape != hosts.shape[:1]:
        raise ConfigError(
            f"tokens_per_expert {list(tokens_per_expert.shape)} and hosts {list(hosts.shape)} do not belong together: "
            "expected [experts] and [experts, ranks]"
        )
    device = tokens_per_expert.device
    if method == "metro" and device.type == "cuda" and triton_works():
        from moe_opt.modeling.kernels.metro import DeviceReplicas, choose_on_device

        choice = choose_on_device(tokens_per_expert, DeviceReplicas.from_hosts(hosts, device))
        return choice.unsqueeze(1) == torch.arange(hosts.shape[1], device=device)
    table = ReplicaTable(hosts.cpu().numpy())
    tokens = np.ascontiguousarray(tokens_per_expert.cpu().numpy(), dtype=np.int64)
    return torch.from_numpy(table.activated(tokens, method)).to(device)


def triton_works() -> bool:
    """Whether Triton can be imported here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
