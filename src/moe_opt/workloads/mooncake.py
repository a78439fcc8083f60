"""Mooncake traces (FAST '25): timestamp in ms, lengths, and chained hashes of 512-token prefix blocks."""

from __future__ import annotations

from pathlib import Path

from moe_opt.errors import ConfigError
from moe_opt.workloads.files import read_jsonl, real_number, whole_number
from moe_opt.workloads.rows import TraceRequest

BLOCK_TOKENS = 512  # tokens per hashed block in the published traces


def read_mooncake(path: Path) -> list[TraceRequest]:
    """Requests in time order; `block_hashes` are the published ids, one per 512 prompt tokens."""
    rows: list[TraceRequest] = []
    fields = ("timestamp", "input_length", "output_length")
    for line, row in read_jsonl(path, fields):
        hashes = row.get("hash_ids", [])
        if not isinstance(hashes, list):
            raise ConfigError(f"{path}, line {line}: hash_ids is {type(hashes).__name__}, expected a list")
        rows.append(
            TraceRequest(
                id=f"r{line - 1}",
                arrival=real_number(row["timestamp"], "timestamp", path, line) / 1e3,
                prompt_tokens=max(1, whole_number(row["input_length"], "input_length", path, line)),
                output_tokens=max(1, whole_number(row["output_length"], "output_length", path, line)),
                block_hashes=tuple(whole_number(h, "hash_ids", path, line) for h in hashes),
            )
        )
    return sorted(rows, key=lambda r: r.arrival)
