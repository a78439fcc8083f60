"""Expert signatures (ELDR): a unit vector per request, near to those of requests that use the same experts.

Fit on calibration prompts, offline: choose the weighting of counts, the layers, and one centroid per decode
worker. Online: `SignatureModel.transform` turns a request's prefill counts into its signature, and the router
compares it with the centroids (`policies/locality.py`). See `signature_rho.py` for rho and the choice of
layers, `kmeans.py` for the clusters, `token_table.py` for engines that report no experts, and `drift.py` for
refitting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_opt.cluster.expert_counts import WEIGHTINGS, check_counts, idf, unit, weigh
from moe_opt.cluster.kmeans import kmeans
from moe_opt.cluster.signature_rho import (
    MAX_PAIRS,
    PairGram,
    greedy_layers,
    ranks,
    sample_pairs,
    spearman,
)
from moe_opt.cluster.token_table import TokenTable
from moe_opt.errors import ConfigError

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]

CANDIDATES = ("count-idf", "count")
"""Weightings that "auto" compares, the paper's first: it is kept on a tie."""

_FORMAT = 1
_FOLDS = 3
_FOLD_PAIRS = 2_000  # per fold: cross-validation repeats the greedy search 2 x 3 times
_MIN_FOLD_PROMPTS = 5


@dataclass(frozen=True)
class SignatureModel:
    """What `fit` learned. Immutable: refitting makes another one."""

    num_layers: int
    """MoE layers of the model, L."""
    num_experts: int
    """Routed experts per layer, E."""
    layers: tuple[int, ...]
    """The MoE layers a signature is made of, ascending."""
    weighting: str
    """One of `expert_counts.WEIGHTINGS`."""
    idf_weights: Floats = field(repr=False)
    """float64 [L, E]; used by "count-idf" alone."""
    centroids: Floats = field(repr=False)
    """float32 [K, D], unit vectors, D = len(layers) * E; centroid k belongs to worker k."""
    rho: float
    """On the calibration prompts, with the chosen weighting and layers."""
    cross_validated_rho: dict[str, float]
    """Weighting -> mean rho on held-out prompts; empty where the weighting was given."""
    similarity_mean: float
    """Mean cosine of the calibration signatures to their nearest centroid; drift is measured against it."""
    similarity_std: float
    """Its standard deviation."""
    shares: Floats = field(repr=False)
    """float64 [K]: the part of the calibration prompts that is nearest to each centroid."""
    token_table: TokenTable | None = None
    """For requests without expert counts; set by `with_token_table`."""

    @classmethod
    def fit(
        cls,
        prefill_counts: ArrayLike,
        decode_probs: ArrayLike,
        num_workers: int,
        seed: int = 0,
        *,
        weighting: str = "auto",
        layers: str | tuple[int, ...] = "greedy",
        clustering: str = "balanced",
    ) -> SignatureModel:
        """Weighting, layers and centroids from calibration prompts: 5 s for 1,000 x 48 x 128 and 16 workers.

        Args:
            prefill_counts: `[N, L, E]`, tokens of prompt n that layer l sent to expert e (top-k choices).
            decode_probs: `[N, L, E]`, probability that a decode token of prompt n activates the expert. Any
                positive scale will do: only directions are compared.
            num_workers: K, decode workers; one centroid each.
            seed: of pair sampling, folds and K-means. The same arguments give the same model.
            weighting: "auto" takes the better of count and count x IDF by rho on held-out prompts.
            layers: "greedy" (the paper), "all", or the layers themselves.
            clustering: "balanced" (the paper) or "vanilla" K-means.

        Raises:
            ConfigError: wrong shapes, negative counts, NaN, fewer prompts than workers, an unknown option.
        """
        counts = check_counts(prefill_counts, "prefill_counts", (3,))
        probs = check_counts(decode_probs, "decode_probs", (3,), counts.shape[1:])
        if len(counts) != len(probs):
            raise ConfigError(f"prefill_counts has {len(counts)} prompts, decode_probs has {len(probs)}")
        check_prompt_number(len(counts), num_workers)
        rng = np.random.default_rng(seed)
        cross_validated: dict[str, float] = {}
        if weighting == "auto":
            cross_validated = _held_out_rho(counts, probs, layers, seed)
            weighting = max(CANDIDATES, key=cross_validated.__getitem__)
        weights = idf(counts)
        weighted = weigh(counts, weighting, weights)
        first, second = sample_pairs(len(counts), MAX_PAIRS, rng)
        chosen, rho = _choose_layers(weighted, decode_ranks(probs, first, second), layers, first, second)
        draft = cls(
            num_layers=counts.shape[1],
            num_experts=counts.shape[2],
            layers=tuple(int(layer) for layer in chosen),
            weighting=weighting,
            idf_weights=weights,
            centroids=np.zeros((num_workers, len(chosen) * counts.shape[2]), dtype=np.float32),
            rho=rho,
            cross_validated_rho=cross_validated,
            similarity_mean=1.0,
            similarity_std=0.0,
            shares=np.full(num_workers, 1.0 / num_workers),
        )
        signatures = draft.transform(counts)
        clusters = kmeans(signatures, num_workers, variant=clustering, seed=seed)
        return draft.with_centroids(clusters.centroids, signatures)

    def transform(self, counts: ArrayLike) -> Floats:
        """The signature of prefill counts: weigh, select layers, concatenate, normalise (ELDR, "4 steps").

        A vector that the weighting makes all zero falls back to raw counts. Counts without any token give the
        zero vector, which has no direction: the router then goes by load alone.

        Args:
            counts: `[L, E]`, or `[N, L, E]` for many.

        Returns:
            float32 `[D]` or `[N, D]`, unit length, D = len(layers) * E.

        Raises:
            ConfigError: another shape than the calibration's, negative counts or NaN.
        """
        values = check_counts(counts, "counts", (2, 3), (self.num_layers, self.num_experts))
        picked = values[..., self.layers, :]
        weighted = weigh(picked, self.weighting, self.idf_weights[list(self.layers)])
        flat = (*values.shape[:-2], -1)
        return unit(weighted.reshape(flat), picked.reshape(flat)).astype(np.float32)

    def transform_tokens(self, token_ids: ArrayLike) -> Floats:
        """The signature float32 `[D]` of a prompt's token ids through the token table.

        Raises:
            ConfigError: the model has no token table.
        """
        if self.token_table is None:
            raise ConfigError("this signature model has no token table; add one with with_token_table")
        return self.transform(self.token_table.expected_counts(token_ids))

    def similarity(self, signatures: Floats) -> Floats:
        """Cosines `[N, K]` (or `[K]`) of unit signatures `[N, D]` (or `[D]`) to the centroids."""
        return signatures @ self.centroids.T

    def rho_of(self, signatures: Floats, decode_probs: ArrayLike, seed: int = 0) -> float:
        """rho of any signatures `[N, D]` for prompts with these decode probabilities `[N, L, E]`.

        For held-out prompts, and for token-table signatures beside exact ones.
        """
        probs = check_counts(decode_probs, "decode_probs", (3,))
        if len(probs) != len(signatures):
            raise ConfigError(f"{len(signatures)} signatures for {len(probs)} prompts")
        first, second = sample_pairs(len(probs), MAX_PAIRS, np.random.default_rng(seed))
        gram = PairGram.of(np.asarray(signatures)[:, None, :], first, second)
        return spearman(gram.distances(np.array([0])), decode_ranks(probs, first, second))

    def with_centroids(self, centroids: Floats, signatures: Floats | None = None) -> SignatureModel:
        """The same transform with other centroids `[K, D]`.

        Drift's baseline is taken from `signatures` `[N, D]`; without them the old one stays, its shares even.
        """
        fresh = replace(
            self,
            centroids=np.ascontiguousarray(centroids, dtype=np.float32),
            shares=np.full(len(centroids), 1.0 / len(centroids)),
        )
        if signatures is None:
            return fresh
        similarity = fresh.similarity(signatures)
        nearest = similarity.max(axis=1)
        return replace(
            fresh,
            similarity_mean=float(nearest.mean()),
            similarity_std=float(nearest.std()),
            shares=np.bincount(similarity.argmax(axis=1), minlength=len(centroids)) / len(signatures),
        )

    def with_token_table(self, table: TokenTable | None) -> SignatureModel:
        """The same model with a token table for requests without expert counts.

        Raises:
            ConfigError: a table of another shape.
        """
        if table is not None and (table.num_layers, table.num_experts) != (self.num_layers, self.num_experts):
            raise ConfigError(
                f"the token table has {table.num_layers} layers of {table.num_experts} experts, "
                f"the signature model {self.num_layers} of {self.num_experts}"
            )
        return replace(self, token_table=table)

    def save(self, path: str | Path) -> None:
        """Writes one npz file of plain arrays (no pickle)."""
        arrays: dict[str, Any] = {
            "idf_weights": self.idf_weights,
            "centroids": self.centroids,
            "shares": self.shares,
            "layers": np.array(self.layers, dtype=np.int64),
            "meta": np.array(
                json.dumps(
                    {
                        "format": _FORMAT,
                        "weighting": self.weighting,
                        "rho": self.rho,
                        "cross_validated_rho": self.cross_validated_rho,
                        "similarity_mean": self.similarity_mean,
                        "similarity_std": self.similarity_std,
                    }
                )
            ),
        }
        if self.token_table is not None:
            arrays |= self.token_table.to_arrays()
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> SignatureModel:
        """Reads what `save` wrote. Nothing in the file is executed.

        Raises:
            OSError: the file cannot be read.
            ConfigError: it is not a signature model, or is damaged.
        """
        try:
            # Without pickle NumPy refuses object arrays, so that a file from elsewhere cannot run code.
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            meta = json.loads(str(arrays["meta"]))
            if meta["format"] != _FORMAT:
                raise ConfigError(f"{path}: format {meta['format']} is not {_FORMAT}; fit the model again")
            model = cls(
                num_layers=int(arrays["idf_weights"].shape[0]),
                num_experts=int(arrays["idf_weights"].shape[1]),
                layers=tuple(int(layer) for layer in arrays["layers"]),
                weighting=str(meta["weighting"]),
                idf_weights=check_counts(arrays["idf_weights"], "idf_weights", (2,)),
                centroids=arrays["centroids"].astype(np.float32),
                rho=float(meta["rho"]),
                cross_validated_rho={str(k): float(v) for k, v in meta["cross_validated_rho"].items()},
                similarity_mean=float(meta["similarity_mean"]),
                similarity_std=float(meta["similarity_std"]),
                shares=arrays["shares"].astype(np.float64),
                token_table=TokenTable.from_arrays(arrays),
            )
        except (ConfigError, OSError):
            raise
        except Exception as error:  # zip, JSON and array errors of many kinds: the file is not one of ours
            raise ConfigError(f"{path} is not a signature model that can be read: {error}") from error
        model._check(path)
        return model

    def _check(self, path: str | Path) -> None:
        wrong = (
            self.weighting not in WEIGHTINGS
            or not self.layers
            or not all(0 <= layer < self.num_layers for layer in self.layers)
            or self.centroids.ndim != 2
            or self.centroids.shape[1] != len(self.layers) * self.num_experts
            or self.shares.shape != (len(self.centroids),)
            or not np.isfinite(self.centroids).all()
        )
        if wrong:
            raise ConfigError(f"{path} is damaged: its arrays do not fit together")


def check_prompt_number(prompts: int, num_workers: int) -> None:
    """At least one prompt per worker, and three, so that there are distances to rank."""
    if isinstance(num_workers, bool) or not isinstance(num_workers, (int, np.integer)) or num_workers < 1:
        raise ConfigError(f"num_workers must be a whole number of at least 1, got {num_workers!r}")
    if prompts < max(3, num_workers):
        raise ConfigError(
            f"{prompts} calibration prompts are too few for {num_workers} workers: "
            f"at least {max(3, num_workers)}, better 60 per worker"
        )


def decode_ranks(probs: Floats, first: Ints, second: Ints) -> Floats:
    """Centred ranks `[P]` of the decode cosine distances of the pairs."""
    return ranks(PairGram.of(probs, first, second).distances(np.arange(probs.shape[1])))


def _choose_layers(
    weighted: Floats, target: Floats, layers: str | tuple[int, ...], first: Ints, second: Ints
) -> tuple[Ints, float]:
    """Layers (ascending) and their rho on these pairs."""
    num_layers = weighted.shape[1]
    gram = PairGram.of(weighted, first, second)
    if isinstance(layers, str):
        if layers == "greedy":
            return greedy_layers(gram, target).best()
        if layers != "all":
            raise ConfigError(f'layers must be "greedy", "all" or layer indices, got {layers!r}')
        chosen = np.arange(num_layers)
    else:
        chosen = np.unique(np.asarray(layers, dtype=np.int64))
        if not len(chosen) or chosen[0] < 0 or chosen[-1] >= num_layers:
            raise ConfigError(f"layers must lie in 0 ... {num_layers - 1}, got {list(layers)}")
    return chosen, spearman(gram.distances(chosen), target)


def _held_out_rho(counts: Floats, probs: Floats, layers: str | tuple[int, ...], seed: int) -> dict[str, float]:
    """Mean rho of each candidate weighting on prompts that chose neither its IDF nor its layers.

    With fewer than five prompts per fold there is nothing to hold out: rho on all of them then.
    """
    rng = np.random.default_rng(seed)
    number = len(counts)
    if number < _FOLDS * _MIN_FOLD_PROMPTS:
        folds = [(np.arange(number), np.arange(number))]
    else:
        parts = np.array_split(rng.permutation(number), _FOLDS)
        folds = [(np.concatenate(parts[:k] + parts[k + 1 :]), parts[k]) for k in range(_FOLDS)]
    scores: dict[str, list[float]] = {weighting: [] for weighting in CANDIDATES}
    for train, test in folds:
        weights = idf(counts[train])
        train_pairs = sample_pairs(len(train), _FOLD_PAIRS, rng)
        test_pairs = sample_pairs(len(test), _FOLD_PAIRS, rng)
        train_target = decode_ranks(probs[train], *train_pairs)
        test_target = decode_ranks(probs[test], *test_pairs)
        for weighting, found in scores.items():
            weighted = weigh(counts[train], weighting, weights)
            chosen, _ = _choose_layers(weighted, train_target, layers, *train_pairs)
            gram = PairGram.of(weigh(counts[test], weighting, weights)[:, chosen], *test_pairs)
            found.append(spearman(gram.distances(np.arange(len(chosen))), test_target))
    return {weighting: float(np.mean(found)) for weighting, found in scores.items()}
