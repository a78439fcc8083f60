"""Streams of events over real sockets: comments on a silent one, an end for one that nobody reads."""

import asyncio
import contextlib

from aiohttp import ClientSession, web

from moe_opt.serving.api.limits import Limits
from moe_opt.serving.api.sse import DONE, send_events


@contextlib.asynccontextmanager
async def serving(events, **limits):
    """(url, outcomes): a server that answers with `events`; outcomes get what ended each handler."""
    outcomes = []
    bounds = Limits(max_input_tokens=1, max_total_tokens=2, **limits)

    async def handler(request):
        stream = events()
        try:
            return await send_events(request, stream, headers={"X-Mine": "1"}, limits=bounds)
        except BaseException as error:
            outcomes.append(error)
            raise
        finally:
            await stream.aclose()
            outcomes.append("closed")

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/", outcomes
    finally:
        await runner.cleanup()


def test_events_and_comments_arrive_in_order():
    async def events():
        yield {"text": "größer", "n": 1}
        await asyncio.sleep(0.5)
        yield DONE

    async def main():
        async with serving(events, keep_alive=0.15) as (url, outcomes), ClientSession() as session:
            async with session.get(url) as response:
                assert response.headers["X-Mine"] == "1"
                body = (await response.read()).decode()
            frames = [part for part in body.split("\n\n") if part]
            assert frames[0] == 'data: {"text":"größer","n":1}'
            assert frames[-1] == "data: [DONE]"
            assert set(frames[1:-1]) == {":"}
            assert len(frames) >= 3
            assert outcomes == ["closed"]

    asyncio.run(main())


def test_a_stream_that_nobody_reads_is_cut_off():
    sent = 0

    async def events():
        nonlocal sent
        while True:
            sent += 1
            yield "x" * 65536

    async def main():
        async with serving(events, write_timeout=0.5) as (url, outcomes):
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rstrip("/").rsplit(":", 1)[1]), limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await writer.drain()
            async with asyncio.timeout(20):
                while "closed" not in outcomes:
                    await asyncio.sleep(0.05)
            stopped = sent
            await asyncio.sleep(0.3)
            assert sent == stopped
            assert isinstance(outcomes[0], (ConnectionError, asyncio.CancelledError))
            writer.close()

    asyncio.run(main())


def test_a_slow_reader_is_not_cut_off():
    # the whole takes longer than the bound, no single write does
    async def events():
        for _ in range(60):
            yield "x" * 65536
        yield DONE

    async def main():
        async with serving(events, write_timeout=2.5) as (url, outcomes):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(url.rstrip("/").rsplit(":", 1)[1]), limit=2**16
            )
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            seen = b""
            while part := await reader.read(2**16):
                seen = (seen + part)[-64:]
                await asyncio.sleep(0.1)
            assert b"[DONE]" in seen
            assert outcomes == ["closed"]
            writer.close()

    asyncio.run(main())
