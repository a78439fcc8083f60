"""The fleet as BalanceRoute sees it in one tick: free slots, and KV load over the next H steps (Section
4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from moe_opt.cluster.policies.base import check_worker_ids
from moe_opt.cluster.predictors.tracker import RemainingTracker
from moe_opt.cluster.state import Request, Worker

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Projection:
    """Free slots, KV room and projected loads L_g(h), h = 0..H, of every worker; `admit` keeps them up to
    date.

    Draining workers count in the envelope, as they still reach every barrier, but have no free slot.
    """

    __slots__ = (
        "_newcomers",
        "_smallest_margins",
        "_tracker",
        "envelope",
        "free",
        "has_limits",
        "loads",
        "room",
        "steps_ahead",
        "workers",
    )

    def __init__(
        self,
        workers: Sequence[Worker],
        horizon: int = 0,
        tracker: RemainingTracker | None = None,
        newcomers: Sequence[Request] = (),
        extra_slots: int = 0,
    ):
        """
        Args:
            workers: the fleet; its order is the order of all arrays.
            horizon: H, decode steps.
            tracker: estimates who leaves within the window; without it ``RunningRequest.remaining`` says so.
            newcomers: requests that may be admitted, predicted together with those that run.
            extra_slots: admissions beyond ``max_running`` (D.6's pool bypass).
        """
        check_worker_ids(workers)
        self.workers = workers
        self.steps_ahead = np.arange(horizon + 1, dtype=np.float64)
        in_flight = np.array([len(worker.running) for worker in workers], dtype=np.int64)
        slots = np.array(
            [
                0 if worker.draining or not worker.max_running else worker.max_running + extra_slots
                for worker in workers
            ],
            dtype=np.int64,
        )
        self.free: Ints = np.maximum(slots - in_flight, 0)
        self._tracker = tracker
        self._newcomers: list[int] = []  # how many steps of the window each would be there
        self.loads: Floats = self._project(in_flight, horizon, newcomers)
        self.envelope: Floats = self.loads.max(axis=0, initial=0.0)
        self._smallest_margins: Floats | None = None
        self.has_limits = any(worker.kv_capacity is not None for worker in workers)
        self.room: Floats = np.full(len(workers), np.inf)
        if self.has_limits:
            for index, worker in enumerate(workers):
                if worker.kv_capacity is not None:
                    self.room[index] = worker.kv_capacity - self.loads[index, 0]

    def _project(self, in_flight: Ints, horizon: int, newcomers: Sequence[Request]) -> Floats:
        """[K, H + 1]: a request adds w + h at each step h before it ends (Eq. 7)."""
        workers = self.workers
        running = list(chain.from_iterable([worker.running.values() for worker in workers]))
        tokens = np.array([request.kv_tokens for request in running], dtype=np.int64)
        if horizon == 0:
            lasting = np.ones(len(running), dtype=np.int64)
        elif self._tracker is not None:
            ids = list(chain.from_iterable([worker.running for worker in workers]))
            generated = np.array([request.generated for request in running], dtype=np.int64)
            steps = _steps_in_window(self._tracker.steps(ids, tokens, generated, newcomers), horizon)
            lasting, self._newcomers = steps[: len(running)], steps[len(running) :].tolist()
        else:
            # None becomes NaN. Not known, or beyond the window: it stays.
            remaining = np.array([request.remaining for request in running], dtype=np.float64)
            remaining[~(remaining <= horizon)] = np.inf
            lasting = _steps_in_window(np.maximum(remaining, 1.0), horizon)
        # Group by worker and number of steps; those present at h are the ones with more than h steps.
        columns = horizon + 2
        cell = np.repeat(np.arange(len(workers)) * columns, in_flight) + lasting
        shape = (len(workers), columns)
        count = np.bincount(cell, minlength=len(workers) * columns).reshape(shape)
        total = np.bincount(cell, weights=tokens, minlength=len(workers) * columns).reshape(shape)
        loads = total[:, :0:-1].cumsum(axis=1, dtype=np.float64)[:, ::-1]
        loads += count[:, :0:-1].cumsum(axis=1)[:, ::-1] * self.steps_ahead
        loads += np.array([worker.reserved_tokens for worker in workers], dtype=np.float64)[:, None]
        return loads

    def margins(self, worker: int) -> Floats:
        """m_g(h) [H + 1]: tokens that the worker can take before it overtakes the heaviest."""
        return self.envelope - self.loads[worker]

    @property
    def smallest_margins(self) -> Floats:
        """min_h m_g(h) [K]: the second part of the Stage 2 key."""
        if self._smallest_margins is None:
            self._smallest_margins = np.minimum.reduce(self.envelope - self.loads, axis=1)
        return self._smallest_margins

    def admit(self, worker: int, requests: Sequence[Request], positions: Sequence[int]) -> None:
        """Book ``requests``, the newcomers at ``positions``, on a worker.

        Those that were not among the newcomers are expected to stay for the whole window.
        """
        row = self.loads[worker]
        if self._tracker is not None:
            self._tracker.admit(requests)
        load = 0
        for request, position in zip(requests, positions, strict=True):
            load += request.prompt_tokens
            if position < len(self._newcomers):
                lasting = self._newcomers[position]
                row[:lasting] += request.prompt_tokens + self.steps_ahead[:lasting]
            else:
                row += request.prompt_tokens + self.steps_ahead
        self.free[worker] -= len(requests)
        self.room[worker] -= load
        smallest = np.minimum.reduce(self.envelope - row)
        if smallest < 0:
            np.maximum(self.envelope, row, out=self.envelope)
            self._smallest_margins = None
        elif self._smallest_margins is not None:
            self._smallest_margins[worker] = smallest


def _steps_in_window(steps: Floats, horizon: int) -> Ints:
    """How many of the steps h = 0..H a request with ``h < c`` is there for; H + 1 if it outlives the
    window."""
    return np.ceil(np.minimum(steps, horizon + 1)).astype(np.int64)
