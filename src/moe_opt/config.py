"""Settings as dataclasses that validate themselves and go to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_opt.errors import ConfigError

STREAMING_MODES = ("auto", "offload", "gather", "both")
PREFILL_DISPATCH = ("auto", "all-gather", "all-to-all")
REPLICA_METHODS = ("metro", "greedy", "optimal", "eplb")
KERNELS = ("auto", "eager", "grouped_mm", "batched_mm", "fused")


@dataclasses.dataclass
class ExpertParallelConfig:
    """How an expert-parallel group spreads and chooses experts (METRO).

    Args:
        method: replica choice of decode-sized steps: "metro", "greedy", "optimal" or "eplb".
        replication: expert weights held by all ranks together, over the number of experts; 1 is no replica.
        slots_per_rank: the same, given exactly; has precedence.
        placement: a file that `ExpertPlacement.save` wrote; None places experts as if all were equally popular.
        decode_tokens: steps of up to so many tokens over all ranks take `method`; larger ones split every expert's
            tokens evenly over its replicas, which is right where computing takes longer than reading.
        prefill_dispatch: how the tokens of such larger steps travel: "all-gather" to all ranks in one collective,
            "all-to-all" to those that compute for them, "auto" the second where that moves at most three quarters.

    Raises:
        ConfigError: a value out of range.
    """

    method: str = "metro"
    replication: float = 1.0
    slots_per_rank: int | None = None
    placement: str | None = None
    decode_tokens: int = 1024
    prefill_dispatch: str = "auto"

    def __post_init__(self) -> None:
        if self.method not in REPLICA_METHODS:
            raise ConfigError(
                f"moe_opt: unknown expert_parallel method {self.method!r}; choose one of {', '.join(REPLICA_METHODS)}"
            )
        if self.prefill_dispatch not in PREFILL_DISPATCH:
            raise ConfigError(
                f"moe_opt: unknown prefill_dispatch {self.prefill_dispatch!r}; "
                f"choose one of {', '.join(PREFILL_DISPATCH)}"
            )
        if not isinstance(self.replication, (int, float)) or self.replication < 1:
            raise ConfigError(f"moe_opt: expert_parallel replication must be at least 1, got {self.replication!r}")
        if self.slots_per_rank is not None and (not isinstance(self.slots_per_rank, int) or self.slots_per_rank < 1):
            raise ConfigError(f"moe_opt: slots_per_rank must be an integer of at least 1, got {self.slots_per_rank!r}")
        if not isinstance(self.decode_tokens, int) or self.decode_tokens < 0:
            raise ConfigError(f"moe_opt: decode_tokens must be an integer of at least 0, got {self.decode_tokens!r}")
        if self.placement is not None:
            self.placement = os.fspath(self.placement)

    @classmethod
    def resolve(cls, value: Any) -> ExpertParallelConfig | None:
        """None and False are off, True is the defaults, a mapping is settings."""
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"moe_opt: expert_parallel is True, a dict or None, got {value!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise ConfigError(
                f"moe_opt: unknown expert_parallel setting {', '.join(map(repr, unknown))}; "
                f"known: {', '.join(sorted(known))}"
            )
        return cls(**value)


@dataclasses.dataclass
class AsyncEPConfig:
    """How expert weights are streamed (MoE-Prefill's AsyncEP).

    Args:
        mode: "offload" (experts outside the device, copied ahead), "gather" (each rank holds a part, all-gathered
            ahead), "both", or "auto": "offload" where the model does not fit the free memory, else off.
        window: layers that are fetched ahead; each costs a buffer of one layer's experts.

    Raises:
        ConfigError: a value out of range.
    """

    mode: str = "offload"
    window: int = 1

    def __post_init__(self) -> None:
        if self.mode not in STREAMING_MODES:
            raise ConfigError(
                f"moe_opt: unknown async_ep mode {self.mode!r}; choose one of {', '.join(STREAMING_MODES)}"
            )
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ConfigError(f"moe_opt: async_ep window must be an integer of at least 1, got {self.window!r}")

    @classmethod
    def resolve(cls, value: Any) -> AsyncEPConfig | None:
        """None and False are off, a text is the mode, a mapping is settings."""
        if value is None or value is False:
            return None
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(mode=value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"moe_opt: async_ep is {', '.join(STREAMING_MODES)}, a dict or None, got {value!r}")
        unknown = sorted(set(value) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ConfigError(f"moe_opt: unknown async_ep setting {', '.join(map(repr, unknown))}; known: mode, window")
        return cls(**value)


@dataclasses.dataclass
class MoEOptConfig:
    """What `from_pretrained(..., moe_opt=...)` does to a model. Thresholds are run-time state and never stored here.

    Args:
        united_experts: a folder or Hub id that holds united experts (`UnitedExperts.from_pretrained`), or None.
            "." stands for the model's own folder and is what `save_pretrained` writes.
        ways: which ways to load where the source holds several (`ways-2/`, `ways-4/`, ...).
        brownout_layers: indices of the MoE layers that may brown out; None means all. `range` objects are accepted.
        async_ep: weight streaming (MoE-Prefill's AsyncEP): "auto", "offload", "gather", "both", a dict or an
            `AsyncEPConfig`; None is off.
        expert_parallel: METRO's expert-parallel forward: True, a dict or an `ExpertParallelConfig`; None is off. Needs
            one process per rank (torchrun).
        kernels: the experts kernel that runs wherever nothing is browned out: "auto" takes what Transformers would;
            "fused" is our own for decode-sized steps (Triton on a GPU, C++ on a CPU) and `grouped_mm` for larger ones.

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
        self.expert_parallel = ExpertParallelConfig.resolve(self.expert_parallel)
        self.async_ep = AsyncEPConfig.resolve(self.async_ep)
        if self.async_ep is not None and self.expert_parallel is not None:
            raise ConfigError(
                "moe_opt: async_ep moves weights to the tokens, expert_parallel tokens to the weights: choose one"
            )

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
        found = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return {key: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for key, v in found.items()}  # type: ignore[arg-type]

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
