"""What every benchmark shares: fair interleaved timing, and a result file that says where it was made."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def interleaved(
    variants: Mapping[str, Callable[[], Any]], *, repeats: int = 30, warmup: int = 3
) -> dict[str, list[float]]:
    """Seconds of each call, the variants taking turns, so that a busy machine slows all of them alike."""
    for run in variants.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def machine() -> dict[str, Any]:
    """Cores, processor, versions, command and date: what a reader needs to weigh a figure."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    versions = {}
    for package in ("torch", "transformers", "numpy", "scipy", "moe_opt"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    gpu = None
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        gpu = sys.modules["torch"].cuda.get_device_name(0)
    return {
        "cores": os.cpu_count(),
        "processor": processor,
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
    }


def write_result(name: str, figures: Mapping[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n", encoding="utf-8")
    print(f"written: benchmarks/results/{name}.json")
    return path
