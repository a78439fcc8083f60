"""Groups are balanced, cover every expert, and put together what is alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.distill.grouping import group_experts, group_sizes, within_similarity


@given(experts=st.integers(1, 24), ways=st.integers(1, 9), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_groups_are_balanced_and_cover_all_experts(experts: int, ways: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    half = random.normal(size=(experts, experts))
    for similarity in (None, half + half.T):
        groups = group_experts(similarity, experts, ways)
        sizes = np.bincount(groups)
        assert len(groups) == experts
        assert len(sizes) == math.ceil(experts / ways)
        assert sorted(sizes) == sorted(group_sizes(experts, ways))
        assert groups[0] == 0


def test_grouping_by_index_is_the_papers() -> None:
    assert group_experts(None, 8, 3) == [0, 0, 0, 1, 1, 1, 2, 2]


def test_twins_are_found_wherever_they_stand() -> None:
    random = np.random.default_rng(1)
    label = random.permutation(np.repeat(np.arange(8), 4))
    similarity = np.equal.outer(label, label) + 0.1 * random.random((32, 32))
    groups = np.array(group_experts((similarity + similarity.T) / 2, 32, 4))
    for group in range(8):
        assert len(set(label[groups == group])) == 1


@pytest.mark.parametrize("ways", [2, 3, 4, 8])
def test_no_exchange_of_two_experts_improves_the_groups(ways: int) -> None:
    random = np.random.default_rng(2)
    half = random.random((16, 16))
    similarity = half + half.T
    groups = group_experts(similarity, 16, ways)
    best = within_similarity(similarity, groups)
    assert best > within_similarity(similarity, group_experts(None, 16, ways))
    for i in range(16):
        for j in range(i):
            other = list(groups)
            other[i], other[j] = other[j], other[i]
            assert within_similarity(similarity, other) <= best + 1e-6
