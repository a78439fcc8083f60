"""The router's process: sockets, signals, draining."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from moe_opt.serving.observability import Tracer
from moe_opt.serving.router.app import create_app
from moe_opt.serving.router.router import Router

logger = logging.getLogger("moe_opt.router")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def serve_router(
    router: Router,
    listening: socket.socket,
    *,
    graceful: float,
    tracer: Tracer | None = None,
    beside: Callable[[Router, asyncio.Event], Awaitable[Any]] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then let requests in flight finish.

    Args:
        graceful: seconds that they get. beside: runs along, told when to stop (the launcher's care of its workers).
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await router.start()
    runner = web.AppRunner(create_app(router, tracer), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.SockSite(runner, listening, backlog=1024)
    await site.start()
    host, port = listening.getsockname()[:2]
    logger.info("serving on http://%s:%s", "127.0.0.1" if host in ("0.0.0.0", "::") else host, port)
    along = asyncio.ensure_future(beside(router, stop)) if beside is not None else None
    try:
        await stop.wait()
        logger.info("shutting down: %d requests in flight get up to %.0f s", router.in_flight, graceful)
        router.draining = True
        await site.stop()
        deadline = loop.time() + graceful
        while router.in_flight and loop.time() < deadline:
            await asyncio.sleep(0.05)
        if router.in_flight:
            logger.warning("%d requests did not finish in time and are cancelled", router.in_flight)
    finally:
        stop.set()
        await runner.cleanup()
        await router.close()
        if along is not None:
            await along
        if tracer is not None:
            tracer.close()
    return 0
