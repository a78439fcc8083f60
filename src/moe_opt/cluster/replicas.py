"""Which replica of each activated expert a step reads (METRO section IV), over NumPy arrays.

Expert-parallel ranks host some experts twice. In memory-bound decode a step lasts as long as its busiest rank reads, so
each expert with tokens should run on exactly one of its hosts, chosen so that the busiest rank activates fewest
(min-exp-routing; Lemma 1: one replica is never worse than several). Methods:

"eplb"    the even token split that the paper compares with: an expert with t tokens activates min(t, replicas) hosts.
"greedy"  the paper's Algorithm 1: in index order, each expert on its host with fewest so far.
"metro"   ours: experts with a single host first, then those with fewest hosts, then a bounded number of augmentations,
          each of which moves one expert off a busiest rank along a shortest chain of swaps.
"optimal" the same with no bound. A maximum that no chain can lower is the least possible: the assignment is a
          semi-matching, and those are optimal when no cost-reducing path starts at a most loaded machine.

Everything is deterministic, ties going to the lowest rank or id, so that all ranks of a group find the same plan from
the same counts without talking. With numba installed the inner loops are compiled; without it they run as they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from moe_opt.errors import ConfigError

METHODS = ("metro", "greedy", "optimal", "eplb")
AUGMENTATIONS_PER_RANK = 4
_NONE = -1

Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    try:
        from numba import njit  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return function
    return cast(Function, njit(cache=True, nogil=True)(function))


class ReplicaTable:
    """One layer's placement, prepared so that choosing replicas touches only experts that have tokens.

    Args:
        hosts: bool [E, G], which ranks hold each expert; every expert needs one.

    Attributes:
        num_experts, num_ranks; replicas: int64 [E].
    """

    def __init__(self, hosts: NDArray[np.bool_]) -> None:
        if hosts.ndim != 2:
            raise ConfigError(f"hosts must be [experts, ranks], got shape {hosts.shape}")
        self.hosts = np.ascontiguousarray(hosts, dtype=np.bool_)
        self.num_experts, self.num_ranks = self.hosts.shape
        self.replicas = self.hosts.sum(axis=1)
        missing = np.flatnonzero(self.replicas == 0)
        if len(missing):
            raise ConfigError(f"experts {missing.tolist()} have no host: every expert needs a rank that holds it")
        # Row e of `hosts` is ranks[starts[e]:starts[e + 1]], ascending.
        self.starts = np.concatenate([[0], np.cumsum(self.replicas)]).astype(np.int64)
        self.ranks = np.nonzero(self.hosts)[1].astype(np.int64)
        self.fewest_first = np.argsort(self.replicas, kind="stable").astype(np.int64)
        self._index_order = np.arange(self.num_experts, dtype=np.int64)
        self.choice_limit = AUGMENTATIONS_PER_RANK * self.num_ranks

    def choose(self, tokens: NDArray[np.int64], method: str = "metro") -> NDArray[np.int64]:
        """The rank that runs each expert: int64 [E], -1 where an expert has no tokens.

        Args: tokens int64 [E], the whole group's; padding excluded. method: "metro", "greedy" or "optimal".
        """
        self._check(tokens)
        if method == "greedy":
            return _assign(tokens, self._index_order, self.starts, self.ranks, self.num_ranks, 0)
        if method == "metro":
            limit = self.choice_limit
        elif method == "optimal":
            limit = self.num_experts * self.num_ranks  # more than there can be: each lowers the sum of squares
        else:
            raise ConfigError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
        return _assign(tokens, self.fewest_first, self.starts, self.ranks, self.num_ranks, limit)

    def activated(self, tokens: NDArray[np.int64], method: str = "metro") -> NDArray[np.bool_]:
        """bool [E, G]: the expert weights that each rank reads."""
        if method == "eplb":
            self._check(tokens)
            return self.hosts & (np.cumsum(self.hosts, axis=1) <= tokens[:, None])
        choice = self.choose(tokens, method)
        result = np.zeros_like(self.hosts)
        active = np.flatnonzero(choice >= 0)
        result[active, choice[active]] = True
        return result

    def busiest(self, tokens: NDArray[np.int64], method: str = "metro") -> int:
        """Experts that the busiest rank reads."""
        return int(self.activated(tokens, method).sum(axis=0).max(initial=0))

    def _check(self, tokens: NDArray[np.int64]) -> None:
        if tokens.shape != (self.num_experts,):
            raise ConfigError(f"tokens_per_expert has shape {tokens.shape}, the placement {self.num_experts} experts")


@_compiled
def _assign(
    tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    starts: NDArray[np.int64],
    ranks: NDArray[np.int64],
    num_ranks: int,
    limit: int,
) -> NDArray[np.int64]:
    """Greedy in the given order, then at most `limit` augmentations. See `ReplicaTable.choose`."""
    num_experts = len(tokens)
    choice = np.full(num_experts, -1, dtype=np.int64)
    load = np.zeros(num_ranks, dtype=np.int64)
    movable = np.empty(num_experts, dtype=np.int64)  # activated experts with more than one host, by id
    num_movable = 0
    for i in range(num_experts):
        expert = order[i]
        if tokens[expert] <= 0:
            continue
        best = ranks[starts[expert]]
        for j in range(starts[expert] + 1, starts[expert + 1]):
            if load[ranks[j]] < load[best]:
                best = ranks[j]
        choice[expert] = best
        load[best] += 1
    if limit == 0:
        return choice
    for expert in range(num_experts):
        if choice[expert] >= 0 and starts[expert + 1] - starts[expert] > 1:
            movable[num_movable] = expert
            num_movable += 1

    level = np.empty(num_ranks, dtype=np.int64)
    through = np.empty(num_ranks, dtype=np.int64)  # the expert whose move leads to a rank
    for _ in range(limit):
        source = 0
        for rank in range(1, num_ranks):
            if load[rank] > load[source]:
                source = rank
        highest = load[source]
        level[:] = -1
        level[source] = 0
        target = -1
        depth = 0
        grew = True
        while grew and target < 0:
            grew = False
            for i in range(num_movable):
                expert = movable[i]
                if level[choice[expert]] != depth:
                    continue
                for j in range(starts[expert], starts[expert + 1]):
                    rank = ranks[j]
                    if level[rank] < 0:
                        level[rank] = depth + 1
                        through[rank] = expert
                        grew = True
            depth += 1
            for rank in range(num_ranks):  # the least loaded one that this step reached and that has room
                lower = level[rank] == depth and load[rank] <= highest - 2
                if lower and (target < 0 or load[rank] < load[target]):
                    target = rank
        if target < 0:
            break  # nothing can leave this rank: its load is the least possible maximum
        load[target] += 1
        load[source] -= 1
        while target != source:
            expert = through[target]
            previous = choice[expert]
            choice[expert] = target
            target = previous
    return choice


def choose_reference(tokens: list[int], hosts: list[list[int]], num_ranks: int) -> list[int]:
    """The "metro" choice in plain Python, for tests and for the kernel: hosts[e] lists an expert's ranks, ascending.

    Returns the rank of each expert, -1 where it has no tokens."""
    choice = [_NONE] * len(tokens)
    load = [0] * num_ranks
    active = [e for e in sorted(range(len(tokens)), key=lambda e: (len(hosts[e]), e)) if tokens[e] > 0]
    for expert in active:
        choice[expert] = min(hosts[expert], key=lambda rank: (load[rank], rank))
        load[choice[expert]] += 1
    for _ in range(AUGMENTATIONS_PER_RANK * num_ranks):
        source = max(range(num_ranks), key=lambda rank: (load[rank], -rank))
        came_from: dict[int, int] = {source: _NONE}  # rank -> the expert that would move there
        frontier = {source}
        target = None
        while frontier and target is None:
            reached: dict[int, int] = {}
            for expert in sorted(active):
                if choice[expert] in frontier and len(hosts[expert]) > 1:
                    for rank in hosts[expert]:
                        if rank not in came_from:
                            reached.setdefault(rank, expert)
            came_from.update(reached)
            frontier = set(reached)
            room = [rank for rank in frontier if load[rank] <= load[source] - 2]
            target = min(room, key=lambda rank: (load[rank], rank)) if room else None
        if target is None:
            break
        load[source] -= 1
        load[target] += 1
        while target != source:
            expert = came_from[target]
            choice[expert], target = target, choice[expert]
    return choice
