"""`moe-opt score`: probabilities of given choices for millions of prompts, by prefill alone."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

from moe_opt.errors import ConfigError
from moe_opt.serving.saturation import parse_factor
from moe_opt.serving.score_rows import BadRow, ResultFiles, ScoreRow, parse_row, read_lines

HELP = (
    "Score the choices of each row by their log-likelihood after the prompt: one prefill, no decoding, shared prefixes "
    "computed once. Killed? The same command goes on where it was."
)
EXAMPLE = """
moe-opt score --model-id examples/demo_model --input questions.jsonl --output scores.jsonl
echo '{"id": 1, "prompt": "2 + 2 =", "choices": [" 4", " 5"]}' > questions.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-id", required=True, help="folder or Hub id of a model")
    parser.add_argument(
        "--input", required=True, type=Path, help='rows {"id", "prompt", "choices": [text, ...]}: .jsonl(.gz), .parquet'
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="adds logprobs, probabilities and choice: .jsonl or .parquet"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")
    parser.add_argument("--device", help="where to run (default: cuda if there is one)")
    parser.add_argument(
        "--experts-kernels", default="auto", choices=("auto", "grouped_mm", "batched_mm", "eager", "fused"),
        help="auto takes our own on a CPU",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, help="processes, each with the model (default 1)")
    parser.add_argument("--max-batch-tokens", type=int, default=8192, help="tokens of a forward pass, padding included")
    parser.add_argument(
        "--window", type=int, default=512, help="rows that are sorted for shared prefixes, and committed, together"
    )
    parser.add_argument(
        "--async-ep", default="off", choices=("off", "auto", "offload"),
        help="stream expert weights in from the checkpoint: always (offload) or if they do not fit (auto); default off",
    )  # fmt: skip
    parser.add_argument(
        "--saturation", default="auto", metavar="FACTOR",
        help="passes of FACTOR x --max-batch-tokens; auto measures at the first start how many hide the transfers of "
        "--async-ep, and is 1 without it",
    )  # fmt: skip
    parser.add_argument("--no-share-prefixes", action="store_true", help="run every choice by itself")
    parser.add_argument("--overwrite", action="store_true", help="begin anew even if the output is there")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    for name in ("workers", "max_batch_tokens", "window"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    parse_factor(args.saturation)
    if args.input.resolve() == args.output.resolve():
        raise ConfigError("--input and --output are the same file")
    next(iter(read_lines(args.input)), None)  # a wrong input fails before the model loads
    files = ResultFiles(args.output, _job(args), args.overwrite)
    if files.complete:
        print(f"{args.output} is complete: {files.rows:,} rows, {files.bad:,} bad ones", file=sys.stderr)
        return 0
    try:
        _score_file(args, files)
    finally:
        if not files.complete:
            files.close()
    return 0


def _job(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the output."""
    stat = args.input.stat()
    return {
        "input": [str(args.input.resolve()), stat.st_size],
        "model": args.model_id,
        "dtype": args.dtype,
        "workers": args.workers,
        "max_batch_tokens": args.max_batch_tokens,
        "window": args.window,
        "share_prefixes": not args.no_share_prefixes,
        "async_ep": args.async_ep,
        "experts_kernels": args.experts_kernels,
        "saturation": args.saturation,
    }


def _score_file(args: argparse.Namespace, files: ResultFiles) -> None:
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    from moe_opt.serving.score_pool import LocalScorer, ScorerPool, ScorerSettings

    settings = ScorerSettings(
        args.model_id, args.dtype, args.device, args.max_batch_tokens, not args.no_share_prefixes, args.async_ep,
        args.experts_kernels,
    )  # fmt: skip
    factor = parse_factor(args.saturation)
    if factor is None:  # a restart must not measure again: what runs together would be another matter
        factor = files.measured.get("saturation", 1.0 if args.async_ep == "off" else None)
    scorer: LocalScorer | ScorerPool
    if args.quiet or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # a bar is no log line
    if args.workers == 1:
        scorer = local = LocalScorer(settings, factor)
        config, tokenizer = local.model.config, local.tokenizer
    else:
        from transformers import AutoConfig, AutoTokenizer

        config, tokenizer = AutoConfig.from_pretrained(args.model_id), AutoTokenizer.from_pretrained(args.model_id)
        scorer = ScorerPool(settings, args.workers, config, factor)
    files.measured["saturation"] = scorer.factor
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if files.lines:
        print(f"going on after line {files.lines:,} ({files.rows:,} rows are there)", file=sys.stderr)
    started, before = time.monotonic(), files.rows
    bar = tqdm(total=_count_lines(args.input), initial=files.lines, unit="row", disable=args.quiet)
    window: list[tuple[int, Any]] = []
    try:
        for line in read_lines(args.input, skip=files.lines):
            window.append(line)
            if len(window) == args.window:
                _score_window(window, scorer, tokenizer, limit, files)
                bar.update(len(window))
                window = []
        if window:
            _score_window(window, scorer, tokenizer, limit, files)
            bar.update(len(window))
        bar.close()
        seconds = time.monotonic() - started
        files.finish()
        print(summary(scorer, config, files, files.rows - before, seconds, args), file=sys.stderr)
    finally:
        scorer.close()


def _score_window(
    window: list[tuple[int, Any]], scorer: Any, tokenizer: Any, limit: int | None, files: ResultFiles
) -> None:
    """Score a window's rows and commit them."""
    from moe_opt.modeling.score_item import ScoreItem

    rows: list[ScoreRow] = []
    items: list[ScoreItem] = []
    bad: list[BadRow] = []
    for line, content in window:
        row = parse_row(line, content)
        if row is None:
            continue
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        item = ScoreItem(
            tokenizer(row.prompt)["input_ids"],
            [tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in row.choices],
        )
        problem = _problem(item, limit)
        if problem:
            bad.append(BadRow(line, problem))
            continue
        rows.append(row)
        items.append(item)
    values = scorer.score(items) if items else []
    results = [result_row(row, scores) for row, scores in zip(rows, values, strict=True)]
    files.commit(window[-1][0], results, bad)


def _problem(item: Any, limit: int | None) -> str | None:
    if not item.prompt or not all(item.choices):
        return "the tokenizer makes nothing of the prompt or of a choice"
    longest = len(item.prompt) + max(len(choice) for choice in item.choices) - 1
    if limit is not None and longest > limit:
        return f"the prompt with its longest choice has {longest} tokens, the model takes {limit}"
    return None


def result_row(row: ScoreRow, log_probs: list[float]) -> dict[str, Any]:
    """The output row: sums of log-probabilities, their softmax, and the index of the best (the first of equals)."""
    best = max(log_probs)
    exponents = [math.exp(value - best) for value in log_probs]
    total = math.fsum(exponents)
    return {
        "id": row.id,
        "logprobs": log_probs,
        "probabilities": [value / total for value in exponents],
        "choice": log_probs.index(best),
    }


def _count_lines(path: Path) -> int | None:
    """Rows of the input for the ETA; None where counting would mean unpacking it."""
    if path.name.endswith(".gz"):
        return None
    if path.name.endswith(".parquet"):
        import pyarrow.parquet as parquet

        return int(parquet.ParquetFile(path).metadata.num_rows)
    count = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            count += chunk.count(b"\n")
    return count


def summary(scorer: Any, config: Any, files: ResultFiles, rows: int, seconds: float, args: argparse.Namespace) -> str:
    """One line for the end: rows, throughput, prefix-hit rate, MFU."""
    from moe_opt.serving.score_pool import flops_of

    stats = scorer.stats
    seconds = max(seconds, 1e-9)
    text = (
        f"{rows:,} rows in {seconds:,.1f} s: {rows / seconds:,.1f} rows/s, {stats.asked / seconds:,.0f} tokens/s "
        f"asked, {stats.computed / seconds:,.0f} computed, prefix-hit rate {100 * stats.prefix_hit_rate:.1f} %"
    )
    flops = flops_of(stats, config)
    if math.isfinite(flops) and stats.computed:
        peak = peak_flops(args.dtype, args.device) * args.workers
        text += f", MFU {100 * flops / seconds / peak:.1f} % of {peak / 1e9:,.0f} GFLOP/s"
    if not math.isnan(scorer.hidden_share):
        text += f", {100 * scorer.hidden_share:.1f} % of the transfers hidden"
    if scorer.factor != 1:
        text += f", saturation at {scorer.factor:g} x {args.max_batch_tokens:,} tokens"
    if files.bad:
        text += f"; {files.bad:,} bad rows in {files.errors_path}"
    return text


def peak_flops(dtype: str, device: str | None) -> float:
    """FLOP/s of one worker: the data sheet's for a known accelerator, else a matrix product, timed."""
    import torch

    from moe_opt.devices import DEVICES

    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda":
        name = torch.cuda.get_device_name(place).upper()
        for known, preset in DEVICES.items():
            if known.split("-")[0].upper() in name:
                return preset.flops("bfloat16")
    size = 1024
    a = torch.randn(size, size, device=place).to(kind)
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
