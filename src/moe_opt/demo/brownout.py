"""Stage "brownout": what each strategy and threshold saves in experts read, and what it costs in quality."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from moe_opt.demo.model import demo_texts, find_demo_model, load_united
from moe_opt.errors import ConfigError
from moe_opt.modeling.source import require_source

THRESHOLDS = (0.6, 0.4, 0.2, 0.0)
_SAMPLE_TOKENS = 24
_ROW_TOKENS = 64
_PROMPT_TOKENS = 16
_ROWS = 32


def run(args: argparse.Namespace) -> int:
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {args.threads}")
    started = time.perf_counter()
    source = find_demo_model(args.model)
    require_source(source)
    _say("loading torch and the demo model with moe_opt=True ...")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, moe_opt=True).eval()  # the keyword comes with moe_opt
    runtime = model.moe_opt
    united = load_united(model, source)
    _say(
        f"{Path(source).name}: {runtime.num_layers} MoE layers, {runtime.num_experts} experts each, "
        f"top-{runtime.top_k}; united experts: {', '.join(united)}"
    )
    texts, prompts = demo_texts()
    print_samples(model, tokenizer, prompts, united)
    results = measure(model, tokenizer, texts, united)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    print(table(results))
    plot = output / "brownout.png"
    draw(results, plot)
    (output / "brownout.md").write_text(table(results) + "\n", encoding="utf-8")
    _say(f"plot: {plot}    table: {output / 'brownout.md'}    ({time.perf_counter() - started:.0f} s)")
    return 0


def print_samples(model: Any, tokenizer: Any, prompts: dict[str, str], united: Any) -> None:
    """Greedy continuations of one prompt a domain, exact and browned out."""
    import torch

    from moe_opt.modeling.united import attach_united_experts, detach_united_experts

    name = list(united)[len(united) // 2]
    _say(f"\ngreedy continuations: exact | brownout with {name} united experts at threshold 0.2")
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    rows = [bos + tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts.values()]
    longest = max(map(len, rows))
    pad = tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])

    def continuations() -> list[str]:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=_SAMPLE_TOKENS, do_sample=False, pad_token_id=pad)
        return [_one_line(tokenizer.decode(row[longest:], skip_special_tokens=True)) for row in out]

    exact = continuations()
    attach_united_experts(model, united[name])
    model.moe_opt.set_brownout(threshold=0.2, strategy="partial", phase="decode")
    browned = continuations()
    detach_united_experts(model)
    for (domain, prompt), one, other in zip(prompts.items(), exact, browned, strict=True):
        print(f"\n  {domain:<8} {_one_line(prompt)}")
        print(f"    exact    ...{one}")
        print(f"    browned  ...{other}")
    print()


def measure(model: Any, tokenizer: Any, texts: dict[str, list[str]], united: Any) -> dict[str, Any]:
    """The grid on decode steps of 32 mixed rows, teacher-forced on the demo's texts."""
    from moe_opt.evaluation.grid import GridOptions, evaluate_grid, plan_settings
    from moe_opt.evaluation.texts import make_rows

    rows = make_rows(texts, tokenizer, length=_ROW_TOKENS, tokens=4 * _ROW_TOKENS * len(texts), multiple_of=_ROWS)
    settings = plan_settings(["partial", "full", "reroute", "top-k"], THRESHOLDS, united)
    return evaluate_grid(
        model,
        tokenizer,
        settings,
        united=united,
        decode_rows=rows,
        options=GridOptions(
            phases=("decode",),
            decode_batch=_ROWS,
            prompt=_PROMPT_TOKENS,
            timing_repeats=5,
            progress=sys.stderr.isatty(),
        ),
    )


def table(results: dict[str, Any]) -> str:
    """Strategy x threshold: experts read per layer and decode step, step time, perplexity, next-token accuracy."""
    from moe_opt.report.pareto import curve_name

    exact = results["exact"]["decode"]
    lines = [
        f"Decode steps of {_ROWS} rows, {exact['tokens']} tokens in ten domains, teacher-forced:",
        "",
        "| strategy | threshold | experts read / layer | step time | perplexity | next-token accuracy | loss |",
        "|---|---:|---:|---:|---:|---:|---:|",
        f"| exact | 1 | {exact['experts_read']:.1f} | 1.00x | {exact['perplexity']:.2f} "
        f"| {100 * exact['accuracy']:.1f} % | |",
    ]
    for cell in results["cells"]:
        lines.append(
            f"| {curve_name(cell)} | {cell['threshold']:g} | {cell['experts_read']:.1f} "
            f"| {cell['step_time_ratio']:.2f}x | {cell['perplexity']:.2f} | {100 * cell['accuracy']:.1f} % "
            f"| {100 * cell['relative_loss_pooled']:.1f} % |"
        )
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Perplexity and step time against experts read, one curve a strategy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from moe_opt.report.pareto import curves

    exact = results["exact"]["decode"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, cells in curves(results, "decode").items():
        trained = cells[0]["strategy"] == "partial"
        reads = [exact["experts_read"], *(c["experts_read"] for c in cells)]
        style = {"marker": "o", "markersize": 4, "linestyle": "-" if trained else "--", "label": name}
        left.plot(reads, [exact["perplexity"], *(c["perplexity"] for c in cells)], **style)
        right.plot(reads, [1.0, *(c["step_time_ratio"] for c in cells)], **style)
    left.set(xlabel="experts read per layer and decode step", ylabel="perplexity", title="What it costs")
    # Strategies without stand-ins leave the scale; the question is what happens near exact output.
    left.set_ylim(0.97 * exact["perplexity"], 1.6 * exact["perplexity"])
    right.set(
        xlabel="experts read per layer and decode step", ylabel="step time, exact output = 1", title="What it saves"
    )
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.invert_xaxis()
    right.legend(fontsize=8)
    figure.suptitle(f"Brownout of the demo model, decode batch {_ROWS}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:110]


def _say(text: str) -> None:
    print(text, flush=True)
