"""Prefill schedulers that MoE-Prefill is compared with: load only, prefix only, and PrefillOnly's shortest job first.

All keep the same block tables and count the same true FLOPs, so that a comparison shows the rule alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence

from moe_opt.cluster.prefill import BLOCK_TOKENS, Cost, PrefillScheduler, waiting_of
from moe_opt.cluster.state import Assignment, Request, Worker
from moe_opt.errors import ConfigError


class LoadOnlyScheduler(PrefillScheduler):
    """The least loaded worker, wherever the prefix is; hits happen by chance."""

    def _choose(self, request: Request, open_workers: dict[Hashable, int]) -> tuple[Hashable, int]:
        worker_id = min(open_workers, key=lambda worker: (self.load(worker), open_workers[worker]))
        return worker_id, self.matched_blocks(worker_id, request.block_hashes)


class PrefixOnlyScheduler(PrefillScheduler):
    """The longest prefix, however loaded its worker is: nothing closes, nothing spills."""

    def _limit(self) -> float:
        return math.inf


class ShortestPrefillScheduler(PrefillScheduler):
    """PrefillOnly's order: the request with the least prefill left first, estimated anew as caches change.

    The paper ports PrefillOnly's scheduler, "shortest-prefill-first, with continuous prefill-time estimation"
    (MoE-Prefill, Section 8.1). The time estimate is the FLOPs estimate of Eq. 2 here. Workers are chosen, and
    close, as in `PrefillScheduler`.

    Args:
        cost: as there.
        saturation: as there.
        block_tokens: as there.
        aging: FLOPs that a second of waiting takes off a request's estimate, so that long prompts are not
            starved.

    Raises:
        ConfigError: as there, or a negative aging.
    """

    def __init__(self, cost: Cost, saturation: float, block_tokens: int = BLOCK_TOKENS, aging: float = 0.0):
        super().__init__(cost, saturation, block_tokens)
        if not 0 <= aging < math.inf:
            raise ConfigError(f"aging must be 0 or more FLOPs per second, got {aging!r}")
        self.aging = aging

    def schedule(self, queue: Sequence[Request], workers: Sequence[Worker], now: float = 0.0) -> list[Assignment]:
        open_workers = self._open_workers(workers)
        waiting = dict(enumerate(waiting_of(queue, workers)))
        wanting: dict[Hashable, list[int]] = {}  # block -> places in the queue of the requests that have it
        for place, request in waiting.items():
            for block in dict.fromkeys(request.block_hashes):
                wanting.setdefault(block, []).append(place)

        def score(request: Request) -> float:
            _, blocks = self._choose(request, open_workers)
            left = self.estimate(request, self.cached_tokens(request, blocks))
            return left - self.aging * max(0.0, now - request.arrival)

        assignments: list[Assignment] = []
        heap = [(score(request), place) for place, request in waiting.items()] if open_workers else []
        heapq.heapify(heap)
        while heap and open_workers:
            recorded, place = heapq.heappop(heap)
            if place not in waiting:
                continue
            current = score(waiting[place])
            if current > recorded:  # the worker with its prefix closed since
                heapq.heappush(heap, (current, place))
                continue
            request = waiting.pop(place)
            _, matched = self._choose(request, open_workers)
            assignments.append(self._assign(request, open_workers))
            if not open_workers:
                break
            # The blocks that were nowhere are promised now: whoever shares one may have become shorter.
            new_blocks = request.block_hashes[matched:]
            sharers = {other for block in new_blocks for other in wanting[block]}
            for other in sharers & waiting.keys():
                heapq.heappush(heap, (score(waiting[other]), other))
        return assignments
