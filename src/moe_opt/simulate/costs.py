"""The price of one decode step, in seconds: fixed + KV bytes / bandwidth + distinct experts x expert bytes /
bandwidth + FLOPs / peak (BalanceRoute section 2.1, METRO section III-A)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moe_opt.errors import ConfigError
from moe_opt.simulate.models import ModelSpec


class DeviceLike(Protocol):
    """What a step cost needs of a device preset of `moe_opt.devices`."""

    @property
    def memory_bandwidth(self) -> float: ...  # bytes per second


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
        model: ModelSpec,
        *,
        bandwidth: float,
        peak_flops: float,
        overhead: float = 2e-3,
        tensor_parallel: int = 1,
        efficiency: float = 0.8,
        kv_bytes: float = 2.0,
        communication: float = 0.0,
    ) -> StepCost:
        """From a model's sizes and a device's bytes and FLOPs per second.

        `overhead` (s) is the host's and the launches' share of a step, `communication` (s) that of
        collectives, and `efficiency` the share of the peak rates that kernels reach. `tensor_parallel`
        devices read side by side.
        """
        for name, value in {
            "bandwidth": bandwidth,
            "peak_flops": peak_flops,
            "efficiency": efficiency,
        }.items():
            if not value > 0:
                raise ConfigError(f"{name} must be positive, not {value}")
        if tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel must be at least 1, not {tensor_parallel}")
        rate = bandwidth * efficiency * tensor_parallel
        flops = peak_flops * efficiency * tensor_parallel
        return cls(
            fixed=overhead + communication + model.dense_parameters() * model.weight_bytes / rate,
            per_kv_token=model.kv_bytes_per_token(kv_bytes) / rate + model.attention_flops_per_context_token() / flops,
            per_expert=model.expert_bytes() / rate,
            per_request=model.decode_flops_per_token() / flops,
        )
