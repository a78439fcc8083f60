"""Which experts share a united expert: by index (the paper), by similar outputs, or by co-activation.

Groups are balanced: ceil(E / ways) groups of at most `ways` experts, so that a united expert never has to stand in for
more than the checkpoint's name promises.
"""

from __future__ import annotations

import math

import numpy as np


def group_experts(similarity: np.ndarray | None, num_experts: int, ways: int) -> list[int]:
    """Group of each expert.

    Args:
        similarity: float [E, E], symmetric; experts of high similarity are put together. None groups by index, as the
            paper does: expert e belongs to group e // ways.

    Returns: E group numbers, counted from 0 without gaps in order of first appearance.
    """
    if similarity is None:
        return [expert // ways for expert in range(num_experts)]
    groups = _seeded(similarity, ways)
    groups = _swapped(similarity, groups)
    return _renumbered(groups)


def group_sizes(num_experts: int, ways: int) -> list[int]:
    """Sizes of the ceil(E / ways) groups: all `ways` but the last, as when grouping by index."""
    count = math.ceil(num_experts / ways)
    return [ways] * (count - 1) + [num_experts - ways * (count - 1)]


def within_similarity(similarity: np.ndarray, groups: list[int]) -> float:
    """Sum of similarities over the pairs that share a group: what `group_experts` makes large."""
    together = np.equal.outer(groups, groups)
    return float((similarity * together).sum() - np.trace(similarity)) / 2


def _seeded(similarity: np.ndarray, ways: int) -> np.ndarray:
    """Fill group after group: the free expert that has the closest company first, then its best companions."""
    free = np.ones(len(similarity), dtype=bool)
    groups = np.full(len(similarity), -1)
    off_diagonal = similarity - np.diag(np.full(len(similarity), np.inf))
    for group, size in enumerate(group_sizes(len(similarity), ways)):
        among = np.where(np.outer(free, free), off_diagonal, -np.inf)
        nearest = np.sort(among, axis=1)[:, ::-1][:, : max(size - 1, 1)]
        score = np.where(np.isfinite(nearest), nearest, 0).sum(1)
        first = int(np.argmax(np.where(free, score, -np.inf)))
        members = [first]
        free[first] = False
        while len(members) < size:
            closeness = similarity[:, members].sum(1)
            best = int(np.argmax(np.where(free, closeness, -np.inf)))
            members.append(best)
            free[best] = False
        groups[members] = group
    return groups


def _swapped(similarity: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Exchange the two experts of different groups that gain most, until no exchange gains."""
    groups = groups.copy()
    count = groups.max() + 1
    pairwise = similarity - np.diag(np.diag(similarity))
    tolerance = 1e-9 * max(1.0, float(np.abs(similarity).max()))
    for _ in range(50 * len(groups)):
        member = np.eye(count)[groups]  # [E, groups]
        to_group = pairwise @ member  # similarity of each expert to each group
        own = to_group[np.arange(len(groups)), groups]
        moved = to_group[:, groups] - own[:, None]  # gain of expert i if it takes the place of expert j
        gain = moved + moved.T - 2 * pairwise
        gain[np.equal.outer(groups, groups)] = 0
        first, second = np.unravel_index(np.argmax(gain), gain.shape)
        if gain[first, second] <= tolerance:
            break
        groups[first], groups[second] = groups[second], groups[first]
    return groups


def _renumbered(groups: np.ndarray) -> list[int]:
    order: dict[int, int] = {}
    return [order.setdefault(int(group), len(order)) for group in groups]
