"""Vidur length tables: prompt and decode tokens without times; arrivals come from a process of
`arrivals.py`."""

from __future__ import annotations

from pathlib import Path

from moe_opt.workloads.files import read_csv, whole_number
from moe_opt.workloads.rows import TraceRequest


def read_vidur(path: Path) -> list[TraceRequest]:
    """Requests in file order, all arriving at 0 s (a backlog) until `with_arrivals` gives them times."""
    rows: list[TraceRequest] = []
    for line, row in read_csv(path, ("num_prefill_tokens", "num_decode_tokens")):
        prompt = whole_number(row["num_prefill_tokens"], "num_prefill_tokens", path, line, minimum=1)
        output = whole_number(row["num_decode_tokens"], "num_decode_tokens", path, line)
        rows.append(TraceRequest(f"r{line - 2}", 0.0, prompt, max(1, output)))
    return rows
