"""BalanceRoute: keep the KV load of data-parallel workers level, as every decode step waits for the heaviest.

BR-0 looks at the current step (Section 3); BR-H at the next H steps, with what a predictor says about who
leaves (Section 4). BR-0 is BR-H at H = 0, alpha = 1, beta = K, so one tick serves both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from moe_opt.cluster.policies.base import Policy, in_arrival_order
from moe_opt.cluster.policies.projection import Floats, Ints, Projection
from moe_opt.cluster.policies.subsets import AdmissionScore, SortedLoads, best_single, best_subset
from moe_opt.cluster.predictors import Predictor, make_predictor
from moe_opt.cluster.predictors.tracker import RemainingTracker
from moe_opt.cluster.state import Assignment, Request, Worker
from moe_opt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """The constants of BR-0 and BR-H; None means the number of workers."""

    horizon: int = 0  # H, decode steps
    gamma: float = 1.0
    alpha: float = 1.0
    beta: float | None = None
    candidates: int = 8  # R, the oldest waiting requests that Stage 2 considers
    subset_size: int = 4  # most requests admitted to one worker at a time
    pool_bound: int | None = None
    patience: float | None = None  # seconds after which the oldest request goes first; None: F alone decides

    def __post_init__(self) -> None:
        for name, value, least in (
            ("horizon", self.horizon, 0),
            ("candidates", self.candidates, 1),
            ("subset_size", self.subset_size, 1),
            ("pool_bound", self.pool_bound, 0),
            ("patience", self.patience, 0),
            ("beta", self.beta, 0),
            ("gamma", self.gamma, 0),
        ):
            if value is not None and not value >= least:
                raise ConfigError(f"{name} must be {least} or more, got {value!r}")
        if not self.alpha > 0:
            raise ConfigError(f"alpha must be above 0, got {self.alpha!r}")
        if self.gamma > 1:
            raise ConfigError(f"gamma must be at most 1, got {self.gamma!r}")

    def pool_bound_of(self, num_workers: int) -> int:
        """Stage 1 runs while more slots than this are free."""
        return num_workers if self.pool_bound is None else self.pool_bound


class Band:
    """Which workers each waiting request may go to: here, to all. See `compose.LocalityBand`."""

    restricts = False

    def members(self, worker: int, positions: Ints) -> np.ndarray:
        """Whether the request at each queue position may go to ``worker`` now: booleans."""
        return np.ones(len(positions), dtype=bool)

    def update(self, worker: int, fleet: Projection) -> bool:
        """``worker`` has taken something. True if others may now take requests that they could not before."""
        return False


EVERYWHERE = Band()


class BalanceTick:
    """One scheduling round over a queue in arrival order (Algorithms 2 and 3)."""

    def __init__(
        self,
        queue: Sequence[Request],
        fleet: Projection,
        settings: BalanceSettings,
        now: float,
        band: Band = EVERYWHERE,
    ):
        count = len(fleet.workers)
        self._queue = queue
        self._fleet = fleet
        self._band = band
        self._beta = float(count) if settings.beta is None else settings.beta
        self._pool_bound = settings.pool_bound_of(count)
        self._candidates = settings.candidates
        self._subset_size = settings.subset_size
        self._weights: Floats = settings.gamma**fleet.steps_ahead
        self._gain = settings.alpha * float(self._weights.sum())
        self._tokens: Floats = np.array([request.prompt_tokens for request in queue], dtype=np.float64)
        self._pending: Ints = np.arange(len(queue))  # queue positions that still wait, oldest first
        self._places: Ints = np.arange(len(queue))
        self._slots: Ints = fleet.free.copy()  # of the workers that can still take some of what waits
        self._free_slots = int(self._slots.sum())
        self._restricted = fleet.has_limits or band.restricts  # not every request may go anywhere
        self._assignments: list[Assignment] = []
        self._overdue = 0  # that many queue positions have waited beyond their patience
        if settings.patience is not None:
            self._overdue = bisect_left(queue, now - settings.patience, key=attrgetter("arrival"))

    def run(self) -> list[Assignment]:
        """Stage 1 while slots abound, then Stage 2."""
        if not self._restricted and not self._overdue and self._free_slots > self._pool_bound:
            self._fill()
        while self._pending.size:
            worker = self._next_worker()
            if worker is None:
                break
            abundant = self._free_slots > self._pool_bound
            places = self._eligible(worker, None if abundant else self._candidates)
            if not places.size:
                self._set_slots(worker, 0)
                continue
            if self._pending[places[0]] < self._overdue:
                chosen: Sequence[int] = (0,)
            else:
                size = 1 if abundant else min(self._subset_size, int(self._slots[worker]))
                chosen = self._choose(worker, self._tokens[self._pending[places]], size)
            taken = [int(places[index]) for index in chosen]
            self._admit(worker, [int(self._pending[place]) for place in taken])
            for place in reversed(taken):
                self._pending[1 : place + 1] = self._pending[:place]
                self._pending = self._pending[1:]
        return self._assignments

    def _fill(self) -> None:
        """Stage 1 where every request may go anywhere: the queue is sorted by load once, then bisected."""
        waiting = SortedLoads(self._tokens)
        while len(waiting) and self._free_slots > self._pool_bound:
            worker = self._next_worker()
            if worker is None:
                break
            self._admit(worker, [waiting.pop_best(self._score(worker))])
        self._pending = np.array(waiting.rest(), dtype=np.int64)

    def _next_worker(self) -> int | None:
        """Head of the priority queue: most free slots, then largest margin, then first in order."""
        most = np.maximum.reduce(self._slots)
        if most == 0:
            return None
        return int(np.where(self._slots == most, self._fleet.smallest_margins, -1.0).argmax())

    def _eligible(self, worker: int, at_most: int | None) -> Ints:
        """Places in ``pending`` of the oldest requests that ``worker`` may take."""
        if not self._restricted:
            return self._places[: self._pending.size][:at_most]
        allowed = self._tokens[self._pending] <= self._fleet.room[worker]
        if self._band.restricts:
            allowed &= self._band.members(worker, self._pending)
        return np.flatnonzero(allowed)[:at_most]

    def _score(self, worker: int) -> AdmissionScore:
        return AdmissionScore(self._fleet.margins(worker), self._weights, self._gain, self._beta)

    def _choose(self, worker: int, loads: Floats, size: int) -> Sequence[int]:
        """Which of the candidates ``worker`` takes now: up to ``size``, at least one so that nothing
        starves."""
        score = self._score(worker)
        if size > 1:
            best = best_subset(loads, score, size, float(self._fleet.room[worker]))
            if best is not None and best.score > 0:
                return best.positions
        return (best_single(loads, score),)

    def _admit(self, worker: int, positions: list[int]) -> None:
        requests = [self._queue[position] for position in positions]
        self._fleet.admit(worker, requests, positions)
        worker_id = self._fleet.workers[worker].id
        for request in requests:
            self._assignments.append(Assignment(request.id, worker_id))
        self._set_slots(worker, int(self._fleet.free[worker]))
        if self._band.restricts and self._band.update(worker, self._fleet):
            self._slots[:] = self._fleet.free  # those that could take nothing may take something now
            self._free_slots = int(self._slots.sum())

    def _set_slots(self, worker: int, slots: int) -> None:
        self._free_slots += slots - int(self._slots[worker])
        self._slots[worker] = slots


class BalanceRouteHPolicy(Policy):
    """BR-H: admits what brings workers closest to the heaviest over the next H steps, and not beyond it."""

    def __init__(
        self,
        seed: int = 0,
        predictor: str | Predictor | None = None,
        horizon: int = 48,
        gamma: float = 0.9,
        alpha: float = 1.0,
        beta: float | None = None,
        candidates: int = 8,
        subset_size: int = 4,
        pool_bound: int | None = None,
        refresh_every: int = 16,
        patience: float | None = None,
    ):
        """See `BalanceSettings`; ``refresh_every`` is in generated tokens, ``seed`` goes to the learned
        predictor.

        Without a predictor (or with "oracle") ``RunningRequest.remaining`` is read where it is given.
        """
        self._settings = BalanceSettings(horizon, gamma, alpha, beta, candidates, subset_size, pool_bound, patience)
        self.predictor = make_predictor(predictor, seed)
        self._tracker = None if self.predictor is None else RemainingTracker(self.predictor, horizon, refresh_every)

    def assign(self, waiting: Sequence[Request], workers: Sequence[Worker], now: float) -> list[Assignment]:
        slots = sum(worker.free_slots for worker in workers)
        if not waiting or not slots:
            return []
        queue = in_arrival_order(waiting, workers)
        # Stage 2 admits nothing behind the first `slots + candidates`; Stage 1 may admit anyone.
        abundant = slots > self._settings.pool_bound_of(len(workers))
        newcomers = queue if abundant else queue[: slots + self._settings.candidates]
        fleet = Projection(workers, self._settings.horizon, self._tracker, newcomers)
        return BalanceTick(queue, fleet, self._settings, now, self._band(queue, fleet)).run()

    def observe_finished(self, request: Request, generated: int) -> None:
        if self.predictor is not None:
            self.predictor.observe(request, generated)
        if self._tracker is not None:
            self._tracker.forget(request.id)

    def _band(self, queue: Sequence[Request], fleet: Projection) -> Band:
        return EVERYWHERE


class BalanceRoute0Policy(Policy):
    """BR-0: admits what brings workers closest to the heaviest now, and not beyond it. No prediction."""

    def __init__(
        self,
        candidates: int = 8,
        subset_size: int = 4,
        pool_bound: int | None = None,
        patience: float | None = None,
        pool_bypass: bool = False,
        bypass_margin: int = 1,
    ):
        """``pool_bypass`` sends requests on at once (D.6), up to ``bypass_margin`` beyond ``max_running``.

        The worker's own queue then holds them until a slot is free, and their KV transfer overlaps with
        that wait.
        """
        self._settings = BalanceSettings(
            candidates=candidates, subset_size=subset_size, pool_bound=pool_bound, patience=patience
        )
        if bypass_margin < 0:
            raise ConfigError(f"bypass_margin must be 0 or more, got {bypass_margin}")
        self._bypass = pool_bypass
        self._extra_slots = bypass_margin if pool_bypass else 0

    def assign(self, waiting: Sequence[Request], workers: Sequence[Worker], now: float) -> list[Assignment]:
        if not waiting:
            return []
        fleet = Projection(workers, extra_slots=self._extra_slots)
        if not fleet.free.any():
            return []
        queue = in_arrival_order(waiting, workers)
        if self._bypass:
            return self._assign_at_once(queue, fleet)
        return BalanceTick(queue, fleet, self._settings, now, self._band(queue, fleet)).run()

    def _assign_at_once(self, queue: Sequence[Request], fleet: Projection) -> list[Assignment]:
        """Each request, oldest first, to the worker of highest F: the one that it overflows least."""
        assignments = []
        for request in queue:
            able = np.flatnonzero((fleet.free > 0) & (fleet.room >= request.prompt_tokens))
            if able.size:
                margins = fleet.smallest_margins[able]
                overflow = np.maximum(request.prompt_tokens - margins, 0.0)
                # F = D - K * overflow; among workers that are equal in F, the lightest.
                chosen = int(able[np.lexsort((-margins, overflow))[0]])
                fleet.admit(chosen, [request], [0])
                assignments.append(Assignment(request.id, fleet.workers[chosen].id))
        return assignments

    def _band(self, queue: Sequence[Request], fleet: Projection) -> Band:
        return EVERYWHERE
