"""Which expert weights a step reads: BrownoutServe's Algorithm 1 and the per-token strategies beside it.

Everything here is device code without a host sync: `plan_brownout` and the delegation functions run inside a forward
pass, under `torch.compile` and in a CUDA graph. `plan_brownout_reference` is the same in plain Python.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_opt.errors import ConfigError

STRATEGIES = ("zero", "full", "partial", "reroute", "top-k")
PER_TOKEN_STRATEGIES = ("reroute", "top-k")
KEEP_RULES = ("count", "mass", "error")

# kept < threshold * total is compared with this slack, relative to the product: 0.28 * 25 is above 7 in floats.
TOLERANCE = 1e-6


class BrownoutPlan(NamedTuple):
    slot_of_expert: torch.Tensor  # int64 [E]: e = original expert, E + u = united expert u, -1 = dropped


def plan_brownout(
    counts: torch.Tensor,
    threshold: float | torch.Tensor,
    group_of_expert: torch.Tensor,
    strategy: str = "partial",
    *,
    pinned: torch.Tensor | None = None,
    priority: torch.Tensor | None = None,
) -> BrownoutPlan:
    """Decide where each expert's tokens go in this step (BrownoutServe, Algorithm 1).

    Experts in descending order of token count (ties by lower id) keep themselves while the tokens kept so far are
    below `threshold * total`. The others that have tokens form S2: "partial" sends each group's S2 tokens to its united
    expert, unless the group has one S2 expert, which runs itself; "full" drops them; "zero" delegates nothing.

    Args:
        counts: int64 [E], tokens that the router sent to each expert; padding excluded by the caller.
        threshold: share of tokens that must stay with originals, in [0, 1]; a float or a 0-d tensor on any device.
        group_of_expert: int64 [E], the united expert (0-based, below E) that stands in for each expert.
        strategy: "zero", "full" or "partial".
        pinned: bool [E] or None: experts that the step reads whatever happens (rows that asked for exact output);
            they keep their tokens, since delegating them would save no read.
        priority: float [E] or None: keep by this score instead of by count, at the number of originals that the count
            rule would keep (`keep="mass"` and `keep="error"`).

    Returns: `BrownoutPlan` with `slot_of_expert` int64 [E] on the device of `counts`. Experts without tokens map to
        themselves.

    Raises:
        ConfigError: an unknown or per-token strategy. Values on a device are not checked, that would sync.
    """
    if strategy not in ("zero", "full", "partial"):
        hint = (
            " acts per token, not per expert; use delegate_per_token"
            if strategy in PER_TOKEN_STRATEGIES
            else f" is unknown; choose one of {', '.join(STRATEGIES[:3])}"
        )
        raise ConfigError(f"plan_brownout: strategy {strategy!r}{hint}")
    if not isinstance(threshold, torch.Tensor) and not 0.0 <= threshold <= 1.0:
        raise ConfigError(f"plan_brownout: threshold must lie in [0, 1], got {threshold}")
    num_experts = counts.shape[0]
    experts = torch.arange(num_experts, device=counts.device)
    if strategy == "zero":
        return BrownoutPlan(experts)

    kept = _originals_to_keep(counts, threshold, pinned, priority)
    leaving = (counts > 0) & ~kept  # S2
    if strategy == "full":
        return BrownoutPlan(torch.where(leaving, -1, experts))
    # One group never has more members than there are experts, so E bins hold every group without asking the device.
    members = torch.zeros_like(counts).scatter_add_(0, group_of_expert, leaving.to(counts.dtype))
    delegated = leaving & (members[group_of_expert] > 1)
    return BrownoutPlan(torch.where(delegated, group_of_expert + num_experts, experts))


def _originals_to_keep(
    counts: torch.Tensor,
    threshold: float | torch.Tensor,
    pinned: torch.Tensor | None,
    priority: torch.Tensor | None,
) -> torch.Tensor:
    """bool [E]: Algorithm 1's S1."""
    order_key = counts
    if pinned is not None:  # first in line, so that their tokens count as kept
        order_key = counts + pinned.to(counts.dtype) * (counts.sum() + 1)
    order = torch.argsort(order_key, descending=True, stable=True)
    in_order = counts[order]
    kept_before = in_order.cumsum(0) - in_order
    wanted = in_order.sum().to(torch.float64) * threshold
    keep_in_order = (kept_before < wanted * (1.0 - TOLERANCE)) & (in_order > 0)
    if isinstance(threshold, torch.Tensor):
        keep_in_order = keep_in_order | (threshold.to(counts.device) >= 1)
    elif threshold >= 1:
        keep_in_order = torch.ones_like(keep_in_order)
    if priority is not None:
        number_kept = keep_in_order.sum()
        score = torch.where(counts > 0, priority, float("-inf"))
        if pinned is not None:
            score = torch.where(pinned & (counts > 0), float("inf"), score)
        order = torch.argsort(score, descending=True, stable=True)
        keep_in_order = torch.arange(counts.shape[0], device=counts.device) < number_kept
    kept = torch.empty_like(keep_in_order).scatter_(0, order, keep_in_order)
    return kept if pinned is None else kept | pinned


def plan_brownout_reference(
    counts: list[int], threshold: float, group_of_expert: list[int], strategy: str = "partial"
) -> list[int]:
    """Algorithm 1 in plain Python, as the paper writes it. Returns the slot of each expert."""
    num_experts = len(counts)
    slots = list(range(num_experts))
    if strategy == "zero":
        return slots
    wanted = threshold * sum(counts)
    kept_tokens = 0
    s2 = []
    for expert in sorted(range(num_experts), key=lambda e: (-counts[e], e)):
        if counts[expert] == 0:
            continue
        if kept_tokens < wanted * (1.0 - TOLERANCE) or threshold >= 1:
            kept_tokens += counts[expert]
        else:
            s2.append(expert)
    if strategy == "full":
        for expert in s2:
            slots[expert] = -1
        return slots
    groups: dict[int, list[int]] = {}
    for expert in s2:
        groups.setdefault(group_of_expert[expert], []).append(expert)
    for group, members in groups.items():
        if len(members) > 1:
            for expert in members:
                slots[expert] = num_experts + group
    return slots


class Delegation(NamedTuple):
    ids: torch.Tensor  # int64 [T, k]: slot that computes each assignment, -1 = none
    weights: torch.Tensor  # [T, k]: its weight, 0 where the id is -1


def merge_duplicates(ids: torch.Tensor, weights: torch.Tensor) -> Delegation:
    """Give a token's assignments to one slot to the first of them, weights added, so that it is computed once.

    Args: ids int64 [T, k]; weights [T, k].
    """
    top_k = ids.shape[1]
    same = ids.unsqueeze(2) == ids.unsqueeze(1)  # [T, k, k]
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=ids.device).tril(-1)
    repeated = (same & earlier).any(2) | (ids < 0)
    merged = (same * weights.unsqueeze(1)).sum(2)
    return Delegation(torch.where(repeated, -1, ids), torch.where(repeated, 0, merged).to(weights.dtype))


def tokens_per_expert(ids: torch.Tensor, num_slots: int, valid: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [num_slots]: assignments per slot. ids int64 [T, k], -1 ignored; valid bool [T] or None."""
    flat = ids if valid is None else torch.where(valid.unsqueeze(1), ids, -1)
    bins = torch.zeros(num_slots + 1, dtype=torch.int64, device=ids.device)
    flat = torch.where(flat < 0, num_slots, flat).reshape(-1)
    return bins.scatter_add_(0, flat, torch.ones_like(flat))[:num_slots]


def delegate_per_group(
    ids: torch.Tensor,
    weights: torch.Tensor,
    threshold: float | torch.Tensor,
    group_of_expert: torch.Tensor,
    strategy: str,
    *,
    valid: torch.Tensor | None = None,
    exact: torch.Tensor | None = None,
    keep: str = "count",
    error_per_expert: torch.Tensor | None = None,
) -> Delegation | None:
    """Apply Algorithm 1 to one layer's assignments. Returns None where the plan is known to save nothing, which only
    host memory can tell without a sync; the caller then runs the layer as the router chose.

    Args:
        ids: int64 [T, k], the router's experts. weights: [T, k], their gate weights.
        valid: bool [T], False for padding, which is neither counted nor computed. exact: bool [T], rows that keep
            their experts; what they read is read anyway, so it stays with the originals for all rows.
        keep: "count" (the paper), "mass" (gate mass) or "error" (gate mass squared times `error_per_expert`).
        error_per_expert: float [E], mean squared output error of the united expert that would stand in.
    """
    if ids.device.type == "cpu" and isinstance(threshold, float) and not torch.compiler.is_compiling():
        from moe_opt.modeling.brownout_cpu import delegate_on_cpu

        return delegate_on_cpu(ids, weights, threshold, group_of_expert, strategy, valid, exact, keep, error_per_expert)
    num_experts = group_of_expert.shape[0]
    browned = valid
    pinned = None
    if exact is not None:
        browned = ~exact if valid is None else valid & ~exact
        pinned = tokens_per_expert(ids, num_experts, exact if valid is None else exact & valid) > 0
    counts = tokens_per_expert(ids, num_experts, browned)
    priority = None
    if keep != "count":
        priority = keep_priority(ids, weights, browned, num_experts, keep, error_per_expert)
    plan = plan_brownout(counts, threshold, group_of_expert, strategy, pinned=pinned, priority=priority)
    slots = plan.slot_of_expert[ids]
    if exact is not None:
        slots = torch.where(exact.unsqueeze(1), ids, slots)
    if valid is not None:
        slots = torch.where(valid.unsqueeze(1), slots, -1)
    return merge_duplicates(slots, weights)


def keep_priority(
    ids: torch.Tensor,
    weights: torch.Tensor,
    browned: torch.Tensor | None,
    num_experts: int,
    keep: str,
    error_per_expert: torch.Tensor | None,
) -> torch.Tensor:
    """float [E]: gate mass of each expert, or the predicted squared output error of delegating it."""
    mass = weights.float() if browned is None else weights.float() * browned.unsqueeze(1)
    if keep == "error":
        mass = mass.square()
    priority = torch.zeros(num_experts, device=ids.device).scatter_add_(0, ids.reshape(-1), mass.reshape(-1))
    if keep == "error" and error_per_expert is not None:
        priority = priority * error_per_expert
    return priority


def delegate_per_token(
    ids: torch.Tensor,
    weights: torch.Tensor,
    threshold: float | torch.Tensor,
    num_experts: int,
    strategy: str,
    *,
    scores: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    exact: torch.Tensor | None = None,
) -> Delegation | None:
    """The two strategies that need no extra weights. A token keeps its heaviest experts until they hold `threshold`
    of its gate mass (its first expert always); the total gate mass stays what it was.

    "top-k": the others are dropped. "reroute" (after OEA, arXiv 2511.02237): each of the others that the batch reads
    anyway stays; the rest move to the token's best-scored experts among those that the batch reads anyway. Returns None
    where it is known to save nothing, as `delegate_per_group` does.

    Args:
        ids, weights: [T, k]. scores: float [T, E], router logits; without them a minor expert that nobody reads is
            dropped, as in "top-k". valid, exact: bool [T] or None, as in `delegate_per_group`.
    """
    mass = weights.float()
    total = mass.sum(1, keepdim=True)
    order = torch.argsort(mass, dim=1, descending=True, stable=True)
    in_order = mass.gather(1, order)
    before = in_order.cumsum(1) - in_order
    keep_in_order = before < total * threshold * (1.0 - TOLERANCE)
    keep_in_order = keep_in_order | (torch.arange(ids.shape[1], device=ids.device) == 0)
    keep = torch.empty_like(keep_in_order).scatter_(1, order, keep_in_order)
    if isinstance(threshold, torch.Tensor):
        keep = keep | (threshold.to(ids.device) >= 1)
    elif threshold >= 1:
        keep = torch.ones_like(keep)
    if exact is not None:
        keep = keep | exact.unsqueeze(1)
    live = keep if valid is None else keep & valid.unsqueeze(1)

    slots = torch.where(keep, ids, -1)
    new_mass = torch.where(keep, mass, 0)
    if strategy == "reroute":
        read = tokens_per_expert(torch.where(live, ids, -1), num_experts) > 0
        stays = ~keep & read[ids]
        slots = torch.where(stays, ids, slots)
        new_mass = torch.where(stays, mass, new_mass)
        if scores is not None:
            slots, new_mass = _move_to_read_experts(ids, mass, slots, new_mass, scores, read)
    scale = total / new_mass.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    new_weights = (new_mass * scale).to(weights.dtype)
    # A plan that saves no read is not applied (the batch's other tokens need the experts anyway).
    before_read = tokens_per_expert(ids, num_experts, valid) > 0
    after_read = tokens_per_expert(slots, num_experts, valid) > 0
    saves = after_read.sum() < before_read.sum()
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(saves):
        return None
    slots = torch.where(saves, slots, ids)
    # Untouched rows keep their very weights: rescaling by a quotient near 1 would round them.
    untouched = (slots == ids).all(1, keepdim=True)
    new_weights = torch.where(untouched, weights, new_weights)
    if valid is not None:
        slots = torch.where(valid.unsqueeze(1), slots, -1)
        new_weights = torch.where(valid.unsqueeze(1), new_weights, 0)
    return Delegation(slots, new_weights)


def _move_to_read_experts(
    ids: torch.Tensor,
    mass: torch.Tensor,
    slots: torch.Tensor,
    new_mass: torch.Tensor,
    scores: torch.Tensor,
    read: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each open slot (-1) of a token takes the token's best-scored expert that is read anyway and not yet its own."""
    top_k = ids.shape[1]
    own = torch.zeros(scores.shape, dtype=torch.int64, device=ids.device).scatter_add_(
        1, slots.clamp_min(0), (slots >= 0).to(torch.int64)
    )
    allowed = read.unsqueeze(0) & (own == 0)
    best = torch.where(allowed, scores.float(), float("-inf")).topk(min(top_k, scores.shape[1]), dim=1)
    open_slot = slots < 0
    rank = (open_slot.cumsum(1) - 1).clamp(0, best.indices.shape[1] - 1)  # n-th open slot takes the n-th best
    candidate = best.indices.gather(1, rank)
    candidate_score = best.values.gather(1, rank)
    taken = open_slot & candidate_score.isfinite()
    # A softmax router would have given the substitute exp(score difference) times the weight of what it replaces.
    ratio = (candidate_score - scores.float().gather(1, ids)).clamp(max=0).exp()
    return torch.where(taken, candidate, slots), torch.where(taken, mass * ratio, new_mass)
