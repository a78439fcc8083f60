"""The `evaluate` metric loads from its file without a network, and agrees with the formulas."""

from __future__ import annotations

import numpy as np
import pytest

evaluate = pytest.importorskip("evaluate")

from moe_opt.evaluation.losses import compare_tokens  # noqa: E402
from moe_opt.evaluation.metric import METRIC_PATH  # noqa: E402


@pytest.fixture
def metric(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("socket.socket.connect", _no_network)
    return evaluate.load(METRIC_PATH, cache_dir=str(tmp_path))


def _no_network(*_: object) -> None:
    raise AssertionError("the metric must load without a network")


def test_batches_add_up_to_the_formulas(metric) -> None:  # type: ignore[no-untyped-def]
    random = np.random.default_rng(0)
    truth = random.integers(0, 5, 40)
    ours, exact = random.integers(0, 5, 40), np.where(random.random(40) < 0.6, truth, 4)
    log_probs, exact_log_probs = -random.random(40) * 3, -random.random(40)
    for part in (slice(0, 15), slice(15, 40)):
        metric.add_batch(
            predictions=ours[part],
            references=truth[part],
            exact_predictions=exact[part],
            log_probs=log_probs[part],
            exact_log_probs=exact_log_probs[part],
        )
    found = metric.compute()
    expected = compare_tokens(ours == truth, exact == truth, -log_probs, -exact_log_probs, np.arange(40))
    assert found["tokens"] == 40
    assert found["agreement"] == pytest.approx((ours == exact).mean())
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5)
    assert found["relative_loss"] == pytest.approx(1 - (ours == truth).sum() / (exact == truth).sum())


def test_ignored_references_do_not_count(metric) -> None:  # type: ignore[no-untyped-def]
    found = metric.compute(
        predictions=[1, 2, 9],
        references=[1, 3, -100],
        exact_predictions=[1, 3, 9],
        log_probs=[-1.0, -2.0, -50.0],
        exact_log_probs=[-1.0, -1.0, -50.0],
    )
    assert found["tokens"] == 2
    assert found["accuracy"] == 0.5
    assert found["perplexity_ratio"] == pytest.approx(np.exp(0.5))


def test_nothing_to_score_is_an_error(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="no token to score"):
        metric.compute(
            predictions=[1], references=[-100], exact_predictions=[1], log_probs=[0.0], exact_log_probs=[0.0]
        )
