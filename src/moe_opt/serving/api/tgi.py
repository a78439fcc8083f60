"""TGI's own dialect: `/`, `/generate`, `/generate_stream`, `/vertex`, `/tokenize`."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from moe_opt.serving.api.errors import ApiError, as_api_error, validation_error
from moe_opt.serving.api.hand_off import hand_off_fields, hand_off_of, note_hand_off, with_hand_off
from moe_opt.serving.api.prompts import TokenSpan
from moe_opt.serving.api.schemas import (
    CompatGenerateRequest,
    GenerateParameters,
    GenerateRequest,
    TokenizeRequest,
    VertexRequest,
)
from moe_opt.serving.api.service import RequestTimes, Sequence, Step, brownout_details, brownout_header
from moe_opt.serving.api.sse import send_events
from moe_opt.serving.api.state import (
    BROWNOUT_HEADER,
    ApiState,
    parse,
    read_body,
    state_of,
    times_of,
    wants_exact,
)
from moe_opt.serving.api.validation import ValidRequest
from moe_opt.serving.engine.types import FinishEvent, Token


async def compat_generate(request: web.Request) -> web.StreamResponse:
    """POST /: one generation in a list, or a stream."""
    body = parse(CompatGenerateRequest, await read_body(request))
    if body.stream:
        return await stream_response(request, body)
    answer, headers = await generate_answer(request, body)
    return web.json_response([answer], headers=headers)


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /generate."""
    body = parse(GenerateRequest, await read_body(request))
    answer, headers = await generate_answer(request, body)
    return web.json_response(answer, headers=headers)


async def generate_stream(request: web.Request) -> web.StreamResponse:
    """POST /generate_stream: HTTP 200 whatever happens; an error is an event."""
    body = parse(GenerateRequest, await read_body(request))
    return await stream_response(request, body)


async def vertex(request: web.Request) -> web.StreamResponse:
    """POST /vertex: several prompts, texts back."""
    body = parse(VertexRequest, await read_body(request))
    limit = state_of(request).limits.max_client_batch_size
    if not 0 < len(body.instances) <= limit:
        raise validation_error(f"`instances` must hold 1 to {limit} requests. Given: {len(body.instances)}")
    finishes: list[FinishEvent] = []
    predictions = []
    for instance in body.instances:
        sequences = (await run(request, instance.inputs, instance.resolved))[1]
        finishes.append(sequences[0].finish)
        predictions.append(sequences[0].finish.generated_text)
    return web.json_response(
        {"predictions": predictions}, headers={BROWNOUT_HEADER: brownout_header(brownout_details(finishes))}
    )


async def tokenize(request: web.Request) -> web.StreamResponse:
    """POST /tokenize: ids, texts and character offsets; nothing is generated."""
    body = parse(TokenizeRequest, await read_body(request))
    if not body.inputs:
        raise validation_error("`inputs` cannot be empty")
    spans = await state_of(request).encoder.spans(body.inputs, body.add_special_tokens is not False)
    if body.resolved.truncate:
        spans = spans[-body.resolved.truncate :]
    return web.json_response(spans_json(spans))


def spans_json(spans: list[TokenSpan]) -> list[dict[str, Any]]:
    return [span._asdict() for span in spans]


# ------------------------------------------------------------------ shared with the OpenAI dialect


async def run(
    request: web.Request,
    inputs: str | tuple[int, ...],
    parameters: GenerateParameters,
    *,
    add_special_tokens: bool = True,
    presence_penalty: float | None = None,
) -> tuple[ValidRequest, list[Sequence]]:
    """Validate and generate; best sequence first."""
    state, times = state_of(request), times_of(request)
    state.metrics.request_received()
    valid = await _validated(
        request, inputs, parameters,
        add_special_tokens=add_special_tokens, stream=False, presence_penalty=presence_penalty,
    )  # fmt: skip
    return valid, await state.service.generate(valid, times)


async def run_stream(
    request: web.Request,
    inputs: str | tuple[int, ...],
    parameters: GenerateParameters,
    *,
    add_special_tokens: bool = True,
    presence_penalty: float | None = None,
) -> AsyncGenerator[tuple[ValidRequest, Step]]:
    """Validate and generate, token by token. Raises ApiError."""
    state, times = state_of(request), times_of(request)
    state.metrics.request_received()
    valid = await _validated(
        request, inputs, parameters,
        add_special_tokens=add_special_tokens, stream=True, presence_penalty=presence_penalty,
    )  # fmt: skip
    async with aclosing(state.service.stream(valid, times)) as steps:
        async for step in steps:
            yield valid, step


async def _validated(
    request: web.Request,
    inputs: str | tuple[int, ...],
    parameters: GenerateParameters,
    *,
    add_special_tokens: bool,
    stream: bool,
    presence_penalty: float | None,
) -> ValidRequest:
    state, times = state_of(request), times_of(request)
    try:
        valid = await state.validator.validate(
            inputs, parameters,
            add_special_tokens=add_special_tokens, stream=stream, exact=wants_exact(request),
            presence_penalty=presence_penalty,
        )  # fmt: skip
    except Exception as error:
        api_error = as_api_error(error)
        state.metrics.request_failed(api_error.metric)
        raise api_error from error
    if times.validated is None:
        times.validated = time.monotonic()
    try:
        valid = await with_hand_off(request, state, valid)
    except ApiError as error:
        state.metrics.request_failed(error.metric)
        raise
    state.metrics.request_validated(len(valid.prompt_ids), valid.params.max_new_tokens or 0)
    return valid


async def generate_answer(request: web.Request, body: GenerateRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of one generation that is not streamed."""
    state = state_of(request)
    note_hand_off(request, state, body, single=(body.resolved.best_of or 1) == 1, stream=False)
    valid, sequences = await run(request, body.inputs, body.resolved)
    prefix = valid.inputs if valid.return_full_text else ""
    best = sequences[0]
    answer: dict[str, Any] = {"generated_text": prefix + best.finish.generated_text}
    answer.update(await hand_off_fields(request, state, valid, best.finish))
    if valid.details:
        answer["details"] = _sequence_json(best)
        if len(sequences) > 1:
            answer["details"]["best_of_sequences"] = [
                {"generated_text": prefix + other.finish.generated_text, **_sequence_json(other)}
                for other in sequences[1:]
            ]
        answer["details"]["brownout"] = brownout_details([s.finish for s in sequences])
    return answer, answer_headers(state, times_of(request), [valid], [sequences])


async def stream_response(request: web.Request, body: GenerateRequest) -> web.StreamResponse:
    """Answer with TGI's events."""
    state = state_of(request)
    note_hand_off(request, state, body, single=True, stream=True)
    async with aclosing(_stream_events(request, body)) as events:
        return await send_events(
            request, events,
            headers=stream_headers(state, exact=wants_exact(request) or bool(body.resolved.exact),
                                   characters=len(body.inputs)),
            limits=state.limits,
        )  # fmt: skip


async def _stream_events(request: web.Request, body: GenerateRequest) -> AsyncGenerator[dict[str, Any]]:
    index = len(hand_off_of(request).generated_ids)
    try:
        async with aclosing(run_stream(request, body.inputs, body.resolved)) as steps:
            async for valid, (event, finish) in steps:
                index += 1
                # A finish without a token of its own cannot be left out: it carries text and details.
                token = token_json(event.token) if event is not None else _EMPTY_TOKEN
                out: dict[str, Any] = {"index": index, "token": token}
                if event is not None and event.top_tokens:
                    out["top_tokens"] = [token_json(top) for top in event.top_tokens]
                out.update(generated_text=None, details=None)
                if finish is not None:
                    prefix = valid.inputs if valid.return_full_text else ""
                    out["generated_text"] = prefix + finish.generated_text
                    out["brownout"] = brownout_details([finish])
                    if valid.details:
                        out["details"] = {
                            "finish_reason": finish.finish_reason,
                            "generated_tokens": finish.generated_tokens,
                            "seed": finish.seed,
                            "input_length": finish.prompt_tokens,
                        }
                yield out
    except ApiError as error:
        yield error.body()


_EMPTY_TOKEN = {"id": 0, "text": "", "logprob": 0.0, "special": True}


def token_json(token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": logprob_json(token.logprob), "special": token.special}


def logprob_json(logprob: float | None) -> float | None:
    """JSON has no infinity: a token that the model rules out altogether gets the lowest float32."""
    return logprob if logprob is None or math.isfinite(logprob) else -3.4028235e38


def _sequence_json(sequence: Sequence) -> dict[str, Any]:
    """`Details`, or one of `best_of_sequences`."""
    finish = sequence.finish
    out: dict[str, Any] = {
        "finish_reason": finish.finish_reason,
        "generated_tokens": finish.generated_tokens,
        "seed": finish.seed,
        "prefill": [{"id": t.id, "text": t.text, "logprob": logprob_json(t.logprob)} for t in finish.prefill],
        "tokens": [token_json(event.token) for event in sequence.tokens],
    }
    if any(event.top_tokens for event in sequence.tokens):
        out["top_tokens"] = [[token_json(top) for top in event.top_tokens] for event in sequence.tokens]
    return out


def answer_headers(
    state: ApiState, times: RequestTimes, requests: list[ValidRequest], answers: list[list[Sequence]]
) -> dict[str, str]:
    """TGI's headers of an answer that is not streamed, over all its prompts; times in milliseconds."""
    finishes = [sequences[0].finish for sequences in answers]
    total = time.monotonic() - times.arrived
    per_token = max(finish.timings.inference / max(1, finish.generated_tokens) for finish in finishes)
    every = [sequence.finish for sequences in answers for sequence in sequences]
    return {
        "x-compute-type": state.info.compute_type,
        "x-compute-time": f"{total:.6f}",
        "x-compute-characters": str(sum(len(valid.inputs) for valid in requests)),
        "x-total-time": str(int(total * 1000)),
        "x-validation-time": str(int(times.validation * 1000)),
        "x-queue-time": str(int(max(finish.timings.queue for finish in finishes) * 1000)),
        "x-inference-time": str(int(max(finish.timings.inference for finish in finishes) * 1000)),
        "x-time-per-token": str(int(per_token * 1000)),
        "x-prompt-tokens": str(sum(finish.prompt_tokens for finish in finishes)),
        "x-generated-tokens": str(sum(finish.generated_tokens for finish in finishes)),
        BROWNOUT_HEADER: brownout_header(brownout_details(every)),
    }


def stream_headers(state: ApiState, *, exact: bool, characters: int) -> dict[str, str]:
    """Headers of a stream. They leave before the first step, so all they can say about brownout is whether it is
    possible; the last event says how far it went."""
    return {
        "x-compute-type": state.info.compute_type,
        "x-compute-characters": str(characters),
        BROWNOUT_HEADER: "exact" if exact or not state.control.may_brown else "see-last-event",
    }
