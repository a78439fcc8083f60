"""A client's call, and what is sent to workers for it (BalanceRoute D.2, the payload-mutation contract).

Our own workers take the client's very body, whatever its dialect, with `kv_transfer_params` added; so does a vLLM
worker for OpenAI's dialect. What vLLM does not speak is translated in `translate`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from moe_opt.serving.api.errors import ApiError, validation_error
from moe_opt.serving.router.fleet import WorkerHandle
from moe_opt.serving.router.translate import ChatChunks, TgiEvents, Translator, completion_of

Dialect = Literal["tgi", "completions", "chat", "other"]
_DIALECTS: dict[str, Dialect] = {
    "/": "tgi",
    "/generate": "tgi",
    "/generate_stream": "tgi",
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
}
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclasses.dataclass(slots=True)
class Call:
    """One request as it came.

    Attributes:
        body: None where it is no JSON object; a worker says what is wrong with it.
        splits: prefill and decode may run on different workers: it generates one sequence and wants nothing that is
            known only where the prompt was computed.
        text: the prompt, as far as it is needed to recognise shared prefixes.
    """

    path: str
    raw: bytes
    dialect: Dialect
    body: dict[str, Any] | None
    stream: bool
    splits: bool
    text: str

    @property
    def generates(self) -> bool:
        return self.dialect != "other" or self.path in ("/vertex", "/invocations")

    @property
    def max_new_tokens(self) -> int | None:
        body = self.body or {}
        where = body.get("parameters") or {} if self.dialect == "tgi" else body
        wanted = where.get("max_new_tokens" if self.dialect == "tgi" else "max_tokens")
        return wanted if type(wanted) is int and wanted > 0 else None


def parse_call(path: str, raw: bytes) -> Call:
    """Read a body as far as routing needs; nothing is refused here."""
    dialect = _DIALECTS.get(path, "other")
    try:
        body = json.loads(raw) if dialect != "other" else None
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return Call(path, raw, dialect, None, path == "/generate_stream", False, "")
    stream = path == "/generate_stream" or (path != "/generate" and body.get("stream") is True)
    if "kv_transfer_params" in body:  # a ticket names an address that a worker would fetch from: ours alone count
        del body["kv_transfer_params"]
        raw = json.dumps(body).encode()
    splits, text = _SPLITS[dialect](body) if dialect in _SPLITS else (False, "")
    return Call(path, raw, dialect, body, stream, splits, text)


def _tgi(body: Mapping[str, Any]) -> tuple[bool, str]:
    inputs, parameters = body.get("inputs"), body.get("parameters") or {}
    if not isinstance(inputs, str) or not isinstance(parameters, dict):
        return False, ""
    return parameters.get("best_of") in (None, 1) and not parameters.get("decoder_input_details"), inputs


def _completions(body: Mapping[str, Any]) -> tuple[bool, str]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    single = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int))
    text = prompt if isinstance(prompt, str) else json.dumps(prompt) if single else ""
    return single and body.get("n") in (None, 1) and body.get("best_of") in (None, 1), text


def _chat(body: Mapping[str, Any]) -> tuple[bool, str]:
    single = body.get("n") in (None, 1) and not body.get("tools")
    return single, json.dumps(body.get("messages"), ensure_ascii=False)


_SPLITS = {"tgi": _tgi, "completions": _completions, "chat": _chat}


@dataclasses.dataclass(frozen=True, slots=True)
class Upstream:
    """What to send to a worker. `translator` turns its answer into the client's dialect; None passes it through."""

    path: str
    body: dict[str, Any]
    translator: Translator | None = None


def prefill_upstream(call: Call, worker: WorkerHandle) -> Upstream:
    """Compute the prompt and keep its KV: `stream` off, one token, a hand-off.

    Raises:
        ApiError: vLLM cannot do what is asked for.
    """
    assert call.body is not None
    handed = {"kv_transfer_params": PREFILL, "return_token_ids": True}
    if worker.kind == "moe_opt":  # which caps the output itself, and checks the request as a whole
        body = {key: value for key, value in call.body.items() if key not in ("stream", "stream_options")}
        return Upstream("/generate" if call.dialect == "tgi" else call.path, {**body, **handed})
    body = completion_of(call.body) if call.dialect == "tgi" else dict(call.body)
    for key in ("stream_options", "min_tokens"):
        body.pop(key, None)
    body.update(model=worker.model, stream=False, max_tokens=1, **handed)
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return Upstream("/v1/completions" if call.dialect == "tgi" else call.path, body)


def decode_upstream(
    call: Call,
    worker: WorkerHandle,
    ticket: Mapping[str, Any] | None,
    prompt_ids: Sequence[int] | None,
    generated: Sequence[int] = (),
    sent_text: str = "",
) -> Upstream:
    """Go on with a request: with the KV of its prompt where there is a ticket, and behind what was sent already.

    Args:
        prompt_ids: as the prefill worker counted them. generated: ids that the client has. sent_text: their text.

    Raises:
        ApiError: vLLM cannot do what is asked for.
    """
    assert call.body is not None
    handed = dict(ticket or {})
    if worker.kind == "moe_opt":
        if generated:
            handed["generated_token_ids"] = list(generated)
        extra: dict[str, Any] = {"kv_transfer_params": handed} if handed else {}
        if call.stream and call.dialect != "tgi":
            extra["return_token_ids"] = True  # what a move to another worker needs
        return Upstream(call.path, {**call.body, **extra})
    return _vllm_decode(call, worker, handed, prompt_ids, generated, sent_text)


def _vllm_decode(
    call: Call,
    worker: WorkerHandle,
    ticket: dict[str, Any],
    prompt_ids: Sequence[int] | None,
    generated: Sequence[int],
    sent_text: str,
) -> Upstream:
    assert call.body is not None
    body = completion_of(call.body) if call.dialect == "tgi" else dict(call.body)
    body.update(model=worker.model, stream=call.stream)
    if ticket:
        body["kv_transfer_params"] = ticket
    if call.stream or call.dialect == "tgi":
        body["return_token_ids"] = True
    limit = call.max_new_tokens
    if call.dialect == "tgi" and limit is None:
        limit = max(1, int(worker.gauges.get("max_model_len", 2048)) - len(prompt_ids or ()))
    if call.dialect == "tgi":
        body["max_tokens"] = limit
    translator: Translator | None = None
    if call.dialect == "tgi":
        translator = TgiEvents(call.body, len(generated), sent_text, as_list=call.path == "/")
    if not generated:
        return Upstream("/v1/completions" if call.dialect == "tgi" else call.path, body, translator)
    if prompt_ids is None:
        raise ApiError(424, "generation", "Request failed during generation: the worker was lost")
    body["prompt"] = [*prompt_ids, *generated]
    if limit is not None:
        body["max_tokens"] = max(1, limit - len(generated))
    if call.dialect == "chat":
        for key in ("messages", "max_completion_tokens", "logprobs", "top_logprobs"):
            body.pop(key, None)
        translator = ChatChunks()
    return Upstream("/v1/completions", body, translator)


def whole_upstream(call: Call, worker: WorkerHandle) -> Upstream | None:
    """A request that stays in one piece; None sends the client's bytes as they are.

    Raises:
        ApiError: vLLM has no such route.
    """
    if worker.kind == "moe_opt":
        return None
    if call.dialect == "tgi" and call.body is not None:
        return _vllm_decode(call, worker, {}, None, (), "")
    if call.dialect in ("completions", "chat") and call.body is not None:
        return Upstream(call.path, {**call.body, "model": worker.model})
    if call.dialect != "other":
        raise validation_error("the body is no JSON object")
    raise ApiError(501, "not_implemented", f"{call.path} needs a moe_opt worker; this fleet's are vLLM's")


def generated_in(call: Call, events: bytes) -> tuple[list[int], str]:
    """(token ids, text) of the events of a stream that the client has.

    Raises:
        ApiError: the worker does not say which tokens it sent, so that no other can go on behind them.
    """
    ids: list[int] = []
    text: list[str] = []
    for event in json_events(events):
        if call.dialect == "tgi":
            token = event.get("token")
            if token and not (event.get("details") or event.get("generated_text")):
                ids.append(int(token["id"]))
                text.append("" if token.get("special") else token["text"])
            continue
        for choice in event.get("choices", ()):
            if choice.get("token_ids") is None:
                if choice.get("text") or (choice.get("delta") or {}).get("content"):
                    raise ApiError(424, "generation", "Request failed during generation: the worker was lost")
                continue
            ids.extend(choice["token_ids"])
            text.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return ids, "".join(text)


def json_events(events: bytes) -> list[dict[str, Any]]:
    """The JSON of every `data:` line."""
    found = []
    for part in events.split(b"\n\n"):
        line = part.strip()
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            found.append(json.loads(line[5:]))
    return found
