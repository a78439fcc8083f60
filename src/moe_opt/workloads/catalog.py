"""`load_trace`: one name or path -> requests, so that commands, benchmarks and tests say it the same way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from moe_opt.errors import ConfigError
from moe_opt.workloads.azure import read_azure
from moe_opt.workloads.files import data_dir, read_lines
from moe_opt.workloads.mooncake import read_mooncake
from moe_opt.workloads.plain import read_plain_csv, read_plain_jsonl
from moe_opt.workloads.rows import TraceRequest
from moe_opt.workloads.servegen import generate_servegen
from moe_opt.workloads.vidur import read_vidur

# name -> file below `traces/` of the data folder
TRACES: dict[str, str] = {
    "azure-conv": "azure2023_conv.csv.gz",
    "azure-code": "azure2023_code.csv.gz",
    "mooncake-conv": "mooncake_conversation.jsonl.gz",
    "mooncake-synthetic": "mooncake_synthetic.jsonl.gz",
    "vidur-arxiv": "vidur_arxiv_summarization_lengths.csv.gz",
}
SERVEGEN_PREFIX = "servegen-"  # followed by a model of the file, for instance servegen-deepseek-r1


def _reader_of(path: Path) -> Callable[[Path], list[TraceRequest]]:
    """The format shows in the first line: column names, or the keys of the first object."""
    first = next((line for _, line in itertools.islice(read_lines(path), 1)), "")
    if first.lstrip().startswith("{"):
        return read_mooncake if '"input_length"' in first else read_plain_jsonl
    if "ContextTokens" in first:
        return read_azure
    if "num_prefill_tokens" in first:
        return read_vidur
    if "prompt_tokens" in first:
        return read_plain_csv
    raise ConfigError(
        f"{path}, line 1: unknown trace format; expected Azure CSV (TIMESTAMP, ContextTokens, ...), "
        "Vidur CSV (num_prefill_tokens,num_decode_tokens), Mooncake JSONL (timestamp,input_length,"
        "output_length) or the plain form (arrival,prompt_tokens,output_tokens)"
    )


def load_trace(
    name: str,
    *,
    limit: int | None = None,
    seed: int = 0,
    start: float = 0.0,
    duration: float = 1800.0,
) -> list[TraceRequest]:
    """Requests of a named trace (`TRACES`, `servegen-MODEL`) or of a file in any supported format, in time
    order.

    `seed`, `start` and `duration` (s) matter to ServeGen only, whose requests are generated.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, not {limit}")
    root = data_dir() / "traces"
    if name.startswith(SERVEGEN_PREFIX):
        rows = generate_servegen(
            root / "servegen_client_windows.csv.gz",
            root / "servegen_length_percentiles.jsonl.gz",
            name.removeprefix(SERVEGEN_PREFIX),
            seed=seed,
            start=start,
            duration=duration,
            limit=limit,
        )
    elif name in TRACES:
        path = root / TRACES[name]
        rows = _reader_of(path)(path)[:limit]
    elif Path(name).is_file():
        rows = _reader_of(Path(name))(Path(name))[:limit]
    else:
        known = ", ".join([*TRACES, SERVEGEN_PREFIX + "MODEL"])
        raise ConfigError(f"no trace {name!r}: neither a file nor one of {known}")
    if not rows:
        raise ConfigError(f"trace {name!r} holds no request")
    return rows
