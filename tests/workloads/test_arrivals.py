"""Arrival processes: rates, burstiness, bounds, and reproducibility."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_opt.errors import ConfigError
from moe_opt.workloads import (
    TraceRequest,
    backlog,
    burst_profile_arrivals,
    gamma_arrivals,
    multi_selection_requests,
    poisson_arrivals,
    rescale,
    with_arrivals,
)


@given(rate=st.floats(0.1, 1000), cv=st.floats(0.2, 5), seed=st.integers(0, 5))
def test_gamma_arrivals_rise_at_the_rate(rate: float, cv: float, seed: int) -> None:
    times = gamma_arrivals(2000, rate, cv, seed)
    assert (np.diff(times) >= 0).all()
    assert times[-1] / 2000 * rate == pytest.approx(1.0, abs=6 * cv / np.sqrt(2000))
    assert (times == gamma_arrivals(2000, rate, cv, seed)).all()


def test_gamma_burstiness_is_the_one_asked_for() -> None:
    gaps = np.diff(gamma_arrivals(50_000, 10.0, cv=3.0, seed=0))
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.05)
    poisson = np.diff(poisson_arrivals(50_000, 10.0, seed=0))
    assert poisson.std() / poisson.mean() == pytest.approx(1.0, rel=0.03)


def test_burst_profile_has_its_rates_in_its_places() -> None:
    times = burst_profile_arrivals([(10.0, 100.0), (10.0, 0.0)], seed=0, repeat_until=40.0)
    assert (np.diff(times) >= 0).all()
    counts = np.histogram(times, bins=[0, 10, 20, 30, 40])[0]
    assert counts[1] == counts[3] == 0
    assert counts[0] == pytest.approx(1000, rel=0.1)


def test_rescaling_keeps_the_pattern() -> None:
    trace = [TraceRequest(f"r{i}", t, 1, 1) for i, t in enumerate((2.0, 3.0, 7.0))]
    pressed = rescale(trace, rate=4.0)
    assert [r.arrival for r in pressed] == pytest.approx([0.0, 0.1, 0.5])
    assert [r.arrival for r in backlog(trace)] == [0, 0, 0]
    assert [r.arrival for r in with_arrivals(trace, np.array([5.0, 6.0]))] == [5.0, 6.0]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_must_be_positive_numbers(bad: float) -> None:
    with pytest.raises(ConfigError):
        poisson_arrivals(3, bad)
    with pytest.raises(ConfigError):
        gamma_arrivals(3, 1.0, bad)


def test_a_backlog_cannot_be_rescaled() -> None:
    with pytest.raises(ConfigError, match="Poisson"):
        rescale([TraceRequest("a", 0, 1, 1), TraceRequest("b", 0, 1, 1)], 1.0)


def test_siblings_share_exactly_their_prefix() -> None:
    rows = multi_selection_requests(30, block_tokens=16, returns=0.3, seed=1)
    assert [r.arrival for r in rows] == sorted(r.arrival for r in rows)
    assert len({r.id for r in rows}) == len(rows)
    by_prefix: dict[str | None, set[tuple[int, ...]]] = {}
    own: set[int] = set()
    for r in rows:
        assert len(r.block_hashes) == r.prompt_tokens // 16
        shared = tuple(h for h in r.block_hashes if h >= 0)
        assert r.block_hashes[: len(shared)] == shared
        by_prefix.setdefault(r.domain, set()).add(shared)
        mine = {h for h in r.block_hashes if h < 0}
        assert not own & mine, "suffix blocks are nobody else's"
        own |= mine
    assert all(len(v) == 1 for v in by_prefix.values())
    assert len(by_prefix) < 30, "some groups score an earlier prefix again"
