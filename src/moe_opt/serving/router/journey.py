"""The way of one request through the fleet: prefill, pool, decode, and on to another worker when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from aiohttp import web

from moe_opt.cluster.state import Request
from moe_opt.serving.api.errors import ApiError, generation_error, overloaded_error, unhealthy_error
from moe_opt.serving.router.calls import (
    Call,
    Upstream,
    decode_upstream,
    generated_in,
    prefill_upstream,
    whole_upstream,
)
from moe_opt.serving.router.client import ClientStream, EventScanner, lost_in
from moe_opt.serving.router.dispatch import text_blocks
from moe_opt.serving.router.fleet import WorkerHandle, least_loaded

if TYPE_CHECKING:
    from moe_opt.serving.router.router import Router

logger = logging.getLogger("moe_opt.router")
_FORWARDED = ("Authorization", "traceparent", "tracestate", "x-moe-opt-exact")
_UNBOUNDED = 1 << 30


class WorkerLost(Exception):
    """The worker broke off: nothing is wrong with the request, which may go on elsewhere.

    Attributes:
        gone: it does not answer at all; False if it said that it cannot.
    """

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


class Journey:
    """One request in the router.

    Attributes:
        request: what policies see of it, once its prompt is computed. reply: of the prefill worker.
    """

    def __init__(self, router: Router, http: web.Request, call: Call, request_id: str) -> None:
        self._router = router
        self._settings = router.settings
        self._http = http
        self._call = call
        self._id = request_id
        self._key = (request_id, id(self))  # two clients may send the same id
        self._arrived = time.monotonic()
        self._client = ClientStream(http, call, self._settings.write_timeout)
        self._headers = {"X-Request-Id": request_id, "Content-Type": "application/json"}
        for name in _FORWARDED:
            if name in http.headers:
                self._headers[name] = http.headers[name]
        self._ticket: dict[str, Any] | None = None
        self._ticket_owner: WorkerHandle | None = None
        self._prompt_ids: list[int] | None = None
        self._first_token: float | None = None
        self._last_token = 0.0
        self._tokens = 0
        self.request = Request(self._key, 0, arrival=self._arrived)

    async def run(self) -> web.StreamResponse:
        """Answer the client. Errors leave in TGI's shape; a client that leaves cancels this."""
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                if self._call.splits:
                    return await self._split()
                return await self._whole()
        except TimeoutError:
            return await self._client.fail(generation_error(f"it took longer than {self._settings.request_timeout} s"))
        except ApiError as error:
            self._router.metrics.failures.labels(error.metric).inc()
            return await self._client.fail(error)
        finally:
            self._drop_ticket()

    # ------------------------------------------------------------- prefill here, decode there

    async def _split(self) -> web.StreamResponse:
        blocks, tokens = text_blocks(self._call.text)
        self.request = Request(self._key, tokens, arrival=self._arrived, block_hashes=blocks)
        if any(handle.spec.role == "prefill" for handle in self._router.fleet.workers.values()):
            refusal = await self._prefill()
            if refusal is not None:
                return refusal
        prompt_tokens = self.request.prompt_tokens
        limit = self._call.max_new_tokens or _UNBOUNDED
        for attempt in range(self._settings.retries + 1):
            generated, text = self._sent()
            self.request.prompt_tokens = prompt_tokens + len(generated)
            worker = await self._router.pool.admit(
                self.request, streams=self._call.stream, limit=limit, generated=len(generated)
            )
            try:
                answer = await self._decode(worker, generated, text)
            except WorkerLost as lost:
                await self._lost(worker, lost, attempt)
                continue
            finally:
                running = worker.state.running.get(self._key)
                self._router.pool.release(worker, self._key)
            self.request.prompt_tokens = prompt_tokens
            if running is not None:
                self._router.pool.policy.observe_finished(self.request, running.generated)
            self._router.metrics.completed.inc()
            if self._first_token is not None and self._tokens > 1:
                self._router.note_tpot((self._last_token - self._first_token) / (self._tokens - 1))
            return answer
        raise generation_error(f"{self._settings.retries + 1} workers were lost in turn")

    async def _prefill(self) -> web.StreamResponse | None:
        """Compute the prompt; returns the worker's refusal if it has one. If no worker can, a decode worker will."""
        avoid: frozenset[str] = frozenset()
        for attempt in range(self._settings.retries + 1):
            worker = await self._router.prefill.acquire(self.request, avoid)
            stored = False
            try:
                upstream = prefill_upstream(self._call, worker)
                status, headers, raw = await self._ask(worker, upstream, self._settings.prefill_timeout)
                if status == 200:
                    stored = True
                    self._take_prefill(worker, json.loads(raw))
                    return None
                if status < 500 and status != 429:
                    return await self._relay(status, headers, raw)
                lost = WorkerLost(f"HTTP {status}")
            except WorkerLost as error:
                lost = error
            except ValueError as error:
                lost = WorkerLost(f"its answer is no JSON: {error}")
            finally:
                self._router.prefill.release(worker, self.request, stored=stored)
            avoid |= {worker.id}
            await self._lost(worker, lost, attempt)
        return None  # a decode worker computes the prompt, then

    def _take_prefill(self, worker: WorkerHandle, reply: Mapping[str, Any]) -> None:
        """What the prefill worker said: ticket, prompt ids, experts."""
        choice = (reply.get("choices") or [{}])[0]
        ids = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
        self._prompt_ids = list(ids) if ids else None
        ticket = reply.get("kv_transfer_params")
        self._ticket = dict(ticket) if ticket else None
        self._ticket_owner = worker
        usage = reply.get("usage") or {}
        tokens = len(ids) if ids else int(usage.get("prompt_tokens") or self.request.prompt_tokens)
        signature, _ = self._router.signatures.signature(reply, self._prompt_ids)
        self.request = Request(
            self._key,
            tokens,
            arrival=self._arrived,
            signature=None if signature is None else np.asarray(signature),
            prompt_hash=hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=16).digest() if ids else None,
            token_ids=self._prompt_ids,
        )
        self._router.metrics.prefill_seconds.observe(time.monotonic() - self._arrived)

    def _sent(self) -> tuple[list[int], str]:
        """What the client has already: nothing, unless a worker was lost."""
        if not self._client.sent:
            return [], ""
        return generated_in(self._call, b"".join(self._client.sent))

    async def _decode(self, worker: WorkerHandle, generated: list[int], text: str) -> web.StreamResponse:
        """Let a worker generate. Raises WorkerLost."""
        upstream = decode_upstream(self._call, worker, self._ticket, self._prompt_ids, generated, text)
        self._ticket = None  # used up, whatever comes of it
        if self._call.stream:
            return await self._stream(worker, upstream)
        status, headers, raw = await self._ask(worker, upstream, self._settings.request_timeout)
        if status == 200:
            if upstream.translator is not None:
                raw = upstream.translator.answer(raw)
            self._first_token = self._last_token = time.monotonic()
            with contextlib.suppress(KeyError):
                worker.state.running[self._key].generated = _generated_tokens(self._call, raw)
        elif status >= 500 or status == 429:
            raise WorkerLost(f"HTTP {status}")
        return await self._relay(status, headers, raw)

    async def _stream(self, worker: WorkerHandle, upstream: Upstream) -> web.StreamResponse:
        call, client = self._call, self._client
        scanner = EventScanner(call, translated=upstream.translator is not None)
        running = worker.state.running.get(self._key)
        try:
            async with self._post(worker, upstream, None) as answer:
                if answer.status != 200:
                    raw = await answer.read()
                    if answer.status >= 500 or answer.status == 429:
                        raise WorkerLost(f"HTTP {answer.status}")
                    return await self._relay(answer.status, answer.headers, raw)
                await client.begin(answer.headers)
                passed = 0
                read = answer.content.readany
                while chunk := await read():
                    events = scanner.feed(chunk)
                    if upstream.translator is not None and events:
                        lost = lost_in(events)
                        events = upstream.translator.events(events if lost < 0 else events[:lost])
                    elif b"healthcheck" in events or b"recomputed" in events:
                        lost = lost_in(events)
                        events = events if lost < 0 else events[:lost]
                    else:
                        lost = -1
                    if events:
                        self._note(running, scanner.tokens - passed)
                        passed = scanner.tokens
                        await self._write(events)
                    if lost >= 0:
                        raise WorkerLost("it gave the request up")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, _ClientGone):
                raise
            if not scanner.over:
                raise WorkerLost(str(error) or type(error).__name__, gone=True) from error
        if not scanner.over:
            raise WorkerLost("the stream ended early", gone=True)
        return await client.finish()

    async def _write(self, events: bytes) -> None:
        try:
            await self._client.send(events)
        except ConnectionError as error:
            raise _ClientGone(str(error)) from error

    def _note(self, running: Any, tokens: int) -> None:
        """Progress of a stream: what policies need is two additions."""
        now = time.monotonic()
        if self._first_token is None:
            self._first_token = now
            self._router.metrics.ttft.observe(now - self._arrived)
            self._router.note_ttft(now - self._arrived)
        self._last_token = now
        self._tokens += tokens
        if running is not None:
            running.kv_tokens += tokens
            running.generated += tokens

    # ------------------------------------------------------------- in one piece

    async def _whole(self) -> web.StreamResponse:
        """A request that one worker does from end to end, or one that only asks something."""
        for attempt in range(self._settings.retries + 1):
            worker, release = await self._any_worker()
            try:
                upstream = whole_upstream(self._call, worker)
                if self._call.stream and self._call.body is not None:
                    return await self._stream(worker, upstream or Upstream(self._call.path, self._call.body))
                status, headers, raw = await self._ask(worker, upstream, self._settings.request_timeout)
                if (status >= 500 and status != 501) or status == 429:
                    raise WorkerLost(f"HTTP {status}")
                if status == 200 and upstream is not None and upstream.translator is not None:
                    raw = upstream.translator.answer(raw)
                return await self._relay(status, headers, raw)
            except WorkerLost as lost:
                if self._client.sent:
                    raise generation_error("the worker was lost in the middle of an answer that cannot move") from lost
                await self._lost(worker, lost, attempt)
            finally:
                release()
        raise overloaded_error()

    async def _any_worker(self) -> tuple[WorkerHandle, Any]:
        """A worker for it, and how to give it back."""
        if self._call.generates:
            _, tokens = text_blocks(self._call.text)
            self.request = Request(self._key, tokens, arrival=self._arrived)
            worker = await self._router.pool.admit(self.request, streams=self._call.stream, limit=_UNBOUNDED)
            return worker, lambda: self._router.pool.release(worker, self._key)
        ready = [*self._router.fleet.ready("prefill"), *self._router.fleet.ready("decode")]
        # vLLM has none of these routes: prefer workers that do
        found = least_loaded([h for h in ready if h.kind == "moe_opt"]) or least_loaded(ready)
        if found is None:
            raise unhealthy_error("no worker is ready")
        worker = found
        worker.prefills += 1

        def release() -> None:
            worker.prefills -= 1

        return worker, release

    # ------------------------------------------------------------- shared

    def _post(self, worker: WorkerHandle, upstream: Upstream | None, total: float | None) -> Any:
        path = self._call.path if upstream is None else upstream.path
        data = self._call.raw if upstream is None else json.dumps(upstream.body).encode()
        timeout = aiohttp.ClientTimeout(
            total=total, sock_connect=self._settings.connect_timeout, sock_read=self._settings.idle_timeout
        )
        headers = {**self._headers, **worker.headers}
        if upstream is None and "Content-Type" in self._http.headers:
            headers["Content-Type"] = self._http.headers["Content-Type"]
        return self._router.session.post(worker.url + path, data=data, headers=headers, timeout=timeout)

    async def _ask(
        self, worker: WorkerHandle, upstream: Upstream | None, total: float | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body) of a worker's whole answer. Raises WorkerLost."""
        try:
            async with self._post(worker, upstream, total) as answer:
                return answer.status, answer.headers, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerLost(str(error) or type(error).__name__, gone=True) from error

    async def _relay(self, status: int, headers: Mapping[str, str], raw: bytes) -> web.StreamResponse:
        """A worker's answer as it is; where the client asked for a stream, a refusal becomes its last event."""
        if self._call.stream:
            try:
                said = json.loads(raw)
                error = said.get("error")
                kind = said.get("error_type") or "validation"
                message = error if isinstance(error, str) else str((error or said).get("message") or said)
            except (ValueError, AttributeError):
                kind, message = "validation", raw.decode("utf-8", "replace")[:500]
            raise ApiError(status, kind, message)
        kept = {key: value for key, value in headers.items() if key.lower().startswith("x-") and key != "X-Request-Id"}
        content_type = headers.get("Content-Type", "application/json").partition(";")[0]
        return web.Response(status=status, body=raw, headers=kept, content_type=content_type)

    async def _lost(self, worker: WorkerHandle, lost: WorkerLost, attempt: int) -> None:
        """Note a worker's failure and wait a little before the next try."""
        logger.warning("request %s: worker %s: %s", self._id, worker.id, lost)
        self._router.metrics.retries.labels("lost" if lost.gone else "refused").inc()
        if lost.gone:
            self._router.fleet.lost(worker)
        if attempt < self._settings.retries:
            await asyncio.sleep(self._settings.backoff * 2**attempt)

    def _drop_ticket(self) -> None:
        """KV that nobody will fetch: its worker need not keep it until it expires."""
        ticket, owner = self._ticket, self._ticket_owner
        self._ticket = None
        if ticket is None or owner is None or owner.kind != "moe_opt":
            return
        self._router.spawn(self._delete(f"{owner.url}/kv_transfer/{ticket.get('remote_request_id')}"))

    async def _delete(self, url: str) -> None:
        headers = {key: value for key, value in self._headers.items() if key == "Authorization"}
        try:
            async with self._router.session.delete(url, headers=headers, timeout=aiohttp.ClientTimeout(total=5)):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("KV is left to expire: %s", error)


class _ClientGone(ConnectionError):
    """The client, not the worker, broke the connection."""


def _generated_tokens(call: Call, raw: bytes) -> int:
    """How many tokens an answer has, as far as it says so."""
    try:
        body = json.loads(raw)
        if call.dialect == "tgi":
            details = (body[0] if isinstance(body, list) else body).get("details") or {}
            return int(details.get("generated_tokens") or 0)
        return int((body.get("usage") or {}).get("completion_tokens") or 0)
    except (ValueError, AttributeError, KeyError, IndexError):
        return 0
