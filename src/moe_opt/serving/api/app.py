"""The aiohttp application: routes, and what every request passes on its way: id, log, trace, key, errors, CORS."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from moe_opt.serving.api import hand_off, openai, operations, score, tgi
from moe_opt.serving.api.errors import ApiError, as_api_error, unhealthy_error
from moe_opt.serving.api.service import RequestTimes
from moe_opt.serving.api.state import REQUEST_ID_HEADER, STATE, ApiState, request_id_of, state_of

logger = logging.getLogger("moe_opt.serving.http")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# TGI's list; /chat_tokenize and the GET routes are open there too.
_GUARDED = frozenset(
    ["/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/vertex", "/invocations",
     "/tokenize", "/v1/score", "/v1/classify", "/v1/rerank"]
)  # fmt: skip
_ALWAYS_GUARDED = ("/brownout", "/kv_transfer/")
_QUIET = frozenset(["/health", "/ping", "/metrics"])  # asked every few seconds; logged at debug level


def create_app(state: ApiState) -> web.Application:
    """The application over `state`. Run it with `handler_cancellation=True`, so that a client that leaves cancels."""
    app = web.Application(
        middlewares=[_observe, _cors, _answer_errors, _guard], client_max_size=state.limits.payload_limit
    )
    app[STATE] = state
    app.on_response_prepare.append(_stamp)
    app.add_routes(
        [
            web.post("/", tgi.compat_generate),
            web.post("/generate", tgi.generate),
            web.post("/generate_stream", tgi.generate_stream),
            web.post("/vertex", tgi.vertex),
            web.post("/tokenize", tgi.tokenize),
            web.post("/v1/chat/completions", openai.chat_completions),
            web.post("/v1/completions", openai.completions),
            web.post("/chat_tokenize", openai.chat_tokenize),
            web.post("/v1/score", score.score),
            web.post("/v1/classify", score.classify),
            web.post("/v1/rerank", score.rerank),
            web.get("/v1/models", openai.models),
            web.get("/kv_transfer/{name}", hand_off.send_kv, allow_head=False),
            web.delete("/kv_transfer/{name}", hand_off.drop_kv),
            web.post("/invocations", operations.invocations),
            web.get("/", operations.health),
            web.get("/health", operations.health),
            web.get("/ping", operations.health),
            web.get("/info", operations.info),
            web.get("/metrics", operations.metrics),
            web.get("/brownout", operations.brownout),
            web.post("/brownout", operations.set_brownout),
            web.get("/docs", operations.docs),
            web.get("/api-doc/openapi.json", operations.openapi),
        ]
    )
    return app


@web.middleware
async def _observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Id, times, log line and span of a request; counts it while it is open, for draining."""
    state = state_of(request)
    request["request_id"] = request_id_of(request.headers)
    request["times"] = times = RequestTimes()
    fields = {"request_id": request["request_id"], "method": request.method, "path": request.path}
    state.open_requests += 1
    status = 499  # nginx's code for a client that left; replaced as soon as there is an answer
    attributes = {
        "http.request.method": request.method,
        "url.path": request.path,
        "moe_opt.request_id": fields["request_id"],
    }
    try:
        with state.tracer.span(f"{request.method} {request.path}", request.headers, attributes) as late:
            try:
                response = await handler(request)
                status = response.status
                return response
            finally:
                late["http.response.status_code"] = status
                late["moe_opt.validation_seconds"] = times.validation
    finally:
        state.open_requests -= 1
        level = logging.DEBUG if request.path in _QUIET else logging.INFO
        seconds = round(time.monotonic() - times.arrived, 6)
        logger.log(level, "request", extra={"fields": {**fields, "status": status, "seconds": seconds}})


@web.middleware
async def _cors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """TGI's policy: any origin unless some are named. /brownout is not for web pages."""
    if request.method == "OPTIONS" and "Origin" in request.headers and request.path != "/brownout":
        return web.Response(
            headers={
                "Access-Control-Allow-Methods": "GET,POST",
                "Access-Control-Allow-Headers": "content-type,authorization",
            }
        )
    return await handler(request)


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Headers that every answer carries, streams included."""
    state = state_of(request)
    response.headers[REQUEST_ID_HEADER] = request.get("request_id") or request_id_of(request.headers)
    origin = request.headers.get("Origin")
    if origin is not None and request.path != "/brownout":
        if not state.cors_allow_origin or "*" in state.cors_allow_origin:
            response.headers["Access-Control-Allow-Origin"] = "*"
        elif origin in state.cors_allow_origin:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure leaves as JSON in TGI's shape."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        limit = state_of(request).limits.payload_limit
        error = ApiError(413, "validation", f"the request body has more than {limit} bytes")
    except web.HTTPException as raised:
        if raised.status < 400:
            raise
        kind = {404: "not_found", 405: "method_not_allowed"}.get(raised.status, "http")
        response = web.json_response(
            {"error": f"{request.method} {request.path}: {raised.reason}", "error_type": kind}, status=raised.status
        )
        if "Allow" in raised.headers:
            response.headers["Allow"] = raised.headers["Allow"]
        return response
    except (asyncio.CancelledError, ConnectionError):
        raise  # the client is gone
    except ApiError as raised_error:
        error = raised_error
    except Exception as unexpected:
        error = as_api_error(unexpected)
        if error.status >= 424:
            logger.exception("request failed", extra={"fields": {"request_id": request.get("request_id")}})
    return web.json_response(error.body(), status=error.status)


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """API key and draining."""
    state = state_of(request)
    guarded = (request.method == "POST" and request.path in _GUARDED) or request.path.startswith(_ALWAYS_GUARDED)
    if state.api_key is not None and guarded:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.strip().encode("utf-8", "surrogateescape"), state.api_key.encode()
        ):
            return web.Response(status=401)
    if state.service.draining and request.method == "POST":
        raise unhealthy_error("the server is shutting down")
    return await handler(request)
