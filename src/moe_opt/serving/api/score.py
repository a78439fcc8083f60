"""Routes that score instead of generating: `/v1/score`, `/v1/classify`, `/v1/rerank`.

One prefill each, no KV kept, prefixes that items share computed once. Always exact: brownout does not touch scores.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from moe_opt.modeling.score_item import ScoreItem
from moe_opt.serving.api.errors import overloaded_error, validation_error
from moe_opt.serving.api.score_schemas import ClassifyRequest, RerankRequest, ScoreRequest
from moe_opt.serving.api.state import ApiState, parse, read_body, state_of

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_YES_NO = (" yes", " no")


async def score(request: web.Request) -> web.StreamResponse:
    """POST /v1/score."""
    state = state_of(request)
    body = parse(ScoreRequest, await read_body(request))
    vocabulary = state.encoder.vocab_size
    unknown = [token for token in body.label_token_ids if token >= vocabulary]
    if unknown:
        raise validation_error(f"label_token_ids {unknown} are not below the vocabulary's {vocabulary}")
    prompts = await _score_prompts(state, body)
    labels = [[token] for token in body.label_token_ids]
    log_probs = await _run(state, [ScoreItem(prompt, labels) for prompt in prompts])
    convert = _softmax if body.apply_softmax else _exp
    scores = [convert(values) for values in log_probs]
    return _answer(state, "scoring", body.model, prompts, {"scores": scores})


async def _score_prompts(state: ApiState, body: ScoreRequest) -> list[tuple[int, ...]]:
    items: Sequence[Any] = [body.items] if isinstance(body.items, str) else body.items
    if isinstance(body.query, str) != isinstance(items[0], str):
        raise validation_error("`query` and `items` must both be texts or both be token ids")
    _check_count(state, len(items))
    prompts = []
    for item in items:
        if isinstance(body.query, str):
            text = item + body.query if body.item_first else body.query + item
            prompts.append(await state.encoder.encode(text, True))
            continue
        ids = (*item, *body.query) if body.item_first else (*body.query, *item)
        if max(ids) >= state.encoder.vocab_size:
            raise validation_error(f"token {max(ids)} is not below the vocabulary's {state.encoder.vocab_size}")
        prompts.append(tuple(ids))
    return prompts


async def classify(request: web.Request) -> web.StreamResponse:
    """POST /v1/classify."""
    state = state_of(request)
    body = parse(ClassifyRequest, await read_body(request))
    inputs = [body.input] if isinstance(body.input, str) else body.input
    if body.mode == "identifier" and len(body.choices) > len(_LETTERS):
        raise validation_error(f"mode `identifier` takes at most {len(_LETTERS)} choices. Given: {len(body.choices)}")
    if body.mode == "multi_label":
        return await _classify_labels(state, body, inputs)
    _check_count(state, len(inputs) * len(body.choices))
    if body.mode == "identifier":
        listed = "\n".join(f"{letter}. {text}" for letter, text in zip(_LETTERS, body.choices, strict=False))
        texts = [f"{text}\n{listed}\nAnswer:" for text in inputs]
        candidates = [f" {letter}" for letter in _LETTERS[: len(body.choices)]]
    else:
        texts, candidates = list(inputs), body.choices
    prompts = [await state.encoder.encode(text, True) for text in texts]
    choices = [await state.encoder.encode(candidate, False) for candidate in candidates]
    log_probs = await _run(state, [ScoreItem(prompt, choices) for prompt in prompts])
    data = []
    for index, values in enumerate(log_probs):
        probabilities = _softmax(values)
        best = max(range(len(values)), key=values.__getitem__)
        data.append(
            {
                "index": index,
                "label": body.choices[best],
                "choice": best,
                "probabilities": probabilities,
                "logprobs": values,
            }
        )
    return _answer(state, "classify", body.model, prompts, {"data": data})


async def _classify_labels(state: ApiState, body: ClassifyRequest, inputs: list[str]) -> web.StreamResponse:
    """Each label a sibling behind the shared input."""
    _check_count(state, len(inputs) * len(body.choices))
    texts = [f"{text}\nLabel: {label}\nDoes the label apply? Answer:" for text in inputs for label in body.choices]
    prompts, applies = await _yes_or_no(state, texts)
    data = []
    for index in range(len(inputs)):
        values = applies[index * len(body.choices) : (index + 1) * len(body.choices)]
        labels = [label for label, value in zip(body.choices, values, strict=True) if value >= body.threshold]
        data.append({"index": index, "labels": labels, "probabilities": values})
    return _answer(state, "classify", body.model, prompts, {"data": data})


async def rerank(request: web.Request) -> web.StreamResponse:
    """POST /v1/rerank."""
    state = state_of(request)
    body = parse(RerankRequest, await read_body(request))
    _check_count(state, len(body.documents))
    texts = [
        f"Query: {body.query}\nDocument: {document}\nIs the document relevant to the query? Answer:"
        for document in body.documents
    ]
    prompts, relevance = await _yes_or_no(state, texts)
    order = sorted(range(len(relevance)), key=lambda index: -relevance[index])[: body.top_n]
    results = []
    for index in order:
        result: dict[str, Any] = {"index": index, "relevance_score": relevance[index]}
        if body.return_documents:
            result["document"] = {"text": body.documents[index]}
        results.append(result)
    return _answer(state, "rerank", body.model, prompts, {"results": results})


async def _yes_or_no(state: ApiState, texts: list[str]) -> tuple[list[tuple[int, ...]], list[float]]:
    """Token ids of the texts, and the probability of " yes" against " no" after each."""
    prompts = [await state.encoder.encode(text, True) for text in texts]
    choices = [await state.encoder.encode(word, False) for word in _YES_NO]
    log_probs = await _run(state, [ScoreItem(prompt, choices) for prompt in prompts])
    return prompts, [_softmax(values)[0] for values in log_probs]


def _check_count(state: ApiState, count: int) -> None:
    most = state.limits.max_score_items
    if count > most:
        raise validation_error(
            f"a request scores at most {most} prompts and choices (--max-score-items), given {count}"
        )


async def _run(state: ApiState, items: list[ScoreItem]) -> list[list[float]]:
    """Score on the engine's thread, between two steps."""
    longest = state.limits.max_input_tokens
    for item in items:
        tokens = len(item.prompt) + max(len(choice) for choice in item.choices)
        if not item.prompt or not all(item.choices):
            raise validation_error("the tokenizer makes nothing of a prompt or a choice")
        if tokens > longest + 1:
            raise validation_error(f"inputs must have less than {longest} tokens. Given: {tokens}")
    if state.scoring >= state.limits.max_concurrent_requests:
        raise overloaded_error()
    state.scoring += 1
    try:
        return await state.engine.score(items)
    finally:
        state.scoring -= 1


def _answer(
    state: ApiState, kind: str, model: str | None, prompts: list[tuple[int, ...]], body: dict[str, Any]
) -> web.Response:
    tokens = sum(map(len, prompts))
    return web.json_response(
        {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model or state.info.model_id,
            **body,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        }
    )


def _exp(values: list[float]) -> list[float]:
    return [math.exp(value) for value in values]


def _softmax(values: list[float]) -> list[float]:
    best = max(values)
    exponents = [math.exp(value - best) for value in values]
    total = math.fsum(exponents)
    return [value / total for value in exponents]
