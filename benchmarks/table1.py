"""BrownoutServe's Table I on a model of your own: 2-, 4-, 8-way united experts and full brownout at 11 thresholds.

    python benchmarks/table1.py --model examples/demo_model --united examples/demo_model/united

Beside the paper's figures it puts what the paper does not: standard errors, experts read, step time, baselines that
need no training (untrained averages, reroute, top-k) and all of them at equal experts read. Each curve is kept in
--work, so that a run that was stopped goes on where it was, as long as weights and options are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import write_result

from moe_opt.evaluation.choices import read_choices
from moe_opt.evaluation.command import load_model
from moe_opt.evaluation.grid import GridOptions, Setting, evaluate_grid
from moe_opt.evaluation.texts import TokenRows, domain_name, make_rows, read_texts
from moe_opt.modeling.phase_settings import PHASES
from moe_opt.modeling.united import UnitedExperts
from moe_opt.report.pareto import loss_at_reads, percent, phases_of, plot_pareto

ROOT = Path(__file__).resolve().parent.parent
THRESHOLDS = [round(0.1 * step, 1) for step in range(10, -1, -1)]
COARSE = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
LOW = [1.0, 0.4, 0.2, 0.0]  # where baselines are compared
WAYS = (2, 4, 8)

# Table I of the paper: average accuracy loss, %, of Qwen1.5-MoE-A2.7B-Chat on four 5-shot tasks (PIQA, COPA, CEVAL,
# OBQA), thresholds as in THRESHOLDS.
PAPER = {
    "2-way": [0.00, 0.06, 0.88, 1.52, 2.34, 2.81, 2.92, 3.96, 3.30, 4.23, 4.70],
    "4-way": [0.00, 0.03, 0.80, 1.58, 2.38, 4.37, 3.63, 4.43, 5.18, 9.38, 11.53],
    "8-way": [0.00, 1.01, 1.59, 2.29, 2.66, 3.78, 4.82, 7.92, 10.71, 12.60, 15.77],
    "full brownout": [0.00, 0.40, 4.51, 7.39, 9.58, 11.51, 35.07, 59.95, 95.08, 98.69, 100.00],
}
# (ways, threshold) -> the loss that this project asks for, %
TARGETS = {("2-way", 0.0): 1.5, ("4-way", 0.2): 2.0, ("8-way", 0.4): 2.4, ("8-way", 0.0): 8.0}
LEFT_OUT_OF_PLOT = tuple(f"{kind} {ways}-way" for kind in ("average", "paper's recipe") for ways in (2, 8))
TASKS = ("piqa", "copa_balanced", "openbookqa", "arc_easy")
TEMPLATES = {"copa_balanced": "{prompt} What was the {question}?"}

Curves = dict[str, list[Setting]]


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    data = Path(os.environ.get("MOE_OPT_DATA", ROOT.parent / "shared" / "data"))
    model, tokenizer = load_model(str(args.model), dtype=args.dtype, moe_opt={"kernels": args.kernels})
    united, curves = _curves(model, args)
    texts = {domain_name(path): read_texts(path) for path in sorted((data / "corpus").glob("*.jsonl.gz"))}
    prefill = make_rows(texts, tokenizer, length=args.length, tokens=args.tokens, seed=0)
    decode = make_rows(
        texts, tokenizer, length=args.decode_length, tokens=args.decode_tokens, seed=1, multiple_of=args.decode_batch
    )
    rows = {"prefill": prefill, "decode": decode}
    settled = {"model": _digest(model.state_dict()), "options": _shown(args)}
    cells: list[dict[str, Any]] = []
    exact: dict[str, Any] = {}
    for phase in args.phases or PHASES:
        chosen = {name: [s for s in curve if s.threshold in args.thresholds[phase]] for name, curve in curves.items()}
        found, exact[phase] = _measure(model, tokenizer, united, chosen, phase, rows[phase], settled, args)
        cells += found
    if args.only or args.phases:
        print(f"kept in {args.work.name}: {', '.join(curves)}; run without --only and --phases for the whole table")
        return
    results: dict[str, Any] = {
        "model": {
            "name": args.model.name,
            "type": model.config.model_type,
            "layers": model.moe_opt.num_layers,
            "experts": model.moe_opt.num_experts,
            "top_k": model.moe_opt.top_k,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "options": _shown(args),
        "exact": exact,
        "cells": [_compact(cell) for cell in cells],
        "paper": {"thresholds": THRESHOLDS, "loss_percent": PAPER},
    }
    results["targets"] = _targets(results)
    results["equal_reads"] = _equal_reads(results)
    if args.questions:
        results["tasks"] = _tasks(model, tokenizer, united, data, args)
    text = markdown(results)
    print(text)
    write_result("table1", results)
    shown = [c for c in results["cells"] if _name(c) not in LEFT_OUT_OF_PLOT]
    plot_pareto({**results, "cells": shown}, ROOT / "docs" / "images" / "table1_pareto.png")
    if args.docs:
        _into_docs(ROOT / "docs" / "evaluation.md", text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model")
    parser.add_argument("--united", type=Path, help="folder with ways-2, ways-4, ways-8 (default: MODEL/united)")
    parser.add_argument("--paper-recipe", type=Path, help="such a folder, trained by the paper's recipe")
    parser.add_argument("--work", type=Path, default=Path("table1_work"), help="where finished curves are kept")
    parser.add_argument("--only", nargs="+", metavar="CURVE", help="fill --work with these curves and stop")
    parser.add_argument("--phases", nargs="+", choices=PHASES, help="fill --work with these phases and stop")
    parser.add_argument("--tokens", type=int, default=25_600)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--decode-tokens", type=int, default=12_288)
    parser.add_argument("--decode-length", type=int, default=128)
    parser.add_argument("--decode-prompt", type=int, default=32)
    parser.add_argument("--decode-batch", type=int, default=32)
    parser.add_argument("--coarse-decode", action="store_true", help="decode at 6 thresholds instead of 11")
    parser.add_argument("--timing-repeats", type=int, default=5)
    parser.add_argument("--questions", type=int, default=200, help="questions of each task; 0 leaves tasks out")
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", default="fused", help="experts kernel; finished curves may have had another")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/evaluation.md")
    args = parser.parse_args()
    args.united = args.united or args.model / "united"
    args.thresholds = {"prefill": THRESHOLDS, "decode": COARSE if args.coarse_decode else THRESHOLDS}
    return args


def _shown(args: argparse.Namespace) -> dict[str, Any]:
    names = ("tokens", "length", "decode_tokens", "decode_length", "decode_prompt", "decode_batch", "timing_repeats")
    return {name: getattr(args, name) for name in (*names, "dtype")}


def _curves(model: Any, args: argparse.Namespace) -> tuple[dict[str, UnitedExperts], Curves]:
    """Baselines first: they need no training, so their curves can be there before the united experts are."""
    united: dict[str, UnitedExperts] = {}
    curves: Curves = {
        "full brownout": [Setting("full", t) for t in THRESHOLDS],
        "reroute": [Setting("reroute", t) for t in (1.0, 0.6, *LOW[1:])],
        "top-k": [Setting("top-k", t) for t in (1.0, 0.6, *LOW[1:])],
    }

    def add(name: str, experts: UnitedExperts, thresholds: Sequence[float]) -> None:
        united[name] = experts
        curves[name] = [Setting("partial", t, name) for t in thresholds]

    for ways in WAYS:
        add(f"average {ways}-way", UnitedExperts.from_average(model, ways=ways), LOW)
    if args.paper_recipe is not None:
        for ways in WAYS:
            add(f"paper's recipe {ways}-way", UnitedExperts.from_pretrained(args.paper_recipe, ways=ways), LOW)
    for ways in WAYS:
        if (args.united / f"ways-{ways}").is_dir():
            add(f"{ways}-way", UnitedExperts.from_pretrained(args.united, ways=ways), THRESHOLDS)
        else:
            print(f"{args.united.name}/ways-{ways} is not there: left out")
    unknown = [name for name in args.only or [] if name not in curves]
    if unknown:
        raise SystemExit(f"no curve is called {unknown[0]!r}; there are {', '.join(curves)}")
    return united, {name: curves[name] for name in args.only or curves}


def _measure(
    model: Any,
    tokenizer: Any,
    united: Mapping[str, UnitedExperts],
    curves: Curves,
    phase: str,
    rows: TokenRows,
    settled: Mapping[str, Any],
    args: argparse.Namespace,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Cells of one phase, curve by curve, and exact output's figures; curves that --work holds are not run again."""
    keys = {}
    for name, settings in curves.items():
        tensors = united[name].tensors if name in united else []
        flat = {f"{index}.{key}": value for index, layer in enumerate(tensors) for key, value in layer.items()}
        keys[name] = {**settled, "united": _digest(flat), "thresholds": [s.threshold for s in settings]}
    kept = {name: _kept(args.work, phase, name, key) for name, key in keys.items()}
    todo = [name for name, found in kept.items() if found is None]
    if todo:
        found = evaluate_grid(
            model,
            tokenizer,
            [setting for name in todo for setting in curves[name]],
            united=united,
            prefill_rows=rows if phase == "prefill" else None,
            decode_rows=rows if phase == "decode" else None,
            options=GridOptions(
                phases=(phase,),
                decode_batch=args.decode_batch,
                prompt=args.decode_prompt,
                timing_repeats=args.timing_repeats,
                timed_phases=("decode",),  # where a step waits for expert weights
            ),
        )
        for name in todo:
            mine = [cell for cell in found["cells"] if _name(cell) == name]
            kept[name] = {"cells": mine, "exact": found["exact"][phase]}
            _keep(args.work, phase, name, keys[name], kept[name])
    done = [found for found in kept.values() if found is not None]
    return [cell for found in done for cell in found["cells"]], done[0]["exact"]


# ------------------------------------------------------------------------- kept curves


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _path(work: Path, phase: str, name: str) -> Path:
    return work / f"{phase}_{name.replace(' ', '_').replace(chr(39), '')}.json"


def _kept(work: Path, phase: str, name: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    path = _path(work, phase, name)
    if not path.is_file():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    return stored["found"] if stored["key"] == key else None


def _keep(work: Path, phase: str, name: str, key: Mapping[str, Any], found: Mapping[str, Any] | None) -> None:
    work.mkdir(parents=True, exist_ok=True)
    _path(work, phase, name).write_text(json.dumps({"key": key, "found": found}), encoding="utf-8")


# ------------------------------------------------------------------------- figures


def _compact(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell as the result file keeps it: five digits, and of the domains only their losses."""
    out: dict[str, Any] = {}
    for key, value in cell.items():
        if key == "domains":
            out[key] = {name: round(row["relative_loss"], 5) for name, row in value.items()}
        elif key != "experts_read_per_layer":
            out[key] = float(f"{value:.5g}") if isinstance(value, float) else value
    return out


def _cell(results: Mapping[str, Any], name: str, threshold: float, phase: str) -> Mapping[str, Any] | None:
    for cell in results["cells"]:
        called = cell["united"] or {"full": "full brownout"}.get(cell["strategy"], cell["strategy"])
        if (called, cell["threshold"], cell["phase"]) == (name, threshold, phase):
            return cell
    return None


def _targets(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    out = []
    for (name, threshold), limit in TARGETS.items():
        for phase in phases_of(results):
            cell = _cell(results, name, threshold, phase)
            if cell is not None:
                out.append(
                    {
                        "united": name,
                        "threshold": threshold,
                        "phase": phase,
                        "loss_percent": round(100 * cell["relative_loss"], 2),
                        "standard_error": round(100 * cell["relative_loss_se"], 2),
                        "asked_percent": limit,
                        "paper_percent": PAPER[name][THRESHOLDS.index(threshold)],
                        "met": bool(100 * cell["relative_loss"] <= limit),
                    }
                )
    return out


def _equal_reads(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """At the experts that a trained cell reads: what each other curve loses there (None: it never reads so few)."""
    out = []
    names = list(dict.fromkeys(_name(c) for c in results["cells"]))
    for name, threshold in TARGETS:
        for phase in phases_of(results):
            cell = _cell(results, name, threshold, phase)
            if cell is None:
                continue
            others = {}
            for other in names:
                curve = [c for c in results["cells"] if c["phase"] == phase and _name(c) == other]
                loss = loss_at_reads(curve, cell["experts_read"]) if other != name else None
                if loss is not None:
                    others[other] = round(100 * loss, 2)
            out.append(
                {
                    "united": name,
                    "threshold": threshold,
                    "phase": phase,
                    "experts_read": round(cell["experts_read"], 2),
                    "loss_percent": round(100 * cell["relative_loss"], 2),
                    "others_percent": others,
                }
            )
    return out


def _name(cell: Mapping[str, Any]) -> str:
    return cell["united"] or {"full": "full brownout"}.get(cell["strategy"], cell["strategy"])


def _tasks(model: Any, tokenizer: Any, united: dict[str, UnitedExperts], data: Path, args: Any) -> dict[str, Any]:
    """Task accuracy in the paper's three settings, the hardest one and full brownout."""
    sets = [
        read_choices(
            data / "classification" / f"{task}.jsonl.gz",
            limit=args.questions,
            shots=args.shots,
            prompt_template=f"Question: {TEMPLATES.get(task, '{prompt}')}\nAnswer:",
            choice_template=" {choice}",
        )
        for task in TASKS
    ]
    settings = [Setting("partial", threshold, name) for name, threshold in TARGETS if name in united]
    settings.append(Setting("full", 0.0))
    found = evaluate_grid(
        model, tokenizer, settings, united=united, choice_sets=sets, options=GridOptions(("prefill",))
    )
    return {"shots": args.shots, "exact": found["exact"]["choices"], "cells": [_compact(c) for c in found["cells"]]}


# ------------------------------------------------------------------------- Markdown


def markdown(results: Mapping[str, Any]) -> str:
    parts = []
    for phase in phases_of(results):
        exact = results["exact"][phase]
        parts.append(
            f"**{phase.capitalize()}** ({exact['tokens']} held-out tokens; exact output: accuracy "
            f"{exact['accuracy']:.4f}, perplexity {exact['perplexity']:.2f}, {exact['experts_read']:.1f} experts read "
            "per layer and step). Loss in % ± standard error, then experts read; the paper's loss in brackets:\n\n"
            + _paper_table(results, phase)
        )
    parts.append("Asked for and reached:\n\n" + _target_table(results))
    parts.append(
        "Loss in % of every other curve at the experts that the trained cell reads:\n\n" + _equal_table(results)
    )
    if "tasks" in results:
        parts.append("Tasks:\n\n" + _task_table(results["tasks"]))
    return "\n\n".join(parts) + "\n"


def _paper_table(results: Mapping[str, Any], phase: str) -> str:
    lines = [f"| threshold | {' | '.join(PAPER)} |", "|---" * (len(PAPER) + 1) + "|"]
    for index, threshold in enumerate(THRESHOLDS):
        if not any((c["phase"], c["threshold"]) == (phase, threshold) for c in results["cells"]):
            continue
        row = []
        for name, losses in PAPER.items():
            cell = _cell(results, name, threshold, phase)
            ours = (
                f"{100 * cell['relative_loss']:.2f} ± {100 * cell['relative_loss_se']:.2f}, {cell['experts_read']:.1f}"
                if cell is not None
                else "not run"
            )
            row.append(f"{ours} [{losses[index]:.2f}]")
        lines.append(f"| {threshold:g} | {' | '.join(row)} |")
    return "\n".join(lines)


def _target_table(results: Mapping[str, Any]) -> str:
    lines = ["| setting | phase | loss | asked | paper |", "|---|---|---|---|---|"]
    for row in results["targets"]:
        lines.append(
            f"| ({row['united']}, {row['threshold']:g}) | {row['phase']} | {row['loss_percent']:.2f} ± "
            f"{row['standard_error']:.2f} % | {row['asked_percent']:g} %{'' if row['met'] else ', missed'} "
            f"| {row['paper_percent']:.2f} % |"
        )
    return "\n".join(lines)


def _equal_table(results: Mapping[str, Any]) -> str:
    others = list(dict.fromkeys(name for row in results["equal_reads"] for name in row["others_percent"]))
    lines = [
        f"| setting | phase | experts read | trained | {' | '.join(others)} |",
        "|---" * (4 + len(others)) + "|",
    ]
    for row in results["equal_reads"]:
        found = [f"{row['others_percent'][name]:.2f}" if name in row["others_percent"] else "" for name in others]
        lines.append(
            f"| ({row['united']}, {row['threshold']:g}) | {row['phase']} | {row['experts_read']:.1f} "
            f"| **{row['loss_percent']:.2f}** | {' | '.join(found)} |"
        )
    return "\n".join(lines)


def _task_table(tasks: Mapping[str, Any]) -> str:
    names = list(tasks["exact"])
    lines = [f"| setting | {' | '.join(names)} | mean loss |", "|---" * (len(names) + 2) + "|"]
    lines.append("| chance | " + " | ".join(f"{tasks['exact'][n]['chance']:.3f}" for n in names) + " | |")
    lines.append("| exact output | " + " | ".join(f"{tasks['exact'][n]['accuracy']:.3f}" for n in names) + " | |")
    for cell in tasks["cells"]:
        accuracies = " | ".join(f"{cell['choices'][n]['accuracy']:.3f}" for n in names)
        loss = percent(cell["choice_loss"], cell["choice_loss_se"])
        lines.append(f"| ({_name(cell)}, {cell['threshold']:g}) | {accuracies} | {loss} |")
    return "\n".join(lines)


def _into_docs(page: Path, text: str) -> None:
    """Replace what lies between the page's two markers."""
    begin, end = "<!-- table1 begins -->", "<!-- table1 ends -->"
    content = page.read_text(encoding="utf-8")
    before, _, rest = content.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page.name} lacks the markers {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")
    print(f"written: docs/{page.name}")


if __name__ == "__main__":
    main()
