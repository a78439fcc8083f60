"""How good a predictor is, on held-out requests: ROC-AUC, Brier score and conditional MAE (BalanceRoute Table
3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_opt.cluster.predictors.base import Floats, Predictor, Queries
from moe_opt.cluster.state import Request
from moe_opt.errors import ConfigError


class PredictorScore(NamedTuple):
    """One row of Table 3."""

    auc: float  # of p as a score for "ends within H steps"; NaN if all requests agree on that
    brier: float  # mean squared error of p
    conditional_mae: float  # of mu, in decode steps, over the samples that do end within H; NaN if none does
    samples: int
    positives: int  # how many of them end within H


def score_predictor(
    predictor: Predictor,
    finished: Sequence[tuple[Request, int]],
    horizon: int = 48,
    age_step: int = 16,
) -> PredictorScore:
    """Ask about every held-out request at the ages 0, ``age_step``, 2 ``age_step``, ... below its output
    length.

    ``finished`` are requests with their output lengths, later than what the predictor has observed. It learns
    nothing from them here.
    """
    if age_step < 1:
        raise ConfigError(f"age_step must be 1 or more, got {age_step}")
    ages = [np.arange(0, generated, age_step) for _, generated in finished]
    counts = [len(each) for each in ages]
    if not sum(counts):
        raise ConfigError("no held-out request has produced a token: there is nothing to score")
    generated = np.concatenate(ages)
    outputs = np.repeat([output for _, output in finished], counts)
    prompts = np.repeat([request.prompt_tokens for request, _ in finished], counts)
    hashes = [request.prompt_hash for (request, _), count in zip(finished, counts, strict=True) for _ in range(count)]
    p, mu = predictor.predict(Queries(generated, prompts, hashes), horizon)
    left = outputs - generated
    ends = left <= horizon
    errors = np.abs(mu - left)[ends]
    return PredictorScore(
        auc=roc_auc(ends, p),
        brier=float(np.mean((p - ends) ** 2)),
        conditional_mae=float(errors.mean()) if len(errors) else float("nan"),
        samples=len(generated),
        positives=int(ends.sum()),
    )


def roc_auc(labels: NDArray[np.bool_], scores: Floats) -> float:
    """Probability that a positive scores above a negative, ties counting half; NaN without both kinds."""
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    _, level, count = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    rank_sum = float(mean_rank[level][labels].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)
