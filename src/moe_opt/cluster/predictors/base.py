"""The prediction interface of BR-H (BalanceRoute C.1): will it end within H decode steps, and if so, when?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moe_opt.cluster.state import Request
from moe_opt.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Queries(NamedTuple):
    """Running requests to predict, one per position."""

    generated: Ints  # output tokens so far: the age
    prompt_tokens: Ints
    prompt_hashes: Sequence[Hashable | None]


class Prediction(NamedTuple):
    """Both stages, one value per query (Eq. 5)."""

    p: Floats  # probability that it ends within the next H decode steps
    mu: Floats  # decode steps left, given that it does; H where p is 0


@runtime_checkable
class Predictor(Protocol):
    """What BR-H needs of a predictor; pass any object that has these two methods."""

    def predict(self, queries: Queries, horizon: int) -> Prediction:
        """Both stages for every query, for a window of ``horizon`` decode steps."""

    def observe(self, request: Request, generated: int) -> None:
        """Learn that ``request`` ended after ``generated`` output tokens."""


PREDICTOR_NAMES = ("survival", "exact-match", "length-bucket", "learned", "oracle")


def make_predictor(choice: str | Predictor | None, seed: int = 0) -> Predictor | None:
    """The predictor of that name, or the object itself. None and "oracle" read
    ``RunningRequest.remaining``."""
    from moe_opt.cluster.predictors import survival

    if choice is None or choice == "oracle":
        return None
    if choice == "survival":
        return survival.SurvivalPredictor()
    if choice == "exact-match":
        return survival.ExactMatchPredictor()
    if choice == "length-bucket":
        return survival.LengthBucketPredictor()
    if choice == "learned":
        from moe_opt.cluster.predictors.learned import LearnedPredictor  # needs scikit-learn

        return LearnedPredictor(seed=seed)
    if isinstance(choice, Predictor) and not isinstance(choice, type):
        return choice
    raise ConfigError(
        f"unknown predictor {choice!r}; choose one of: {', '.join(PREDICTOR_NAMES)}, "
        "or pass an object with predict(queries, horizon) and observe(request, generated)"
    )
