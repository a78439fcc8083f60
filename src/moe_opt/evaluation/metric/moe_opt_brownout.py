"""What brownout costs, as a metric of Hugging Face `evaluate`: next-token accuracy loss and perplexity ratio.

metric = evaluate.load(moe_opt.evaluation.metric.METRIC_PATH)
metric.add_batch(predictions=..., references=..., exact_predictions=..., log_probs=..., exact_log_probs=...)
metric.compute()
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np

from moe_opt.evaluation.losses import compare_tokens

_DESCRIPTION = """Compares a browned-out language model with itself at full strength on the same tokens, teacher-forced:
relative loss of next-token accuracy, and perplexity ratio."""

_INPUTS = """
Args:
    predictions: token ids that the browned-out model finds likeliest, one entry a token.
    references: the true token ids; -100 is ignored.
    exact_predictions: the same as predictions, from exact output.
    log_probs: natural log-probability of each true token under the browned-out model.
    exact_log_probs: the same under exact output.
Returns:
    accuracy, exact_accuracy: shares of tokens in [0, 1].
    relative_loss: 1 - accuracy / exact_accuracy; relative_loss_se: its standard error, tokens taken as independent.
    agreement: share of tokens where both models predict the same.
    perplexity, exact_perplexity, perplexity_ratio; tokens: how many counted.
"""

_CITATION = """BrownoutServe: SLO-aware inference serving under bursty workloads for MoE-based LLMs, section V-C"""
_IGNORED = -100


class BrownoutMetric(evaluate.Metric):
    """One row a token; see `_INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Value("int64"),
                    "references": datasets.Value("int64"),
                    "exact_predictions": datasets.Value("int64"),
                    "log_probs": datasets.Value("float32"),
                    "exact_log_probs": datasets.Value("float32"),
                }
            ),
        )

    def _compute(
        self,
        predictions: Any,
        references: Any,
        exact_predictions: Any,
        log_probs: Any,
        exact_log_probs: Any,
    ) -> dict[str, float]:
        truth = np.asarray(references)
        counts = truth != _IGNORED
        if not counts.any():
            raise ValueError("moe_opt_brownout: every reference is -100, so there is no token to score")
        truth = truth[counts]
        predicted, exact = (np.asarray(ids)[counts] for ids in (predictions, exact_predictions))
        figures = compare_tokens(
            correct=predicted == truth,
            exact_correct=exact == truth,
            nll=-np.asarray(log_probs)[counts],
            exact_nll=-np.asarray(exact_log_probs)[counts],
            rows=np.arange(len(truth)),
        )
        return {**figures, "agreement": float((predicted == exact).mean()), "tokens": len(truth)}
