"""Requests with measured expert use: published per-token routing cut into prompts and the decode steps
after them.

Each window of consecutive tokens of one sequence stands for a request: its first tokens are the prompt,
whose expert counts a router may see, the rest its decode steps, whose activation frequencies a decode
worker pays for (ELDR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_opt.errors import ConfigError
from moe_opt.workloads.files import data_dir

ESFT = "routing/esft_dsv2lite_token_routing.npz"
ESFT_EXPERTS = 64


@dataclass(frozen=True, slots=True)
class RoutingProfiles:
    """N requests over L layers of E experts."""

    prefill_counts: NDArray[np.int64]  # [N, L, E] prompt tokens per expert
    decode_probs: NDArray[np.float64]  # [N, L, E] share of decode steps that activate an expert
    domains: tuple[str, ...]  # [N]
    sequences: NDArray[np.int64]  # [N] sequence each window was cut from: windows of one are not independent
    cached_counts: NDArray[np.int64]  # [N, L, E] of the first half of the prompt, a prefix that may be cached

    def __len__(self) -> int:
        return len(self.domains)

    def take(self, rows: Sequence[int] | NDArray[np.integer]) -> RoutingProfiles:
        """A subset, in the given order."""
        index = np.asarray(rows)
        return RoutingProfiles(
            self.prefill_counts[index],
            self.decode_probs[index],
            tuple(self.domains[i] for i in index),
            self.sequences[index],
            self.cached_counts[index],
        )


def _counts(ids: NDArray[np.integer], num_experts: int) -> NDArray[np.int64]:
    """[L, E] tokens per expert of [T, L, k] choices."""
    layers = ids.shape[1]
    flat = ids.astype(np.int64) + np.arange(layers)[None, :, None] * num_experts
    return np.bincount(flat.ravel(), minlength=layers * num_experts).reshape(layers, num_experts)


def load_esft_profiles(
    path: Path | None = None, *, prompt_tokens: int = 32, decode_tokens: int = 24
) -> RoutingProfiles:
    """Windows of the published DeepSeek-V2-Lite routing of four tasks: 26 MoE layers, 64 experts, top 6."""
    file = path or data_dir() / ESFT
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; set MOE_OPT_DATA to the data folder")
    if prompt_tokens < 2 or decode_tokens < 1:
        raise ConfigError("a window needs at least 2 prompt tokens and 1 decode token")
    prefill, decode, cached, domains, sequences = [], [], [], [], []
    width = prompt_tokens + decode_tokens
    offset = 0
    with np.load(file) as data:
        tasks = sorted(name.removesuffix("_ids") for name in data.files if name.endswith("_ids"))
        if not tasks:
            raise ConfigError(f"{file}: no array that ends in _ids")
        for task in tasks:
            ids, sequence = data[f"{task}_ids"], data[f"{task}_seq"]
            for number in np.unique(sequence):
                own = ids[sequence == number]
                for start in range(0, len(own) - width + 1, width):
                    window = own[start : start + width]
                    prefill.append(_counts(window[:prompt_tokens], ESFT_EXPERTS))
                    cached.append(_counts(window[: prompt_tokens // 2], ESFT_EXPERTS))
                    decode.append(_counts(window[prompt_tokens:], ESFT_EXPERTS) / decode_tokens)
                    domains.append(task)
                    sequences.append(offset + int(number))
            offset += int(sequence.max()) + 1
    return RoutingProfiles(np.stack(prefill), np.stack(decode), tuple(domains), np.array(sequences), np.stack(cached))


def split_by_sequence(
    profiles: RoutingProfiles, share: float = 0.5, seed: int = 0
) -> tuple[RoutingProfiles, RoutingProfiles]:
    """Two halves without a common sequence, each with every domain: one to fit on, one to measure on."""
    rng = np.random.default_rng(seed)
    first: list[int] = []
    second: list[int] = []
    for domain in sorted(set(profiles.domains)):
        rows = np.array([i for i, d in enumerate(profiles.domains) if d == domain])
        names = rng.permutation(np.unique(profiles.sequences[rows]))
        chosen = set(names[: max(1, round(share * len(names)))].tolist())
        for row in rows:
            (first if int(profiles.sequences[row]) in chosen else second).append(int(row))
    if not second:
        raise ConfigError("split_by_sequence: share leaves nothing to measure on")
    return profiles.take(sorted(first)), profiles.take(sorted(second))
