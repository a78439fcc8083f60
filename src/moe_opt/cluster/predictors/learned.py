"""The learned predictor (BalanceRoute C.2.1 and C.2.2): gradient-boosted trees for both stages; scikit-learn.

Slower than the other predictors: about 1 ms per batch of queries, and a fit takes up to a second. A router
whose ticks must not wait calls `LearnedPredictor.refit` from a thread of its own and sets
``refit_every=None``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from moe_opt.cluster.predictors.base import Floats, Ints, Prediction, Queries
from moe_opt.cluster.predictors.survival import LengthHistory
from moe_opt.cluster.state import Request
from moe_opt.errors import ConfigError

if TYPE_CHECKING:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

ROLLING = 64
"""Outputs and prompts that the rolling statistics look back on."""

FEATURES = (
    "generated",
    "prompt_tokens",
    "output_ewma_fast",
    "output_ewma_slow",
    "output_mean",
    "output_std",
    "output_median",
    "output_p90",
    "prompt_mean",
    "prompt_std",
)


class RecentTraffic:
    """What the requests that ended last were like: the features that all requests share. Looks back only."""

    def __init__(self) -> None:
        self._fast = self._slow = 0.0
        self._seen = 0
        self._outputs: deque[int] = deque(maxlen=ROLLING)
        self._prompts: deque[int] = deque(maxlen=ROLLING)

    def add(self, prompt_tokens: int, generated: int) -> None:
        """Take in one finished request."""
        self._seen += 1
        self._fast += (generated - self._fast) / min(self._seen, 8)
        self._slow += (generated - self._slow) / min(self._seen, 128)
        self._outputs.append(generated)
        self._prompts.append(prompt_tokens)

    def features(self) -> Floats:
        """`FEATURES` from the third on; zeros before anything has ended."""
        if not self._outputs:
            return np.zeros(len(FEATURES) - 2)
        outputs = np.array(self._outputs, dtype=np.float64)
        prompts = np.array(self._prompts, dtype=np.float64)
        median, p90 = np.percentile(outputs, (50, 90))
        return np.array(
            [self._fast, self._slow, outputs.mean(), outputs.std(), median, p90, prompts.mean(), prompts.std()]
        )


class LearnedPredictor:
    """Two gradient-boosted models: will it end within H steps, and if so, after how many.

    Until ``min_outputs`` requests have ended it answers like `SurvivalPredictor`. A training sample is one
    finished request at one age: the features as they were before it ended, and what then happened.
    """

    def __init__(
        self,
        window: int = 4096,
        min_outputs: int = 256,
        refit_every: int | None = 1024,
        age_step: int = 16,
        trees: int = 50,
        depth: int = 4,
        seed: int = 0,
    ):
        """``refit_every`` finished requests the models are fitted anew on the last ``window``; None: only by
        `refit`."""
        try:
            import sklearn.ensemble  # noqa: F401 - a clear error now instead of one at the first fit
        except ImportError as error:
            raise ConfigError("the learned predictor needs scikit-learn: pip install 'moe_opt[cluster]'") from error
        if min_outputs < 1 or (refit_every is not None and refit_every < 1) or age_step < 1:
            raise ConfigError("min_outputs, refit_every and age_step must be 1 or more")
        self._history = LengthHistory(window)
        self._finished: deque[tuple[int, int, Floats]] = deque(maxlen=window)  # prompt, output, traffic before it
        self._traffic = RecentTraffic()
        self._shared = self._traffic.features()
        self._min_outputs = min_outputs
        self._refit_every = refit_every
        self._next_fit = min_outputs
        self._age_step = age_step
        self._trees = trees
        self._depth = depth
        self._seed = seed
        self._horizon: int | None = None  # of the window that BR-H asks about; known from its first query
        self._models: tuple[HistGradientBoostingClassifier | float, HistGradientBoostingRegressor | None] | None = None

    def predict(self, queries: Queries, horizon: int) -> Prediction:
        if horizon != self._horizon:
            self._horizon, self._models = horizon, None
            if self._refit_every is not None and len(self._finished) >= self._min_outputs:
                self.refit()
        if self._models is None or not len(queries.generated):
            return self._history.predict(queries.generated, horizon)
        classifier, regressor = self._models
        rows = self._rows(queries.generated, queries.prompt_tokens, self._shared)
        p = (
            np.full(len(rows), classifier)
            if isinstance(classifier, float)
            else classifier.predict_proba(rows)[:, 1].astype(np.float64)
        )
        if regressor is None:
            return Prediction(p, np.full(len(rows), float(horizon)))
        return Prediction(p, np.clip(regressor.predict(rows).astype(np.float64), 1.0, float(max(horizon, 1))))

    def observe(self, request: Request, generated: int) -> None:
        self._finished.append((request.prompt_tokens, generated, self._shared))
        self._history.add(generated)
        self._traffic.add(request.prompt_tokens, generated)
        self._shared = self._traffic.features()
        self._next_fit -= 1
        if self._refit_every is not None and self._next_fit <= 0 and self._horizon is not None:
            self.refit()

    def refit(self, horizon: int | None = None) -> None:
        """Fit both models on the finished requests in the window, for windows of ``horizon`` decode steps.

        By default the horizon of the last query. Nothing happens before there is one, or without finished
        requests.
        """
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        self._next_fit = self._refit_every or 0
        if horizon is not None:
            self._horizon = horizon
        finished = list(self._finished)
        if self._horizon is None or not finished:
            return
        rows, left = self._samples(finished)
        ends = left <= self._horizon
        settings = {
            "max_iter": self._trees,
            "max_depth": self._depth,
            "min_samples_leaf": 100,
            "early_stopping": False,
            "random_state": self._seed,
        }
        classifier: HistGradientBoostingClassifier | float = float(ends[0])
        if ends.min() != ends.max():
            classifier = HistGradientBoostingClassifier(**settings).fit(rows, ends)
        regressor = HistGradientBoostingRegressor(**settings).fit(rows[ends], left[ends]) if ends.sum() > 1 else None
        self._models = (classifier, regressor)

    def _samples(self, finished: list[tuple[int, int, Floats]]) -> tuple[Floats, Floats]:
        """Features [n, F] and decode steps left [n] of every finished request at several ages."""
        rng = np.random.default_rng(self._seed)
        rows, left = [], []
        for prompt_tokens, generated, shared in finished:
            # Every `age_step` tokens from a random start: a fixed grid would leave gaps that trees fill with
            # steps.
            ages = np.arange(rng.integers(min(self._age_step, max(generated, 1))), max(generated, 1), self._age_step)
            rows.append(self._rows(ages, np.full(len(ages), prompt_tokens), shared))
            left.append((generated - ages).astype(np.float64))
        return np.concatenate(rows), np.concatenate(left)

    @staticmethod
    def _rows(generated: Ints, prompt_tokens: Ints, shared: Floats) -> Floats:
        rows = np.empty((len(generated), len(FEATURES)))
        rows[:, 0] = generated
        rows[:, 1] = prompt_tokens
        rows[:, 2:] = shared
        return rows
