"""The price of one decode step, in seconds: fixed + KV bytes / bandwidth + distinct experts x expert bytes /
bandwidth + FLOPs / peak (BalanceRoute section 2.1, METRO section III-A)."""

from __future__ import annotations

from dataclasses import dataclass

from moe_opt.devices import Device
from moe_opt.errors import ConfigError
from moe_opt.flops import FlopsModel

_LONG = 1_000_000  # tokens: beyond every sliding window, so that one more costs what it costs at length


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one decode step of one worker, linear in what it reads and computes."""

    fixed: float = 0.0  # launches, collectives, weights that every step reads
    per_kv_token: float = 0.0  # per KV token of the worker's batch
    per_expert: float = 0.0  # per distinct expert of one layer
    per_request: float = 0.0  # FLOPs of one token

    def __post_init__(self) -> None:
        values = (self.fixed, self.per_kv_token, self.per_expert, self.per_request)
        if any(not 0 <= v < float("inf") for v in values) or sum(values) <= 0:
            raise ConfigError(f"a step cost needs finite parts of at least 0 and a positive sum, not {self}")

    def seconds(self, kv_tokens: float, requests: float, distinct_experts: float = 0.0) -> float:
        """Duration of a step over `kv_tokens` of KV cache and `requests` rows that reads
        `distinct_experts`."""
        return (
            self.fixed
            + self.per_kv_token * kv_tokens
            + self.per_expert * distinct_experts
            + self.per_request * requests
        )

    @classmethod
    def of(
        cls,
        model: FlopsModel,
        device: Device,
        *,
        overhead: float = 2e-3,
        communication: float = 0.0,
        tensor_parallel: int = 1,
        efficiency: float = 0.8,
    ) -> StepCost:
        """From a model's bytes and FLOPs and a device's rates.

        `overhead` (s) is the host's and the launches' share of a step, `communication` (s) that of
        collectives; `efficiency` is the share of the peak rates that kernels reach. `tensor_parallel`
        devices make up a worker and read side by side."""
        if not 0 < efficiency <= 1:
            raise ConfigError(f"efficiency must lie in (0, 1], not {efficiency}")
        if tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel must be at least 1, not {tensor_parallel}")
        rate = device.memory_bandwidth * efficiency * tensor_parallel
        precision = "fp8" if model.weight_bytes <= 1 else "bfloat16"
        flops = device.flops(precision) * efficiency * tensor_parallel
        kv_bytes = model.kv_bytes(_LONG + 1) - model.kv_bytes(_LONG)
        attention = model.decode(_LONG + 1) - model.decode(_LONG)
        return cls(
            fixed=overhead + communication + model.resident_bytes / rate,
            per_kv_token=kv_bytes / rate + attention / flops,
            per_expert=model.expert_bytes / rate,
            per_request=model.decode(1) / flops,
        )
