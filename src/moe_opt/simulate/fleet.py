"""What a simulated fleet is made of: workers, the barriers they share, and what happens to them over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_opt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One decode worker: a data-parallel rank of a group, or an engine of its own."""

    slots: int = 32  # requests that may run at once
    kv_capacity: int | None = None  # KV tokens; None: slots are the only limit
    speed: float = 1.0  # relative to the cost model: 0.5 takes twice as long per step
    group: int = 0  # workers of one group wait for each other at the end of every step

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigError(f"a worker needs at least 1 slot, not {self.slots}")
        if self.kv_capacity is not None and self.kv_capacity < 1:
            raise ConfigError(f"kv_capacity must be at least 1 token, not {self.kv_capacity}")
        if not 0 < self.speed < float("inf"):
            raise ConfigError(f"speed must be a positive number, not {self.speed}")


@dataclass(frozen=True, slots=True)
class Fail:
    """Worker `worker` dies: its requests go back to the pool with the tokens they already have."""

    time: float  # seconds
    worker: int


@dataclass(frozen=True, slots=True)
class Recover:
    """Worker `worker` is back, empty."""

    time: float
    worker: int


@dataclass(frozen=True, slots=True)
class ScaleUp:
    """A worker joins the fleet; its index is the number of workers so far."""

    time: float
    spec: WorkerSpec = field(default_factory=WorkerSpec)


@dataclass(frozen=True, slots=True)
class Drain:
    """Worker `worker` takes nothing new, finishes what it has and leaves (scale down)."""

    time: float
    worker: int


FleetEvent = Fail | Recover | ScaleUp | Drain


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet, how requests reach it, and what happens to it.

    With `pool_depth` the load is heavy and closed: the pool of waiting requests is topped up from the trace
    to that depth at every decision, arrival times are ignored, and the run ends when the trace can no longer
    fill it (BalanceRoute section 6.1). Without it, requests reach the pool at their arrival times.
    """

    workers: tuple[WorkerSpec, ...]
    pool_depth: int | None = None
    transfer_s_per_token: float = 0.0  # KV transfer from prefill, seconds per prompt token; the slot is held
    events: tuple[FleetEvent, ...] = ()
    inflight_margin: int = 0  # requests a worker queues beyond its slots (BR-0's pool bypass, BalanceRoute D.6)

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("a fleet needs at least one worker")
        if self.pool_depth is not None and self.pool_depth < 1:
            raise ConfigError(f"pool_depth must be at least 1, not {self.pool_depth}")
        if self.transfer_s_per_token < 0 or self.inflight_margin < 0:
            raise ConfigError("transfer_s_per_token and inflight_margin must not be negative")
        known = len(self.workers)
        for event in sorted(self.events, key=lambda e: e.time):
            if event.time < 0:
                raise ConfigError(f"event {event} lies before time 0")
            if isinstance(event, ScaleUp):
                known += 1
            elif not 0 <= event.worker < known:
                raise ConfigError(f"event {event}: there is no worker {event.worker} at that time")

    @classmethod
    def uniform(
        cls,
        workers: int,
        slots: int = 32,
        *,
        barrier: bool = True,
        kv_capacity: int | None = None,
        speeds: Sequence[float] | None = None,
        pool_depth: int | None = None,
        transfer_s_per_token: float = 0.0,
        events: Sequence[FleetEvent] = (),
        inflight_margin: int = 0,
    ) -> FleetConfig:
        """`workers` equal workers: one group under a barrier, or each on its own clock."""
        if workers < 1:
            raise ConfigError(f"a fleet needs at least one worker, not {workers}")
        if speeds is not None and len(speeds) != workers:
            raise ConfigError(f"{len(speeds)} speeds for {workers} workers")
        specs = tuple(
            WorkerSpec(slots, kv_capacity, 1.0 if speeds is None else speeds[i], 0 if barrier else i)
            for i in range(workers)
        )
        return cls(specs, pool_depth, transfer_s_per_token, tuple(events), inflight_margin)
