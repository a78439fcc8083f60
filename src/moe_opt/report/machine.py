"""What a reader needs to weigh a figure: machine, versions, command and date."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_machine(command: str, packages: tuple[str, ...] = ("moe_opt", "torch", "transformers")) -> dict[str, Any]:
    """Cores, processor, GPU if one is in use, versions, command and date, as plain values for JSON."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        processor = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), processor)
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name(0) if torch is not None and torch.cuda.is_available() else None
    return {
        "cores": os.cpu_count(),
        "processor": processor,
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": versions,
        "command": command,
        "date": datetime.date.today().isoformat(),
    }
