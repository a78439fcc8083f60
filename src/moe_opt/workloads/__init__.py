"""Traces and arrival processes, for the simulator and the load generator.

Every source becomes the same typed row, `TraceRequest`: arrival in seconds from the start, prompt and
output tokens, and what the source knows beyond that (prefix-block hashes, domain). NumPy only."""

from moe_opt.workloads.arrivals import (
    backlog,
    burst_profile_arrivals,
    gamma_arrivals,
    poisson_arrivals,
    rescale,
    with_arrivals,
)
from moe_opt.workloads.catalog import TRACES, load_trace
from moe_opt.workloads.multi_selection import multi_selection_requests
from moe_opt.workloads.rows import TraceRequest, rotate, summarize

__all__ = [
    "TRACES",
    "TraceRequest",
    "backlog",
    "burst_profile_arrivals",
    "gamma_arrivals",
    "load_trace",
    "multi_selection_requests",
    "poisson_arrivals",
    "rescale",
    "rotate",
    "summarize",
    "with_arrivals",
]
