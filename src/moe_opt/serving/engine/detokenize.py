"""Text as it grows, token by token.

A token is not a piece of text: a character may take several byte tokens, and what a token looks like can depend on the
one before it. So a few tokens are decoded together, once without and once with the new ones, and the difference is the
new text; while it ends in an incomplete character, it waits for the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_CONTEXT = 5  # prompt tokens that the first piece is decoded with
_LONGEST_CHARACTER = 4  # bytes of a UTF-8 character; more byte tokens than that are no character at all
_INCOMPLETE = "\ufffd"

Decode = Callable[[Sequence[int]], str]


def make_decoder(tokenizer: Any) -> Decode:
    """The tokenizer's `decode` with special tokens kept and nothing cleaned up, by the shortest way."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=False)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of one sequence's output."""

    __slots__ = ("_decode", "_ids", "_read", "_shown")

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._read = len(self._ids)  # ids whose text has been handed out
        self._shown = self._decode(self._ids) if self._ids else ""

    def push(self, token: int) -> str:
        """The text that `token` adds: "" while a character is incomplete, then all of it at once."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._read <= _LONGEST_CHARACTER:
            return ""
        return self._hand_out(text)

    def flush(self) -> str:
        """What still waits for the rest of a character, replacement characters for bytes that make none."""
        return self._hand_out(self._decode(self._ids)) if len(self._ids) > self._read else ""

    def _hand_out(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return piece


def piece_of(decode: Decode, tokens: Sequence[int], index: int) -> str:
    """The text of one prompt token behind those before it."""
    before = tokens[max(0, index - _CONTEXT) : index]
    return decode([*before, tokens[index]])[len(decode(before)) :] if before else decode([tokens[index]])
