"""The prefill side of a prefill/decode fleet: when does each request reach the decode pool?

Requests go to the prefill worker that is free first; a worker runs one prompt after another at a share of
its peak FLOPs. With prefix caching, blocks that the worker has seen are not computed again. Nothing flows
back from decode, so the tier is worked out before the decode simulation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_opt.cluster import Policy
from moe_opt.devices import Device
from moe_opt.errors import ConfigError
from moe_opt.flops import FlopsModel
from moe_opt.simulate.costs import StepCost
from moe_opt.simulate.engine import simulate
from moe_opt.simulate.experts import ExpertModel
from moe_opt.simulate.fleet import FleetConfig
from moe_opt.simulate.metrics import SimResult
from moe_opt.workloads import TraceRequest


class BlockCache:
    """Prefix blocks of one worker, least recently used out first."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, chain: Sequence[int]) -> int:
        """Leading blocks of `chain` that are held."""
        for index, block in enumerate(chain):
            if block not in self._blocks:
                return index
        return len(chain)

    def store(self, chain: Sequence[int]) -> list[int]:
        """Hold every block of `chain`; the blocks that made room, oldest first."""
        evicted: list[int] = []
        for block in chain:
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                self._blocks[block] = None
        while len(self._blocks) > self.capacity:
            evicted.append(self._blocks.popitem(last=False)[0])
        return evicted


@dataclass(frozen=True, slots=True)
class PrefillTier:
    """Prefill workers of one kind."""

    workers: int
    model: FlopsModel
    device: Device
    tensor_parallel: int = 1
    efficiency: float = 0.4  # share of peak FLOPs that prefill reaches
    overhead: float = 5e-3  # seconds per prompt
    cache_blocks: int = 0  # prefix blocks per worker; 0: no prefix caching
    block_tokens: int = 512

    def __post_init__(self) -> None:
        if self.workers < 1 or self.tensor_parallel < 1:
            raise ConfigError("a prefill tier needs at least 1 worker of at least 1 device")
        if not 0 < self.efficiency <= 1 or self.overhead < 0 or self.cache_blocks < 0 or self.block_tokens < 1:
            raise ConfigError("prefill tier: efficiency in (0, 1], overhead and cache_blocks not negative")

    def ready(self, trace: Sequence[TraceRequest]) -> list[float]:
        """Seconds at which each request of the trace has been prefilled."""
        free = np.zeros(self.workers)
        caches = [BlockCache(self.cache_blocks) for _ in range(self.workers)]
        dtype = "fp8" if self.model.weight_bytes <= 1 else "bfloat16"
        rate = self.device.flops(dtype) * self.efficiency * self.tensor_parallel
        moments = []
        for request in trace:
            worker = int(free.argmin())
            cached = 0
            if self.cache_blocks:
                blocks = caches[worker].match(request.block_hashes)
                cached = min(blocks * self.block_tokens, request.prompt_tokens - 1)
                caches[worker].store(request.block_hashes)
            seconds = self.overhead + self.model.prefill(request.prompt_tokens - cached, cached) / rate
            free[worker] = max(free[worker], request.arrival) + seconds
            moments.append(float(free[worker]))
        return moments


def simulate_pd(
    trace: Sequence[TraceRequest],
    tier: PrefillTier,
    policy: Policy,
    fleet: FleetConfig,
    cost: StepCost,
    *,
    experts: ExpertModel | None = None,
    signatures: np.ndarray | None = None,
    history: Sequence[TraceRequest] = (),
) -> SimResult:
    """Prefill, then decode. TTFT counts from the arrival at the fleet; rows are those of `trace`."""
    ready = np.array(tier.ready(trace))
    order = np.argsort(ready, kind="stable")
    pooled = [replace(trace[i], arrival=float(ready[i])) for i in order]
    result = simulate(
        pooled,
        policy,
        fleet,
        cost,
        experts=None if experts is None else _Reordered(experts, order),
        signatures=None if signatures is None else signatures[order],
        history=history,
    )
    back = np.argsort(order)
    result.arrival = np.array([r.arrival for r in trace])
    for name in ("admitted", "first_token", "finished", "worker", "tokens", "lost_steps", "output_lengths"):
        setattr(result, name, getattr(result, name)[back])
    return result


class _Reordered:
    """An expert model whose rows are those of the original trace."""

    def __init__(self, inner: ExpertModel, order: np.ndarray):
        self._inner, self._order = inner, order

    def start(self, num_groups: int) -> None:
        self._inner.start(num_groups)

    def add(self, group: int, index: int) -> None:
        self._inner.add(group, int(self._order[index]))

    def remove(self, group: int, index: int) -> None:
        self._inner.remove(group, int(self._order[index]))

    def distinct(self, group: int) -> float:
        return self._inner.distinct(group)
