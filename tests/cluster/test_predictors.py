"""Predictors against hand-computed values; the counters that BR-H keeps between predictions; Table 3's
scores."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.cluster import Request, RunningRequest, Worker, make_policy
from moe_opt.cluster.predictors import (
    ExactMatchPredictor,
    LengthBucketPredictor,
    LengthHistory,
    Prediction,
    Queries,
    SurvivalPredictor,
    make_predictor,
    roc_auc,
    score_predictor,
)
from moe_opt.cluster.predictors.tracker import OUTLIVES, RemainingTracker, composite
from moe_opt.errors import ConfigError


def ask(predictor, *ages: int, horizon: int = 10, prompt: int = 5, key: object = None) -> list[tuple[float, float]]:
    queries = Queries(np.array(ages, dtype=np.int64), np.full(len(ages), prompt), [key] * len(ages))
    p, mu = predictor.predict(queries, horizon)
    return list(zip(p.tolist(), mu.tolist(), strict=True))


def taught(predictor, *lengths: int, prompt: int = 5, key: object = None):
    for length in lengths:
        predictor.observe(Request("past", prompt, prompt_hash=key), length)
    return predictor


class TestSurvival:
    def test_reads_both_stages_off_past_lengths(self):
        predictor = taught(SurvivalPredictor(), 4, 8, 20, 30)
        # Age 0: 4 and 8 of four end within 10 steps, after 6 on average. Age 4: the output of 4 is over.
        assert ask(predictor, 0, 4, 8) == [(0.5, 6.0), (pytest.approx(1 / 3), 4.0), (0.0, 10.0)]
        # Age 19 sees 20 (1 step) of {20, 30}; age 20 sees 30 in 10 steps; nothing was longer than 30.
        assert ask(predictor, 19, 20, 30, 99) == [(0.5, 1.0), (1.0, 10.0), (0.0, 10.0), (0.0, 10.0)]

    def test_knows_nothing_at_first(self):
        assert ask(SurvivalPredictor(), 0, 7) == [(0.0, 10.0), (0.0, 10.0)]

    def test_every_observation_counts_at_once_and_old_ones_leave_the_window(self):
        predictor = taught(SurvivalPredictor(window=2), 5)
        assert ask(predictor, 0) == [(1.0, 5.0)]
        taught(predictor, 50)
        assert ask(predictor, 0) == [(0.5, 5.0)]
        taught(predictor, 60)
        assert ask(predictor, 0) == [(0.0, 10.0)]

    @settings(max_examples=60, deadline=None)
    @given(
        lengths=st.lists(st.integers(0, 60), max_size=40),
        ages=st.lists(st.integers(0, 70), min_size=1, max_size=5),
        horizon=st.integers(0, 20),
        window=st.integers(1, 30),
    )
    def test_equals_the_definition(self, lengths, ages, horizon, window):
        history = LengthHistory(window)
        for length in lengths:
            history.add(length)
        p, mu = history.predict(np.array(ages), horizon)
        for age, p_age, mu_age in zip(ages, p, mu, strict=True):
            longer = [length for length in lengths[-window:] if length > age]
            ending = [length - age for length in longer if length <= age + horizon]
            assert p_age == pytest.approx(len(ending) / len(longer) if longer else 0.0)
            assert mu_age == pytest.approx(sum(ending) / len(ending) if ending else horizon)
            assert history.predict_one(age, horizon) == (pytest.approx(p_age), pytest.approx(mu_age))

    def test_a_window_of_nothing_is_refused(self):
        with pytest.raises(ConfigError, match="window"):
            SurvivalPredictor(window=0)


class TestExactMatch:
    def test_answers_from_the_same_prompt_alone(self):
        predictor = taught(ExactMatchPredictor(), 100, 100, 100)
        taught(predictor, 7, key="hello")
        assert ask(predictor, 0, 7, key="hello") == [(1.0, 7.0), (0.0, 10.0)]
        assert ask(predictor, 0) == ask(taught(SurvivalPredictor(), 100, 100, 100, 7), 0)

    def test_is_survival_on_prompts_it_has_not_seen(self):
        lengths = [3, 9, 14, 2, 30]
        exact = taught(ExactMatchPredictor(), *lengths, key="seen")
        survival = taught(SurvivalPredictor(), *lengths, key="seen")
        ages = (0, 2, 5, 13, 29)
        for key in ("new", None):
            assert ask(exact, *ages, key=key) == ask(survival, *ages, key=key)

    def test_forgets_the_prompt_that_ended_longest_ago(self):
        predictor = ExactMatchPredictor(prompts=2)
        for key in ("a", "b", "a", "c"):
            taught(predictor, 5, key=key)
        taught(predictor, *[90] * 50)
        known = {key: ask(predictor, 0, key=key)[0][0] == 1.0 for key in "abc"}
        assert known == {"a": True, "b": False, "c": True}


def test_length_buckets_tell_long_prompts_from_short_ones():
    predictor = LengthBucketPredictor(buckets=2, min_outputs=8)
    for _ in range(40):
        taught(predictor, 6, prompt=100)
        taught(predictor, 60, prompt=3000)
    assert ask(predictor, 0, prompt=120) == [(1.0, 6.0)]
    assert ask(predictor, 0, prompt=2900) == [(0.0, 10.0)]
    assert ask(LengthBucketPredictor(), 0) == [(0.0, 10.0)]


class Scripted:
    """Answers the same p and mu to all, and remembers at which ages it was asked."""

    def __init__(self, p: float, mu: float):
        self.p, self.mu = p, mu
        self.asked: list[int] = []

    def predict(self, queries: Queries, horizon: int) -> Prediction:
        self.asked += queries.generated.tolist()
        count = len(queries.generated)
        return Prediction(np.full(count, self.p), np.full(count, self.mu))

    def observe(self, request: Request, generated: int) -> None:
        pass


def follow(predictor: Scripted, generated: list[int], horizon: int = 20, refresh_every: int = 8) -> list[float]:
    """c of one request as it generates."""
    tracker = RemainingTracker(predictor, horizon, refresh_every)
    return [float(tracker.steps(["r"], np.array([100 + age]), np.array([age]))[0]) for age in generated]


class TestTracker:
    def test_the_estimate_mixes_both_stages(self):
        """Eq. 6: 0.75 * 4 + 0.25 * 20 = 8."""
        assert composite(Prediction(np.array([0.75]), np.array([4.0])), 20, gate=0.5).tolist() == [8.0]

    def test_counts_down_between_refreshes(self):
        predictor = Scripted(0.75, 4.0)
        assert follow(predictor, [0, 1, 3, 6]) == [8.0, 7.0, 5.0, 2.0]
        assert predictor.asked == [0]

    def test_refreshes_every_so_many_tokens(self):
        predictor = Scripted(1.0, 15.0)
        assert follow(predictor, [0, 7, 8, 15, 16]) == [15.0, 8.0, 15.0, 8.0, 15.0]
        assert predictor.asked == [0, 8, 16]

    def test_the_gate_is_closed_below_one_half_and_nothing_counts_down(self):
        assert follow(Scripted(0.49, 2.0), [0, 3, 7]) == [OUTLIVES] * 3
        assert follow(Scripted(0.5, 2.0), [0]) == [11.0]

    def test_reaching_the_floor_refreshes_at_once(self):
        predictor = Scripted(1.0, 3.0)
        assert follow(predictor, [0, 1, 2, 3]) == [3.0, 2.0, 3.0, 2.0]
        assert predictor.asked == [0, 2]

    def test_a_running_request_is_there_for_one_more_step_at_least(self):
        assert follow(Scripted(1.0, 0.2), [0, 1]) == [1.0, 1.0]

    def test_a_request_that_starts_over_is_predicted_anew(self):
        predictor = Scripted(1.0, 15.0)
        follow(predictor, [6, 2])
        assert predictor.asked == [6, 2]

    @pytest.mark.parametrize(("p", "mu"), [(float("nan"), 3.0), (0.9, float("nan"))])
    def test_not_a_number_is_not_believed(self, p, mu):
        assert follow(Scripted(p, mu), [0]) == [OUTLIVES]

    def test_requests_that_left_are_dropped(self):
        tracker = RemainingTracker(Scripted(1.0, 5.0), 20, 8)
        for i in range(5000):
            tracker.admit([Request(i, 10)])
            tracker.steps([i], np.array([10]), np.array([0]))
        assert len(tracker._row) < 1100

    def test_newcomers_are_predicted_with_the_others(self):
        tracker = RemainingTracker(Scripted(0.75, 4.0), 20, 8)
        steps = tracker.steps(["r"], np.array([10]), np.array([3]), [Request("new", 4)])
        assert steps.tolist() == [8.0, 8.0]

    def test_the_prompt_of_an_admitted_request_reaches_the_predictor(self):
        policy = make_policy("br-h", predictor="exact-match")
        for _ in range(3):
            policy.observe_finished(Request("past", 10, prompt_hash="hello"), 4)
        for _ in range(30):
            policy.observe_finished(Request("past", 10), 400)
        request = Request("r", 10, prompt_hash="hello")
        worker = Worker("w", 1)
        assert policy.assign([request], [worker], 0.0) == [("r", "w")]
        tracker = policy._tracker
        assert tracker.steps(["r"], np.array([11]), np.array([1])).tolist() == [3.0]
        policy.observe_finished(request, 4)
        assert tracker.steps(["r"], np.array([11]), np.array([1])).tolist() == [OUTLIVES]


def test_a_user_brings_a_predictor():
    """w1's request is about to leave, says the predictor: the long prompt goes there."""
    predictor = Scripted(1.0, 1.0)
    policy = make_policy("br-h", predictor=predictor)
    workers = [Worker(f"w{k}", 2, {f"run-{k}": RunningRequest(100, generated=9)}) for k in range(2)]
    assert len(policy.assign([Request("r", 5)], workers, 0.0)) == 1
    assert sorted(predictor.asked) == [0, 9, 9]


def test_the_names_are_listed():
    assert make_predictor(None) is make_predictor("oracle") is None
    with pytest.raises(ConfigError, match="survival, exact-match, length-bucket, learned, oracle"):
        make_predictor("exact")


class TestScores:
    def test_auc_is_the_share_of_pairs_in_order(self):
        labels = np.array([True, True, False, False])
        assert roc_auc(labels, np.array([0.9, 0.4, 0.6, 0.1])) == 0.75
        assert roc_auc(labels, np.array([1.0, 1.0, 1.0, 1.0])) == 0.5
        assert isnan(roc_auc(np.array([True]), np.array([0.3])))

    def test_auc_equals_scikit_learns(self):
        sklearn_metrics = pytest.importorskip("sklearn.metrics")
        rng = np.random.default_rng(0)
        labels, scores = rng.random(300) < 0.3, rng.integers(0, 20, size=300) / 20
        assert roc_auc(labels, scores) == pytest.approx(sklearn_metrics.roc_auc_score(labels, scores))

    def test_a_row_of_table_3(self):
        predictor = taught(SurvivalPredictor(), 4, 8, 20, 30)
        # Held out: 6 tokens, asked at age 0 (left 6: ends); 24 tokens, asked at 0 (left 24) and 16 (left 8:
        # ends).
        result = score_predictor(predictor, [(Request("a", 1), 6), (Request("b", 1), 24)], horizon=10)
        # p: 0.5, 0.5, 0.5 (20 of {20, 30}); mu of the two that end: 6 and 4.
        assert (result.auc, result.samples, result.positives) == (0.5, 3, 2)
        assert result.conditional_mae == pytest.approx((0 + 4) / 2)
        assert result.brier == pytest.approx(0.25)

    def test_nothing_to_score_is_an_error(self):
        with pytest.raises(ConfigError, match="nothing to score"):
            score_predictor(SurvivalPredictor(), [(Request("a", 1), 0)])


class TestLearned:
    @staticmethod
    def finished(count: int, seed: int) -> list[tuple[Request, int]]:
        """Long prompts get outputs of about 20 tokens, short ones of about 200."""
        rng = np.random.default_rng(seed)
        prompts = rng.choice([100, 2000], size=count)
        lengths = rng.poisson(np.where(prompts > 1000, 20, 200)) + 1
        return [(Request(i, int(p)), int(n)) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]

    def test_is_survival_until_it_has_seen_enough_and_better_after(self):
        pytest.importorskip("sklearn")
        from moe_opt.cluster.predictors.learned import LearnedPredictor

        learned = LearnedPredictor(min_outputs=200, refit_every=None, trees=10)
        survival = SurvivalPredictor()
        for request, generated in self.finished(400, 0):
            learned.observe(request, generated)
            survival.observe(request, generated)
        assert ask(learned, 0, 30) == ask(survival, 0, 30)
        learned.refit(48)
        held_out = self.finished(100, 1)
        assert score_predictor(learned, held_out).auc > score_predictor(survival, held_out).auc + 0.02
        assert score_predictor(learned, held_out).conditional_mae < 12

    def test_refits_as_requests_end(self):
        pytest.importorskip("sklearn")
        from moe_opt.cluster.predictors.learned import LearnedPredictor

        learned = LearnedPredictor(min_outputs=500, refit_every=500, trees=20)
        ask(learned, 0, horizon=48)  # tells the horizon
        for request, generated in self.finished(500, 0):
            learned.observe(request, generated)
        [(p_long, _)] = ask(learned, 0, horizon=48, prompt=2000)
        [(p_short, _)] = ask(learned, 0, horizon=48, prompt=100)
        assert p_long > 0.5 > p_short

    def test_outputs_that_are_all_alike_are_no_obstacle(self):
        pytest.importorskip("sklearn")
        policy = make_policy("br-h", predictor="learned", seed=1)
        policy.assign([Request("r", 1)], [Worker("w", 1)], 0.0)
        for i in range(300):
            policy.observe_finished(Request(i, 10), 1)
        assert policy.assign([Request("r", 1)], [Worker("w", 1)], 0.0) == [("r", "w")]
        assert ask(policy.predictor, 0, horizon=48) == [(1.0, 1.0)]
