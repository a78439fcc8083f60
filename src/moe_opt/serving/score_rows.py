"""Rows of `moe-opt score`: read them in windows, write results so that a kill at any point loses and doubles nothing.

A window is a fixed range of input lines. Its results are appended and synced before the progress file says so; a
restart cuts the output back to what the progress file knows, and goes on with the next window. As a window's results
depend on its lines only, the output is the same as without the kill.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from moe_opt.errors import ConfigError

_JSONL = (".jsonl", ".jsonl.gz", ".json", ".ndjson")


@dataclass(frozen=True)
class ScoreRow:
    """One row: its line (from 1), its id, the prompt and the choices."""

    line: int
    id: Any
    prompt: str
    choices: tuple[str, ...]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be scored, and why."""

    line: int
    error: str


def read_lines(path: Path, skip: int = 0) -> Iterator[tuple[int, Any]]:
    """(line, content) of an input file: text of a JSONL line, or an object of a parquet row. Blank lines count.

    Raises:
        ConfigError: no such file, or a kind that is not known.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.name.endswith(".parquet"):
        yield from _parquet_rows(path, skip)
        return
    if not path.name.endswith(_JSONL):
        raise ConfigError(f"{path}: expected a .jsonl, .jsonl.gz or .parquet file")
    opener: Any = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rb") as lines:
        try:
            yield from enumerate(islice(lines, skip, None), skip + 1)
        except (gzip.BadGzipFile, EOFError) as error:
            raise ConfigError(f"{path}: not readable as gzip: {error}") from error


def _parquet_rows(path: Path, skip: int) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from error
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
        if number + batch.num_rows <= skip:
            number += batch.num_rows
            continue
        for row in batch.to_pylist():
            number += 1
            if number > skip:
                yield number, row


def parse_row(line: int, content: Any) -> ScoreRow | BadRow | None:
    """A row to score, the reason why it is none, or None for a blank line."""
    if isinstance(content, bytes):
        if not content.strip():
            return None
        try:
            content = json.loads(content)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            return BadRow(line, f"not JSON: {error}")
    if not isinstance(content, dict):
        return BadRow(line, f"expected an object with prompt and choices, got {type(content).__name__}")
    prompt, choices = content.get("prompt"), content.get("choices")
    if not isinstance(prompt, str) or not prompt:
        return BadRow(line, '"prompt" must be a text that is not empty')
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        return BadRow(line, '"choices" must be a list of at least one text, none of them empty')
    return ScoreRow(line, content.get("id", line), prompt, tuple(choices))


class ResultFiles:
    """Output, errors and progress of one job.

    Args:
        output: where results go; `OUTPUT.errors.jsonl` takes bad rows, `.OUTPUT.progress` the progress.
        job: what the job is (input, model, settings): a restart with another job is refused.
        overwrite: begin anew whatever is there.

    Raises:
        ConfigError: the output is there already and is not this job's.
    """

    def __init__(self, output: Path, job: dict[str, Any], overwrite: bool = False) -> None:
        self.output = output
        self.parquet = output.name.endswith(".parquet")
        self.rows_path = output.with_name(output.name + ".part.jsonl") if self.parquet else output
        self.errors_path = output.with_name(output.name + ".errors.jsonl")
        self.progress_path = output.with_name(f".{output.name}.progress")
        self.job = job
        self.lines = self.rows = self.bad = 0
        self.measured: dict[str, float] = {}  # what was measured at the first start and decides the output
        self.complete = False
        output.parent.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for path in (output, self.rows_path, self.errors_path, self.progress_path):
                path.unlink(missing_ok=True)
        offsets = self._read_progress()
        if self.complete:
            return
        self._rows = self._open(self.rows_path, offsets[0])
        self._errors = self._open(self.errors_path, offsets[1]) if offsets[1] or self.errors_path.exists() else None

    def _read_progress(self) -> tuple[int, int]:
        if not self.progress_path.is_file():
            if self.output.exists() and self.output.stat().st_size:
                raise ConfigError(f"{self.output} is there already: name another output, or give --overwrite")
            return 0, 0
        try:
            saved = json.loads(self.progress_path.read_text())
            job, offsets = saved["job"], (int(saved["output_bytes"]), int(saved["error_bytes"]))
            counts = int(saved["lines"]), int(saved["rows"]), int(saved["bad"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.progress_path} cannot be read ({error}): give --overwrite to begin anew"
            ) from error
        if job != self.job:
            changed = sorted(key for key in {*job, *self.job} if job.get(key) != self.job.get(key))
            raise ConfigError(
                f"{self.output} belongs to another job (other {', '.join(changed)}): use the same settings to go on, "
                "or --overwrite to begin anew"
            )
        self.lines, self.rows, self.bad = counts
        self.measured = dict(saved.get("measured", {}))
        self.complete = bool(saved.get("complete"))
        return offsets

    def _open(self, path: Path, offset: int) -> IO[bytes]:
        path.touch()
        size = path.stat().st_size
        if size < offset:
            raise ConfigError(f"{path} is shorter than {self.progress_path} says: give --overwrite to begin anew")
        file = path.open("r+b")
        file.truncate(offset)  # what was written after the last commit is done again
        file.seek(offset)
        return file

    def commit(self, lines: int, results: list[dict[str, Any]], bad: list[BadRow]) -> None:
        """Append a window's results, and only then move on to input line `lines`."""
        for result in results:
            self._rows.write(json.dumps(result, ensure_ascii=False).encode() + b"\n")
        if bad and self._errors is None:
            self._errors = self._open(self.errors_path, 0)
        for row in bad:
            assert self._errors is not None
            self._errors.write(json.dumps({"line": row.line, "error": row.error}, ensure_ascii=False).encode() + b"\n")
        for file in (self._rows, self._errors):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        self.lines = lines
        self.rows += len(results)
        self.bad += len(bad)
        self._save()

    def _save(self) -> None:
        state = {
            "job": self.job,
            "measured": self.measured,
            "lines": self.lines,
            "rows": self.rows,
            "bad": self.bad,
            "output_bytes": self._rows.tell(),
            "error_bytes": self._errors.tell() if self._errors is not None else 0,
            "complete": self.complete,
        }
        part = self.progress_path.with_name(self.progress_path.name + ".new")
        part.write_text(json.dumps(state))
        part.replace(self.progress_path)

    def finish(self) -> None:
        """Mark the job as done; turn the rows into parquet where that was asked for."""
        if self.parquet:
            _to_parquet(self.rows_path, self.output)
        self.complete = True
        self._save()
        self.close()
        if self.parquet:
            self.rows_path.unlink()

    def close(self) -> None:
        self._rows.close()
        if self._errors is not None:
            self._errors.close()


def _to_parquet(rows: Path, output: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    part = output.with_name(output.name + ".new")
    writer = None
    with rows.open("rb") as lines:
        while chunk := [json.loads(line) for line in islice(lines, 4096)]:
            table = pa.Table.from_pylist(chunk)
            if writer is None:
                writer = parquet.ParquetWriter(part, table.schema)
            writer.write_table(table.cast(writer.schema))
    if writer is None:
        writer = parquet.ParquetWriter(part, pa.schema([("id", pa.int64()), ("choice", pa.int64())]))
    writer.close()
    part.replace(output)
