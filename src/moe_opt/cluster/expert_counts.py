"""Expert counts: checks, the weightings of ELDR's signature, and normalisation."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_opt.errors import ConfigError

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]

WEIGHTINGS = ("count", "count-idf", "log-count", "binary")


def check_counts(values: ArrayLike, name: str, ndim: tuple[int, ...], shape: tuple[int, ...] | None = None) -> Floats:
    """`values` as a float array of finite numbers >= 0, or a `ConfigError` that says what is wrong with them.

    Args:
        values: counts or probabilities.
        name: how the message calls them.
        ndim: the numbers of dimensions allowed, the last two being [layers, experts].
        shape: the trailing [layers, experts] that they must have.
    """
    array = np.asarray(values)
    if array.dtype == object or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise ConfigError(f"{name} must be an array of numbers, got dtype {array.dtype}")
    if np.issubdtype(array.dtype, np.complexfloating):
        raise ConfigError(f"{name} must be real, got dtype {array.dtype}")
    if array.ndim not in ndim or 0 in array.shape:
        wanted = " or ".join({2: "[layers, experts]", 3: "[prompts, layers, experts]"}[n] for n in ndim)
        raise ConfigError(f"{name} must have shape {wanted} and not be empty, got {list(array.shape)}")
    if shape is not None and array.shape[-2:] != shape:
        raise ConfigError(
            f"{name} must have {shape[0]} layers of {shape[1]} experts, got {list(array.shape[-2:])}: "
            "is this another model's routing?"
        )
    floats: Floats = array.astype(np.float64, copy=False)
    if not np.isfinite(floats).all():
        raise ConfigError(f"{name} must not contain NaN or infinity")
    if floats.min() < 0:
        raise ConfigError(f"{name} must not be negative")
    return floats


def count_experts(experts: ArrayLike, num_experts: int) -> NDArray[np.int64]:
    """Counts int64 `[L, E]` from the experts int `[T, L, k]` of each token, as engines report them; -1 is none.

    Raises:
        ConfigError: another shape, or an expert that does not exist.
    """
    chosen = np.asarray(experts)
    if chosen.ndim != 3 or not np.issubdtype(chosen.dtype, np.integer):
        raise ConfigError(f"experts must be whole numbers [tokens, layers, k], got {chosen.dtype} {list(chosen.shape)}")
    if chosen.size and not (chosen.min() >= -1 and chosen.max() < num_experts):
        raise ConfigError(f"experts must lie in 0 ... {num_experts - 1} (or be -1 for none)")
    layer = np.arange(chosen.shape[1])[None, :, None]
    cells = layer * (num_experts + 1) + chosen.astype(np.int64) + 1  # column 0 takes the -1
    counts = np.bincount(cells.ravel(), minlength=chosen.shape[1] * (num_experts + 1))
    return counts.reshape(chosen.shape[1], num_experts + 1)[:, 1:]


def split_sequences(
    experts: ArrayLike, sequence: ArrayLike, num_experts: int, prefill_share: float = 0.5
) -> tuple[NDArray[np.int64], Floats]:
    """Calibration data from recorded routing: the first part of each sequence as prefill, the rest as decode.

    Args:
        experts: int `[T, L, k]`, the experts of each token; -1 is none.
        sequence: int `[T]`, the number of the sequence a token belongs to.
        num_experts: E.
        prefill_share: part of a sequence's tokens that counts as its prompt, rounded down, at least one token.

    Returns:
        Prefill counts int64 `[N, L, E]` and decode probabilities float64 `[N, L, E]`, sequences in ascending order.
        Sequences of one token are left out: they have no decode.

    Raises:
        ConfigError: wrong shapes, an expert that does not exist, a share outside (0, 1), no sequence of two tokens.
    """
    chosen, numbers = np.asarray(experts), np.asarray(sequence)
    if numbers.shape != chosen.shape[:1]:
        raise ConfigError(f"sequence must have one number per token, got {list(numbers.shape)} for {len(chosen)}")
    if not 0 < prefill_share < 1:
        raise ConfigError(f"prefill_share must lie between 0 and 1, got {prefill_share!r}")
    prefill, decode = [], []
    for number in np.unique(numbers):
        tokens = chosen[numbers == number]
        if len(tokens) < 2:
            continue
        cut = max(1, int(prefill_share * len(tokens)))
        prefill.append(count_experts(tokens[:cut], num_experts))
        decode.append(count_experts(tokens[cut:], num_experts) / (len(tokens) - cut))
    if not prefill:
        raise ConfigError("no sequence has two tokens: nothing to split into prefill and decode")
    return np.stack(prefill), np.stack(decode)


def idf(counts: Floats) -> Floats:
    """w(l, e) = log((|C| + 1) / (df(l, e) + 1)) `[L, E]` of calibration counts `[N, L, E]` (ELDR, step 2).

    df(l, e) is the number of prompts in which expert e fires at layer l. An expert that fires in all has
    weight 0.
    """
    frequency = (counts > 0).sum(axis=0)
    weights: Floats = np.log((len(counts) + 1) / (frequency + 1))
    return weights


def weigh(counts: Floats, weighting: str, idf_weights: Floats) -> Floats:
    """Counts `[..., L, E]` under one of `WEIGHTINGS`; "log-count" and "binary" are there for the ablation."""
    if weighting == "count":
        return counts
    if weighting == "count-idf":
        return counts * idf_weights
    if weighting == "log-count":
        return np.log1p(counts)
    if weighting == "binary":
        return (counts > 0).astype(np.float64)
    raise ConfigError(f"unknown weighting {weighting!r}; choose auto or one of {', '.join(WEIGHTINGS)}")


def unit(vectors: Floats, fallback: Floats | None = None) -> Floats:
    """Rows `[..., D]` scaled to length 1; an all-zero row takes `fallback`'s, zero if that is zero too."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if fallback is not None and not np.all(norms > 0):
        vectors = np.where(norms > 0, vectors, fallback)
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Floats = vectors / np.where(norms > 0, norms, 1.0)
    return scaled
