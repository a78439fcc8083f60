"""United experts inside a model: the child module of an experts module, and the storage both share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moe_opt.modeling.experts import UNITED_ATTRIBUTE, ExpertsProxy, expert_tensor_names


class UnitedWeights(nn.Module):
    """Child `united` of an experts module: parameters `[U, ...]` named like the module's own."""

    group_of_expert: torch.Tensor  # int64 [E], the united expert that stands in for each original

    def __init__(self, tensors: Mapping[str, torch.Tensor], group_of_expert: torch.Tensor) -> None:
        super().__init__()
        for key, value in tensors.items():
            self.register_parameter(key, nn.Parameter(value, requires_grad=False))
        self.register_buffer("group_of_expert", group_of_expert, persistent=False)
        self.num_united = int(group_of_expert.max()) + 1
        self.pool: ExpertPool | None = None  # shared storage with the originals, built on first use
        self._groups = group_of_expert.tolist()

    def _apply(self, fn: Any, recurse: bool = True) -> UnitedWeights:
        super()._apply(fn, recurse)
        self.pool = None  # the originals moved too, and no longer share
        device = self.group_of_expert.device
        if device.type != "meta":  # `to_empty` leaves buffers without content
            self.group_of_expert = torch.tensor(self._groups, device=device)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        self.pool = None  # with assign=True parameters are new ones
        if not any(key.startswith(prefix) for key in state_dict):  # a stock state dict knows nothing of us
            missing_keys[:] = [key for key in missing_keys if not key.startswith(prefix)]

    def forward(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors by name. A call, so that adapters that wrap this module (PEFT's `target_parameters`) act."""
        return {key: getattr(self, key) for key in expert_tensor_names(self)}


def united_weights(module: nn.Module) -> UnitedWeights | None:
    """The united experts of an experts module, without the adapters around them."""
    child = module._modules.get(UNITED_ATTRIBUTE)
    while child is not None and not isinstance(child, UnitedWeights):
        child = child.get_base_layer()  # type: ignore[operator]
    return child


class ExpertPool:
    """One `[E+U, ...]` storage for a layer's originals and united experts, of which both sets of parameters are views.

    With it a browned-out step is one grouped matrix product. `.to()`, `load_state_dict(assign=True)`, offload and deep
    copies break the sharing; `intact` notices, and the caller builds a new pool or takes two products instead.
    """

    def __init__(self, module: nn.Module, united: UnitedWeights) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._proxy: ExpertsProxy | None = None
        self._pointers: list[tuple[str, int, int]] = []
        # Built on first use, which may be inside inference mode; the storage must outlive it.
        with torch.inference_mode(False), torch.no_grad():
            for key in expert_tensor_names(module):
                original, extra = module._parameters[key], united._parameters[key]
                assert original is not None
                assert extra is not None
                count = original.shape[0]
                storage = torch.empty(
                    (count + extra.shape[0], *original.shape[1:]),
                    dtype=original.dtype,
                    device=original.device,
                )
                storage[:count].copy_(original)
                storage[count:].copy_(extra)
                original.data = storage[:count]
                extra.data = storage[count:]
                self.weights[key] = storage
                self._pointers.append((key, original.data_ptr(), extra.data_ptr()))

    @staticmethod
    def possible(module: nn.Module, united: UnitedWeights) -> bool:
        """Plain parameters in memory on one device; no accelerate hook, no parametrisation, no sharded tensors."""
        if hasattr(module, "_hf_hook"):
            return False
        for key in expert_tensor_names(module):
            original, extra = module._parameters.get(key), united._parameters.get(key)
            if type(original) is not nn.Parameter or type(extra) is not nn.Parameter:
                return False
            if original.device != extra.device or original.device.type == "meta":
                return False
            if original.dtype != extra.dtype:
                return False
        return True

    def intact(self, module: nn.Module, united: UnitedWeights) -> bool:
        for key, original_pointer, extra_pointer in self._pointers:
            original, extra = module._parameters.get(key), united._parameters.get(key)
            if original is None or extra is None:
                return False
            if original.data_ptr() != original_pointer or extra.data_ptr() != extra_pointer:
                return False
        return True

    def proxy(self, module: nn.Module) -> ExpertsProxy:
        """Originals and united experts as one experts module."""
        if self._proxy is None or self._proxy.module is not module:
            self._proxy = ExpertsProxy(module, self.weights)
        return self._proxy

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied model has parameters of its own and builds its own pool

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())
