"""BalanceRoute's score of an admission, and the best subset of waiting requests under it (Section 3, D.4).

``F(D) = sum_h weight_h * (alpha * D - beta * max(0, D - margin_h))`` depends on a subset only through its
load D, and it is concave: every term is. So it rises up to one peak and falls behind it, and the best
subset is either the one of largest load at most the peak or the one of smallest load above it. D.4 states
this two-probe rule for BR-0, whose only kink is the peak; concavity makes it exact for BR-H too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import combinations
from math import comb, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Up to this many subsets a table of all of them is faster than the bit-set: 10 against 34 us for the default
# 162 subsets of 4 out of 8, 52 against 83 us at the limit, 776 against 84 us for 39,202.
ENUMERATION_LIMIT = 8192

# Slopes and scores within this share of the gain are zero: the discounts are summed in another order
# elsewhere.
ROUNDING = 1e-12


class AdmissionScore:
    """F(D) for one worker: how much admitting D KV tokens lowers the imbalance, in discounted tokens."""

    __slots__ = ("_beta", "_gain", "_margins", "_weights", "flat_until", "peak")

    def __init__(self, margins: Floats, weights: Floats, gain: float, beta: float):
        """``margins`` [H + 1] in tokens; ``weights`` [H + 1], gamma^h; ``gain`` > 0, alpha times their
        sum."""
        self._margins = margins
        self._weights = weights
        self._beta = beta
        self._gain = gain
        order = margins.argsort()
        # Behind the i-th smallest margin the slope is gain - beta * passed[i].
        passed = weights[order].cumsum()
        turn = gain / beta if beta else inf
        first = int(passed.searchsorted(turn * (1 - ROUNDING)))
        self.peak = float(margins[order[first]]) if first < len(margins) else inf
        """The smallest load of highest score; infinite where overflow never costs more than it brings."""
        self.flat_until = self.peak
        """The largest load of highest score: beyond ``peak`` only if the slope behind it is zero."""
        if first < len(margins) and passed[first] <= turn * (1 + ROUNDING):
            first = int(passed.searchsorted(turn * (1 + ROUNDING), side="right"))
            self.flat_until = float(margins[order[first]]) if first < len(margins) else inf

    def __call__(self, load: float) -> float:
        reward = self._gain * load
        score = reward - self._beta * float(self._weights @ np.maximum(load - self._margins, 0.0))
        return score if abs(score) > ROUNDING * reward else 0.0


class Choice(NamedTuple):
    """A subset by its positions in the list of candidates, ascending, and its score."""

    positions: tuple[int, ...]
    score: float


def best_single(loads: Floats, score: AdmissionScore) -> int:
    """Position of the candidate of highest score; among equals the first. ``loads`` [n] in tokens, n > 0."""
    if score.flat_until > score.peak:
        optimal = (loads >= score.peak) & (loads <= score.flat_until)
        if optimal.any():
            return int(optimal.argmax())
    left = int(np.where(loads <= score.peak, loads, -1.0).argmax())
    if loads[left] == score.peak or score.peak == inf:
        return left
    right = int(np.where(loads > score.peak, loads, inf).argmin())
    if loads[right] <= score.peak:
        return left  # nothing is behind the peak
    if loads[left] > score.peak:
        return right  # nothing is before it
    gain = score(float(loads[right])) - score(float(loads[left]))
    return right if gain > 0 or (gain == 0 and right < left) else left


class SortedLoads:
    """Loads in ascending order, the first among equals first: finds the best of a long queue by bisection."""

    __slots__ = ("_loads", "_positions")

    def __init__(self, loads: Floats):
        """``loads`` [n] in tokens."""
        order = loads.argsort(kind="stable")
        self._loads: list[float] = loads[order].tolist()
        self._positions: list[int] = order.tolist()

    def __len__(self) -> int:
        return len(self._loads)

    def pop_best(self, score: AdmissionScore) -> int:
        """Take out the load that `best_single` would choose; returns its position in the array."""
        place = self._place_of_best(score)
        del self._loads[place]
        return self._positions.pop(place)

    def rest(self) -> list[int]:
        """Positions of the loads that are left, ascending."""
        return sorted(self._positions)

    def _place_of_best(self, score: AdmissionScore) -> int:
        loads, positions = self._loads, self._positions
        if score.flat_until > score.peak:
            optimal = range(bisect_left(loads, score.peak), bisect_right(loads, score.flat_until))
            if optimal:
                return min(optimal, key=positions.__getitem__)
        right = bisect_right(loads, score.peak)
        if right == 0:
            return 0  # all are behind the peak
        left = bisect_left(loads, loads[right - 1])
        if right == len(loads) or loads[left] == score.peak:
            return left
        gain = score(loads[right]) - score(loads[left])
        return right if gain > 0 or (gain == 0 and positions[right] < positions[left]) else left


def best_subset(loads: Floats, score: AdmissionScore, max_size: int, room: float = inf) -> Choice | None:
    """The subset of 1 to ``max_size`` candidates, of load at most ``room``, with the highest score.

    ``loads`` [R] in tokens, 0 or more. Exact. None if not even one candidate fits into ``room``.
    """
    if _count_subsets(len(loads), max_size) <= ENUMERATION_LIMIT:
        return best_subset_enumerated(loads, score, max_size, room)
    return best_subset_bitset(loads, score, max_size, room)


def best_subset_enumerated(loads: Floats, score: AdmissionScore, max_size: int, room: float = inf) -> Choice | None:
    """`best_subset` over a table of all subsets: one matrix-vector product, two probes."""
    subsets, members = _subsets(len(loads), min(max_size, len(loads)))
    sums = members @ loads
    if room < inf:
        sums[sums > room] = -1.0
    below = np.where(sums <= score.peak, sums, -1.0)
    left = int(below.argmax())
    best = Choice(subsets[left], score(float(sums[left]))) if below[left] >= 0 else None
    if score.peak < inf:
        above = np.where(sums > score.peak, sums, inf)
        right = int(above.argmin())
        if above[right] < inf:
            value = score(float(sums[right]))
            if best is None or value > best.score:
                best = Choice(subsets[right], value)
    return best


@lru_cache(maxsize=256)
def _count_subsets(count: int, max_size: int) -> int:
    return sum(comb(count, size) for size in range(1, min(count, max_size) + 1))


@lru_cache(maxsize=256)
def _subsets(count: int, max_size: int) -> tuple[list[tuple[int, ...]], Floats]:
    """All subsets of ``range(count)`` of 1 to ``max_size`` members, and their membership matrix [subsets,
    count]."""
    subsets = [subset for size in range(1, max_size + 1) for subset in combinations(range(count), size)]
    members = np.zeros((len(subsets), count))
    for row, subset in enumerate(subsets):
        members[row, subset] = 1.0
    return subsets, members


def best_subset_bitset(loads: Floats, score: AdmissionScore, max_size: int, room: float = inf) -> Choice | None:
    """`best_subset` by the paper's bit-set (D.4): bit d of reach[k] is set if k candidates have load d
    together.

    One shift-or per candidate and size, and two probes into the union over the sizes. Cost grows with the
    loads in tokens but not with the number of subsets.
    """
    tokens = [int(load) for load in loads]
    # No optimum lies further behind the peak than one request: leave one member out and it would be at most
    # the peak.
    limit = min(room, score.peak + max(tokens, default=0), sum(tokens))
    if not tokens or limit < 0 or max_size < 1:
        return None
    mask = (1 << (int(limit) + 1)) - 1
    reach = [1] + [0] * max_size
    history = [reach]
    for load in tokens:
        reach = [1, *(reach[k] | (reach[k - 1] << load) & mask for k in range(1, max_size + 1))]
        history.append(reach)
    reachable = 0
    for sums in reach[1:]:
        reachable |= sums
    if not reachable:
        return None
    probes = []
    up_to_peak = (1 << (int(min(score.peak, limit)) + 1)) - 1
    if reachable & up_to_peak:
        probes.append((reachable & up_to_peak).bit_length() - 1)
    behind = reachable & ~up_to_peak
    if behind:
        probes.append((behind & -behind).bit_length() - 1)
    load = max(probes, key=lambda probe: score(float(probe)))
    return Choice(_backtrack(history, tokens, load), score(float(load)))


def _backtrack(history: list[list[int]], tokens: list[int], load: int) -> tuple[int, ...]:
    """The members of a subset of ``load``: as few as possible, and late candidates only where they are
    needed."""
    value = load
    size = next(k for k in range(1, len(history[-1])) if history[-1][k] >> load & 1)
    members = []
    for position in range(len(tokens) - 1, -1, -1):
        if size == 0:
            break
        if not history[position][size] >> load & 1:
            members.append(position)
            load -= tokens[position]
            size -= 1
    assert (load, size) == (0, 0), f"no subset of load {value}: the bit-set is inconsistent"
    return tuple(reversed(members))
