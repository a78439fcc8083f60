"""Multi-selection requests (MoE-Prefill section 3.1): one request over K candidates becomes K binary
siblings that share their prefix, such as one user's profile scored against a list of items."""

from __future__ import annotations

import numpy as np

from moe_opt.errors import ConfigError
from moe_opt.workloads.rows import TraceRequest


def multi_selection_requests(
    num_groups: int,
    *,
    candidates: tuple[int, int] = (4, 32),
    prefix_tokens: tuple[int, int] = (256, 8192),
    suffix_tokens: tuple[int, int] = (8, 64),
    returns: float = 0.3,
    block_tokens: int = 16,
    rate: float = 10.0,
    seed: int = 0,
) -> list[TraceRequest]:
    """Siblings of `num_groups` requests that arrive as a Poisson process of `rate` groups per second.

    Prefix lengths are log-uniform, candidate counts and suffixes uniform, both ends included. A share
    `returns` of the groups scores an earlier prefix again, against new candidates: cross-batch reuse.
    Siblings arrive interleaved with those of their neighbours, as a queue of concurrent users has them;
    output is 1 token."""
    if num_groups < 1 or block_tokens < 1 or not 0 <= returns <= 1:
        raise ConfigError("multi_selection_requests: num_groups and block_tokens from 1, returns within [0, 1]")
    for name, (low, high) in {
        "candidates": candidates,
        "prefix": prefix_tokens,
        "suffix": suffix_tokens,
    }.items():
        if not 1 <= low <= high:
            raise ConfigError(f"multi_selection_requests: {name} must satisfy 1 <= low <= high")
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1.0 / rate, size=num_groups))
    prefixes: list[int] = []  # tokens of each prefix seen so far
    rows: list[TraceRequest] = []
    for group, start in enumerate(starts):
        if prefixes and rng.uniform() < returns:
            owner = int(rng.integers(len(prefixes)))
        else:
            low, high = np.log(prefix_tokens[0]), np.log(prefix_tokens[1])
            prefixes.append(round(float(np.exp(rng.uniform(low, high)))))
            owner = len(prefixes) - 1
        length = prefixes[owner]
        shared = tuple(owner * 1_000_000 + b for b in range(length // block_tokens))
        for item in range(int(rng.integers(candidates[0], candidates[1] + 1))):
            suffix = int(rng.integers(suffix_tokens[0], suffix_tokens[1] + 1))
            own_blocks = (length + suffix) // block_tokens - len(shared)
            own = tuple(-(group * 100_000 + item * 1_000 + b + 1) for b in range(own_blocks))
            arrival = float(start + rng.exponential(0.5 / rate))
            rows.append(TraceRequest(f"g{group}i{item}", arrival, length + suffix, 1, shared + own, f"prefix-{owner}"))
    return sorted(rows, key=lambda r: r.arrival)
