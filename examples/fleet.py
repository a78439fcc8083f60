"""One prefill and two decode workers behind the router: launch, ask, look, kill one, and see the answer unharmed.

python examples/fleet.py                     # the demo model
python examples/fleet.py MODEL               # any folder or Hub id
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

from moe_opt.serving.launcher import FleetPlan, LocalFleet
from moe_opt.serving.router.app import create_app
from moe_opt.serving.router.config import RouterSettings
from moe_opt.serving.router.router import Router
from moe_opt.serving.router_flags import listen

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "demo_model")
PROMPT = "In the spring the old garden"


async def main() -> None:
    fleet = LocalFleet(FleetPlan(MODEL, prefill=1, decode=2, flags=("--dtype", "float32")))
    await fleet.start()
    router = Router(RouterSettings(policy="br-0", poll=0.2), fleet.specs)
    await router.start()
    runner = web.AppRunner(create_app(router), handler_cancellation=True)
    await runner.setup()
    sock = listen("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        while not router.ready:
            await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session:
            await ask(session, url, fleet)
    finally:
        await runner.cleanup()
        await router.close()
        await fleet.end()
        sock.close()


async def ask(session: aiohttp.ClientSession, url: str, fleet: LocalFleet) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 40}}
    async with session.post(url + "/generate", json=body) as answer:
        whole = (await answer.json())["generated_text"]
    print(f"{PROMPT}{whole}\n")

    text, killed = "", ""
    async with session.post(url + "/generate_stream", json=body) as answer:
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line[5:])
            text += event["token"]["text"]
            if event["index"] == 10:  # in the middle of its answer the worker dies
                async with session.get(url + "/router/state") as state:
                    workers = (await state.json())["workers"]
                killed = next(worker["id"] for worker in workers if worker["running"])
                os.kill(next(w.pid for w in fleet.workers if w.id == killed and w.pid), signal.SIGKILL)
    print(f"killed {killed} after ten tokens; the stream went on and says the same: {text == whole}")
    async with session.get(url + "/router/state") as state:
        found = await state.json()
    for worker in found["workers"]:
        print(f"  {worker['id']:10} {'up' if worker['up'] else 'down':5} holds {worker['kv_tokens']} KV tokens")
    assert text == whole


asyncio.run(main())
