"""Held-out figures of united experts: how much next-token accuracy a threshold costs, and each stand-in's error."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from moe_opt.distill.calibration import LayerSample
from moe_opt.distill.layout import per_assignment
from moe_opt.modeling.experts import expert_tensors
from moe_opt.modeling.united import UnitedExperts, attach_united_experts


@torch.no_grad()
def next_token_figures(model: Any, sequences: torch.Tensor, batch_size: int) -> dict[str, float]:
    """Accuracy, perplexity and mean experts read per layer and forward pass, under the model's current brownout.

    Args: sequences int64 [N, S]; a forward pass takes `batch_size` of them, and brownout plans cover it whole.
    """
    device = model.get_input_embeddings().weight.device
    hits = tokens = 0
    loss = experts = 0.0
    batches = sequences.split(batch_size)
    for batch in batches:
        batch = batch.to(device)
        logits = model(batch, use_cache=False).logits
        labels = batch[:, 1:]
        for row in range(len(batch)):  # one row's logits in fp32 at a time
            scores = logits[row, :-1].float()
            hits += int((scores.argmax(-1) == labels[row].to(scores.device)).sum())
            loss += float(functional.cross_entropy(scores, labels[row].to(scores.device), reduction="sum"))
        tokens += labels.numel()
        experts += float(model.moe_opt.last_step.active_experts.float().mean())
    return {"accuracy": hits / tokens, "perplexity": math.exp(loss / tokens), "experts_read": experts / len(batches)}


def measure_united(
    model: Any, united: UnitedExperts, sequences: torch.Tensor, batch_size: int, thresholds: list[float],
    exact: dict[str, float],
) -> list[dict[str, float]]:  # fmt: skip
    """One row per threshold: accuracy, its loss relative to exact output, perplexity, experts read."""
    runtime = model.moe_opt
    attach_united_experts(model, united)
    rows = []
    try:
        for threshold in thresholds:
            runtime.set_brownout(threshold=threshold, strategy="partial", keep="count")
            found = next_token_figures(model, sequences, batch_size)
            relative = 1 - found["accuracy"] / exact["accuracy"] if exact["accuracy"] else 0.0
            rows.append({"threshold": threshold, "relative_loss": relative, **found})
    finally:
        runtime.remove_united()
    return rows


@torch.no_grad()
def error_per_expert(model: Any, united: UnitedExperts, samples: list[LayerSample]) -> list[list[float]]:
    """[L][E]: mean squared distance between each expert's output and its stand-in's, on the expert's own tokens.

    `keep="error"` weighs it with the squared gate mass of a step. Experts without a token in the sample get the layer's
    mean.
    """
    found = []
    for index, ((_, module), sample) in enumerate(zip(model.moe_opt.layers, samples, strict=True)):
        device = module.down_proj.device
        experts = int(module.num_experts)
        own = expert_tensors(module)
        stand_ins = {
            key: value.to(device=device, dtype=module.down_proj.dtype) for key, value in united.tensors[index].items()
        }
        groups = united.group_of_expert(index).to(device)
        total = torch.zeros(experts, dtype=torch.float64)
        for start in range(0, len(sample.hidden), 4096):
            hidden = sample.hidden[start : start + 4096].to(device)
            ids = sample.ids[start : start + 4096].to(device)
            exact = per_assignment(module, own, hidden, ids, "grouped_mm").float()
            other = per_assignment(module, stand_ins, hidden, groups[ids], "grouped_mm").float()
            distance = (exact - other).square().mean(-1).double().cpu()
            total.scatter_add_(0, ids.cpu().reshape(-1), distance.reshape(-1))
        counts = torch.bincount(sample.ids.reshape(-1), minlength=experts).double()
        mean = total.sum() / counts.sum().clamp_min(1)
        error = torch.where(counts > 0, total / counts.clamp_min(1), mean)
        found.append([float(f"{value:.5g}") for value in error.tolist()])
    return found
