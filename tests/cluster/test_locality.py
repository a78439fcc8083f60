"""ELDR: the locality band, checked against a plain reading of the paper."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing import planted

from moe_opt.cluster import Request, RunningRequest, Worker, make_policy
from moe_opt.cluster.policies.locality import EldrPolicy
from moe_opt.cluster.signature import SignatureModel
from moe_opt.cluster.token_table import TokenTable
from moe_opt.errors import ConfigError


@pytest.fixture(scope="module")
def fitted():
    prefill, decode, _ = planted()
    model = SignatureModel.fit(prefill, decode, 4)
    return model, model.transform(prefill)


def fleet(*loads: int, slots: int = 8) -> list[Worker]:
    return [
        Worker(f"w{i}", slots, running={f"old{i}-{j}": RunningRequest(10) for j in range(load)})
        for i, load in enumerate(loads)
    ]


def requests(signatures) -> list[Request]:
    return [Request(f"r{i}", 10, arrival=float(i), signature=s) for i, s in enumerate(signatures)]


def plain(waiting, workers, centroids, tau):
    """The paper's rule, request by request."""
    load = [len(worker.running) for worker in workers]
    result = []
    for request in waiting:
        free = [k for k, w in enumerate(workers) if load[k] < w.max_running and not w.draining]
        if not free:
            continue
        s = [0.0 if request.signature is None else float(request.signature @ centroids[k]) for k in range(len(workers))]
        best = max(s[k] for k in free)
        band = [k for k in free if s[k] >= best - tau - 1e-6]
        k = min(band, key=lambda k: (load[k], -s[k], k))
        load[k] += 1
        result.append((request.id, workers[k].id))
    return result


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.lists(st.one_of(st.none(), st.integers(0, 119)), max_size=20),
    st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0]),
    st.integers(-1, 3),
)
def test_follows_the_paper(fitted, loads, picks, tau, draining):
    model, signatures = fitted
    workers = fleet(*loads, slots=5)
    if draining >= 0:
        workers[draining].draining = True
    waiting = requests([None if pick is None else signatures[pick] for pick in picks])
    got = EldrPolicy(model, tau).assign(waiting, workers, 0.0)
    assert [tuple(a) for a in got] == plain(waiting, workers, model.centroids, tau)


def test_tau_0_is_the_nearest_centroid_whatever_its_load(fitted):
    model, signatures = fitted
    workers = fleet(7, 0, 3, 5, slots=100)
    nearest = model.similarity(signatures).argmax(axis=1)
    got = EldrPolicy(model, tau=0.0).assign(requests(signatures[:80]), workers, 0.0)
    assert [a.worker_id for a in got] == [f"w{k}" for k in nearest[:80]]


def test_tau_1_is_the_shortest_queue(fitted):
    model, signatures = fitted
    workers = fleet(4, 0, 2, 1, slots=50)
    got = EldrPolicy(model, tau=1.0).assign(requests(signatures[:60]), workers, 0.0)
    load = [4, 0, 2, 1]
    for assignment in got:
        k = int(assignment.worker_id[1:])
        assert load[k] == min(load)
        load[k] += 1


def test_even_opposite_signatures_are_inside_tau_1():
    model, signatures = orthogonal_model()
    got = EldrPolicy(model, tau=1.0).assign(requests([signatures[0]] * 2), fleet(1, 0), 0.0)
    assert [a.worker_id for a in got] == ["w1", "w0"]


def orthogonal_model():
    """Two workers, two kinds of prompts that share no expert."""
    prefill = np.zeros((8, 1, 4))
    prefill[:4, 0, :2], prefill[4:, 0, 2:] = 5, 5
    prefill += np.random.default_rng(0).random(prefill.shape) * 1e-9
    model = SignatureModel.fit(prefill, prefill, 2, weighting="count")
    kinds = model.transform(prefill[[0, 4]])
    return model.with_centroids(kinds), kinds


def test_the_band_trades_similarity_for_load():
    model, (a, b) = orthogonal_model()
    between = (0.55 * a + 0.45 * b) / np.linalg.norm(0.55 * a + 0.45 * b)  # cosines about 0.77 and 0.63
    busy = fleet(5, 1)
    assert EldrPolicy(model, tau=0.1).candidates(Request("r", 1, signature=between), busy) == [0]
    assert EldrPolicy(model, tau=0.2).candidates(Request("r", 1, signature=between), busy) == [0, 1]
    assert EldrPolicy(model, tau=0.2).assign(requests([between]), busy, 0.0)[0].worker_id == "w1"


def test_ties_go_to_the_more_similar_then_to_the_first():
    model, (a, b) = orthogonal_model()
    policy = EldrPolicy(model, tau=1.0)
    assert policy.assign(requests([b]), fleet(2, 2), 0.0)[0].worker_id == "w1"
    middle = (a + b) / np.linalg.norm(a + b)
    assert policy.assign(requests([middle]), fleet(2, 2), 0.0)[0].worker_id == "w0"


def test_full_and_draining_workers_leave_the_band():
    model, (a, _) = orthogonal_model()
    workers = fleet(8, 3)
    policy = EldrPolicy(model, tau=0.0)
    assert policy.candidates(Request("r", 1, signature=a), workers) == [1]
    workers[1].draining = True
    assert policy.candidates(Request("r", 1, signature=a), workers) == []
    assert policy.assign(requests([a]), workers, 0.0) == []


def test_kv_room_counts_as_room():
    model, (a, _) = orthogonal_model()
    workers = fleet(1, 3)
    workers[0].kv_capacity = 15  # 10 are taken
    assert EldrPolicy(model).assign(requests([a]), workers, 0.0)[0].worker_id == "w1"


def test_without_a_signature_load_alone_decides(fitted):
    model, _ = fitted
    got = EldrPolicy(model, tau=0.0).assign(requests([None, None, None]), fleet(2, 1, 0, 3), 0.0)
    assert [a.worker_id for a in got] == ["w2", "w1", "w2"]


def test_a_bad_signature_is_counted_and_holds_up_nobody(fitted):
    model, signatures = fitted
    policy = EldrPolicy(model, tau=0.0)
    bad = requests([signatures[0][:-1], signatures[0] * np.nan, signatures[0]])
    got = policy.assign(bad, fleet(0, 0, 0, 0), 0.0)
    assert len(got) == 3
    assert policy.unusable_signatures == 2


def test_token_ids_stand_in_for_a_signature():
    model, (_, b) = orthogonal_model()
    table = TokenTable.fit_routing([1, 1, 2, 2], np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]), 4)
    policy = EldrPolicy(model.with_token_table(table), tau=0.0)
    waiting = [
        Request("a", 3, token_ids=[1, 1, 1]),
        Request("b", 3, token_ids=(2, 2)),
        Request("broken", 3, token_ids=[-4]),
        Request("signature first", 3, signature=b, token_ids=[1]),
    ]
    got = {assignment.request_id: assignment.worker_id for assignment in policy.assign(waiting, fleet(0, 0), 0.0)}
    assert (got["a"], got["b"], got["signature first"]) == ("w0", "w1", "w1")
    assert policy.unusable_signatures == 1
    # Without a table token ids say nothing.
    assert EldrPolicy(model, tau=0.0).assign(waiting[1:2], fleet(0, 1), 0.0)[0].worker_id == "w0"


def test_workers_keep_their_centroids_while_others_come_and_go():
    model, (a, b) = orthogonal_model()
    policy = EldrPolicy(model, tau=0.0)
    first, second, third = (Worker(name, 9) for name in ("first", "second", "third"))
    assert policy.assign(requests([b]), [first, second], 0.0)[0].worker_id == "second"
    # Alone, and listed first, it is still b's worker; the other's is free for a newcomer.
    assert policy.similarities(requests([a, b]), [second]).round(3).tolist() == [[0.0], [1.0]]
    assert policy.assign(requests([a]), [second, third], 0.0)[0].worker_id == "third"
    assert policy.assign(requests([b]), [third, second], 0.0)[0].worker_id == "second"
    # A third one shares a centroid, and the load decides between the two.
    fourth = Worker("fourth", 9)
    spread = policy.assign(requests([a, a, b, b]), [third, second, fourth], 0.0)
    assert {x.worker_id for x in spread} == {"second", "third", "fourth"}


def test_many_generations_of_workers_leave_no_trace():
    model, (a, _) = orthogonal_model()
    policy = EldrPolicy(model)
    for generation in range(50):
        policy.assign(requests([a]), [Worker(f"{generation}-{k}", 4) for k in range(3)], 0.0)
    assert len(policy._centroid_of) <= 5


def test_switching_to_a_refitted_model(fitted):
    model, signatures = fitted
    policy = EldrPolicy(model, tau=0.0)
    workers = fleet(0, 0, 0, 0)
    policy.assign(requests(signatures[:1]), workers, 0.0)
    turned = model.with_centroids(model.centroids[::-1])
    policy.use(turned, worker_ids=["w3", "w2", "w1", "w0"])
    nearest = model.similarity(signatures[:8]).argmax(axis=1)
    got = policy.assign(requests(signatures[:8]), workers, 0.0)
    assert [x.worker_id for x in got] == [f"w{k}" for k in nearest]
    policy.use(model)  # names stay with their index
    got = policy.assign(requests(signatures[:8]), workers, 0.0)
    assert [x.worker_id for x in got] == [f"w{3 - k}" for k in nearest]


def test_renaming_workers_changes_nothing(fitted):
    model, signatures = fitted
    waiting = requests(signatures[:30])
    named = EldrPolicy(model).assign(waiting, fleet(1, 0, 2, 0, slots=12), 0.0)
    workers = fleet(1, 0, 2, 0, slots=12)
    for k, worker in enumerate(workers):
        worker.id = ("other", k)
    renamed = EldrPolicy(model).assign(waiting, workers, 0.0)
    assert [int(a.worker_id[1:]) for a in named] == [a.worker_id[1] for a in renamed]


def test_long_queues_are_taken_in_parts(fitted, monkeypatch):
    model, signatures = fitted
    waiting = requests(signatures)
    whole = EldrPolicy(model).assign(waiting, fleet(0, 0, 0, 0, slots=40), 0.0)
    monkeypatch.setattr("moe_opt.cluster.policies.locality._BATCH", 7)
    monkeypatch.setattr("moe_opt.cluster.policies.locality._MIN_BATCH", 3)
    assert EldrPolicy(model).assign(waiting, fleet(0, 0, 0, 0, slots=40), 0.0) == whole


def test_candidates_agree_with_assign(fitted):
    model, signatures = fitted
    workers = fleet(3, 1, 0, 2)
    for request in requests(signatures[:40]):
        policy = EldrPolicy(model)
        band = policy.candidates(request, workers)
        chosen = int(policy.assign([request], workers, 0.0)[0].worker_id[1:])
        assert chosen in band
        assert len(workers[chosen].running) == min(len(workers[k].running) for k in band)


def test_made_by_name(fitted):
    policy = make_policy("eldr", signature_model=fitted[0], tau=0.2)
    assert isinstance(policy, EldrPolicy)
    assert policy.tau == 0.2
    with pytest.raises(ConfigError, match="signature_model"):
        make_policy("eldr")
    for tau in (-0.1, float("nan")):
        with pytest.raises(ConfigError, match="tau"):
            EldrPolicy(fitted[0], tau)


def test_a_decision_takes_less_than_50_microseconds_at_24_workers():
    """One core, full 48 x 128 signatures; CPU time, because other jobs may run beside the test."""
    rng = np.random.default_rng(0)
    model = SignatureModel.fit(
        rng.random((48, 48, 128)), rng.random((48, 48, 128)), 24, weighting="count", layers="all"
    )
    waiting = requests(model.transform(rng.random((64, 48, 128))))
    workers = fleet(*rng.integers(0, 12, 24), slots=32)
    policy = EldrPolicy(model)
    best = min(_cpu_seconds(policy, waiting, workers) for _ in range(7))
    assert best / len(waiting) < 50e-6


def _cpu_seconds(policy, waiting, workers) -> float:
    begin = time.process_time()
    assert len(policy.assign(waiting, workers, 0.0)) == len(waiting)
    return time.process_time() - begin
