"""The papers' figures from results: per-worker KV load over steps, TPOT against rate, signature map, Pareto
curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_opt.errors import ConfigError

# colour-blind safe (Okabe and Ito), in a fixed order so that a policy keeps its colour between figures
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#000000")
_MARKS = "osD^vPXd"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError("plots need matplotlib: pip install 'moe_opt[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "figure.dpi": 130,
            "savefig.bbox": "tight",
        }
    )
    return plt


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    except ValueError as error:  # unknown suffix
        raise ConfigError(f"{path}: {error}") from error
    finally:
        plt.close(figure)


def plot_loads(loads: Mapping[str, NDArray[np.integer]], path: Path, *, title: str = "") -> None:
    """One panel per policy: KV load (thousand tokens) of every worker over decode steps [T, W], same axes.

    The mean spread (max - min) is written into each panel (BalanceRoute Figures 3 and 8).
    """
    if not loads:
        raise ConfigError("no per-worker loads to draw: run the simulation with --record-loads")
    plt = _pyplot()
    columns = min(3, len(loads))
    rows = math.ceil(len(loads) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 2.7 * rows + 0.4), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(loads) :]:
        axis.set_visible(False)
    top = max(float(np.max(v)) for v in loads.values()) / 1e3
    low = min(float(np.min(v)) for v in loads.values()) / 1e3
    for index, (axis, (name, values)) in enumerate(zip(axes.flat, loads.items(), strict=False)):
        table = np.asarray(values, dtype=np.float64) / 1e3
        colours = plt.get_cmap("viridis")(np.linspace(0.05, 0.9, table.shape[1]))
        for worker in range(table.shape[1]):
            axis.plot(table[:, worker], color=colours[worker], linewidth=0.8)
        spread = float((table.max(axis=1) - table.min(axis=1)).mean())
        axis.set_title(f"{name}: mean spread {spread:,.1f} k", fontsize=10)
        if index % columns == 0:
            axis.set_ylabel("KV load (thousand tokens)")
        if index >= len(loads) - columns:
            axis.set_xlabel("decode step")
    margin = 0.05 * (top - low or 1.0)
    axes.flat[0].set_ylim(max(0.0, low - margin), top + margin)
    if title:
        figure.suptitle(title)
    figure.tight_layout()
    _save(plt, figure, path)


def plot_curves(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    log_x: bool = False,
) -> None:
    """One line per name over (x, y) points; points with nan are left out."""
    if not any(series.values()):
        raise ConfigError("no points to draw")
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(5.6, 3.6))
    for index, (name, points) in enumerate(series.items()):
        kept = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        axis.plot(
            [x for x, _ in kept],
            [y for _, y in kept],
            marker=_MARKS[index % len(_MARKS)],
            markersize=4.5,
            linewidth=1.4,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle="-" if index < len(_COLOURS) else "--",
            label=name,
        )
    if log_x:
        axis.set_xscale("log")
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    if title:
        axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    _save(plt, figure, path)


def plot_signature_map(
    signatures: NDArray[np.floating],
    labels: Sequence[str],
    path: Path,
    *,
    centroids: NDArray[np.floating] | None = None,
    title: str = "",
) -> None:
    """Signatures on their first two principal axes, coloured by label; centroids as crosses (ELDR Figure
    9)."""
    if len(signatures) != len(labels) or len(signatures) < 3:
        raise ConfigError(f"{len(signatures)} signatures and {len(labels)} labels; need the same number, 3 or more")
    plt = _pyplot()
    centre = signatures.mean(axis=0)
    _, weights, axes_ = np.linalg.svd(signatures - centre, full_matrices=False)
    flat = (signatures - centre) @ axes_[:2].T
    share = weights**2 / np.sum(weights**2)
    figure, axis = plt.subplots(figsize=(5.6, 4.2))
    for index, label in enumerate(sorted(set(labels))):
        mine = np.array([other == label for other in labels])
        axis.scatter(flat[mine, 0], flat[mine, 1], s=14, alpha=0.75, color=_COLOURS[index % len(_COLOURS)], label=label)
    if centroids is not None:
        points = (centroids - centre) @ axes_[:2].T
        axis.scatter(points[:, 0], points[:, 1], marker="x", s=60, color="black", label="centroid (one per worker)")
    axis.set_xlabel(f"first principal axis ({share[0]:.0%} of variance)")
    axis.set_ylabel(f"second principal axis ({share[1]:.0%})")
    if title:
        axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    _save(plt, figure, path)
