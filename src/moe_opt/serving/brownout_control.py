"""What decides the brownout thresholds of a worker: SLO controllers, an operator, and the experts loader.

BrownoutServe IV-E: one controller for prefill (TTFT), one for decode (TPOT); each decides on the engine's own step
reports, at most once per `period`. A step that holds prefill rows delays the tokens of the decoding rows beside them,
so the prefill threshold is the lower one of both controllers. Without an objective and without an operator every
threshold stays 1: exact output. Torch-free: reading united experts is the loader's business.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from moe_opt.cluster.slo import LatencyController
from moe_opt.errors import ConfigError
from moe_opt.serving.engine.types import BrownoutSetting, EngineClient, StepReport
from moe_opt.serving.telemetry import Metrics

logger = logging.getLogger(__name__)
PHASES = ("prefill", "decode")


@dataclasses.dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives in seconds, None for none, and how their controllers move (`LatencyController`).

    `headroom` is the share of an objective that a controller steers at: its p90 sits just below what it steers at, and
    a tenth of the tokens would sit just above.
    """

    ttft: float | None = None
    tpot: float | None = None
    warning_factor: float = 0.8
    increment: float = 0.1
    shrink_ratio: float = 0.8
    window: float = 2.0
    period: float = 0.5
    headroom: float = 1.0

    def controllers(self) -> dict[str, LatencyController]:
        """One controller per phase that has an objective."""
        return {
            phase: LatencyController(
                slo * self.headroom,
                warning_factor=self.warning_factor,
                increment=self.increment,
                shrink_ratio=self.shrink_ratio,
                window=self.window,
                period=self.period,
            )
            for phase, slo in (("prefill", self.ttft), ("decode", self.tpot))
            if slo is not None
        }


class BrownoutControl:
    """Sets the engine's thresholds; every change takes effect between two steps.

    Args:
        objectives: latency objectives. strategy: brownout strategy to start with, None leaves the engine's own.
        keep: which originals stay, None likewise. available_ways: ways that `load_united` can read.
        load_united: ways -> united experts, called on a thread; None if there is no source.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        objectives: Objectives,
        *,
        available_ways: tuple[int, ...] = (),
        load_united: Callable[[int], Any] | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.objectives = objectives
        self.available_ways = available_ways
        self._load_united = load_united
        self._controllers = objectives.controllers()
        self._held: dict[str, float] = {}  # thresholds that an operator holds
        self._floor = 0.0  # no threshold goes below it, whoever decides; 1 switches brownout off
        self._set: dict[str, float] = {}  # what the engine was last told
        self._decided = -math.inf
        self._lock = threading.Lock()  # step reports come from the engine's thread
        self._changes = asyncio.Lock()  # one change of experts at a time
        for phase, slo in (("prefill", objectives.ttft), ("decode", objectives.tpot)):
            if slo is not None:
                metrics.slo.labels(phase).set(slo)

    # ------------------------------------------------------------- control loop

    def on_step(self, report: StepReport) -> None:
        """Takes in a step's latencies and decides if a period is over. Called on the engine's thread."""
        self.metrics.step(report)
        if not self._controllers:
            return
        with self._lock:
            for phase, slo, samples in (
                ("prefill", self.objectives.ttft, report.ttft),
                ("decode", self.objectives.tpot, report.tpot),
            ):
                controller = self._controllers.get(phase)
                if controller is None or slo is None:
                    continue
                for latency in samples:
                    controller.observe(latency, report.time)
                misses = sum(latency > slo for latency in samples)
                if misses:
                    self.metrics.slo_misses.labels(phase).inc(misses)
        self._decide(report.time)

    async def run(self) -> None:
        """Decides while the engine is idle, so that thresholds rise again without traffic. Runs until cancelled."""
        while True:
            await asyncio.sleep(self.objectives.period / 4)  # a decision just missed must not wait a whole period
            self._decide(time.monotonic())

    def _decide(self, now: float) -> None:
        if now - self._decided < self.objectives.period:
            return  # most steps end here: a percentile per step would cost more than all other metrics
        with self._lock:
            self._decided = now
            for phase, controller in self._controllers.items():
                controller.update(now)
                p90 = controller.p90(now)
                self.metrics.slo_p90.labels(phase).set(float("nan") if p90 is None else p90)
            changes = {phase: value for phase, value in self._wanted().items() if self._set.get(phase, 1.0) != value}
            self._set.update(changes)
        for phase, value in changes.items():
            self.engine.set_brownout_soon(threshold=value, phase=phase)
            self.metrics.threshold.labels(phase).set(value)

    def _wanted(self) -> dict[str, float]:
        """Threshold of each phase that a controller or an operator decides."""
        by_slo = {phase: round(controller.threshold, 6) for phase, controller in self._controllers.items()}
        wanted = dict(by_slo)
        if by_slo:
            wanted["prefill"] = min(by_slo.values())
        wanted.update(self._held)
        return {phase: max(value, self._floor) for phase, value in wanted.items()}

    @property
    def may_brown(self) -> bool:
        """Whether a request that starts now could see a threshold below 1."""
        status = self.engine.brownout()
        by_slo = bool(self._controllers) and self._floor < 1
        return by_slo or status.prefill.threshold < 1 or status.decode.threshold < 1

    # ------------------------------------------------------------- operator

    def status(self) -> dict[str, Any]:
        """What `GET /brownout` answers."""
        now = time.monotonic()
        engine = self.engine.brownout()
        phases = {}
        for phase in PHASES:
            setting: BrownoutSetting = getattr(engine, phase)
            slo = self.objectives.ttft if phase == "prefill" else self.objectives.tpot
            controller = self._controllers.get(phase)
            with self._lock:
                p90 = controller.p90(now) if controller is not None else None
            phases[phase] = {
                "threshold": setting.threshold,
                "strategy": setting.strategy,
                "keep": setting.keep,
                "layers": None if setting.layers is None else list(setting.layers),
                "set_by": "operator" if phase in self._held else ("slo" if self._controllers else "default"),
                "slo_seconds": slo,
                "p90_seconds": p90,
            }
            self.metrics.threshold.labels(phase).set(setting.threshold)
        self.metrics.united_ways.set(engine.ways or 0)
        return {
            **phases,
            "floor": self._floor,
            "united_experts": {"ways": engine.ways, "available_ways": list(self.available_ways)},
        }

    async def apply(
        self,
        *,
        phase: str | None = None,
        threshold: float | str | None = None,
        strategy: str | None = None,
        keep: str | None = None,
        layers: list[int] | None = None,
        ways: int | None = None,
        slo_ttft: float | None = None,
        slo_tpot: float | None = None,
        floor: float | None = None,
    ) -> dict[str, Any]:
        """Carry out one `POST /brownout`; all or nothing.

        Args:
            threshold: in [0, 1], held until told otherwise, or "slo". ways: 0 takes the united experts off.
            floor: in [0, 1], below which no threshold goes, whoever decides it; 1 switches brownout off.
            slo_ttft, slo_tpot: other objectives, seconds; 0 takes an objective away. Their controllers start anew.

        Raises:
            ConfigError: a value that the engine refuses or ways that are not there; nothing has changed then.
        """
        async with self._changes:
            given = {"strategy": strategy, "keep": keep, "layers": layers}
            settings: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
            phases = PHASES if phase is None else (phase,)
            objectives = self._changed_objectives(slo_ttft, slo_tpot)
            if threshold == "slo" and not objectives.controllers():
                raise ConfigError('threshold "slo" needs an objective: start the server with --slo-ttft or --slo-tpot')
            before = self.engine.brownout()
            self._check_strategy(objectives, strategy, before.ways if ways is None else ways)
            if ways is not None:
                await self._swap(ways, before.ways)
            try:
                if isinstance(threshold, (int, float)):
                    settings["threshold"] = max(float(threshold), self._floor if floor is None else floor)
                if settings:
                    await self.engine.set_brownout(phase=phase, **settings)
            except ConfigError:
                if ways is not None:
                    await self._swap(before.ways or 0, ways)
                raise
            with self._lock:
                for name in phases:
                    if threshold == "slo":
                        self._held.pop(name, None)
                    elif threshold is not None:
                        self._held[name] = self._set[name] = float(threshold)
                after = self.engine.brownout()  # taking united experts off may have returned a phase to 1
                for name in PHASES:
                    self._set[name] = getattr(after, name).threshold
                    if name in self._held and self._set[name] > max(self._held[name], self._floor):
                        self._held[name] = self._set[name]
            if floor is not None:
                await self._set_floor(floor)
            if objectives != self.objectives:
                await self._set_objectives(objectives)
            if threshold == "slo":
                self._decided = -math.inf
                self._decide(time.monotonic())
            logger.info("brownout changed: %s", {**settings, "phase": phase, "ways": ways, "slo": objectives})
            return self.status()

    def _changed_objectives(self, ttft: float | None, tpot: float | None) -> Objectives:
        """The objectives with what is given replaced; 0 stands for none."""
        changes: dict[str, Any] = {
            key: value or None for key, value in (("ttft", ttft), ("tpot", tpot)) if value is not None
        }
        objectives = dataclasses.replace(self.objectives, **changes)
        objectives.controllers()  # refuses what is out of range
        return objectives

    def _check_strategy(self, objectives: Objectives, strategy: str | None, ways: int | None) -> None:
        """An objective must not be left with a strategy that has nothing to delegate to."""
        if ways or not objectives.controllers():
            return
        engine = self.engine.brownout()
        if any((strategy or getattr(engine, phase).strategy) == "partial" for phase in PHASES):
            raise ConfigError(
                "a latency objective is set and strategy 'partial' needs united experts: name another strategy, for "
                "instance 'reroute'"
            )

    async def _set_objectives(self, objectives: Objectives) -> None:
        fresh = objectives.controllers()
        with self._lock:
            for phase, old, new in (
                ("prefill", self.objectives.ttft, objectives.ttft),
                ("decode", self.objectives.tpot, objectives.tpot),
            ):
                if old == new and phase in self._controllers:
                    fresh[phase] = self._controllers[phase]
                self.metrics.slo.labels(phase).set(new if new is not None else float("nan"))
            self.objectives = objectives
            self._controllers = fresh
            free = [phase for phase in PHASES if phase not in self._held and phase not in self._wanted()]
            self._set.update(dict.fromkeys(free, 1.0))
        for phase in free:  # nobody decides about this phase any more
            await self.engine.set_brownout(threshold=1.0, phase=phase)

    async def _set_floor(self, floor: float) -> None:
        with self._lock:
            self._floor = floor
            wanted = self._wanted()
            self._set.update(wanted)
        for phase, value in wanted.items():
            await self.engine.set_brownout(threshold=value, phase=phase)
            self.metrics.threshold.labels(phase).set(value)

    async def _swap(self, ways: int, current: int | None) -> None:
        """Exchange united experts: read on a thread, attach between two steps."""
        if ways == (current or 0):
            return
        if ways == 0:
            await self.engine.swap_united(None)
            return
        if self._load_united is None or ways not in self.available_ways:
            there = ", ".join(map(str, self.available_ways)) or "none"
            raise ConfigError(f"no {ways}-way united experts to load; available ways: {there} (--united-experts)")
        united = await asyncio.get_running_loop().run_in_executor(None, self._load_united, ways)
        await self.engine.swap_united(united)
