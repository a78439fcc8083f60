"""BR-0, BR-H and their composition with ELDR: against plain code, worked examples, and each other."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from balance_reference import ReferenceFleet, every_subset, projected_loads, score
from fleets import CENTROIDS, check_promises, fleets, random_fleet, signature_model, signatures
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_opt.cluster import Assignment, Request, RunningRequest, Worker, make_policy
from moe_opt.cluster.policies.projection import Projection

MODEL = signature_model()
RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def loaded(*tokens: int, free: int = 1) -> list[Worker]:
    """One worker per entry, with one running request of that many KV tokens."""
    return [Worker(f"w{k}", 1 + free, {f"run-{k}": RunningRequest(load)}) for k, load in enumerate(tokens)]


def queue(*prompts: int) -> list[Request]:
    return [Request(f"r{i}", tokens, arrival=float(i)) for i, tokens in enumerate(prompts)]


class TestWorkedExamples:
    """Four workers at 100, 70, 100, 100 tokens: the second has a margin of 30, the others none."""

    def test_stage_2_fills_the_margin_exactly(self):
        workers = loaded(100, 70, 100, 100, free=0)
        workers[1].max_running = 3
        assignments = make_policy("br-0", pool_bound=4).assign(queue(28, 12, 18, 90), workers, 0.0)
        assert assignments == [("r1", "w1"), ("r2", "w1")]  # 12 + 18 = 30; 28 alone would leave 2

    def test_stage_1_takes_the_largest_that_is_safe(self):
        workers = loaded(100, 70, 100, 100, free=0)
        workers[1].max_running = 2
        assert make_policy("br-0", pool_bound=0).assign(queue(5, 28, 31, 90), workers, 0.0) == [("r1", "w1")]

    def test_overflow_goes_where_it_costs_least_and_nothing_starves(self):
        """No margin anywhere: every admission costs, the smallest request goes first, to the first worker."""
        workers = loaded(100, 100, free=1)
        assert make_policy("br-0").assign(queue(50, 20), workers, 0.0) == [("r1", "w0"), ("r0", "w1")]

    def test_lookahead_sees_who_leaves(self):
        """Level now, but w1 loses its request in two steps: BR-H gives w1 the long prompt, BR-0 cannot
        know."""
        workers = loaded(100, 100)
        workers[0].running["run-0"].remaining = 200
        workers[1].running["run-1"].remaining = 2
        [first, second] = make_policy("br-h").assign(queue(10, 90), workers, 0.0)
        assert {first, second} == {("r1", "w1"), ("r0", "w0")}
        assert make_policy("br-0").assign(queue(10, 90), workers, 0.0)[0] == ("r0", "w0")

    def test_a_zero_token_prompt_is_admitted(self):
        assert make_policy("br-h").assign(queue(0), loaded(5, 5), 0.0) == [("r0", "w0")]

    def test_one_worker_is_first_come_first_served(self):
        for name in ("br-0", "br-h"):
            for pool_bound in (1, 5):  # Stage 1 and then 2, or Stage 2 from the start
                policy = make_policy(name, pool_bound=pool_bound)
                assignments = policy.assign(queue(500, 3, 70), [Worker("w", 2)], 0.0)
                assert [a.request_id for a in assignments] == ["r0", "r1"], (name, pool_bound)

    def test_a_subset_larger_than_the_window_is_the_window(self):
        workers = loaded(1000, 10, free=0)
        workers[1].max_running = 9
        policy = make_policy("br-0", candidates=2, subset_size=8, pool_bound=8)
        assert policy.assign(queue(5, 6, 7), workers, 0.0)[:2] == [("r0", "w1"), ("r1", "w1")]

    def test_the_subset_size_limits_one_admission(self):
        """A margin of 100: 50 + 50 fill it together, but one at a time the 60 goes first."""
        workers = loaded(100, 0, free=0)
        workers[1].max_running = 3
        for subset_size, first in ((1, ["r2"]), (2, ["r0", "r1"])):
            policy = make_policy("br-0", subset_size=subset_size, pool_bound=9)
            assignments = policy.assign(queue(50, 50, 60), workers, 0.0)
            assert [a.request_id for a in assignments[: len(first)]] == first

    def test_huge_loads_stay_exact(self):
        workers = loaded(3_000_000_000, 0, free=0)
        workers[1].max_running = 5
        waiting = queue(1_999_999_999, 1_000_000_000, 1_000_000_001)
        assert Counter(make_policy("br-0").assign(waiting, workers, 0.0)[:2]) == Counter([("r0", "w1"), ("r2", "w1")])


def reference_tick(waiting, workers, *, horizon, gamma, alpha, beta, candidates, subset_size, pool_bound):
    """Both stages in plain code. Yields (worker, requests, score, best score possible) per admission."""
    fleet = ReferenceFleet(workers, horizon)
    pending = sorted(waiting, key=lambda request: request.arrival)
    while pending and max(fleet.free, default=0) > 0:
        worker = fleet.next_worker()
        margins = fleet.margins(worker)
        abundant = sum(fleet.free) > pool_bound
        window = pending if abundant else pending[:candidates]
        size = 1 if abundant else min(subset_size, fleet.free[worker], len(window))
        scores = {
            subset: score(sum(window[i].prompt_tokens for i in subset), margins, gamma, alpha, beta)
            for subset in every_subset([r.prompt_tokens for r in window], size)
        }
        best = max(scores.values())
        if best <= 0:
            scores = {subset: value for subset, value in scores.items() if len(subset) == 1}
            best = max(scores.values())
        chosen = yield worker, window, scores, best
        for request in chosen:
            pending.remove(request)
        fleet.admit(worker, chosen)


@RELAXED
@given(
    case=fleets(limits=False),
    horizon=st.sampled_from([0, 1, 5]),
    candidates=st.sampled_from([1, 3, 5]),
    subset_size=st.sampled_from([1, 2, 4]),
    pool_bound=st.sampled_from([0, 3, 100]),
    beta=st.sampled_from([1.0, 4.0]),
)
def test_every_admission_is_the_best_that_plain_code_finds(case, horizon, candidates, subset_size, pool_bound, beta):
    """Replays the policy's admissions on the reference: same worker, and no subset scores higher."""
    waiting, workers = case
    constants = {"horizon": horizon, "gamma": 0.9, "alpha": 1.0, "beta": beta}
    limits = {"candidates": candidates, "subset_size": subset_size, "pool_bound": pool_bound}
    assignments = make_policy("br-h", **constants, **limits).assign(waiting, workers, 0.0)
    requests = {request.id: request for request in waiting}
    place = {worker.id: k for k, worker in enumerate(workers)}
    reference = reference_tick(waiting, workers, **constants, **limits)
    done = 0
    step = next(reference, None)
    while step is not None:
        worker, window, scores, best = step
        # The policy admitted up to `subset_size` requests here: the shortest run of its admissions that
        # scores best.
        value, chosen = float("-inf"), []
        for size in range(1, subset_size + 1):
            run = [requests[a.request_id] for a in assignments[done : done + size] if place[a.worker_id] == worker]
            if len(run) == size and all(request in window for request in run):
                run_value = scores.get(tuple(sorted(map(window.index, run))), float("-inf"))
                if run_value > value:
                    value, chosen = run_value, run
        assert value == pytest.approx(best, rel=1e-9, abs=1e-6)
        done += len(chosen)
        try:
            step = reference.send(chosen)
        except StopIteration:
            step = None
    assert done == len(assignments)


@RELAXED
@given(case=fleets(), pool_bound=st.sampled_from([0, 2, None]))
def test_br_h_without_lookahead_is_br_0(case, pool_bound):
    waiting, workers = case
    br_0 = make_policy("br-0", pool_bound=pool_bound)
    br_h = make_policy("br-h", horizon=0, alpha=1.0, beta=float(len(workers)), pool_bound=pool_bound)
    assert br_h.assign(waiting, workers, 0.0) == br_0.assign(waiting, workers, 0.0)


@RELAXED
@given(case=fleets(), horizon=st.sampled_from([0, 1, 3, 47, 48, 49, 60]))
def test_projected_loads_are_those_of_plain_code(case, horizon):
    _, workers = case
    loads = Projection(workers, horizon).loads
    assert loads.tolist() == [projected_loads(worker, horizon) for worker in workers]


def test_the_projection_stays_true_as_requests_are_admitted():
    rng = np.random.default_rng(3)
    waiting, workers = random_fleet(rng, workers=4, slots=6, free=4, waiting=6)
    fleet = Projection(workers, 20)
    reference = ReferenceFleet(workers, 20)
    for worker, start in ((2, 0), (2, 1), (0, 2), (3, 3)):
        fleet.admit(worker, waiting[start : start + 1], [start])
        reference.admit(worker, waiting[start : start + 1])
        for k in range(4):
            assert fleet.margins(k) == pytest.approx(reference.margins(k))
            assert fleet.smallest_margins[k] == pytest.approx(min(reference.margins(k)))
    assert fleet.free.tolist() == reference.free


def test_oracle_and_no_predictor_are_the_same():
    waiting, workers = random_fleet(np.random.default_rng(0), workers=4, slots=8, free=3, waiting=20)
    assert make_policy("br-h", predictor="oracle").assign(waiting, workers, 0.0) == make_policy("br-h").assign(
        waiting, workers, 0.0
    )


def test_exact_match_is_survival_on_prompts_it_has_not_seen():
    rng = np.random.default_rng(2)
    survival = make_policy("br-h", predictor="survival")
    exact = make_policy("br-h", predictor="exact-match")
    for i in range(500):
        request, length = Request(f"past-{i}", 10, prompt_hash=("seen", i % 5)), int(rng.integers(1, 120))
        survival.observe_finished(request, length)
        exact.observe_finished(request, length)
    for _ in range(10):
        waiting, workers = random_fleet(rng, workers=4, slots=8, free=2, waiting=12)
        assert survival.assign(waiting, workers, 0.0) == exact.assign(waiting, workers, 0.0)


def test_a_draining_worker_is_still_waited_for():
    """Its load belongs to the envelope: w0 may fill up to it."""
    workers = loaded(10, 500)
    workers[1].draining = True
    workers[0].max_running = 3
    assignments = make_policy("br-0", pool_bound=8).assign(queue(300, 190, 5), workers, 0.0)
    assert {a.request_id for a in assignments} == {"r0", "r1"}


@pytest.mark.parametrize("name", ["br-0", "br-h"])
def test_patience_lets_the_oldest_go_first(name):
    """A prompt that never fits the margin is passed over until it has waited long enough."""
    workers = loaded(100, 70, free=1)
    waiting = [Request("giant", 5000, arrival=1.0), Request("small", 30, arrival=2.0)]
    for patience, now, first in ((None, 99.0, "small"), (60.0, 61.0, "small"), (60.0, 61.5, "giant")):
        policy = make_policy(name, patience=patience, pool_bound=2)
        assert policy.assign(waiting, workers, now)[0] == (first, "w1")


class TestPoolBypass:
    @RELAXED
    @given(case=fleets(), margin=st.integers(0, 3))
    def test_keeps_its_promises(self, case, margin):
        waiting, workers = case
        policy = make_policy("br-0", pool_bypass=True, bypass_margin=margin)
        assignments = policy.assign(waiting, workers, 0.0)
        check_promises(waiting, workers, assignments, margin=margin)
        assert {a.worker_id for a in assignments}.isdisjoint(w.id for w in workers if w.max_running == 0)

    def test_dispatches_ahead_of_free_slots_up_to_the_margin(self):
        workers = [Worker("w0", 1, {"a": RunningRequest(10)}), Worker("w1", 1, {"b": RunningRequest(20)})]
        policy = make_policy("br-0", pool_bypass=True, bypass_margin=2)
        waiting = queue(5, 5, 5, 5, 5, 5)
        assignments = policy.assign(waiting, workers, 0.0)
        check_promises(waiting, workers, assignments, margin=2)
        assert len(assignments) == 4
        assert make_policy("br-0").assign(waiting, workers, 0.0) == []

    def test_goes_where_it_fits_the_margin_best(self):
        policy = make_policy("br-0", pool_bypass=True)
        assert policy.assign(queue(30), loaded(100, 80, 60), 0.0) == [("r0", "w2")]

    def test_a_draining_worker_gets_nothing(self):
        workers = loaded(100, 0)
        workers[1].draining = True
        assert policy_workers(make_policy("br-0", pool_bypass=True).assign(queue(1, 1), workers, 0.0)) == {"w0"}

    def test_br_h_needs_the_pool(self):
        with pytest.raises(ValueError, match="no option 'pool_bypass'"):
            make_policy("br-h", pool_bypass=True)


def policy_workers(assignments: list[Assignment]) -> set[str]:
    return {assignment.worker_id for assignment in assignments}


class TestComposition:
    @RELAXED
    @given(case=fleets())
    @pytest.mark.parametrize("name", ["br-0", "br-h"])
    def test_a_band_as_wide_as_all_cosines_leaves_balance_alone(self, name, case):
        waiting, workers = case
        composed = make_policy(f"eldr+{name}", signature_model=MODEL, tau=2.0)
        assert composed.assign(waiting, workers, 0.0) == make_policy(name).assign(waiting, workers, 0.0)

    def test_a_narrow_band_keeps_kinds_together(self):
        """tau = 0 and room everywhere: each request goes to its nearest centroid, as in ELDR."""
        workers = [Worker(f"w{k}", 40) for k in range(CENTROIDS)]
        vectors = signatures(30, 11)
        waiting = [Request(f"r{i}", 50, arrival=float(i), signature=vectors[i]) for i in range(30)]
        nearest = {f"r{i}": f"w{k}" for i, k in enumerate((vectors @ MODEL.centroids.T).argmax(axis=1))}
        for name in ("eldr", "eldr+br-0", "eldr+br-h"):
            assigned = dict(make_policy(name, signature_model=MODEL, tau=0.0).assign(waiting, workers, 0.0))
            assert assigned == nearest, name

    def test_a_full_neighbour_widens_the_band(self):
        vectors = signatures(1, 11)
        nearest = int((vectors @ MODEL.centroids.T).argmax())
        workers = [Worker(f"w{k}", 0 if k == nearest else 4) for k in range(CENTROIDS)]
        [assignment] = make_policy("eldr+br-0", signature_model=MODEL, tau=0.0).assign(
            [Request("r", 9, signature=vectors[0])], workers, 0.0
        )
        assert assignment.worker_id != f"w{nearest}"

    def test_a_worker_that_nobody_wanted_is_asked_again_when_the_band_widens(self):
        """Both requests want the nearest worker, which has one slot: the second goes on in the same call."""
        vectors = signatures(1, 11)
        nearest = int((vectors @ MODEL.centroids.T).argmax())
        workers = [Worker(f"w{k}", 1 if k == nearest else 4) for k in range(CENTROIDS)]
        waiting = [Request(f"r{i}", 9, arrival=float(i), signature=vectors[0]) for i in range(2)]
        assignments = make_policy("eldr+br-0", signature_model=MODEL, tau=0.0).assign(waiting, workers, 0.0)
        assert len(assignments) == 2
        assert assignments[0].worker_id == f"w{nearest}" != assignments[1].worker_id

    def test_a_signature_that_comes_late_is_used(self):
        vector = next(v for v in signatures(30, 11) if (MODEL.centroids @ v).argmax() == 3)
        policy = make_policy("eldr+br-0", signature_model=MODEL, tau=0.0)
        workers = [Worker(f"w{k}", 1, draining=k > 0) for k in range(CENTROIDS)]
        first, late = Request("first", 1), Request("late", 9, arrival=1.0)
        assert policy.assign([first, late], workers, 0.0) == [("first", "w0")]
        late.signature = vector
        free = [Worker(f"w{k}", 4) for k in range(CENTROIDS)]
        assert policy.assign([late], free, 1.0) == [("late", "w3")]

    def test_it_needs_a_model(self):
        with pytest.raises(ValueError, match="signature_model"):
            make_policy("eldr+br-h")
