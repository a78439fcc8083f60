"""The subset search is exact: it never scores less than trying every subset."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from balance_reference import every_subset, score
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_opt.cluster.policies.subsets import (
    AdmissionScore,
    Choice,
    SortedLoads,
    best_single,
    best_subset,
    best_subset_bitset,
    best_subset_enumerated,
)

LOADS = st.lists(st.integers(0, 400), min_size=1, max_size=8)
MARGINS = st.lists(st.integers(0, 900), min_size=1, max_size=6)
FACTORS = st.tuples(
    st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 1.0, 8.0])
)
SEARCHES = [best_subset, best_subset_enumerated, best_subset_bitset]


def scorer(margins: list[int], gamma: float = 1.0, alpha: float = 1.0, beta: float = 8.0) -> AdmissionScore:
    weights = gamma ** np.arange(len(margins))
    return AdmissionScore(np.array(margins, dtype=float), weights, alpha * weights.sum(), beta)


def best_by_force(loads: list[int], margins: list[int], factors: tuple, max_size: int, room: float) -> float | None:
    values = [
        score(sum(loads[i] for i in subset), margins, *factors)
        for subset in every_subset(loads, max_size)
        if sum(loads[i] for i in subset) <= room
    ]
    return max(values, default=None)


@pytest.mark.parametrize("search", SEARCHES)
@settings(max_examples=150, deadline=None)
@given(
    loads=LOADS, margins=MARGINS, factors=FACTORS, max_size=st.integers(1, 10), room=st.sampled_from([inf, 0, 250, 700])
)
@example(loads=[0, 0], margins=[0], factors=(1.0, 1.0, 8.0), max_size=2, room=inf)
@example(loads=[300], margins=[10], factors=(1.0, 1.0, 8.0), max_size=1, room=250)
def test_no_subset_scores_higher(search, loads, margins, factors, max_size, room):
    found = search(np.array(loads, dtype=float), scorer(margins, *factors), max_size, room)
    best = best_by_force(loads, margins, factors, max_size, room)
    if best is None:
        assert found is None
        return
    load = sum(loads[i] for i in found.positions)
    assert 1 <= len(set(found.positions)) == len(found.positions) <= max_size
    assert load <= room
    assert found.score == pytest.approx(score(load, margins, *factors), rel=1e-9, abs=1e-9)
    assert found.score == pytest.approx(best, rel=1e-9, abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(loads=st.lists(st.integers(0, 400), min_size=1, max_size=30), margins=MARGINS, factors=FACTORS)
def test_no_single_request_scores_higher_and_none_as_high_is_older(loads, margins, factors):
    found = best_single(np.array(loads, dtype=float), scorer(margins, *factors))
    values = [score(load, margins, *factors) for load in loads]
    assert values[found] == pytest.approx(max(values), rel=1e-9, abs=1e-6)
    assert found == loads.index(loads[found])


@settings(max_examples=200, deadline=None)
@given(loads=st.lists(st.integers(0, 40), min_size=1, max_size=30), margins=MARGINS, factors=FACTORS)
def test_bisection_finds_what_the_scan_finds(loads, margins, factors):
    array = np.array(loads, dtype=float)
    left = SortedLoads(array)
    positions = list(range(len(loads)))
    while len(left):
        best = positions[best_single(array[positions], scorer(margins, *factors))]
        assert left.pop_best(scorer(margins, *factors)) == best
        positions.remove(best)
        assert left.rest() == positions


def test_one_worker_alone_is_first_come_first_served():
    """K = 1: the worker is its own envelope, every admission scores 0."""
    assert best_single(np.array([300.0, 10.0, 500.0]), scorer([0], beta=1.0)) == 0


def test_fills_the_margin_and_does_not_pass_it():
    """Eight workers, margin 100: 60 + 40 fits exactly; 70 + 40 overflows by 10 and would cost 8 * 10."""
    for search in SEARCHES:
        found = search(np.array([70.0, 60.0, 40.0]), scorer([100]), 2)
        assert found == Choice((1, 2), 100.0)


def test_overflows_where_that_still_pays():
    """Margin 100, requests of 30 and 104: 104 scores 104 - 8 * 4 = 72, more than 30."""
    for search in SEARCHES:
        assert search(np.array([30.0, 104.0]), scorer([100]), 1) == Choice((1,), 72.0)


def test_the_size_limit_binds():
    for search in SEARCHES:
        assert search(np.array([10.0, 20.0, 30.0, 40.0]), scorer([1000]), 2) == Choice((2, 3), 70.0)


def test_many_candidates_take_the_bit_set_and_stay_exact():
    """24 candidates in subsets of 12: 10 million subsets. The margin is the sum of one of them, so F = D =
    margin."""
    rng = np.random.default_rng(0)
    loads = rng.integers(50, 3000, size=24).astype(float)
    margin = float(loads[[1, 4, 5, 9, 11, 17, 20]].sum())
    found = best_subset(loads, scorer([int(margin)]), 12)
    assert found is not None
    assert found.score == margin
    assert loads[list(found.positions)].sum() == margin
