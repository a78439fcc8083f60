"""Routing data for tests: planted domains, and the real ESFT routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_opt.cluster.expert_counts import split_sequences


def planted(prompts: int = 120, layers: int = 6, experts: int = 16, domains: int = 4, seed: int = 0, tokens: int = 200):
    """Prompts of `domains` kinds, each kind with its own expert preferences.

    Returns:
        prefill counts [N, L, E], decode probabilities [N, L, E], domain of each prompt [N].
    """
    rng = np.random.default_rng(seed)
    preference = rng.gamma(0.3, size=(domains, layers, experts)) + 1e-3
    domain = rng.integers(0, domains, prompts)
    own = preference[domain] * rng.gamma(3.0, size=(prompts, layers, experts))
    probs = own / own.sum(axis=-1, keepdims=True)
    return rng.poisson(probs * tokens), rng.poisson(probs * tokens) / tokens, domain


def esft_prompts(data_dir: Path):
    """The real routing of ESFT (26 layers of 64 experts): first half of each sequence as prefill, the rest as
    decode.

    Returns:
        prefill counts [161, 26, 64], decode probabilities, task names.
    """
    arrays = np.load(data_dir / "routing" / "esft_dsv2lite_token_routing.npz")
    names = ("intent", "law", "summary", "translation")
    parts = [split_sequences(arrays[f"{name}_ids"], arrays[f"{name}_seq"], 64) for name in names]
    tasks = [name for name, (counts, _) in zip(names, parts, strict=True) for _ in counts]
    return np.concatenate([p for p, _ in parts]), np.concatenate([d for _, d in parts]), tasks
