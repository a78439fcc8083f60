"""The plain form, CSV or JSON lines: arrival, prompt_tokens, output_tokens, and optional id, domain,
block_hashes."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_opt.errors import ConfigError
from moe_opt.workloads.files import read_csv, read_jsonl, real_number, whole_number
from moe_opt.workloads.rows import TraceRequest

REQUIRED = ("arrival", "prompt_tokens", "output_tokens")


def _hashes(value: Any, path: Path, line: int) -> tuple[int, ...]:
    """A JSON list, or numbers separated by spaces in CSV."""
    if value in (None, ""):
        return ()
    if not isinstance(value, str | list):
        raise ConfigError(f"{path}, line {line}: block_hashes is {value!r}, expected a list of whole numbers")
    items = value.split() if isinstance(value, str) else value
    return tuple(whole_number(item, "block_hashes", path, line) for item in items)


def _row(line: int, row: dict[str, Any], path: Path, number: int) -> TraceRequest:
    prompt_hash = row.get("prompt_hash")
    return TraceRequest(
        id=str(row.get("id") or f"r{number}"),
        arrival=real_number(row["arrival"], "arrival", path, line),
        prompt_tokens=whole_number(row["prompt_tokens"], "prompt_tokens", path, line, minimum=1),
        output_tokens=whole_number(row["output_tokens"], "output_tokens", path, line, minimum=1),
        block_hashes=_hashes(row.get("block_hashes"), path, line),
        domain=str(row["domain"]) if row.get("domain") else None,
        prompt_hash=None if prompt_hash in (None, "") else whole_number(prompt_hash, "prompt_hash", path, line),
    )


def _unique(rows: list[TraceRequest], path: Path) -> list[TraceRequest]:
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise ConfigError(f"{path}: id {row.id!r} occurs twice; ids must differ")
        seen.add(row.id)
    return sorted(rows, key=lambda r: r.arrival)


def read_plain_csv(path: Path) -> list[TraceRequest]:
    """Requests of a CSV file in the plain form, in time order (seconds)."""
    rows = [_row(line, row, path, i) for i, (line, row) in enumerate(read_csv(path, REQUIRED))]
    return _unique(rows, path)


def read_plain_jsonl(path: Path) -> list[TraceRequest]:
    """Requests of a JSON-lines file in the plain form, in time order (seconds)."""
    rows = [_row(line, row, path, i) for i, (line, row) in enumerate(read_jsonl(path, REQUIRED))]
    return _unique(rows, path)


def write_plain(trace: Sequence[TraceRequest], path: Path) -> None:
    """Write a trace in the plain form; the suffix (.csv or .jsonl) chooses which."""
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as f:
            for r in trace:
                row = {"id": r.id, "arrival": r.arrival, "prompt_tokens": r.prompt_tokens}
                row |= {"output_tokens": r.output_tokens, "block_hashes": list(r.block_hashes)}
                row |= {"domain": r.domain, "prompt_hash": r.prompt_hash}
                f.write(json.dumps(row) + "\n")
        return
    if path.suffix != ".csv":
        raise ConfigError(f"{path}: a plain trace ends in .csv or .jsonl")
    with path.open("w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["id", *REQUIRED, "block_hashes", "domain", "prompt_hash"])
        for r in trace:
            hashes = " ".join(str(h) for h in r.block_hashes)
            prompt_hash = "" if r.prompt_hash is None else r.prompt_hash
            writer.writerow([r.id, r.arrival, r.prompt_tokens, r.output_tokens, hashes, r.domain or "", prompt_hash])
