"""The baselines: a unigram and an interpolated modified Kneser-Ney trigram model (Chen and Goodman, 1999).

Counts lie in sorted integer keys, so that a whole array of tokens is scored with a few binary searches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BITS = 13  # of one token: 2 ** 13 = 8,192


def sorted_counts(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys in order, and how often each occurs."""
    return np.unique(keys, return_counts=True)


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 where it is absent."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


@dataclass(frozen=True, slots=True)
class Order:
    """One order of the model: discounted n-gram counts and, for each context, the mass left to the lower order."""

    keys: np.ndarray
    discounted: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    backoff: np.ndarray

    @classmethod
    def fit(cls, keys: np.ndarray, counts: np.ndarray) -> Order:
        """From the n-grams and their counts (for lower orders: how many different words precede them)."""
        n1, n2, n3, n4 = ((counts == k).sum() for k in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        discounts = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        discount = discounts[counts.clip(max=3)]
        contexts, inverse = np.unique(keys >> BITS, return_inverse=True)
        totals = np.bincount(inverse, weights=counts)
        backoff = np.bincount(inverse, weights=discount) / totals
        return cls(keys, counts - discount, contexts, totals, backoff)

    def interpolate(self, context: np.ndarray, word: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probabilities of words after contexts, mixed with those of the lower order."""
        total = look_up(self.contexts, self.totals, context)
        mass = look_up(self.keys, self.discounted, context << BITS | word)
        backoff = np.where(total > 0, look_up(self.contexts, self.backoff, context), 1.0)
        return mass / np.maximum(total, 1) + backoff * lower


class Trigram:
    """P(word | two words before), trained on one stream of tokens."""

    def __init__(self, stream: np.ndarray, vocab_size: int) -> None:
        words = stream.astype(np.int64)
        self.trigrams = Order.fit(*sorted_counts((words[:-2] << BITS | words[1:-1]) << BITS | words[2:]))
        pairs = self.trigrams.keys & ((1 << 2 * BITS) - 1)
        self.bigrams = Order.fit(*sorted_counts(pairs))
        self.unigrams = Order.fit(*sorted_counts(self.bigrams.keys & ((1 << BITS) - 1)))
        self.vocab_size = vocab_size

    def nats(self, text: np.ndarray) -> np.ndarray:
        """The negative log-probability of every token after the first two."""
        words = text.astype(np.int64)
        first, second, word = words[:-2], words[1:-1], words[2:]
        probability = np.full(len(word), 1 / self.vocab_size)
        probability = self.unigrams.interpolate(np.zeros_like(word), word, probability)
        probability = self.bigrams.interpolate(second, word, probability)
        probability = self.trigrams.interpolate(first << BITS | second, word, probability)
        return -np.log(probability)


class Unigram:
    """P(word) with one count added to each."""

    def __init__(self, stream: np.ndarray, vocab_size: int) -> None:
        counts = np.bincount(stream, minlength=vocab_size) + 1.0
        self.table = -np.log(counts / counts.sum())

    def nats(self, text: np.ndarray) -> np.ndarray:
        """The negative log-probability of every token after the first two."""
        return self.table[text[2:]]
