"""Prompts for load tests: real texts, cut to the number of tokens that a trace asks for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from moe_opt.errors import ConfigError
from moe_opt.serving.loadgen import LoadRequest, Target
from moe_opt.workloads.files import data_dir, read_jsonl
from moe_opt.workloads.rows import TraceRequest

_POOL_CHARS = 400_000
_CHARS_PER_TOKEN = 4.0  # where the server does not tokenise for us
_FALLBACK = (
    "A mixture of experts routes every token to a few of its experts. A server keeps the weights of all of them in "
    "memory, and a decode step reads those that the tokens of its batch ask for. "
)


def load_texts(path: str | None, seed: int = 0) -> list[str]:
    """Texts of a JSONL file (field `prompt`, `text` or `inputs`) or of the shared prompts; without either a built-in
    paragraph, so that a first test needs no data.

    Raises:
        ConfigError: a file that is not there or holds none of these fields.
    """
    if path is not None:
        files: Sequence[Path] = [Path(path)]
    else:
        folder = data_dir() / "prompts"
        files = sorted(folder.glob("*.jsonl.gz")) if folder.is_dir() else []
    texts = []
    for file in files:
        for number, row in read_jsonl(file, ()):
            text = next((row[key] for key in ("prompt", "text", "inputs") if isinstance(row.get(key), str)), None)
            if text is None:
                raise ConfigError(f"{file}, line {number}: no field prompt, text or inputs")
            if text.strip():
                texts.append(text)
    if not texts:
        return [_FALLBACK]
    random.Random(seed).shuffle(texts)
    return texts


class PromptPool:
    """Cuts prompts of a wanted length out of one long text, each from another place."""

    def __init__(self, text: str, ends: Sequence[int], seed: int = 0) -> None:
        self._text = text
        self._ends = ends  # character behind each token
        self._random = random.Random(seed)

    @classmethod
    async def build(cls, texts: Sequence[str], target: Target, seed: int = 0) -> PromptPool:
        """Tokenised by the server where it has `/tokenize` in TGI's form, else estimated."""
        text = "\n\n".join(texts)
        while len(text) < _POOL_CHARS:
            text += "\n\n" + text
        text = text[:_POOL_CHARS]
        ends = await _token_ends(text, target)
        if ends is None:
            ends = [int((i + 1) * _CHARS_PER_TOKEN) for i in range(int(len(text) / _CHARS_PER_TOKEN))]
        return cls(text, ends, seed)

    def cut(self, tokens: int) -> str:
        """About `tokens` tokens of text (a cut inside a word may change the count by one or two)."""
        tokens = max(1, tokens - 1)  # most tokenizers add one at the start
        if tokens >= len(self._ends) - 1:
            raise ConfigError(f"a prompt of {tokens} tokens is longer than the pool of {len(self._ends)}")
        first = self._random.randrange(1, len(self._ends) - tokens)
        return self._text[self._ends[first - 1] : self._ends[first + tokens - 1]]


async def _token_ends(text: str, target: Target) -> list[int] | None:
    ends: list[int] = []
    timeout = aiohttp.ClientTimeout(total=60)
    try:
        async with aiohttp.ClientSession(headers=target.headers, timeout=timeout) as session:
            for start in range(0, len(text), 100_000):
                body = {"inputs": text[start : start + 100_000], "add_special_tokens": False}
                async with session.post(target.url.rstrip("/") + "/tokenize", json=body) as response:
                    tokens: Any = await response.json() if response.status == 200 else None
                if not isinstance(tokens, list):
                    return None
                ends.extend(start + int(token["stop"]) for token in tokens)
    except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, json.JSONDecodeError):
        return None
    return ends


def make_requests(
    rows: Sequence[TraceRequest], pool: PromptPool, *, max_total_tokens: int | None = None, stages: Sequence[str] = ()
) -> list[LoadRequest]:
    """Requests with real text for the rows of a trace; lengths are cut to what the server takes.

    Args:
        max_total_tokens: longest prompt plus output. stages: label of each row; empty labels all of them "all".
    """
    requests = []
    for index, row in enumerate(rows):
        prompt_tokens, output_tokens = row.prompt_tokens, row.output_tokens
        if max_total_tokens is not None:
            output_tokens = min(output_tokens, max(1, max_total_tokens // 2))
            prompt_tokens = min(prompt_tokens, max(1, max_total_tokens - output_tokens - 8))
        stage = stages[index] if stages else "all"
        requests.append(LoadRequest(row.id, row.arrival, pool.cut(prompt_tokens), output_tokens, prompt_tokens, stage))
    return requests
