"""Placements: every expert has a host, no rank is overfull, replicas go where they help, moves are few."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.cluster.placement import (
    mean_busiest,
    place_by_activation,
    place_by_load,
    place_hierarchically,
    rebalance,
    sample_batches,
)
from moe_opt.errors import ConfigError


@settings(max_examples=60, deadline=None)
@given(experts=st.integers(1, 40), ranks=st.integers(1, 8), spare=st.integers(0, 4), seed=st.integers(0, 5))
def test_every_expert_is_hosted_within_the_slots(experts: int, ranks: int, spare: int, seed: int) -> None:
    load = np.random.default_rng(seed).exponential(size=experts)
    slots = -(-experts // ranks) + spare
    hosts = place_by_load(load, ranks, slots)
    assert hosts.any(axis=1).all()
    assert (hosts.sum(axis=0) <= slots).all()


def test_popular_experts_get_the_replicas() -> None:
    assert place_by_load(np.array([10.0, 1, 1, 1]), 2, 3).sum(axis=1)[0] == 2


def test_hierarchical_keeps_a_groups_experts_on_one_node() -> None:
    load = np.random.default_rng(0).exponential(size=32)
    hosts = place_hierarchically(load, num_ranks=8, slots_per_rank=6, num_nodes=2, num_groups=8)
    assert hosts.any(axis=1).all()
    assert (hosts.sum(axis=0) <= 6).all()
    by_node = hosts.reshape(32, 2, 4).any(axis=2)
    assert (by_node.sum(axis=1) == 1).all()
    for group in by_node.reshape(8, 4, 2):
        assert (group == group[0]).all()


def test_activation_placement_lowers_the_busiest_rank_on_batches_it_has_not_seen(data_dir: Path) -> None:
    routing = np.load(data_dir / "routing" / "esft_dsv2lite_token_routing.npz")["law_ids"][:, 3].astype(np.int64)
    load = np.bincount(routing[:3000].ravel(), minlength=64).astype(float)
    seen = sample_batches(routing[:3000], 64, 64, 24, seed=0)
    unseen = sample_batches(routing[3000:], 64, 64, 60, seed=1)
    hosts = place_by_activation(seen, 4, 18, proposals=600)
    assert hosts.any(axis=1).all()
    assert (hosts.sum(axis=0) <= 18).all()
    assert mean_busiest(unseen, hosts) <= mean_busiest(unseen, place_by_load(load, 4, 18))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), experts=st.integers(4, 24), ranks=st.integers(2, 5))
def test_rebalancing_renames_ranks_and_counts_what_moves(seed: int, experts: int, ranks: int) -> None:
    random = np.random.default_rng(seed)
    slots = -(-experts // ranks) + 1
    before = place_by_load(random.exponential(size=experts), ranks, slots)
    wanted = place_by_load(random.exponential(size=experts), ranks, slots)
    found = rebalance(before, wanted)
    assert sorted(map(tuple, found.hosts.T)) == sorted(map(tuple, wanted.T)), "the same ranks under other names"
    assert len(found.moves) == int((found.hosts & ~before).sum())
    assert len(found.moves) <= int((wanted & ~before).sum())
    shuffled = before[:, random.permutation(ranks)]
    assert rebalance(before, shuffled).moves == []


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_rebalancing_keeps_groups_on_their_nodes(seed: int) -> None:
    random = np.random.default_rng(seed)
    before, wanted = (place_hierarchically(random.exponential(size=16), 4, 5, 2, 4) for _ in range(2))
    found = rebalance(before, wanted, num_nodes=2)
    by_node = found.hosts.reshape(16, 2, 2).any(axis=2)
    assert (by_node.sum(axis=1) == 1).all()
    for group in by_node.reshape(4, 4, 2):
        assert (group == group[0]).all()
    swapped = before[:, [2, 3, 0, 1]]
    assert rebalance(before, swapped, num_nodes=2).moves == []


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 3 slots a rank"):
        place_by_load(np.ones(5), 2, 2)
    with pytest.raises(ConfigError, match="hierarchical placement needs"):
        place_hierarchically(np.ones(8), 4, 2, num_nodes=3, num_groups=8)
    with pytest.raises(ConfigError, match="batch_size"):
        sample_batches(np.zeros((4, 2), dtype=np.int64), 3, 5, 1, 0)
