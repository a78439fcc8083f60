"""Small traces and fleets that the simulator's tests share."""

from __future__ import annotations

import numpy as np
import pytest

from moe_opt.simulate import StepCost
from moe_opt.workloads import TraceRequest


@pytest.fixture
def cost() -> StepCost:
    """10 ms a step, 1 us per KV token."""
    return StepCost(fixed=0.01, per_kv_token=1e-6)


@pytest.fixture
def random_trace() -> list[TraceRequest]:
    """300 requests with lengths like a conversation's, two of them per 10 ms."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(0.005, 300))
    return [
        TraceRequest(f"r{i}", float(t), int(p) + 1, int(o) + 1)
        for i, (t, p, o) in enumerate(zip(arrivals, rng.lognormal(5, 1, 300), rng.lognormal(3, 1, 300), strict=True))
    ]
