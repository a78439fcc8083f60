"""The router's edge: TGI's and OpenAI's routes, health, metrics, state, and what operators change at run time."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import aiohttp
from aiohttp import web

from moe_opt import __version__
from moe_opt.errors import MoEOptError
from moe_opt.serving.api.errors import ApiError, as_api_error, overloaded_error, unhealthy_error, validation_error
from moe_opt.serving.api.state import REQUEST_ID_HEADER, request_id_of
from moe_opt.serving.observability import Tracer
from moe_opt.serving.router.calls import parse_call
from moe_opt.serving.router.config import WorkerSpec
from moe_opt.serving.router.journey import Journey
from moe_opt.serving.router.router import Router
from moe_opt.serving.telemetry import CONTENT_TYPE

logger = logging.getLogger("moe_opt.router.http")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ROUTER: web.AppKey[Router] = web.AppKey("router", Router)
TRACER: web.AppKey[Tracer] = web.AppKey("tracer", Tracer)
FORWARDED = (
    "/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/vertex", "/invocations",
    "/tokenize", "/chat_tokenize", "/v1/score", "/v1/classify", "/v1/rerank",
)  # fmt: skip
_QUIET = frozenset(["/health", "/ping", "/metrics", "/router/state", "/ui"])
_BODY_TIMEOUT = 60.0


def create_app(router: Router, tracer: Tracer | None = None) -> web.Application:
    """The application over a started router. Run it with `handler_cancellation=True`."""
    app = web.Application(middlewares=[_observe, _guard], client_max_size=router.settings.payload_limit)
    app[ROUTER] = router
    app[TRACER] = tracer or Tracer()
    app.on_response_prepare.append(_stamp)
    app.add_routes([web.post(path, forward) for path in FORWARDED])
    app.add_routes(
        [
            web.get("/", health),
            web.get("/health", health),
            web.get("/ping", health),
            web.get("/live", live),
            web.get("/info", info),
            web.get("/v1/models", models),
            web.get("/metrics", metrics),
            web.get("/router/state", state),
            web.post("/router/workers", add_worker),
            web.delete("/router/workers/{id}", remove_worker),
            web.post("/router/workers/{id}/drain", drain_worker),
            web.post("/router/workers/{id}/resume", resume_worker),
            web.post("/router/brownout", set_brownout),
            web.post("/router/signatures", set_signatures),
            web.get("/ui", dashboard),
        ]
    )
    return app


@web.middleware
async def _observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Request id, log line, span, and errors in TGI's shape."""
    router = request.app[ROUTER]
    request["request_id"] = request_id_of(request.headers)
    started = time.monotonic()
    status = 499
    attributes = {"http.request.method": request.method, "url.path": request.path}
    try:
        with request.app[TRACER].span(f"{request.method} {request.path}", request.headers, attributes) as late:
            try:
                response = await _answered(request, handler)
                status = response.status
                return response
            finally:
                late["http.response.status_code"] = status
    except (asyncio.CancelledError, ConnectionError):
        router.metrics.disconnects.inc()
        raise
    finally:
        level = logging.DEBUG if request.path in _QUIET else logging.INFO
        if logger.isEnabledFor(level):
            fields = {
                "request_id": request["request_id"],
                "method": request.method,
                "path": request.path,
                "status": status,
                "seconds": round(time.monotonic() - started, 6),
            }
            logger.log(level, "request", extra={"fields": fields})


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[ROUTER].settings.payload_limit
        error = ApiError(413, "validation", f"the request body has more than {limit} bytes")
    except web.HTTPException as raised:
        if raised.status < 400:
            raise
        kind = {404: "not_found", 405: "method_not_allowed"}.get(raised.status, "http")
        error = ApiError(raised.status, kind, f"{request.method} {request.path}: {raised.reason}")
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as unexpected:
        error = as_api_error(unexpected)
        if error.status == 424 and not isinstance(unexpected, MoEOptError):
            logger.exception("request failed")
    return web.json_response(error.body(), status=error.status)


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    if "request_id" in request:
        response.headers[REQUEST_ID_HEADER] = request["request_id"]


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The API key; without one, operators' routes are open to this machine only."""
    router = request.app[ROUTER]
    operator = request.path.startswith("/router/") and request.method != "GET"
    if router.api_key is not None:
        if request.method != "GET" or request.path.startswith("/router/"):
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                key.strip().encode("utf-8", "surrogateescape"), router.api_key.encode()
            ):
                return web.Response(status=401)
    elif operator and not _is_local(request.remote):
        raise ApiError(403, "forbidden", f"{request.path} is open to this machine only; set --api-key")
    return await handler(request)


def _is_local(remote: str | None) -> bool:
    try:
        return remote is None or ipaddress.ip_address(remote).is_loopback
    except ValueError:
        return False


async def forward(request: web.Request) -> web.StreamResponse:
    """Every route that a worker answers."""
    router = request.app[ROUTER]
    router.metrics.requests.labels(request.path).inc()
    if router.draining:
        raise unhealthy_error("the router is shutting down")
    if router.in_flight >= router.settings.max_concurrent_requests:
        router.metrics.failures.labels("overloaded").inc()
        raise overloaded_error()
    router.in_flight += 1
    try:
        try:
            async with asyncio.timeout(_BODY_TIMEOUT):
                raw = await request.read()
        except TimeoutError as error:
            raise ApiError(408, "validation", f"the request body did not arrive within {_BODY_TIMEOUT} s") from error
        return await Journey(router, request, parse_call(request.path, raw), request["request_id"]).run()
    finally:
        router.in_flight -= 1


async def health(request: web.Request) -> web.StreamResponse:
    """GET /health: readiness, 200 only with one prefill and one decode worker that answer."""
    router = request.app[ROUTER]
    if not router.ready:
        missing = [role for role in ("prefill", "decode") if not router.fleet.ready(role)]
        why = "the router is shutting down" if router.draining else f"no {' and no '.join(missing)} worker is ready"
        raise unhealthy_error(why)
    return web.Response()


async def live(request: web.Request) -> web.StreamResponse:
    """GET /live: liveness, 200 while the process answers."""
    return web.Response()


async def info(request: web.Request) -> web.StreamResponse:
    """GET /info: of a worker, with the router's name."""
    said = await _of_a_worker(request, "/info")
    said.pop("moe_opt", None)
    return web.json_response({**said, "router": "moe-opt-router", "version": __version__})


async def models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models: of a worker."""
    return web.json_response(await _of_a_worker(request, "/v1/models"))


async def _of_a_worker(request: web.Request, path: str) -> dict[str, Any]:
    router = request.app[ROUTER]
    timeout = aiohttp.ClientTimeout(total=router.settings.poll_timeout)
    for handle in [*router.fleet.ready("decode"), *router.fleet.ready("prefill")]:
        try:
            async with router.session.get(handle.url + path, timeout=timeout) as answer:
                if answer.status == 200:
                    return dict(await answer.json())
                if answer.status == 404 and path == "/info":  # vLLM
                    return {"model_id": handle.model}
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("worker %s: %s", handle.id, error)
    raise unhealthy_error("no worker is ready")


async def metrics(request: web.Request) -> web.StreamResponse:
    """GET /metrics."""
    return web.Response(body=request.app[ROUTER].render_metrics(), headers={"Content-Type": CONTENT_TYPE})


async def state(request: web.Request) -> web.StreamResponse:
    """GET /router/state."""
    return web.json_response(request.app[ROUTER].state())


async def _body(request: web.Request, allowed: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as error:
        raise validation_error(str(error)) from error
    if not isinstance(body, dict):
        raise validation_error("expected a JSON object")
    for key, value in body.items():
        if key not in allowed:
            raise validation_error(f"unknown key {key!r}; there are: {', '.join(allowed)}")
        if not isinstance(value, allowed[key]) or (isinstance(value, bool) and bool not in allowed[key]):
            raise validation_error(f"{key}: {value!r} is not of the right type")
    return body


async def add_worker(request: web.Request) -> web.StreamResponse:
    """POST /router/workers {"url", "role", "id"?, "rank"?, "max_running"?}."""
    body = await _body(request, {"url": (str,), "role": (str,), "id": (str,), "rank": (int,), "max_running": (int,)})
    if "url" not in body or "role" not in body:
        raise validation_error("a worker needs `url` and `role`")
    handle = request.app[ROUTER].fleet.add(WorkerSpec(**{**body, "url": body["url"].rstrip("/")}))
    return web.json_response(handle.describe(), status=201)


async def remove_worker(request: web.Request) -> web.StreamResponse:
    """DELETE /router/workers/{id}: its requests in flight run on."""
    router = request.app[ROUTER]
    handle = router.fleet.remove(request.match_info["id"])
    router.prefill.forget(handle.id)
    return web.json_response(handle.describe())


async def drain_worker(request: web.Request) -> web.StreamResponse:
    """POST /router/workers/{id}/drain: nothing new goes there; it may be restarted once `running` is 0."""
    return web.json_response(request.app[ROUTER].fleet.drain(request.match_info["id"]).describe())


async def resume_worker(request: web.Request) -> web.StreamResponse:
    """POST /router/workers/{id}/resume: it gets requests again."""
    return web.json_response(request.app[ROUTER].fleet.drain(request.match_info["id"], False).describe())


async def set_brownout(request: web.Request) -> web.StreamResponse:
    """POST /router/brownout {"enabled"?: bool, "floor"?: number}: for all workers."""
    body = await _body(request, {"enabled": (bool,), "floor": (int, float)})
    answer = await request.app[ROUTER].set_brownout(enabled=body.get("enabled"), floor=body.get("floor"))
    return web.json_response(answer)


async def set_signatures(request: web.Request) -> web.StreamResponse:
    """POST /router/signatures {"path"}: route by a refitted signature model from now on."""
    body = await _body(request, {"path": (str,)})
    if "path" not in body:
        raise validation_error("`path` of a signature model is missing")
    model = request.app[ROUTER].use_signatures(body["path"])
    return web.json_response({"rho": model.rho, "layers": list(model.layers), "centroids": len(model.centroids)})


async def dashboard(request: web.Request) -> web.StreamResponse:
    """GET /ui: one page without external requests."""
    page = resources.files("moe_opt.serving.dashboard").joinpath("index.html").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    return web.Response(text=page, content_type="text/html", headers={"Content-Security-Policy": policy})
