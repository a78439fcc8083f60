"""The client's end of a request: an answer in one piece, or a stream that must never repeat or lose an event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from aiohttp import web

from moe_opt.serving.api.errors import ApiError
from moe_opt.serving.router.calls import Call

_HIGH_WATER = 1 << 16


class EventScanner:
    """Cuts a worker's bytes into whole events, without looking into them (D.3: integer updates, no JSON).

    Attributes:
        tokens: events with data that have passed. over: the last event of the stream is among them.
    """

    def __init__(self, call: Call, *, translated: bool = False) -> None:
        self._tail = b""
        self._last: tuple[bytes, ...] = (b"data: [DONE]",)
        if call.dialect == "tgi" and not translated:
            self._last = (b'"generated_text":"',)
        elif call.dialect == "chat":  # some clients of TGI cannot read [DONE] and do not get it
            self._last = (b"data: [DONE]", b'"finish_reason":"')
        self._last = (*self._last, b'data: {"error"')
        self.tokens = 0
        self.over = False

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that this chunk completes; the rest is kept."""
        if self._tail:
            chunk = self._tail + chunk
        if chunk.endswith(b"\n\n"):
            self._tail = b""
        else:
            end = chunk.rfind(b"\n\n") + 2
            if end == 1:
                self._tail = chunk
                return b""
            chunk, self._tail = chunk[:end], chunk[end:]
        self.tokens += chunk.count(b"data: {")
        if not self.over:
            for sign in self._last:  # a generator would cost more than the search
                if sign in chunk:
                    self.over = True
        return chunk


def lost_in(events: bytes) -> int:
    """Where the event begins with which a worker says that it cannot go on (it shuts down, or vLLM gave the request's
    KV away), -1 for none. What is before it is good."""
    for sign in (b'"error_type":"healthcheck"', b'"type":"healthcheck"', b'"stop_reason":"recomputed"',
                 b'"stop_reason": "recomputed"'):  # fmt: skip
        at = events.find(sign)
        if at >= 0:
            return events.rfind(b"data: ", 0, at)
    return -1


class ClientStream:
    """Writes to one client.

    Attributes:
        sent: every event that the client has, in order: what another worker must go on behind.
    """

    def __init__(self, request: web.Request, call: Call, write_timeout: float) -> None:
        self._request = request
        self._call = call
        self._write_timeout = write_timeout
        self.response: web.StreamResponse | None = None
        self.sent: list[bytes] = []

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the headers of a stream, once."""
        if self.response is not None:
            return
        kept = {key: value for key, value in headers.items() if key.lower().startswith("x-")}
        kept.pop("X-Request-Id", None)
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **kept,
            }
        )
        await self.response.prepare(self._request)

    async def send(self, events: bytes) -> None:
        """Raises ConnectionError if the client has gone, or reads nothing."""
        assert self.response is not None
        self.sent.append(events)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        if transport.get_write_buffer_size() < _HIGH_WATER:  # a timer per token would cost more than the write
            await self.response.write(events)
            return
        try:
            async with asyncio.timeout(self._write_timeout):
                await self.response.write(events)
        except TimeoutError as error:
            transport.abort()
            raise ConnectionResetError(f"the client read nothing for {self._write_timeout} s") from error

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End with an error: as an event where a stream was asked for, as TGI does, else as the answer."""
        if not self._call.stream:
            return web.json_response(error.body(), status=error.status)
        await self.begin({})
        assert self.response is not None
        body = error.body() if self._call.dialect == "tgi" else error.openai_body()
        await self.send(b"data: " + json.dumps(body).encode() + b"\n\n")
        if self._call.dialect != "tgi":
            await self.send(b"data: [DONE]\n\n")
        return await self.finish()

    async def finish(self) -> web.StreamResponse:
        assert self.response is not None
        await self.response.write_eof()
        return self.response
