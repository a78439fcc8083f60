"""Collects step rows and request times during a run; `finish` turns them into a `SimResult`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_opt.simulate.metrics import SimResult


class Recorder:
    """Per-request arrays by row of the trace, and per-step columns as lists of chunks."""

    def __init__(self, count: int, num_workers: int, record_loads: bool):
        nan = np.full(count, np.nan)
        self.arrival, self.admitted = nan.copy(), nan.copy()
        self.first_token, self.finished = nan.copy(), nan.copy()
        self.worker = np.full(count, -1, dtype=np.int64)
        self.tokens = np.zeros(count, dtype=np.int64)
        self.lost = np.zeros(count, dtype=np.int64)
        self.decisions: list[float] = []
        self.end = 0.0
        self.num_steps = 0
        self._rows: list[NDArray[np.float64]] = []  # chunks [k, 8] in the order of COLUMNS
        self._loads: list[NDArray[np.int64]] | None = [] if record_loads else None
        self._num_workers = num_workers

    def steps(
        self,
        ends: NDArray[np.float64],
        seconds: NDArray[np.float64],
        loads: NDArray[np.int64],
        alive: NDArray[np.bool_],
        members: NDArray[np.int64],
        tokens: int,
        experts: float,
        waiting: int,
    ) -> None:
        """`loads` [k, members] of k steps (or one sample); dead workers do not count towards the spread."""
        seen = loads if alive.all() else loads[:, alive]
        rows = np.empty((len(ends), 8))
        rows[:, 0], rows[:, 1] = ends, seconds
        top = seen.max(axis=1)
        rows[:, 2] = top - seen.min(axis=1)
        rows[:, 3] = seen.sum(axis=1) / seen.shape[1]
        rows[:, 4], rows[:, 5], rows[:, 6], rows[:, 7] = top, experts, waiting, tokens
        self._rows.append(rows)
        self.num_steps += len(ends)
        if self._loads is not None:
            wide = np.zeros((len(ends), self._num_workers), dtype=np.int64)
            wide[:, members] = loads
            self._loads.append(wide)

    def finish(self, output_lengths: NDArray[np.int64]) -> SimResult:
        """Everything recorded so far."""
        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, 8))
        rows = rows[np.argsort(rows[:, 0], kind="stable")] if len(rows) else rows
        return SimResult(
            arrival=self.arrival,
            admitted=self.admitted,
            first_token=self.first_token,
            finished=self.finished,
            worker=self.worker,
            tokens=self.tokens,
            lost_steps=self.lost,
            step_end=rows[:, 0],
            step_seconds=rows[:, 1],
            step_spread=rows[:, 2],
            step_mean=rows[:, 3],
            step_max=rows[:, 4],
            step_experts=rows[:, 5],
            step_waiting=rows[:, 6].astype(np.int64),
            step_tokens=rows[:, 7].astype(np.int64),
            end=self.end,
            decision_seconds=np.asarray(self.decisions),
            loads=np.concatenate(self._loads) if self._loads else None,
            output_lengths=output_lengths,
        )
