"""CPU that the router spends on one pass-through chunk, with a core of its own.

    python benchmarks/router_chunk.py

`router_cost.py` measures the same with real workers, which on a small machine take the router's core away and add to
its CPU time. Here a source in another process paces 64 streams of 50 chunks a second, so that nothing waits for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time

import aiohttp
from aiohttp import web
from common import write_result

from moe_opt.serving.launcher import free_port
from moe_opt.serving.router.app import create_app
from moe_opt.serving.router.config import RouterSettings, WorkerSpec
from moe_opt.serving.router.router import Router
from moe_opt.serving.router.server import loop_factory

CHUNK = (
    b'data: {"object":"text_completion","id":"cmpl-0","created":1,"model":"m","system_fingerprint":"f","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":"","token_ids":[5]}]}\n\n'
)
PAUSE = 0.02


def source(port: int, chunks: int) -> None:
    """A worker's routes, and streams at a fixed pace."""

    async def completions(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(chunks):
            await response.write(CHUNK)
            await asyncio.sleep(PAUSE)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def info(request: web.Request) -> web.Response:
        own = {"role": "both", "pid": 1, "max_batch_size": 1024, "kv_capacity": 10**7, "page_size": 16}
        return web.json_response({"model_id": "m", "moe_opt": own})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="".join(f'moe_opt_kv_pages{{state="{s}"}} 1.0\n' for s in ("free", "used", "cached")))

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    for path, handler in (("/info", info), ("/metrics", metrics), ("/health", health)):
        app.router.add_get(path, handler)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


async def clients(url: str, streams: int) -> None:
    async def one(session: aiohttp.ClientSession) -> None:
        body = {"prompt": "a", "stream": True, "max_tokens": 1}
        async with session.post(url + "/v1/completions", json=body) as answer:
            async for _ in answer.content.iter_any():
                pass

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session) for _ in range(streams)))


async def measure(streams: int, runs: int, seconds: float) -> list[float]:
    upstream, port = free_port(), free_port()
    chunks = int((runs + 1) * (seconds + 1) / PAUSE) + 200
    processes = [subprocess.Popen([sys.executable, __file__, "--source", str(upstream), "--chunks", str(chunks)])]
    router = Router(RouterSettings(max_running=1024), [WorkerSpec(f"http://127.0.0.1:{upstream}", "both")])
    await router.start()
    runner = web.AppRunner(create_app(router), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        while not router.ready:
            await asyncio.sleep(0.1)
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, "--clients", f"http://127.0.0.1:{port}", "--streams", str(streams)]
            )
        )
        (worker,) = router.fleet.workers.values()
        while len(worker.state.running) < streams:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        found = []
        for _ in range(runs):
            before, used = sum(r.generated for r in worker.state.running.values()), time.process_time()
            await asyncio.sleep(seconds)
            passed = sum(r.generated for r in worker.state.running.values()) - before
            found.append(1e6 * (time.process_time() - used) / passed)
        return found
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await runner.cleanup()
        await router.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--source", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--chunks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--clients", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.source is not None:
        source(args.source, args.chunks)
        return
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if args.clients is not None:
            runner.run(clients(args.clients, args.streams))
            return
        found = runner.run(measure(args.streams, args.runs, args.seconds))
    median = statistics.median(found)
    print(f"{median:.1f} us of CPU a chunk at {args.streams} streams (runs: {', '.join(f'{v:.1f}' for v in found)})")
    print("wanted: at most 40 us")
    write_result("router_chunk", {"streams": args.streams, "cpu_us_per_chunk": median, "runs": found})


if __name__ == "__main__":
    main()
