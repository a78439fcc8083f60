"""What each step of the recipe is worth, and what the alternatives without extra weights cost, on the demo model.

One calibration sample and one held-out sample serve all rows. Rows change one thing at a time from the recipe's
initialisation: grouping, initialisation, closed form, objective of stage 1, second stage, keeping rule. The baselines
(full brownout, reroute, top-k) are compared at equal experts read: for each setting, the loss that the baseline's curve
over thresholds has where it reads as many experts.

    python benchmarks/distill_ablation.py [--steps 20] [--sequences 16] [--only grouping,...]

Parts that are measured one by one with the same settings add up in the result file.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_result

from moe_opt import UnitedExperts, attach_united_experts
from moe_opt.distill.calibration import LayerSample, LayerStatistics, statistics
from moe_opt.distill.config import DistillConfig, StageSettings
from moe_opt.distill.data import first_sequences, load_tokenizer
from moe_opt.distill.measure import error_per_expert, next_token_figures
from moe_opt.distill.objectives import LayerObjective, LogitObjective, ThresholdSampler
from moe_opt.distill.pipeline import calibrate, initialise, load_teacher
from moe_opt.distill.students import Students

SETTINGS = ((2, 0.0), (4, 0.2), (8, 0.4), (8, 0.0))
ROOT = Path(__file__).resolve().parent.parent


class Bench:
    """The model, the samples and the measuring that all rows share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        overrides: dict[str, Any] = {"output": "unused", "calibration_tokens": args.calibration_tokens}
        if args.model:
            overrides["model.name"] = args.model
        self.config = DistillConfig.from_yaml(args.config, overrides)
        self.tokenizer = load_tokenizer(self.config.model.name, None)
        self.model = load_teacher(self.config, torch.device("cpu"))
        self.samples: list[LayerSample] = calibrate(self.config, self.model, self.tokenizer)
        layers = self.model.moe_opt.layers
        self.stats: list[LayerStatistics] = [
            statistics(module, sample) for (_, module), sample in zip(layers, self.samples, strict=True)
        ]
        held_out = first_sequences(self.config.data, self.tokenizer, args.sequences, 0, held_out=True)
        assert held_out is not None
        self.held_out = held_out
        need = args.steps * self.config.training.batch_size
        self.training = first_sequences(self.config.data, self.tokenizer, max(need, 1), 1, held_out=False)
        self.exact = next_token_figures(self.model, self.held_out, 8)
        self.rows: list[dict[str, Any]] = []

    def united(self, **changes: Any) -> dict[int, UnitedExperts]:
        """Initial united experts of the recipe with some choices changed."""
        return initialise(dataclasses.replace(self.config, **changes), self.model, self.samples, self.stats)

    def trained(self, start: dict[int, UnitedExperts], stage: StageSettings, kind: str) -> dict[int, UnitedExperts]:
        """`steps` optimizer steps of one stage on the same tokens for every row."""
        students = Students(start)
        training = self.config.training
        sampler = ThresholdSampler(stage, 0)
        if kind == "layers":
            scales = [s.expert_scale if stage.objective == "paper" else s.output_scale for s in self.stats]
            objective: Any = LayerObjective(self.model, stage, scales, training.plan_size, sampler)
        else:
            objective = LogitObjective(self.model, students, stage, training.plan_size, sampler)
        optimizer = torch.optim.AdamW(students.parameters(), lr=stage.learning_rate, betas=(0.9, 0.95), weight_decay=0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, stage.learning_rate, total_steps=max(self.args.steps, 2), pct_start=0.1
        )
        assert self.training is not None
        size = training.batch_size
        for step in range(self.args.steps):
            positions = torch.arange(step * size, (step + 1) * size)
            objective(students, self.training[positions], positions, lambda loss: loss.backward())
            torch.nn.utils.clip_grad_norm_(students.parameters(), training.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if kind == "logits":
            objective.close()
        return {way: students.to_united(way) for way in students.ways}

    def row(self, part: str, name: str, united: dict[int, UnitedExperts], started: float, keep: str = "count") -> None:
        """Measure the four settings and add a row."""
        cells = {}
        for way, threshold in SETTINGS:
            attach_united_experts(self.model, united[way])
            self.model.moe_opt.set_brownout(threshold=threshold, strategy="partial", keep=keep)
            cells[f"{way}, {threshold:g}"] = self.cell()
            self.model.moe_opt.remove_united()
        self.add(part, name, cells, started)

    def cell(self) -> dict[str, float]:
        found = next_token_figures(self.model, self.held_out, 8)
        return {
            "relative_loss_percent": round(100 * (1 - found["accuracy"] / self.exact["accuracy"]), 3),
            "perplexity": round(found["perplexity"], 4),
            "experts_read": round(found["experts_read"], 2),
        }

    def add(self, part: str, name: str, cells: dict[str, dict[str, float]], started: float) -> None:
        self.rows.append({"part": part, "name": name, "seconds": round(time.process_time() - started, 1), **cells})
        shown = "  ".join(f"{key}: {cell['relative_loss_percent']:6.2f} %" for key, cell in cells.items())
        print(f"{part:14} {name:34} {shown}", flush=True)

    def save(self) -> None:
        facts = {
            "model": Path(self.config.model.name).name,
            "calibration_tokens": self.args.calibration_tokens,
            "training_tokens_per_stage": self.args.steps * self.config.training.batch_size * self.config.data.length,
            "held_out_sequences": len(self.held_out),
            "sequence_length": self.config.data.length,
            "exact": self.exact,
        }
        write_result(self.args.out, {**facts, "rows": [*self._other_parts(facts), *self.rows]})

    def _other_parts(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Rows of earlier runs with these very settings, of parts that this one does not measure."""
        path = RESULTS / f"{self.args.out}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        if {key: found.get(key) for key in facts} != facts:
            return []
        mine = {row["part"] for row in self.rows}
        return [row for row in found["rows"] if row["part"] not in mine]


def baselines(bench: Bench, targets: dict[str, float]) -> None:
    """Loss of the strategies without extra weights where they read as many experts as the united experts do."""
    for strategy in ("full", "reroute", "top-k"):
        started = time.process_time()
        curve = []
        for threshold in (0.9, 0.7, 0.5, 0.3, 0.15, 0.0):
            bench.model.moe_opt.set_brownout(threshold=threshold, strategy=strategy)
            curve.append(bench.cell())
        bench.model.moe_opt.set_brownout(threshold=1.0)
        cells = {key: _at_equal_reads(curve, reads) for key, reads in targets.items()}
        bench.add("baseline", strategy, cells, started)


def _at_equal_reads(curve: list[dict[str, float]], reads: float) -> dict[str, float]:
    """Interpolated on the curve; where it never reads so few, the row that reads fewest (it then read more)."""
    points = sorted(curve, key=lambda cell: cell["experts_read"])
    if reads <= points[0]["experts_read"]:
        return points[0]
    for low, high in itertools.pairwise(points):
        if reads <= high["experts_read"]:
            span = high["experts_read"] - low["experts_read"]
            share = (reads - low["experts_read"]) / span if span else 0.0
            return {key: round(low[key] + share * (high[key] - low[key]), 3) for key in low}
    return points[-1]


def parts(bench: Bench) -> dict[str, Callable[[], None]]:
    steps = bench.args.steps
    layers = StageSettings(steps=steps, learning_rate=2e-3, threshold=[0.0, 0.6], zero_share=0.4)
    paper = StageSettings(steps=steps, learning_rate=2e-3, objective="paper")
    logits = bench.config.logits

    def start() -> dict[int, UnitedExperts]:
        return bench.united()

    def grouping() -> None:
        for name in ("index", "output", "co-activation"):
            began = time.process_time()
            bench.row("grouping", name, bench.united(grouping=name), began)

    def initialisation() -> None:
        for name, method, ridge in (
            ("average (from_average)", "average", None),
            ("frequency", "frequency", None),
            ("neuron-aligned", "aligned", None),
            ("neuron-aligned + closed form", "aligned", bench.config.ridge),
            ("selection without closed form", "selection", None),
        ):
            began = time.process_time()
            grouping = "index" if name.startswith("average") else bench.config.grouping
            bench.row(
                "initialisation", name, bench.united(initialisation=method, ridge=ridge, grouping=grouping), began
            )

    def objective() -> None:
        began = time.process_time()
        by_index = bench.united(grouping="index", initialisation="frequency", ridge=None)
        bench.row("objective", "the paper's recipe (Eq. 4, index)", bench.trained(by_index, paper, "layers"), began)
        for name, stage, kind in (
            ("Eq. 4 from the recipe's start", paper, "layers"),
            ("gate-weighted layer error", layers, "layers"),
            ("logits (second stage)", logits, "logits"),
            ("logits and the text itself", dataclasses.replace(logits, label_weight=1.0), "logits"),
        ):
            began = time.process_time()
            bench.row("objective", name, bench.trained(start(), stage, kind), began)

    def keep() -> None:
        united = start()
        if bench.args.united:
            united = {way: UnitedExperts.from_pretrained(bench.args.united, ways=way) for way in (2, 4, 8)}
        for way, result in united.items():
            if "error_per_expert" not in result.config.metrics:
                result.config.metrics["error_per_expert"] = error_per_expert(bench.model, united[way], bench.samples)
        for rule in ("count", "mass", "error"):
            bench.row("keep", rule, united, time.process_time(), keep=rule)

    def baseline() -> None:
        united = start()
        bench.row("baseline", "united experts, untrained start", united, time.process_time())
        if bench.args.united:
            final = {way: UnitedExperts.from_pretrained(bench.args.united, ways=way) for way in (2, 4, 8)}
            bench.row("baseline", "united experts, committed", final, time.process_time())
        last = bench.rows[-1]
        baselines(bench, {key: cell["experts_read"] for key, cell in last.items() if isinstance(cell, dict)})

    return {
        "baseline": baseline,
        "initialisation": initialisation,
        "grouping": grouping,
        "objective": objective,
        "keep": keep,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "recipes" / "demo.yaml"))
    parser.add_argument("--model", help="instead of the recipe's model")
    parser.add_argument("--united", help="trained united experts to measure beside the rows (ways-2, -4 and -8)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of every trained row")
    parser.add_argument("--sequences", type=int, default=16, help="held-out sequences")
    parser.add_argument("--calibration-tokens", type=int, default=16_384)
    parser.add_argument("--only", help="comma-separated parts")
    parser.add_argument("--out", default="distill_ablation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args)
    print(f"exact accuracy {bench.exact['accuracy']:.4f}, perplexity {bench.exact['perplexity']:.2f}", flush=True)
    chosen = parts(bench)
    for name in args.only.split(",") if args.only else chosen:
        chosen[name]()
        bench.save()  # after every part: a long run that is stopped leaves what it has


if __name__ == "__main__":
    main()
