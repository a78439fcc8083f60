"""One barrier group: workers that start and end every step together. A worker of its own is a group of
one."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_opt.cluster import Request
from moe_opt.simulate.costs import StepCost
from moe_opt.simulate.live import LiveRequest

MAX_PLAN = 256  # steps planned at once; bounds the memory of a plan for many workers


class Joining(NamedTuple):
    """A request on its way to a worker: it joins at the first step boundary at or after `ready`."""

    ready: float  # seconds
    worker: int
    live: LiveRequest
    request: Request


class Group:
    """Step counter, planned step ends and finish queue of one group. Loads are held by the engine, per
    worker."""

    __slots__ = ("_order", "ends", "finishes", "joining", "members", "planned", "start", "step", "version")

    def __init__(self, members: list[int]):
        self.members = np.array(members, dtype=np.int64)
        self.step = 0  # steps done at the start of the current plan
        self.start = 0.0  # seconds: when the current plan starts
        self.ends: list[float] = []  # planned ends of the next steps, seconds
        self.planned = False
        self.version = 0  # outdates events of earlier plans
        self.joining: list[Joining] = []
        self.finishes: list[tuple[int, int, int, LiveRequest, Request]] = []  # (step, order, worker, ...)
        self._order = 0

    def done(self, now: float) -> int:
        """Steps of the plan that have ended by `now`."""
        return bisect_right(self.ends, now) if self.planned else 0

    def will_finish(self, worker: int, live: LiveRequest, request: Request) -> None:
        """Queue the end of a request that joins now."""
        self._order += 1
        live.joined = self.step
        step = self.step + live.total - live.start_generated
        heapq.heappush(self.finishes, (step, self._order, worker, live, request))

    def next_finish(self) -> int:
        """Steps until the next request ends; requests that left in between are passed over."""
        while self.finishes and self.finishes[0][3].joined is None:
            heapq.heappop(self.finishes)
        return self.finishes[0][0] - self.step if self.finishes else MAX_PLAN

    def pop_finished(self) -> list[tuple[int, LiveRequest, Request]]:
        """Requests that end at the current step."""
        ended = []
        while self.finishes and self.finishes[0][0] <= self.step:
            _, _, worker, live, request = heapq.heappop(self.finishes)
            if live.joined is not None:
                ended.append((worker, live, request))
        return ended

    def plan(
        self,
        now: float,
        steps: int,
        load: NDArray[np.int64],
        count: NDArray[np.int64],
        experts: float,
        cost: StepCost,
        speed: NDArray[np.float64],
    ) -> None:
        """Lay out the next `steps` steps from `now`: each lasts as long as the slowest member needs.

        Token i of a plan reads load + i x count tokens on each member: the cost is linear, so that one array
        operation covers all steps in which nobody joins or ends.
        """
        base = cost.fixed + cost.per_expert * experts + cost.per_request * count
        index = np.arange(steps)
        if len(load) == 1:
            seconds = (base[0] + cost.per_kv_token * (load[0] + index * count[0])) / speed[0]
        else:
            tokens = load[None, :] + index[:, None] * count[None, :]
            seconds = ((base[None, :] + cost.per_kv_token * tokens) / speed[None, :]).max(axis=1)
        self.start = now
        self.ends = (now + np.cumsum(seconds)).tolist()
        self.planned = True
        self.version += 1

    def cut(self, now: float, ready: float) -> bool:
        """Shorten the plan to the first boundary at or after `ready`; True if there is a new next event."""
        keep = max(self.done(now), bisect_right(self.ends, np.nextafter(ready, -np.inf))) + 1
        if keep >= len(self.ends):
            return False
        del self.ends[keep:]
        self.version += 1
        return True
