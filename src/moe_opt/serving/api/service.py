"""Runs validated requests on the engine: slots, best_of, timeouts, cancellation, metrics. The dialects sit on top.

A request holds one slot per sequence from submission to its last event; without a free slot it is refused with 429.
Whoever stops iterating cancels the sequence in the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from moe_opt.serving.api.errors import ApiError, as_api_error, generation_error, incomplete_error, overloaded_error
from moe_opt.serving.api.limits import Limits
from moe_opt.serving.api.validation import ValidRequest
from moe_opt.serving.engine.types import (
    EngineClient,
    FinishEvent,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from moe_opt.serving.telemetry import Metrics


@dataclasses.dataclass(slots=True)
class RequestTimes:
    """`time.monotonic()` of a request's arrival and of the end of its validation."""

    arrived: float = dataclasses.field(default_factory=time.monotonic)
    validated: float | None = None

    @property
    def validation(self) -> float:
        return (self.validated if self.validated is not None else time.monotonic()) - self.arrived


class Step(NamedTuple):
    """One token of a stream; the last one brings the finish."""

    token: TokenEvent | None
    finish: FinishEvent | None


@dataclasses.dataclass(slots=True)
class Sequence:
    tokens: list[TokenEvent]
    finish: FinishEvent

    @property
    def mean_logprob(self) -> float:
        logprobs = [event.token.logprob for event in self.tokens if event.token.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


class GenerationService:
    """The one place that talks to the engine.

    Attributes:
        in_flight: sequences waiting or running. draining: no new ones are taken.
    """

    def __init__(self, engine: EngineClient, limits: Limits, metrics: Metrics) -> None:
        self.engine = engine
        self.limits = limits
        self.metrics = metrics
        self.in_flight = 0
        self.draining = False

    async def generate(self, request: ValidRequest, times: RequestTimes) -> list[Sequence]:
        """All sequences of a request, the one with the highest mean logprob first."""
        self._take_slots(request.best_of)
        runs = [asyncio.ensure_future(self._collect(request)) for _ in range(request.best_of)]
        try:
            sequences = await asyncio.gather(*runs)
        except Exception as error:
            raise self._failed(error) from error
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            self.in_flight -= request.best_of
        sequences.sort(key=lambda sequence: -sequence.mean_logprob)
        self.metrics.request_succeeded(times.arrived, times.validation, sequences[0].finish)
        return sequences

    async def stream(self, request: ValidRequest, times: RequestTimes) -> AsyncGenerator[Step]:
        """The tokens of one sequence as they come; close it (`aclosing`) to cancel.

        TGI sends the finish with the last token, the engine sends it right behind. So a token that may be the last one
        waits for the event behind it, and no other token does.
        """
        self._take_slots(1)
        ends = _EndDetector(request.params, continued=bool(request.generated_ids))
        held: TokenEvent | None = None
        try:
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    if isinstance(event, FinishEvent):
                        self.metrics.request_succeeded(times.arrived, times.validation, event)
                        yield Step(held, event)
                        return
                    if held is not None:
                        yield Step(held, None)
                        held = None
                    if ends.may_end(event):
                        held = event
                    else:
                        yield Step(event, None)
            raise incomplete_error()
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self.in_flight -= 1

    def _take_slots(self, count: int) -> None:
        if self.in_flight + count > self.limits.max_concurrent_requests:
            raise self._failed(overloaded_error())
        self.in_flight += count

    def _failed(self, error: Exception) -> ApiError:
        api_error = as_api_error(error)
        self.metrics.request_failed(api_error.metric)
        return api_error

    async def _collect(self, request: ValidRequest) -> Sequence:
        tokens: list[TokenEvent] = []
        async with aclosing(self._events(request)) as events:
            async for event in events:
                if isinstance(event, FinishEvent):
                    return Sequence(tokens, event)
                tokens.append(event)
        raise incomplete_error()

    async def _events(self, request: ValidRequest) -> AsyncGenerator[TokenEvent | FinishEvent]:
        """The engine's events; cancels the sequence unless it finished, and after `request_timeout`."""
        engine_id = uuid.uuid4().hex  # never the client's own id: two clients may send the same
        events = self.engine.submit(
            GenerationRequest(
                engine_id,
                request.prompt_ids,
                request.params,
                exact=request.exact,
                expert_counts=request.expert_counts,
                generated_ids=request.generated_ids,
                kv=request.kv,
                hand_off=request.hand_off,
            )
        )
        iterator = aiter(events)
        limit = self.limits.request_timeout
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        ended = False
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        event = await anext(iterator)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    raise generation_error(f"it took longer than {limit} s") from error
                ended = isinstance(event, FinishEvent)
                yield event
        finally:
            if not ended:
                self.engine.cancel(engine_id)
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()


class _EndDetector:
    """Whether a token may be a sequence's last one: by length, as a special token, or by completing a stop string."""

    def __init__(self, params: SamplingParams, *, continued: bool = False) -> None:
        self._any = continued and bool(params.stop)  # a stop string may have begun in text that is not seen here
        self._last_index = (params.max_new_tokens or 2**63) - 1
        self._stop = params.stop
        self._keep = max((len(text) for text in params.stop), default=0)
        self._tail = ""

    def may_end(self, event: TokenEvent) -> bool:
        if event.index >= self._last_index or event.token.special or self._any:
            return True
        if not self._stop:
            return False
        self._tail += event.token.text
        found = any(text in self._tail for text in self._stop)
        self._tail = self._tail[-self._keep :]
        return found


def brownout_details(finishes: list[FinishEvent]) -> dict[str, Any]:
    """Whether and how far an answer was browned out: lowest threshold of all its steps, and the mean share of expert
    assignments that another expert computed."""
    return {
        "browned": any(finish.browned for finish in finishes),
        "lowest_threshold": round(min(finish.lowest_threshold for finish in finishes), 6),
        "browned_share": round(sum(finish.browned_share for finish in finishes) / len(finishes), 6),
    }


def brownout_header(details: dict[str, Any]) -> str:
    """`x-moe-opt-brownout` of a finished answer."""
    if not details["browned"]:
        return "exact"
    return f"lowest-threshold={details['lowest_threshold']:.4f}; browned-share={details['browned_share']:.4f}"
