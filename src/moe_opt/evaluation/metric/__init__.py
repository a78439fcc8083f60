"""Metric modules for Hugging Face `evaluate`. `METRIC_PATH` is what `evaluate.load` takes; no network is needed."""

from pathlib import Path

METRIC_PATH = str(Path(__file__).resolve().parent / "moe_opt_brownout.py")
