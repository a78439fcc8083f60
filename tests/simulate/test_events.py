"""Failures, recoveries, drains and arrivals of workers: nothing is lost, nobody gets what it may not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.cluster import make_policy
from moe_opt.errors import ConfigError
from moe_opt.simulate import Drain, Fail, FleetConfig, Recover, ScaleUp, StepCost, WorkerSpec, simulate
from moe_opt.workloads import TraceRequest

STEP = StepCost(fixed=0.01)


def test_a_dead_workers_request_goes_on_elsewhere_with_its_tokens() -> None:
    # 10 tokens at 10 ms; the only worker dies after 4.5 steps; w1 takes over with 14 KV tokens and 6 to go
    trace = [TraceRequest("a", 0.0, 10, 10)]
    events = (Fail(0.045, 0), ScaleUp(0.1, WorkerSpec(4)))
    result = simulate(trace, make_policy("jsq"), FleetConfig.uniform(1, 4, events=events), STEP)
    assert result.finished[0] == pytest.approx(0.1 + 6 * 0.01)
    assert result.lost_steps[0] == 1
    assert result.worker[0] == 1
    assert result.first_token[0] == pytest.approx(0.01), "tokens that were sent stay sent"


def test_survivors_of_a_barrier_group_end_their_step_as_planned() -> None:
    trace = [TraceRequest("a", 0.0, 10, 10), TraceRequest("b", 0.0, 10, 10)]
    fleet = FleetConfig.uniform(2, 1, events=[Fail(0.045, 1)])
    result = simulate(trace, make_policy("round-robin"), fleet, STEP)
    assert result.finished == pytest.approx([0.10, 0.16])
    assert result.worker.tolist() == [0, 0]


def test_first_token_counts_again_if_its_step_did_not_end() -> None:
    trace = [TraceRequest("a", 0.0, 10, 3)]
    events = [Fail(0.005, 0), Recover(0.02, 0)]
    result = simulate(trace, make_policy("jsq"), FleetConfig.uniform(1, 1, events=events), STEP)
    assert result.first_token[0] == pytest.approx(0.03)
    assert result.finished[0] == pytest.approx(0.05)


def test_a_rank_that_is_gone_holds_nobody_up() -> None:
    trace = [TraceRequest("a", 0.0, 10, 10)]
    fleet = FleetConfig.uniform(2, 1, speeds=[1.0, 0.1], events=[Fail(0.05, 1)])
    result = simulate(trace, make_policy("round-robin"), fleet, STEP)
    assert result.finished[0] == pytest.approx(0.1 + 9 * 0.01), "the first step waits for the slow rank"


def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    trace = [TraceRequest("a", 0.0, 1, 10), TraceRequest("b", 0.0, 1, 10), TraceRequest("c", 0.05, 1, 1)]
    fleet = FleetConfig.uniform(2, 1, events=[Drain(0.02, 0)])
    result = simulate(trace, make_policy("round-robin"), fleet, STEP)
    assert result.worker.tolist() == [0, 1, 1]
    assert result.finished[2] > 0.1


def test_a_new_worker_takes_what_waits() -> None:
    trace = [TraceRequest(f"r{i}", 0.0, 1, 10) for i in range(2)]
    fleet = FleetConfig.uniform(1, 1, events=[ScaleUp(0.03, WorkerSpec(1, group=1))])
    result = simulate(trace, make_policy("jsq"), fleet, STEP)
    assert result.finished == pytest.approx([0.10, 0.13])


def test_without_workers_requests_stay_unfinished() -> None:
    trace = [TraceRequest("a", 0.0, 1, 10)]
    result = simulate(trace, make_policy("jsq"), FleetConfig.uniform(1, 1, events=[Fail(0.02, 0)]), STEP)
    assert np.isnan(result.finished[0])


def test_events_name_workers_that_exist() -> None:
    with pytest.raises(ConfigError, match="no worker 3"):
        FleetConfig.uniform(2, 1, events=[Fail(1.0, 3)])
    FleetConfig.uniform(2, 1, events=[ScaleUp(0.5), Fail(1.0, 2)])


@settings(max_examples=20, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["fail", "recover", "drain", "up"]), st.floats(0, 0.4), st.integers(0, 3)),
        max_size=8,
    ),
    barrier=st.booleans(),
    name=st.sampled_from(["jsq", "br-0", "br-h", "random"]),
    seed=st.integers(0, 3),
)
def test_conservation_through_any_events(events, barrier: bool, name: str, seed: int) -> None:
    kinds = {"fail": Fail, "recover": Recover, "drain": Drain}
    plan = [
        ScaleUp(t, WorkerSpec(2, 200, group=9 if not barrier else 0)) if kind == "up" else kinds[kind](t, w)
        for kind, t, w in events
    ]
    # worker 4 never fails, so that everything can finish
    rng = np.random.default_rng(seed)
    trace = [
        TraceRequest(f"r{i}", float(t), int(rng.integers(1, 100)), int(rng.integers(1, 30)))
        for i, t in enumerate(np.sort(rng.uniform(0, 0.3, 40)))
    ]
    fleet = FleetConfig.uniform(5, 2, barrier=barrier, kv_capacity=200, events=plan)
    result = simulate(trace, make_policy(name), fleet, STEP)
    assert not np.isnan(result.finished).any()
    assert (result.tokens == [r.output_tokens for r in trace]).all()
    assert (result.first_token <= result.finished).all()
    # a request on its way is booked while the step in progress still adds a token per running one
    assert (result.step_max <= 200 + 2).all()
