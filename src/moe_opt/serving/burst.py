"""A burst against a running server, with and without brownout: BrownoutServe V-D (Figs. 12 and 13) in small.

Capacity and objective are measured on the machine at hand: the objective lies between the time per output token of a
full batch with all experts and with none but united ones, so that only brownout can keep it in the burst.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np

from moe_opt.errors import MoEOptError
from moe_opt.serving.load_prompts import PromptPool
from moe_opt.serving.loadgen import LoadRequest, RequestRecord, Target, ThresholdWatch, run_closed, run_load
from moe_opt.workloads.arrivals import burst_profile_arrivals


@dataclasses.dataclass(frozen=True, slots=True)
class BurstPlan:
    """The load of a burst.

    Attributes:
        prompt_tokens, output_tokens: of every request. concurrency: the server's batch size.
        stages: (name, seconds, rate as a multiple of the exact capacity). seed: of arrivals and prompts.
    """

    prompt_tokens: int = 32
    output_tokens: int = 128
    concurrency: int = 32
    stages: tuple[tuple[str, float, float], ...] = (("calm", 10.0, 0.5), ("burst", 20.0, 1.4), ("after", 15.0, 0.5))
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """A server under a full batch: requests per second and the median seconds between two tokens of a request."""

    requests_per_second: float
    tokens_per_second: float
    gap: float


@dataclasses.dataclass(frozen=True, slots=True)
class BurstRun:
    """One run: what happened to each request, and (seconds, prefill, decode) thresholds over time."""

    records: list[RequestRecord]
    thresholds: list[tuple[float, float, float]]


async def set_brownout(target: Target, **update: Any) -> dict[str, Any]:
    """POST /brownout.

    Raises:
        MoEOptError: the server refuses the update.
    """
    async with (
        aiohttp.ClientSession(headers=target.headers) as session,
        session.post(target.url.rstrip("/") + "/brownout", json=update) as response,
    ):
        body = await response.json(content_type=None)
        if response.status != 200:
            raise MoEOptError(f"{target.url} refused {update}: {body}")
        return body


async def measure_capacity(target: Target, pool: PromptPool, plan: BurstPlan, rounds: float = 2.0) -> Capacity:
    """Keeps the batch full for about `rounds` times its size of requests."""
    count = int(plan.concurrency * rounds)
    requests = [
        LoadRequest(f"capacity-{i}", 0.0, pool.cut(plan.prompt_tokens), plan.output_tokens, plan.prompt_tokens)
        for i in range(count)
    ]
    records, seconds = await run_closed(requests, target, plan.concurrency)
    ok = [record for record in records if record.status == "ok"]
    if not ok:
        raise MoEOptError(f"no request of the capacity test was answered: {records[0].error}")
    gaps = [gap for record in ok for gap in record.gaps]
    tokens = sum(record.output_tokens for record in ok)
    return Capacity(len(ok) / seconds, tokens / seconds, float(np.median(gaps)))


def burst_requests(pool: PromptPool, plan: BurstPlan, capacity: float) -> list[LoadRequest]:
    """Poisson arrivals of every stage at its multiple of `capacity` (requests per second)."""
    requests: list[LoadRequest] = []
    start = 0.0
    for index, (name, seconds, multiple) in enumerate(plan.stages):
        rate = multiple * capacity
        for time in burst_profile_arrivals([(seconds, rate)], seed=plan.seed + index):
            prompt = pool.cut(plan.prompt_tokens)
            requests.append(
                LoadRequest(
                    f"{name}-{len(requests)}", start + float(time), prompt, plan.output_tokens, plan.prompt_tokens, name
                )
            )
        start += seconds
    return requests


async def run_burst(
    target: Target,
    requests: Sequence[LoadRequest],
    *,
    settle: float = 0.0,
    on_done: Callable[[RequestRecord], None] | None = None,
) -> BurstRun:
    """Send the burst; watch the thresholds until `settle` seconds after the last answer."""
    watch = ThresholdWatch(target)
    watching = asyncio.create_task(watch.run())
    try:
        records = await run_load(requests, target, on_done=on_done)
        await asyncio.sleep(settle)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return BurstRun(records, watch.samples)


def missed_share(records: Sequence[RequestRecord], slo: float, start: float, end: float) -> float | None:
    """Share of the tokens that arrived in [start, end) seconds whose gap exceeded the objective; None without any."""
    gaps = [
        later - earlier
        for record in records
        for earlier, later in zip(record.token_times, record.token_times[1:], strict=False)
        if start <= later < end
    ]
    return float(np.mean(np.array(gaps) > slo)) if gaps else None


def recovery_seconds(thresholds: Sequence[tuple[float, float, float]], since: float) -> float | None:
    """Seconds from `since` until both thresholds are back at 1 for good; None if they are not."""
    low = [time for time, prefill, decode in thresholds if min(prefill, decode) < 1]
    if not thresholds or (low and low[-1] >= thresholds[-1][0]):
        return None
    return max(0.0, low[-1] - since) if low else 0.0


def tokens_by_threshold(run: BurstRun, edges: Sequence[float]) -> list[float]:
    """Share of all tokens generated at a decode threshold nearest to each of `edges`; sums to 1."""
    times = np.array([sample[0] for sample in run.thresholds])
    values = np.array([sample[2] for sample in run.thresholds])
    arrivals = np.array([time for record in run.records for time in record.token_times])
    if not len(times) or not len(arrivals):
        return [0.0 for _ in edges]
    at_token = values[np.clip(np.searchsorted(times, arrivals) - 1, 0, len(times) - 1)]
    nearest = np.abs(at_token[:, None] - np.array(edges)[None, :]).argmin(1)
    return [float(np.mean(nearest == index)) for index in range(len(edges))]
