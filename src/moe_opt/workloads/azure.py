"""Azure LLM inference traces (2023 and 2024): TIMESTAMP, ContextTokens, GeneratedTokens."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from moe_opt.errors import ConfigError
from moe_opt.workloads.files import read_csv, whole_number
from moe_opt.workloads.rows import TraceRequest


def _timestamp(text: str, path: Path, line: int) -> float:
    """Seconds since the epoch; the file gives seven decimals, of which datetime takes six."""
    try:
        head, _, fraction = text.strip().partition(".")
        digits, zone = fraction[:7].rstrip("Z"), ""
        for mark in ("+", "-"):
            if mark in fraction:
                digits, zone = fraction.split(mark, 1)[0], mark + fraction.split(mark, 1)[1]
        moment = datetime.fromisoformat(head + (zone or ("+00:00" if "+" not in head else "")))
        return moment.timestamp() + (float("0." + digits) if digits else 0.0)
    except ValueError:
        raise ConfigError(f"{path}, line {line}: TIMESTAMP is {text!r}, expected a date and time") from None


def read_azure(path: Path, *, min_output_tokens: int = 1) -> list[TraceRequest]:
    """Requests in time order, arrivals from 0 s. `min_output_tokens` filters as BalanceRoute section 6.1
    does.

    Rows without context tokens are counted as one token: the API always has a prompt.
    """
    rows: list[tuple[float, int, int]] = []
    for line, row in read_csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        output = whole_number(row["GeneratedTokens"], "GeneratedTokens", path, line)
        prompt = whole_number(row["ContextTokens"], "ContextTokens", path, line)
        moment = _timestamp(row["TIMESTAMP"], path, line)
        if output >= max(1, min_output_tokens):
            rows.append((moment, max(1, prompt), output))
    rows.sort(key=lambda r: r[0])
    start = rows[0][0] if rows else 0.0
    return [TraceRequest(f"r{i}", moment - start, prompt, output) for i, (moment, prompt, output) in enumerate(rows)]
