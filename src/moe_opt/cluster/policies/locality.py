"""ELDR's locality-band routing: requests that use the same experts share a worker, as far as the load allows.

s_k is the cosine of a request's signature to centroid k. Among the workers with room, those with s_k >= max s
- tau form the band, and the one with the fewest decode requests in flight gets the request (ELDR, "Online").
tau = 0 goes to the nearest centroid whatever its load; tau >= 1 is the shortest queue (cosines of counts lie
in 0 ... 1).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from itertools import islice

import numpy as np

from moe_opt.cluster.expert_counts import Floats
from moe_opt.cluster.policies.base import Fleet, Policy, in_arrival_order
from moe_opt.cluster.signature import SignatureModel
from moe_opt.cluster.state import Assignment, Request, Worker
from moe_opt.errors import ConfigError

logger = logging.getLogger(__name__)

# Rows of signatures that are stacked and multiplied at once: 256 x 6,144 floats are 6 MB.
_BATCH = 256
_MIN_BATCH = 8
# float32 cosines of 6,144 products are good to about 1e-6; equal similarity must not depend on it.
_ROUNDING = 1e-6


class EldrPolicy(Policy):
    """Routes by signature inside a band of similarity, by load within it.

    Args:
        signature_model: from `SignatureModel.fit` or `.load`; its token table, if it has one, gives
            signatures to requests that bring `token_ids` but no signature.
        tau: width of the band in cosine, 0.1 in the paper.

    Raises:
        ConfigError: no signature model, or tau is negative or not a number.

    A worker keeps the centroid that it got when it was first seen, so that it keeps its kind of request while
    others come and go: the first worker of the first call gets centroid 0, and so on. A newcomer takes the
    centroid that the fewest workers of the call have. A request without a usable signature goes by load
    alone.
    """

    def __init__(self, signature_model: SignatureModel | None = None, tau: float = 0.1):
        if signature_model is None:
            raise ConfigError(
                "ELDR needs signature_model=SignatureModel.load(path); fit one with `moe-opt fit-signatures`"
            )
        if not tau >= 0:
            raise ConfigError(f"tau must be at least 0, got {tau!r}")
        self.tau = float(tau)
        self.model = signature_model
        self.unusable_signatures = 0
        """Times a request's signature was of the wrong width or not finite, or its token ids were bad."""
        self._centroid_of: dict[Hashable, int] = {}
        self._columns: tuple[tuple[Hashable, ...], list[int]] = ((), [])

    def use(self, signature_model: SignatureModel, worker_ids: Sequence[Hashable] = ()) -> None:
        """Switches to a refitted model. `worker_ids` name the owners of its centroids, in order.

        Without them every worker keeps the index it has; right after `refit`, wrong after `drop_workers`.
        """
        self.model = signature_model
        if worker_ids:
            self._centroid_of = {worker: k % len(signature_model.centroids) for k, worker in enumerate(worker_ids)}
        else:
            known = len(signature_model.centroids)
            self._centroid_of = {worker: k for worker, k in self._centroid_of.items() if k < known}
        self._columns = ((), [])

    def assign(self, waiting: Sequence[Request], workers: Sequence[Worker], now: float) -> list[Assignment]:
        """Oldest first; a request that fits nowhere waits and blocks nobody."""
        fleet = Fleet(workers)
        if not waiting or not fleet.open:
            return []
        queue = in_arrival_order(waiting, workers)
        assignments: list[Assignment] = []
        left = iter(queue)
        while fleet.open:
            # No more signatures than there are slots, and none for what fits nowhere: a deep queue is asked
            # again at every tick.
            size = min(_BATCH, max(_MIN_BATCH, sum(fleet.free)))
            batch = list(islice((r for r in left if r.prompt_tokens <= fleet.roomiest), size))
            if not batch:
                break
            for request, row in zip(batch, self.similarities(batch, workers).tolist(), strict=True):
                fitting = fleet.fitting(request)
                if fitting:
                    index = self._choose(row, fitting, fleet.in_flight)
                    assignments.append(fleet.admit(index, request))
        return assignments

    def candidates(
        self, request: Request, workers: Sequence[Worker], fitting: Sequence[int] | None = None
    ) -> list[int]:
        """The band: indices of the workers similar enough for `request`, ascending; for composed policies.

        Args:
            request: what waits.
            workers: the fleet.
            fitting: indices that can take it; by default every worker with a free slot and KV room.

        Returns:
            Empty only if nothing fits. All of `fitting` for a request without a usable signature.
        """
        if fitting is None:
            fitting = Fleet(workers).fitting(request)
        return self.band(self.similarities([request], workers)[0].tolist(), fitting)

    def band(self, similarity: Sequence[float], fitting: Sequence[int]) -> list[int]:
        """Those of `fitting` within tau of the most similar of them, given a row of `similarities`."""
        if not fitting:
            return []
        floor = max([similarity[index] for index in fitting]) - self.tau - _ROUNDING
        return [index for index in fitting if similarity[index] >= floor]

    def similarities(self, requests: Sequence[Request], workers: Sequence[Worker]) -> Floats:
        """Cosines `[requests, workers]`; a row of zeros for a request without a usable signature."""
        result = np.zeros((len(requests), len(workers)), dtype=np.float32)
        rows: list[int] = []
        signatures: list[Floats] = []
        for row, request in enumerate(requests):
            signature = self._signature(request)
            if signature is not None:
                rows.append(row)
                signatures.append(signature)
        if rows:
            result[rows] = self.model.similarity(np.stack(signatures))[:, self._columns_of(workers)]
        return result

    def _choose(self, similarity: list[float], fitting: list[int], in_flight: list[int]) -> int:
        """Least loaded in the band; ties to the more similar, then to the lower index."""
        floor = max([similarity[index] for index in fitting]) - self.tau - _ROUNDING
        best, best_key = fitting[0], (float("inf"), 0.0)
        for index in fitting:
            own = similarity[index]
            if own >= floor:
                key = (in_flight[index], -own)
                if key < best_key:
                    best, best_key = index, key
        return best

    def _signature(self, request: Request) -> Floats | None:
        """The request's own float32 `[D]` signature, one from its token ids, or None."""
        if request.signature is not None:
            signature = np.asarray(request.signature, dtype=np.float32)
            if signature.shape == self.model.centroids.shape[1:] and np.isfinite(signature).all():
                return signature
            self._count_unusable(f"{list(signature.shape)} values, or not all finite")
        elif request.token_ids is not None and self.model.token_table is not None:
            try:
                return self.model.transform_tokens(np.asarray(request.token_ids))
            except ConfigError as error:
                self._count_unusable(str(error))
        return None

    def _count_unusable(self, reason: str) -> None:
        """One bad request must not hold up the others: count it, and warn once."""
        if not self.unusable_signatures:
            logger.warning("a request has no signature that fits the model and is routed by load: %s", reason)
        self.unusable_signatures += 1

    def _columns_of(self, workers: Sequence[Worker]) -> list[int]:
        """The centroid of each worker, in the order of `workers`."""
        ids = tuple(worker.id for worker in workers)
        if ids == self._columns[0]:
            return self._columns[1]
        holders = np.zeros(len(self.model.centroids), dtype=np.int64)
        for worker in ids:
            if worker in self._centroid_of:
                holders[self._centroid_of[worker]] += 1
        for worker in ids:
            if worker not in self._centroid_of:
                # Whoever is away may come back to its centroid: take one that nobody owns, if there is one.
                fewest = [int(k) for k in np.flatnonzero(holders == holders.min())]
                owned = set(self._centroid_of.values())
                choice = next((k for k in fewest if k not in owned), fewest[0])
                if not holders[choice]:  # its owners are away: they give it up, so that the map stays small
                    self._centroid_of = {w: k for w, k in self._centroid_of.items() if k != choice}
                self._centroid_of[worker] = choice
                holders[choice] += 1
        columns = [self._centroid_of[worker] for worker in ids]
        self._columns = (ids, columns)
        return columns
