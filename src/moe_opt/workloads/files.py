"""Opening trace files, plain or gzip, with errors that name file and line."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_opt.errors import ConfigError


def data_dir() -> Path:
    """Root of the shared data: the variable MOE_OPT_DATA, else `../shared/data` beside the checkout."""
    return Path(os.environ.get("MOE_OPT_DATA", "../shared/data"))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a text file, gzip or not."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a path, or set MOE_OPT_DATA to the data folder")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as f:
            for number, line in enumerate(f, start=1):
                yield number, line.rstrip("\r\n")
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable text or gzip file ({error})") from error


def read_csv(path: Path, required: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row by column name) of a CSV file that has the required columns."""
    lines = read_lines(path)
    _, head = next(lines, (0, ""))
    columns = next(csv.reader([head.lstrip("\ufeff")]), [])
    missing = [name for name in required if name not in columns]
    if missing:
        raise ConfigError(f"{path}, line 1: no column {', '.join(missing)} (found: {', '.join(columns) or 'none'})")
    for number, line in lines:
        if not line.strip():
            continue
        values = next(csv.reader([line]))
        if len(values) != len(columns):
            raise ConfigError(f"{path}, line {number}: {len(values)} fields, expected {len(columns)}")
        yield number, dict(zip(columns, values, strict=True))


def read_jsonl(path: Path, required: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file whose objects have the required keys."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: expected an object, found {type(row).__name__}")
        missing = [key for key in required if key not in row]
        if missing:
            raise ConfigError(f"{path}, line {number}: no field {', '.join(missing)}")
        yield number, row


def whole_number(value: Any, name: str, path: Path, line: int, *, minimum: int = 0) -> int:
    """An integer field; floats with a whole value are taken, anything else names its file and line."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{path}, line {line}: {name} is {value!r}, expected a whole number") from None
    if isinstance(value, bool) or not number.is_integer() or number < minimum:
        raise ConfigError(f"{path}, line {line}: {name} is {value!r}, expected a whole number of at least {minimum}")
    return int(number)


def real_number(value: Any, name: str, path: Path, line: int) -> float:
    """A finite number that is at least 0; anything else names its file and line."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{path}, line {line}: {name} is {value!r}, expected a number") from None
    if isinstance(value, bool) or not 0 <= number < float("inf"):
        raise ConfigError(f"{path}, line {line}: {name} is {value!r}, expected a finite number of at least 0")
    return number
