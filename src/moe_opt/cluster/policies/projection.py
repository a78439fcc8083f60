"""The fleet as BalanceRoute sees it in one tick: free slots, and KV load over the next H steps (Section
4.1)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from moe_opt.cluster.predictors.tracker import RemainingTracker
from moe_opt.cluster.state import Worker

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Projection:
    """Free slots, KV room and projected loads L_g(h), h = 0..H, of every worker; `admit` keeps them up to
    date.

    Draining workers count in the envelope, as they still reach every barrier, but have no free slot.
    """

    __slots__ = ("envelope", "free", "has_limits", "loads", "room", "steps_ahead", "workers")

    def __init__(
        self,
        workers: Sequence[Worker],
        horizon: int = 0,
        tracker: RemainingTracker | None = None,
        extra_slots: int = 0,
    ):
        """Without a tracker, ``RunningRequest.remaining`` says who leaves within the window, where it is
        given."""
        if len({worker.id for worker in workers}) != len(workers):
            raise ValueError(f"worker ids must differ, got {[worker.id for worker in workers]}")
        self.workers = workers
        self.steps_ahead = np.arange(horizon + 1, dtype=np.float64)
        in_flight = np.array([len(worker.running) for worker in workers], dtype=np.int64)
        slots = np.array([0 if worker.draining else worker.max_running for worker in workers], dtype=np.int64)
        self.free: Ints = np.where(slots > 0, np.maximum(slots + extra_slots - in_flight, 0), 0)
        self.loads: Floats = self._project(in_flight, horizon, tracker)
        self.envelope: Floats = self.loads.max(axis=0) if workers else np.zeros(horizon + 1)
        self.has_limits = any(worker.kv_capacity is not None for worker in workers)
        self.room: Floats = np.array(
            [np.inf if worker.kv_capacity is None else worker.kv_capacity for worker in workers]
        )
        if self.has_limits:
            self.room -= self.loads[:, 0]

    def _project(self, in_flight: Ints, horizon: int, tracker: RemainingTracker | None) -> Floats:
        """[K, H + 1]: a request adds w + h at each step h before it ends (Eq. 7)."""
        workers = self.workers
        running = list(chain.from_iterable([worker.running.values() for worker in workers]))
        tokens = np.array([request.kv_tokens for request in running], dtype=np.int64)
        if horizon == 0:
            lasting = np.ones(len(running), dtype=np.int64)
        elif tracker is not None:
            ids: list[Hashable] = list(chain.from_iterable([worker.running for worker in workers]))
            generated = np.array([request.generated for request in running], dtype=np.int64)
            lasting = _steps_in_window(tracker.steps(ids, tokens, generated), horizon)
        else:
            # None becomes NaN: not known, so it is expected to outlive the window.
            remaining = np.array([request.remaining for request in running], dtype=np.float64)
            remaining[np.isnan(remaining) | (remaining > horizon)] = np.inf
            lasting = _steps_in_window(np.maximum(remaining, 1.0), horizon)
        # Group by worker and number of steps; those present at h are the ones with more than h steps.
        columns = horizon + 2
        cell = np.repeat(np.arange(len(workers)) * columns, in_flight) + lasting
        shape = (len(workers), columns)
        count = np.bincount(cell, minlength=shape[0] * columns).reshape(shape)
        total = np.bincount(cell, weights=tokens, minlength=shape[0] * columns).reshape(shape)
        present = count[:, :0:-1].cumsum(axis=1)[:, ::-1]
        loads = total[:, :0:-1].cumsum(axis=1)[:, ::-1] + present * self.steps_ahead
        loads += np.array([worker.reserved_tokens for worker in workers], dtype=np.float64)[:, None]
        return loads

    def margins(self, worker: int) -> Floats:
        """m_g(h) [H + 1]: tokens that the worker can take before it overtakes the heaviest."""
        return self.envelope - self.loads[worker]

    def smallest_margins(self, workers: Ints) -> Floats:
        """min_h m_g(h) of each of ``workers``: the second part of the Stage 2 key."""
        return (self.envelope - self.loads[workers]).min(axis=1)

    def admit(self, worker: int, tokens: Ints, steps: Floats | None = None) -> None:
        """Book requests of ``tokens`` [n], expected to run ``steps`` [n] (None: all the window), on a
        worker."""
        load = float(tokens.sum())
        self.free[worker] -= len(tokens)
        self.room[worker] -= load
        if steps is None or np.isinf(steps).all():
            self.loads[worker] += load + len(tokens) * self.steps_ahead
        else:
            lasting = _steps_in_window(steps, len(self.steps_ahead) - 1)
            present = lasting[:, None] > self.steps_ahead
            self.loads[worker] += (present * (tokens[:, None] + self.steps_ahead)).sum(axis=0)
        np.maximum(self.envelope, self.loads[worker], out=self.envelope)


def _steps_in_window(steps: Floats, horizon: int) -> Ints:
    """How many of the steps h = 0..H a request with ``h < c`` is there for; H + 1 if it outlives the
    window."""
    return np.ceil(np.minimum(steps, horizon + 1)).astype(np.int64)
