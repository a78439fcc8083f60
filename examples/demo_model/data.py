"""The corpus: reading it, splitting it, rendering some of it as chat, and drawing packed training batches."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

DOMAINS = (
    "code",
    "math",
    "medical",
    "legal",
    "general",
    "lang_de",
    "lang_es",
    "lang_fr",
    "lang_ru",
    "lang_zh",
)
QUESTION = re.compile(r"^Question: (.*?)\nAnswer: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    domain: str
    lang: str


def data_folder() -> Path:
    """Where the project's data lies: `MOE_OPT_DATA`, or `../shared/data` beside the repository."""
    return Path(os.environ.get("MOE_OPT_DATA", "../shared/data"))


def is_held_out(text: str) -> bool:
    """Texts that nothing in this project may be trained on."""
    return zlib.crc32(text.encode()) % 20 == 0


def read_corpus(domain: str, *, held_out: bool) -> Iterator[Document]:
    """The documents of one domain that belong to the training or to the held-out part."""
    path = data_folder() / "corpus" / f"corpus_{domain}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if is_held_out(row["text"]) == held_out:
                yield Document(row["text"], domain, row["lang"])


def as_chat(text: str) -> str:
    """A "Question: ... Answer: ..." text in the turns of the chat template; any other text unchanged."""
    parts = QUESTION.split(text)
    if len(parts) < 3 or parts[0].strip():
        return text
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return "".join(
        f"<|user|>\n{question.strip()}\n<|assistant|>\n{answer.strip()}<|eos|>" for question, answer in turns
    ).removesuffix("<|eos|>")


def encode_domain(tokenizer: PreTrainedTokenizerFast, domain: str, *, chat: bool = True) -> np.ndarray:
    """Training tokens of one domain, each document between <|bos|> and <|eos|>; a quarter of the questions as chat."""
    texts = []
    for document in read_corpus(domain, held_out=False):
        in_turns = chat and zlib.crc32(document.text.encode()) % 4 == 1
        texts.append(as_chat(document.text) if in_turns else document.text)
    encoded = tokenizer(texts, add_special_tokens=True, return_attention_mask=False)["input_ids"]
    stream = [token for ids in encoded for token in (*ids, tokenizer.eos_token_id)]
    return np.array(stream, dtype=np.uint16)


class PackedSampler:
    """Draws packed sequences: a domain by its share, then a window of its shuffled token stream.

    Each domain is walked through in windows whose offset changes every pass, so that no text is seen twice
    before all of its domain was seen once. Shares follow `size ** exponent`.
    """

    def __init__(self, streams: dict[str, np.ndarray], length: int, exponent: float, seed: int) -> None:
        self.streams = streams
        self.length = length
        self.random = np.random.default_rng(seed)
        sizes = np.array([len(stream) for stream in streams.values()], dtype=np.float64)
        self.shares = sizes**exponent / (sizes**exponent).sum()
        self.names = list(streams)
        self.queues: dict[str, list[int]] = {name: [] for name in self.names}

    def _next_window(self, name: str) -> np.ndarray:
        stream, queue = self.streams[name], self.queues[name]
        if not queue:
            first = int(self.random.integers(self.length))
            starts = np.arange(first, len(stream) - self.length, self.length)
            queue.extend(self.random.permutation(starts).tolist())
        start = queue.pop()
        return stream[start : start + self.length + 1]

    def batch(self, size: int) -> np.ndarray:
        """`size` windows of `length + 1` tokens: the inputs and, shifted by one, the targets."""
        # Stratified rather than independent draws keep every batch's mix close to the shares.
        picks = (np.arange(size) + self.random.random()) / size
        domains = np.searchsorted(np.cumsum(self.shares), picks, side="right").clip(max=len(self.names) - 1)
        return np.stack([self._next_window(self.names[domain]) for domain in domains]).astype(np.int64)
