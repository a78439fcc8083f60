"""The engine on a thread of its own, in front of it asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from moe_opt.modeling.score_item import ScoreItem
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.engine import Engine
from moe_opt.serving.engine.lockstep import IDLE_SECONDS, LockStep
from moe_opt.serving.engine.score_job import ScoreQueue
from moe_opt.serving.engine.types import (
    BrownoutStatus,
    EngineClosedError,
    EngineStats,
    Event,
    FinishEvent,
    GenerationError,
    GenerationRequest,
    InvalidRequestError,
    OverloadedError,
    StepReport,
)

logger = logging.getLogger(__name__)

_Command = Callable[[], None]


class _End:
    """In a stream's queue: the request was cancelled, nothing follows."""


class EventStream:
    """Events of one request, in order. Closing it before the end cancels the request."""

    def __init__(self, engine: AsyncEngine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._queue: asyncio.Queue[Event | Exception | _End] = asyncio.Queue()
        self._over = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, _End):
            self._over = True
            raise StopAsyncIteration
        if isinstance(item, Exception):
            self._over = True
            raise item
        if isinstance(item, FinishEvent):
            self._over = True
        return item

    async def aclose(self) -> None:
        """Stop the request if it still runs."""
        if not self._over:
            self._over = True
            self._engine.cancel(self._request_id)

    def put(self, item: Event | Exception | _End) -> None:
        self._queue.put_nowait(item)


class AsyncEngine:
    """Runs `Engine` on a thread for one event loop; see `types.EngineClient` for what each method promises.

    Args:
        model: a loaded `MoEOptimizedForCausalLM`. tokenizer: its tokenizer.
        on_step: called on the engine's thread after every step.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig | None = None,
        *,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> None:
        self.engine = Engine(model, tokenizer, config, on_step=on_step)
        self.config = self.engine.config
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._pending: set[concurrent.futures.Future[None]] = set()  # of the commands that somebody waits for
        self._scoring = ScoreQueue()
        self._scored = False  # the last turn was a pass of scoring
        self._streams: dict[str, EventStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._idle = asyncio.Event()
        self._draining = False
        self._stop = False
        self._snapshot = self.engine.stats()
        self._compiling: set[asyncio.Task[None]] = set()
        self._lock_step: LockStep | None = None
        self._leaving = self._group_leaves = False
        self._ended = False
        if model.moe_opt.expert_parallel is not None:
            self._lock_step = LockStep(model.moe_opt, self.config.rebalance_steps, self.config.group_timeout)

    def leave(self) -> None:
        """Tell the other ranks of an expert-parallel group that this one wants to end."""
        self._leaving = True

    @property
    def group_leaves(self) -> bool:
        """Whether a rank of this engine's expert-parallel group wants to end, so that all have to."""
        return self._group_leaves

    @property
    def max_total_tokens(self) -> int:
        return self.engine.max_total_tokens

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def start(self) -> None:
        """Start the thread; the running event loop gets the events."""
        if self._thread is not None:
            raise EngineClosedError("the engine was started already")
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="moe-opt-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Queue a request; see `EngineClient.submit`."""
        if not self.alive or self._draining:
            raise EngineClosedError("the engine takes no requests: it is " + ("draining" if self.alive else "closed"))
        self.engine.check_request(request)
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        bound = self.config.max_waiting + self.config.max_batch_size
        if len(self._streams) >= bound:
            raise OverloadedError(f"{bound} requests run or wait already: try again later")
        stream = EventStream(self, request.request_id)
        self._streams[request.request_id] = stream
        self._idle.clear()
        if request.params.grammar is None:
            self._commands.put(lambda: self._add(request, None))
        else:
            task = asyncio.get_running_loop().create_task(self._compile_and_add(request))
            self._compiling.add(task)
            task.add_done_callback(self._compiling.discard)
        return stream

    def cancel(self, request_id: str) -> None:
        """Stop a request; its stream ends without a FinishEvent."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        stream.put(_End())
        self._note_idle()
        self._commands.put(lambda: _ignore(self.engine.cancel(request_id)))

    def stats(self) -> EngineStats:
        """As of the last step, or the last change between two steps."""
        return dataclasses.replace(self._snapshot, draining=self._draining)

    def brownout(self) -> BrownoutStatus:
        return self.engine.brownout()

    async def set_brownout(self, **settings: Any) -> None:
        await self._between_steps(lambda: self.engine.set_brownout(**settings))

    def set_brownout_soon(self, **settings: Any) -> None:
        def apply() -> None:
            try:
                self.engine.set_brownout(**settings)
            except Exception as error:
                logger.error("brownout stays as it is: %s", error)

        self._commands.put(apply)

    async def swap_united(self, united: Any) -> None:
        await self._between_steps(lambda: self.engine.swap_united(united))

    async def score(self, items: Sequence[ScoreItem]) -> list[list[float]]:
        job = await asyncio.to_thread(self.engine.plan_scores, items)
        if job.over:
            return job.values
        await self._between_steps(lambda: self._scoring.add(job))
        return await asyncio.wrap_future(job.done)

    async def drain(self, timeout: float | None = None) -> bool:
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self._draining = True
        thread = self._thread
        if thread is None or not thread.is_alive():
            self.engine.close()
            return
        self._commands.put(self._request_stop)
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
        self._end()

    # ------------------------------------------------------------- on the event loop

    async def _compile_and_add(self, request: GenerationRequest) -> None:
        grammar = request.params.grammar
        assert grammar is not None
        try:
            state = await asyncio.to_thread(self.engine.grammars.compile, grammar)
        except Exception as error:
            if not isinstance(error, InvalidRequestError):
                error = GenerationError(f"the grammar could not be compiled: {error}")
            self._deliver([(request.request_id, error)])
            return
        self._commands.put(lambda: self._add(request, state))

    async def _between_steps(self, action: _Command) -> None:
        if not self.alive or self._ended:
            raise EngineClosedError("the engine does not run")
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._pending.add(done)
        done.add_done_callback(self._pending.discard)

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                action()
            except BaseException as error:
                done.set_exception(error)
            else:
                self._snapshot = self.engine.stats()
                done.set_result(None)

        self._commands.put(run)
        await asyncio.wrap_future(done)

    def _deliver(self, outcomes: list[tuple[str, Event | Exception]]) -> None:
        for request_id, item in outcomes:
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # cancelled while the step ran
            stream.put(item)
            if isinstance(item, (FinishEvent, Exception)):
                del self._streams[request_id]
        self._note_idle()

    def _end(self) -> None:
        """The thread has ended, and so does all that waits for it."""
        self._ended = True
        self._scoring.fail_all(_closed)
        for done in list(self._pending):
            if done.set_running_or_notify_cancel():
                done.set_exception(_closed())
        for request_id, stream in list(self._streams.items()):
            del self._streams[request_id]
            stream.put(_closed())
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    # ------------------------------------------------------------- on the thread

    def _run(self) -> None:
        engine = self.engine
        try:
            while not self._stop or self._lock_step is not None:
                if self._lock_step is None:
                    self._obey(wait=not self._has_work)
                    outcomes = self._turn() if self._has_work and not self._stop else []
                else:
                    self._obey(wait=not self._has_work, seconds=IDLE_SECONDS)
                    if (found := self._step_in_group(self._lock_step)) is None:
                        break
                    outcomes = found
                self._snapshot = engine.stats()
                if outcomes:
                    self._send(outcomes)
        except Exception as error:
            if self._lock_step is None:
                raise
            # Nothing can go on without the others, whatever it was: a rank that is gone, or a pass that failed here.
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.error("the expert-parallel group cannot go on: %s", reason)
        finally:
            engine.close()
            self._snapshot = engine.stats()
            self._call_on_loop(self._end)

    @property
    def _has_work(self) -> bool:
        return self.engine.has_work or bool(self._scoring)

    def _turn(self) -> list[tuple[str, Event | Exception]]:
        """A step of the requests, or a pass of scoring: they take turns."""
        if self._scoring and not (self._scored and self.engine.has_work):
            self._scored = True
            self._score_pass()
            return []
        self._scored = False
        return self.engine.step()

    def _score_pass(self) -> None:
        job = self._scoring.next()
        if job is None:
            return
        try:
            self.engine.score_pass(job)
        except Exception as error:
            if self._lock_step is not None:  # the other ranks wait in the middle of it
                self._scoring.add(job)
                raise
            job.fail(error)
        else:
            self._scoring.back(job)

    def _step_in_group(self, group: LockStep) -> list[tuple[str, Event | Exception]] | None:
        """A step of all ranks; None when all have ended."""
        engine = self.engine
        work = self._has_work and not self._stop
        turn = group.turn(work, self._leaving, self._stop, engine.wanted_thresholds)
        self._group_leaves = self._group_leaves or turn.leaving
        if turn.over:
            return None
        before = engine.runner.passes
        outcomes = self._turn() if work else []
        if turn.run and engine.runner.passes == before:
            engine.idle()
        return outcomes

    def _obey(self, wait: bool, seconds: float | None = None) -> None:
        """Run every command that came in; with `wait`, until there is at least one, or for so many seconds."""
        if wait:
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=seconds)()
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _add(self, request: GenerationRequest, grammar: Any) -> None:
        if request.request_id not in self._streams:
            return  # cancelled before it got here
        try:
            self.engine.add(request, grammar)
        except Exception as error:
            self._send([(request.request_id, error)])

    def _send(self, outcomes: list[tuple[str, Event | Exception]]) -> None:
        self._call_on_loop(lambda: self._deliver(outcomes))

    def _call_on_loop(self, action: _Command) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(action)

    def _request_stop(self) -> None:
        self._stop = True


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed while the request ran")


def _ignore(_: object) -> None:
    return None
