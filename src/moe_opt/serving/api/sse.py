"""Server-sent events: one `data:` line per event, a comment now and then so that proxies keep the line open."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from moe_opt.serving.api.limits import Limits

DONE = "[DONE]"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps makes one per call


def frame(data: Any) -> bytes:
    """One event. Compact JSON as TGI writes it; text passes through as it is."""
    text = data if isinstance(data, str) else _encode(data)
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


async def send_events(
    request: web.Request, events: AsyncIterator[Any], *, headers: Mapping[str, str], limits: Limits
) -> web.StreamResponse:
    """Answer with a stream of events. The caller closes `events`; a client that leaves cancels the handler.

    Args:
        events: JSON-serialisable objects, or text. limits: seconds between two comments, and how long a client may
            leave the stream unread before it is cut off: it holds a slot all the while.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            **headers,
        }
    )
    await response.prepare(request)
    # One watcher per stream, not a timer per token: a token must cost the event loop as little as possible, which
    # shares the interpreter with the engine.
    watch = _Watch(request, response, limits)
    watcher = asyncio.create_task(watch.run())
    now = asyncio.get_running_loop().time
    try:
        async for event in events:
            watch.writing_since = now()
            await response.write(frame(event))
            watch.writing_since = None
        watch.writing_since = now()
        await response.write_eof()
    except ConnectionError as error:
        if watch.gave_up:
            raise ConnectionResetError(f"the client read nothing for {limits.write_timeout} s") from error
        raise
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await watcher
    return response


class _Watch:
    """Sends comments, and cuts off a client that leaves the stream unread: then a write waits."""

    def __init__(self, request: web.Request, response: web.StreamResponse, limits: Limits) -> None:
        self.writing_since: float | None = None
        self.gave_up = False
        self._request = request
        self._response = response
        self._limits = limits

    async def run(self) -> None:
        now = asyncio.get_running_loop().time
        patience = self._limits.write_timeout
        next_comment = now() + self._limits.keep_alive
        while True:
            await asyncio.sleep(min(patience / 4, max(next_comment - now(), 0.0)))
            since = self.writing_since
            if since is not None:
                if now() - since > patience and self._request.transport is not None:
                    self.gave_up = True
                    self._request.transport.abort()
                    return
            elif now() >= next_comment:
                await self._response.write(b":\n\n")
            if now() >= next_comment:
                next_comment = now() + self._limits.keep_alive
