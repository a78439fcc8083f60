"""What the routes share: one object in the aiohttp application."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic
from aiohttp import web

from moe_opt import __version__
from moe_opt.serving.api.errors import ApiError, validation_error
from moe_opt.serving.api.limits import Limits
from moe_opt.serving.api.prompts import PromptEncoder
from moe_opt.serving.api.service import GenerationService, RequestTimes
from moe_opt.serving.api.validation import Validator
from moe_opt.serving.brownout_control import BrownoutControl
from moe_opt.serving.engine.types import EngineClient
from moe_opt.serving.observability import Tracer
from moe_opt.serving.telemetry import Metrics

EXACT_HEADER = "x-moe-opt-exact"
BROWNOUT_HEADER = "x-moe-opt-brownout"
REQUEST_ID_HEADER = "X-Request-Id"
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
if TYPE_CHECKING:
    from moe_opt.serving.kv_transfer import KVTransfer
M = TypeVar("M", bound=pydantic.BaseModel)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInfo:
    """What `/info` says about the model."""

    model_id: str
    model_sha: str | None = None
    model_pipeline_tag: str | None = "text-generation"
    compute_type: str = "cpu"
    docker_label: str | None = None


@dataclasses.dataclass(slots=True)
class ApiState:
    """All that a route needs."""

    engine: EngineClient
    service: GenerationService
    validator: Validator
    encoder: PromptEncoder
    limits: Limits
    info: ModelInfo
    metrics: Metrics
    control: BrownoutControl
    kv: KVTransfer | None = None
    role: str | None = None
    tracer: Tracer = dataclasses.field(default_factory=Tracer)
    api_key: str | None = None
    cors_allow_origin: tuple[str, ...] = ()
    open_requests: int = 0
    max_batch_size: int = 1
    scoring: int = 0  # requests of the scoring routes under way
    started: float = dataclasses.field(default_factory=time.time)

    @property
    def system_fingerprint(self) -> str:
        return f"{__version__}-{self.info.docker_label or 'native'}"

    def info_body(self) -> dict[str, Any]:
        """The answer of `/info`."""
        return {
            "model_id": self.info.model_id,
            "model_sha": self.info.model_sha,
            "model_pipeline_tag": self.info.model_pipeline_tag,
            "max_concurrent_requests": self.limits.max_concurrent_requests,
            "max_best_of": self.limits.max_best_of,
            "max_stop_sequences": self.limits.max_stop_sequences,
            "max_input_tokens": self.limits.max_input_tokens,
            "max_total_tokens": self.limits.max_total_tokens,
            "validation_workers": self.encoder.workers,
            "max_client_batch_size": self.limits.max_client_batch_size,
            "router": "moe-opt",
            "version": __version__,
            "sha": None,
            "docker_label": self.info.docker_label,
            "moe_opt": self.worker_body(),
        }

    def worker_body(self) -> dict[str, Any]:
        """What a router asks of a worker."""
        stats = self.engine.stats()
        return {
            "role": self.role,
            "pid": os.getpid(),
            "max_batch_size": self.max_batch_size,
            "kv_capacity": stats.total_pages * stats.page_size,
            "page_size": stats.page_size,
        }


STATE: web.AppKey[ApiState] = web.AppKey("state", ApiState)


def state_of(request: web.Request) -> ApiState:
    return request.app[STATE]


def times_of(request: web.Request) -> RequestTimes:
    """The times of a request, begun when its first byte was handled."""
    return request["times"]


def request_id_of(headers: Any) -> str:
    """The client's own request id if it is printable, else a new one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def wants_exact(request: web.Request) -> bool:
    """The header that asks for exact output.

    Raises:
        ApiError: a value that is neither yes nor no; guessing would answer the wrong question.
    """
    value = request.headers.get(EXACT_HEADER)
    if value is None:
        return False
    word = value.strip().lower()
    if word in ("1", "true", "yes"):
        return True
    if word in ("0", "false", "no"):
        return False
    raise validation_error(f"header {EXACT_HEADER} must be true or false, got {value!r}")


async def read_body(request: web.Request) -> bytes:
    """The body of a JSON request.

    Raises:
        ApiError: 415 for another content type, as in TGI; 408 for a sender that is too slow.
    """
    content_type = request.content_type
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(415, "validation", f"Expected request with `Content-Type: application/json`, got {content_type}")
    limit = state_of(request).limits.body_timeout
    try:
        async with asyncio.timeout(limit):
            return await request.read()
    except TimeoutError as error:
        raise ApiError(408, "validation", f"the request body did not arrive within {limit} s") from error


def parse(model: type[M], body: bytes) -> M:
    """A body as its schema; the first problem becomes one line."""
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise validation_error(f"{where}: {first['msg']}" if where else str(first["msg"])) from error
