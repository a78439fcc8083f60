"""The one row type that every trace reader returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_opt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Output tokens are what the model generated: a router may not look at them."""

    id: str
    arrival: float  # seconds from the start of the trace
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()  # prefix blocks, chained: equal hashes mean equal prefixes
    domain: str | None = None  # task, language or client, where the source names one
    prompt_hash: int | None = None  # identity of the whole prompt, where the source knows it

    def __post_init__(self) -> None:
        if not np.isfinite(self.arrival) or self.arrival < 0:
            raise ConfigError(f"request {self.id}: arrival must be finite and at least 0, not {self.arrival}")
        if self.prompt_tokens < 1:
            raise ConfigError(f"request {self.id}: prompt_tokens must be at least 1, not {self.prompt_tokens}")
        if self.output_tokens < 1:
            raise ConfigError(f"request {self.id}: output_tokens must be at least 1, not {self.output_tokens}")


def rotate(trace: Sequence[TraceRequest], offset: int) -> list[TraceRequest]:
    """The trace begun at request `offset`, arrivals shifted to start at 0; what lies before is put behind
    the end.

    Replays from several offsets are the replicates of a single trace.
    """
    if not trace:
        return []
    offset %= len(trace)
    start, end = trace[offset].arrival, trace[-1].arrival
    head = [replace(r, arrival=r.arrival - start) for r in trace[offset:]]
    first = trace[0].arrival
    tail = [replace(r, arrival=end - start + (r.arrival - first)) for r in trace[:offset]]
    return head + tail


def summarize(trace: Sequence[TraceRequest]) -> dict[str, float]:
    """Size and shape of a trace: counts, mean and 95th-percentile lengths (tokens), rate (requests per
    second)."""
    if not trace:
        return {"requests": 0.0}
    prompts = np.array([r.prompt_tokens for r in trace])
    outputs = np.array([r.output_tokens for r in trace])
    span = trace[-1].arrival - trace[0].arrival
    return {
        "requests": float(len(trace)),
        "mean_prompt_tokens": float(prompts.mean()),
        "p95_prompt_tokens": float(np.percentile(prompts, 95)),
        "mean_output_tokens": float(outputs.mean()),
        "p95_output_tokens": float(np.percentile(outputs, 95)),
        "rate": float((len(trace) - 1) / span) if span > 0 else float("inf"),
    }
