"""Reading evaluation texts and cutting them into rows of tokens, each row with its domain."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_opt.errors import ConfigError

SPLITS = ("held-out", "all")
LAYOUTS = ("packed", "padded")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".txt", ".txt.gz")


def is_held_out(text: str) -> bool:
    """Texts that nothing in this project is trained on: one in twenty, by checksum."""
    return zlib.crc32(text.encode()) % 20 == 0


def domain_name(path: Path) -> str:
    """`corpus_legal.jsonl.gz` -> `legal`: one file is one domain."""
    name = path.name
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return name.removeprefix("corpus_")


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSONL file, gzipped or not.

    Raises:
        ConfigError: no such file, or a line that is no JSON object.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as lines:
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
                yield number, row
        except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise ConfigError(f"{path}:{number or 1}: not readable as JSONL: {error}") from error


def read_texts(path: Path, split: str = "held-out") -> list[str]:
    """The texts of a JSONL file (`text`, or `prompt` with `answer`) or of a text file (one text).

    Args:
        split: "held-out" keeps the texts whose CRC-32 is a multiple of 20; "all" keeps every text.

    Raises:
        ConfigError: an unknown format or split, a row without text, or nothing left.
    """
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    if not path.name.endswith(_SUFFIXES):
        raise ConfigError(f"{path}: texts are read from {', '.join(_SUFFIXES)}")
    if path.name.endswith((".txt", ".txt.gz")):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        raw = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        texts = [raw.decode("utf-8", errors="replace")]
    else:
        texts = [_text_of(row, path, number) for number, row in read_rows(path)]
    kept = [text for text in texts if text.strip() and (split == "all" or is_held_out(text))]
    if not kept:
        hint = "; use --split all to evaluate on all of them" if texts and split != "all" else ""
        raise ConfigError(f"{path}: none of its {len(texts)} texts belongs to split {split!r}{hint}")
    return kept


def _text_of(row: Mapping[str, Any], path: Path, number: int) -> str:
    if isinstance(row.get("text"), str):
        return row["text"]
    if isinstance(row.get("prompt"), str):
        answer = row.get("answer")
        return f"{row['prompt']}\n{answer}" if isinstance(answer, str) else row["prompt"]
    raise ConfigError(f'{path}:{number}: a row needs "text" or "prompt", this one has {", ".join(row) or "nothing"}')


@dataclasses.dataclass
class TokenRows:
    """Token rows to score, teacher-forced.

    Attributes:
        ids: int64 [R, S]. attention: bool [R, S], False for (right) padding. scored: bool [R, S], whether the token at
        this place is one to predict; False in the first place, for padding and for <bos>.
        domain: int64 [R], an index into `domains`.
    """

    ids: torch.Tensor
    attention: torch.Tensor
    scored: torch.Tensor
    domain: torch.Tensor
    domains: list[str]

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def num_scored(self) -> int:
        return int(self.scored.sum())

    @property
    def padded(self) -> bool:
        return not bool(self.attention.all())


def make_rows(
    texts: Mapping[str, Sequence[str]],
    tokenizer: Any,
    *,
    length: int,
    tokens: int,
    layout: str = "packed",
    seed: int = 0,
    multiple_of: int = 1,
) -> TokenRows:
    """Cut each domain's texts into rows, about `tokens` in all and the same number from each domain, and mix them.

    Mixed, because a server's batch is mixed and brownout acts on a batch's counts.

    Args:
        texts: domain -> texts. length: tokens in a row. layout: "packed" joins a domain's texts (between <bos> and
            <eos>) and cuts windows; "padded" gives each text a row of its own, cut at `length` and padded.
        multiple_of: leave out rows at the end so that their number divides by it, unless there are fewer.

    Raises:
        ConfigError: lengths out of range, or domains too short for a single row.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    if length < 2:
        raise ConfigError(f"a row needs at least 2 tokens, got length {length}")
    if tokens < length:
        raise ConfigError(f"{tokens} tokens make no row of {length}: ask for more tokens or shorter rows")
    wanted = max(1, round(tokens / (length * len(texts))))
    random = np.random.default_rng(seed)
    rows: list[tuple[list[int], int]] = []
    for index, (name, domain_texts) in enumerate(texts.items()):
        order = random.permutation(len(domain_texts))
        encoded = _encode(tokenizer, [domain_texts[i] for i in order], wanted * length)
        made = _windows(encoded, length) if layout == "packed" else [ids[:length] for ids in encoded if len(ids) > 1]
        if not made:
            raise ConfigError(f"{name}: its texts are too short for a row of {length} tokens")
        rows.extend((ids, index) for ids in made[:wanted])
    rows = [rows[i] for i in random.permutation(len(rows))]
    if len(rows) > multiple_of:
        rows = rows[: len(rows) // multiple_of * multiple_of]
    return _as_tensors(rows, list(texts), tokenizer)


def _encode(tokenizer: Any, texts: Sequence[str], enough: int) -> list[list[int]]:
    """Token ids of each text with its <bos> and <eos>, until `enough` tokens are there."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    out: list[list[int]] = []
    total = 0
    for text in texts:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = ([bos] if bos is not None else []) + ids + ([eos] if eos is not None else [])
        out.append(ids)
        total += len(ids)
        if total >= enough:
            break
    return out


def _windows(encoded: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    stream = [token for ids in encoded for token in ids]
    return [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]


def _as_tensors(rows: Sequence[tuple[list[int], int]], domains: list[str], tokenizer: Any) -> TokenRows:
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    ids = torch.full((len(rows), longest), pad, dtype=torch.int64)
    attention = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (tokens, _) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        attention[row, : len(tokens)] = True
    scored = attention.clone()
    scored[:, 0] = False
    if tokenizer.bos_token_id is not None:  # nobody has to guess that a text begins after <eos>
        scored &= ids != tokenizer.bos_token_id
    return TokenRows(ids, attention, scored, torch.tensor([domain for _, domain in rows]), domains)
