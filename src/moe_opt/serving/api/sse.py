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


def frame(data: Any) -> bytes:
    """One event. Compact JSON as TGI writes it; text passes through as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
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
    # One task per stream, not a timer per token: a token must cost the event loop as little as possible.
    comments = asyncio.create_task(_comment(response, limits.keep_alive))
    try:
        async for event in events:
            async with asyncio.timeout(limits.write_timeout):
                await response.write(frame(event))
        await response.write_eof()
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client read nothing for {limits.write_timeout} s") from error
    finally:
        comments.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await comments
    return response


async def _comment(response: web.StreamResponse, keep_alive: float) -> None:
    while True:
        await asyncio.sleep(keep_alive)
        await response.write(b":\n\n")
