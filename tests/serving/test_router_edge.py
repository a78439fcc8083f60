"""The router's edge without workers behind it: health, keys, limits, operators' routes, workers that are not there."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from moe_opt.errors import ConfigError
from moe_opt.serving.launcher import free_port, vllm_commands
from moe_opt.serving.router.app import create_app
from moe_opt.serving.router.config import RouterSettings, WorkerSpec
from moe_opt.serving.router.router import Router

QUICK = {"pool_ttl": 0.3, "poll": 0.05, "backoff": 0.0, "retries": 1}


def with_router(use, specs=(), *, api_key=None, trace=None, headers=None, **settings):
    async def main():
        router = Router(RouterSettings(**{**QUICK, **settings}), specs, api_key=api_key, trace=trace)
        await router.start()
        runner = web.AppRunner(create_app(router), handler_cancellation=True, access_log=None)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as session:
                await use(session, router)
        finally:
            await runner.cleanup()
            await router.close()

    asyncio.run(main())


def test_alive_but_not_ready_without_workers():
    async def use(session, router):
        assert (await session.get("/live")).status == 200
        for path in ("/health", "/info", "/v1/models"):
            answer = await session.get(path)
            assert answer.status == 503
            assert (await answer.json())["error_type"] == "healthcheck"
        assert (await session.get("/router/state")).status == 200
        assert (await (await session.get("/router/state")).json())["workers"] == []
        assert (await session.get("/ui")).status == 200
        answer = await session.get("/nowhere")
        assert (answer.status, (await answer.json())["error_type"]) == (404, "not_found")
        assert (await session.get("/generate")).status == 405

    with_router(use)


def test_a_request_that_no_worker_can_take_ends_after_its_ttl():
    async def use(session, router):
        answer = await session.post("/generate", json={"inputs": "a"})
        assert (answer.status, (await answer.json())["error_type"]) == (429, "overloaded")
        answer = await session.post("/generate_stream", json={"inputs": "a"})
        text = await answer.text()
        assert json.loads(text.strip()[6:]) == {"error": "Model is overloaded", "error_type": "overloaded"}
        assert (await session.post("/tokenize", json={"inputs": "a"})).status == 503
        assert router.in_flight == router.pool.waiting == router.prefill.waiting == 0

    gone = WorkerSpec(f"http://127.0.0.1:{free_port()}", "decode")
    with_router(use, [gone])
    with_router(use)


def test_more_requests_than_the_bound_are_refused_at_once():
    async def use(session, router):
        waiting = [asyncio.ensure_future(session.post("/generate", json={"inputs": "a"})) for _ in range(2)]
        while router.in_flight < 2:
            await asyncio.sleep(0.01)
        answer = await session.post("/generate", json={"inputs": "a"})
        assert answer.status == 429
        assert [(await answer).status for answer in waiting] == [429, 429]

    with_router(use, max_concurrent_requests=2)


def test_bodies_have_a_bound():
    async def use(session, router):
        answer = await session.post("/generate", data=b"x" * 2000, headers={"Content-Type": "application/json"})
        assert answer.status == 413
        assert "1000 bytes" in (await answer.json())["error"]

    with_router(use, payload_limit=1000)


def test_the_key_guards_what_generates_and_what_changes():
    async def use(session, router):
        for path in ("/generate", "/router/workers", "/router/brownout"):
            assert (await session.post(path, json={})).status == 401
        assert (await session.get("/router/state")).status == 401
        assert (await session.get("/live")).status == 200
        right = {"Authorization": "Bearer secret"}
        assert (await session.get("/router/state", headers=right)).status == 200
        assert (await session.get("/router/state", headers={"Authorization": "Bearer wrong"})).status == 401

    with_router(use, api_key="secret")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({}, "url"),
        ({"url": "ftp://x", "role": "decode"}, "no worker's address"),
        ({"url": "http://x:1", "role": "decode", "max_running": 0}, "max_running"),
        ({"url": "http://x:1", "role": "decode", "max_running": True}, "right type"),
        ({"url": "http://x:1", "role": "decode", "id": "a b"}, "worker id"),
        ({"url": "http://x:1", "role": "decode", "other": 1}, "unknown key"),
        ([], "JSON object"),
    ],
)
def test_operators_get_one_clear_error(body, what):
    async def use(session, router):
        answer = await session.post("/router/workers", json=body)
        assert answer.status == 422
        assert what in (await answer.json())["error"]
        assert not router.fleet.workers

    with_router(use)


def test_signatures_that_are_none_are_refused(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"no npz")

    async def use(session, router):
        for path in (str(tmp_path / "bad.npz"), str(tmp_path / "none.npz")):
            answer = await session.post("/router/signatures", json={"path": path})
            assert answer.status in (422, 424), await answer.text()
        assert (await session.post("/router/signatures", json={})).status == 422

    with_router(use)


def test_policies_are_checked_before_anything_starts():
    with pytest.raises(ConfigError, match="unknown routing policy"):
        Router(RouterSettings(policy="nonsense"))
    with pytest.raises(ConfigError, match="--signature-model"):
        Router(RouterSettings(policy="eldr"))
    with pytest.raises(ConfigError, match="no option"):
        Router(RouterSettings(policy="jsq", options={"tau": 1}))


def test_a_worker_that_is_no_worker_stays_down_and_is_said(caplog):
    async def use(session, router):
        other = web.Application()
        other.router.add_get("/health", lambda request: _text("ok"))
        runner = web.AppRunner(other, access_log=None)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        answer = await session.post("/router/workers", json={"url": f"http://127.0.0.1:{port}", "role": "decode"})
        assert answer.status == 201
        await asyncio.sleep(0.3)
        worker = (await (await session.get("/router/state")).json())["workers"][0]
        assert worker["up"] is False
        assert worker["kv_utilisation"] == 1.0
        await runner.cleanup()

    async def _text(text):
        return web.Response(text=text)

    with_router(use)


def test_the_same_fleet_on_vllm():
    lines = vllm_commands("M", 1, 2, "br-0")
    assert len(lines) == 4
    assert all("NixlConnector" in line for line in lines[:3])
    assert lines[3].startswith("moe-opt router --prefill http://HOST:8100 --decode http://HOST:8200")
