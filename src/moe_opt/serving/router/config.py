"""Settings of the router: every bound is explicit."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal
from urllib.parse import urlsplit

from moe_opt.errors import ConfigError

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to route to.

    Attributes:
        url: its address. role: what it is asked to do. id: its name in states and metrics; default: host:port.
        rank: data-parallel rank behind a shared address (vLLM), sent as `X-data-parallel-rank`.
        max_running: requests it decodes at once, where it does not say so itself.
    """

    url: str
    role: Role
    id: str = ""
    rank: int | None = None
    max_running: int | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{self.url!r} is no worker's address: expected something like http://127.0.0.1:3000")
        if self.role not in ROLES:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        if self.max_running is not None and self.max_running < 1:
            raise ConfigError(f"max_running must be at least 1, got {self.max_running}")
        if not re.fullmatch(r"[\w.:@-]{0,64}", self.id):
            raise ConfigError(f"worker id {self.id!r}: letters, digits, and . : @ _ - only, 64 at most")

    @property
    def name(self) -> str:
        if self.id:
            return self.id
        rank = "" if self.rank is None else f"@{self.rank}"
        return f"{urlsplit(self.url).netloc}{rank}"

    @classmethod
    def parse(cls, text: str, role: Role) -> WorkerSpec:
        """`[ID=]URL[@RANK]`, as on the command line."""
        match = re.fullmatch(r"(?:([\w.:-]+)=)?(http://[^@\s]+?)/?(?:@(\d+))?", text)
        if match is None:
            raise ConfigError(f"{text!r} is no worker: expected [ID=]http://HOST:PORT[@RANK]")
        rank = None if match[3] is None else int(match[3])
        return cls(match[2], role, match[1] or "", rank)


@dataclasses.dataclass(frozen=True, slots=True)
class RouterSettings:
    """How the router routes and what it bounds. Times are seconds.

    Attributes:
        policy, options: of `make_policy`. signature_model: path of a fitted one; needed by `eldr`.
        max_concurrent_requests: in the router at once; more get 429. pool_ttl: how long a prefilled request may wait
            for a decode slot, and a new one for a prefill worker.
        prefill_saturation: prompt tokens under way on a prefill worker at which it gets no more.
        prefill_utilisation: share of a prefill worker's KV at which it gets no more (back-pressure).
        max_running: requests of a decode worker that does not tell. pool_bypass: with br-0, send on at once, up to
            `bypass_margin` requests above a worker's batch.
        retries: further workers tried for a request. backoff: before the first of them, doubled for each.
        poll: between two looks at a worker's health and metrics. poll_timeout: for each look.
        connect_timeout, prefill_timeout: for a worker's answer. request_timeout: for the whole answer, None for none.
        idle_timeout: between two pieces of a stream from a worker. write_timeout: that a client may read nothing.
        payload_limit: bytes of a request body.
    """

    policy: str = "jsq"
    options: dict[str, object] = dataclasses.field(default_factory=dict)
    signature_model: str | None = None
    max_concurrent_requests: int = 512
    pool_ttl: float = 60.0
    prefill_saturation: float = 16_384.0
    prefill_utilisation: float = 0.95
    max_running: int = 32
    pool_bypass: bool = False
    bypass_margin: int = 2
    retries: int = 3
    backoff: float = 0.05
    poll: float = 0.5
    poll_timeout: float = 2.0
    connect_timeout: float = 5.0
    prefill_timeout: float = 120.0
    request_timeout: float | None = None
    idle_timeout: float = 120.0
    write_timeout: float = 60.0
    payload_limit: int = 2_000_000

    def __post_init__(self) -> None:
        for name in ("max_concurrent_requests", "max_running", "payload_limit"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("retries", "bypass_margin", "backoff"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in (
            "pool_ttl", "prefill_saturation", "poll", "poll_timeout", "connect_timeout", "prefill_timeout",
            "request_timeout", "idle_timeout", "write_timeout",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be above 0, got {value}")
        if not 0 < self.prefill_utilisation <= 1:
            raise ConfigError(f"prefill_utilisation must be in (0, 1], got {self.prefill_utilisation}")
        if self.pool_bypass and self.policy != "br-0":
            raise ConfigError("pool_bypass is for policy br-0: the others choose among those who wait")
