"""What the united experts are trained on: errors of single layers, or the divergence of the model's next-token logits.

Both run one forward pass of the frozen teacher and call `backward` themselves: a layer's loss as soon as the layer has
run, so that activations of one layer only are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from moe_opt.distill.calibration import watch_layers
from moe_opt.distill.config import StageSettings
from moe_opt.distill.divergence import HeadDivergence
from moe_opt.distill.layout import per_assignment
from moe_opt.distill.students import Students
from moe_opt.modeling.brownout import merge_duplicates, plan_brownout
from moe_opt.modeling.experts import UNITED_ATTRIBUTE, ExpertsProxy, expert_tensors, stock_function
from moe_opt.modeling.united import attach_united_experts

Backward = Callable[[torch.Tensor], None]


class Objective(Protocol):
    """Runs a micro-batch: losses per way (detached, mean over tokens), gradients added to the students' parameters."""

    def __call__(
        self, students: Students, input_ids: torch.Tensor, positions: torch.Tensor, backward: Backward
    ) -> dict[int, torch.Tensor]: ...


@dataclass(slots=True)
class ThresholdSampler:
    """Draws the brownout threshold of a planned batch from the position of its first sequence, so that neither the
    number of processes nor a restart changes it."""

    settings: StageSettings
    seed: int

    def draw(self, position: int, way: int) -> float:
        random = np.random.default_rng([self.seed, position, way])
        low, high = self.settings.threshold
        return 0.0 if random.random() < self.settings.zero_share else float(random.uniform(low, high))


class LayerObjective:
    """Stage 1. The teacher runs exactly; every MoE layer's students see what the layer saw.

    "gate-weighted": squared error of the layer's output under brownout, relative to the output's mean square. A token
    whose experts share a united expert runs it once, with their weights added, as serving does.
    "paper" (BrownoutServe, Eq. 4): squared error of the united expert against each original on that one's tokens.

    Args:
        scales: per layer the mean squared output norm, of the layer or (for "paper") of single experts.
    """

    def __init__(
        self, model: Any, settings: StageSettings, scales: list[float], plan_size: int, sampler: ThresholdSampler
    ) -> None:
        self.model = model
        self.layers: list[tuple[str, nn.Module]] = model.moe_opt.layers
        self.settings = settings
        self.scales = scales
        self.plan_size = plan_size
        self.sampler = sampler

    def __call__(
        self, students: Students, input_ids: torch.Tensor, positions: torch.Tensor, backward: Backward
    ) -> dict[int, torch.Tensor]:
        length = input_ids.shape[1]
        firsts = positions[:: self.plan_size].tolist()
        losses = {way: torch.zeros((), device=input_ids.device) for way in students.ways}

        def observe(
            index: int, module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
        ) -> None:
            outputs = per_assignment(module, expert_tensors(module), hidden, ids, "grouped_mm")
            for way in students.ways:
                with torch.enable_grad():
                    if self.settings.objective == "paper":
                        error = self._paper_error(students, way, index, module, hidden, ids, outputs)
                    else:
                        thresholds = [self.sampler.draw(first, way) for first in firsts]
                        error = self._layer_error(
                            students, way, index, module, hidden, ids, weights, outputs, thresholds, length
                        )
                    loss = error / self.scales[index] / len(self.layers)
                    if loss.requires_grad:
                        backward(loss)
                losses[way] += loss.detach().to(losses[way].device)

        with torch.no_grad(), watch_layers(self.layers, observe):
            self.model.base_model(input_ids, use_cache=False)
        return losses

    def _paper_error(
        self,
        students: Students,
        way: int,
        index: int,
        module: nn.Module,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        outputs: torch.Tensor,
    ) -> torch.Tensor:
        view = students.view(way, index, module.down_proj)
        mine = per_assignment(module, expert_tensors_of(module, view), hidden, view.group_of_expert[ids], "grouped_mm")
        return (mine.float() - outputs.float()).square().sum(-1).mean()

    def _layer_error(
        self,
        students: Students,
        way: int,
        index: int,
        module: nn.Module,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        outputs: torch.Tensor,
        thresholds: list[float],
        length: int,
    ) -> torch.Tensor:
        view = students.view(way, index, module.down_proj)
        experts = int(module.num_experts)
        tokens = self.plan_size * length
        slots = torch.cat(
            [
                _slots(ids[start : start + tokens], threshold, view.group_of_expert)
                for start, threshold in zip(range(0, len(ids), tokens), thresholds, strict=True)
            ]
        )
        moved = slots >= experts
        moved_weights = torch.where(moved, weights, 0)
        target = (outputs.float() * moved_weights.float().unsqueeze(-1)).sum(1)
        delegated = merge_duplicates(torch.where(moved, slots - experts, -1), moved_weights)
        stand_ins = ExpertsProxy(module, expert_tensors_of(module, view))
        out = stock_function(module, "grouped_mm")(
            stand_ins,
            hidden,
            torch.where(delegated.ids < 0, stand_ins.num_experts, delegated.ids),
            delegated.weights,
        )
        return (out.float() - target).square().sum(-1).mean()


def _slots(ids: torch.Tensor, threshold: float, groups: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(ids.reshape(-1), minlength=len(groups))
    return plan_brownout(counts, threshold, groups).slot_of_expert[ids]


def expert_tensors_of(module: nn.Module, view: nn.Module) -> dict[str, torch.Tensor]:
    """The view's tensors under the names that the module's kernels read."""
    return {name: getattr(view, name) for name in expert_tensors(module)}


class LogitObjective:
    """Stage 2. KL divergence of the browned-out model's next-token distribution from the exact model's, through the
    very path that serving takes; optionally with the cross-entropy of the text itself."""

    def __init__(
        self, model: Any, students: Students, settings: StageSettings, plan_size: int, sampler: ThresholdSampler
    ) -> None:
        self.model = model
        self.runtime = model.moe_opt
        self.settings = settings
        self.plan_size = plan_size
        self.sampler = sampler
        self.divergence = HeadDivergence(model, settings.label_weight)
        # The runtime accepts "partial" once united experts are there; each pass then replaces them by the students.
        attach_united_experts(model, students.to_united(students.ways[0]))
        self.runtime.set_brownout(threshold=1.0, strategy="partial", keep="count", layers=None)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()

    def close(self) -> None:
        """Leave the teacher as it was."""
        self.runtime.remove_united()
        if self.settings.gradient_checkpointing:
            self.model.gradient_checkpointing_disable()
            self.model.eval()

    def __call__(
        self, students: Students, input_ids: torch.Tensor, positions: torch.Tensor, backward: Backward
    ) -> dict[int, torch.Tensor]:
        losses = {way: torch.zeros((), device=input_ids.device) for way in students.ways}
        parts = input_ids.split(self.plan_size)
        for part, first in zip(parts, positions[:: self.plan_size].tolist(), strict=True):
            self.runtime.set_brownout(threshold=1.0)
            with torch.no_grad():
                exact = self.divergence.states(part)
            for way in students.ways:
                show_students(self.runtime.layers, students, way)
                self.runtime.set_brownout(threshold=self.sampler.draw(first, way))
                loss = self.divergence(self.divergence.states(part), exact, part) / len(parts)
                if loss.requires_grad:  # at a threshold that delegates nothing there is nothing to learn
                    backward(loss)
                losses[way] += loss.detach().to(losses[way].device)
        self.runtime.set_brownout(threshold=1.0)
        return losses


def show_students(layers: list[tuple[str, nn.Module]], students: Students, way: int) -> None:
    """Let the model's layers delegate to the students of one way."""
    for index, (_, module) in enumerate(layers):
        module._modules[UNITED_ATTRIBUTE] = students.view(way, index, module.down_proj)
