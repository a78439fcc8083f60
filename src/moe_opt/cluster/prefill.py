"""Prefill scheduling: co-locate prompts that share a prefix, count load in true FLOPs, stop at saturation.

MoE-Prefill, Section 7 and Appendix B.2: per worker a committed and a promised block table, a FLOPs counter,
and one pass over the queue. `prefill_baselines.py` has what the paper compares it with, on the same tables.

The scheduler keeps the shadow state itself, because no caller's worker knows what was promised: tell it what
the engines report (`stored`, `evicted`, `executed`) and what will never happen (`cancelled`, `removed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from moe_opt.cluster.state import Assignment, Request, Worker
from moe_opt.errors import ConfigError

Cost = Callable[[int, int], float]
"""(suffix_tokens, cached_tokens) -> FLOPs, e.g. `FlopsModel.prefill`."""

KAPPA = 1.2
"""Safety margin of the saturation threshold. The paper's default is lost in our copy of it; this one is ours."""

BLOCK_TOKENS = 16
"""Tokens per block of `Request.block_hashes` unless told otherwise (MoE-Prefill, Section 7.2: "e.g., 16")."""


def saturation_from_transfers(peak_flops: float, transfer_seconds: Iterable[float], kappa: float = KAPPA) -> float:
    """C = kappa * P_peak * sum_l T_transfer(l), FLOPs (MoE-Prefill, Eq. 1).

    The equation is per layer; it is summed because a worker's load is counted in FLOPs of the whole model.

    Args:
        peak_flops: FLOP/s of one worker at the deployed precision.
        transfer_seconds: per layer, the time of its slowest expert transfer (AllGather, or PCIe where
            offloaded).
        kappa: safety margin.
    """
    times = [float(seconds) for seconds in transfer_seconds]
    if not peak_flops > 0 or not kappa > 0 or any(not (0 <= seconds < math.inf) for seconds in times):
        raise ConfigError("peak_flops and kappa must be positive, transfer times 0 or more seconds")
    return kappa * peak_flops * math.fsum(times)


def saturation_from_calibration(
    reference_flops: float, layer_seconds: Sequence[float] = (), kappa: float = KAPPA
) -> float:
    """C = kappa * max(1, max_l T_l / T_0) * F_ref, FLOPs (MoE-Prefill, Eq. 3); kappa * F_ref until calibrated.

    Args:
        reference_flops: F_ref, FLOPs of one forward pass at the largest batch.
        layer_seconds: measured time of each MoE layer in that pass; the first, T_0, is the one whose experts
            are replicated on every worker, so that its time is compute alone. Empty: not calibrated yet.
        kappa: safety margin.
    """
    if not reference_flops > 0 or not kappa > 0 or any(not (0 < s < math.inf) for s in layer_seconds):
        raise ConfigError("reference_flops, kappa and layer times must be positive")
    slowdown = max(1.0, max(layer_seconds) / layer_seconds[0]) if layer_seconds else 1.0
    return kappa * slowdown * reference_flops


def token_cost(suffix_tokens: int, cached_tokens: int) -> float:
    """Load in tokens instead of FLOPs: the fallback for models whose config lacks the fields (B.4)."""
    return float(suffix_tokens)


@dataclass(slots=True)
class _Shadow:
    """What the router believes about one worker."""

    bit: int  # its place in the masks of the block index
    load: float = 0.0  # FLOPs assigned and not yet executed, W_g
    committed: set[Hashable] = field(default_factory=set)
    promised: dict[Hashable, int] = field(default_factory=dict)  # block -> requests under way that will store it


class PrefillScheduler:
    """Longest prefix first, true FLOPs, up to saturation (MoE-Prefill, Algorithm 1).

    A round takes the queue in order. Each request goes to the worker below the saturation threshold that has
    most of its prefix, committed or promised; ties, and requests that match nowhere, go to the least load,
    then to the earlier worker. Its cost (Eq. 2) is added to the load and its blocks are promised. A worker at
    the threshold is closed until enough has been executed; a prefix whose worker closes spills to the next
    best match by the same rule. What is not assigned stays with the caller, who asks again.

    Args:
        cost: FLOPs of `suffix_tokens` on top of `cached_tokens`. Eq. 2 splits the suffix in two, flops(p - c
            | c) + flops(s | p): with additive attention FLOPs that is flops(p - c + s | c), one call.
        saturation: C in the unit of `cost`: `saturation_from_transfers`, `saturation_from_calibration`, or a
            number that the operator pins; infinity never closes a worker.
        block_tokens: tokens per entry of `Request.block_hashes`.

    Raises:
        ConfigError: a saturation or block size that is not positive.
    """

    def __init__(self, cost: Cost, saturation: float, block_tokens: int = BLOCK_TOKENS):
        if not saturation > 0:
            raise ConfigError(f"saturation must be positive, got {saturation!r}")
        if block_tokens < 1:
            raise ConfigError(f"block_tokens must be at least 1, got {block_tokens!r}")
        self.cost = cost
        self.saturation = saturation
        self.block_tokens = block_tokens
        self._shadows: dict[Hashable, _Shadow] = {}
        self._holders: dict[Hashable, int] = {}  # block -> bit mask of the workers that have it or will
        self._free_bits: list[int] = []

    # What the router decides.

    def schedule(self, queue: Sequence[Request], workers: Sequence[Worker], now: float = 0.0) -> list[Assignment]:
        """One round over `queue`, in its order; draining workers get nothing.

        A request id is assigned once in a round, and not at all while a worker runs it. `now`, seconds on the
        caller's clock, is for baselines that age requests.
        """
        open_workers = self._open_workers(workers)
        assignments: list[Assignment] = []
        for request in waiting_of(queue, workers):
            if not open_workers:
                break
            assignments.append(self._assign(request, open_workers))
        return assignments

    # What the engines report.

    def stored(self, worker_id: Hashable, block_hashes: Iterable[Hashable]) -> None:
        """The engine stored these blocks: promises become committed. Blocks nobody promised are committed too."""
        shadow = self._shadow(worker_id)
        for block in block_hashes:
            shadow.promised.pop(block, None)
            shadow.committed.add(block)
            self._holders[block] = self._holders.get(block, 0) | 1 << shadow.bit

    def evicted(self, worker_id: Hashable, block_hashes: Iterable[Hashable]) -> None:
        """The engine dropped these blocks. One that a request under way will store again stays promised."""
        shadow = self._shadow(worker_id)
        for block in block_hashes:
            shadow.committed.discard(block)
            self._release_if_gone(block, shadow)

    def executed(self, worker_id: Hashable, flops: float) -> None:
        """The worker executed this much: its load falls, not below 0, and it reopens below the threshold.

        Raises:
            ConfigError: a negative number or NaN.
        """
        if not flops >= 0:
            raise ConfigError(f"executed work must be 0 or more, got {flops!r}")
        shadow = self._shadow(worker_id)
        shadow.load = max(0.0, shadow.load - flops)

    def cancelled(self, worker_id: Hashable, request: Request, flops: float = 0.0) -> None:
        """An assigned request will not run (to its end): its promises go, and `flops` of load with them."""
        shadow = self._shadow(worker_id)
        for block in dict.fromkeys(request.block_hashes):
            if block in shadow.promised:
                shadow.promised[block] -= 1
                if not shadow.promised[block]:
                    del shadow.promised[block]
                    self._release_if_gone(block, shadow)
        self.executed(worker_id, flops)

    def removed(self, worker_id: Hashable) -> None:
        """The worker is gone, with its cache and its load. It may come back under the same id, empty."""
        shadow = self._shadows.pop(worker_id, None)
        if shadow is None:
            return
        for block in [*shadow.committed, *shadow.promised]:
            self._drop_bit(block, shadow.bit)
        self._free_bits.append(shadow.bit)

    # What can be seen from outside.

    def load(self, worker_id: Hashable) -> float:
        """FLOPs assigned to the worker and not yet executed."""
        shadow = self._shadows.get(worker_id)
        return shadow.load if shadow else 0.0

    def saturated(self, worker_id: Hashable) -> bool:
        """Whether the worker is closed: its load has reached the threshold."""
        return self.load(worker_id) >= self._limit()

    def matched_blocks(self, worker_id: Hashable, block_hashes: Sequence[Hashable]) -> int:
        """Leading blocks of the chain that the worker has, committed or promised."""
        shadow = self._shadows.get(worker_id)
        if shadow is None:
            return 0
        for matched, block in enumerate(block_hashes):
            if not self._holders.get(block, 0) >> shadow.bit & 1:
                return matched
        return len(block_hashes)

    def cached_tokens(self, request: Request, blocks: int) -> int:
        """Tokens of the prompt that need no forward pass: at least its last one does, for the logits."""
        return max(0, min(blocks * self.block_tokens, request.prompt_tokens - 1))

    def estimate(self, request: Request, cached_tokens: int) -> float:
        """Eq. 2: what the request costs where `cached_tokens` of its prompt are there.

        Raises:
            ConfigError: the cost function gave a negative number, NaN or infinity.
        """
        flops = float(self.cost(request.prompt_tokens - cached_tokens, cached_tokens))
        if not 0 <= flops < math.inf:
            raise ConfigError(f"cost({request.prompt_tokens - cached_tokens}, {cached_tokens}) is {flops!r}")
        return flops

    # Inside.

    def _choose(self, request: Request, open_workers: dict[Hashable, int]) -> tuple[Hashable, int]:
        """The worker for a request and the leading blocks it has: longest prefix, least load, earliest.

        One walk along the chain over bit masks of workers, whatever their number.
        """
        mask = 0
        for worker_id in open_workers:
            mask |= 1 << self._shadows[worker_id].bit
        blocks = 0
        for block in request.block_hashes:
            holders = mask & self._holders.get(block, 0)
            if not holders:
                break
            mask = holders
            blocks += 1
        best, best_key = None, (math.inf, 0)
        for worker_id, order in open_workers.items():
            shadow = self._shadows[worker_id]
            if mask >> shadow.bit & 1 and (best is None or (shadow.load, order) < best_key):
                best, best_key = worker_id, (shadow.load, order)
        return best, blocks

    def _limit(self) -> float:
        """Load at which a worker closes."""
        return self.saturation

    def _open_workers(self, workers: Sequence[Worker]) -> dict[Hashable, int]:
        """Ids of workers that may get work -> place in this call."""
        if len({worker.id for worker in workers}) != len(workers):
            raise ConfigError(f"worker ids must differ, got {[worker.id for worker in workers]}")
        return {
            worker.id: order
            for order, worker in enumerate(workers)
            if not worker.draining and self._shadow(worker.id).load < self._limit()
        }

    def _assign(self, request: Request, open_workers: dict[Hashable, int]) -> Assignment:
        """Books the request on the chosen worker; closes that one if it is saturated now."""
        worker_id, blocks = self._choose(request, open_workers)
        shadow = self._shadows[worker_id]
        shadow.load += self.estimate(request, self.cached_tokens(request, blocks))
        for block in dict.fromkeys(request.block_hashes):
            if block not in shadow.committed:
                shadow.promised[block] = shadow.promised.get(block, 0) + 1
                self._holders[block] = self._holders.get(block, 0) | 1 << shadow.bit
        if shadow.load >= self._limit():
            del open_workers[worker_id]
        return Assignment(request.id, worker_id)

    def _shadow(self, worker_id: Hashable) -> _Shadow:
        shadow = self._shadows.get(worker_id)
        if shadow is None:
            bit = self._free_bits.pop() if self._free_bits else len(self._shadows)
            shadow = self._shadows[worker_id] = _Shadow(bit)
        return shadow

    def _release_if_gone(self, block: Hashable, shadow: _Shadow) -> None:
        if block not in shadow.committed and block not in shadow.promised:
            self._drop_bit(block, shadow.bit)

    def _drop_bit(self, block: Hashable, bit: int) -> None:
        left = self._holders.get(block, 0) & ~(1 << bit)
        if left:
            self._holders[block] = left
        else:
            self._holders.pop(block, None)


def waiting_of(queue: Sequence[Request], workers: Sequence[Worker]) -> list[Request]:
    """The queue without repeats and without what runs already."""
    first = {request.id: request for request in reversed(queue)}
    running = set().union(*(first.keys() & worker.running.keys() for worker in workers))
    return [request for request in queue if first[request.id] is request and request.id not in running]
