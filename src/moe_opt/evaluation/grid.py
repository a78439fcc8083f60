"""The grid of BrownoutServe's Table I, for any model: ways x thresholds x strategies, each cell with what it costs in
accuracy and what it saves in experts read and step time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from moe_opt.errors import ConfigError
from moe_opt.evaluation.choices import ChoiceScores, ChoiceSet, choice_batch, score_choices
from moe_opt.evaluation.losses import compare_tokens, mean_with_error, relative_loss
from moe_opt.evaluation.perplexity import ReadCounter, TokenScores, score_decode, score_prefill
from moe_opt.evaluation.texts import TokenRows
from moe_opt.evaluation.timing import time_step
from moe_opt.modeling.brownout import KEEP_RULES, STRATEGIES
from moe_opt.modeling.phase_settings import PHASES
from moe_opt.modeling.united import UnitedExperts, attach_united_experts, detach_united_experts

NEEDS_UNITED = ("partial",)
TAKES_KEEP = ("partial", "full")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One cell's brownout. `united` names the entry of the grid's united experts, None for strategies without."""

    strategy: str
    threshold: float
    united: str | None = None
    keep: str = "count"


@dataclasses.dataclass
class GridOptions:
    """How a cell is measured. Batch sizes are rows of a step; `prompt` is the decode rows' prefill in tokens."""

    phases: tuple[str, ...] = ("prefill", "decode")
    prefill_batch: int = 8
    decode_batch: int = 32
    choice_batch: int = 16
    prompt: int = 32
    timing_repeats: int = 10  # 0 leaves step times out
    timed_phases: tuple[str, ...] = PHASES
    progress: bool = True

    def __post_init__(self) -> None:
        for phase in (*self.phases, *self.timed_phases):
            if phase not in PHASES:
                raise ConfigError(f"unknown phase {phase!r}; choose one of {', '.join(PHASES)}")
        for name in ("prefill_batch", "decode_batch", "choice_batch", "prompt"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


class Exact(NamedTuple):
    """What the model does at threshold 1: every cell is compared with it."""

    tokens: dict[str, TokenScores]
    reads: dict[str, dict[str, Any]]
    choices: list[tuple[ChoiceScores, dict[str, Any]]]  # with what the steps read


def plan_settings(
    strategies: Sequence[str],
    thresholds: Sequence[float],
    united: Mapping[str, UnitedExperts],
    keep: Sequence[str] = ("count",),
) -> list[Setting]:
    """Every combination that means something, curve by curve, thresholds descending.

    Raises:
        ConfigError: unknown names, thresholds outside [0, 1], or "partial" without united experts.
    """
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise ConfigError(f"unknown strategy {strategy!r}; choose among {', '.join(STRATEGIES)}")
        if strategy in NEEDS_UNITED and not united:
            raise ConfigError(
                "strategy 'partial' needs united experts: name them with --united, or 'average' to build them untrained"
            )
    for rule in keep:
        if rule not in KEEP_RULES:
            raise ConfigError(f"unknown keeping rule {rule!r}; choose among {', '.join(KEEP_RULES)}")
    for threshold in thresholds:
        if not 0.0 <= threshold <= 1.0:
            raise ConfigError(f"thresholds lie in [0, 1], got {threshold}")
    if not strategies or not thresholds:
        raise ConfigError("a grid needs at least one strategy and one threshold")
    falling = sorted(set(thresholds), reverse=True)
    settings = []
    for strategy in dict.fromkeys(strategies):
        names: list[str | None] = list(united) if strategy in NEEDS_UNITED else [None]
        rules = list(dict.fromkeys(keep)) if strategy in TAKES_KEEP else ["count"]
        settings += [Setting(strategy, t, name, rule) for name in names for rule in rules for t in falling]
    return settings


def evaluate_grid(
    model: Any,
    tokenizer: Any,
    settings: Sequence[Setting],
    *,
    united: Mapping[str, UnitedExperts] | None = None,
    prefill_rows: TokenRows | None = None,
    decode_rows: TokenRows | None = None,
    choice_sets: Sequence[ChoiceSet] = (),
    options: GridOptions | None = None,
) -> dict[str, Any]:
    """Measure every setting on the same tokens and questions; exact output is computed once and reused.

    In phase "prefill" whole batches of `prefill_rows` are steps and choice sets are scored; in phase "decode"
    `decode_rows` move one token a step and the prompt stays exact.

    Args:
        model: loaded with `moe_opt`; its united experts are put back at the end, and its thresholds set to 1.

    Returns: {"exact": {phase: figures}, "cells": [figures]}, plain numbers throughout. A cell has the setting, `ways`,
        `phase`, relative loss of next-token accuracy (mean over domains and pooled, with standard errors), perplexity,
        experts read per layer and step, and the step time beside exact output's.
    """
    options = options or GridOptions()
    united = dict(united or {})
    runtime = model.moe_opt
    data = {"prefill": prefill_rows, "decode": decode_rows}
    phases = [p for p in options.phases if data[p] is not None or (p == "prefill" and choice_sets)]
    if not phases:
        raise ConfigError("nothing to evaluate: give texts (--data) or multiple-choice sets (--choices)")
    missing = [s.united for s in settings if s.united is not None and s.united not in united]
    if missing:
        raise ConfigError(f"united experts {missing[0]!r} are not among {', '.join(united) or 'none'}")
    total = sum(_work(p, data[p], options) for p in phases)
    total += sum(len(q.choices) for s in choice_sets for q in s.questions) if "prefill" in phases else 0
    browned = [s for s in settings if s.threshold < 1 and s.strategy != "zero"]
    before = detach_united_experts(model) if runtime.united_config is not None else None
    attached: str | None = None
    cells = []
    was_training = model.training
    model.eval()
    try:
        with (
            _exact_at_exit(runtime),
            tqdm(
                total=total * (1 + len(browned)),
                unit="tok",
                unit_scale=True,
                mininterval=1.0,
                disable=not options.progress,
            ) as bar,
        ):
            measure = _Measure(model, tokenizer, data, choice_sets, options, bar)
            bar.set_description(refresh=False, desc="exact")
            exact = measure.exact(phases)
            for setting in settings:
                bar.set_description(refresh=False, desc=_label(setting))
                if setting.united is not None and setting.united != attached:
                    attach_united_experts(model, united[setting.united])
                    attached = setting.united
                for phase in phases:
                    figures = measure.cell(setting, phase, exact)
                    ways = united[setting.united].ways if setting.united is not None else None
                    cells.append({**dataclasses.asdict(setting), "ways": ways, "phase": phase, **figures})
    finally:
        if attached is not None:
            detach_united_experts(model)
        if before is not None:
            attach_united_experts(model, before)
        model.train(was_training)
    return {"exact": measure.exact_figures(exact), "cells": cells}


def _work(phase: str, rows: TokenRows | None, options: GridOptions) -> int:
    """Tokens that a pass over the rows advances the progress bar by."""
    if rows is None:
        return 0
    if phase == "prefill":
        return int(rows.attention.sum())
    return len(rows) * max(rows.ids.shape[1] - 1 - options.prompt, 0)


def _label(setting: Setting) -> str:
    parts = [setting.strategy, setting.united or "", "" if setting.keep == "count" else setting.keep]
    return " ".join([*filter(None, parts), f"at {setting.threshold:g}"])


@contextlib.contextmanager
def _exact_at_exit(runtime: Any) -> Iterator[None]:
    try:
        yield
    finally:
        runtime.set_brownout(threshold=1.0, strategy="zero", keep="count")


class _Measure:
    """Scores the same data under changing settings."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        data: Mapping[str, TokenRows | None],
        choice_sets: Sequence[ChoiceSet],
        options: GridOptions,
        bar: Any,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.data = data
        self.choice_sets = choice_sets
        self.options = options
        self.bar = bar

    # ---------------------------------------------------------------- exact output

    def exact(self, phases: Sequence[str]) -> Exact:
        self._use_exact()
        tokens, reads = {}, {}
        for phase in phases:
            rows = self.data[phase]
            if rows is not None:
                counter = ReadCounter()
                tokens[phase] = self._score(phase, rows, counter)
                reads[phase] = counter.mean()
        choices = [self._choices(s) for s in self.choice_sets] if "prefill" in phases else []
        return Exact(tokens, reads, choices)

    def exact_figures(self, exact: Exact) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for phase, scores in exact.tokens.items():
            rows = self.data[phase]
            assert rows is not None
            out[phase] = {
                "accuracy": scores.accuracy,
                "perplexity": scores.perplexity,
                "tokens": len(scores.target),
                **exact.reads[phase],
                "domains": {
                    name: {"accuracy": float(scores.correct[chosen].mean()), "tokens": int(chosen.sum())}
                    for name, chosen in _by_domain(rows, scores)
                },
            }
        out["choices"] = {
            s.name: {
                "accuracy": scores.accuracy,
                "accuracy_norm": scores.accuracy_norm,
                "chance": s.chance,
                "questions": len(s.questions),
                "experts_read": reads["experts_read"],
            }
            for s, (scores, reads) in zip(self.choice_sets, exact.choices, strict=True)
        }
        return out

    # ---------------------------------------------------------------- one cell

    def cell(self, setting: Setting, phase: str, exact: Exact) -> dict[str, Any]:
        rows = self.data[phase]
        is_exact = setting.threshold >= 1 or setting.strategy == "zero"  # lossless: the very same computation
        figures: dict[str, Any] = {}
        if not is_exact:
            self._use(setting, phase)
        if rows is not None:
            reference = exact.tokens[phase]
            counter = ReadCounter()
            scores = reference if is_exact else self._score(phase, rows, counter)
            figures |= _token_figures(rows, scores, reference)
            figures |= exact.reads[phase] if is_exact else counter.mean()
            figures["experts_read_exact"] = exact.reads[phase]["experts_read"]
            figures |= self._time(setting, phase, rows, is_exact)
        if phase == "prefill" and self.choice_sets:
            found = exact.choices if is_exact else [self._choices(s) for s in self.choice_sets]
            figures |= _choice_figures(self.choice_sets, found, exact.choices)
            if rows is None:
                first = choice_batch(self.tokenizer, self.choice_sets[0], self.options.choice_batch)
                figures |= self._time(setting, phase, first, is_exact)
        return figures

    def _score(self, phase: str, rows: TokenRows, counter: ReadCounter) -> TokenScores:
        update: Callable[[int], Any] = self.bar.update
        if phase == "prefill":
            return score_prefill(
                self.model, rows, batch_size=self.options.prefill_batch, reads=counter, progress=update
            )
        return score_decode(
            self.model,
            rows,
            batch_size=self.options.decode_batch,
            prompt=self.options.prompt,
            reads=counter,
            progress=update,
        )

    def _choices(self, choice_set: ChoiceSet) -> tuple[ChoiceScores, dict[str, Any]]:
        counter = ReadCounter()
        scores = score_choices(
            self.model,
            self.tokenizer,
            choice_set,
            batch_size=self.options.choice_batch,
            reads=counter,
            progress=self.bar.update,
        )
        return scores, counter.mean()

    def _time(self, setting: Setting, phase: str, rows: TokenRows, is_exact: bool) -> dict[str, float]:
        if self.options.timing_repeats == 0 or phase not in self.options.timed_phases:
            return {}
        if is_exact:
            return {"step_time_ratio": 1.0}
        timed = time_step(
            self.model,
            rows,
            phase,
            use_exact=self._use_exact,
            use_browned=lambda: self._use(setting, phase),
            batch_size=self.options.prefill_batch if phase == "prefill" else self.options.decode_batch,
            prompt=self.options.prompt,
            repeats=self.options.timing_repeats,
        )
        return {
            "step_ms": timed.step_ms,
            "exact_step_ms": timed.exact_step_ms,
            "step_time_ratio": timed.ratio,
        }

    def _use_exact(self) -> None:
        self.model.moe_opt.set_brownout(threshold=1.0, strategy="zero", keep="count")

    def _use(self, setting: Setting, phase: str) -> None:
        self._use_exact()
        self.model.moe_opt.set_brownout(
            threshold=setting.threshold, strategy=setting.strategy, keep=setting.keep, phase=phase
        )


def _by_domain(rows: TokenRows, scores: TokenScores) -> Iterator[tuple[str, np.ndarray]]:
    domain = rows.domain.numpy()[scores.row]
    for index, name in enumerate(rows.domains):
        chosen = domain == index
        if chosen.any():
            yield name, chosen


def _token_figures(rows: TokenRows, scores: TokenScores, exact: TokenScores) -> dict[str, Any]:
    """Pooled figures of all tokens, and the mean over domains that the paper's "average accuracy loss" stands for."""
    pooled = compare_tokens(scores.correct, exact.correct, scores.nll, exact.nll, scores.row)
    domains = {
        name: compare_tokens(
            scores.correct[chosen], exact.correct[chosen], scores.nll[chosen], exact.nll[chosen], scores.row[chosen]
        )
        for name, chosen in _by_domain(rows, scores)
    }
    loss, error = mean_with_error(
        [entry["relative_loss"] for entry in domains.values()],
        [entry["relative_loss_se"] for entry in domains.values()],
    )
    pooled["relative_loss_pooled"] = pooled.pop("relative_loss")
    pooled["relative_loss_pooled_se"] = pooled.pop("relative_loss_se")
    return {
        "relative_loss": loss,
        "relative_loss_se": error,
        **pooled,
        "agreement": float((scores.predicted == exact.predicted).mean()),
        "domains": domains,
    }


def _choice_figures(
    sets: Sequence[ChoiceSet],
    found: Sequence[tuple[ChoiceScores, dict[str, Any]]],
    exact: Sequence[tuple[ChoiceScores, dict[str, Any]]],
) -> dict[str, Any]:
    """Figures of each set, and the means over sets that tables and plots show."""
    by_set = {
        one.name: {**_set_figures(scores, reference), "experts_read": reads["experts_read"]}
        for one, (scores, reads), (reference, _) in zip(sets, found, exact, strict=True)
    }
    loss, error = mean_with_error(
        [row["relative_loss"] for row in by_set.values()], [row["relative_loss_se"] for row in by_set.values()]
    )
    return {
        "choices": by_set,
        "choice_loss": loss,
        "choice_loss_se": error,
        "choice_experts_read": float(np.mean([row["experts_read"] for row in by_set.values()])),
    }


def _set_figures(scores: ChoiceScores, exact: ChoiceScores) -> dict[str, float]:
    questions = np.arange(len(scores.labels))
    loss, error = relative_loss(scores.picked == scores.labels, exact.picked == exact.labels, questions)
    norm, norm_error = relative_loss(scores.picked_norm == scores.labels, exact.picked_norm == exact.labels, questions)
    return {
        "accuracy": scores.accuracy,
        "accuracy_norm": scores.accuracy_norm,
        "relative_loss": loss,
        "relative_loss_se": error,
        "relative_loss_norm": norm,
        "relative_loss_norm_se": norm_error,
        "agreement": float((scores.picked == exact.picked).mean()),
    }
