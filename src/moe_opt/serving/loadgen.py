"""Open-loop load generator: every request leaves at its own time, however slow the server is.

Speaks TGI's dialect (`/generate_stream`, one event per token) and OpenAI's (`/v1/completions`), so that one run drives
our server, TGI and vLLM alike. Times are seconds since the start of the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterable, Callable, Sequence
from typing import Any, Literal

import aiohttp

from moe_opt.errors import MoEOptError

Dialect = Literal["tgi", "openai"]


class LoadError(MoEOptError):
    """The server cannot be used for a load test at all: nobody listens, or it refuses the key."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send. `stage` labels it in the summary ("before", "burst", ...)."""

    id: str
    arrival: float
    prompt: str
    output_tokens: int
    prompt_tokens: int = 0
    stage: str = "all"


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """What happened to one request.

    Attributes:
        scheduled, sent, finished: seconds since the start; `sent - scheduled` is the generator's own lateness.
        token_times: arrival of each token. status: "ok", "overloaded", "error" or "timeout".
        prompt_tokens, output_tokens: as the server counts them where it says so.
        lowest_threshold, browned_share: brownout as the server reports it, None where it does not.
    """

    id: str
    stage: str
    scheduled: float
    sent: float = 0.0
    finished: float = 0.0
    token_times: list[float] = dataclasses.field(default_factory=list)
    status: str = "error"
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    lowest_threshold: float | None = None
    browned_share: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def e2e(self) -> float | None:
        return self.finished - self.sent if self.status == "ok" else None


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A server and how to speak to it. `exact` asks ours for exact output; `ignore_eos` fixes the output length."""

    url: str
    dialect: Dialect = "tgi"
    model: str = "tgi"
    api_key: str | None = None
    exact: bool = False
    ignore_eos: bool = True
    timeout: float = 300.0

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def path(self) -> str:
        return self.url.rstrip("/") + ("/generate_stream" if self.dialect == "tgi" else "/v1/completions")

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """Greedy, so that two runs generate the same."""
        if self.dialect == "tgi":
            parameters: dict[str, Any] = {"max_new_tokens": request.output_tokens, "details": True, "do_sample": False}
            if self.ignore_eos:
                parameters["ignore_eos"] = True
            if self.exact:
                parameters["exact"] = True
            return {"inputs": request.prompt, "parameters": parameters}
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.exact:
            body["exact"] = True
        return body


async def run_load(
    requests: Sequence[LoadRequest], target: Target, *, on_done: Callable[[RequestRecord], None] | None = None
) -> list[RequestRecord]:
    """Send every request at its arrival time; returns when all have ended, in the order given.

    Raises:
        LoadError: nobody listens at the target, or it refuses the key (401).
    """
    await check_target(target)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=target.headers) as session:
        start = time.monotonic()
        tasks = [asyncio.create_task(_run_one(session, request, target, start, on_done)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()


async def run_closed(
    requests: Sequence[LoadRequest], target: Target, concurrency: int
) -> tuple[list[RequestRecord], float]:
    """Keep `concurrency` requests in flight until all are done: the server's capacity. Returns records and seconds."""
    await check_target(target)
    waiting = list(reversed(requests))
    records: list[RequestRecord] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=target.headers) as session:
        start = time.monotonic()

        async def client() -> None:
            while waiting:
                request = dataclasses.replace(waiting.pop(), arrival=time.monotonic() - start)
                records.append(await _run_one(session, request, target, start, None))

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return records, time.monotonic() - start


async def check_target(target: Target) -> None:
    """Fail at once, with one clear sentence, where no request could succeed."""
    try:
        async with (
            aiohttp.ClientSession(headers=target.headers, timeout=aiohttp.ClientTimeout(total=10)) as session,
            session.get(target.url.rstrip("/") + "/health") as response,
        ):
            if response.status in (401, 403):
                raise LoadError(f"{target.url} refuses the API key: give the right one with --api-key")
            if response.status == 503:
                raise LoadError(f"{target.url} says that it is not healthy (503): look at its log")
    except aiohttp.InvalidURL as error:
        raise LoadError(f"{target.url!r} is no address: expected something like http://127.0.0.1:3000") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(f"nobody answers at {target.url} ({error}): start a server with `moe-opt serve`") from error


async def _run_one(
    session: aiohttp.ClientSession,
    request: LoadRequest,
    target: Target,
    start: float,
    on_done: Callable[[RequestRecord], None] | None,
) -> RequestRecord:
    record = RequestRecord(request.id, request.stage, request.arrival, prompt_tokens=request.prompt_tokens)
    await asyncio.sleep(max(0.0, start + request.arrival - time.monotonic()))
    record.sent = time.monotonic() - start
    try:
        async with asyncio.timeout(target.timeout):
            async with session.post(target.path(), json=target.body(request)) as response:
                if response.status != 200:
                    record.status = "overloaded" if response.status == 429 else "error"
                    record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                else:
                    await _read_stream(response.content, record, start, target.dialect)
    except TimeoutError:
        record.status, record.error = "timeout", f"no answer within {target.timeout} s"
    except (aiohttp.ClientError, ConnectionError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.finished = time.monotonic() - start
    if on_done is not None:
        on_done(record)
    return record


async def _read_stream(lines: AsyncIterable[bytes], record: RequestRecord, start: float, dialect: Dialect) -> None:
    """Token times and outcome of one stream. Only events that can matter are parsed: the generator shares the machine
    with the server in most tests."""
    last = b""
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        now = time.monotonic() - start
        data = line[5:].strip()
        if data == b"[DONE]":
            continue
        if data.startswith(b'{"error"'):
            error = json.loads(data)["error"]
            record.error = error if isinstance(error, str) else str(error.get("message"))
            record.status = "overloaded" if "overloaded" in record.error else "error"
            return
        if dialect == "tgi":
            record.token_times.append(now)
            last = data
        else:
            event = json.loads(data)
            _take_openai(event, record, now)
    if dialect == "tgi":
        _take_tgi(json.loads(last) if last else {}, record)
    elif not record.error:
        record.status = "ok" if record.token_times else "error"


def _take_tgi(event: dict[str, Any], record: RequestRecord) -> None:
    details = event.get("details")
    if not details:
        record.error = "the stream ended without a final event"
        return
    record.status = "ok"
    record.output_tokens = int(details["generated_tokens"])
    record.prompt_tokens = int(details.get("input_length") or record.prompt_tokens)
    _take_brownout(event, record)


def _take_openai(event: dict[str, Any], record: RequestRecord, now: float) -> None:
    usage = event.get("usage")
    if usage:
        record.output_tokens = int(usage["completion_tokens"])
        record.prompt_tokens = int(usage["prompt_tokens"])
    if event.get("choices"):
        record.token_times.append(now)
    _take_brownout(event, record)


def _take_brownout(event: dict[str, Any], record: RequestRecord) -> None:
    brownout = event.get("brownout")
    if brownout:
        record.lowest_threshold = float(brownout["lowest_threshold"])
        record.browned_share = float(brownout["browned_share"])


@dataclasses.dataclass(slots=True)
class ThresholdWatch:
    """Polls `GET /brownout` beside a load; `samples` are (seconds, prefill, decode). Empty for servers without it."""

    target: Target
    period: float = 0.25
    samples: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled."""
        start = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(headers=self.target.headers, timeout=timeout) as session:
            while True:
                try:
                    async with session.get(self.target.url.rstrip("/") + "/brownout") as response:
                        if response.status != 200:
                            return
                        body = await response.json()
                except (aiohttp.ClientError, TimeoutError, ConnectionError):
                    return
                thresholds = (float(body["prefill"]["threshold"]), float(body["decode"]["threshold"]))
                self.samples.append((time.monotonic() - start, *thresholds))
                await asyncio.sleep(self.period)
