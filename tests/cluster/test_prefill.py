"""Prefill scheduling: prefixes, promises, saturation, and the bookkeeping that makes them true."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.cluster import Request, RunningRequest, Worker
from moe_opt.cluster.prefill import (
    KAPPA,
    PrefillScheduler,
    saturation_from_calibration,
    saturation_from_transfers,
    token_cost,
)
from moe_opt.cluster.prefill_baselines import (
    LoadOnlyScheduler,
    PrefixOnlyScheduler,
    ShortestPrefillScheduler,
)
from moe_opt.errors import ConfigError

ALL = [PrefillScheduler, LoadOnlyScheduler, PrefixOnlyScheduler, ShortestPrefillScheduler]


def workers(number: int) -> list[Worker]:
    return [Worker(f"w{i}", 8) for i in range(number)]


def request(name: str, tokens: int, *blocks: object) -> Request:
    return Request(name, tokens, block_hashes=blocks)


def places(assignments) -> dict:
    return {assignment.request_id: assignment.worker_id for assignment in assignments}


def test_siblings_go_where_their_prefix_was_promised():
    scheduler = PrefillScheduler(token_cost, 1_000)
    fleet = workers(3)
    queue = [
        request("a1", 40, "A", "B"),
        request("b1", 40, "X", "Y"),
        request("a2", 40, "A", "B"),
        request("b2", 40, "X", "Z"),
    ]
    got = places(scheduler.schedule(queue, fleet))
    assert got == {"a1": "w0", "b1": "w1", "a2": "w0", "b2": "w1"}


def test_ten_siblings_cost_one_prefix_and_ten_suffixes():
    scheduler = PrefillScheduler(token_cost, 1_000_000)
    prefix = [f"p{i}" for i in range(10)]  # 160 tokens
    scheduler.schedule([request(f"r{i}", 170, *prefix) for i in range(10)], workers(4))
    assert scheduler.load("w0") == 170 + 9 * 10
    assert [scheduler.load(f"w{i}") for i in (1, 2, 3)] == [0, 0, 0]


def test_a_fully_cached_prompt_still_computes_its_last_token():
    calls = []
    scheduler = PrefillScheduler(lambda s, c: calls.append((s, c)) or float(s), math.inf)
    scheduler.stored("w0", ["A", "B"])
    scheduler.schedule([request("r", 32, "A", "B")], workers(1))
    assert calls == [(1, 31)]


def test_block_tokens_scale_the_match():
    calls = []
    scheduler = PrefillScheduler(lambda s, c: calls.append((s, c)) or float(s), math.inf, block_tokens=512)
    scheduler.stored("w0", ["A"])
    scheduler.schedule([request("r", 1_000, "A", "B")], workers(1))
    assert calls == [(488, 512)]


def test_only_a_contiguous_prefix_counts():
    scheduler = PrefillScheduler(token_cost, math.inf)
    scheduler.stored("w0", ["B", "C"])
    scheduler.stored("w1", ["A"])
    assert scheduler.matched_blocks("w0", ["A", "B", "C"]) == 0
    assert places(scheduler.schedule([request("r", 64, "A", "B", "C")], workers(2))) == {"r": "w1"}


def test_ties_and_no_match_go_to_the_least_load():
    scheduler = PrefillScheduler(token_cost, math.inf)
    fleet = workers(3)
    assert places(scheduler.schedule([request("r0", 50), request("r1", 30), request("r2", 40)], fleet)) == {
        "r0": "w0",
        "r1": "w1",
        "r2": "w2",
    }
    for worker in fleet:
        scheduler.stored(worker.id, ["A"])
    assert places(scheduler.schedule([request("tie", 20, "A")], fleet)) == {"tie": "w1"}


def test_saturation_closes_and_execution_reopens():
    scheduler = PrefillScheduler(token_cost, 100)
    fleet = workers(1)
    queue = [request(f"r{i}", 60) for i in range(5)]
    assert len(scheduler.schedule(queue, fleet)) == 2  # 60, then 120 >= 100
    assert scheduler.saturated("w0")
    assert scheduler.schedule(queue[2:], fleet) == []
    scheduler.executed("w0", 20)
    assert scheduler.load("w0") == 100  # at the threshold is still closed
    assert scheduler.schedule(queue[2:], fleet) == []
    scheduler.executed("w0", 1)
    assert places(scheduler.schedule(queue[2:], fleet)) == {"r2": "w0"}
    scheduler.executed("w0", 1e9)
    assert scheduler.load("w0") == 0


def test_a_hot_prefix_spills_when_its_worker_closes():
    scheduler = PrefillScheduler(token_cost, 100)
    prefix = ["A", "B"]
    got = places(scheduler.schedule([request(f"r{i}", 60, *prefix) for i in range(6)], workers(3)))
    # w0: 60 + 28 + 28 = 116 closes; the next one finds no prefix and starts it on w1, and so on.
    assert got == {"r0": "w0", "r1": "w0", "r2": "w0", "r3": "w1", "r4": "w1", "r5": "w1"}


def test_final_loads_lie_between_saturation_and_one_request_more():
    scheduler = PrefillScheduler(token_cost, 500)
    fleet = workers(4)
    scheduler.schedule([request(f"r{i}", 40 + 7 * (i % 9)) for i in range(500)], fleet)
    assert all(500 <= scheduler.load(worker.id) < 500 + 96 + 1 for worker in fleet)


def test_promises_become_committed_and_eviction_forgets():
    scheduler = PrefillScheduler(token_cost, math.inf)
    fleet = workers(2)
    scheduler.schedule([request("a", 48, "A", "B", "C")], fleet)
    assert scheduler.matched_blocks("w0", ["A", "B", "C"]) == 3  # promised
    scheduler.stored("w0", ["A", "B", "C"])
    scheduler.cancelled("w0", request("a", 48, "A", "B", "C"))  # too late to matter: they are stored
    assert scheduler.matched_blocks("w0", ["A", "B", "C"]) == 3
    scheduler.evicted("w0", ["C"])
    assert scheduler.matched_blocks("w0", ["A", "B", "C"]) == 2
    scheduler.evicted("w0", ["A"])
    assert scheduler.matched_blocks("w0", ["A", "B", "C"]) == 0


def test_execution_alone_commits_nothing_and_forgets_nothing():
    scheduler = PrefillScheduler(token_cost, math.inf)
    scheduler.schedule([request("a", 16, "A")], workers(1))
    scheduler.executed("w0", 16)
    assert scheduler.matched_blocks("w0", ["A"]) == 1
    scheduler.evicted("w0", ["A"])  # an older copy went; the promise of the new one stands
    assert scheduler.matched_blocks("w0", ["A"]) == 1


def test_cancelling_takes_back_promises_that_nobody_else_made():
    scheduler = PrefillScheduler(token_cost, math.inf)
    first, second = request("a", 20, "A", "B"), request("b", 20, "A")
    scheduler.schedule([first, second], workers(1))
    scheduler.cancelled("w0", first, flops=20)
    assert scheduler.matched_blocks("w0", ["A", "B"]) == 1  # b still brings A
    scheduler.cancelled("w0", second, flops=4)
    assert scheduler.matched_blocks("w0", ["A"]) == 0
    assert scheduler.load("w0") == 0


def test_a_removed_worker_leaves_nothing_behind():
    scheduler = PrefillScheduler(token_cost, math.inf)
    fleet = workers(3)
    scheduler.stored("w1", ["A"])
    scheduler.schedule([request("r", 32, "A", "B")], fleet)
    scheduler.removed("w1")
    scheduler.removed("never seen")
    assert (scheduler.load("w1"), scheduler.matched_blocks("w1", ["A"])) == (0, 0)
    newcomer = Worker("w9", 8)  # takes the freed place in the masks, and must not inherit blocks
    scheduler.schedule([request("s", 32, "Q")], [newcomer])
    assert scheduler.matched_blocks("w9", ["A"]) == 0
    assert scheduler.matched_blocks("w0", ["A"]) == 0


def test_draining_workers_get_nothing():
    scheduler = PrefillScheduler(token_cost, math.inf)
    fleet = [Worker("old", 8, draining=True), Worker("new", 8)]
    scheduler.stored("old", ["A"])
    assert places(scheduler.schedule([request("r", 20, "A")], fleet)) == {"r": "new"}
    assert scheduler.schedule([request("r", 20, "A")], fleet[:1]) == []


def test_what_runs_already_is_not_assigned_again():
    scheduler = PrefillScheduler(token_cost, math.inf)
    fleet = [Worker("w0", 8, running={"r": RunningRequest(5)})]
    assert places(scheduler.schedule([request("r", 5), request("s", 5), request("s", 5)], fleet)) == {"s": "w0"}


def test_prefix_only_never_closes_and_load_only_never_looks():
    queue = [request(f"r{i}", 60, "A", "B") for i in range(6)]
    assert set(places(PrefixOnlyScheduler(token_cost, 100).schedule(queue, workers(3))).values()) == {"w0"}
    spread = places(LoadOnlyScheduler(token_cost, 10_000).schedule(queue, workers(3)))
    assert sorted(spread.values()) == ["w0", "w0", "w1", "w1", "w2", "w2"]


def test_shortest_prefill_first_with_estimates_renewed_as_promises_are_made():
    scheduler = ShortestPrefillScheduler(token_cost, math.inf)
    long_prefix = [f"p{i}" for i in range(10)]
    queue = [
        request("long sibling", 200, *long_prefix),
        request("medium", 100),
        request("short", 30, "S"),
        request("long opener", 190, *long_prefix),
    ]
    order = [assignment.request_id for assignment in scheduler.schedule(queue, workers(1))]
    # Once the opener has promised 160 tokens, the sibling has only 40 left.
    assert order == ["short", "medium", "long opener", "long sibling"]
    scheduler = ShortestPrefillScheduler(token_cost, math.inf)
    scheduler.stored("w0", long_prefix)
    order = [assignment.request_id for assignment in scheduler.schedule(queue, workers(1))]
    assert order == ["short", "long opener", "long sibling", "medium"]


def test_aging_lets_a_long_prompt_through():
    queue = [Request("long", 1_000, arrival=0.0), Request("short", 10, arrival=99.0)]
    young = ShortestPrefillScheduler(token_cost, math.inf).schedule(queue, workers(1), now=100.0)
    old = ShortestPrefillScheduler(token_cost, math.inf, aging=20.0).schedule(queue, workers(1), now=100.0)
    assert [a.request_id for a in young] == ["short", "long"]
    assert [a.request_id for a in old] == ["long", "short"]


def test_equations_1_and_3():
    assert saturation_from_transfers(1e15, [1e-3] * 94, kappa=1.2) == pytest.approx(1.2 * 1e15 * 0.094)
    assert saturation_from_calibration(5e14, [2e-3, 3e-3, 5e-3], kappa=1.5) == pytest.approx(1.5 * 2.5 * 5e14)
    # Transfers hidden (all layers as fast as the replicated one), or not calibrated yet: kappa * F_ref.
    assert saturation_from_calibration(5e14, [2e-3, 1e-3]) == pytest.approx(KAPPA * 5e14)
    assert saturation_from_calibration(5e14) == pytest.approx(KAPPA * 5e14)


@pytest.mark.parametrize(
    "call",
    [
        lambda: PrefillScheduler(token_cost, 0.0),
        lambda: PrefillScheduler(token_cost, float("nan")),
        lambda: PrefillScheduler(token_cost, 1.0, block_tokens=0),
        lambda: PrefillScheduler(token_cost, 1.0).executed("w0", -1.0),
        lambda: PrefillScheduler(token_cost, 1.0).executed("w0", float("nan")),
        lambda: PrefillScheduler(lambda s, c: float("nan"), 1.0).schedule([request("r", 5)], workers(1)),
        lambda: PrefillScheduler(token_cost, 1.0).schedule([], [Worker("w", 1), Worker("w", 1)]),
        lambda: ShortestPrefillScheduler(token_cost, 1.0, aging=-1.0),
        lambda: saturation_from_transfers(0.0, [1.0]),
        lambda: saturation_from_transfers(1.0, [-1.0]),
        lambda: saturation_from_calibration(1.0, [0.0, 1.0]),
    ],
)
def test_refuses_nonsense(call):
    with pytest.raises(ConfigError):
        call()


class PlainScheduler:
    """The same rules without an index: lists, loops and a scan of every worker's blocks."""

    def __init__(self, saturation: float, block_tokens: int):
        self.saturation, self.block_tokens = saturation, block_tokens
        self.load, self.committed, self.promised = {}, {}, {}

    def matched(self, worker_id, blocks):
        has = self.committed.get(worker_id, set()) | self.promised.get(worker_id, set())
        count = 0
        for block in blocks:
            if block not in has:
                break
            count += 1
        return count

    def schedule(self, queue, fleet):
        result = []
        for request in queue:
            open_ids = [w.id for w in fleet if self.load.get(w.id, 0) < self.saturation]
            if not open_ids:
                break
            matched = {i: self.matched(i, request.block_hashes) for i in open_ids}
            best = max(open_ids, key=lambda i: (matched[i], -self.load.get(i, 0), -open_ids.index(i)))
            cached = max(0, min(matched[best] * self.block_tokens, request.prompt_tokens - 1))
            self.load[best] = self.load.get(best, 0) + request.prompt_tokens - cached
            self.promised.setdefault(best, set()).update(set(request.block_hashes) - self.committed.get(best, set()))
            result.append((request.id, best))
        return result


@st.composite
def chains(draw):
    return [f"b{i}" for i in draw(st.lists(st.integers(0, 3), max_size=4))]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([60, 200, 10_000]),
    st.lists(
        st.one_of(
            st.tuples(st.just("queue"), st.lists(st.tuples(st.integers(0, 80), chains()), max_size=8)),
            st.tuples(st.just("stored"), st.integers(0, 3), chains()),
            st.tuples(st.just("evicted"), st.integers(0, 3), chains()),
            st.tuples(st.just("executed"), st.integers(0, 3), st.integers(0, 100)),
        ),
        max_size=12,
    ),
)
def test_follows_a_plain_reference_and_loses_nothing(number, saturation, events):
    fleet = workers(number)
    fast, plain = PrefillScheduler(token_cost, saturation), PlainScheduler(saturation, 16)
    serial = 0
    for event in events:
        if event[0] == "queue":
            queue = []
            for tokens, blocks in event[1]:
                # Chained hashes: a block's hash says everything before it.
                chained = ["/".join(blocks[: i + 1]) for i in range(len(blocks))]
                queue.append(request(f"r{serial}", tokens, *chained))
                serial += 1
            got = fast.schedule(queue, fleet)
            assert got == plain.schedule(queue, fleet)
            ids = [assignment.request_id for assignment in got]
            assert ids == [r.id for r in queue][: len(ids)]  # in order, no gaps, none twice
            if len(ids) < len(queue):
                assert all(fast.saturated(worker.id) for worker in fleet)
            continue
        worker_id = fleet[event[1] % number].id
        if event[0] == "executed":
            fast.executed(worker_id, event[2])
            plain.load[worker_id] = max(0, plain.load.get(worker_id, 0) - event[2])
            continue
        chained = ["/".join(event[2][: i + 1]) for i in range(len(event[2]))]
        committed = plain.committed.setdefault(worker_id, set())
        if event[0] == "stored":
            fast.stored(worker_id, chained)
            committed.update(chained)
            plain.promised.setdefault(worker_id, set()).difference_update(chained)
        else:
            fast.evicted(worker_id, chained)
            committed.difference_update(chained)
        assert fast.matched_blocks(worker_id, chained) == plain.matched(worker_id, chained)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 80), chains()), max_size=20),
    number=st.integers(1, 4),
    saturation=st.sampled_from([50, 400]),
)
def test_every_scheduler_assigns_each_request_once(kind, requests, number, saturation):
    scheduler = kind(token_cost, saturation)
    fleet = workers(number)
    waiting = [request(f"r{i}", tokens, *blocks) for i, (tokens, blocks) in enumerate(requests)]
    done = []
    for _ in range(1 + 4 * len(requests)):
        got = scheduler.schedule(waiting, fleet)
        done += [assignment.request_id for assignment in got]
        waiting = [r for r in waiting if r.id not in done]
        for worker in fleet:
            scheduler.executed(worker.id, 40)
    assert sorted(done) == sorted(f"r{i}" for i in range(len(requests)))


def test_renaming_workers_changes_nothing():
    queue = [request(f"r{i}", 20 + i, f"p{i % 3}", f"q{i % 5}") for i in range(30)]
    plain = PrefillScheduler(token_cost, 300).schedule(queue, workers(4))
    renamed = PrefillScheduler(token_cost, 300).schedule(queue, [Worker(f"z{9 - i}", 8) for i in range(4)])
    names = {f"w{i}": f"z{9 - i}" for i in range(4)}
    assert [(r, names[w]) for r, w in plain] == [tuple(a) for a in renamed]
