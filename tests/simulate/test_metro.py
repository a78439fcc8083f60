"""Busiest-rank counts against exhaustive search, placement invariants, and the shape of the Pareto curve."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.devices import device_preset
from moe_opt.errors import ConfigError
from moe_opt.simulate.metro import (
    busiest_rank,
    decode_pareto,
    draw_tokens_per_expert,
    gain_at_slo,
    pareto_front,
    place_replicas,
    zipf_popularity,
)
from moe_opt.simulate.models import MODELS, get_model, kv_heads


def _exhaustive(tokens: np.ndarray, hosts: np.ndarray) -> int:
    choices = [np.flatnonzero(hosts[e]) for e in np.flatnonzero(tokens)]
    best = len(choices)
    for pick in itertools.product(*choices):
        best = min(best, int(np.bincount(pick, minlength=hosts.shape[1]).max(initial=0)))
    return best


@settings(max_examples=60, deadline=None)
@given(data=st.data(), experts=st.integers(1, 7), ranks=st.integers(1, 3))
def test_optimum_is_the_exhaustive_one_and_metro_lies_between(data, experts: int, ranks: int) -> None:
    tokens = np.array(data.draw(st.lists(st.integers(0, 3), min_size=experts, max_size=experts)))
    rows = st.lists(st.booleans(), min_size=ranks, max_size=ranks).filter(any)
    hosts = np.array(data.draw(st.lists(rows, min_size=experts, max_size=experts)))
    optimal = busiest_rank(tokens, hosts, "optimal")
    assert optimal == _exhaustive(tokens, hosts)
    assert optimal <= busiest_rank(tokens, hosts, "metro")
    assert optimal <= busiest_rank(tokens, hosts, "eplb")


def test_the_papers_point_in_one_example() -> None:
    # every expert on both ranks, many tokens each: splitting evenly reads all of them twice
    tokens, hosts = np.array([8, 8, 8, 8]), np.ones((4, 2), dtype=bool)
    assert busiest_rank(tokens, hosts, "eplb") == 4
    assert busiest_rank(tokens, hosts, "metro") == 2
    assert busiest_rank(np.array([1, 0, 0, 0]), hosts, "eplb") == 1, "one token activates one replica"


@settings(max_examples=40, deadline=None)
@given(experts=st.integers(1, 40), ranks=st.integers(1, 8), spare=st.integers(0, 4), seed=st.integers(0, 5))
def test_placement_hosts_every_expert_within_the_slots(experts: int, ranks: int, spare: int, seed: int) -> None:
    load = np.random.default_rng(seed).exponential(size=experts)
    slots = -(-experts // ranks) + spare
    hosts = place_replicas(load, ranks, slots)
    assert hosts.any(axis=1).all()
    assert (hosts.sum(axis=0) <= slots).all()


def test_popular_experts_get_the_replicas() -> None:
    hosts = place_replicas(np.array([10.0, 1, 1, 1]), 2, 3)
    assert hosts.sum(axis=1)[0] == 2


def test_tokens_choose_distinct_experts() -> None:
    rng = np.random.default_rng(0)
    counts = draw_tokens_per_expert(zipf_popularity(16, 1.0, rng), 50, 4, rng)
    assert counts.sum() == 200
    assert counts.max() <= 50


def test_wrong_input_is_refused() -> None:
    hosts = np.ones((2, 2), dtype=bool)
    with pytest.raises(ConfigError, match="no host"):
        busiest_rank(np.array([1, 1]), np.array([[True], [False]]))
    with pytest.raises(ConfigError, match="unknown method"):
        busiest_rank(np.array([1, 1]), hosts, "best")
    with pytest.raises(ConfigError, match="cannot hold"):
        place_replicas(np.ones(5), 2, 2)


def test_pareto_of_table_ii() -> None:
    name = "qwen3-30b-a3b"
    common = {"hidden_size": MODELS[name]["hidden_size"], "kv_heads": kv_heads(name), "sampled_layers": 2}
    model, device = get_model(name), device_preset("B200")
    eplb = decode_pareto(model, device, 8, (256, 64), replication=1.5, method="eplb", **common)
    best = decode_pareto(model, device, 8, (256, 64), replication=1.5, method="optimal", **common)
    assert len(eplb) == 4 * 2
    assert all(b.busiest_experts <= e.busiest_experts for b, e in zip(best, eplb, strict=True))
    front = pareto_front(eplb)
    assert [p.tpot for p in front] == sorted(p.tpot for p in front)
    assert [p.throughput for p in front] == sorted(p.throughput for p in front)
    gains = gain_at_slo(best, eplb, [p.tpot for p in eplb])
    assert min(gains) >= 1.0
    assert np.isnan(gain_at_slo(best, eplb, [0.0])[0])
