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
    expected = np.maximum(np.minimum(p * mu + (1.0 - p) * horizon, horizon), FLOOR)
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

    def steps(
        self,
        ids: Sequence[Hashable],
        kv_tokens: Ints,
        generated: Ints,
        newcomers: Sequence[Request] = (),
    ) -> Floats:
        """c of each running request and of each newcomer, in decode steps; `OUTLIVES` beyond the window.

        One batch serves all that are due. A running request that was not admitted here (after a restart of
        the router) has the prompt that its KV tokens tell, and no prompt hash.
        """
        rows = self._rows_of(ids, kv_tokens, generated)
        if len(self._row) > 2 * len(ids) + 1024:
            self._keep_only(ids)
        elapsed = generated - self._age[rows]
        steps = self._estimate[rows] - elapsed
        due = np.flatnonzero(
            (elapsed >= self._refresh_every)
            | (steps <= FLOOR) & (elapsed > 0)  # ran out
            | (elapsed < 0)
            | np.isnan(steps)
        )
        result = np.concatenate((steps, np.empty(len(newcomers))))
        if len(due) or newcomers:
            stale = rows[due]
            ages = generated[due]
            queries = Queries(
                np.concatenate((ages, np.zeros(len(newcomers), dtype=np.int64))),
                np.concatenate(
                    (
                        self._prompt_tokens[stale],
                        np.array([request.prompt_tokens for request in newcomers], dtype=np.int64),
                    )
                ),
                [self._prompt_hash[row] for row in stale.tolist()] + [request.prompt_hash for request in newcomers],
            )
            predicted = composite(self.predictor.predict(queries, self._horizon), self._horizon, self._gate)
            result[due] = self._estimate[stale] = predicted[: len(due)]
            result[len(steps) :] = predicted[len(due) :]
            self._age[stale] = ages
        return np.maximum(result, FLOOR)

    def admit(self, requests: Sequence[Request]) -> None:
        """Requests that are being dispatched: remember their prompts; the first `steps` with them
        predicts."""
        for request in requests:
            row = self._row_of(request.id)
            self._estimate[row] = np.nan
            self._prompt_tokens[row] = request.prompt_tokens
            self._prompt_hash[row] = request.prompt_hash

    def forget(self, request_id: Hashable) -> None:
        """Stop tracking a request; unknown ids are ignored."""
        row = self._row.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def _rows_of(self, ids: Sequence[Hashable], kv_tokens: Ints, generated: Ints) -> Ints:
        try:
            return np.fromiter(map(self._row.__getitem__, ids), np.int64, len(ids))
        except KeyError:  # some are new here
            unknown = [position for position, key in enumerate(ids) if key not in self._row]
        rows = [self._row_of(ids[position]) for position in unknown]
        self._estimate[rows] = np.nan
        self._prompt_tokens[rows] = np.maximum(kv_tokens[unknown] - generated[unknown], 0)
        for row in rows:
            self._prompt_hash[row] = None
        return self._rows_of(ids, kv_tokens, generated)

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
