"""Route requests with five policies over the same small fleet, and see how level each keeps it.

    python examples/route_requests.py

Eight workers of eight slots decode in lockstep: every step waits for the worker with the most KV tokens. A
router calls `policy.assign` on its live state as this loop does.
"""

import random

from moe_opt.cluster import Request, RunningRequest, Worker, make_policy

POLICIES = {
    "jsq": {},
    "least-kv": {},
    "br-0": {},
    "br-h, survival": {"predictor": "survival"},
    "br-h, oracle": {"predictor": "oracle"},
}


def replay(name: str, options: dict, steps: int = 1500) -> tuple[float, float]:
    """(mean max - min KV tokens, mean KV tokens of the heaviest worker) over the steps."""
    rng = random.Random(0)
    policy = make_policy(name, seed=0, **options)
    workers = [Worker(f"worker-{k}", max_running=8) for k in range(8)]
    by_id = {worker.id: worker for worker in workers}
    requests: dict[int, Request] = {}
    output_tokens: dict[int, int] = {}
    waiting: list[Request] = []
    spread = heaviest = 0
    for step in range(steps):
        while len(waiting) < 32:
            request = Request(len(requests), prompt_tokens=int(rng.lognormvariate(6.5, 1.0)), arrival=float(step))
            requests[request.id] = request
            output_tokens[request.id] = int(rng.gammavariate(3, 60)) + 1
            waiting.append(request)

        for request_id, worker_id in policy.assign(waiting, workers, now=float(step)):
            request = requests[request_id]
            waiting.remove(request)
            by_id[worker_id].running[request_id] = RunningRequest(request.prompt_tokens, output_tokens[request_id])

        loads = [worker.kv_tokens for worker in workers]
        spread += max(loads) - min(loads)
        heaviest += max(loads)
        for worker in workers:  # one decode step
            for request_id, running in list(worker.running.items()):
                running.kv_tokens += 1
                running.generated += 1
                running.remaining -= 1
                if running.remaining == 0:
                    del worker.running[request_id]
                    policy.observe_finished(requests[request_id], running.generated)
    return spread / steps, heaviest / steps


print(f"{'policy':16s} {'max - min':>10s} {'heaviest':>10s}   KV tokens, mean over the steps")
for label, options in POLICIES.items():
    spread, heaviest = replay(label.split(",")[0], options)
    print(f"{label:16s} {spread:10.0f} {heaviest:10.0f}")
