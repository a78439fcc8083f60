"""Predictors that read both stages off past output lengths (BalanceRoute C.2.1): nothing to train."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable

import numpy as np

from moe_opt.cluster.predictors.base import Floats, Ints, Prediction, Queries
from moe_opt.cluster.state import Request
from moe_opt.errors import ConfigError


class LengthHistory:
    """The last ``window`` output lengths, sorted, with O(log n) answers; each observation counts at once."""

    __slots__ = ("_arrivals", "_prefix", "_sorted", "_values", "window")

    def __init__(self, window: int):
        if window < 1:
            raise ConfigError(f"window must be 1 or more, got {window}")
        self.window = window
        self._arrivals: deque[int] = deque()
        self._sorted = array("q")
        self._values: Ints | None = None  # `_sorted` for NumPy, made when it is asked for
        self._prefix: Ints | None = None  # sums of its first n values

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        """Remember one output length in tokens, and forget the oldest if the window is full."""
        if len(self._arrivals) == self.window:
            self._sorted.pop(bisect_left(self._sorted, self._arrivals.popleft()))
        self._arrivals.append(length)
        insort(self._sorted, length)
        self._values = self._prefix = None

    def predict_one(self, age: int, horizon: int) -> tuple[float, float]:
        """(p, mu) at one age: p = P(O <= age + H | O > age), mu = E[O - age | age < O <= age + H]."""
        low = bisect_right(self._sorted, age)
        high = bisect_right(self._sorted, age + horizon)
        if high == low:
            return 0.0, float(horizon)
        return (high - low) / (len(self._sorted) - low), sum(self._sorted[low:high]) / (high - low) - age

    def predict(self, ages: Ints, horizon: int) -> Prediction:
        """`predict_one` for an array of ages."""
        if self._values is None or self._prefix is None:
            self._values = np.array(self._sorted, dtype=np.int64)
            self._prefix = np.concatenate(([0], np.cumsum(self._values)))
        low = self._values.searchsorted(ages, side="right")
        high = self._values.searchsorted(ages + horizon, side="right")
        ending = high - low
        outliving = np.maximum(len(self._values) - low, 1)  # no output was that long: 0 / 1
        mean = (self._prefix[high] - self._prefix[low]) / np.maximum(ending, 1) - ages
        return Prediction(ending / outliving, np.where(ending > 0, mean, float(horizon)))


class SurvivalPredictor:
    """Empirical survival: how long did past outputs that got this far go on? Looks at nothing but the age.

    The production default (Section 6.2), and the fallback of the others. Past the longest output seen, p = 0.
    """

    def __init__(self, window: int = 8192):
        """``window``: how many of the latest outputs count, so that the estimate follows the workload."""
        self.history = LengthHistory(window)

    def predict(self, queries: Queries, horizon: int) -> Prediction:
        return self.history.predict(queries.generated, horizon)

    def observe(self, request: Request, generated: int) -> None:
        self.history.add(generated)


class ExactMatchPredictor(SurvivalPredictor):
    """Survival among past outputs of the very same prompt (``Request.prompt_hash``); plain survival for
    others.

    For workloads that repeat prompts: templates, cached prompts, retries.
    """

    def __init__(self, window: int = 8192, per_prompt: int = 256, prompts: int = 65_536):
        """It keeps the last ``per_prompt`` outputs of each of the ``prompts`` prompts that ended most
        recently."""
        super().__init__(window)
        self._per_prompt = per_prompt
        self._prompts = prompts
        self._by_prompt: OrderedDict[Hashable, LengthHistory] = OrderedDict()

    def predict(self, queries: Queries, horizon: int) -> Prediction:
        p, mu = super().predict(queries, horizon)
        for position, key in enumerate(queries.prompt_hashes):
            history = None if key is None else self._by_prompt.get(key)
            if history is not None:
                age = int(queries.generated[position])
                p[position], mu[position] = history.predict_one(age, horizon)
        return Prediction(p, mu)

    def observe(self, request: Request, generated: int) -> None:
        super().observe(request, generated)
        key = request.prompt_hash
        if key is None:
            return
        history = self._by_prompt.get(key)
        if history is None:
            history = self._by_prompt[key] = LengthHistory(self._per_prompt)
            if len(self._by_prompt) > self._prompts:
                self._by_prompt.popitem(last=False)
        history.add(generated)
        self._by_prompt.move_to_end(key)


class LengthBucketPredictor(SurvivalPredictor):
    """Survival among past requests of like prompt length: C.2.1's other key, for workloads without prompt
    hashes.

    Buckets hold equal shares of the prompt lengths seen, redrawn as the history grows; one with fewer than
    ``min_outputs`` outputs answers with plain survival.
    """

    def __init__(self, window: int = 8192, buckets: int = 8, min_outputs: int = 32):
        super().__init__(window)
        if buckets < 1:
            raise ConfigError(f"buckets must be 1 or more, got {buckets}")
        self._buckets = buckets
        self._min_outputs = min_outputs
        self._finished: deque[tuple[int, int]] = deque(maxlen=window)  # (prompt tokens, output tokens)
        self._edges: Floats = np.empty(0)
        self._histories = [LengthHistory(window)]
        self._redraw_at = buckets * min_outputs

    def predict(self, queries: Queries, horizon: int) -> Prediction:
        p, mu = super().predict(queries, horizon)
        bucket = self._edges.searchsorted(queries.prompt_tokens, side="right")
        for index in np.unique(bucket):
            if len(self._histories[index]) >= self._min_outputs:
                inside = bucket == index
                p[inside], mu[inside] = self._histories[index].predict(queries.generated[inside], horizon)
        return Prediction(p, mu)

    def observe(self, request: Request, generated: int) -> None:
        super().observe(request, generated)
        self._finished.append((request.prompt_tokens, generated))
        self._redraw_at -= 1
        if self._redraw_at == 0:
            self._redraw()
        else:
            bucket = int(self._edges.searchsorted(request.prompt_tokens, side="right"))
            self._histories[bucket].add(generated)

    def _redraw(self) -> None:
        prompts = np.array([prompt for prompt, _ in self._finished], dtype=np.float64)
        shares = np.arange(1, self._buckets) / self._buckets
        self._edges = np.unique(np.quantile(prompts, shares)) if self._buckets > 1 else np.empty(0)
        self._histories = [LengthHistory(self.history.window) for _ in range(len(self._edges) + 1)]
        for bucket, (_, generated) in zip(self._edges.searchsorted(prompts, side="right"), self._finished, strict=True):
            self._histories[bucket].add(generated)
        self._redraw_at = len(self._finished)  # again when as many more have come
