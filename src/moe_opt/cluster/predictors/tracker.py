"""Remaining decode steps of running requests, kept up between predictions (BalanceRoute C.2.3).

A predictor is asked when a request is first seen, every ``refresh_every`` generated tokens, and when the
estimate has run out; in between the estimate falls by one per token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf

import numpy as np

from moe_opt.cluster.predictors.base import Floats, Ints, Prediction, Predictor, Queries
from moe_opt.cluster.state import Request
from moe_opt.errors import ConfigError

OUTLIVES = inf
"""The estimate of a request that is expected to run beyond the window."""

FLOOR = 1.0
"""A running request counts for one more step at least."""


def composite(prediction: Prediction, horizon: int, gate: float) -> Floats:
    """Eq. 6: c = p * mu + (1 - p) * H, at least the floor; `OUTLIVES` where p is below the gate."""
    p, mu = prediction
    expected = np.clip(p * mu + (1.0 - p) * horizon, FLOOR, max(float(horizon), FLOOR))
    return np.where((p >= gate) & (expected >= FLOOR), expected, OUTLIVES)  # NaN is not believed either


class RemainingTracker:
    """The estimates c of the requests that run now, keyed by request id; a column per counter, a row per
    request."""

    def __init__(self, predictor: Predictor, horizon: int, refresh_every: int, gate: float = 0.5):
        """``horizon`` in decode steps, ``refresh_every`` in generated tokens; ``gate`` is the least p to be
        believed."""
        if refresh_every < 1:
            raise ConfigError(f"refresh_every must be 1 or more, got {refresh_every}")
        self.predictor = predictor
        self._horizon = horizon
        self._refresh_every = refresh_every
        self._gate = gate
        self._row: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._estimate = np.empty(0)  # c when it was last predicted; NaN: never
        self._age = np.empty(0, dtype=np.int64)  # output tokens at that time
        self._prompt_tokens = np.empty(0, dtype=np.int64)
        self._prompt_hash: list[Hashable | None] = []

    def admit(self, requests: Sequence[Request]) -> Floats:
        """Start tracking requests that are being dispatched: their estimates before the first token."""
        rows = [self._row_of(request.id) for request in requests]
        for row, request in zip(rows, requests, strict=True):
            self._estimate[row] = np.nan
            self._prompt_tokens[row] = request.prompt_tokens
            self._prompt_hash[row] = request.prompt_hash
        return self._steps(np.array(rows, dtype=np.int64), np.zeros(len(rows), dtype=np.int64))

    def steps(self, ids: Sequence[Hashable], kv_tokens: Ints, generated: Ints) -> Floats:
        """c of each running request in decode steps, `OUTLIVES` for those that stay beyond the window.

        A request that was not admitted here (after a restart of the router) has the prompt that its KV
        tokens tell.
        """
        known = self._row
        rows = np.array([known.get(key, -1) for key in ids], dtype=np.int64)
        if rows.size and rows.min() < 0:
            for position in np.flatnonzero(rows < 0).tolist():
                rows[position] = row = self._row_of(ids[position])
                self._estimate[row] = np.nan
                self._prompt_tokens[row] = max(0, kv_tokens[position] - generated[position])
                self._prompt_hash[row] = None
        if len(known) > 2 * len(ids) + 1024:
            self._keep_only(ids)
        return self._steps(rows, generated)

    def forget(self, request_id: Hashable) -> None:
        """Stop tracking a request; unknown ids are ignored."""
        row = self._row.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def _steps(self, rows: Ints, generated: Ints) -> Floats:
        elapsed = generated - self._age[rows]
        steps = self._estimate[rows] - elapsed
        ran_out = (steps <= FLOOR) & (elapsed > 0)
        due = ran_out | (elapsed >= self._refresh_every) | (elapsed < 0) | np.isnan(steps)
        if due.any():
            stale = rows[due]
            ages = generated[due]
            hashes = [self._prompt_hash[row] for row in stale]
            prediction = self.predictor.predict(Queries(ages, self._prompt_tokens[stale], hashes), self._horizon)
            steps[due] = self._estimate[stale] = composite(prediction, self._horizon, self._gate)
            self._age[stale] = ages
        return np.maximum(steps, FLOOR)

    def _row_of(self, request_id: Hashable) -> int:
        row = self._row.get(request_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row[request_id] = self._free.pop()
        return row

    def _grow(self) -> None:
        size = len(self._prompt_hash)
        added = max(256, size)
        self._estimate = np.concatenate((self._estimate, np.full(added, np.nan)))
        self._age = np.concatenate((self._age, np.zeros(added, dtype=np.int64)))
        self._prompt_tokens = np.concatenate((self._prompt_tokens, np.zeros(added, dtype=np.int64)))
        self._prompt_hash.extend([None] * added)
        self._free.extend(range(size + added - 1, size - 1, -1))

    def _keep_only(self, ids: Sequence[Hashable]) -> None:
        """Drop requests that left without `forget`: cancelled ones, for example."""
        for request_id in self._row.keys() - set(ids):
            self.forget(request_id)
