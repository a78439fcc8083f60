"""Spherical K-means, plain and Hungarian-balanced (ELDR, "Offline: Balanced K-means").

Balanced means that each centroid takes at most ceil(N / K) points; the assignment step is then an assignment
problem, solved exactly by `scipy.optimize.linear_sum_assignment` over ceil(N / K) copies of each centroid's
column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from moe_opt.errors import ConfigError

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]

VARIANTS = ("balanced", "vanilla")
# The Hungarian step grows with the cube of the points: 0.1 s for 1,000, 0.75 s for 2,000, 7 s for 4,000.
MAX_BALANCED_POINTS = 2_000


@dataclass(frozen=True)
class Clustering:
    """K clusters of N unit vectors."""

    centroids: Floats  # float32 [K, D], unit length
    labels: Ints  # int64 [N]
    cost: float  # sum over points of the cosine distance to their own centroid


def balanced_assignment(distances: Floats) -> Ints:
    """The assignment of least total distance that gives no column more than ceil(N / K) rows.

    Args:
        distances: `[N, K]`.

    Returns:
        int64 `[N]`, the column of each row.
    """
    num_points, num_clusters = distances.shape
    if num_clusters == 1:
        return np.zeros(num_points, dtype=np.int64)
    capacity = -(-num_points // num_clusters)
    rows, columns = linear_sum_assignment(np.repeat(distances, capacity, axis=1))
    labels = np.empty(num_points, dtype=np.int64)
    labels[rows] = columns // capacity
    return labels


def kmeans(
    points: Floats,
    num_clusters: int,
    *,
    variant: str = "balanced",
    seed: int = 0,
    restarts: int = 8,
    max_iterations: int = 25,
    initial: Floats | None = None,
) -> Clustering:
    """Clusters unit vectors by cosine distance.

    `restarts` plain runs start from K-means++ seeds; the two of least cost are then balanced, and the better
    one is kept. `initial` `[K, D]` replaces the seeds: cluster k then stays what it was (warm refit).

    Args:
        points: `[N, D]`, unit vectors (a zero vector is allowed: it is at distance 1 from everything).
        num_clusters: K, at most N.
        variant: "balanced" or "vanilla" (the paper's ablation: plain K-means).

    Raises:
        ConfigError: an unknown variant, or more clusters than points.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"unknown K-means variant {variant!r}; choose one of {', '.join(VARIANTS)}")
    if not 1 <= num_clusters <= len(points):
        raise ConfigError(f"{num_clusters} clusters need at least that many points, got {len(points)}")
    rng = np.random.default_rng(seed)
    points = np.ascontiguousarray(points, dtype=np.float32)
    if initial is not None:
        starts = [np.asarray(initial, dtype=np.float32)]
    else:
        starts = [_seed_centroids(points, num_clusters, rng) for _ in range(restarts)]
    plain = sorted((_iterate(points, start, False, max_iterations) for start in starts), key=lambda c: c.cost)
    if variant == "vanilla":
        return plain[0]
    # A warm start is balanced from where it is: plain K-means first could move a centroid to other prompts.
    candidates = starts if initial is not None else [c.centroids for c in plain[:2]]
    return min((_balance(points, start, rng, max_iterations) for start in candidates), key=lambda c: c.cost)


def _balance(points: Floats, start: Floats, rng: np.random.Generator, max_iterations: int) -> Clustering:
    if len(points) <= MAX_BALANCED_POINTS:
        return _iterate(points, start, True, max_iterations)
    # Centroids from a sample; every point then goes to the nearest centroid that still has room.
    sample = rng.choice(len(points), MAX_BALANCED_POINTS, replace=False)
    centroids = _iterate(points[sample], start, True, max_iterations).centroids
    distances = 1.0 - points @ centroids.T
    labels = _fill_by_regret(distances)
    return Clustering(centroids, labels, _cost(distances, labels))


def _fill_by_regret(distances: Floats) -> Ints:
    """Greedy capacity-respecting assignment `[N]`, the points that have most to lose first."""
    num_points, num_clusters = distances.shape
    room = np.full(num_clusters, -(-num_points // num_clusters))
    preference = np.argsort(distances, axis=1, kind="stable")
    ordered = np.take_along_axis(distances, preference, axis=1)
    regret = ordered[:, 1] - ordered[:, 0] if num_clusters > 1 else ordered[:, 0]
    labels = np.empty(num_points, dtype=np.int64)
    for point in np.argsort(-regret, kind="stable"):
        choice = preference[point][room[preference[point]] > 0][0]
        labels[point] = choice
        room[choice] -= 1
    return labels


def _seed_centroids(points: Floats, num_clusters: int, rng: np.random.Generator) -> Floats:
    """K-means++: the next seed is drawn by its distance 1 - cos = |a - b|^2 / 2 from the seeds so far."""
    chosen = [int(rng.integers(len(points)))]
    nearest = np.maximum(1.0 - points @ points[chosen[0]], 0.0).astype(np.float64)
    while len(chosen) < num_clusters:
        nearest[chosen] = 0.0
        total = nearest.sum()
        if total > 0:
            chosen.append(int(rng.choice(len(points), p=nearest / total)))
        else:  # every point coincides with a seed: any other one will do
            chosen.append(int(rng.choice(np.setdiff1d(np.arange(len(points)), chosen))))
        nearest = np.minimum(nearest, np.maximum(1.0 - points @ points[chosen[-1]], 0.0))
    return points[chosen].copy()


def _iterate(points: Floats, start: Floats, balanced: bool, max_iterations: int) -> Clustering:
    """Lloyd's iterations until no label changes, or the cost falls by less than 1 in 10,000."""
    assign = balanced_assignment if balanced else _nearest
    centroids = start
    best: Clustering | None = None
    for _ in range(max_iterations):
        distances = 1.0 - points @ centroids.T
        labels = assign(distances)
        current = Clustering(centroids, labels, _cost(distances, labels))
        if best is not None and current.cost >= best.cost * (1 - 1e-4):
            return current if current.cost < best.cost else best
        best = current
        centroids = _means(points, labels, centroids)
    assert best is not None, "at least one iteration"
    return best


def _nearest(distances: Floats) -> Ints:
    """The nearest centroid of each point; an empty cluster takes the worst-served point."""
    labels: Ints = np.argmin(distances, axis=1)
    own = distances[np.arange(len(labels)), labels].copy()
    counts = np.bincount(labels, minlength=distances.shape[1])
    for empty in np.flatnonzero(counts == 0):
        donors = np.where(counts[labels] > 1, own, -np.inf)
        worst = int(np.argmax(donors))
        counts[labels[worst]] -= 1
        labels[worst] = empty
        counts[empty] = 1
        own[worst] = -np.inf
    return labels


def _means(points: Floats, labels: Ints, previous: Floats) -> Floats:
    member = (labels == np.arange(len(previous))[:, None]).astype(points.dtype)  # [K, N]
    sums = member @ points
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    # A cluster without points (balanced K-means with K * ceil(N / K) > N) or with zero vectors only stays
    # put.
    return np.where(norms > 0, sums / np.where(norms > 0, norms, 1.0), previous).astype(np.float32)


def _cost(distances: Floats, labels: Ints) -> float:
    return float(distances[np.arange(len(labels)), labels].sum(dtype=np.float64))
