"""How level could the loads have been? Hindsight assignment by local search over short windows.

The planner knows every output length, of running and of waiting requests. In a window of `window` steps it
knows which slots fall free when; it chooses which waiting request refills each of them, so that the mean
spread (max - min KV load) over the window is least. It starts from a greedy plan, improves it by exchanging
two requests of the plan or one of the plan with one that still waits, carries out the first `commit` steps,
and plans again.

Like the routers it serves a closed pool under a barrier, never leaves a slot free and never moves a
request. The result is the best plan found, not a proven optimum: the true optimum lies at or below it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_opt.errors import ConfigError
from moe_opt.workloads import TraceRequest


@dataclass(frozen=True, slots=True)
class ClairvoyantResult:
    """Spread of the loads (KV tokens) at every step of the hindsight plan."""

    spread: NDArray[np.float64]  # [steps]
    improvements: int  # exchanges that the local search accepted

    def imbalance(self, warmup_steps: int = 0) -> float:
        """Mean spread after the warm-up, as `SimResult.imbalance` defines it."""
        return float(self.spread[warmup_steps:].mean())


class _Window:
    """Loads over the next steps: a base of running requests, plus a sequence of refills in the order of
    use."""

    def __init__(self, running: list[tuple[int, int, int]], workers: int, steps: int):
        """`running` holds (worker, KV tokens now, steps left)."""
        self.workers, self.steps = workers, steps
        self._jump = [0.0] * ((steps + 1) * workers)  # first difference of the loads, beside the slope
        self._slope = [0.0] * ((steps + 1) * workers)  # requests that grow by one token a step
        self._free: list[tuple[int, int]] = []  # (step, worker) of slots that fall free
        for worker, kv, left in running:
            self._put(self._jump, self._slope, worker, 0, kv, left)
            if left < steps:
                self._free.append((left, worker))
        self._free.sort()

    def _put(self, jump: list[float], slope: list[float], worker: int, start: int, kv: int, left: int) -> None:
        """A request of `kv` tokens at step `start` that runs for `left` steps."""
        at = start * self.workers + worker
        jump[at] += kv
        slope[at] += 1
        end = start + left
        if end < self.steps:
            at = end * self.workers + worker
            jump[at] -= kv + left
            slope[at] -= 1

    def loads(self, jump: list[float], slope: list[float]) -> NDArray[np.float64]:
        """[steps, workers] KV loads. Growth starts one step after a request does."""
        shape = (self.steps + 1, self.workers)
        growth = np.array(slope).reshape(shape).cumsum(axis=0)
        level = np.array(jump).reshape(shape)
        level[1:] += growth[:-1]
        return level.cumsum(axis=0)[: self.steps]

    def evaluate(
        self, order: Sequence[int], prompts: Sequence[int], outputs: Sequence[int], reach: int
    ) -> tuple[float, list[tuple[int, int, int]]]:
        """Mean spread and refills (step, worker, request) if free slots take `order` one by one.

        Infinite where a request is used that lies beyond the first `reach` waiting ones at that moment.
        """
        jump, slope = self._jump.copy(), self._slope.copy()
        free = self._free.copy()
        refills: list[tuple[int, int, int]] = []
        skipped: set[int] = set()  # requests older than the youngest used one, still waiting
        youngest = -1
        for request in order:
            if not free:
                break
            step, worker = heapq.heappop(free)
            if request > youngest:
                skipped.update(range(youngest + 1, request))
                youngest = request
                if len(skipped) >= reach:
                    return float("inf"), refills
            else:
                skipped.discard(request)
            left = outputs[request]
            self._put(jump, slope, worker, step, prompts[request], left)
            if step + left < self.steps:
                heapq.heappush(free, (step + left, worker))
            refills.append((step, worker, request))
        loads = self.loads(jump, slope)
        return float((loads.max(axis=1) - loads.min(axis=1)).mean()), refills

    def greedy(self, prompts: Sequence[int], outputs: Sequence[int], reach: int, typical: float) -> list[int]:
        """Refill slots as they fall free, each with the waiting request that keeps the window most level.

        Slots that fall free later count as refilled with a request of `typical` tokens.
        """
        jump, slope = self._jump.copy(), self._slope.copy()
        free = self._free.copy()
        for step, worker in free:
            self._put(jump, slope, worker, step, round(typical), self.steps)
        loads = self.loads(jump, slope)
        waiting = list(range(min(len(prompts), reach)))
        following = len(waiting)
        order: list[int] = []
        index = np.arange(self.steps)
        while free and waiting:
            step, worker = heapq.heappop(free)
            rows = loads[step:]
            others = np.delete(rows, worker, axis=1) if self.workers > 1 else rows
            high, low = others.max(axis=1), others.min(axis=1)
            own = rows[:, worker] - (typical + index[: self.steps - step])
            kv = np.array([prompts[r] for r in waiting])[:, None]
            age = index[: self.steps - step][None, :]
            # a request that ends within the window is followed by a typical one
            ended = age >= np.array([outputs[r] for r in waiting])[:, None]
            trial = own + np.where(ended, typical, kv + age)
            cost = (np.maximum(trial, high) - np.minimum(trial, low)).mean(axis=1)
            best = int(cost.argmin())
            request = waiting.pop(best)
            order.append(request)
            if following < len(prompts):
                waiting.append(following)
                following += 1
            loads[step:, worker] = trial[best]
            if step + outputs[request] < self.steps:
                heapq.heappush(free, (step + outputs[request], worker))
        return order


def _search(
    window: _Window,
    order: list[int],
    pool: int,
    prompts: Sequence[int],
    outputs: Sequence[int],
    reach: int,
    tries: int,
    rng: np.random.Generator,
) -> tuple[list[tuple[int, int, int]], int]:
    """Exchange two requests of the plan, or one of it with a waiting one, while that lowers the spread."""
    order = order + [r for r in range(pool) if r not in set(order)]
    cost, refills = window.evaluate(order, prompts, outputs, reach)
    accepted = 0
    for _ in range(tries):
        used = len(refills)
        if used == 0:
            break
        first = int(rng.integers(used))
        span = min(len(order), used + min(reach, 32))
        second = int(rng.integers(span))
        if first == second:
            continue
        order[first], order[second] = order[second], order[first]
        trial, trial_refills = window.evaluate(order, prompts, outputs, reach)
        if trial < cost:
            cost, refills = trial, trial_refills
            accepted += 1
        else:
            order[first], order[second] = order[second], order[first]
    return refills, accepted


def clairvoyant(
    trace: Sequence[TraceRequest],
    workers: int,
    slots: int,
    *,
    pool_depth: int,
    steps: int,
    candidates: int | None = None,
    window: int = 48,
    commit: int = 16,
    tries: int = 400,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ClairvoyantResult:
    """Hindsight plan for `steps` barrier steps of a closed pool; ends earlier if the trace runs out.

    `candidates` limits each choice to the oldest so many waiting requests, as BalanceRoute's Stage 2 is
    limited; None opens the whole pool."""
    if not 1 <= commit <= window:
        raise ConfigError(f"commit must lie between 1 and window ({window}), not {commit}")
    if workers < 2 or slots < 1 or pool_depth < 1:
        raise ConfigError("clairvoyant: needs at least 2 workers, 1 slot and a pool of 1")
    reach = pool_depth if candidates is None else min(candidates, pool_depth)
    rng = np.random.default_rng(seed)
    cursor = workers * slots
    if len(trace) <= cursor + pool_depth:
        raise ConfigError("clairvoyant: the trace is too short for the fleet and the pool")
    running = [(i % workers, r.prompt_tokens, r.output_tokens) for i, r in enumerate(trace[:cursor])]
    typical = float(np.mean([r.prompt_tokens for r in trace]))
    # admission order within the trace: positions still waiting, oldest first
    waiting = list(range(cursor, min(len(trace), cursor + pool_depth)))
    cursor = waiting[-1] + 1
    spreads: list[NDArray[np.float64]] = []
    done = accepted = 0
    while done < steps and cursor < len(trace):
        view = _Window(running, workers, window)
        expected = sum(left < window for _, _, left in running)
        # the pool is topped up as it is drawn from: what enters it during the window is known too
        ahead = waiting + list(range(cursor, min(len(trace), cursor + 2 * expected + 8)))
        prompts = [trace[i].prompt_tokens for i in ahead]
        outputs = [trace[i].output_tokens for i in ahead]
        order = view.greedy(prompts, outputs, reach, typical)
        refills, wins = _search(view, order, len(ahead), prompts, outputs, reach, tries, rng)
        accepted += wins
        running, spread = _carry_out(running, refills, prompts, outputs, workers, commit)
        used = {request for step, _, request in refills if step < commit}
        spreads.append(spread)
        done += commit
        waiting = [i for position, i in enumerate(ahead) if position not in used][:pool_depth]
        cursor = max(cursor, waiting[-1] + 1) if waiting else len(trace)
        while len(waiting) < pool_depth and cursor < len(trace):
            waiting.append(cursor)
            cursor += 1
        if progress is not None:
            progress(min(done, steps))
    return ClairvoyantResult(np.concatenate(spreads)[:steps], accepted)


def _carry_out(
    running: list[tuple[int, int, int]],
    refills: list[tuple[int, int, int]],
    prompts: Sequence[int],
    outputs: Sequence[int],
    workers: int,
    commit: int,
) -> tuple[list[tuple[int, int, int]], NDArray[np.float64]]:
    """The first `commit` steps of a plan: what runs afterwards, and the spread at each step."""
    view = _Window([], workers, commit)
    jump, slope = [0.0] * ((commit + 1) * workers), [0.0] * ((commit + 1) * workers)
    after: list[tuple[int, int, int]] = []
    starts = [(0, worker, kv, left) for worker, kv, left in running]
    starts += [(step, worker, prompts[r], outputs[r]) for step, worker, r in refills if step < commit]
    for step, worker, kv, left in starts:
        view._put(jump, slope, worker, step, kv, left)
        age = commit - step
        if left > age:
            after.append((worker, kv + age, left - age))
        elif left == age:
            after.append((worker, kv + age, 0))  # ends on the boundary: its slot is the next window's first
    loads = view.loads(jump, slope)
    return after, loads.max(axis=1) - loads.min(axis=1)
