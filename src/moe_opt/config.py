"""Settings as dataclasses that validate themselves and go to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_opt.errors import ConfigError

KERNELS = ("auto", "eager", "grouped_mm", "batched_mm")


@dataclasses.dataclass
class MoEOptConfig:
    """What `from_pretrained(..., moe_opt=...)` does to a model. Thresholds are run-time state and never stored here.

    Args:
        united_experts: a folder or Hub id that holds united experts (`UnitedExperts.from_pretrained`), or None.
            "." stands for the model's own folder and is what `save_pretrained` writes.
        ways: which ways to load where the source holds several (`ways-2/`, `ways-4/`, ...).
        brownout_layers: indices of the MoE layers that may brown out; None means all. `range` objects are accepted.
        async_ep: weight streaming (MoE-Prefill's AsyncEP). Not in this version.
        expert_parallel: METRO's expert-parallel forward. Not in this version.
        kernels: the experts kernel that runs wherever nothing is browned out: "auto" takes what Transformers would.

    Raises:
        ConfigError: an unknown key, a value out of range, or a feature that this version does not have.
    """

    united_experts: str | None = None
    ways: int | None = None
    brownout_layers: list[int] | None = None
    async_ep: Any = None
    expert_parallel: Any = None
    kernels: str = "auto"

    def __post_init__(self) -> None:
        if self.united_experts is not None:
            if not isinstance(self.united_experts, (str, os.PathLike)):
                raise ConfigError(
                    f"moe_opt: united_experts is a folder or Hub id, got {type(self.united_experts).__name__}; attach "
                    "an object with attach_united_experts(model, united)"
                )
            self.united_experts = os.fspath(self.united_experts)
        if self.ways is not None and (isinstance(self.ways, bool) or not isinstance(self.ways, int) or self.ways < 1):
            raise ConfigError(f"moe_opt: ways must be an integer of at least 1, got {self.ways!r}")
        if self.brownout_layers is not None:
            self.brownout_layers = _layer_list(self.brownout_layers)
        if self.kernels not in KERNELS:
            raise ConfigError(f"moe_opt: unknown kernels {self.kernels!r}; choose one of {', '.join(KERNELS)}")
        for name in ("async_ep", "expert_parallel"):
            if getattr(self, name) is not None:
                raise ConfigError(f"moe_opt: {name} is not part of this version; leave it at None")

    @classmethod
    def resolve(
        cls, value: bool | Mapping[str, Any] | MoEOptConfig | None, saved: Mapping[str, Any] | None = None
    ) -> MoEOptConfig:
        """Turn what a user passed as `moe_opt=` into a config; what they left out comes from `saved`.

        Args:
            value: True, a mapping or a config. `saved`: `config.json["moe_opt"]` of the checkpoint, if any.
        """
        base = dict(saved or {})
        if value is True or value is None:
            given: dict[str, Any] = {}
        elif isinstance(value, MoEOptConfig):
            given = value.to_dict()
        elif isinstance(value, Mapping):
            given = dict(value)
        else:
            raise ConfigError(f"moe_opt must be True, a dict or a MoEOptConfig, got {type(value).__name__}: {value!r}")
        if "united_experts" in given and "ways" not in given:
            base.pop("ways", None)  # the saved ways belong to the saved united experts
        return cls.from_dict({**base, **given})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MoEOptConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(
                f"moe_opt: unknown setting {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}"
            )
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Only what differs from the default, so that a later version's defaults still apply."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MoEOptConfig:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ConfigError(f"moe_opt: settings must be a JSON object, got {type(data).__name__}")
        return cls.from_dict(data)


def _layer_list(layers: Sequence[int]) -> list[int]:
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise ConfigError(f"moe_opt: brownout_layers holds layer indices, got {layers!r}")
    out = []
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise ConfigError(f"moe_opt: brownout_layers holds layer indices of at least 0, got {layer!r}")
        out.append(layer)
    return sorted(set(out))
