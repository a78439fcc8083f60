"""Text to packed sequences in one fixed order, so that position p of a run is the same tokens on every machine.

Everything that training draws at random (which text, which threshold) is a function of the seed and that position.
A run on two processes, one with gradient accumulation and one that was killed and resumed therefore see the same.
"""

from __future__ import annotations

import glob
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from moe_opt.distill.config import DataSettings
from moe_opt.errors import ConfigError

_SEPARATED = 64  # texts tokenised at a time


def is_held_out(text: str, modulus: int) -> bool:
    """Texts that a recipe never trains on: crc32(text) % modulus == 0."""
    return modulus > 0 and zlib.crc32(text.encode()) % modulus == 0


def load_texts(settings: DataSettings, tokenizer: Any, seed: int, *, held_out: bool) -> Iterator[str]:
    """The texts of one pass over the data in shuffled order, either those held out or all others.

    Raises:
        ConfigError: data that `datasets` cannot load, or without the text column.
    """
    import datasets

    files = _data_files(settings)
    if held_out and files is not None:  # a file named twice is trained on twice as often, and measured on once
        files = list(dict.fromkeys(files))
    try:
        loaded = datasets.load_dataset(
            settings.path,
            settings.name,
            data_files=files,
            split=settings.split,
            streaming=settings.streaming,
            revision=settings.revision,
        )
    except Exception as error:  # `datasets` raises builders' own errors, OSError, ValueError and more
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"cannot load data {settings.path!r}{f' from {settings.data_files}' if settings.data_files else ''}: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error
    columns = loaded.column_names
    if columns is not None and settings.text not in columns:
        raise ConfigError(f"data {settings.path!r} has no column {settings.text!r}; it has {', '.join(columns)}")
    loaded = (
        loaded.shuffle(seed=seed, buffer_size=settings.shuffle_buffer)
        if settings.streaming
        else loaded.shuffle(seed=seed)
    )
    for row in loaded:
        text = _as_text(row[settings.text], tokenizer)
        if text and is_held_out(text, settings.held_out) == held_out:
            yield text


def _data_files(settings: DataSettings) -> list[str] | None:
    if settings.data_files is None:
        return None
    found: list[str] = []
    for pattern in settings.data_files:
        if "://" in pattern or (settings.path not in ("json", "parquet", "text", "csv", "arrow")):
            found.append(pattern)
            continue
        matches = sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise ConfigError(f"no data at {pattern}: data_files names no file here")
        found += matches
    return found


def _as_text(value: Any, tokenizer: Any) -> str:
    """A string as it is; a list of chat messages through the tokenizer's template."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], dict):
        if getattr(tokenizer, "chat_template", None):
            return tokenizer.apply_chat_template(value, tokenize=False)
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in value)
    return json.dumps(value, ensure_ascii=False) if value is not None else ""


def pack(texts: Iterable[str], tokenizer: Any, length: int) -> Iterator[torch.Tensor]:
    """int64 [length] sequences: documents one after the other, each closed by the end-of-text token.

    A sequence may hold parts of several documents, and attention crosses their borders, as it does in the base models'
    own pretraining; brownout plans only see how many tokens went to each expert.
    """
    end = tokenizer.eos_token_id
    rest: list[int] = []
    batch: list[str] = []

    def flush() -> Iterator[torch.Tensor]:
        for ids in tokenizer(batch, return_attention_mask=False, verbose=False)["input_ids"]:
            rest.extend(ids)
            if end is not None and (not ids or ids[-1] != end):
                rest.append(end)
        whole = len(rest) // length * length
        yield from torch.tensor(rest[:whole], dtype=torch.int64).view(-1, length)
        del rest[:whole]
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == _SEPARATED:
            yield from flush()
    if batch:
        yield from flush()


class PackedSequences(Dataset):
    """`total` packed sequences of data that is read once and then kept in memory; it is walked through again in
    another order where it has fewer.

    Item p is {"input_ids": int64 [length], "position": p}.
    """

    def __init__(self, settings: DataSettings, tokenizer: Any, total: int, seed: int) -> None:
        self.total = total
        self.seed = seed
        sequences: list[torch.Tensor] = []
        for sequence in pack(load_texts(settings, tokenizer, seed, held_out=False), tokenizer, settings.length):
            sequences.append(sequence)
            if len(sequences) == total:
                break
        if not sequences:
            raise ConfigError(
                f"data {settings.path!r} holds less than one sequence of {settings.length} tokens to train on"
            )
        self.sequences = torch.stack(sequences)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        if not 0 <= position < self.total:
            raise IndexError(position)
        walk, place = divmod(position, len(self.sequences))
        if walk:  # texts shuffled already: the first walk needs no other order
            generator = torch.Generator().manual_seed(self.seed + walk)
            place = int(torch.randperm(len(self.sequences), generator=generator)[place])
        return {"input_ids": self.sequences[place], "position": torch.tensor(position)}


class StreamedSequences(IterableDataset):
    """As `PackedSequences`, for data that does not fit: read while training, from the start again when it ends."""

    def __init__(self, settings: DataSettings, tokenizer: Any, total: int, seed: int) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.total = total
        self.seed = seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        position = walk = 0
        while position < self.total:
            before = position
            texts = load_texts(self.settings, self.tokenizer, self.seed + walk, held_out=False)
            for sequence in pack(texts, self.tokenizer, self.settings.length):
                yield {"input_ids": sequence, "position": torch.tensor(position)}
                position += 1
                if position == self.total:
                    return
            if position == before:
                raise ConfigError(
                    f"data {self.settings.path!r} holds less than one sequence of {self.settings.length} tokens"
                )
            walk += 1


def training_data(settings: DataSettings, tokenizer: Any, total: int, seed: int) -> PackedSequences | StreamedSequences:
    """The first `total` training sequences."""
    kind = StreamedSequences if settings.streaming else PackedSequences
    return kind(settings, tokenizer, total, seed)


def first_sequences(
    settings: DataSettings, tokenizer: Any, count: int, seed: int, *, held_out: bool
) -> torch.Tensor | None:
    """int64 [<= count, length], for calibration or measurement; None where there is not even one."""
    found = []
    for sequence in pack(load_texts(settings, tokenizer, seed, held_out=held_out), tokenizer, settings.length):
        found.append(sequence)
        if len(found) == count:
            break
    return torch.stack(found) if found else None


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """{"input_ids": int64 [B, length], "position": int64 [B]}."""
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def load_tokenizer(name: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        kind = "folder" if Path(name).is_dir() else "name"
        raise ConfigError(f"no tokenizer for {kind} {name!r}: {reason}") from error
