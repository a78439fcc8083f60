"""`moe-opt plot`: the figures of a result file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from moe_opt.errors import ConfigError
from moe_opt.report.plots import plot_curves, plot_loads, plot_signature_map
from moe_opt.report.results import load_result

HELP = "Draw the figures of a result file: per-worker loads, latency against rate, signature map."
EXAMPLE = """
moe-opt simulate --trace azure-conv --pool 128 --policies jsq,br-0,br-h --record-loads --out runs/azure.json
moe-opt plot runs/azure.json --out runs/azure.png
moe-opt plot runs/rates.json --what tpot --out runs/tpot.png
moe-opt plot signatures.npz --what signatures --out map.png
"""

_METRICS = {
    "tpot": ("tpot_p50", "median TPOT (ms)", 1e3),
    "tpot-p99": ("tpot_p99", "99th-percentile TPOT (ms)", 1e3),
    "ttft": ("ttft_p50", "median TTFT (s)", 1.0),
    "throughput": ("throughput", "output tokens per second", 1.0),
    "imbalance": ("imbalance", "mean max - min KV load (tokens)", 1.0),
    "experts": ("active_experts", "distinct experts per step", 1.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-opt plot`."""
    parser.add_argument("result", type=Path, help="JSON of `moe-opt simulate --out`, or .npz of signatures")
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    parser.add_argument(
        "--what",
        default="auto",
        choices=["auto", "loads", "signatures", *_METRICS],
        help="figure; auto: loads where they were recorded, else TPOT against rate",
    )
    parser.add_argument("--title", default="", help="title above the figure")


def _curves(result: dict[str, Any], metric: str) -> tuple[dict[str, list[tuple[float, float]]], str]:
    """Points per policy over whatever the run swept."""
    key, _, scale = _METRICS[metric]
    swept = result.get("swept")
    if swept is None:
        raise ConfigError("the result holds a single setting; sweep one with --rates or --sweep-workers to plot it")
    series: dict[str, list[tuple[float, float]]] = {}
    for row in result["rows"]:
        value = row["metrics"][key]["mean"]
        if value is not None:
            series.setdefault(row["policy"], []).append((float(row[swept]), float(value) * scale))
    return series, {"rate": "requests per second", "workers": "decode workers"}[swept]


def _signatures(path: Path, out: Path, title: str) -> None:
    with np.load(path, allow_pickle=False) as data:
        missing = {"signatures", "labels"} - set(data.files)
        if missing:
            raise ConfigError(f"{path}: no array {', '.join(sorted(missing))}")
        labels = [str(v) for v in data["labels"]]
        centroids = data["centroids"] if "centroids" in data.files else None
        plot_signature_map(data["signatures"], labels, out, centroids=centroids, title=title)


def run(args: argparse.Namespace) -> int:
    """Draw one figure."""
    if args.result.suffix == ".npz" or args.what == "signatures":
        if args.result.suffix != ".npz" or not args.result.is_file():
            raise ConfigError(f"{args.result}: a signature map needs an .npz file with signatures and labels")
        _signatures(args.result, args.out, args.title)
    else:
        result = load_result(args.result)
        if result["kind"] != "simulate":
            raise ConfigError(f"{args.result}: holds a {result['kind']!r} result, which has no figure here")
        what = args.what
        if what == "auto":
            what = "loads" if result.get("loads") else "tpot"
        if what == "loads":
            loads = {name: np.array(v) for name, v in (result.get("loads") or {}).items()}
            plot_loads(loads, args.out, title=args.title)
        else:
            series, xlabel = _curves(result, what)
            plot_curves(series, args.out, xlabel=xlabel, ylabel=_METRICS[what][1], title=args.title)
    print(f"wrote {args.out}")
    return 0
