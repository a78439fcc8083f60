"""The two dispatchers: which prefill worker computes a prompt, and which decode worker goes on with it.

Prefill: prefix- and load-aware up to saturation (`cluster/prefill.py`), no worker whose KV is nearly full (D.3).
Decode: any policy of `cluster/policies` over those who wait, run once for all events of one turn of the event loop: a
request that finished prefill, a slot that came free, a worker that came or went.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Hashable, Sequence

from moe_opt.cluster.policies import Policy
from moe_opt.cluster.prefill import PrefillScheduler, token_cost
from moe_opt.cluster.state import Request, Worker
from moe_opt.serving.api.errors import overloaded_error
from moe_opt.serving.router.config import RouterSettings
from moe_opt.serving.router.fleet import Fleet, WorkerHandle, begin, end

logger = logging.getLogger("moe_opt.router")
_BLOCK_CHARS = 64
_CHARS_PER_TOKEN = 4
_MAX_BLOCKS = 512


def text_blocks(text: str) -> tuple[list[bytes], int]:
    """(chained hashes of the prompt's blocks, estimated tokens). The router has no tokenizer, and prompts that share a
    prefix share its characters too."""
    data = text.encode("utf-8", "replace")
    hashes: list[bytes] = []
    previous = b""
    for start in range(0, min(len(data) // _BLOCK_CHARS, _MAX_BLOCKS) * _BLOCK_CHARS, _BLOCK_CHARS):
        previous = hashlib.blake2b(previous + data[start : start + _BLOCK_CHARS], digest_size=8).digest()
        hashes.append(previous)
    return hashes, max(1, len(data) // _CHARS_PER_TOKEN)


class PrefillDispatcher:
    """Gives each prompt a prefill worker; those that find none wait in order."""

    def __init__(self, fleet: Fleet, settings: RouterSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._scheduler = PrefillScheduler(
            token_cost, settings.prefill_saturation, block_tokens=_BLOCK_CHARS // _CHARS_PER_TOKEN
        )
        self._waiting: dict[Hashable, tuple[Request, asyncio.Future[WorkerHandle], frozenset[str]]] = {}
        self._costs: dict[Hashable, tuple[str, float]] = {}
        self._woken = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, request: Request, avoid: frozenset[str] = frozenset()) -> WorkerHandle:
        """A prefill worker for this prompt, none of `avoid` if there is another.

        Raises:
            ApiError: 429 after `pool_ttl`.
        """
        future: asyncio.Future[WorkerHandle] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = (request, future, avoid)
        self._dispatch()
        acquired = False
        try:
            async with asyncio.timeout(self._settings.pool_ttl):
                handle = await future
            acquired = True
            return handle
        except TimeoutError as error:
            raise overloaded_error() from error
        finally:
            self._waiting.pop(request.id, None)
            if not acquired and future.done() and not future.cancelled():  # the client left in that very moment
                self.release(future.result(), request, stored=False)

    def release(self, worker: WorkerHandle, request: Request, *, stored: bool) -> None:
        """A prefill is over. stored: its prefix is in the worker's cache now."""
        found = self._costs.pop(request.id, None)
        if found is None:
            return
        worker.prefills -= 1
        worker_id, cost = found
        if stored:
            self._scheduler.stored(worker_id, request.block_hashes)
            self._scheduler.executed(worker_id, cost)
        else:
            self._scheduler.cancelled(worker_id, request, cost)
        self.wake()

    def forget(self, worker_id: str) -> None:
        """A worker is gone, with what it had cached."""
        self._scheduler.removed(worker_id)

    def wake(self) -> None:
        if not self._woken and self._waiting:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._woken = False
        open_workers = [
            handle for handle in self._fleet.ready("prefill") if handle.utilisation < self._settings.prefill_utilisation
        ]
        for request, future, avoid in list(self._waiting.values()):
            if future.done():
                continue
            allowed = [h for h in open_workers if h.id not in avoid] or open_workers
            views = [Worker(handle.id, handle.state.max_running) for handle in allowed]
            before = {handle.id: self._scheduler.load(handle.id) for handle in allowed}
            for _, worker_id in self._scheduler.schedule([request], views):
                handle = self._fleet.workers[str(worker_id)]
                self._costs[request.id] = (handle.id, self._scheduler.load(handle.id) - before[handle.id])
                handle.prefills += 1
                future.set_result(handle)


@dataclasses.dataclass(slots=True)
class _Waiting:
    request: Request
    future: asyncio.Future[WorkerHandle]
    streams: bool
    limit: int
    generated: int


class DecodePool:
    """Requests that finished prefill and wait for a decode worker: the paper's prompt pool.

    Args:
        observe: called after each round with (seconds that the policy took, requests that waited, admitted ones with
            their workers).
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        settings: RouterSettings,
        observe: Callable[[float, int, Sequence[tuple[Request, WorkerHandle]]], None],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._observe = observe
        self._waiting: dict[Hashable, _Waiting] = {}
        self._woken = False
        self.policy = policy

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        return [waiting.request for waiting in self._waiting.values()]

    async def admit(self, request: Request, *, streams: bool, limit: int, generated: int = 0) -> WorkerHandle:
        """Wait for a decode worker and take a slot of it, which `release` gives back.

        Args:
            streams: whether its progress will be reported. limit: tokens that it may produce. generated: those that it
                has produced already.

        Raises:
            ApiError: 429 after `pool_ttl`.
        """
        future: asyncio.Future[WorkerHandle] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = _Waiting(request, future, streams, limit, generated)
        self.wake()
        admitted = False
        try:
            async with asyncio.timeout(self._settings.pool_ttl):
                handle = await future
            admitted = True
            return handle
        except TimeoutError as error:
            raise overloaded_error() from error
        finally:
            self._waiting.pop(request.id, None)
            if not admitted and future.done() and not future.cancelled():  # the client left in that very moment
                self.release(future.result(), request.id)

    def release(self, handle: WorkerHandle, key: Hashable) -> None:
        """A request has left its worker."""
        end(handle, key)
        self.wake()

    def wake(self) -> None:
        """Run the policy once the current turn of the event loop is over."""
        if not self._woken and self._waiting:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._woken = False
        waiting = [entry for entry in self._waiting.values() if not entry.future.done()]
        handles = {handle.id: handle for handle in self._fleet.ready("decode")}
        if not waiting or not handles:
            return
        started = time.perf_counter()
        now = time.monotonic()
        for handle in handles.values():
            if handle.timed:
                handle.progress(now)
        try:
            found = self.policy.assign([entry.request for entry in waiting], [h.state for h in handles.values()], now)
        except Exception:  # a policy's mistake must not stop the fleet: the first in line goes to the emptiest worker
            logger.exception("policy failed with %d waiting", len(waiting))
            found = []
            free = [h for h in handles.values() if h.state.free_slots]
            if free:
                emptiest = min(free, key=lambda h: len(h.state.running))
                found = [(waiting[0].request.id, emptiest.id)]  # type: ignore[list-item]
        admitted: list[tuple[Request, WorkerHandle]] = []
        for request_id, worker_id in found:
            entry, handle = self._waiting[request_id], handles[str(worker_id)]
            begin(
                handle, request_id, entry.request.prompt_tokens,
                streams=entry.streams, limit=entry.limit, generated=entry.generated,
            )  # fmt: skip
            entry.future.set_result(handle)
            admitted.append((entry.request, handle))
        self._observe(time.perf_counter() - started, len(waiting), admitted)
