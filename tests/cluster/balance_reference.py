"""BalanceRoute in plain code, straight from DESIGN's formulas: slow, obvious, and what the tests compare
against."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from moe_opt.cluster import Request, Worker


def score(load: float, margins: Sequence[float], gamma: float, alpha: float, beta: float) -> float:
    """F(S, g) = sum_h gamma^h * (alpha * D - beta * max(0, D - m_g(h)))."""
    return sum(gamma**h * (alpha * load - beta * max(0.0, load - margin)) for h, margin in enumerate(margins))


def every_subset(loads: Sequence[float], max_size: int) -> list[tuple[int, ...]]:
    return [subset for size in range(1, max_size + 1) for subset in combinations(range(len(loads)), size)]


def projected_loads(worker: Worker, horizon: int) -> list[float]:
    """L_g(h): a running request adds w + h while h < c, at h = 0 in any case, and always if it outlives the
    window."""
    loads = []
    for h in range(horizon + 1):
        load = float(worker.reserved_tokens)
        for request in worker.running.values():
            remaining = request.remaining
            stays = remaining is None or remaining != remaining or remaining > horizon
            if stays or h < max(1.0, remaining):
                load += request.kv_tokens + h
        loads.append(load)
    return loads


class ReferenceFleet:
    """L_g(h), envelope and margins, recomputed from scratch whenever they are read."""

    def __init__(self, workers: Sequence[Worker], horizon: int):
        self.workers = workers
        self.loads = [projected_loads(worker, horizon) for worker in workers]
        self.free = [worker.free_slots for worker in workers]

    def margins(self, index: int) -> list[float]:
        return [max(column) - own for own, *column in zip(self.loads[index], *self.loads, strict=True)]

    def admit(self, index: int, requests: Sequence[Request]) -> None:
        """An admitted request is not known to leave within the window."""
        self.free[index] -= len(requests)
        for request in requests:
            self.loads[index] = [load + request.prompt_tokens + h for h, load in enumerate(self.loads[index])]

    def next_worker(self) -> int:
        """Stage 2's queue: most free slots, then the largest of the smallest margins, then the first."""
        return max(range(len(self.free)), key=lambda g: (self.free[g], min(self.margins(g)), -g))
