"""`moe-opt eval`: what brownout costs in accuracy and saves in experts read, over a grid of settings."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from moe_opt.errors import ConfigError

HELP = (
    "Measure perplexity, next-token accuracy and multiple-choice accuracy over ways x thresholds x strategies, with "
    "experts read per step and step time beside each cell."
)
EXAMPLE = """
moe-opt eval --model examples/demo_model --united examples/demo_model/united --ways 2 4 8 \\
    --data corpus_legal.jsonl.gz corpus_math.jsonl.gz --thresholds 1 0.8 0.6 0.4 0.2 0 --output eval/
moe-opt eval --model Qwen/Qwen1.5-MoE-A2.7B-Chat --strategies full reroute top-k --choices piqa.jsonl.gz --shots 5
"""

AVERAGE = "average"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to evaluate")
    what.add_argument("--model", required=True, help="folder or Hub id of a Mixture-of-Experts model")
    what.add_argument(
        "--united",
        nargs="+",
        default=[],
        metavar="[NAME=]PATH",
        help=f"united experts: folders, Hub ids, or '{AVERAGE}' for untrained means; NAME is how results call them",
    )
    what.add_argument("--ways", nargs="+", type=int, help="which ways of each --united (default: the only one there)")
    what.add_argument("--strategies", nargs="+", help="partial full reroute top-k (default: partial with --united)")
    what.add_argument("--thresholds", nargs="+", type=float, default=[1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    what.add_argument("--keep", nargs="+", default=["count"], help="which originals stay: count mass error")
    data = parser.add_argument_group("on what")
    data.add_argument("--data", nargs="+", type=Path, default=[], help="JSONL (.gz) or text files; a file is a domain")
    data.add_argument(
        "--split", default="held-out", help="held-out: texts with crc32 %% 20 == 0, which nothing trains on; or all"
    )
    data.add_argument("--layout", default="packed", help="packed: windows of joined texts; padded: a text a row")
    data.add_argument("--choices", nargs="+", type=Path, default=[], help="JSONL sets with prompt, choices, label")
    data.add_argument("--limit", type=int, default=200, help="questions of each choice set")
    data.add_argument("--shots", type=int, default=0, help="solved examples before each question")
    data.add_argument("--prompt-template", default="Question: {prompt}\nAnswer:", help="str.format with a row's fields")
    data.add_argument("--choice-template", default=" {choice}")
    how = parser.add_argument_group("how")
    how.add_argument("--phases", nargs="+", default=["prefill", "decode"], help="prefill decode")
    how.add_argument("--tokens", type=int, default=40_000, help="tokens scored as prefill, over all domains")
    how.add_argument("--decode-tokens", type=int, default=16_384, help="tokens of the decode rows, over all domains")
    how.add_argument("--length", type=int, default=512, help="tokens of a prefill row")
    how.add_argument("--batch", type=int, default=8, help="rows of a prefill step")
    how.add_argument("--decode-length", type=int, default=128, help="tokens of a decode row, prompt included")
    how.add_argument("--decode-prompt", type=int, default=32, help="of these, prefilled with exact output")
    how.add_argument("--decode-batch", type=int, default=32, help="rows of a decode step")
    how.add_argument("--timing-repeats", type=int, default=10, help="step pairs timed per cell; 0 for none")
    how.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")
    how.add_argument("--device", help="where to run (default: cuda if there is one)")
    how.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for results.json, results.md and pareto.png")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made fails before the work, not after
    results = evaluate_command(args)
    from moe_opt.report.pareto import results_markdown

    print(results_markdown(results))
    if args.output is not None:
        for path in write_results(results, args.output):
            print(f"written: {path}", file=sys.stderr)
    return 0


def evaluate_command(args: argparse.Namespace) -> dict[str, Any]:
    """Check everything that needs no model, then load it and measure the grid. Returns what results.json holds."""
    if not args.data and not args.choices:
        raise ConfigError("nothing to evaluate on: give --data with texts or --choices with multiple-choice sets")
    for name in ("tokens", "decode_tokens", "length", "batch", "limit"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.shots < 0 or args.timing_repeats < 0:
        raise ConfigError("--shots and --timing-repeats cannot be negative")
    sources = [_united_source(text) for text in args.united]
    strategies = args.strategies or (["partial"] if sources else ["full", "reroute", "top-k"])
    if "partial" in strategies and not sources:
        raise ConfigError(f"strategy 'partial' needs united experts: add --united PATH, or --united {AVERAGE} --ways 4")
    if sources and "partial" not in strategies:
        raise ConfigError("--united has no use without strategy 'partial': add it to --strategies")

    from moe_opt.evaluation.choices import read_choices
    from moe_opt.evaluation.grid import GridOptions, evaluate_grid, plan_settings
    from moe_opt.evaluation.texts import domain_name, make_rows, read_texts
    from moe_opt.report.machine import describe_machine

    options = GridOptions(
        phases=tuple(args.phases),
        prefill_batch=args.batch,
        decode_batch=args.decode_batch,
        prompt=args.decode_prompt,
        timing_repeats=args.timing_repeats,
        progress=not args.quiet,
    )
    others = [strategy for strategy in strategies if strategy != "partial"]
    if others:  # names and ranges, before a model is loaded
        plan_settings(others, args.thresholds, {}, args.keep)
    texts = {domain_name(path): read_texts(path, args.split) for path in args.data}
    if len(texts) < len(args.data):
        raise ConfigError("two of the --data files have the same name: a file's name is its domain")
    choice_sets = [
        read_choices(
            path,
            limit=args.limit,
            prompt_template=args.prompt_template,
            choice_template=args.choice_template,
            shots=args.shots,
            seed=args.seed,
        )
        for path in args.choices
    ]
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device)
    united = _load_united(model, sources, args.ways)
    settings = plan_settings(strategies, args.thresholds, united, args.keep)
    prefill_rows = decode_rows = None
    if texts and "prefill" in options.phases:
        prefill_rows = make_rows(
            texts, tokenizer, length=args.length, tokens=args.tokens, layout=args.layout, seed=args.seed
        )
    if texts and "decode" in options.phases:
        decode_rows = make_rows(
            texts,
            tokenizer,
            length=args.decode_length,
            tokens=args.decode_tokens,
            seed=args.seed + 1,
            multiple_of=args.decode_batch,
        )
    figures = evaluate_grid(
        model,
        tokenizer,
        settings,
        united=united,
        prefill_rows=prefill_rows,
        decode_rows=decode_rows,
        choice_sets=choice_sets,
        options=options,
    )
    runtime = model.moe_opt
    return {
        "format": 1,
        "model": {
            "name": Path(args.model).name,
            "type": model.config.model_type,
            "layers": runtime.num_layers,
            "experts": runtime.num_experts,
            "top_k": runtime.top_k,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "options": {
            key: [item.name if isinstance(item, Path) else item for item in value] if isinstance(value, list) else value
            for key, value in sorted(vars(args).items())
            if key not in _NOT_RECORDED
        },
        "machine": describe_machine(_command_line()),
        **figures,
    }


_NOT_RECORDED = frozenset(("model", "united", "device", "output", "quiet", "command", "run"))


def load_model(path: str, *, dtype: str = "auto", device: str | None = None, moe_opt: Any = True) -> tuple[Any, Any]:
    """Model with `moe_opt` (True or settings) in eval mode, and its tokenizer.

    Raises:
        ConfigError: no model at a local path, no tokenizer beside it, an unknown dtype or device.
    """
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"{path} holds no model: there is no config.json in it")
    if not folder.exists() and (folder.is_absolute() or path.startswith(".") or path.count("/") > 1):
        raise ConfigError(f"{path}: no such model folder")
    import torch
    from transformers import AutoTokenizer

    from moe_opt.modeling.auto import MoEOptimizedForCausalLM

    kind = "auto" if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise ConfigError(f"unknown dtype {dtype!r}; for instance float32, bfloat16 or auto")
    try:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except ValueError as error:  # what Transformers raises for a folder without one
        raise ConfigError(f"{path} has no tokenizer: {str(error).strip().splitlines()[0]}") from error
    if not tokenizer("a text", add_special_tokens=False)["input_ids"]:  # what it makes of a folder without its files
        raise ConfigError(f"{path} has no tokenizer: the one that Transformers loads knows no text")
    model = MoEOptimizedForCausalLM.from_pretrained(path, moe_opt=moe_opt, dtype=kind).to(target).eval()
    return model, tokenizer


def _united_source(text: str) -> tuple[str, str]:
    """`NAME=PATH` or `PATH` -> (name, path); the name is empty where it may be left out."""
    name, separator, path = text.partition("=")
    return (name, path) if separator else ("", text)


def _load_united(model: Any, sources: list[tuple[str, str]], ways: list[int] | None) -> dict[str, Any]:
    """Name in the results -> united experts: `4-way`, with the source before it where there are several."""
    from moe_opt.modeling.united import UnitedExperts

    out: dict[str, Any] = {}
    for name, path in sources:
        if path == AVERAGE and not ways:
            raise ConfigError(f"--united {AVERAGE} needs --ways, for instance --ways 4")
        prefix = name or (Path(path).name if len(sources) > 1 else "")
        for number in ways or [None]:  # type: ignore[list-item]
            if path == AVERAGE:
                found = UnitedExperts.from_average(model, ways=number)
            else:
                found = UnitedExperts.from_pretrained(path, ways=number)
            label = f"{prefix} {found.ways}-way".strip()
            if label in out:
                raise ConfigError(f"two --united are called {label!r}: name them, --united NAME=PATH")
            out[label] = found
    return out


def write_results(results: dict[str, Any], folder: Path) -> list[Path]:
    """results.json, results.md, and a plot for each kind of loss. Returns the paths."""
    from moe_opt.report.pareto import phases_of, plot_pareto, results_markdown

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "results.json", folder / "results.md"]
    paths[0].write_text(json.dumps(_plain(results), indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(results_markdown(results), encoding="utf-8")
    for kind, name in (("tokens", "pareto.png"), ("choices", "pareto_choices.png")):
        if phases_of(results, kind):
            paths.append(folder / name)
            plot_pareto(results, paths[-1], kind)
    return paths


def _plain(value: Any) -> Any:
    """JSON has no nan and no infinity: null stands for both."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _command_line() -> str:
    """The command as a reader would type it: names of files, not where they lie here."""
    shown = [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
    return shlex.join(["moe-opt", *shown])
