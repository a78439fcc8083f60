"""OpenAI's dialect as TGI speaks it: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/chat_tokenize`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pydantic_core
from aiohttp import web

from moe_opt.serving.api.chat import ChatPrompt, chat_prompt
from moe_opt.serving.api.errors import ApiError, as_api_error, validation_error
from moe_opt.serving.api.hand_off import NOTHING, hand_off_fields, hand_off_of, note_hand_off
from moe_opt.serving.api.schemas import ChatRequest, CompletionRequest, GenerateParameters, HandOffFields
from moe_opt.serving.api.service import Sequence, brownout_details
from moe_opt.serving.api.sse import DONE, send_events
from moe_opt.serving.api.state import ApiState, parse, read_body, state_of, times_of, wants_exact
from moe_opt.serving.api.tgi import answer_headers, logprob_json, run, run_stream, spans_json, stream_headers
from moe_opt.serving.api.tools import CallStream, parse_call
from moe_opt.serving.api.validation import ValidRequest
from moe_opt.serving.engine.types import FinishEvent, TokenEvent

_FINISH = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
# text-generation's client cannot parse the closing [DONE]. It always sends exactly these keys; no other client does.
_CHAT_KEYS_WITHOUT_DONE = frozenset(
    ["model", "messages", "repetition_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs",
     "max_tokens", "n", "presence_penalty", "stream", "seed", "temperature", "top_p", "tools", "tool_choice"]
)  # fmt: skip


# ------------------------------------------------------------------ chat


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    raw = await read_body(request)
    return await answer_chat(request, parse(ChatRequest, raw), raw)


async def answer_chat(request: web.Request, chat: ChatRequest, raw: bytes) -> web.StreamResponse:
    state = state_of(request)
    prompt = await _prompt(request, chat)
    note_hand_off(request, state, chat, single=not prompt.using_tools, stream=bool(chat.stream))
    if chat.stream:
        done = not _needs_no_done(raw)
        async with aclosing(_chat_events(request, chat, prompt, done)) as events:
            headers = stream_headers(state, exact=wants_exact(request) or bool(chat.exact), characters=len(prompt.text))
            return await send_events(request, events, headers=headers, limits=state.limits)
    valid, sequences = await run(request, prompt.text, prompt.parameters, add_special_tokens=False)
    call = parse_call(sequences[0].finish.generated_text) if prompt.using_tools else None
    if prompt.using_tools and call is None:  # the model declined every tool: ask again without them
        prompt = await _prompt(request, chat, allow_tools=False)
        valid, sequences = await run(request, prompt.text, prompt.parameters, add_special_tokens=False)
    best = sequences[0]
    if call is not None:
        message: dict[str, Any] = {"role": "assistant", "tool_calls": [_tool_call(request, *call)]}
    else:
        message = {"role": "assistant", "content": best.finish.generated_text}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": [_logprob(event) for event in best.tokens]} if chat.logprobs else None,
        "finish_reason": _FINISH[best.finish.finish_reason],
    }
    answer = {
        **_envelope(request, "chat.completion", "chatcmpl"),
        "choices": [choice],
        "usage": _usage([best.finish]),
        "brownout": brownout_details([best.finish]),
        **await hand_off_fields(request, state, valid, best.finish),
    }
    if hand_off_of(request).token_ids:
        choice["token_ids"] = [event.token.id for event in best.tokens]
    return web.json_response(answer, headers=answer_headers(state, times_of(request), [valid], [sequences]))


async def _prompt(request: web.Request, chat: ChatRequest, *, allow_tools: bool = True) -> ChatPrompt:
    state = state_of(request)
    try:
        return await chat_prompt(chat, state.encoder, allow_tools=allow_tools)
    except Exception as error:
        api_error = as_api_error(error)
        state.metrics.request_received()
        state.metrics.request_failed(api_error.metric)
        raise api_error from error


async def _chat_events(
    request: web.Request, chat: ChatRequest, prompt: ChatPrompt, done: bool
) -> AsyncGenerator[dict[str, Any] | str]:
    try:
        if prompt.using_tools:
            declined = False
            async with aclosing(_call_events(request, chat, prompt)) as calls:
                async for chunk in calls:
                    declined = chunk is None
                    if chunk is not None:
                        yield chunk
            if declined:
                prompt = await _prompt(request, chat, allow_tools=False)
        if not prompt.using_tools or declined:
            async with aclosing(_content_events(request, chat, prompt)) as contents:
                async for chunk in contents:
                    yield chunk
    except ApiError as error:
        yield error.openai_body()
    if done:
        yield DONE


async def _content_events(
    request: web.Request, chat: ChatRequest, prompt: ChatPrompt
) -> AsyncGenerator[dict[str, Any]]:
    async with aclosing(run_stream(request, prompt.text, prompt.parameters, add_special_tokens=False)) as steps:
        async for _, (event, finish) in steps:
            text = "" if event is None or event.token.special else event.token.text
            # `tool_calls` is null, not absent: text-generation's types ask for the key.
            delta = {"role": "assistant", "content": text, "tool_calls": None}
            yield _chat_chunk(request, chat, delta, event, finish)
            if finish is not None and chat.stream_options is not None and chat.stream_options.include_usage:
                yield _usage_chunk(request, "chat.completion.chunk", "chatcmpl", finish)


async def _call_events(
    request: web.Request, chat: ChatRequest, prompt: ChatPrompt
) -> AsyncGenerator[dict[str, Any] | None]:
    """Chunks of a tool call; ends with None if the model declined."""
    call = CallStream()
    named = False
    async with aclosing(run_stream(request, prompt.text, prompt.parameters, add_special_tokens=False)) as steps:
        async for _, (event, finish) in steps:
            piece = "" if event is None or event.token.special else call.push(event.token.text)
            if call.declined:
                yield None
                return
            if call.name is not None and (piece or not named):
                function = {"name": None if named else call.name, "arguments": piece}
                tool_call = {"index": 0, "id": _call_id(request), "type": "function", "function": function}
                named = True
                yield _chat_chunk(request, chat, {"role": "assistant", "tool_calls": [tool_call]}, event, None)
            if finish is not None:
                delta = {"role": "assistant", "content": "", "tool_calls": None}
                yield _chat_chunk(request, chat, delta, None, finish)
                if chat.stream_options is not None and chat.stream_options.include_usage:
                    yield _usage_chunk(request, "chat.completion.chunk", "chatcmpl", finish)


def _chat_chunk(
    request: web.Request,
    chat: ChatRequest,
    delta: dict[str, Any],
    event: TokenEvent | None,
    finish: FinishEvent | None,
) -> dict[str, Any]:
    logprobs = {"content": [_logprob(event)]} if chat.logprobs and event is not None else None
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": None if finish is None else _FINISH[finish.finish_reason],
    }
    if hand_off_of(request).token_ids:
        choice["token_ids"] = [] if event is None else [event.token.id]
    chunk = {**_envelope(request, "chat.completion.chunk", "chatcmpl"), "choices": [choice], "usage": None}
    if finish is not None:
        chunk["brownout"] = brownout_details([finish])
    return chunk


def _needs_no_done(raw: bytes) -> bool:
    body = pydantic_core.from_json(raw)
    # what a router adds does not make it another client
    return isinstance(body, dict) and set(body) - HandOffFields.model_fields.keys() == _CHAT_KEYS_WITHOUT_DONE


def _tool_call(request: web.Request, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": _call_id(request),
        "type": "function",
        "function": {"name": name, "arguments": arguments, "description": None},
    }


def _call_id(request: web.Request) -> str:
    return f"call_{request['request_id']}"


def _logprob(event: TokenEvent) -> dict[str, Any]:
    return {
        "token": event.token.text,
        "logprob": logprob_json(event.token.logprob),
        "bytes": list(event.token.text.encode()),
        "top_logprobs": [
            {"token": top.text, "logprob": logprob_json(top.logprob), "bytes": list(top.text.encode())}
            for top in event.top_tokens
        ],
    }


async def chat_tokenize(request: web.Request) -> web.StreamResponse:
    """POST /chat_tokenize: the templated prompt and its tokens."""
    chat = parse(ChatRequest, await read_body(request))
    prompt = await _prompt(request, chat)
    spans = await state_of(request).encoder.spans(prompt.text, False)
    return web.json_response({"tokenize_response": spans_json(spans), "templated_text": prompt.text})


# ------------------------------------------------------------------ completions


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions: one choice per prompt."""
    return await answer_completion(request, parse(CompletionRequest, await read_body(request)))


async def answer_completion(request: web.Request, body: CompletionRequest) -> web.StreamResponse:
    state = state_of(request)
    if body.suffix is not None:
        raise ApiError(
            422, "suffix not supported", "Suffix is not supported and can be achieved by preprocessing the prompt.",
            metric="validation",
        )  # fmt: skip
    prompts = body.prompts
    if not prompts:
        raise validation_error("`prompt` cannot be empty")
    if len(prompts) > state.limits.max_client_batch_size:
        raise ApiError(
            422, "batch size exceeded",
            f"Number of prompts exceeds the maximum allowed batch size of {state.limits.max_client_batch_size}",
            metric="validation",
        )  # fmt: skip
    parameters = _completion_parameters(body)
    note_hand_off(request, state, body, single=len(prompts) == 1, stream=bool(body.stream))
    if body.stream:
        async with aclosing(_completion_events(request, body, prompts, parameters)) as events:
            characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
            headers = stream_headers(state, exact=wants_exact(request) or bool(body.exact), characters=characters)
            return await send_events(request, events, headers=headers, limits=state.limits)
    runs = [asyncio.ensure_future(_complete(request, prompt, body, parameters)) for prompt in prompts]
    try:
        results = await asyncio.gather(*runs)
    finally:
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    finishes = [sequences[0].finish for _, sequences in results]
    choices: list[dict[str, Any]] = [
        {"index": index, "text": f.generated_text, "logprobs": None, "finish_reason": _FINISH[f.finish_reason]}
        for index, f in enumerate(finishes)
    ]
    answer = {
        **_envelope(request, "text_completion", "cmpl"),
        "choices": choices,
        "usage": _usage(finishes),
        "brownout": brownout_details(finishes),
    }
    if hand_off_of(request) is not NOTHING:
        for choice, (valid, sequences) in zip(choices, results, strict=True):
            fields = await hand_off_fields(request, state, valid, sequences[0].finish)
            if hand_off_of(request).token_ids:
                choice["token_ids"] = [event.token.id for event in sequences[0].tokens]
                choice["prompt_token_ids"] = list(valid.prompt_ids)
            if len(results) == 1:
                answer.update(fields)
    headers = answer_headers(state, times_of(request), [v for v, _ in results], [s for _, s in results])
    return web.json_response(answer, headers=headers)


def _completion_parameters(body: CompletionRequest) -> GenerateParameters:
    greedy = body.temperature == 0.0
    return GenerateParameters(
        do_sample=not greedy,
        temperature=None if greedy else body.temperature,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        top_p=body.top_p,
        seed=body.seed,
        stop=body.stop_list,
        max_new_tokens=body.max_tokens,
        details=True,
        exact=body.exact,
        ignore_eos=body.ignore_eos,
    )


async def _complete(
    request: web.Request, prompt: str | tuple[int, ...], body: CompletionRequest, parameters: GenerateParameters
) -> tuple[ValidRequest, list[Sequence]]:
    return await run(request, prompt, parameters, presence_penalty=_presence(body))


def _presence(body: CompletionRequest) -> float | None:
    penalty = body.presence_penalty
    if penalty is not None and not -2.0 <= penalty <= 2.0:
        raise validation_error("`presence_penalty` must be >= -2.0 and <= 2.0")
    return penalty


async def _completion_events(
    request: web.Request,
    body: CompletionRequest,
    prompts: list[str | tuple[int, ...]],
    parameters: GenerateParameters,
) -> AsyncGenerator[dict[str, Any] | str]:
    """Chunks of all choices as they come."""
    finishes: list[FinishEvent] = []
    async with aclosing(_merged(request, body, prompts, parameters)) as chunks:
        async for chunk, finish in chunks:
            if finish is not None:
                finishes.append(finish)
            yield chunk
    if finishes and body.stream_options is not None and body.stream_options.include_usage:
        yield {**_envelope(request, "text_completion", "cmpl"), "choices": [], "usage": _usage(finishes)}
    yield DONE


async def _merged(
    request: web.Request,
    body: CompletionRequest,
    prompts: list[str | tuple[int, ...]],
    parameters: GenerateParameters,
) -> AsyncGenerator[tuple[dict[str, Any], FinishEvent | None]]:
    """The chunks of all prompts; those of one prompt stay in order."""
    if len(prompts) == 1:
        async with aclosing(_choice_events(request, body, 0, prompts[0], parameters)) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[tuple[dict[str, Any], FinishEvent | None] | None] = asyncio.Queue(maxsize=64)

    async def feed(index: int, prompt: str | tuple[int, ...]) -> None:
        try:
            async with aclosing(_choice_events(request, body, index, prompt, parameters)) as items:
                async for item in items:
                    await queue.put(item)
        finally:
            # Wakes the reader. With a full queue it is awake anyway, and looks whether all feeds are done.
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)

    feeds = [asyncio.ensure_future(feed(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        while not (queue.empty() and all(task.done() for task in feeds)):
            received = await queue.get()
            if received is not None:
                yield received
    finally:
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)


async def _choice_events(
    request: web.Request,
    body: CompletionRequest,
    index: int,
    prompt: str | tuple[int, ...],
    parameters: GenerateParameters,
) -> AsyncGenerator[tuple[dict[str, Any], FinishEvent | None]]:
    """The chunks of one prompt; an error is the last of them."""
    try:
        async with aclosing(run_stream(request, prompt, parameters, presence_penalty=_presence(body))) as steps:
            async for _, (event, finish) in steps:
                yield _completion_chunk(request, index, event, finish), finish
    except ApiError as error:
        yield error.openai_body(), None


def _completion_chunk(
    request: web.Request, index: int, event: TokenEvent | None, finish: FinishEvent | None
) -> dict[str, Any]:
    text = "" if event is None or event.token.special else event.token.text
    choice = {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": "" if finish is None else _FINISH[finish.finish_reason],
    }
    if hand_off_of(request).token_ids:
        choice["token_ids"] = [] if event is None else [event.token.id]
    chunk = {**_envelope(request, "text_completion", "cmpl"), "choices": [choice]}
    if finish is not None:
        chunk["usage"] = _usage([finish])
        chunk["brownout"] = brownout_details([finish])
    return chunk


# ------------------------------------------------------------------ shared


async def models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models."""
    return web.json_response({"object": "list", "data": [_model(state_of(request))]})


def _model(state: ApiState) -> dict[str, Any]:
    name = state.info.model_id
    return {"id": name, "object": "model", "created": int(state.started), "owned_by": name}


def _envelope(request: web.Request, kind: str, prefix: str) -> dict[str, Any]:
    state = state_of(request)
    return {
        "object": kind,
        "id": f"{prefix}-{request['request_id']}",
        "created": int(time.time()),
        "model": state.info.model_id,
        "system_fingerprint": state.system_fingerprint,
    }


def _usage(finishes: list[FinishEvent]) -> dict[str, Any]:
    prompt = sum(finish.prompt_tokens for finish in finishes)
    completion = sum(finish.generated_tokens for finish in finishes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(finish.cached_tokens for finish in finishes)},
    }


def _usage_chunk(request: web.Request, kind: str, prefix: str, finish: FinishEvent) -> dict[str, Any]:
    return {**_envelope(request, kind, prefix), "choices": [], "usage": _usage([finish])}
