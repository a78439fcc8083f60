"""Results of `moe-opt eval` as Markdown tables and as a Pareto plot: loss against experts read.

Works on the plain dict that `results.json` holds, so it needs neither torch nor a model.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moe_opt.errors import ConfigError

Cell = Mapping[str, Any]
_LOSS_NAMES = {"tokens": "relative_loss", "choices": "choice_loss"}
_READ_NAMES = {"tokens": "experts_read", "choices": "choice_experts_read"}


def curve_name(cell: Cell) -> str:
    """The curve that a cell belongs to: its setting without the threshold."""
    if cell.get("united"):
        name = str(cell["united"])
    else:
        name = {"full": "full brownout"}.get(cell["strategy"], str(cell["strategy"]))
    return name if cell.get("keep", "count") == "count" else f"{name}, keep {cell['keep']}"


def curves(results: Mapping[str, Any], phase: str) -> dict[str, list[Cell]]:
    """Curve -> its cells of one phase, thresholds descending, in the order of the results."""
    out: dict[str, list[Cell]] = {}
    for cell in results["cells"]:
        if cell["phase"] == phase:
            out.setdefault(curve_name(cell), []).append(cell)
    return {name: sorted(cells, key=lambda c: -c["threshold"]) for name, cells in out.items()}


def phases_of(results: Mapping[str, Any], kind: str = "tokens") -> list[str]:
    """Phases with cells that have a loss of the kind, "tokens" or "choices"."""
    key = _LOSS_NAMES[kind]
    return [p for p in ("prefill", "decode") if any(c["phase"] == p and key in c for c in results["cells"])]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, loss) that no other point beats in both, ascending by cost."""
    front: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if not front or loss < front[-1][1]:
            front.append((cost, loss))
    return front


def loss_at_reads(cells: Sequence[Cell], reads: float, key: str = "relative_loss") -> float | None:
    """Loss of a curve at so many experts read, linear between its cells; None outside the curve's range."""
    points = sorted((c["experts_read"], c[key]) for c in cells)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= reads <= x1:
            return float(y0) if x1 == x0 else float(y0 + (y1 - y0) * (reads - x0) / (x1 - x0))
    return None


# ------------------------------------------------------------------------- Markdown


def results_markdown(results: Mapping[str, Any]) -> str:
    """Every figure of a run that a reader weighs: what was run, exact output, then a table per phase."""
    parts = [f"# Brownout evaluation of {results['model']['name']}", _header(results)]
    for phase in phases_of(results):
        exact = results["exact"][phase]
        parts.append(
            f"## Next-token accuracy, {phase}\n\nExact output: accuracy {exact['accuracy']:.4f}, perplexity "
            f"{exact['perplexity']:.2f}, {exact['experts_read']:.1f} experts read per layer and step "
            f"({exact['tokens']} tokens, {exact['steps']} steps).\n\n"
            "Relative loss of next-token accuracy, mean over domains ± standard error:\n\n"
            + threshold_table(results, phase, lambda c: percent(c["relative_loss"], c["relative_loss_se"]))
            + "\n\nExperts read per layer and step:\n\n"
            + threshold_table(results, phase, lambda c: f"{c['experts_read']:.1f}")
            + _times(results, phase)
            + "\n\nPerplexity against exact output:\n\n"
            + threshold_table(results, phase, lambda c: f"{c['perplexity_ratio']:.3f}")
        )
    if phases_of(results, "choices"):
        parts.append(_choices_markdown(results))
    return "\n\n".join(parts) + "\n"


def threshold_table(results: Mapping[str, Any], phase: str, show: Any) -> str:
    """Thresholds down, curves across, `show(cell)` in each place."""
    by_curve = curves(results, phase)
    thresholds = sorted({c["threshold"] for cells in by_curve.values() for c in cells}, reverse=True)
    lines = [f"| threshold | {' | '.join(by_curve)} |", "|---" * (len(by_curve) + 1) + "|"]
    for threshold in thresholds:
        found = [[c for c in cells if c["threshold"] == threshold] for cells in by_curve.values()]
        lines.append(f"| {threshold:g} | {' | '.join(show(c[0]) if c else '' for c in found)} |")
    return "\n".join(lines)


def percent(value: float, error: float | None = None) -> str:
    """0.0123, 0.001 -> `1.23 ± 0.10 %`."""
    if error is None or math.isnan(error):
        return f"{100 * value:.2f} %"
    return f"{100 * value:.2f} ± {100 * error:.2f} %"


def _times(results: Mapping[str, Any], phase: str) -> str:
    cells = [c for c in results["cells"] if c["phase"] == phase]
    if not any("step_time_ratio" in c for c in cells):
        return ""
    table = threshold_table(results, phase, lambda c: f"{c['step_time_ratio']:.2f}" if "step_time_ratio" in c else "")
    return f"\n\nStep time against exact output, measured in turn:\n\n{table}"


def _choices_markdown(results: Mapping[str, Any]) -> str:
    exact = results["exact"]["choices"]
    lines = ["| set | questions | chance | accuracy | accuracy, per character |", "|---|---|---|---|---|"]
    for name, row in exact.items():
        lines.append(
            f"| {name} | {row['questions']} | {row['chance']:.3f} | {row['accuracy']:.3f} "
            f"| {row['accuracy_norm']:.3f} |"
        )
    return (
        "## Multiple choice\n\nExact output:\n\n"
        + "\n".join(lines)
        + "\n\nRelative loss of accuracy, mean over sets ± standard error:\n\n"
        + threshold_table(results, "prefill", lambda c: percent(c["choice_loss"], c["choice_loss_se"]))
        + "\n\nAccuracy, mean over sets:\n\n"
        + threshold_table(
            results,
            "prefill",
            lambda c: f"{statistics.fmean(r['accuracy'] for r in c['choices'].values()):.3f}",
        )
        + "\n\nExperts read per layer and step, mean over sets:\n\n"
        + threshold_table(results, "prefill", lambda c: f"{c['choice_experts_read']:.1f}")
        + ("" if phases_of(results) else _times(results, "prefill"))
    )


def _header(results: Mapping[str, Any]) -> str:
    model, machine = results["model"], results.get("machine", {})
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    lines = [
        f"- model: {model['type']}, {model['layers']} MoE layers of {model['experts']} experts, top-{model['top_k']}, "
        f"{model['dtype']}",
        f"- machine: {machine.get('gpu') or machine.get('processor', 'unknown')}, {machine.get('cores', '?')} cores; "
        f"{versions}",
        f"- command: `{machine.get('command', '')}`, {machine.get('date', '')}",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------- plot


def plot_pareto(results: Mapping[str, Any], path: str | os.PathLike[str], kind: str = "tokens") -> None:
    """Write a PNG (or what the suffix says): relative loss against experts read, one panel per phase, one
    line per curve, thresholds noted on the lines that have few points, and the Pareto front shaded.

    Args:
        kind: "tokens" for next-token accuracy, "choices" for multiple choice.

    Raises:
        ConfigError: matplotlib is missing, or the results have no such cells.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'moe_opt[plot]'") from error
    phases = phases_of(results, kind)
    if not phases:
        raise ConfigError(f"the results have no {kind} cells to plot")
    figure = Figure(figsize=(6.4 * len(phases), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(phases), squeeze=False)[0]
    for panel, phase in zip(panels, phases, strict=True):
        _draw_panel(panel, results, phase, kind)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")  # Okabe-Ito
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def _draw_panel(panel: Any, results: Mapping[str, Any], phase: str, kind: str) -> None:
    key, read_key = _LOSS_NAMES[kind], _READ_NAMES[kind]
    if kind == "tokens":
        exact_reads = results["exact"][phase]["experts_read"]
    else:
        exact_reads = statistics.fmean(row["experts_read"] for row in results["exact"]["choices"].values())
    points = []
    for number, (name, cells) in enumerate(curves(results, phase).items()):
        shown = [c for c in cells if key in c]
        x = [100 * c[read_key] / exact_reads for c in shown]
        y = [100 * c[key] for c in shown]
        errors = [0.0 if math.isnan(c[key + "_se"]) else 100 * c[key + "_se"] for c in shown]
        united = bool(shown and shown[0].get("united"))
        style = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
        panel.errorbar(
            x, y, yerr=errors, label=name, markersize=4, linewidth=1.6 if united else 1.0, capsize=1.5,
            elinewidth=0.6, linestyle="-" if united else "--", **style,
        )  # fmt: skip
        points += list(zip(x, y, strict=True))
    front = pareto_front(points)
    if front:
        panel.step(
            [p[0] for p in front], [p[1] for p in front], where="post", color="0.75", linewidth=6, alpha=0.5, zorder=0,
            label="Pareto front",
        )  # fmt: skip
    highest = sorted(y for _, y in points)[max(0, math.ceil(0.9 * len(points)) - 1)] if points else 1.0
    top = max(1.25 * highest, 1.0)
    if points and max(y for _, y in points) > 4 * top:  # a curve that collapses must not flatten all others
        panel.set_ylim(min(-0.03 * top, 1.1 * min(y for _, y in points)), top)
    panel.set_xlabel("experts read per layer and step, % of exact output")
    panel.set_ylabel(
        "relative loss of next-token accuracy, %" if kind == "tokens" else "relative loss of choice accuracy, %"
    )
    panel.set_title(f"{phase} ({exact_reads:.1f} experts read by exact output)", fontsize=10)
    panel.axhline(0, color="0.6", linewidth=0.6)
    panel.grid(alpha=0.25)
