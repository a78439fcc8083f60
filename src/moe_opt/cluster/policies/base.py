"""What every routing policy is: one call that looks at the fleet and hands out waiting requests.

A policy keeps no record of what it has dispatched: the caller's state says so at the next call. What it may
keep is what no caller can know for it: a cursor, a random generator, counters of a predictor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from operator import attrgetter

from moe_opt.cluster.state import Assignment, Request, Worker


class Policy(ABC):
    """Decides which waiting request goes to which worker.

    Every policy keeps these promises: no worker above ``max_running`` or ``kv_capacity``, nothing to a
    draining worker, no request twice, at least one admitted if one fits somewhere. What stays waiting is
    asked again at the next call.
    """

    @abstractmethod
    def assign(self, waiting: Sequence[Request], workers: Sequence[Worker], now: float) -> list[Assignment]:
        """Hand out what should start now, in order of admission. ``now`` is seconds on the caller's clock."""

    def observe_finished(self, request: Request, generated: int) -> None:  # noqa: B027 - most learn nothing
        """Tell the policy that ``request`` ended after ``generated`` output tokens."""


class Fleet:
    """What one tick may still admit, worker by worker in the caller's order; `admit` keeps it up to date."""

    __slots__ = ("_admitted", "_load", "free", "in_flight", "open", "room", "roomiest", "workers")

    def __init__(self, workers: Sequence[Worker]):
        check_worker_ids(workers)
        self.workers = workers
        self.in_flight: list[int] = [len(worker.running) for worker in workers]
        """Requests on each worker, dispatched ones included."""
        self.free: list[int] = [worker.free_slots for worker in workers]
        self.room: list[float] = [
            inf if worker.kv_capacity is None else worker.kv_capacity - worker.kv_tokens for worker in workers
        ]
        """KV tokens that each worker can still hold."""
        self.open: list[int] = [index for index, slots in enumerate(self.free) if slots > 0]
        """Indices of workers with a free slot, ascending."""
        self.roomiest: float = max((self.room[index] for index in self.open), default=-1.0)
        """Most KV room among the open workers: no request above it fits anywhere."""
        self._admitted = [0] * len(workers)  # KV tokens
        self._load: list[int] | None = None

    @property
    def load(self) -> list[int]:
        """KV tokens on each worker, L_g; counted when it is first read, as most policies never do."""
        if self._load is None:
            self._load = [worker.kv_tokens + new for worker, new in zip(self.workers, self._admitted, strict=True)]
        return self._load

    def fitting(self, request: Request) -> list[int]:
        """Indices of the workers that can take ``request`` now, ascending."""
        tokens = request.prompt_tokens
        if tokens > self.roomiest:
            return []
        return [index for index in self.open if self.room[index] >= tokens]

    def admit(self, index: int, request: Request) -> Assignment:
        """Book ``request`` on worker ``index``."""
        if self.free[index] <= 0 or self.room[index] < request.prompt_tokens:
            raise ValueError(f"worker {self.workers[index].id!r} cannot take request {request.id!r}")
        self.free[index] -= 1
        self.in_flight[index] += 1
        self._admitted[index] += request.prompt_tokens
        if self._load is not None:
            self._load[index] += request.prompt_tokens
        room = self.room[index]
        self.room[index] -= request.prompt_tokens
        if self.free[index] == 0:
            self.open.remove(index)
        if room == self.roomiest and (self.free[index] == 0 or self.room[index] < room):
            self.roomiest = max((self.room[index] for index in self.open), default=-1.0)
        return Assignment(request.id, self.workers[index].id)


def check_worker_ids(workers: Sequence[Worker]) -> None:
    """An assignment names a worker by its id, so there is one of each."""
    ids = [worker.id for worker in workers]
    if len(set(ids)) != len(ids):
        raise ValueError(f"worker ids must differ, got {ids}")


def in_arrival_order(waiting: Sequence[Request], workers: Sequence[Worker]) -> list[Request]:
    """The requests that wait, oldest first (ties as given), without repeats or any that runs already."""
    ids = {request.id for request in waiting}
    queue = list(waiting)
    running = {
        key for worker in workers if not worker.running.keys().isdisjoint(ids) for key in worker.running.keys() & ids
    }
    if running or len(ids) != len(queue):
        first = {request.id: request for request in reversed(queue)}
        queue = [request for request in queue if first[request.id] is request and request.id not in running]
    queue.sort(key=attrgetter("arrival"))
    return queue


class OneByOnePolicy(Policy):
    """Takes the waiting requests one at a time, oldest first; a subclass says where each goes.

    A request that fits nowhere now is passed over, so that it blocks nobody.
    """

    def assign(self, waiting: Sequence[Request], workers: Sequence[Worker], now: float) -> list[Assignment]:
        fleet = Fleet(workers)
        if not waiting or not fleet.open:
            return []
        assignments = []
        for request in in_arrival_order(waiting, workers):
            fitting = fleet.fitting(request)
            if fitting:
                assignments.append(fleet.admit(self.choose(request, fitting, fleet), request))
                if not fleet.open:
                    break
        return assignments

    @abstractmethod
    def choose(self, request: Request, fitting: list[int], fleet: Fleet) -> int:
        """Index of the worker for ``request``, out of ``fitting``: those that can take it, never empty."""
