"""Between TGI's dialect and OpenAI's, for workers that speak only the latter (vLLM)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from moe_opt.serving.api.errors import validation_error

_PASSED = ("temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed", "ignore_eos")
_UNKNOWN = ("typical_p", "watermark", "grammar", "top_n_tokens", "decoder_input_details", "adapter_id", "truncate")


class Translator(Protocol):
    """Turns a worker's answer into the client's dialect."""

    def events(self, events: bytes) -> bytes:
        """Whole events of a stream in, whole events out."""
        ...

    def answer(self, body: bytes) -> bytes:
        """The body of an answer that is not streamed."""
        ...


def completion_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """A TGI request as a `/v1/completions` body, `max_tokens` and `model` left out.

    Raises:
        ApiError: it asks for what vLLM does not do.
    """
    parameters = body.get("parameters")
    p: Mapping[str, Any] = {"do_sample": True} if parameters is None else parameters
    for name in _UNKNOWN:
        if p.get(name):
            raise validation_error(f"`{name}` is not supported by this fleet's vLLM workers")
    if p.get("best_of") not in (None, 1):
        raise validation_error("`best_of` is not supported by this fleet's vLLM workers")
    found: dict[str, Any] = {"prompt": body.get("inputs"), "logprobs": 0, "return_token_ids": True}
    found.update({name: p[name] for name in _PASSED if p.get(name) is not None})
    samples = p.get("do_sample") or any(p.get(name) is not None for name in ("temperature", "top_k", "top_p"))
    if not samples:
        found["temperature"] = 0
    if p.get("max_new_tokens") is not None:
        found["max_tokens"] = p["max_new_tokens"]
    if p.get("stop"):
        found["stop"] = p["stop"]
        found["include_stop_str_in_output"] = True  # as TGI has it
    return found


def _finish(choice: Mapping[str, Any]) -> str | None:
    reason = choice.get("finish_reason")
    if reason == "length" or not reason:
        return reason or None
    return "stop_sequence" if isinstance(choice.get("stop_reason"), str) else "eos_token"


def _frame(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class TgiEvents:
    """TGI events out of completion chunks.

    Args:
        body: the client's TGI request. index: tokens that the client has already. text: theirs.
        as_list: whether an answer that is not streamed goes into a list, as on route `/`.
    """

    def __init__(self, body: Mapping[str, Any], index: int = 0, text: str = "", *, as_list: bool = False) -> None:
        parameters = body.get("parameters") or {}
        self._inputs = str(body.get("inputs")) if parameters.get("return_full_text") else ""
        self._details = bool(parameters.get("details"))
        self._seed = parameters.get("seed")
        self._index = index
        self._text = text
        self._as_list = as_list

    def events(self, events: bytes) -> bytes:
        out = b""
        for part in events.split(b"\n\n"):
            line = part.strip()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                out += _frame(_error(chunk["error"]))
                continue
            for choice in chunk.get("choices", ()):
                out += self._choice(choice)
        return out

    def _choice(self, choice: Mapping[str, Any]) -> bytes:
        ids = choice.get("token_ids") or []
        text = choice.get("text") or ""
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        finish = _finish(choice)
        self._text += text
        out = b""
        if not ids and (text or finish):
            ids = [None]
        for position, token in enumerate(ids):
            last = position == len(ids) - 1
            if token is not None:
                self._index += 1
            event: dict[str, Any] = {
                "index": self._index,
                "token": {
                    "id": token if token is not None else 0,
                    "text": text if last else "",
                    "logprob": logprobs[position] if position < len(logprobs) else None,
                    "special": token is None or (last and finish == "eos_token"),
                },
                "generated_text": None,
                "details": None,
            }
            if last and finish:
                event["generated_text"] = self._inputs + self._text
                if self._details:
                    event["details"] = self._finish_details(finish, self._index, None)
            out += _frame(event)
        return out

    def answer(self, body: bytes) -> bytes:
        full = json.loads(body)
        choice = full["choices"][0]
        answer: dict[str, Any] = {"generated_text": self._inputs + choice["text"]}
        if self._details:
            logprobs = choice.get("logprobs") or {}
            usage = full.get("usage") or {}
            finish = _finish(choice) or "length"
            details = self._finish_details(finish, usage.get("completion_tokens", 0), usage.get("prompt_tokens"))
            ids = choice.get("token_ids") or []
            texts, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
            details["prefill"] = []
            details["tokens"] = [
                {"id": token, "text": text, "logprob": value, "special": False}
                for token, text, value in zip(ids, texts, values, strict=False)
            ]
            answer["details"] = details
        return json.dumps([answer] if self._as_list else answer, ensure_ascii=False).encode()

    def _finish_details(self, reason: str, tokens: int, prompt_tokens: int | None) -> dict[str, Any]:
        details = {"finish_reason": reason, "generated_tokens": tokens, "seed": self._seed}
        if prompt_tokens is not None:
            details["input_length"] = prompt_tokens
        return details


class ChatChunks:
    """Chat chunks out of completion chunks, behind what another worker streamed of the same answer."""

    def events(self, events: bytes) -> bytes:
        out = b""
        for part in events.split(b"\n\n"):
            line = part.strip()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                out += b"data: [DONE]\n\n"
                continue
            chunk = json.loads(data)
            if "choices" in chunk:
                chunk["object"] = "chat.completion.chunk"
                for choice in chunk["choices"]:
                    choice["delta"] = {"content": choice.pop("text", "")}
                    choice.pop("logprobs", None)
            out += _frame(chunk)
        return out

    def answer(self, body: bytes) -> bytes:
        return body  # an answer that is not streamed is never continued: it begins anew


def _error(error: Any) -> dict[str, Any]:
    if isinstance(error, str):
        return {"error": error, "error_type": "generation"}
    return {"error": str(error.get("message")), "error_type": str(error.get("type") or "generation")}
