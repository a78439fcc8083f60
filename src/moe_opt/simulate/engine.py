"""The event loop: arrivals, step boundaries and fleet events, and one call of the policy after each of them.

Time is simulated, decisions are real: `simulate` hands the policy the same `Request` and `Worker` objects
that a router would. Nothing here knows which policy runs.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moe_opt.cluster import Policy, Request
from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.simulate.costs import StepCost
from moe_opt.simulate.experts import BatchExperts, ExpertModel
from moe_opt.simulate.fleet import Drain, Fail, FleetConfig, Recover, ScaleUp, WorkerSpec
from moe_opt.simulate.group import MAX_PLAN, Group, Joining
from moe_opt.simulate.live import LiveRequest, LiveWorker
from moe_opt.simulate.metrics import SimResult
from moe_opt.simulate.recorder import Recorder
from moe_opt.workloads import TraceRequest


class PolicyError(MoEOptError, RuntimeError):
    """A policy broke its promise: an unknown request or worker, one too many, or nothing while all is
    idle."""


def simulate(
    trace: Sequence[TraceRequest],
    policy: Policy,
    fleet: FleetConfig,
    cost: StepCost,
    *,
    experts: ExpertModel | None = None,
    signatures: NDArray[np.floating] | None = None,
    oracle: bool | None = None,
    history: Sequence[TraceRequest] = (),
    record_loads: bool = False,
    max_steps: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> SimResult:
    """Run `policy` over `trace` on `fleet`; every decode step costs `cost`.

    `experts` counts distinct experts per step (none by default), row i of `signatures` is request i's. With
    `oracle` running requests show their true remaining length; None means: exactly if the policy has no
    predictor of its own. `history` is shown to the policy's predictor first, as finished requests.
    `max_steps` ends a run early. `progress` is called with the number of requests finished so far.
    """
    if oracle is None:
        oracle = getattr(policy, "predictor", None) is None
    for i, row in enumerate(history):
        request = Request(f"history-{i}", row.prompt_tokens, row.arrival, prompt_hash=row.prompt_hash)
        policy.observe_finished(request, row.output_tokens)
    engine = _Engine(trace, policy, fleet, cost, experts, signatures, oracle, record_loads, max_steps, progress)
    engine.run()
    return engine.recorder.finish(np.array([r.output_tokens for r in trace], dtype=np.int64))


class _Engine:
    def __init__(
        self,
        trace: Sequence[TraceRequest],
        policy: Policy,
        fleet: FleetConfig,
        cost: StepCost,
        experts: ExpertModel | None,
        signatures: NDArray[np.floating] | None,
        oracle: bool,
        record_loads: bool,
        max_steps: int | None,
        progress: Callable[[int], None] | None,
    ):
        self.trace, self.policy, self.fleet, self.cost = trace, policy, fleet, cost
        self.oracle, self.max_steps, self.progress = oracle, max_steps, progress
        self.signatures = signatures
        self.events = sorted(fleet.events, key=lambda e: e.time)
        specs = list(fleet.workers) + [e.spec for e in self.events if isinstance(e, ScaleUp)]
        self.specs, self.next_worker = specs, len(fleet.workers)
        self._check(trace, specs)
        total = len(specs)
        self.load = np.zeros(total, dtype=np.int64)  # KV tokens of joined requests at the start of the plan
        self.count = np.zeros(total, dtype=np.int64)  # requests that have joined
        self.dispatched = np.zeros(total, dtype=np.int64)  # KV tokens of requests that have not joined yet
        self.alive = np.zeros(total, dtype=bool)
        self.speed = np.array([s.speed for s in specs], dtype=np.float64)
        ids = sorted({s.group for s in specs})
        number = {g: i for i, g in enumerate(ids)}
        self.group_of = [number[s.group] for s in specs]
        self.groups = [Group([w for w, g in enumerate(self.group_of) if g == i]) for i in range(len(ids))]
        self.sampled = all(len(g.members) == 1 for g in self.groups)  # nobody shares a step: sample by time
        self.experts = experts or BatchExperts(1, 1, 1)
        self.experts.start(len(self.groups))
        self.workers: dict[int, LiveWorker] = {}
        for index in range(len(fleet.workers)):
            self._add_worker(index, specs[index])
        self.recorder = Recorder(len(trace), total, record_loads)
        self.waiting: dict[str, tuple[int, Request]] = {}
        self.started: dict[str, tuple[int, Request]] = {}  # original requests, for observe_finished
        self.generated = np.zeros(len(trace), dtype=np.int64)  # tokens a request brought back to the pool
        self.queue: list[tuple[float, int, int]] = []  # (time, group, version)
        self.arrivals = np.array([r.arrival for r in trace])
        self.cursor = self.event_cursor = self.finished = 0
        self.advanced = self.sampled_tokens = 0  # output tokens accounted for, and those in samples
        self.pool_seen = 0  # requests in the pool at the last decision
        self.now = self.sampled_at = 0.0
        self.sample_every = max(cost.seconds(0, 1), 1e-4)

    @staticmethod
    def _check(trace: Sequence[TraceRequest], specs: Sequence[WorkerSpec]) -> None:
        if not trace:
            raise ConfigError("the trace holds no request")
        if any(b.arrival < a.arrival for a, b in pairwise(trace)):
            raise ConfigError("the trace must be sorted by arrival")
        if len({r.id for r in trace}) != len(trace):
            raise ConfigError("request ids of the trace must differ")
        if all(s.kv_capacity is not None for s in specs):
            room = max(s.kv_capacity or 0 for s in specs)
            for r in trace:
                if r.prompt_tokens + r.output_tokens > room:
                    raise ConfigError(
                        f"request {r.id} grows to {r.prompt_tokens + r.output_tokens} KV tokens, the largest "
                        f"worker holds only {room}; raise kv_capacity or drop such requests"
                    )

    # -- the clock that live workers read
    # ---------------------------------------------------------------------

    def steps_now(self, worker: int) -> int:
        """Steps that the worker's group has done by now."""
        group = self.groups[self.group_of[worker]]
        return group.step + group.done(self.now)

    def load_now(self, worker: int) -> int:
        """KV tokens of the worker now, dispatched requests included."""
        done = self.groups[self.group_of[worker]].done(self.now)
        return int(self.load[worker] + done * self.count[worker] + self.dispatched[worker])

    # -- main loop
    # ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until every request is finished, the closed pool runs dry, or `max_steps` is reached."""
        self._refill()
        self._arrive()
        self._dispatch()
        while self.max_steps is None or self.recorder.num_steps < self.max_steps:
            if self.fleet.pool_depth is not None and self.cursor >= len(self.trace):
                break  # the pool can no longer be kept full
            moment = self._next_moment()
            if moment is None:
                self._stuck()
                break
            self.now = moment
            if self.sampled:
                self._sample()
            while self.queue and self.queue[0][0] <= moment:
                _, index, version = heapq.heappop(self.queue)
                if self.groups[index].version == version:
                    self._boundary(index)
            self._fleet_events()
            self._arrive()
            self._dispatch()
        if self.sampled and self.now > self.sampled_at:
            self._sample(last=True)
        self.recorder.end = self.now

    def _next_moment(self) -> float | None:
        while self.queue and self.groups[self.queue[0][1]].version != self.queue[0][2]:
            heapq.heappop(self.queue)
        moments = [self.queue[0][0]] if self.queue else []
        if self.fleet.pool_depth is None and self.cursor < len(self.trace):
            moments.append(float(self.arrivals[self.cursor]))
        busy = bool(moments) or bool(self.waiting)
        if self.event_cursor < len(self.events) and busy:
            moments.append(self.events[self.event_cursor].time)
        return max(self.now, min(moments)) if moments else None

    def _stuck(self) -> None:
        open_workers = [w for w in self.workers.values() if not w.draining]
        if self.waiting and open_workers:
            raise PolicyError(
                f"{type(self.policy).__name__} leaves {len(self.waiting)} requests waiting on an idle fleet"
            )

    def _arrive(self) -> None:
        if self.fleet.pool_depth is not None:
            return
        while self.cursor < len(self.trace) and self.arrivals[self.cursor] <= self.now:
            self._enter_pool(self.cursor, float(self.arrivals[self.cursor]))
            self.cursor += 1

    def _refill(self) -> None:
        depth = self.fleet.pool_depth
        if depth is None:
            return
        while len(self.waiting) < depth and self.cursor < len(self.trace):
            self._enter_pool(self.cursor, self.now)
            self.cursor += 1

    def _enter_pool(self, index: int, moment: float) -> None:
        row = self.trace[index]
        request = Request(
            row.id,
            row.prompt_tokens,
            moment,
            signature=None if self.signatures is None else self.signatures[index],
            block_hashes=row.block_hashes,
            prompt_hash=row.prompt_hash,
            domain=row.domain,
        )
        self.recorder.arrival[index] = moment
        self.waiting[row.id] = self.started[row.id] = (index, request)

    # -- decisions
    # ----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        self._refill()
        self.pool_seen = len(self.waiting)
        touched: set[int] = set()
        margin = self.fleet.inflight_margin
        workers = list(self.workers.values())
        if self.waiting and any(len(w.running) < w.max_running + margin and not w.draining for w in workers):
            requests = [request for _, request in self.waiting.values()]
            begin = time.perf_counter()
            assignments = self.policy.assign(requests, workers, self.now)
            self.recorder.decisions.append(time.perf_counter() - begin)
            by_id = {w.id: w for w in workers}
            for request_id, worker_id in assignments:
                touched.add(self._admit(request_id, worker_id, by_id, margin))
        for index, group in enumerate(self.groups):
            if not group.planned and (index in touched or group.joining or self.count[group.members].any()):
                self._plan(index)
            elif index in touched and group.cut(self.now, min(j.ready for j in group.joining)):
                heapq.heappush(self.queue, (group.ends[-1], index, group.version))

    def _admit(self, request_id: object, worker_id: object, by_id: dict, margin: int) -> int:
        name = type(self.policy).__name__
        if request_id not in self.waiting:
            raise PolicyError(f"{name} assigned {request_id!r}, which does not wait (or twice)")
        worker = by_id.get(worker_id)
        if worker is None or worker.draining:
            raise PolicyError(f"{name} assigned {request_id!r} to {worker_id!r}, which takes nothing")
        if len(worker.running) >= worker.max_running + margin:
            raise PolicyError(f"{name} put more than {worker.max_running + margin} requests on {worker_id!r}")
        index, request = self.waiting.pop(str(request_id))
        if worker.kv_capacity is not None and worker.kv_tokens + request.prompt_tokens > worker.kv_capacity:
            raise PolicyError(f"{name} put more than {worker.kv_capacity} KV tokens on {worker_id!r}")
        generated = int(self.generated[index])
        total = self.trace[index].output_tokens
        live = LiveRequest(index, request.prompt_tokens, generated, total, self.oracle)
        worker.live[request.id] = live
        worker.live.touch()
        self.dispatched[worker.index] += live.start_kv
        self.recorder.admitted[index] = self.now
        ready = self.now + self.fleet.transfer_s_per_token * request.prompt_tokens
        group = self.group_of[worker.index]
        self.groups[group].joining.append(Joining(ready, worker.index, live, request))
        return group

    # -- steps
    # --------------------------------------------------------------------------------------------------

    def _plan(self, index: int) -> None:
        """The group stands at a boundary: let requests join, then lay out the steps until something
        changes."""
        group = self.groups[index]
        members = group.members
        later: list[Joining] = []
        joined: list[int] = []
        for entry in group.joining:
            if entry.ready > self.now or self.count[entry.worker] >= self.specs[entry.worker].slots:
                later.append(entry)
                continue
            self.dispatched[entry.worker] -= entry.live.start_kv
            self.load[entry.worker] += entry.live.start_kv
            self.count[entry.worker] += 1
            group.will_finish(entry.worker, entry.live, entry.request)
            self.experts.add(index, entry.live.index)
            joined.append(entry.live.index)
        group.joining = later
        steps = min(group.next_finish(), MAX_PLAN)
        for worker in members:
            steps = min(steps, self._room(index, int(worker)))
        count = self.count[members]
        transfers = [j.ready for j in later if j.ready > self.now]
        if not count.any():
            group.version += 1
            if transfers:
                heapq.heappush(self.queue, (min(transfers), index, group.version))
            return
        distinct = self.experts.distinct(index)
        here = members[self.alive[members]]  # a rank that is gone holds nobody up; an empty one takes part
        group.plan(self.now, steps, self.load[here], self.count[here], distinct, self.cost, self.speed[here])
        for row in joined:
            if np.isnan(self.recorder.first_token[row]):
                self.recorder.first_token[row] = group.ends[0]
        if transfers:
            group.cut(self.now, min(transfers))
        heapq.heappush(self.queue, (group.ends[-1], index, group.version))

    def _room(self, group: int, worker: int) -> int:
        """Steps until the worker's KV capacity is reached; sends its youngest requests back where none is
        left."""
        capacity = self.specs[worker].kv_capacity
        if capacity is None:
            return MAX_PLAN
        while self.count[worker] > 0:
            free = capacity - int(self.load[worker]) - int(self.dispatched[worker])
            steps = max(0, free) // int(self.count[worker])
            if steps >= 1:
                return steps
            running = [r for r in self.workers[worker].live.raw() if r.joined is not None]
            if len(running) == 1 and self.dispatched[worker] > 0:
                return 1  # the transfers under way wait for its end
            self._send_back(worker, running[-1])
        return MAX_PLAN

    def _boundary(self, index: int) -> None:
        group = self.groups[index]
        if not group.planned:
            self._plan(index)  # a transfer has arrived at an idle group
            return
        self._advance(index, len(group.ends))

    def _advance(self, index: int, steps: int) -> None:
        """Account for `steps` planned steps that have ended; the rest of the plan stays."""
        if steps == 0:
            return
        group = self.groups[index]
        members = group.members
        count, load = self.count[members], self.load[members]
        ends = np.array(group.ends[:steps])
        if not self.sampled:
            loads = load[None, :] + np.arange(steps)[:, None] * count[None, :]
            seconds = np.diff(ends, prepend=group.start)
            self.recorder.steps(
                ends,
                seconds,
                loads,
                self.alive[members],
                members,
                int(count.sum()),
                self.experts.distinct(index),
                self.pool_seen,
            )
        self.load[members] += count * steps
        self.advanced += int(count.sum()) * steps
        group.step += steps
        group.start = group.ends[steps - 1]
        del group.ends[:steps]
        group.planned = bool(group.ends)
        for worker, live, request in group.pop_finished():
            self._finish(index, worker, live, request, group.start)

    def _finish(self, group: int, worker: int, live: LiveRequest, request: Request, moment: float) -> None:
        self._leave(group, worker, live, str(request.id))
        row = live.index
        self.recorder.finished[row] = moment
        self.recorder.worker[row] = worker
        self.recorder.tokens[row] = live.total
        _, original = self.started.pop(str(request.id))
        self.policy.observe_finished(original, live.total)
        self.finished += 1
        if self.progress is not None:
            self.progress(self.finished)
        if self.workers[worker].draining and not self.workers[worker].running:
            self._remove_worker(worker)

    def _leave(self, group: int, worker: int, live: LiveRequest, request_id: str) -> int:
        """Take a joined request off its worker; returns the output tokens it has by the group's current
        step."""
        assert live.joined is not None
        done = self.groups[group].step - live.joined
        self.load[worker] -= live.start_kv + done
        self.count[worker] -= 1
        self.experts.remove(group, live.index)
        self.workers[worker].live.take(request_id)
        live.joined = None
        return live.start_generated + done

    def _send_back(self, worker: int, live: LiveRequest) -> None:
        """Back to the pool with the tokens it has (BalanceRoute D.2): its prompt has grown by them."""
        group, row = self.group_of[worker], live.index
        original = self.trace[row]
        if live.joined is None:  # dispatched only
            self.dispatched[worker] -= live.start_kv
            self.workers[worker].live.take(original.id)
            joining = self.groups[group].joining
            self.groups[group].joining = [j for j in joining if j.live is not live]
            generated = live.start_generated
        else:
            if live.joined == self.groups[group].step and live.start_generated == 0:
                self.recorder.first_token[row] = np.nan  # its first step did not end
            generated = self._leave(group, worker, live, original.id)
        self.generated[row] = generated
        self.recorder.lost[row] += 1
        _, first = self.started[original.id]
        again = Request(
            original.id,
            original.prompt_tokens + generated,
            first.arrival,
            first.signature,
            first.block_hashes,
            first.prompt_hash,
            domain=first.domain,
        )
        self.waiting[original.id] = (row, again)

    def _sample(self, *, last: bool = False) -> None:
        """Loads of independent workers just before this moment's events; weight: the time since the last
        one."""
        elapsed = self.now - self.sampled_at
        if elapsed < self.sample_every and not last:
            return
        self.sampled_at = self.now
        indices = np.array(sorted(self.workers), dtype=np.int64)
        if not len(indices):
            return
        loads = np.array([[self.load_now(int(w)) for w in indices]], dtype=np.int64)
        busy = [self.experts.distinct(self.group_of[w]) for w in indices if self.count[w]]
        done = np.array([self.groups[self.group_of[w]].done(self.now) for w in indices])
        tokens = self.advanced + int((done * self.count[indices]).sum())
        self.recorder.steps(
            np.array([self.now]),
            np.array([elapsed]),
            loads,
            np.ones(len(indices), dtype=bool),
            indices,
            tokens - self.sampled_tokens,
            float(np.mean(busy)) if busy else 0.0,
            self.pool_seen,
        )
        self.sampled_tokens = tokens

    # -- fleet events
    # -------------------------------------------------------------------------------------------

    def _add_worker(self, index: int, spec: WorkerSpec) -> None:
        self.workers[index] = LiveWorker(self, index, spec.slots, spec.kv_capacity, self.oracle)
        self.alive[index] = True

    def _remove_worker(self, index: int) -> None:
        del self.workers[index]
        self.alive[index] = False

    def _fleet_events(self) -> None:
        while self.event_cursor < len(self.events) and self.events[self.event_cursor].time <= self.now:
            event = self.events[self.event_cursor]
            self.event_cursor += 1
            if isinstance(event, ScaleUp):
                self._add_worker(self.next_worker, event.spec)
                self.next_worker += 1
            elif isinstance(event, Recover):
                if event.worker not in self.workers:
                    self._add_worker(event.worker, self.specs[event.worker])
            elif event.worker not in self.workers:
                continue  # it has failed or left already
            elif isinstance(event, Fail):
                self._fail(event.worker)
            elif isinstance(event, Drain):
                worker = self.workers[event.worker]
                worker.draining = True
                if not worker.running:
                    self._remove_worker(event.worker)

    def _fail(self, worker: int) -> None:
        """Its step in progress is lost; the other members of its group end theirs as planned."""
        index = self.group_of[worker]
        group = self.groups[index]
        self._advance(index, group.done(self.now))
        if worker not in self.workers:
            return  # it was draining, and its last request has just ended
        for live in list(self.workers[worker].live.raw()):
            self._send_back(worker, live)
        self._remove_worker(worker)
        if group.planned and not self.count[group.members].any():
            group.planned, group.ends = False, []
            group.version += 1
        elif group.planned:
            del group.ends[1:]
            group.version += 1
            heapq.heappush(self.queue, (group.ends[-1], index, group.version))
