"""Which experts a model reads: choices of held-out requests, and measures of how far they follow the domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

PREFILL = 96
DECODE = 64


class ChoiceRecorder:
    """Keeps the experts that each router chose in the last forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Tensor] = []
        self.hooks = [
            module.register_forward_hook(self._record)
            for name, module in model.named_modules()
            if name.endswith("mlp.gate")
        ]

    def _record(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        self.layers.append(outputs[2])

    def pop(self, shape: torch.Size) -> Tensor:
        """Choices [B, S, layers, top-k] of the forward pass over input ids of that shape."""
        chosen = torch.stack([layer.view(*shape, -1) for layer in self.layers], dim=2)
        self.layers = []
        return chosen

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of known domain, and which experts each of their tokens read: bool [N, tokens, layers, experts]."""

    domains: np.ndarray
    reads: np.ndarray

    @property
    def prefill(self) -> np.ndarray:
        """Share of a request's prefill tokens that read each expert: [N, layers, experts]."""
        return self.reads[:, :PREFILL].mean(axis=1)

    @property
    def decode(self) -> np.ndarray:
        return self.reads[:, PREFILL:].mean(axis=1)


@torch.inference_mode()
def record_requests(model: nn.Module, windows: dict[str, Tensor], batch: int = 48) -> Requests:
    """Runs windows of PREFILL + DECODE tokens; the later tokens stand for a decode fed with the true text."""
    experts = model.config.num_experts
    recorder = ChoiceRecorder(model)
    domains, reads = [], []
    for domain, ids in windows.items():
        for part in ids.split(batch):
            model.model(part, use_cache=False)
            chosen = recorder.pop(part.shape)
            read = torch.zeros(*chosen.shape[:-1], experts, dtype=torch.bool).scatter_(-1, chosen, True)
            reads.append(read.numpy())
            domains += [domain] * len(part)
    recorder.close()
    return Requests(np.array(domains), np.concatenate(reads))


def distinct_experts(requests: Requests, members: np.ndarray, size: int, random: np.random.Generator) -> float:
    """Mean number of distinct experts that one layer reads in a decode step of `size` random members."""
    counts = []
    for _ in range(200):
        rows = random.choice(members, size, replace=len(members) < size)
        steps = random.integers(PREFILL, PREFILL + DECODE, size)
        counts.append(requests.reads[rows, steps].any(axis=0).sum(axis=-1).mean())
    return float(np.mean(counts))


def batch_locality(requests: Requests, domains: list[str], size: int, seed: int = 0) -> dict[str, float]:
    """ELDR's Fig. 4: experts read by batches of one domain and by batches drawn over all of them."""
    random = np.random.default_rng(seed)
    groups = [np.flatnonzero(requests.domains == domain) for domain in domains]
    # Every domain is as likely as any other, whatever the number of its requests.
    smallest = min(map(len, groups))
    pool = np.concatenate([random.permutation(group)[:smallest] for group in groups])
    same = float(np.mean([distinct_experts(requests, group, size, random) for group in groups]))
    mixed = float(np.mean([distinct_experts(requests, pool, size, random) for _ in groups]))
    return {"same_domain": same, "mixed": mixed, "fewer_percent": 100 * (1 - same / mixed)}


def prefill_decode_correlation(requests: Requests) -> float:
    """ELDR's Fig. 3: Pearson correlation, over requests, layers and experts, of use in prefill and in decode."""
    return float(np.corrcoef(requests.prefill.ravel(), requests.decode.ravel())[0, 1])


def signature_correlation(requests: Requests) -> float:
    """ELDR's rho: do distances between signatures (counts, log-scaled by rarity) rank like those of decode use?"""
    counts = requests.prefill.reshape(len(requests.domains), -1)
    rarity = np.log((len(counts) + 1) / ((counts > 0).sum(axis=0) + 1))
    decode = requests.decode.reshape(len(counts), -1)
    pairs = np.triu_indices(len(counts), 1)
    return float(spearmanr(_cosines(counts * rarity)[pairs], _cosines(decode)[pairs]).statistic)


def _cosines(vectors: np.ndarray) -> np.ndarray:
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit @ unit.T
