"""rho, the quality of an expert signature, and the greedy choice of layers that maximises it (ELDR, Eq. 1).

rho = Spearman(cosine distance of two prompts' signatures, cosine distance of their decode activation
probabilities) over pairs of prompts. A signature is a concatenation of layers, so that a pair's dot product
and its norms are sums over layers: `PairGram` keeps, per layer, the entries of the Gram matrix that the
sampled pairs need, and adding a layer to a selection costs one addition per pair and one sort. 48 layers take
48 * 49 / 2 = 1,176 sorts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]

# Pairs that the greedy search ranks. Sorting 20,000 floats takes 0.2 ms; the standard error of rho over that
# many pairs is below 0.005, less than what the finite number of prompts contributes.
MAX_PAIRS = 20_000


def sample_pairs(count: int, max_pairs: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Distinct unordered pairs (i < j) of `count` prompts: all of them if they fit, else a uniform sample.

    Returns:
        Two int64 arrays `[P]`, P <= max_pairs.
    """
    total = count * (count - 1) // 2
    if total <= max_pairs:
        first, second = np.triu_indices(count, 1)
        return first.astype(np.int64), second.astype(np.int64)
    flat = np.sort(rng.choice(total, size=max_pairs, replace=False))
    # Pair number f counts row by row through the lower triangle: row j holds the pairs (0, j) ... (j - 1, j).
    second = np.floor((1 + np.sqrt(1 + 8 * flat.astype(np.float64))) / 2).astype(np.int64)
    second -= second * (second - 1) // 2 > flat  # the square root may round up by one
    second += (second + 1) * second // 2 <= flat
    return flat - second * (second - 1) // 2, second


def ranks(values: Floats) -> Floats:
    """Ranks 0 ... P-1 of a `[P]` array, ties averaged, minus their mean."""
    centred: Floats = rankdata(values) - (len(values) + 1) / 2
    return centred


def spearman(values: Floats, target_ranks: Floats) -> float:
    """Spearman correlation of `values` `[P]` with ranks from `ranks`; 0.0 where either side is constant.

    Without ties (the rule for cosine distances of counts) one argsort is enough: the value at sorted place r
    has rank r. Ties take the slower `rankdata`.
    """
    order = np.argsort(values)
    ordered = values[order]
    count = len(values)
    target_square = float(target_ranks @ target_ranks)
    if count < 2 or target_square == 0.0 or ordered[0] == ordered[-1]:
        return 0.0
    if np.any(ordered[1:] == ordered[:-1]):
        own = ranks(values)
        return float(own @ target_ranks / np.sqrt(float(own @ own) * target_square))
    own = np.arange(count) - (count - 1) / 2
    return float(own @ target_ranks[order] / np.sqrt(float(own @ own) * target_square))


@dataclass(frozen=True)
class PairGram:
    """Per-layer dot products of sampled pairs and squared norms of the vectors `[N, L, E]` they come from."""

    dots: Floats  # [L, P]: x_i(l) . x_j(l)
    first_norms: Floats  # [L, P]: |x_i(l)|^2
    second_norms: Floats  # [L, P]: |x_j(l)|^2

    @classmethod
    def of(cls, vectors: Floats, first: Ints, second: Ints) -> PairGram:
        """Gram entries of `vectors` `[N, L, E]` for the pairs (first[p], second[p]), one layer at a time."""
        num_layers = vectors.shape[1]
        dots = np.empty((num_layers, len(first)), dtype=np.float64)
        norms = np.einsum("nle,nle->ln", vectors, vectors, dtype=np.float64)
        for layer in range(num_layers):
            # float32: ranks need no more, and it halves the time of the product.
            plane = np.ascontiguousarray(vectors[:, layer], dtype=np.float32)
            if len(plane) <= 2_000:  # one matrix product is faster than gathering rows, up to some size
                dots[layer] = (plane @ plane.T)[first, second]
            else:
                dots[layer] = np.einsum("pe,pe->p", plane[first], plane[second])
        return cls(dots, norms[:, first], norms[:, second])

    def distances(self, layers: Ints) -> Floats:
        """Cosine distances `[P]` of the concatenation of `layers`; 1 where one of the two vectors is zero."""
        return cosine_distances(
            self.dots[layers].sum(0), self.first_norms[layers].sum(0), self.second_norms[layers].sum(0)
        )


def cosine_distances(dots: Floats, first_norms: Floats, second_norms: Floats) -> Floats:
    """1 - dot / (|a| |b|) elementwise from dot products and squared norms; 1 where a norm is zero."""
    scale = np.sqrt(first_norms * second_norms)
    safe = np.where(scale > 0, scale, 1.0)
    result: Floats = np.where(scale > 0, 1.0 - dots / safe, 1.0)
    return result


@dataclass(frozen=True)
class LayerOrder:
    """The greedy order of all layers and the rho of each of its prefixes."""

    order: Ints  # int64 [L]: layers, most useful first
    rho: Floats  # [L]: rho of order[: n + 1]

    def best(self) -> tuple[Ints, float]:
        """The prefix of highest rho (the shortest one on a tie), layers ascending, and that rho.

        All layers where no prefix has a positive rho: nothing speaks for one layer rather than another then.
        """
        length = int(np.argmax(self.rho)) + 1 if self.rho.max() > 0 else len(self.rho)
        return np.sort(self.order[:length]), float(self.rho[length - 1])


def greedy_layers(gram: PairGram, decode_ranks: Floats) -> LayerOrder:
    """Forward greedy selection over all layers (ELDR, "Keep informative layers").

    Each step adds the layer that gives the highest rho together with those already chosen, the lowest index
    on a tie.

    Args:
        gram: Gram entries of the weighted prefill counts.
        decode_ranks: `[P]`, `ranks` of the decode distances of the same pairs.
    """
    num_layers = len(gram.dots)
    left = list(range(num_layers))
    order: list[int] = []
    best_rho: list[float] = []
    dots = np.zeros(gram.dots.shape[1])
    first_norms, second_norms = np.zeros_like(dots), np.zeros_like(dots)
    while left:
        scores = [
            spearman(
                cosine_distances(
                    dots + gram.dots[layer],
                    first_norms + gram.first_norms[layer],
                    second_norms + gram.second_norms[layer],
                ),
                decode_ranks,
            )
            for layer in left
        ]
        chosen = left.pop(int(np.argmax(scores)))
        order.append(chosen)
        best_rho.append(max(scores))
        dots += gram.dots[chosen]
        first_norms += gram.first_norms[chosen]
        second_norms += gram.second_norms[chosen]
    return LayerOrder(np.array(order, dtype=np.int64), np.array(best_rho))
