"""ELDR and BalanceRoute together: the locality band says where a request may go, the F-score which one is
admitted.

A band as wide as all cosines leaves BalanceRoute alone; a narrow one gives up level loads for fewer experts
per step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from moe_opt.cluster.policies.balance import BalanceRoute0Policy, BalanceRouteHPolicy, Band
from moe_opt.cluster.policies.locality import EldrPolicy
from moe_opt.cluster.policies.projection import Ints, Projection
from moe_opt.cluster.predictors import Predictor
from moe_opt.cluster.signature import SignatureModel
from moe_opt.cluster.state import Request, Worker

# float32 cosines are good to about 1e-6; equal similarity must not depend on it.
ROUNDING = 1e-6


class SimilarityCache:
    """Cosines of waiting requests to the workers' centroids, computed when a request is first seen."""

    def __init__(self, eldr: EldrPolicy):
        self._eldr = eldr
        self._worker_ids: tuple[Hashable, ...] = ()
        self._model: SignatureModel | None = None
        # By identity of the request; each entry holds its request, so that no other object can take that
        # identity.
        self._rows: dict[int, tuple[Request, object, NDArray[np.float32]]] = {}

    def similarities(self, queue: Sequence[Request], workers: Sequence[Worker]) -> NDArray[np.float32]:
        """[requests, workers]; a row of zeros for a request without a usable signature."""
        worker_ids = tuple(worker.id for worker in workers)
        if worker_ids != self._worker_ids or self._model is not self._eldr.model:
            self._rows.clear()
            self._worker_ids, self._model = worker_ids, self._eldr.model
        known = {}
        for request in queue:
            entry = self._rows.get(id(request))
            if entry is not None and entry[1] is request.signature:
                known[id(request)] = entry
        new = [request for request in queue if id(request) not in known]
        if new:
            for request, row in zip(new, self._eldr.similarities(new, workers), strict=True):
                known[id(request)] = (request, request.signature, row)
        self._rows = known
        rows = [known[id(request)][2] for request in queue]
        return np.array(rows, dtype=np.float32).reshape(len(queue), len(workers))


class LocalityBand(Band):
    """Per waiting request, the workers within tau of the most similar one that can take it now."""

    restricts = True

    def __init__(self, similarities: NDArray[np.float32], tokens: Ints, tau: float, fleet: Projection):
        self._similarities = similarities
        self._tokens = tokens
        self._tau = tau
        self._able = (fleet.free > 0) & (tokens[:, None] <= fleet.room)
        self._inside = np.zeros_like(self._able)
        self._redraw(np.arange(len(tokens)))

    def members(self, worker: int, positions: Ints) -> NDArray[np.bool_]:
        return self._inside[positions, worker]

    def update(self, worker: int, fleet: Projection) -> bool:
        still_able = self._tokens <= fleet.room[worker] if fleet.free[worker] else np.zeros(len(self._tokens), bool)
        lost = np.flatnonzero(self._able[:, worker] & ~still_able)
        self._able[lost, worker] = False
        self._redraw(lost)
        return lost.size > 0

    def _redraw(self, positions: Ints) -> None:
        able = self._able[positions]
        similarities = np.where(able, self._similarities[positions], -np.inf)
        floor = similarities.max(axis=1, keepdims=True, initial=-np.inf) - self._tau - ROUNDING
        self._inside[positions] = able & (similarities >= floor)


class EldrBalanceRoute0Policy(BalanceRoute0Policy):
    """ "eldr+br-0": BR-0 in which a request may only go to workers of its locality band."""

    def __init__(
        self,
        signature_model: SignatureModel | None = None,
        tau: float = 0.1,
        candidates: int = 8,
        subset_size: int = 4,
        pool_bound: int | None = None,
        patience: float | None = None,
    ):
        super().__init__(candidates, subset_size, pool_bound, patience)
        self.eldr = EldrPolicy(signature_model=signature_model, tau=tau)
        self._cache = SimilarityCache(self.eldr)

    def _band(self, queue: Sequence[Request], fleet: Projection) -> Band:
        return _locality_band(queue, fleet, self.eldr, self._cache)


class EldrBalanceRouteHPolicy(BalanceRouteHPolicy):
    """ "eldr+br-h": BR-H in which a request may only go to workers of its locality band."""

    def __init__(
        self,
        seed: int = 0,
        signature_model: SignatureModel | None = None,
        tau: float = 0.1,
        predictor: str | Predictor | None = None,
        horizon: int = 48,
        gamma: float = 0.9,
        alpha: float = 1.0,
        beta: float | None = None,
        candidates: int = 8,
        subset_size: int = 4,
        pool_bound: int | None = None,
        refresh_every: int = 16,
        patience: float | None = None,
    ):
        super().__init__(
            seed=seed,
            predictor=predictor,
            horizon=horizon,
            gamma=gamma,
            alpha=alpha,
            beta=beta,
            candidates=candidates,
            subset_size=subset_size,
            pool_bound=pool_bound,
            refresh_every=refresh_every,
            patience=patience,
        )
        self.eldr = EldrPolicy(signature_model=signature_model, tau=tau)
        self._cache = SimilarityCache(self.eldr)

    def _band(self, queue: Sequence[Request], fleet: Projection) -> Band:
        return _locality_band(queue, fleet, self.eldr, self._cache)


def _locality_band(
    queue: Sequence[Request], fleet: Projection, eldr: EldrPolicy, cache: SimilarityCache
) -> LocalityBand:
    tokens = np.array([request.prompt_tokens for request in queue], dtype=np.int64)
    return LocalityBand(cache.similarities(queue, fleet.workers), tokens, eldr.tau, fleet)
