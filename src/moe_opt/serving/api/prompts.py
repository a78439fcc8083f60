"""Texts to token ids and messages to prompts, with the served model's tokenizer and chat template.

Both can take a second for a body of megabytes, so they run on a small pool of threads, never on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jinja2

from moe_opt.serving.api.errors import ApiError, template_error, validation_error

T = TypeVar("T")


class TokenSpan(NamedTuple):
    """A token of a text: characters `start` to `stop` of it."""

    id: int
    text: str
    start: int
    stop: int


class PromptEncoder:
    """The tokenizer of the served model, safe to use from several requests at once.

    Args:
        tokenizer: a Transformers tokenizer; a fast one also gives character offsets. chat_template: replaces its own.
        workers: threads (TGI's `validation_workers`). max_chars: longer texts are refused before they are tokenised.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: str | None = None, workers: int = 2, max_chars: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self.chat_template: str | None = chat_template or getattr(tokenizer, "chat_template", None)
        self.workers = workers
        self.max_chars = max_chars
        self.vocab_size = len(tokenizer)
        # A slow tokenizer is plain Python with state of its own: one thread.
        self._pool = ThreadPoolExecutor(workers if self._fast is not None else 1, "tokenize")

    @property
    def template_knows_tools(self) -> bool:
        return self.chat_template is not None and "tools" in self.chat_template

    async def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return await self._run(self._encode, text, add_special_tokens)

    async def spans(self, text: str, add_special_tokens: bool) -> list[TokenSpan]:
        """The tokens of a text with their place in it."""
        return await self._run(self._spans, text, add_special_tokens)

    async def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
        """The prompt of a conversation.

        Raises:
            ApiError: `template_error` where the model has no chat template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise template_error(
                "this model's tokenizer has no chat template; use /generate, or --tokenizer-config-path"
            )
        return await self._run(self._render, messages, tools)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *args))

    def _check_length(self, text: str) -> None:
        if self.max_chars is not None and len(text) > self.max_chars:
            raise validation_error(f"`inputs` must have less than {self.max_chars} characters. Given: {len(text)}")

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        self._check_length(text)
        if self._fast is not None:
            return tuple(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _spans(self, text: str, add_special_tokens: bool) -> list[TokenSpan]:
        self._check_length(text)
        if self._fast is None:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return [TokenSpan(int(token), "", 0, 0) for token in ids]  # TGI's answer without offsets
        encoding = self._fast.encode(text, add_special_tokens=add_special_tokens)
        return [
            TokenSpan(token, text[start:stop], start, stop)
            for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except jinja2.UndefinedError as error:
            raise ApiError(422, "missing_template_variable", f"Missing template variable: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise template_error(str(error)) from error
        return str(text)
