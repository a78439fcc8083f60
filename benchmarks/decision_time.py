"""CPU time of one routing decision, per policy and fleet size, on one core.

    OMP_NUM_THREADS=1 python benchmarks/decision_time.py            # about two minutes
    OMP_NUM_THREADS=1 python benchmarks/decision_time.py --sizes 8 --ticks 300

A fleet in steady state: every worker has 32 slots, outputs last 200 tokens on average, a fixed number of
requests waits, and the policy is asked once per decode step. "Refill" frees four slots of every worker before
the call. The clock is the thread's CPU time, so that other processes on the machine count less.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from common import write_result

from moe_opt.cluster import Policy, Request, RunningRequest, Worker, make_policy
from moe_opt.cluster.signature import SignatureModel

SLOTS = 32
WAITING = {8: 128, 64: 512, 256: 2000}
POLICIES: list[tuple[str, str, dict[str, Any]]] = [
    ("random", "random", {}),
    ("round-robin", "round-robin", {}),
    ("p2c", "p2c", {}),
    ("jsq", "jsq", {}),
    ("least-kv", "least-kv", {}),
    ("vllm-queue", "vllm-queue", {}),
    ("vllm-kv", "vllm-kv", {}),
    ("br-0", "br-0", {}),
    ("br-h oracle", "br-h", {}),
    ("br-h survival", "br-h", {"predictor": "survival"}),
    ("br-h exact-match", "br-h", {"predictor": "exact-match"}),
    ("br-h length-bucket", "br-h", {"predictor": "length-bucket"}),
    ("br-h learned", "br-h", {"predictor": "learned"}),
]


class SteadyFleet:
    """A fleet that decodes one token per step, with a queue that never runs dry."""

    def __init__(self, num_workers: int, waiting: int, rng: np.random.Generator):
        self.rng = rng
        self.target = waiting
        self.made = 0
        self.now = 0.0
        self.left: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self.workers = [Worker(f"worker-{k}", SLOTS) for k in range(num_workers)]
        self.queue: list[Request] = []
        self._fill_queue()
        for worker in self.workers:
            for _ in range(SLOTS):
                self._start(self.queue.pop(0), worker, age=int(rng.integers(0, 100)))
                self._fill_queue()

    def step(self, policy: Policy, refill: bool) -> float:
        """One decode step; returns the CPU seconds that the decision took."""
        if refill:
            for worker in self.workers:
                for request_id in list(worker.running)[: max(0, 4 - worker.free_slots)]:
                    self._finish(request_id, worker, policy)
        begin = time.thread_time()
        assignments = policy.assign(self.queue, self.workers, self.now)
        seconds = time.thread_time() - begin
        by_id = {worker.id: worker for worker in self.workers}
        chosen = {assignment.request_id for assignment in assignments}
        for assignment in assignments:
            self._start(self.requests[assignment.request_id], by_id[assignment.worker_id])
        self.queue = [request for request in self.queue if request.id not in chosen]
        self._fill_queue()
        for worker in self.workers:
            for request_id, running in list(worker.running.items()):
                running.kv_tokens += 1
                running.generated += 1
                running.remaining -= 1
                if running.remaining <= 0:
                    self._finish(request_id, worker, policy)
        self.now += 0.05
        return seconds

    def _fill_queue(self) -> None:
        while len(self.queue) < self.target:
            prompt = int(self.rng.lognormal(6.5, 1.0)) + 1
            request = Request(self.made, prompt, arrival=self.now, prompt_hash=self.made % 97)
            self.left[self.made] = int(self.rng.gamma(3.0, 200 / 3)) + 1
            self.requests[self.made] = request
            self.queue.append(request)
            self.made += 1

    def _start(self, request: Request, worker: Worker, age: int = 0) -> None:
        worker.running[request.id] = RunningRequest(request.prompt_tokens + age, float(self.left[request.id]), age)

    def _finish(self, request_id: Any, worker: Worker, policy: Policy) -> None:
        generated = worker.running.pop(request_id).generated
        policy.observe_finished(self.requests.pop(request_id), max(generated, 1))
        del self.left[request_id]


def percentiles(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds) * 1e3
    return {name: round(float(np.percentile(values, q)), 4) for name, q in (("p50_ms", 50), ("p99_ms", 99))}


def time_ticks(name: str, options: dict[str, Any], num_workers: int, ticks: int, refill: bool) -> dict[str, float]:
    policy = make_policy(name, seed=0, **options)
    rng = np.random.default_rng(0)
    for i in range(1500):  # what the predictors have seen
        policy.observe_finished(
            Request(("past", i), int(rng.lognormal(6.5, 1.0)) + 1, prompt_hash=i % 97), int(rng.gamma(3.0, 200 / 3)) + 1
        )
    fleet = SteadyFleet(num_workers, WAITING[num_workers], rng)
    for _ in range(20):
        fleet.step(policy, refill)
    return percentiles([fleet.step(policy, refill) for _ in range(ticks)])


def time_eldr(ticks: int) -> dict[str, Any]:
    """24 workers, signatures of 48 layers x 128 experts: a request at a time, and a queue of 64 in one
    call."""
    rng = np.random.default_rng(0)
    layers, experts, workers = 48, 128, 24
    centroids = unit(rng.random((workers, layers * experts)))
    model = SignatureModel(
        num_layers=layers,
        num_experts=experts,
        layers=tuple(range(layers)),
        weighting="count",
        idf_weights=np.ones((layers, experts)),
        centroids=centroids,
        rho=1.0,
        cross_validated_rho={},
        similarity_mean=1.0,
        similarity_std=0.0,
        shares=np.full(workers, 1 / workers),
    )
    signatures = unit(centroids[rng.integers(0, workers, size=64)] + 0.5 * rng.random((64, layers * experts)))
    policy = make_policy("eldr", signature_model=model)
    single: list[float] = []
    batch: list[float] = []
    for tick in range(max(ticks, 50)):
        fleet = [
            Worker(k, 64, {(k, i): RunningRequest(500) for i in range(int(rng.integers(20, 40)))})
            for k in range(workers)
        ]
        queue = [Request((tick, i), 500, signature=vector) for i, vector in enumerate(signatures)]
        for request in queue[:8]:
            begin = time.thread_time()
            policy.assign([request], fleet, 0.0)
            single.append(time.thread_time() - begin)
        begin = time.thread_time()
        policy.assign(queue, fleet, 0.0)
        batch.append((time.thread_time() - begin) / len(queue))
    return {
        "workers": workers,
        "signature_width": layers * experts,
        "one_at_a_time": percentiles(single),
        "queue_of_64_per_request": percentiles(batch),
    }


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 256], choices=sorted(WAITING))
    parser.add_argument("--ticks", type=int, default=400, help="decisions per case at 8 workers; fewer at more")
    args = parser.parse_args()
    rows = []
    for workers in args.sizes:
        ticks = max(30, args.ticks * 8 // workers)
        for label, name, options in POLICIES:
            row: dict[str, Any] = {"policy": label, "workers": workers, "waiting": WAITING[workers]}
            row["steady"] = time_ticks(name, options, workers, ticks, refill=False)
            if name.startswith("br"):
                row["refill"] = time_ticks(name, options, workers, max(30, ticks // 4), refill=True)
            rows.append(row)
            steady, refill = row["steady"], row.get("refill")
            print(
                f"{workers:4d} workers {label:20s} steady p50 {steady['p50_ms']:7.3f} p99 {steady['p99_ms']:7.3f} ms"
                + (f"   refill p50 {refill['p50_ms']:7.3f} p99 {refill['p99_ms']:7.3f} ms" if refill else ""),
                flush=True,
            )
    eldr = time_eldr(args.ticks // 4)
    print(
        f"eldr, 24 workers: p50 {eldr['one_at_a_time']['p50_ms']:.4f} ms a request alone, "
        f"{eldr['queue_of_64_per_request']['p50_ms']:.4f} ms in a queue of 64"
    )
    write_result("decision_time", {"slots": SLOTS, "rows": rows, "eldr": eldr})


if __name__ == "__main__":
    main()
