"""Samples of what goes into each MoE layer, and the statistics that grouping and initialisation need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from moe_opt.distill.layout import per_assignment
from moe_opt.modeling.experts import expert_tensors

_OUTPUT_SAMPLES = 512  # tokens on which all experts run to compare their outputs
_FLOOR = 1e-12


@dataclass(slots=True)
class LayerSample:
    """Inputs of one MoE layer over the calibration tokens, on the CPU."""

    hidden: torch.Tensor  # [T, H]
    ids: torch.Tensor  # int64 [T, k]
    weights: torch.Tensor  # float32 [T, k]


@dataclass(slots=True)
class LayerStatistics:
    """What the experts of one layer did on the sample."""

    counts: torch.Tensor  # float64 [E], assignments
    mass: torch.Tensor  # float64 [E], sum of squared gate weights: how much an error of the expert would cost
    output_scale: float  # mean over tokens of the squared norm of the routed experts' summed output
    expert_scale: float  # mean over assignments of the squared norm of a single expert's output
    token_weight: torch.Tensor  # float32 [T], what a squared error at each token counts in the closed forms


Observer = Callable[[int, nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], None]


@contextmanager
def watch_layers(layers: list[tuple[str, nn.Module]], observer: Observer) -> Iterator[None]:
    """Call `observer(index, module, hidden [T, H], ids [T, k], weights [T, k])` after each MoE layer has run."""

    def hook_of(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            hidden, ids, weights = _arguments(args, kwargs)
            observer(index, module, hidden, ids.to(torch.int64), weights)

        return hook

    handles = [
        module.register_forward_hook(hook_of(index), with_kwargs=True) for index, (_, module) in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Families name the three arguments differently, their order is fixed by the experts interface."""
    hidden, ids, weights = (*args, *kwargs.values())[:3]
    return hidden.reshape(-1, hidden.shape[-1]), ids, weights


@torch.no_grad()
def collect_samples(model: Any, sequences: torch.Tensor, batch_size: int) -> list[LayerSample]:
    """Run the exact model over int64 [N, S] sequences and keep every MoE layer's inputs (N * S * H values a layer)."""
    layers = model.moe_opt.layers
    parts: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in layers]

    def keep(index: int, module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        parts[index].append((hidden.cpu(), ids.cpu(), weights.float().cpu()))

    device = model.get_input_embeddings().weight.device
    with watch_layers(layers, keep):
        for batch in sequences.split(batch_size):
            model.base_model(batch.to(device), use_cache=False)
    return [LayerSample(*(torch.cat(column) for column in zip(*layer, strict=True))) for layer in parts]


@torch.no_grad()
def statistics(module: nn.Module, sample: LayerSample, chunk: int = 4096) -> LayerStatistics:
    """Counts, squared gate mass and output scale of one layer."""
    device = module.down_proj.device
    experts = int(module.num_experts)
    flat = sample.ids.reshape(-1)
    counts = torch.bincount(flat, minlength=experts).double()
    mass = torch.zeros(experts, dtype=torch.float64).scatter_add_(0, flat, sample.weights.reshape(-1).double().square())
    norms = []
    single = 0.0
    tensors = expert_tensors(module)
    for start in range(0, len(sample.hidden), chunk):
        hidden, ids, weights = (
            part[start : start + chunk].to(device) for part in (sample.hidden, sample.ids, sample.weights)
        )
        out = per_assignment(module, tensors, hidden, ids, "grouped_mm").float()
        norms.append((out * weights.unsqueeze(-1)).sum(1).square().sum(-1).cpu())
        single += float(out.square().sum())
    norm = torch.cat(norms)
    scale = max(float(norm.mean()), _FLOOR)
    # A few tokens (document starts, separators) have outputs many times larger than all others, and would be all that a
    # sum of squares sees. The next norm layer divides by the size anyway, so errors count relative to it.
    weight = scale / (norm + scale)
    return LayerStatistics(counts, mass, scale, max(single / max(flat.numel(), 1), _FLOOR), weight)


@torch.no_grad()
def output_similarity(module: nn.Module, sample: LayerSample) -> np.ndarray:
    """float [E, E]: cosine of the experts' outputs on the same tokens."""
    device = module.down_proj.device
    experts = int(module.num_experts)
    step = max(1, len(sample.hidden) // _OUTPUT_SAMPLES)
    hidden = sample.hidden[::step][:_OUTPUT_SAMPLES].to(device)
    every = torch.arange(experts, device=device).expand(len(hidden), -1)
    gram = torch.zeros(experts, experts, dtype=torch.float64, device=device)
    for start in range(0, len(hidden), 32):  # [32, E, H] at a time
        part = hidden[start : start + 32]
        out = per_assignment(module, expert_tensors(module), part, every[: len(part)], "grouped_mm").float()
        gram += torch.einsum("teh,tfh->ef", out, out)
    norm = gram.diagonal().clamp_min(_FLOOR).sqrt()
    return (gram / norm / norm[:, None]).cpu().numpy()


def co_activation(sample: LayerSample, experts: int) -> np.ndarray:
    """float [E, E]: gate mass that two experts have on the same tokens, as a cosine."""
    dense = torch.zeros(len(sample.hidden), experts, dtype=torch.float32)
    dense.scatter_add_(1, sample.ids, sample.weights)
    gram = (dense.mT @ dense).double()
    norm = gram.diagonal().clamp_min(_FLOOR).sqrt()
    return (gram / norm / norm[:, None]).numpy()
