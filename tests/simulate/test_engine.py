"""The event loop against cases computed by hand, and what must hold for any policy, trace and fleet."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.cluster import Assignment, Policy, make_policy
from moe_opt.errors import ConfigError
from moe_opt.simulate import FleetConfig, StepCost, WorkerSpec, simulate
from moe_opt.simulate.engine import PolicyError
from moe_opt.simulate.metrics import SimResult
from moe_opt.workloads import TraceRequest


class PinPolicy(Policy):
    """Sends each request where its id says, as soon as there is a slot."""

    def __init__(self, target: dict[str, str]):
        self.target = target

    def assign(self, waiting, workers, now):
        free = {w.id: w.free_slots for w in workers}
        out = []
        for r in waiting:
            goal = self.target[r.id]
            if free.get(goal, 0) > 0:
                free[goal] -= 1
                out.append(Assignment(r.id, goal))
        return out


def _assert_conserved(result: SimResult, trace: list[TraceRequest]) -> None:
    assert not np.isnan(result.finished).any(), "every request finishes"
    assert (result.tokens == [r.output_tokens for r in trace]).all()
    assert result.step_tokens.sum() == result.tokens.sum() or result.lost_steps.any()
    assert (result.admitted >= result.arrival).all()
    assert (result.first_token > result.admitted).all()
    assert (result.finished >= result.first_token).all()
    assert (result.worker >= 0).all()


def test_one_request_costs_what_the_formula_says() -> None:
    # prompt 100, 3 tokens: steps read 100, 101, 102 KV tokens
    trace = [TraceRequest("a", 0.5, 100, 3)]
    cost = StepCost(fixed=0.01, per_kv_token=1e-4, per_request=0.001)
    result = simulate(trace, make_policy("jsq"), FleetConfig.uniform(1, 4), cost)
    steps = [0.01 + 0.001 + 1e-4 * kv for kv in (100, 101, 102)]
    assert result.first_token[0] == pytest.approx(0.5 + steps[0])
    assert result.finished[0] == pytest.approx(0.5 + sum(steps))
    assert result.tpot[0] == pytest.approx((steps[1] + steps[2]) / 2)
    assert result.ttft[0] == pytest.approx(steps[0])


def test_barrier_makes_the_light_worker_wait_for_the_heavy_one() -> None:
    trace = [TraceRequest("heavy", 0.0, 1000, 2), TraceRequest("light", 0.0, 10, 2)]
    policy = PinPolicy({"heavy": "w0", "light": "w1"})
    cost = StepCost(fixed=0.01, per_kv_token=1e-5)
    together = simulate(trace, policy, FleetConfig.uniform(2, 1, barrier=True), cost)
    apart = simulate(trace, policy, FleetConfig.uniform(2, 1, barrier=False), cost)
    heavy, light = 2 * 0.01 + 1e-5 * 2001, 2 * 0.01 + 1e-5 * 21
    assert together.finished == pytest.approx([heavy, heavy])
    assert apart.finished == pytest.approx([heavy, light])
    assert together.step_spread.tolist() == [990, 990]
    assert together.imbalance() == 990


def test_two_groups_do_not_wait_for_each_other() -> None:
    trace = [TraceRequest(n, 0.0, p, 1) for n, p in (("a", 1000), ("b", 10), ("c", 500), ("d", 20))]
    workers = tuple(WorkerSpec(1, group=g) for g in (0, 0, 1, 1))
    policy = PinPolicy({"a": "w0", "b": "w1", "c": "w2", "d": "w3"})
    result = simulate(trace, policy, FleetConfig(workers), StepCost(per_kv_token=1e-3))
    assert result.finished == pytest.approx([1.0, 1.0, 0.5, 0.5])


def test_a_request_that_arrives_within_a_step_joins_at_its_end() -> None:
    trace = [TraceRequest("first", 0.0, 1, 5), TraceRequest("second", 0.015, 1, 1)]
    result = simulate(trace, make_policy("jsq"), FleetConfig.uniform(1, 2), StepCost(fixed=0.01))
    assert result.finished == pytest.approx([0.05, 0.03])


def test_slow_worker_takes_proportionally_longer() -> None:
    trace = [TraceRequest("a", 0.0, 1, 4), TraceRequest("b", 0.0, 1, 4)]
    fleet = FleetConfig.uniform(2, 1, barrier=False, speeds=[1.0, 0.5])
    policy = PinPolicy({"a": "w0", "b": "w1"})
    result = simulate(trace, policy, fleet, StepCost(fixed=0.01))
    assert result.finished == pytest.approx([0.04, 0.08])


def test_transfer_delays_the_first_token_and_holds_the_slot() -> None:
    trace = [TraceRequest("a", 0.0, 100, 1), TraceRequest("b", 0.0, 100, 1)]
    fleet = FleetConfig.uniform(1, 1, transfer_s_per_token=1e-3)
    result = simulate(trace, make_policy("jsq"), fleet, StepCost(fixed=0.01))
    assert result.finished == pytest.approx([0.11, 0.22])


def test_planned_steps_equal_single_steps(random_trace: list[TraceRequest], cost: StepCost) -> None:
    """Many steps in one array operation give what one step at a time gives."""
    import moe_opt.simulate.engine as engine

    fleet = FleetConfig.uniform(3, 4)
    fast = simulate(random_trace, make_policy("least-kv"), fleet, cost)
    saved = engine.MAX_PLAN
    try:
        engine.MAX_PLAN = 1
        slow = simulate(random_trace, make_policy("least-kv"), fleet, cost)
    finally:
        engine.MAX_PLAN = saved
    assert fast.finished == pytest.approx(slow.finished)
    assert fast.imbalance() == pytest.approx(slow.imbalance())
    assert (fast.worker == slow.worker).all()


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("name", ["jsq", "random", "round-robin", "p2c", "least-kv", "br-0", "br-h"])
def test_every_request_finishes_once(
    name: str, barrier: bool, random_trace: list[TraceRequest], cost: StepCost
) -> None:
    fleet = FleetConfig.uniform(4, 3, barrier=barrier, kv_capacity=8000)
    _assert_conserved(simulate(random_trace, make_policy(name), fleet, cost), random_trace)


def test_same_seed_same_run(random_trace: list[TraceRequest], cost: StepCost) -> None:
    fleet = FleetConfig.uniform(4, 3)
    runs = [simulate(random_trace, make_policy("random", seed=s), fleet, cost) for s in (1, 1, 2)]
    assert (runs[0].finished == runs[1].finished).all()
    assert (runs[0].worker == runs[1].worker).all()
    assert (runs[0].worker != runs[2].worker).any()


def test_policy_sees_true_counts(random_trace: list[TraceRequest], cost: StepCost) -> None:
    """Lazily updated worker state equals a recount from the trace at every decision."""
    length = {r.id: r for r in random_trace}

    class Checked(Policy):
        def __init__(self) -> None:
            self.inner = make_policy("jsq")
            self.calls = 0

        def assign(self, waiting, workers, now):
            self.calls += 1
            for w in workers:
                values = dict(w.running)
                assert w.kv_tokens == sum(r.kv_tokens for r in values.values())
                assert len(w.running) == len(values) <= w.max_running
                for key, r in values.items():
                    assert r.kv_tokens == length[key].prompt_tokens + r.generated
                    assert r.remaining == length[key].output_tokens - r.generated >= 1
            return self.inner.assign(waiting, workers, now)

    for barrier in (True, False):
        policy = Checked()
        simulate(random_trace, policy, FleetConfig.uniform(3, 4, barrier=barrier), cost)
        assert policy.calls > 50


def test_without_oracle_nothing_is_known_of_the_end(random_trace: list[TraceRequest], cost: StepCost) -> None:
    class Checked(Policy):
        inner = make_policy("jsq")

        def assign(self, waiting, workers, now):
            assert all(r.remaining is None for w in workers for r in w.running.values())
            return self.inner.assign(waiting, workers, now)

    simulate(random_trace, Checked(), FleetConfig.uniform(3, 4), cost, oracle=False)


def test_closed_pool_stays_at_its_depth(random_trace: list[TraceRequest], cost: StepCost) -> None:
    result = simulate(random_trace, make_policy("jsq"), FleetConfig.uniform(2, 4, pool_depth=16), cost)
    assert (result.step_waiting == 16).all()
    assert np.isnan(result.finished).any(), "the run ends when the pool can no longer be filled"
    assert result.step_tokens.sum() >= result.tokens.sum()


def test_capacity_sends_the_youngest_back() -> None:
    # both fit at first (2 x 10 tokens) but not to their ends (2 x 30): the younger one makes room and comes
    # back
    trace = [TraceRequest("old", 0.0, 10, 20), TraceRequest("young", 0.0, 10, 20)]
    fleet = FleetConfig.uniform(1, 2, kv_capacity=40)
    result = simulate(trace, make_policy("jsq"), fleet, StepCost(fixed=0.01))
    assert result.lost_steps.tolist() == [0, 1]
    assert result.finished[0] == pytest.approx(0.2)
    assert (result.tokens == 20).all()
    assert (result.step_max <= 40).all()


class Liar(Policy):
    def __init__(self, answer):
        self.answer = answer

    def assign(self, waiting, workers, now):
        return self.answer(waiting, workers)


@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda q, w: [Assignment("nobody", "w0")], "does not wait"),
        (lambda q, w: [Assignment(q[0].id, "w9")], "takes nothing"),
        (lambda q, w: [Assignment(r.id, "w0") for r in q], "more than 1 requests"),
        (lambda q, w: [], "idle fleet"),
    ],
)
def test_a_policy_that_breaks_its_promise_is_named(answer, message: str) -> None:
    trace = [TraceRequest("a", 0.0, 1, 1), TraceRequest("b", 0.0, 1, 1)]
    with pytest.raises(PolicyError, match=message):
        simulate(trace, Liar(answer), FleetConfig.uniform(1, 1), StepCost(fixed=0.01))


def test_a_request_too_large_for_the_fleet_is_refused() -> None:
    trace = [TraceRequest("big", 0.0, 90, 20)]
    with pytest.raises(ConfigError, match="request big grows to 110"):
        simulate(trace, make_policy("jsq"), FleetConfig.uniform(1, 1, kv_capacity=100), StepCost(fixed=1))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 400), st.integers(1, 30)), min_size=1, max_size=40),
    workers=st.integers(1, 5),
    slots=st.integers(1, 4),
    barrier=st.booleans(),
    capacity=st.sampled_from([None, 430, 900]),
    transfer=st.sampled_from([0.0, 1e-5]),
    name=st.sampled_from(["jsq", "random", "br-0", "br-h", "least-kv"]),
)
def test_conservation(rows, workers, slots, barrier, capacity, transfer, name) -> None:
    rows = sorted(rows)
    trace = [TraceRequest(f"r{i}", *row) for i, row in enumerate(rows)]
    fleet = FleetConfig.uniform(workers, slots, barrier=barrier, kv_capacity=capacity, transfer_s_per_token=transfer)
    result = simulate(trace, make_policy(name), fleet, StepCost(fixed=0.004, per_kv_token=1e-6))
    assert not np.isnan(result.finished).any()
    assert (result.tokens == [r.output_tokens for r in trace]).all()
    if capacity is not None:
        # a request on its way is booked while the step in progress still adds a token per running one
        assert (result.step_max <= capacity + slots).all()
    assert (result.tpot >= 0.004 - 1e-12).all()
