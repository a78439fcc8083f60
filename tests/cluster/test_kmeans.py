"""Balanced and plain spherical K-means."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.cluster.kmeans import balanced_assignment, kmeans
from moe_opt.errors import ConfigError


def unit_points(number: int, dim: int, seed: int) -> np.ndarray:
    points = np.abs(np.random.default_rng(seed).normal(size=(number, dim))) + 1e-3
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def capacity(points, clusters: int) -> int:
    return -(-len(points) // clusters)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_balanced_assignment_is_the_best_of_all(number, clusters, seed):
    distances = np.random.default_rng(seed).random((number, clusters))
    room = -(-number // clusters)
    got = balanced_assignment(distances)
    assert np.bincount(got, minlength=clusters).max() <= room
    best = min(
        sum(distances[i, k] for i, k in enumerate(labels))
        for labels in itertools.product(range(clusters), repeat=number)
        if max(labels.count(k) for k in range(clusters)) <= room
    )
    assert distances[np.arange(number), got].sum() == pytest.approx(best)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_no_cluster_above_its_capacity(number, clusters, seed):
    clusters = min(clusters, number)
    points = unit_points(number, 5, seed)
    result = kmeans(points, clusters, seed=seed, restarts=2)
    sizes = np.bincount(result.labels, minlength=clusters)
    assert sizes.max() <= capacity(points, clusters)
    assert result.centroids.shape == (clusters, 5)
    np.testing.assert_allclose(np.linalg.norm(result.centroids, axis=1), 1, rtol=1e-5)
    cosine_distance = 1 - points @ result.centroids.T
    assert result.cost == pytest.approx(cosine_distance[np.arange(number), result.labels].sum(), abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_balanced_is_no_worse_than_filling_plain_clusters_up(seed):
    points = unit_points(90, 8, seed)
    plain = kmeans(points, 6, variant="vanilla", seed=seed)
    # Naive balance: keep plain K-means' centroids, give each point the nearest one that still has room.
    room = np.full(6, 15)
    cost = 0.0
    for distances in 1 - points @ plain.centroids.T:
        choice = min(np.flatnonzero(room), key=lambda k: distances[k])
        room[choice] -= 1
        cost += distances[choice]
    assert kmeans(points, 6, seed=seed).cost <= cost


def test_vanilla_beats_one_start_and_leaves_no_cluster_empty():
    points = unit_points(80, 6, 3)
    many = kmeans(points, 7, variant="vanilla", seed=1, restarts=8)
    one = kmeans(points, 7, variant="vanilla", seed=1, restarts=1)
    assert many.cost <= one.cost + 1e-6
    assert np.bincount(many.labels, minlength=7).min() >= 1


def test_planted_clusters_of_equal_size_are_found():
    centres = np.eye(4)
    points = np.repeat(centres, 10, axis=0) + 0.05 * unit_points(40, 4, 0)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    labels = kmeans(points, 4, seed=0).labels.reshape(4, 10)
    assert all(len(set(row)) == 1 for row in labels)
    assert len({row[0] for row in labels}) == 4


def test_same_seed_same_clusters():
    points = unit_points(60, 6, 0)
    first, second = (kmeans(points, 5, seed=9) for _ in range(2))
    np.testing.assert_array_equal(first.centroids, second.centroids)
    np.testing.assert_array_equal(first.labels, second.labels)


def test_identical_points_and_zero_vectors_are_clustered_too():
    same = np.tile(unit_points(1, 4, 0), (9, 1))
    assert np.bincount(kmeans(same, 3).labels).tolist() == [3, 3, 3]
    assert np.isfinite(kmeans(np.zeros((6, 3)), 2).centroids).all()


def test_a_warm_start_keeps_the_numbering():
    centres = np.eye(3)[[2, 0, 1]]
    points = np.repeat(np.eye(3), 5, axis=0)
    labels = kmeans(points, 3, initial=centres).labels
    assert labels.tolist() == [1] * 5 + [2] * 5 + [0] * 5


def test_more_points_than_the_hungarian_step_takes_stay_within_capacity(monkeypatch):
    monkeypatch.setattr("moe_opt.cluster.kmeans.MAX_BALANCED_POINTS", 50)
    points = unit_points(130, 5, 0)
    result = kmeans(points, 4, seed=0)
    assert np.bincount(result.labels, minlength=4).max() <= capacity(points, 4)


def test_refuses():
    with pytest.raises(ConfigError, match="vanilla"):
        kmeans(unit_points(4, 2, 0), 2, variant="spectral")
    with pytest.raises(ConfigError, match="clusters"):
        kmeans(unit_points(4, 2, 0), 5)
