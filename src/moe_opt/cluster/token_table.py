"""Token-table signatures: which experts a prompt will use, from its token ids alone.

Experts follow token identity closely, so the expected expert counts of a prompt are nearly the sum over its
tokens of what each vocabulary token is usually sent to. The table `[V, L, E]` is learned from calibration
prompts as mean + codes @ basis (rank r, both in int8): 48 layers x 128 experts x 152,000 tokens take 5.7 MB
at rank 32, and a prompt costs one sum of rows. It needs nothing from the engine and is known before prefill.

Two ways to fit it: from the experts of each token (`fit_routing`: vLLM's or SGLang's routed experts), or from
whole prompts' counts (`fit_counts`: what moe_opt's own recorder reports).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from moe_opt.cluster.expert_counts import Floats, Ints, check_counts
from moe_opt.errors import ConfigError

_PREFIX = "token_table_"
_MAX_TOKEN_ID = 2_000_000
_OVERSAMPLING = 16
_RIDGES = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class TokenTable:
    """Expected expert counts per vocabulary token, low-rank and quantised to int8."""

    num_layers: int
    num_experts: int
    mean: Floats = field(repr=False)
    """float32 [L * E]: expected counts of one token whose identity is unknown."""
    codes: NDArray[np.int8] = field(repr=False)
    """[V, r], one row per vocabulary token."""
    code_scale: Floats = field(repr=False)
    """float32 [V]: what one unit of a token's codes is worth; -1 for tokens that calibration never saw."""
    basis: NDArray[np.int8] = field(repr=False)
    """[r, L * E]."""
    basis_scale: Floats = field(repr=False)
    """float32 [r]."""

    def __post_init__(self) -> None:
        width = self.num_layers * self.num_experts
        fits = (
            self.mean.shape == (width,)
            and self.codes.ndim == 2
            and self.code_scale.shape == self.codes.shape[:1]
            and self.basis.shape == (self.codes.shape[1], width)
            and self.basis_scale.shape == self.basis.shape[:1]
        )
        if not fits:
            raise ConfigError("the token table's arrays do not fit together")
        # Dequantised once: r x L x E floats, small beside the codes.
        object.__setattr__(self, "_basis", self.basis.astype(np.float32) * self.basis_scale[:, None])

    @property
    def rank(self) -> int:
        """Rank r of the table beside its mean."""
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, as stored."""
        arrays = (self.mean, self.codes, self.code_scale, self.basis, self.basis_scale)
        return sum(array.nbytes for array in arrays)

    def expected_counts(self, token_ids: ArrayLike) -> Floats:
        """Expected prefill counts float32 `[L, E]` of a prompt, none negative.

        Tokens that calibration never saw, ids beyond the table included, count as an average token of this
        prompt; if it saw none of them, as an average token of all.

        Args:
            token_ids: int `[n]`; n = 0 gives zeros.

        Raises:
            ConfigError: ids that are not whole numbers, or negative.
        """
        ids = _token_ids(token_ids)
        known = ids[ids < len(self.codes)]
        known = known[self.code_scale[known] >= 0]
        mixed = self.code_scale[known] @ self.codes[known].astype(np.float32)
        basis: Floats = self._basis  # type: ignore[attr-defined]
        mixed *= len(ids) / max(len(known), 1)
        expected = np.maximum(mixed @ basis + np.float32(len(ids)) * self.mean, 0.0)
        return expected.reshape(self.num_layers, self.num_experts).astype(np.float32, copy=False)

    @classmethod
    def fit_routing(
        cls,
        token_ids: ArrayLike,
        experts: ArrayLike,
        num_experts: int,
        *,
        rank: int = 32,
        seed: int = 0,
    ) -> TokenTable:
        """From each calibration token's experts, as an engine reports them.

        The low rank is a randomised truncated SVD (two passes, one power iteration) with rows weighted by how
        often a token occurs; it visits the layers one by one, so that memory stays at `[V seen, E]`. A
        token's average is not shrunk towards the others': a prompt sums over its tokens, so that their noise
        averages out while what shrinking takes from each would add up.

        Args:
            token_ids: int `[T]`, all calibration prompts one after the other.
            experts: int `[T, L, k]`, the logical experts of each token; -1 marks a slot without one.
            num_experts: E.
            rank: r at most; less where the data has less.
            seed: of the random projection.

        Raises:
            ConfigError: wrong shapes or values out of range.
        """
        ids = _token_ids(token_ids)
        chosen = np.asarray(experts)
        if chosen.ndim != 3 or len(chosen) != len(ids) or not np.issubdtype(chosen.dtype, np.integer):
            raise ConfigError(
                f"experts must be whole numbers of shape [{len(ids)} tokens, layers, k], got {chosen.dtype} "
                f"{list(chosen.shape)}"
            )
        if not len(ids) or 0 in chosen.shape:
            raise ConfigError("a token table needs at least one calibration token")
        if num_experts < 1 or chosen.min() < -1 or chosen.max() >= num_experts:
            raise ConfigError(f"experts must lie in 0 ... {num_experts - 1} (or be -1 for none)")
        vocabulary, row, seen = np.unique(ids, return_inverse=True, return_counts=True)
        num_layers, top_k = chosen.shape[1:]
        root = np.sqrt(seen)

        def averages(layer: int) -> tuple[Floats, Floats]:
            """Counts per occurrence of each token float64 `[V seen, E]`, and of all tokens together `[E]`."""
            cells = row.repeat(top_k) * (num_experts + 1) + chosen[:, layer].ravel().astype(np.int64) + 1
            counts = np.bincount(cells, minlength=len(vocabulary) * (num_experts + 1))
            counts = counts.reshape(len(vocabulary), num_experts + 1)[:, 1:]  # column 0 took the -1
            return counts / seen[:, None], counts.sum(0) / len(ids)

        mean = np.zeros((num_layers, num_experts))
        for layer in range(num_layers):
            mean[layer] = averages(layer)[1]

        def deviation(layer: int) -> Floats:
            """Weighted difference from the average token, float64 `[V seen, E]`."""
            return root[:, None] * (averages(layer)[0] - mean[layer])

        rng = np.random.default_rng(seed)
        width = min(rank + _OVERSAMPLING, len(vocabulary), num_layers * num_experts)
        projected = np.zeros((len(vocabulary), width))
        for layer in range(num_layers):
            projected += deviation(layer) @ rng.standard_normal((num_experts, width))
        for _ in range(2):  # the second round is the power iteration
            basis_rows = np.linalg.qr(projected)[0]
            slices = [basis_rows.T @ deviation(layer) for layer in range(num_layers)]
            projected = np.zeros_like(projected)
            for layer in range(num_layers):
                projected += deviation(layer) @ slices[layer].T
        basis_rows = np.linalg.qr(projected)[0]
        small = np.concatenate([basis_rows.T @ deviation(layer) for layer in range(num_layers)], axis=1)
        left, values, right = np.linalg.svd(small, full_matrices=False)
        keep = int(np.sum(values[:rank] > 1e-9 * max(values[0], 1e-30))) if values[0] > 0 else 0
        codes = (basis_rows @ left[:, :keep] * values[:keep]) / root[:, None]
        return cls._quantised(num_layers, num_experts, mean.ravel(), vocabulary, codes, right[:keep])

    @classmethod
    def fit_counts(cls, prompts: Sequence[ArrayLike], prefill_counts: ArrayLike, *, rank: int = 32) -> TokenTable:
        """From whole prompts: ridge regression of prefill counts on the bag of tokens.

        Solved in the dual (N unknowns per expert, N prompts), the ridge chosen by exact leave-one-out error.

        Args:
            prompts: N sequences of token ids.
            prefill_counts: `[N, L, E]` of those prompts.
            rank: r at most.

        Raises:
            ConfigError: wrong shapes, fewer than two prompts, an empty prompt.
        """
        counts = check_counts(prefill_counts, "prefill_counts", (3,))
        bags = [_token_ids(prompt) for prompt in prompts]
        if len(bags) != len(counts) or len(bags) < 2:
            raise ConfigError(f"{len(bags)} prompts for {len(counts)} rows of counts; at least 2 of each")
        lengths = np.array([len(bag) for bag in bags], dtype=np.float64)
        if not lengths.all():
            raise ConfigError("a calibration prompt for the token table has no tokens")
        vocabulary, columns = np.unique(np.concatenate(bags), return_inverse=True)
        rows = np.repeat(np.arange(len(bags)), lengths.astype(np.int64))
        bag = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(bags), len(vocabulary)))
        flat = counts.reshape(len(counts), -1)
        mean = flat.sum(0) / lengths.sum()
        # A sum over n tokens has n times a token's variance: scale rows to equal noise.
        root = np.sqrt(lengths)
        target = (flat - lengths[:, None] * mean) / root[:, None]
        scaled = sparse.diags(1.0 / root) @ bag
        gram = (scaled @ scaled.T).toarray()
        values, vectors = np.linalg.eigh(gram)
        values = np.maximum(values, 0.0)
        rotated = vectors.T @ target

        def leave_one_out(ridge: float) -> float:
            dual = vectors @ (rotated / (values + ridge)[:, None])
            inverse_diagonal = (vectors**2) @ (1.0 / (values + ridge))
            return float(np.sum((dual / inverse_diagonal[:, None]) ** 2))

        ridge = min(_RIDGES, key=leave_one_out)
        dual = vectors @ (rotated / (values + ridge)[:, None])  # [N, L * E]; the table is scaled.T @ dual
        # Right singular vectors of the table from the N x N side: table.T @ table = dual.T @ gram @ dual.
        _, strengths, right = np.linalg.svd((vectors * np.sqrt(values)).T @ dual, full_matrices=False)
        keep = int(np.sum(strengths[:rank] > 1e-9 * strengths[0])) if strengths[0] > 0 else 0
        codes = scaled.T @ (dual @ right[:keep].T)
        num_layers, num_experts = counts.shape[1:]
        return cls._quantised(num_layers, num_experts, mean, vocabulary, codes, right[:keep])

    @classmethod
    def _quantised(
        cls, num_layers: int, num_experts: int, mean: Floats, vocabulary: Ints, codes: Floats, basis: Floats
    ) -> TokenTable:
        """Spreads the codes of the tokens seen over all ids; rounds to int8 with a scale per row."""
        code_scale = np.abs(codes).max(axis=1, initial=0.0) / 127
        basis_scale = np.abs(basis).max(axis=1, initial=0.0) / 127
        size = int(vocabulary[-1]) + 1
        table = np.zeros((size, len(basis)), dtype=np.int8)
        table[vocabulary] = np.rint(codes / np.where(code_scale > 0, code_scale, 1.0)[:, None])
        scales = np.full(size, -1.0, dtype=np.float32)
        scales[vocabulary] = code_scale
        rounded = np.rint(basis / np.where(basis_scale > 0, basis_scale, 1.0)[:, None]).astype(np.int8)
        return cls(
            num_layers=num_layers,
            num_experts=num_experts,
            mean=mean.astype(np.float32),
            codes=table,
            code_scale=scales,
            basis=rounded,
            basis_scale=basis_scale.astype(np.float32),
        )

    def to_arrays(self) -> dict[str, Any]:
        """Arrays for an npz file, their names prefixed so that they can stand beside others."""
        return {
            _PREFIX + "shape": np.array([self.num_layers, self.num_experts]),
            _PREFIX + "mean": self.mean,
            _PREFIX + "codes": self.codes,
            _PREFIX + "code_scale": self.code_scale,
            _PREFIX + "basis": self.basis,
            _PREFIX + "basis_scale": self.basis_scale,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> TokenTable | None:
        """What `to_arrays` gave, or None if the mapping holds no token table."""
        if _PREFIX + "shape" not in arrays:
            return None
        num_layers, num_experts = (int(size) for size in arrays[_PREFIX + "shape"])
        return cls(
            num_layers=num_layers,
            num_experts=num_experts,
            mean=arrays[_PREFIX + "mean"].astype(np.float32),
            codes=arrays[_PREFIX + "codes"].astype(np.int8),
            code_scale=arrays[_PREFIX + "code_scale"].astype(np.float32),
            basis=arrays[_PREFIX + "basis"].astype(np.int8),
            basis_scale=arrays[_PREFIX + "basis_scale"].astype(np.float32),
        )


def _token_ids(values: ArrayLike) -> Ints:
    ids = np.asarray(values)
    if ids.size == 0:
        return np.zeros(0, dtype=np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"token ids must be whole numbers in one row, got {ids.dtype} {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= _MAX_TOKEN_ID:
        raise ConfigError(f"token ids must lie in 0 ... {_MAX_TOKEN_ID - 1}, got {ids.min()} ... {ids.max()}")
    return ids.astype(np.int64, copy=False)
