"""The figures of merit, in NumPy: relative loss of next-token accuracy and perplexity ratio, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def relative_loss(
    correct: NDArray[np.bool_], exact_correct: NDArray[np.bool_], rows: NDArray[np.integer]
) -> tuple[float, float]:
    """1 - accuracy / exact accuracy on the same tokens, and its standard error.

    The error treats each row (a sequence) as one independent draw, since tokens of a text share its difficulty, and
    uses the pairing: what counts is how many tokens change sides, not the accuracy itself (delta method for a ratio).

    Args: bool [N] each; rows int [N], the sequence of each token.

    Returns: (loss, standard error), fractions; nan where exact output has no token right, or of a single row.
    """
    hits, exact_hits = float(correct.sum()), float(exact_correct.sum())
    if exact_hits == 0:
        return math.nan, math.nan
    ratio = hits / exact_hits
    _, row = np.unique(rows, return_inverse=True)
    residual = np.bincount(row, weights=correct.astype(np.float64) - ratio * exact_correct)
    number = len(residual)
    if number < 2:
        return 1.0 - ratio, math.nan
    return 1.0 - ratio, float(np.sqrt((residual**2).sum() * number / (number - 1))) / exact_hits


def perplexity(nll: NDArray[np.floating]) -> float:
    """exp of the mean negative log-likelihood (nats) over tokens; inf where that overflows a float."""
    mean = float(np.mean(nll, dtype=np.float64))
    return math.exp(mean) if mean < 700 else math.inf


def compare_tokens(
    correct: NDArray[np.bool_],
    exact_correct: NDArray[np.bool_],
    nll: NDArray[np.floating],
    exact_nll: NDArray[np.floating],
    rows: NDArray[np.integer],
) -> dict[str, float]:
    """Browned-out against exact output on the same N tokens.

    Args: all [N]: whether the likeliest token was the true one, the true token's negative log-likelihood in nats, and
        the sequence that each token belongs to.
    """
    loss, error = relative_loss(correct, exact_correct, rows)
    ours, exact = perplexity(nll), perplexity(exact_nll)
    return {
        "accuracy": float(correct.mean()),
        "exact_accuracy": float(exact_correct.mean()),
        "relative_loss": loss,
        "relative_loss_se": error,
        "perplexity": ours,
        "exact_perplexity": exact,
        "perplexity_ratio": ours / exact,
    }


def mean_with_error(values: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """Mean of independent figures, and its standard error; nan wherever a part is nan."""
    return float(np.mean(values)), float(np.sqrt(np.square(errors).sum())) / len(values)
