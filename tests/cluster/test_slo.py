"""LatencyController: Algorithm 2 of BrownoutServe, case by case."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_opt.cluster.slo import LatencyController
from moe_opt.errors import ConfigError


def controller_at(threshold: float, **options: float) -> LatencyController:
    controller = LatencyController(1.0, **options)
    controller.threshold = threshold
    return controller


def test_starts_without_brownout_and_stays_there_while_nothing_happens():
    controller = LatencyController(0.25)
    assert controller.threshold == 1.0
    assert controller.update(0.0) == 1.0
    assert controller.update(1.0) == 1.0


@pytest.mark.parametrize(
    ("latency", "expected"),
    [
        (0.79, 0.6),  # below the warning line: linear increase
        (0.8, 0.5),  # on the warning line: unchanged
        (0.9, 0.5),  # between
        (1.0, 0.5),  # exactly at the objective: unchanged
        (1.01, 0.4),  # above: shrink
    ],
)
def test_one_decision(latency, expected):
    controller = controller_at(0.5)
    controller.observe(latency, 10.0)
    assert controller.update(10.5) == pytest.approx(expected)


def test_no_sample_raises_the_threshold():
    assert controller_at(0.5).update(3.0) == pytest.approx(0.6)


def test_clamps_to_0_and_1():
    assert controller_at(0.95).update(0.0) == 1.0
    controller = controller_at(0.5, shrink_ratio=0.0)
    controller.observe(2.0, 0.0)
    assert controller.update(0.0) == 0.0
    controller.observe(2.0, 0.1)
    assert controller.update(0.1) == 0.0


def test_only_samples_under_the_current_threshold_count():
    controller = LatencyController(1.0)
    controller.observe(5.0, 0.0)
    assert controller.update(0.1) == pytest.approx(0.8)
    # The 5 s were seen under threshold 1: they must not shrink it again.
    assert controller.update(0.2) == pytest.approx(0.9)


def test_an_unchanged_threshold_keeps_its_samples():
    controller = LatencyController(1.0)
    controller.observe(0.1, 0.0)
    assert controller.update(0.1) == 1.0
    assert controller.p90(0.1) == pytest.approx(0.1)


def test_samples_older_than_the_window_do_not_count():
    controller = LatencyController(1.0, window=2.0)
    controller.observe(5.0, 0.0)
    assert controller.p90(2.0) == 5.0
    assert controller.p90(2.1) is None
    assert controller.update(2.1) == 1.0


def test_one_slow_request_in_twenty_is_not_a_violation():
    controller = controller_at(0.5)
    for step in range(19):
        controller.observe(0.9, step * 0.01)
    controller.observe(50.0, 0.2)
    assert controller.update(0.3) == 0.5


def test_period_holds_decisions_back():
    controller = controller_at(0.5, period=1.0)
    assert controller.update(0.0) == pytest.approx(0.6)
    assert controller.update(0.9) == pytest.approx(0.6)
    assert controller.update(1.0) == pytest.approx(0.7)


@pytest.mark.parametrize("latency", [-1.0, float("nan"), float("inf")])
def test_refuses_what_is_no_latency(latency):
    with pytest.raises(ConfigError, match="latency"):
        LatencyController(1.0).observe(latency, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"slo": 0.0},
        {"slo": float("nan")},
        {"slo": 1.0, "warning_factor": 0.0},
        {"slo": 1.0, "increment": 0.0},
        {"slo": 1.0, "shrink_ratio": 1.0},
        {"slo": 1.0, "window": 0.0},
        {"slo": 1.0, "period": -1.0},
    ],
)
def test_refuses_bad_settings(options):
    with pytest.raises(ConfigError):
        LatencyController(**options)


@given(st.lists(st.tuples(st.lists(st.floats(0, 3), max_size=8), st.floats(0.01, 3.0)), min_size=1, max_size=30))
def test_follows_a_plain_reference(periods):
    """Against Algorithm 2 written out over the whole history."""
    controller = LatencyController(1.0)
    threshold, now, history = 1.0, 0.0, []
    for latencies, gap in periods:
        for latency in latencies:
            controller.observe(latency, now)
            history.append((now, threshold, latency))
        now += gap
        counted = [x for time, seen, x in history if seen == threshold and time >= now - 2.0]
        p90 = np.percentile(counted, 90) if counted else None
        before = threshold
        if p90 is None or p90 < 0.8:
            threshold = min(1.0, threshold + 0.1)
        elif p90 > 1.0:
            threshold = max(0.0, threshold * 0.8)
        if threshold != before:
            history = []  # "current threshold" means this one, not an equal one from long ago
        assert controller.update(now) == threshold
        assert 0.0 <= threshold <= 1.0


def test_settles_between_warning_line_and_objective():
    """A plant whose latency grows with the threshold ends in the band that the paper's Figure 11 shows."""
    controller = LatencyController(0.25)
    now, latencies = 0.0, []
    for _ in range(200):
        latency = 0.15 + 0.2 * controller.threshold
        for _ in range(20):
            controller.observe(latency, now)
            now += 0.05
        controller.update(now)
        latencies.append(latency)
    settled = latencies[50:]
    assert np.mean([0.2 <= latency <= 0.25 for latency in settled]) > 0.9
