"""What a routing decision sees: waiting requests, workers with their running requests; and what it returns.

All quantities are counts of tokens unless a name says otherwise; times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_opt.errors import ConfigError


@dataclass(slots=True, eq=False)
class Request:
    """A request that has finished prefill (or waits for it) and needs a worker. Equal only to itself."""

    id: Hashable
    prompt_tokens: int
    """KV tokens it brings to its worker: the prompt, and what it has generated already if it moves."""
    arrival: float = 0.0
    signature: NDArray[np.floating[Any]] | None = None
    """Unit vector from ``SignatureModel.transform``; None where its experts are not known."""
    block_hashes: Sequence[Hashable] = ()
    """Chained hashes of the prompt's KV blocks, first block first; for prefix matching."""
    prompt_hash: Hashable | None = None
    """Identifies the whole prompt; the key of the exact-match predictor."""
    token_ids: Sequence[int] | None = None
    domain: str | None = None
    """Ground-truth label (task, language); read by the ``domain`` baseline alone."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens >= 0:
            raise ConfigError(f"request {self.id!r}: prompt_tokens must be 0 or more, got {self.prompt_tokens!r}")


@dataclass(slots=True)
class RunningRequest:
    """A request on a worker: running, or dispatched to it and not yet decoding."""

    kv_tokens: int
    """KV tokens it holds now: prompt and generated."""
    remaining: float | None = None
    """Decode steps it still needs, where that is known (an oracle, a trace); None or NaN where it is not."""
    generated: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    """One decode worker: a data-parallel rank, or an engine of its own. Equal only to itself."""

    id: Hashable
    max_running: int
    running: dict[Hashable, RunningRequest] = field(default_factory=dict)
    kv_capacity: int | None = None
    """KV tokens it can hold; None means that slots are the only limit."""
    reserved_tokens: int = 0
    """KV tokens held beside ``running`` (transfers under way, say): load, and less room under capacity."""
    draining: bool = False
    """It finishes what it has and gets nothing new."""

    @property
    def free_slots(self) -> int:
        """Requests it may still take: 0 when draining."""
        return 0 if self.draining else max(0, self.max_running - len(self.running))

    @property
    def kv_tokens(self) -> int:
        """KV load L_g: the tokens whose keys and values a decode step reads, plus what is reserved."""
        return self.reserved_tokens + sum(request.kv_tokens for request in self.running.values())


class Assignment(NamedTuple):
    """One decision: this request goes to this worker, now."""

    request_id: Hashable
    worker_id: Hashable
