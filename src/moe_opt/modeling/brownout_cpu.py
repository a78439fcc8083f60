"""Algorithm 1 for tensors in host memory: in one call of ours (native/brownout.cpp) where the CPU kernels are in use,
else in NumPy, whose calls cost a fifth of torch's.

On a CPU a decode step's experts take a millisecond or less, and two dozen torch calls a layer would eat what brownout
saves. Reading a CPU tensor is no sync, so here a plan that delegates nothing can also be dropped altogether, and the
layer runs the stock kernel on the router's very ids.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch

from moe_opt.modeling.brownout import TOLERANCE, Delegation, keep_priority, merge_duplicates
from moe_opt.modeling.kernels.native import library


def delegate_on_cpu(
    ids: torch.Tensor,
    weights: torch.Tensor,
    threshold: float,
    group_of_expert: torch.Tensor,
    strategy: str,
    valid: torch.Tensor | None,
    exact: torch.Tensor | None,
    keep: str,
    error_per_expert: torch.Tensor | None,
) -> Delegation | None:
    """`delegate_per_group` in host memory; None where the plan saves nothing."""
    if strategy == "zero" or threshold >= 1:
        return None
    priority = None
    if keep != "count":
        browned = _browned(valid, exact)
        experts = group_of_expert.shape[0]
        priority = keep_priority(ids, weights, browned, experts, keep, error_per_expert).detach()
    loaded = library.if_loaded()
    delegate = _delegate_in_numpy if loaded is None or weights.requires_grad else _Native(loaded).delegate
    return delegate(ids, weights, threshold, group_of_expert, strategy, valid, exact, priority)


class _Native:
    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._call = loaded.moe_opt_delegate

    def delegate(
        self,
        ids: torch.Tensor,
        weights: torch.Tensor,
        threshold: float,
        group_of_expert: torch.Tensor,
        strategy: str,
        valid: torch.Tensor | None,
        exact: torch.Tensor | None,
        priority: torch.Tensor | None,
    ) -> Delegation | None:
        ids, group_of_expert = ids.contiguous(), group_of_expert.contiguous()
        shares = weights.detach().float().contiguous()
        slots, merged = torch.empty_like(ids), torch.empty_like(shares)
        flags = [None if rows is None else rows.contiguous() for rows in (valid, exact)]
        scores = None if priority is None else priority.float().contiguous()
        unchanged = self._call(
            ids.data_ptr(), *ids.shape, shares.data_ptr(), group_of_expert.shape[0], group_of_expert.data_ptr(),
            threshold, strategy == "partial", *(None if rows is None else rows.data_ptr() for rows in flags),
            None if scores is None else scores.data_ptr(), slots.data_ptr(), merged.data_ptr(),
        )  # fmt: skip
        return None if unchanged else Delegation(slots, merged.to(weights.dtype))


def _browned(valid: torch.Tensor | None, exact: torch.Tensor | None) -> torch.Tensor | None:
    """bool [T]: rows that brownout may touch; None for all."""
    if exact is None:
        return valid
    return ~exact if valid is None else valid & ~exact


def _delegate_in_numpy(
    ids: torch.Tensor,
    weights: torch.Tensor,
    threshold: float,
    group_of_expert: torch.Tensor,
    strategy: str,
    valid: torch.Tensor | None,
    exact: torch.Tensor | None,
    priority: torch.Tensor | None,
) -> Delegation | None:
    alone = ids.shape[0] == 1 and exact is None and valid is None
    if alone and _one_token_saves_nothing(ids, threshold, group_of_expert, strategy):
        return None
    num_experts = group_of_expert.shape[0]
    browned = _browned(valid, exact)
    pinned = None
    if exact is not None:
        exact_ids = ids[exact if valid is None else exact & valid].numpy().reshape(-1)
        pinned = np.bincount(exact_ids, minlength=num_experts) > 0
    browned_ids = (ids if browned is None else ids[browned]).numpy().reshape(-1)
    counts = np.bincount(browned_ids, minlength=num_experts)
    scores = None if priority is None else priority.numpy()
    plan = plan_brownout_cpu(counts, threshold, group_of_expert.numpy(), strategy, pinned=pinned, priority=scores)
    if plan is None:
        return None
    slots = torch.from_numpy(plan)[ids]
    if exact is not None:
        slots = torch.where(exact.unsqueeze(1), ids, slots)
    if valid is not None:
        slots = torch.where(valid.unsqueeze(1), slots, -1)
    if ids.shape[1] == 1 or strategy == "full":  # nothing can be computed twice
        return Delegation(slots, weights.masked_fill(slots < 0, 0))
    return merge_duplicates(slots, weights)


def _one_token_saves_nothing(ids: torch.Tensor, threshold: float, group_of_expert: torch.Tensor, strategy: str) -> bool:
    """Algorithm 1 for a single token, whose k experts have one assignment each: the k - n highest ids leave. A few
    Python operations, because at batch 1 the experts themselves take little longer than a plan."""
    if strategy == "full":
        return False
    experts = sorted(ids.tolist()[0])
    kept = math.ceil(threshold * len(experts) * (1.0 - TOLERANCE))
    groups = group_of_expert.numpy()
    leaving = [int(groups[expert]) for expert in experts[kept:]]
    return len(set(leaving)) == len(leaving)


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
    keep_in_order = (kept_before < threshold * in_order.sum() * (1.0 - TOLERANCE)) & (in_order > 0)
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
