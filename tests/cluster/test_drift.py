"""Drift detection, warm refit, centroids added and dropped."""

from __future__ import annotations

import numpy as np
import pytest
from routing import planted

from moe_opt.cluster.drift import DriftDetector, add_workers, drop_workers, refit
from moe_opt.cluster.signature import SignatureModel
from moe_opt.errors import ConfigError


@pytest.fixture(scope="module")
def fitted():
    prefill, decode, domain = planted(prompts=240)
    return SignatureModel.fit(prefill[:160], decode[:160], 4), prefill, decode, domain


def feed(detector: DriftDetector, model: SignatureModel, counts) -> None:
    for signature in model.transform(counts):
        detector.observe(signature)


def test_more_of_the_same_is_no_drift(fitted):
    model, prefill, _, _ = fitted
    detector = DriftDetector(model, window=60)
    assert not detector.drifted
    assert (detector.fit_loss, detector.share_shift) == (0.0, 0.0)
    feed(detector, model, prefill[160:])
    assert not detector.drifted


def test_new_kinds_of_prompts_are_drift(fitted):
    model, _, _, _ = fitted
    strange, _, _ = planted(prompts=80, seed=99)
    detector = DriftDetector(model, window=60)
    feed(detector, model, strange[:59])
    assert not detector.drifted  # the window is not full
    feed(detector, model, strange[59:])
    assert detector.fit_loss > 1
    assert detector.drifted


def test_another_mix_of_known_kinds_is_drift(fitted):
    model, prefill, _, domain = fitted
    detector = DriftDetector(model, window=40)
    feed(detector, model, prefill[domain == 0][:40])
    assert detector.share_shift > 0.25
    assert detector.drifted


def test_refit_follows_the_traffic_and_ends_the_drift(fitted):
    model, _, _, _ = fitted
    strange, decode, _ = planted(prompts=120, seed=99)
    for fresh in (refit(model, strange), refit(model, strange, decode)):
        detector = DriftDetector(fresh, window=60)
        feed(detector, fresh, strange)
        assert not detector.drifted
    only_centroids = refit(model, strange)
    assert (only_centroids.layers, only_centroids.weighting) == (model.layers, model.weighting)


@pytest.mark.parametrize("whole", [False, True])
def test_refit_keeps_each_workers_kind_of_prompt(fitted, whole):
    model, prefill, decode, _ = fitted
    fresh = refit(model, prefill, decode if whole else None, seed=5)
    before = model.similarity(model.transform(prefill)).argmax(axis=1)
    after = fresh.similarity(fresh.transform(prefill)).argmax(axis=1)
    assert np.mean(before == after) > 0.9


def test_workers_that_leave_take_their_centroids_along(fitted):
    model, prefill, _, _ = fitted
    smaller = drop_workers(model, [1])
    np.testing.assert_array_equal(smaller.centroids, model.centroids[[0, 2, 3]])
    assert smaller.transform(prefill[0]).shape == smaller.centroids.shape[1:]
    for wrong in ([4], [-1], [0, 1, 2, 3]):
        with pytest.raises(ConfigError):
            drop_workers(model, wrong)


def test_workers_that_join_share_the_prompts(fitted):
    model, prefill, _, _ = fitted
    signatures = model.transform(prefill)
    larger = add_workers(model, 2, signatures)
    assert larger.centroids.shape == (6, model.centroids.shape[1])
    nearest = larger.similarity(signatures).argmax(axis=1)
    assert np.bincount(nearest, minlength=6).min() > 0
    loss = 1 - model.similarity(signatures).max(axis=1).mean()
    assert 1 - larger.similarity(signatures).max(axis=1).mean() <= loss
    assert len(refit(model, prefill, num_workers=6).centroids) == 6
    assert len(refit(model, prefill, num_workers=2).centroids) == 2


def test_refuses(fitted):
    model, prefill, _, _ = fitted
    with pytest.raises(ConfigError):
        refit(model, prefill[:, :3])
    with pytest.raises(ConfigError, match="too few"):
        refit(model, prefill[:3])
    with pytest.raises(ConfigError):
        add_workers(model, 0, model.transform(prefill))
    with pytest.raises(ConfigError):
        add_workers(model, 1, np.ones((9, 3)))
    with pytest.raises(ConfigError, match="window"):
        DriftDetector(model, window=0)


def test_a_model_without_data_of_its_own_has_even_shares(fitted):
    model, _, _, _ = fitted
    assert drop_workers(model, [0]).shares.tolist() == [1 / 3] * 3
