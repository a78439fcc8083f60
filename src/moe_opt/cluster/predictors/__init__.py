"""Predictors of the remaining decode length, for BR-H (BalanceRoute Section 4 and Appendix C)."""

from __future__ import annotations

from moe_opt.cluster.predictors.base import (
    PREDICTOR_NAMES,
    Prediction,
    Predictor,
    Queries,
    make_predictor,
)
from moe_opt.cluster.predictors.scoring import PredictorScore, roc_auc, score_predictor
from moe_opt.cluster.predictors.survival import (
    ExactMatchPredictor,
    LengthBucketPredictor,
    LengthHistory,
    SurvivalPredictor,
)

__all__ = [
    "PREDICTOR_NAMES",
    "ExactMatchPredictor",
    "LengthBucketPredictor",
    "LengthHistory",
    "Prediction",
    "Predictor",
    "PredictorScore",
    "Queries",
    "SurvivalPredictor",
    "make_predictor",
    "roc_auc",
    "score_predictor",
]
