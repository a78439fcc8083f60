"""Arrival processes, and how to give them to a trace. Times in seconds, rates in requests per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_opt.errors import ConfigError
from moe_opt.workloads.rows import TraceRequest


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a positive number, not {value}")


def poisson_arrivals(count: int, rate: float, seed: int = 0) -> NDArray[np.float64]:
    """`count` arrival times of a Poisson process."""
    return gamma_arrivals(count, rate, cv=1.0, seed=seed)


def gamma_arrivals(count: int, rate: float, cv: float, seed: int = 0) -> NDArray[np.float64]:
    """Arrival times with Gamma gaps of coefficient of variation `cv`: 1 is Poisson, above 1 comes in
    bursts."""
    _positive("rate", rate)
    _positive("cv", cv)
    shape = 1.0 / cv**2
    gaps = np.random.default_rng(seed).gamma(shape, 1.0 / (rate * shape), size=count)
    return np.cumsum(gaps)


def burst_profile_arrivals(
    profile: Sequence[tuple[float, float]], seed: int = 0, *, repeat_until: float | None = None
) -> NDArray[np.float64]:
    """A Poisson process whose rate follows `profile`, a list of (duration in s, rate); a rate may be 0.

    With `repeat_until` the profile is repeated up to that time.
    """
    if not profile or any(d <= 0 or r < 0 for d, r in profile):
        raise ConfigError("a burst profile is a list of (duration > 0, rate >= 0)")
    rng = np.random.default_rng(seed)
    total = sum(duration for duration, _ in profile)
    rounds = 1 if repeat_until is None else max(1, int(np.ceil(repeat_until / total)))
    times: list[NDArray[np.float64]] = []
    start = 0.0
    for duration, rate in list(profile) * rounds:
        count = rng.poisson(rate * duration)
        times.append(start + np.sort(rng.uniform(0.0, duration, size=count)))
        start += duration
    arrivals = np.concatenate(times)
    return arrivals if repeat_until is None else arrivals[arrivals < repeat_until]


def with_arrivals(trace: Sequence[TraceRequest], arrivals: NDArray[np.float64]) -> list[TraceRequest]:
    """The trace's requests, in order, at the given times; stops at the shorter of the two."""
    return [replace(r, arrival=float(t)) for r, t in zip(trace, arrivals, strict=False)]


def rescale(trace: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The trace with its own pattern of arrivals, stretched or pressed to a mean of `rate` requests per
    second."""
    _positive("rate", rate)
    if len(trace) < 2 or trace[-1].arrival == trace[0].arrival:
        raise ConfigError("only a trace with differing arrival times can be rescaled; use a Poisson process")
    start = trace[0].arrival
    factor = (len(trace) - 1) / rate / (trace[-1].arrival - start)
    return [replace(r, arrival=(r.arrival - start) * factor) for r in trace]


def backlog(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Every request waits from time 0, in trace order. Heavy load is this, fed through a closed pool of
    given depth (`PoolFeed` of the simulator): a fleet near saturation with requests always waiting
    (BalanceRoute section 6.1)."""
    return [replace(r, arrival=0.0) for r in trace]
