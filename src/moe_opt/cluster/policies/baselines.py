"""The policies that ELDR and BalanceRoute are measured against (BalanceRoute Section 6.1, ELDR "Setup").

Load is requests in flight, dispatched ones included, except where a docstring says otherwise; ties go to
the worker that comes first in the caller's order.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

from moe_opt.cluster.policies.base import Fleet, OneByOnePolicy
from moe_opt.cluster.state import Assignment, Request, Worker


class RandomPolicy(OneByOnePolicy):
    """A worker drawn uniformly from those with room."""

    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)

    def choose(self, request: Request, fitting: list[int], fleet: Fleet) -> int:
        return self._random.choice(fitting)


class RoundRobinPolicy(OneByOnePolicy):
    """Each worker in turn; one without room loses its turn. The cursor lives on between calls."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, fitting: list[int], fleet: Fleet) -> int:
        chosen = next((index for index in fitting if index >= self._next), fitting[0])
        self._next = (chosen + 1) % len(fleet.workers)
        return chosen


class JoinShortestQueuePolicy(OneByOnePolicy):
    """The worker with the fewest requests in flight: BalanceRoute's strongest baseline."""

    def choose(self, request: Request, fitting: list[int], fleet: Fleet) -> int:
        return min(fitting, key=fleet.in_flight.__getitem__)


class PowerOfTwoPolicy(OneByOnePolicy):
    """Two workers drawn at random, the one with fewer requests in flight (Mitzenmacher, 2002)."""

    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)

    def choose(self, request: Request, fitting: list[int], fleet: Fleet) -> int:
        if len(fitting) == 1:
            return fitting[0]
        return min(self._random.sample(fitting, 2), key=fleet.in_flight.__getitem__)


class LeastKVPolicy(OneByOnePolicy):
    """The worker with the fewest KV tokens: BalanceRoute's view of load without its margins or its pool."""

    def choose(self, request: Request, fitting: list[int], fleet: Fleet) -> int:
        return min(fitting, key=fleet.load.__getitem__)


class VLLMQueuePolicy(OneByOnePolicy):
    """vLLM's data-parallel balancing: the least ``4 * waiting + running``.

    A request counts as waiting until it has generated a token, and so does one that this call has
    dispatched (vLLM's client adds it to its own count until the engine reports again). The scan starts at
    ``first_worker``.
    """

    def __init__(self, first_worker: int = 0):
        self._first_worker = first_worker
        self._waiting: list[int] = []

    def assign(self, waiting: Sequence[Request], workers: Sequence[Worker], now: float) -> list[Assignment]:
        self._waiting = [sum(request.generated == 0 for request in worker.running.values()) for worker in workers]
        return super().assign(waiting, workers, now)

    def choose(self, request: Request, fitting: list[int], fleet: Fleet) -> int:
        count = len(fleet.workers)
        chosen = min(
            fitting,
            key=lambda index: (self._score(index, fleet), (index - self._first_worker) % count),
        )
        self._waiting[chosen] += 1
        return chosen

    def _score(self, index: int, fleet: Fleet) -> float:
        return 3 * self._waiting[index] + fleet.in_flight[index]  # in flight = waiting + running


class VLLMKVPolicy(VLLMQueuePolicy):
    """vLLM's newer balancing: queue length, plus a penalty for waiting where KV memory is scarce.

    The least ``max(clients * inflight, waiting + running) + waiting * 6 * max(0, kv_usage - 0.5)`` wins.
    There is one client, this router, so the first term is the requests in flight. KV usage is 0 on a worker
    without ``kv_capacity``. The scan starts one worker further each time, so that ties rotate.
    """

    def choose(self, request: Request, fitting: list[int], fleet: Fleet) -> int:
        chosen = super().choose(request, fitting, fleet)
        self._first_worker = (self._first_worker + 1) % len(fleet.workers)
        return chosen

    def _score(self, index: int, fleet: Fleet) -> float:
        capacity = fleet.workers[index].kv_capacity
        usage = fleet.load[index] / capacity if capacity else 0.0
        return fleet.in_flight[index] + 6.0 * self._waiting[index] * max(0.0, usage - 0.5)


class DomainPolicy(OneByOnePolicy):
    """ELDR's oracle baseline: workers are shared out among true labels, shortest queue inside each share.

    Worker k serves domain ``k mod n`` of the n domains; with fewer workers than domains, several domains
    share one. Domains are ``domains`` in their order, then the others as they appear. A request without a
    label, or whose workers are all full, joins the shortest queue of the whole fleet.
    """

    def __init__(self, domains: Sequence[Hashable] = ()):
        self._slots: dict[Hashable, int] = {domain: slot for slot, domain in enumerate(dict.fromkeys(domains))}

    def choose(self, request: Request, fitting: list[int], fleet: Fleet) -> int:
        candidates = fitting
        if request.domain is not None:
            slot = self._slots.setdefault(request.domain, len(self._slots))
            shares = min(len(self._slots), len(fleet.workers))
            candidates = [index for index in fitting if index % shares == slot % shares] or fitting
        return min(candidates, key=fleet.in_flight.__getitem__)
