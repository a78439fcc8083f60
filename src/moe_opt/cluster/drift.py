"""Keeping signatures fit as traffic and fleet change: drift, warm refit, centroids added and dropped.

ELDR names drift and re-clustering as future work; nothing here is from the paper. Whatever happens, centroid
k stays with worker k: its requests keep finding the experts, and the prefixes, that are warm there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from moe_opt.cluster.expert_counts import Floats, check_counts, unit
from moe_opt.cluster.kmeans import kmeans
from moe_opt.cluster.signature import SignatureModel, check_prompt_number
from moe_opt.errors import ConfigError


class DriftDetector:
    """Compares recent signatures with the calibration: are they as near to a centroid, and spread as evenly?

    Two symptoms, either is enough: the mean cosine to the nearest centroid fell by more than `fit_drop`
    calibration standard deviations (new kinds of prompts), or the population stability index of the nearest
    centroids' shares, sum((now - then) * log(now / then)), exceeds `share_limit` (known kinds in another
    mix). 0.25 is the index's usual sign of a major shift.
    """

    def __init__(self, model: SignatureModel, window: int = 500, fit_drop: float = 1.0, share_limit: float = 0.25):
        if window < 1:
            raise ConfigError(f"window must be at least 1 request, got {window}")
        self.model = model
        self.fit_drop = fit_drop
        self.share_limit = share_limit
        self._recent: deque[tuple[int, float]] = deque(maxlen=window)

    def observe(self, signature: Floats) -> None:
        """Takes in the signature `[D]` of one request that arrived."""
        similarity = self.model.similarity(signature)
        nearest = int(np.argmax(similarity))
        self._recent.append((nearest, float(similarity[nearest])))

    @property
    def fit_loss(self) -> float:
        """Drop of the mean cosine to the nearest centroid in calibration standard deviations; 0 at first."""
        if not self._recent:
            return 0.0
        now = float(np.mean([similarity for _, similarity in self._recent]))
        return (self.model.similarity_mean - now) / max(self.model.similarity_std, 1e-3)

    @property
    def share_shift(self) -> float:
        """Population stability index of the nearest centroids' shares; 0 before traffic."""
        if not self._recent:
            return 0.0
        workers = len(self.model.centroids)
        counts = np.bincount([nearest for nearest, _ in self._recent], minlength=workers)
        # Half a request more for each centroid, so that an empty one has a logarithm.
        now = (counts + 0.5) / (counts.sum() + 0.5 * workers)
        then = (self.model.shares + 0.5 / len(self._recent)) / (1 + 0.5 * workers / len(self._recent))
        return float(np.sum((now - then) * np.log(now / then)))

    @property
    def drifted(self) -> bool:
        """Whether a refit is due; never before the window is full: a few requests are always unlike the whole."""
        full = len(self._recent) == self._recent.maxlen
        return full and (self.fit_loss > self.fit_drop or self.share_shift > self.share_limit)


def refit(
    model: SignatureModel,
    prefill_counts: ArrayLike,
    decode_probs: ArrayLike | None = None,
    num_workers: int | None = None,
    seed: int = 0,
) -> SignatureModel:
    """A model for recent traffic that starts from `model`, so that centroid k stays worker k's.

    Without `decode_probs` weighting, IDF and layers stay, and only the centroids move. With them everything
    is chosen anew; the recent prompts, grouped by the old model's nearest centroids, then seed the new ones.
    More workers than before get centroids split off the least coherent clusters; with fewer, the last
    centroids are dropped.

    Args:
        model: what is in use.
        prefill_counts: `[N, L, E]` of recent prompts.
        decode_probs: `[N, L, E]` of the same prompts, or None.
        num_workers: K from now on; the model's by default.
        seed: as for `SignatureModel.fit`.

    Raises:
        ConfigError: as `SignatureModel.fit`.
    """
    counts = check_counts(prefill_counts, "prefill_counts", (3,), (model.num_layers, model.num_experts))
    workers = len(model.centroids) if num_workers is None else num_workers
    check_prompt_number(len(counts), workers)
    before = model.transform(counts)
    if decode_probs is None:
        fresh, signatures, centroids = model, before, model.centroids
    else:
        # One centroid only: the clusters are made below, from a warm start.
        fresh = SignatureModel.fit(counts, decode_probs, 1, seed)
        fresh = fresh.with_token_table(model.token_table)
        signatures = fresh.transform(counts)
        nearest = model.similarity(before).argmax(axis=1)
        everyone = unit(signatures.sum(axis=0))
        centroids = np.stack([unit(signatures[nearest == k].sum(0), everyone) for k in range(len(model.centroids))])
    start = _grown(centroids[:workers], workers, signatures)
    clusters = kmeans(signatures, workers, seed=seed, initial=start)
    return fresh.with_centroids(clusters.centroids, signatures)


def drop_workers(model: SignatureModel, workers: Sequence[int]) -> SignatureModel:
    """The model without the centroids of workers that left; the others move up in order. Needs no data.

    Raises:
        ConfigError: an index out of range, or no centroid would be left.
    """
    gone = {int(worker) for worker in workers}
    total = len(model.centroids)
    if any(not 0 <= worker < total for worker in gone):
        raise ConfigError(f"workers to drop must lie in 0 ... {total - 1}, got {sorted(gone)}")
    kept = [worker for worker in range(total) if worker not in gone]
    if not kept:
        raise ConfigError("a signature model needs at least one centroid")
    return model.with_centroids(model.centroids[kept])


def add_workers(model: SignatureModel, count: int, signatures: Floats, seed: int = 0) -> SignatureModel:
    """The model with `count` more centroids for workers that joined, fitted to recent signatures `[N, D]`.

    The old centroids keep their index and their start; balanced K-means over all of them then evens out the
    sizes.

    Raises:
        ConfigError: no worker to add, signatures of another width or too few of them.
    """
    if count < 1:
        raise ConfigError(f"count must be at least 1, got {count}")
    recent = np.asarray(signatures, dtype=np.float32)
    if recent.ndim != 2 or recent.shape[1] != model.centroids.shape[1] or not np.isfinite(recent).all():
        raise ConfigError(f"signatures must be finite [N, {model.centroids.shape[1]}], got {list(recent.shape)}")
    workers = len(model.centroids) + count
    check_prompt_number(len(recent), workers)
    start = _grown(model.centroids, workers, recent)
    return model.with_centroids(kmeans(recent, workers, seed=seed, initial=start).centroids, recent)


def _grown(centroids: Floats, workers: int, signatures: Floats) -> Floats:
    """`centroids` plus seeds up to `[workers, D]`: the worst-served signatures of the costliest clusters."""
    grown = np.asarray(centroids, dtype=np.float32)
    while len(grown) < workers:
        similarity = signatures @ grown.T
        nearest = similarity.argmax(axis=1)
        loss = 1.0 - similarity[np.arange(len(signatures)), nearest]
        costliest = int(np.bincount(nearest, weights=loss, minlength=len(grown)).argmax())
        worst = int(np.where(nearest == costliest, loss, -np.inf).argmax())
        grown = np.concatenate([grown, signatures[worst : worst + 1]])
    return grown
