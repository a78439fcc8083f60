"""Routes for operators: health, info, metrics, brownout, the OpenAPI description; and SageMaker's `/invocations`."""

from __future__ import annotations

import html
import ipaddress

import pydantic_core
from aiohttp import web

from moe_opt.serving.api.errors import unhealthy_error, validation_error
from moe_opt.serving.api.openai import answer_chat, answer_completion
from moe_opt.serving.api.openapi import description
from moe_opt.serving.api.schemas import BrownoutUpdate, ChatRequest, CompatGenerateRequest, CompletionRequest
from moe_opt.serving.api.state import parse, read_body, state_of
from moe_opt.serving.api.tgi import generate_answer, stream_response
from moe_opt.serving.telemetry import CONTENT_TYPE


async def health(request: web.Request) -> web.StreamResponse:
    """GET /health and /ping: 200 and nothing else while the engine runs."""
    state = state_of(request)
    if not state.engine.alive or state.service.draining:
        raise unhealthy_error()
    return web.Response()


async def info(request: web.Request) -> web.StreamResponse:
    """GET /info."""
    return web.json_response(state_of(request).info_body())


async def metrics(request: web.Request) -> web.StreamResponse:
    """GET /metrics."""
    state = state_of(request)
    state.metrics.engine_stats(state.engine.stats())
    if state.kv is not None:
        outcomes = state.kv.outcomes()
        state.metrics.kv_transfer(state.kv.waiting_bytes, outcomes)
    state.control.status()  # brings the gauges of thresholds and ways up to date
    return web.Response(text=state.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def brownout(request: web.Request) -> web.StreamResponse:
    """GET /brownout: thresholds, strategy, objectives and ways as they are now."""
    return web.json_response(state_of(request).control.status())


async def set_brownout(request: web.Request) -> web.StreamResponse:
    """POST /brownout: change them between two steps. Without an API key only clients on this machine may."""
    state = state_of(request)
    if state.api_key is None and not _is_local(request.remote):
        return web.json_response(
            {
                "error": "POST /brownout is open to this machine only; set --api-key to use it from elsewhere",
                "error_type": "forbidden",
            },
            status=403,
        )
    update = parse(BrownoutUpdate, await read_body(request))
    return web.json_response(await state.control.apply(**update.model_dump(exclude_none=True)))


def _is_local(remote: str | None) -> bool:
    try:
        return remote is None or ipaddress.ip_address(remote).is_loopback
    except ValueError:
        return False


async def invocations(request: web.Request) -> web.StreamResponse:
    """POST /invocations: a body of `/`, of chat or of completions, told apart by its keys."""
    raw = await read_body(request)
    try:
        body = pydantic_core.from_json(raw)
    except ValueError as error:
        raise validation_error(str(error)) from error
    keys = set(body) if isinstance(body, dict) else set()
    if "inputs" in keys:
        compat = parse(CompatGenerateRequest, raw)
        if compat.stream:
            return await stream_response(request, compat)
        answer, headers = await generate_answer(request, compat)
        return web.json_response(answer, headers=headers)
    if "messages" in keys:
        return await answer_chat(request, parse(ChatRequest, raw), raw)
    if "prompt" in keys:
        return await answer_completion(request, parse(CompletionRequest, raw))
    raise validation_error("expected `inputs`, `messages` or `prompt`")


async def openapi(request: web.Request) -> web.StreamResponse:
    """GET /api-doc/openapi.json."""
    return web.json_response(description())


async def docs(request: web.Request) -> web.StreamResponse:
    """GET /docs: the routes on one plain page."""
    rows = [
        f"<tr><td>{method.upper()}</td><td>{html.escape(path)}</td><td>{html.escape(operation['summary'])}</td></tr>"
        for path, operations in description()["paths"].items()
        for method, operation in operations.items()
    ]
    page = (
        "<!doctype html><meta charset=utf-8><title>moe-opt API</title><h1>moe-opt API</h1>"
        '<p>Machine-readable: <a href="/api-doc/openapi.json">/api-doc/openapi.json</a></p>'
        f"<table><tr><th>method<th>path<th>what it does</tr>{''.join(rows)}</table>"
    )
    return web.Response(text=page, content_type="text/html")
