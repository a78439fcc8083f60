"""The united experts under training: fp32 parameters of all layers and ways, and nothing of the teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moe_opt.modeling.united import UnitedExperts, UnitedExpertsConfig
from moe_opt.modeling.united_weights import UnitedWeights


class StudentLayer(nn.Module):
    """United experts of one layer: parameters `[U, ...]` named like the experts' own."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], group_of_expert: torch.Tensor) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_parameter(name, nn.Parameter(value.detach().to(torch.float32).clone()))
        self.register_buffer("group_of_expert", group_of_expert.clone(), persistent=False)
        self.names = tuple(tensors)


class Students(nn.Module):
    """All united experts of a run. Its parameters are the only ones that a `Trainer` sees, steps and saves.

    Attributes:
        ways: sorted; configs: way -> `UnitedExpertsConfig` (groups, base model).
    """

    def __init__(self, united: Mapping[int, UnitedExperts]) -> None:
        super().__init__()
        self.ways = sorted(united)
        self.configs: dict[int, UnitedExpertsConfig] = {way: united[way].config for way in self.ways}
        for way in self.ways:
            layers = [
                StudentLayer(tensors, united[way].group_of_expert(index))
                for index, tensors in enumerate(united[way].tensors)
            ]
            self.add_module(f"ways_{way}", nn.ModuleList(layers))

    @property
    def num_layers(self) -> int:
        return len(self._layers(self.ways[0]))

    def _layers(self, way: int) -> nn.ModuleList:
        return self._modules[f"ways_{way}"]  # type: ignore[return-value]

    def group_of_expert(self, way: int, layer: int) -> torch.Tensor:
        """int64 [E]."""
        return _unwrapped(self._layers(way)[layer]).group_of_expert

    def tensors(self, way: int, layer: int) -> dict[str, torch.Tensor]:
        """The layer's weights `[U, ...]` in fp32, LoRA included; gradients reach the parameters."""
        module = self._layers(way)[layer]
        base = _unwrapped(module)
        found: dict[str, torch.Tensor] = {name: _parameter(base, name) for name in base.names}
        while module is not base:  # PEFT stacks one wrapper per targeted parameter
            delta = module.get_delta_weight("default")
            found[module.parameter_name] = found[module.parameter_name] + delta.to(torch.float32)
            module = module.base_layer
        return found

    def view(self, way: int, layer: int, like: torch.Tensor) -> UnitedView:
        """What the runtime takes for a layer's united experts, in the dtype and on the device of `like`."""
        tensors = {
            name: value.to(dtype=like.dtype, device=like.device) for name, value in self.tensors(way, layer).items()
        }
        return UnitedView(tensors, self.group_of_expert(way, layer).to(like.device))

    def to_united(self, way: int, dtype: torch.dtype = torch.float32) -> UnitedExperts:
        """A checkpoint object with copies of the weights; LoRA matrices are merged into them."""
        with torch.no_grad():
            tensors = [
                {name: value.detach().to(dtype).clone() for name, value in self.tensors(way, layer).items()}
                for layer in range(self.num_layers)
            ]
        return UnitedExperts(self.configs[way], tensors)

    def load_united(self, united: Mapping[int, Sequence[Mapping[str, torch.Tensor]]]) -> None:
        """Overwrite the weights. united: way -> per layer name -> tensor."""
        with torch.no_grad():
            for way, layers in united.items():
                for layer, tensors in enumerate(layers):
                    base = _unwrapped(self._layers(way)[layer])
                    for name, value in tensors.items():
                        _parameter(base, name).copy_(value)


class UnitedView(UnitedWeights):
    """Stands where a model keeps a layer's `UnitedWeights`: the same attributes, as plain tensors with a history, so
    that gradients go through a cast or a LoRA product to the students' parameters."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], group_of_expert: torch.Tensor) -> None:
        super().__init__({}, group_of_expert)  # no parameters: the students hold them
        self.__dict__.update(tensors)


def add_lora(students: Students, rank: int, alpha: float | None) -> int:
    """Freeze the students' weights and train LoRA matrices on them instead (PEFT, `target_parameters`).

    Returns: the number of parameters that are trained.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = [
        name for name, value in students.named_parameters() if value.dim() == 3
    ]  # biases stay as they are: PEFT adapts matrices only
    config = LoraConfig(
        r=rank, lora_alpha=alpha if alpha is not None else 2 * rank, target_modules=[], target_parameters=targets
    )
    inject_adapter_in_model(config, students)
    for name, value in students.named_parameters():
        value.requires_grad_("lora_" in name)
    return sum(value.numel() for value in students.parameters() if value.requires_grad)


def _unwrapped(module: Any) -> StudentLayer:
    while not isinstance(module, StudentLayer):
        module = module.base_layer
    return module


def _parameter(layer: StudentLayer, name: str) -> torch.Tensor:
    found = layer._parameters[name]
    assert found is not None
    return found
