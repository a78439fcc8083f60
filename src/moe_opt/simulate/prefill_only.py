"""Prefill-only serving (MoE-Prefill): schedulers side by side on engines with real block caches.

An engine runs what it was given since its last batch as one forward pass. Its time is what the FLOPs need,
or what the background transfer of all layers' experts needs if that is longer: the window that the
saturation threshold keeps full (section 6.2). The scheduler believes in its shadow tables; FLOPs are
counted from the engine's own cache."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_opt.cluster import Request, Worker
from moe_opt.cluster.prefill import PrefillScheduler
from moe_opt.devices import Device
from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.flops import FlopsModel
from moe_opt.simulate.prefill_tier import BlockCache
from moe_opt.workloads import TraceRequest


@dataclass(frozen=True, slots=True)
class PrefillEngines:
    """Engines under AsyncEP: data-parallel attention, expert weights gathered layer by layer in the
    background."""

    count: int
    model: FlopsModel
    device: Device
    cache_blocks: int
    block_tokens: int = 16
    efficiency: float = 0.4  # share of peak FLOPs of a large batch
    launch: float = 2e-3  # seconds per forward pass
    offload: bool = False  # experts come from host memory over PCIe instead of from the other devices

    def __post_init__(self) -> None:
        if self.count < 1 or self.block_tokens < 1 or self.cache_blocks < 0 or not 0 < self.efficiency <= 1:
            raise ConfigError("prefill engines: count and block_tokens from 1, efficiency in (0, 1]")

    @property
    def flops_per_second(self) -> float:
        """Peak FLOP/s at the model's precision."""
        return self.device.flops("fp8" if self.model.weight_bytes <= 1 else "bfloat16")

    def layer_transfer(self) -> float:
        """Seconds to bring one layer's experts to a device: AllGather of the other shards, or PCIe."""
        size = self.model.expert_bytes * self.model.num_experts
        if self.offload:
            return size / self.device.host_bandwidth
        return size * (self.count - 1) / self.count / self.device.interconnect_bandwidth

    def batch_seconds(self, flops: float) -> float:
        """One forward pass: compute, or the transfers if they take longer."""
        transfer = self.layer_transfer() * self.model.num_moe_layers
        return self.launch + max(flops / (self.flops_per_second * self.efficiency), transfer)


@dataclass(slots=True)
class PrefillResult:
    """One run. Times in seconds; tokens are prompt tokens."""

    finished: NDArray[np.float64]  # [N]
    arrival: NDArray[np.float64]  # [N]
    cached_tokens: NDArray[np.int64]  # [N] taken from the engine's cache
    prompt_tokens: NDArray[np.int64]  # [N]
    worker: NDArray[np.int64]  # [N]
    busy: NDArray[np.float64]  # [W] seconds in forward passes
    waiting_transfer: float  # seconds of forward passes in which compute did not cover the transfers
    batches: int
    flops: float  # executed

    def summary(self) -> dict[str, float]:
        """Throughput in prompt tokens per second, hit rate, latency, and how even the engines were."""
        span = float(self.finished.max())
        latency = self.finished - self.arrival
        return {
            "throughput": float(self.prompt_tokens.sum() / span),
            "hit_rate": float(self.cached_tokens.sum() / self.prompt_tokens.sum()),
            "flops": self.flops,
            "makespan": span,
            "latency_p50": float(np.percentile(latency, 50)),
            "latency_p99": float(np.percentile(latency, 99)),
            "busy_spread": float((self.busy.max() - self.busy.min()) / self.busy.mean()),
            "exposed_transfer": self.waiting_transfer / float(self.busy.sum()),
            "batches": float(self.batches),
        }


def simulate_prefill(
    trace: Sequence[TraceRequest],
    scheduler: PrefillScheduler,
    engines: PrefillEngines,
    *,
    batch_requests: int | None = None,
) -> PrefillResult:
    """Run a scheduler until every request has been prefilled.

    `batch_requests` limits the requests of one forward pass (PrefillOnly's max-num-seqs); None: all that is
    assigned."""
    count = len(trace)
    if not count:
        raise ConfigError("the trace holds no request")
    order = {r.id: i for i, r in enumerate(trace)}
    requests = [Request(r.id, r.prompt_tokens, r.arrival, block_hashes=r.block_hashes) for r in trace]
    workers = [Worker(f"w{i}", count + 1) for i in range(engines.count)]
    caches = [BlockCache(engines.cache_blocks) for _ in workers]
    assigned: list[list[tuple[Request, float]]] = [[] for _ in workers]  # with the load that was booked
    running: list[list[tuple[Request, float]]] = [[] for _ in workers]
    result = PrefillResult(
        np.full(count, np.nan),
        np.array([r.arrival for r in trace]),
        np.zeros(count, dtype=np.int64),
        np.array([r.prompt_tokens for r in trace]),
        np.full(count, -1, dtype=np.int64),
        np.zeros(engines.count),
        0.0,
        0,
        0.0,
    )
    queue: dict[str, Request] = {}
    ends: list[tuple[float, int]] = []
    cursor, now, done = 0, 0.0, 0
    transfer = engines.layer_transfer() * engines.model.num_moe_layers
    index_of = {w.id: i for i, w in enumerate(workers)}
    while done < count:
        while cursor < count and trace[cursor].arrival <= now:
            queue[trace[cursor].id] = requests[cursor]
            cursor += 1
        while ends and ends[0][0] <= now:
            _, engine = heapq.heappop(ends)
            for request, booked in running[engine]:
                evicted = caches[engine].store(request.block_hashes)  # type: ignore[arg-type]
                scheduler.executed(workers[engine].id, booked)
                scheduler.stored(workers[engine].id, request.block_hashes)
                scheduler.evicted(workers[engine].id, evicted)
                result.finished[order[str(request.id)]] = now
            done += len(running[engine])
            running[engine] = []
        before = {w.id: scheduler.load(w.id) for w in workers}
        chosen: list[list[Request]] = [[] for _ in workers]
        for request_id, worker_id in scheduler.schedule(list(queue.values()), workers, now):
            chosen[index_of[worker_id]].append(queue.pop(str(request_id)))
        for engine, batch in enumerate(chosen):
            if batch:
                booked = (scheduler.load(workers[engine].id) - before[workers[engine].id]) / len(batch)
                assigned[engine] += [(request, booked) for request in batch]
        for engine in range(engines.count):
            if assigned[engine] and not running[engine]:
                take = batch_requests or len(assigned[engine])
                running[engine], assigned[engine] = assigned[engine][:take], assigned[engine][take:]
                flops = _run_batch(running[engine], caches[engine], engines, order, result, engine)
                seconds = engines.batch_seconds(flops)
                short = transfer - flops / (engines.flops_per_second * engines.efficiency)
                result.waiting_transfer += max(0.0, short)
                result.busy[engine] += seconds
                result.batches += 1
                result.flops += flops
                heapq.heappush(ends, (now + seconds, engine))
        if done == count:
            break
        moments = [ends[0][0]] if ends else []
        if cursor < count:
            moments.append(trace[cursor].arrival)
        if not moments:
            raise MoEOptError(f"{type(scheduler).__name__} leaves {len(queue)} requests waiting on idle engines")
        now = max(now, min(moments))
    return result


def _run_batch(
    batch: Sequence[tuple[Request, float]],
    cache: BlockCache,
    engines: PrefillEngines,
    order: dict[str, int],
    result: PrefillResult,
    engine: int,
) -> float:
    """FLOPs of one forward pass: a block is computed once, by the first request of the batch that needs
    it."""
    total = 0.0
    fresh: set[int] = set()
    for request, _ in batch:
        chain = request.block_hashes
        blocks = cache.match(chain)  # type: ignore[arg-type]
        while blocks < len(chain) and chain[blocks] in fresh:
            blocks += 1
        cached = max(0, min(blocks * engines.block_tokens, request.prompt_tokens - 1))
        fresh.update(chain[blocks:])  # type: ignore[arg-type]
        row = order[str(request.id)]
        result.cached_tokens[row] = cached
        result.worker[row] = engine
        total += engines.model.prefill(request.prompt_tokens - cached, cached)
    return total
