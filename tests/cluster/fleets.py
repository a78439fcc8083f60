"""Fleets and queues for the policy tests: literals, random ones, and a Hypothesis strategy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from hypothesis import strategies as st

from moe_opt.cluster import Assignment, Request, RunningRequest, Worker
from moe_opt.cluster.signature import SignatureModel

CENTROIDS = 5


@lru_cache
def signature_model() -> SignatureModel:
    """Five workers, two layers of eight experts; fitted on 40 prompts of five kinds."""
    rng = np.random.default_rng(7)
    kind = np.arange(40) % CENTROIDS
    counts = rng.poisson(1.0, size=(40, 2, 8))
    counts[np.arange(40), :, kind] += 20
    return SignatureModel.fit(counts, counts + 0.1, num_workers=CENTROIDS)


@lru_cache
def signatures(count: int, seed: int) -> np.ndarray:
    """Unit vectors of the width that `signature_model` has, between the kinds."""
    model = signature_model()
    rng = np.random.default_rng(seed)
    return model.transform(rng.poisson(2.0, size=(count, 2, 8)) + 1)


@st.composite
def fleets(draw: st.DrawFn, max_workers: int = CENTROIDS, limits: bool = True) -> tuple[list[Request], list[Worker]]:
    """A queue and a fleet: full, empty, over-full and draining workers, zero-token and oversized prompts."""
    workers = []
    for k in range(draw(st.integers(0, max_workers))):
        running = {
            f"run-{k}-{i}": RunningRequest(
                kv_tokens=draw(st.integers(0, 500)),
                remaining=draw(st.sampled_from([None, 0.0, 1.0, 3.0, 47.0, 48.0, 49.0, float("nan")])),
                generated=draw(st.integers(0, 60)),
            )
            for i in range(draw(st.integers(0, 4)))
        }
        workers.append(
            Worker(
                id=f"w{k}",
                max_running=draw(st.integers(0, 6)),
                running=running,
                kv_capacity=draw(st.sampled_from([None, 0, 300, 1500])) if limits else None,
                reserved_tokens=draw(st.sampled_from([0, 0, 40])),
                draining=draw(st.booleans()) and draw(st.booleans()),
            )
        )
    count = draw(st.integers(0, 14))
    vectors = signatures(count, 3) if count else []
    waiting = [
        Request(
            id=f"r{i}",
            prompt_tokens=draw(st.integers(0, 600)),
            arrival=draw(st.sampled_from([0.0, 1.0, 2.0])),
            signature=vectors[i] if i % 3 else None,
            prompt_hash=draw(st.sampled_from([None, "a", "b"])),
            domain=draw(st.sampled_from([None, "code", "law"])),
        )
        for i in range(count)
    ]
    return waiting, workers


def random_fleet(
    rng: np.random.Generator, workers: int, slots: int, free: int, waiting: int
) -> tuple[list[Request], list[Worker]]:
    """Busy workers with up to ``free`` free slots each, in the style of a conversation trace."""
    fleet = []
    for k in range(workers):
        running = {
            f"run-{k}-{i}": RunningRequest(
                kv_tokens=int(rng.integers(100, 4000)),
                remaining=float(rng.integers(1, 300)),
                generated=int(rng.integers(0, 300)),
            )
            for i in range(slots - int(rng.integers(0, free + 1)))
        }
        fleet.append(Worker(id=f"w{k}", max_running=slots, running=running))
    queue = [
        Request(id=f"r{i}", prompt_tokens=int(rng.integers(1, 4000)), arrival=float(i), prompt_hash=i % 7)
        for i in range(waiting)
    ]
    return queue, fleet


def check_promises(
    waiting: Sequence[Request], workers: Sequence[Worker], assignments: Sequence[Assignment], margin: int = 0
) -> None:
    """What every policy promises; ``margin`` is what the pool bypass may dispatch beyond ``max_running``."""
    requests = {request.id: request for request in waiting}
    by_id = {worker.id: worker for worker in workers}
    assigned = [assignment.request_id for assignment in assignments]
    assert len(set(assigned)) == len(assigned), "a request was assigned twice"
    assert set(assigned) <= set(requests), "something was assigned that does not wait"
    for worker in workers:
        got = [requests[a.request_id] for a in assignments if a.worker_id == worker.id]
        if got:
            assert not worker.draining
            assert len(worker.running) + len(got) <= worker.max_running + margin
            if worker.kv_capacity is not None:
                assert worker.kv_tokens + sum(request.prompt_tokens for request in got) <= worker.kv_capacity
    left_over = [request for request in waiting if request.id not in set(assigned)]
    if not assignments:
        for request in left_over:
            for worker in by_id.values():
                full = worker.free_slots == 0
                too_big = (
                    worker.kv_capacity is not None and worker.kv_tokens + request.prompt_tokens > worker.kv_capacity
                )
                assert full or too_big, "there is room, but nothing was admitted"
