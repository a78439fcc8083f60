"""The hindsight planner: its accounting equals the engine's, and it does not lose to the routers it is held
against."""

from __future__ import annotations

import numpy as np
import pytest

from moe_opt.cluster import make_policy
from moe_opt.errors import ConfigError
from moe_opt.simulate import FleetConfig, StepCost, simulate
from moe_opt.simulate.clairvoyant import _Window, clairvoyant
from moe_opt.workloads import TraceRequest


def _trace(count: int, seed: int = 0) -> list[TraceRequest]:
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.lognormal(6, 1, count), rng.lognormal(3, 0.7, count)
    return [
        TraceRequest(f"r{i}", 0.0, int(p) + 1, int(o) + 2)
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]


def test_window_loads_by_hand() -> None:
    # worker 0: 10 tokens, ends after 2 steps, refilled with 5 tokens that stay; worker 1: 20 tokens that stay
    window = _Window([(0, 10, 2), (1, 20, 9)], workers=2, steps=4)
    spread, refills = window.evaluate([0], prompts=[5], outputs=[9], reach=1)
    assert refills == [(2, 0, 0)]
    assert spread == pytest.approx(np.mean([20 - 10, 21 - 11, 22 - 5, 23 - 6]))


def test_reach_limits_the_choice_to_the_oldest() -> None:
    window = _Window([(0, 10, 1), (1, 20, 9)], workers=2, steps=4)
    assert np.isinf(window.evaluate([2], prompts=[1, 1, 1], outputs=[9, 9, 9], reach=2)[0])
    assert np.isfinite(window.evaluate([1], prompts=[1, 1, 1], outputs=[9, 9, 9], reach=2)[0])


def test_hindsight_over_the_whole_pool_is_more_level_than_the_routers() -> None:
    trace = _trace(1500)
    fleet = FleetConfig.uniform(4, 8, pool_depth=32)
    plan = clairvoyant(trace, 4, 8, pool_depth=32, steps=200, window=16, commit=8, tries=150)
    few = clairvoyant(trace, 4, 8, pool_depth=32, steps=200, candidates=8, window=16, commit=8, tries=150)
    assert len(plan.spread) == 200
    routed = {
        name: simulate(trace, make_policy(name), fleet, StepCost(fixed=0.01), max_steps=200).imbalance(50)
        for name in ("jsq", "br-0", "br-h")
    }
    assert plan.imbalance(50) < min(routed.values())
    # a planner that sees only the oldest eight puts off the large ones and may meet them all at once
    assert few.imbalance(50) < routed["jsq"]


def test_same_seed_same_plan() -> None:
    trace = _trace(400)
    runs = [clairvoyant(trace, 4, 4, pool_depth=16, steps=64, seed=s, tries=30) for s in (0, 0)]
    assert (runs[0].spread == runs[1].spread).all()


def test_too_short_a_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        clairvoyant(_trace(20), 4, 8, pool_depth=8, steps=10)
    with pytest.raises(ConfigError, match="commit"):
        clairvoyant(_trace(400), 4, 4, pool_depth=8, steps=10, window=8, commit=16)
