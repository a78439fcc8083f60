"""Replica choice against exhaustive search and plain code, and METRO's figures on recorded routing."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.cluster.placement import place_by_load, sample_batches
from moe_opt.cluster.replicas import METHODS, ReplicaTable, choose_reference
from moe_opt.errors import ConfigError


@st.composite
def instances(draw: st.DrawFn, experts: int = 24, ranks: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [E], hosts [E, G]) with a host for every expert."""
    num_ranks = draw(st.integers(1, ranks))
    rows = st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks).filter(any)
    hosts = np.array(draw(st.lists(rows, min_size=1, max_size=experts)))
    tokens = np.array(draw(st.lists(st.integers(0, 4), min_size=len(hosts), max_size=len(hosts))))
    return tokens, hosts


def exhaustive(tokens: np.ndarray, hosts: np.ndarray) -> int:
    choices = [np.flatnonzero(hosts[e]) for e in np.flatnonzero(tokens)]
    best = len(choices)
    for pick in itertools.product(*choices):
        best = min(best, int(np.bincount(pick, minlength=hosts.shape[1]).max(initial=0)))
    return best


@settings(max_examples=60, deadline=None)
@given(instance=instances(experts=7, ranks=3))
def test_optimal_is_the_exhaustive_optimum(instance) -> None:
    tokens, hosts = instance
    assert ReplicaTable(hosts).busiest(tokens, "optimal") == exhaustive(tokens, hosts)


@settings(max_examples=150, deadline=None)
@given(instance=instances())
def test_metro_is_the_plain_code(instance) -> None:
    tokens, hosts = instance
    ranks = [np.flatnonzero(row).tolist() for row in hosts]
    assert ReplicaTable(hosts).choose(tokens).tolist() == choose_reference(tokens.tolist(), ranks, hosts.shape[1])


@settings(max_examples=100, deadline=None)
@given(instance=instances())
def test_every_expert_with_tokens_runs_on_one_of_its_hosts(instance) -> None:
    tokens, hosts = instance
    table = ReplicaTable(hosts)
    for method in METHODS:
        activated = table.activated(tokens, method)
        assert not (activated & ~hosts).any()
        copies = activated.sum(axis=1)
        expected = np.minimum(tokens, hosts.sum(axis=1)) if method == "eplb" else np.minimum(tokens, 1)
        assert (copies == expected).all()


@settings(max_examples=100, deadline=None)
@given(instance=instances())
def test_order_of_the_methods(instance) -> None:
    tokens, hosts = instance
    table = ReplicaTable(hosts)
    busiest = {method: table.busiest(tokens, method) for method in METHODS}
    assert busiest["optimal"] <= busiest["metro"] <= busiest["optimal"] + 1
    assert busiest["optimal"] <= busiest["greedy"]
    assert busiest["optimal"] <= busiest["eplb"]


def test_algorithm_1_by_hand() -> None:
    # Index order, ties to the lowest rank: E0 -> 0, E1 -> 1 (rank 0 has one), E2 only on 0, E3 only on 0.
    hosts = np.array([[1, 1], [1, 1], [1, 0], [1, 0]], dtype=bool)
    tokens = np.array([1, 5, 2, 1])
    table = ReplicaTable(hosts)
    assert table.choose(tokens, "greedy").tolist() == [0, 1, 0, 0]
    assert table.choose(tokens, "metro").tolist() == [1, 1, 0, 0]
    assert table.busiest(tokens, "greedy") == 3
    assert table.busiest(tokens, "metro") == 2


def test_an_augmentation_goes_through_a_full_rank() -> None:
    # E0..E2 fill rank 0 from hosts 0 and 1, rank 1 is full of experts that may go to rank 2.
    hosts = np.array([[1, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 1, 1], [0, 1, 0]], dtype=bool)
    tokens = np.ones(6, dtype=np.int64)
    assert ReplicaTable(hosts).busiest(tokens, "metro") == 2


def test_the_papers_point() -> None:
    # Every expert on both ranks, many tokens each: an even split reads all of them twice.
    table = ReplicaTable(np.ones((4, 2), dtype=bool))
    assert table.busiest(np.array([8, 8, 8, 8]), "eplb") == 4
    assert table.busiest(np.array([8, 8, 8, 8]), "metro") == 2
    assert table.busiest(np.array([1, 0, 0, 0]), "eplb") == 1, "one token activates one replica"


@pytest.mark.parametrize(("ranks", "replication"), [(4, 1.125), (4, 1.5), (8, 1.125), (8, 1.5)])
def test_metro_on_recorded_routing(data_dir: Path, ranks: int, replication: float) -> None:
    routing = np.load(data_dir / "routing" / "esft_dsv2lite_token_routing.npz")["law_ids"].astype(np.int64)
    over = {"metro": [], "greedy": []}
    for layer in (0, 12, 25):
        load = np.bincount(routing[:3000, layer].ravel(), minlength=64).astype(float)
        table = ReplicaTable(place_by_load(load, ranks, -(-int(64 * replication) // ranks)))
        for size in (16, 64, 128):
            for tokens in sample_batches(routing[3000:, layer], 64, size, 20, seed=size):
                least = table.busiest(tokens, "optimal")
                for method, values in over.items():
                    values.append(table.busiest(tokens, method) / least - 1)
                assert table.busiest(tokens, "metro") <= least + 1
    assert np.mean(over["metro"]) <= 0.005
    assert np.mean(over["greedy"]) > np.mean(over["metro"])


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"experts \[1\] have no host"):
        ReplicaTable(np.array([[True], [False]]))
    table = ReplicaTable(np.ones((2, 2), dtype=bool))
    with pytest.raises(ConfigError, match="unknown method"):
        table.activated(np.array([1, 1]), "best")
    with pytest.raises(ConfigError, match="the placement 2 experts"):
        table.choose(np.array([1, 1, 1]))
