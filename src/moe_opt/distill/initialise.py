"""First weights of a united expert, from its group's weights and a sample of what the layer sees.

"average" and "frequency" mean parameters; "aligned" first permutes each expert's neurons onto those of the group's
dominant expert; "selection" keeps the group's neurons that explain most of its output. The down projection is linear,
so with the other weights fixed its best value is a ridge regression (as MergeMoE, arXiv 2510.14436, does for one expert
at a time); here it is fitted to the gate-weighted output of the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

from moe_opt.distill.calibration import LayerSample, LayerStatistics
from moe_opt.distill.layout import Tensors, activations, from_neurons, per_assignment, to_neurons
from moe_opt.modeling.experts import expert_tensors

_CHUNK = 8192  # tokens at a time in the closed-form sums
_FEW = 1e-6  # relative diagonal that keeps a Gram matrix solvable


@dataclass(slots=True)
class GroupTask:
    """What a united expert has to reproduce: the tokens of its group at threshold 0.

    hidden [N, H] in the model's dtype; gate float32 [N], the group's summed gate weight; target float32 [N, H], the
    group's gate-weighted output. Gate and target are scaled by the root of the token's weight, so that plain sums of
    squares weigh tokens as `LayerStatistics.token_weight` says.
    """

    hidden: torch.Tensor
    gate: torch.Tensor
    target: torch.Tensor


def group_tasks(
    module: nn.Module, sample: LayerSample, token_weight: torch.Tensor, groups: list[int]
) -> list[GroupTask]:
    """One task per group of a layer, on the module's device."""
    device = module.down_proj.device
    group_of = torch.tensor(groups)
    tasks = []
    with torch.no_grad():
        tensors = expert_tensors(module)
        for group in range(max(groups) + 1):
            mine = group_of[sample.ids] == group  # [T, k]
            rows = mine.any(1).nonzero()[:, 0]
            hidden = sample.hidden[rows].to(device)
            ids = torch.where(mine[rows], sample.ids[rows], len(groups)).to(device)
            share = token_weight[rows].sqrt().unsqueeze(1)
            weights = (sample.weights[rows] * mine[rows] * share).to(device)
            target = torch.cat(
                [
                    (
                        per_assignment(
                            module, tensors, hidden[i : i + _CHUNK], ids[i : i + _CHUNK], "grouped_mm"
                        ).float()
                        * weights[i : i + _CHUNK].unsqueeze(-1)
                    ).sum(1)
                    for i in range(0, max(len(rows), 1), _CHUNK)
                ]
            )
            tasks.append(GroupTask(hidden, weights.sum(1), target))
    return tasks


def initial_weights(
    module: nn.Module,
    sample: LayerSample,
    stats: LayerStatistics,
    groups: list[int],
    method: str,
    ridge: float | None,
) -> Tensors:
    """United tensors `[U, ...]` in fp32 and in the module's layout.

    Args: groups: [E]. method: "average" | "frequency" | "aligned" | "selection". ridge: penalty of the closed-form
        down projection relative to the mean squared activation, None = leave it.
    """
    originals = {key: value.detach().float() for key, value in to_neurons(module, expert_tensors(module)).items()}
    closed_form = ridge is not None and not module.has_post_expert_norm  # behind a norm the output is not linear
    needs_tasks = closed_form or method in ("aligned", "selection")
    tasks = group_tasks(module, sample, stats.token_weight, groups) if needs_tasks else None
    united: list[Tensors] = []
    for group in range(max(groups) + 1):
        members = [expert for expert, of in enumerate(groups) if of == group]
        own = {key: value[members] for key, value in originals.items()}
        weight = stats.mass[members].to(own["down"]) + 1e-6
        if len(members) == 1:
            united.append({key: value[0] for key, value in own.items()})
            continue
        task = tasks[group] if tasks is not None else None
        if method == "average":
            chosen = _mean(own, torch.ones_like(weight))
        elif method == "frequency":
            chosen = _mean(own, weight)
        elif method == "aligned":
            assert task is not None
            chosen = _mean(_aligned(module, own, weight, task), weight)
        else:
            assert task is not None
            chosen = _selected(module, own, weight, task)
        if closed_form and task is not None and len(task.hidden):
            assert ridge is not None
            chosen = fit_down_projection(module, chosen, task, ridge)
        united.append(chosen)
    return from_neurons(module, {key: torch.stack([u[key] for u in united]) for key in originals})


def _mean(own: Tensors, weight: torch.Tensor) -> Tensors:
    share = weight / weight.sum()
    return {key: torch.einsum("e,e...->...", share, value) for key, value in own.items()}


def _aligned(module: nn.Module, own: Tensors, weight: torch.Tensor, task: GroupTask) -> Tensors:
    """Permute the neurons of every member onto those of the dominant one (Hungarian matching).

    Two neurons are alike when they fire alike on the group's tokens, and when they read and write alike.
    """
    dominant = int(weight.argmax())
    size = own["down"].shape[1]
    hidden = task.hidden[:_CHUNK].float()
    fired = [_unit(activations(module, own["in"][m], _bias(own, m), hidden).mT) for m in range(len(weight))]
    aligned = {key: value.clone() for key, value in own.items()}
    for member in range(len(weight)):
        if member == dominant:
            continue
        likeness = fired[dominant] @ fired[member].mT
        likeness += _unit(own["down"][dominant]) @ _unit(own["down"][member]).mT
        likeness += _unit(own["in"][dominant].reshape(size, -1)) @ _unit(own["in"][member].reshape(size, -1)).mT
        _, columns = linear_sum_assignment(-likeness.cpu().numpy())
        order = torch.as_tensor(columns, device=own["down"].device)
        for key in ("in", "down", "in_bias"):
            if key in own:
                aligned[key][member] = own[key][member][order]
    return aligned


def _selected(module: nn.Module, own: Tensors, weight: torch.Tensor, task: GroupTask) -> Tensors:
    """The I neurons, out of the group's n * I, that explain the group's output best when they all run on its tokens:
    greedy least squares with the down projection refitted after every choice (orthogonal matching pursuit)."""
    members, size = own["down"].shape[:2]
    pool: Tensors = {key: own[key].flatten(0, 1) for key in ("in", "down", "in_bias") if key in own}
    gram, cross = _normal_equations(module, pool, task)
    count = members * size
    scale = gram.diagonal()[:count].mean().clamp_min(1e-20)
    gram = gram + torch.eye(len(gram), device=gram.device) * (_FEW * scale)
    if len(gram) > count:  # the bias is always there: take its part out first
        _deflate(gram, cross, count)
        gram, cross = gram[:count, :count], cross[:count]
    chosen: list[int] = []
    at_once = max(1, size // 256)  # large experts take several neurons per round
    open_ = torch.ones(count, dtype=torch.bool, device=gram.device)
    while len(chosen) < size:
        left = gram.diagonal().clamp_min(_FEW * scale)
        gain = torch.where(open_, cross.square().sum(1) / left, -1.0)
        for pick in gain.topk(min(at_once, size - len(chosen))).indices.tolist():
            _deflate(gram, cross, pick)
            open_[pick] = False
            chosen.append(pick)
    index = torch.tensor(sorted(chosen), device=gram.device)
    found = {key: value[index] for key, value in pool.items()}
    if "down_bias" in own:
        found["down_bias"] = torch.einsum("e,eh->h", weight / weight.sum(), own["down_bias"])
    return found


def _deflate(gram: torch.Tensor, cross: torch.Tensor, pick: int) -> None:
    """Remove, in place, what feature `pick` explains from all features and from the target."""
    root = gram[pick, pick].clamp_min(1e-20).sqrt()
    column = gram[:, pick] / root
    share = cross[pick] / root
    gram.addr_(column, column, alpha=-1)
    cross.addr_(column, share, alpha=-1)


def fit_down_projection(module: nn.Module, expert: Tensors, task: GroupTask, ridge: float) -> Tensors:
    """The down projection (and its bias) that reproduces the group's output best for the expert's other weights.

    minimise |gate * (activations @ down + bias) - target|^2 + penalty * |down - down_0|^2 over the group's tokens; the
    penalty pulls towards the weights that were there (0 after a selection), so that rare neurons stay put.
    """
    gram, cross = _normal_equations(module, expert, task)
    size = expert["down"].shape[0]
    penalty = ridge * gram.diagonal()[:size].mean().clamp_min(1e-20)
    start = expert["down"]
    if "down_bias" in expert:
        start = torch.cat([start, expert["down_bias"].unsqueeze(0)])
    eye = torch.eye(len(gram), device=gram.device, dtype=torch.float64)
    solved = torch.linalg.solve(
        gram.double() + penalty.double() * eye, cross.double() + penalty.double() * start.double()
    ).float()
    fitted = dict(expert)
    fitted["down"] = solved[:size]
    if "down_bias" in expert:
        fitted["down_bias"] = solved[size]
    return fitted


def _normal_equations(module: nn.Module, neurons: Tensors, task: GroupTask) -> tuple[torch.Tensor, torch.Tensor]:
    """Gram matrix of the gate-weighted activations, and their products with the target: float32 [n, n] and [n, H].

    Where experts have biases, the gate itself is one more feature, the last.
    """
    features = neurons["down"].shape[0] + (1 if module.has_bias else 0)
    hidden_size = task.target.shape[1]
    gram = torch.zeros(features, features, device=task.target.device)
    cross = torch.zeros(features, hidden_size, device=task.target.device)
    for start in range(0, len(task.hidden), _CHUNK):
        part = slice(start, start + _CHUNK)
        fired = activations(module, neurons["in"], neurons.get("in_bias"), task.hidden[part].float())
        if module.has_bias:
            fired = torch.cat([fired, fired.new_ones(len(fired), 1)], 1)
        fired = fired * task.gate[part].unsqueeze(1)
        gram += fired.mT @ fired
        cross += fired.mT @ task.target[part]
    return gram, cross


def _bias(own: Tensors, member: int) -> torch.Tensor | None:
    return own["in_bias"][member] if "in_bias" in own else None


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
