"""Whether decode is bound by memory or by compute: a roofline of one MoE layer (METRO section III). No torch.

A step of B tokens reads every expert that one of them uses, and computes B * top_k experts' products. While reading
takes longer, a rank's time is the number of experts that it activates, and METRO pays; beyond, it is the number of
tokens, and the even split is right.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_opt.devices import Device
from moe_opt.errors import ConfigError
from moe_opt.flops import FlopsModel

METRO_SECONDS = 26e-6  # Algorithm 1 on an A100, the paper's highest figure; ours has no GPU figure yet


@dataclass(frozen=True, slots=True)
class Regime:
    """One model on one kind of device.

    Attributes:
        num_experts, top_k: of an MoE layer. expert_bytes: stored size of one expert. expert_flops: FLOPs per token.
        bandwidth: bytes per second from device memory. peak: dense FLOP/s.
    """

    num_experts: int
    top_k: int
    expert_bytes: float
    expert_flops: float
    bandwidth: float
    peak: float

    @classmethod
    def from_model(cls, model: FlopsModel, device: Device, efficiency: float = 0.8) -> Regime:
        """efficiency: share of the published bandwidth and peak that kernels reach.

        Raises:
            ConfigError: a model without routed experts.
        """
        if model.num_moe_layers == 0:
            raise ConfigError("the model has no MoE layers")
        flops = device.flops("fp8" if model.expert_weight_bytes <= 1 else "bfloat16")
        return cls(
            num_experts=model.num_experts,
            top_k=model.top_k,
            expert_bytes=model.expert_bytes,
            expert_flops=2.0 * model.expert_bytes / model.expert_weight_bytes,
            bandwidth=device.memory_bandwidth * efficiency,
            peak=flops * efficiency,
        )

    def distinct_experts(self, tokens: int) -> float:
        """Expected distinct experts of `tokens` tokens under even, independent choices."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** tokens)

    def read_seconds(self, tokens: int) -> float:
        """Time to read the experts of a step once."""
        return self.distinct_experts(tokens) * self.expert_bytes / self.bandwidth

    def compute_seconds(self, tokens: int) -> float:
        """Time of the step's expert products at peak."""
        return tokens * self.top_k * self.expert_flops / self.peak

    def memory_bound(self, tokens: int) -> bool:
        """Whether reading takes longer than computing at `tokens` tokens over all ranks (ranks share both evenly)."""
        return self.read_seconds(tokens) > self.compute_seconds(tokens)

    def largest_memory_bound_step(self, limit: int = 1 << 20) -> int:
        """The largest step, in tokens over all ranks, that is memory-bound; `limit` if all are."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.memory_bound(middle) else (low, middle - 1)
        return low

    def metro_pays(self, experts_saved: float, metro_seconds: float = METRO_SECONDS) -> bool:
        """Whether reading `experts_saved` fewer experts on the busiest rank is worth a choice of `metro_seconds`."""
        return experts_saved * self.expert_bytes / self.bandwidth > metro_seconds

    def least_experts_saved(self, metro_seconds: float = METRO_SECONDS) -> float:
        """Experts that METRO must save on the busiest rank of a layer to pay for itself."""
        return metro_seconds * self.bandwidth / self.expert_bytes
