"""Algorithm 1 for tensors in host memory, where NumPy's calls cost a fifth of torch's.

On a CPU a decode step's experts take a millisecond or less, and two dozen torch calls a layer would eat what brownout
saves. Reading a CPU tensor is no sync, so here a plan that delegates nothing can also be dropped altogether, and the
layer runs the stock kernel on the router's very ids.
"""

from __future__ import annotations

import numpy as np

from moe_opt.modeling.brownout import _TOLERANCE


def plan_brownout_cpu(
    counts: np.ndarray,
    threshold: float,
    group_of_expert: np.ndarray,
    strategy: str,
    *,
    pinned: np.ndarray | None = None,
    priority: np.ndarray | None = None,
) -> np.ndarray | None:
    """`plan_brownout` on arrays: int64 [E] slots, or None for a plan that changes nothing.

    Args: counts int64 [E]; group_of_expert int64 [E]; pinned bool [E]; priority float [E], as in `plan_brownout`.
    """
    if strategy == "zero" or threshold >= 1:
        return None
    num_experts = counts.shape[0]
    order_key = counts if pinned is None else counts + pinned * (counts.sum() + 1)
    order = np.argsort(-order_key, kind="stable")
    in_order = counts[order]
    kept_before = np.cumsum(in_order) - in_order
    keep_in_order = (kept_before < threshold * in_order.sum() * (1.0 - _TOLERANCE)) & (in_order > 0)
    if priority is not None:
        number_kept = int(keep_in_order.sum())
        score = np.where(counts > 0, priority, -np.inf)
        if pinned is not None:
            score[pinned & (counts > 0)] = np.inf
        order = np.argsort(-score, kind="stable")
        keep_in_order = np.arange(num_experts) < number_kept
    kept = np.empty(num_experts, dtype=bool)
    kept[order] = keep_in_order
    if pinned is not None:
        kept |= pinned
    leaving = (counts > 0) & ~kept  # S2
    if not leaving.any():
        return None
    slots = np.arange(num_experts)
    if strategy == "full":
        slots[leaving] = -1
        return slots
    members = np.bincount(group_of_expert[leaving], minlength=num_experts)
    delegated = leaving & (members[group_of_expert] > 1)
    if not delegated.any():
        return None
    slots[delegated] = group_of_expert[delegated] + num_experts
    return slots
