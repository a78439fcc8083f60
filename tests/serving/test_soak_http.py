"""A thousand requests that are cancelled, cut off, oversized or malformed among good ones: nothing is lost."""

import asyncio
import random

import aiohttp
import pytest

PROMPT = "In the beginning the court"


async def good(session, url, rng, greedy_ids):
    """A request that must be answered, and rightly."""
    tokens = rng.randint(1, len(greedy_ids))
    parameters = {"max_new_tokens": tokens, "details": True, "ignore_eos": True, "exact": True}
    async with session.post(url + "/generate", json={"inputs": PROMPT, "parameters": parameters}) as response:
        body = await response.json()
        assert response.status == 200, body
        assert [token["id"] for token in body["details"]["tokens"]] == greedy_ids[:tokens]
    return "answered"


async def left(session, url, rng, greedy_ids):
    """A client that leaves, before or inside the answer."""
    path = rng.choice(["/generate", "/generate_stream"])
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 200, "ignore_eos": True}}
    try:
        async with asyncio.timeout(rng.uniform(0.0, 1.0)), session.post(url + path, json=body) as response:
            async for _ in response.content:
                if rng.random() < 0.1:
                    return "left"
            return "finished first"
    except TimeoutError:
        return "left"


async def oversized(session, url, rng, greedy_ids):
    data = b'{"inputs": "' + b"a" * rng.randint(250_000, 400_000) + b'"}'
    try:
        async with session.post(url + "/generate", data=data, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 413
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
        pass  # the server closed while we were still sending; a real client sees the same
    return "refused"


async def malformed(session, url, rng, greedy_ids):
    body = rng.choice(
        [b"{", b"[]", b"null", b'{"inputs": 3}', b'{"inputs": "a", "parameters": {"top_p": 2}}', b"\xff", b"",
         b'{"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "("}}}']
    )  # fmt: skip
    async with session.post(url + "/generate", data=body, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 422
        assert (await response.json())["error_type"] == "validation"
    return "refused"


async def half_sent(session, url, rng, greedy_ids):
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(rng.uniform(0, 0.5))
    writer.close()
    return "left"


async def storm(url: str, count: int, concurrency: int, greedy_ids: list[int]) -> dict[str, int]:
    rng = random.Random(0)
    kinds = [good] * 5 + [left] * 3 + [oversized, malformed, half_sent]
    gate = asyncio.Semaphore(concurrency)
    outcomes: dict[str, int] = {}

    async def one(kind, own):
        async with gate:
            outcome = await kind(session, url, own, greedy_ids)
            key = f"{kind.__name__}: {outcome}"
            outcomes[key] = outcomes.get(key, 0) + 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        await asyncio.gather(*(one(rng.choice(kinds), random.Random(i)) for i in range(count)))
    return outcomes


def check(server, greedy, count: int) -> None:
    failures = server.get("/metrics").text.count('tgi_request_failure{err="generation"}')
    outcomes = asyncio.run(storm(server.url, count, 24, greedy(PROMPT, 24)))
    assert sum(outcomes.values()) == count
    assert outcomes["good: answered"] > count / 4
    server.wait_until_idle(60)
    assert server.get("/metrics").text.count('tgi_request_failure{err="generation"}') == failures
    total = sum(server.metric(f'moe_opt_kv_pages{{state="{state}"}}') for state in ("free", "used", "cached"))
    page_tokens = server.metric("tgi_batch_max_total_tokens") / total
    assert page_tokens == int(page_tokens) > 0  # free + used + cached are all the pages there are
    assert server.get("/health").status_code == 200


def test_a_hundred_requests_of_all_kinds_lose_nothing(server, greedy):
    check(server, greedy, 100)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_requests_of_all_kinds_lose_nothing(server, greedy):
    check(server, greedy, 1000)
