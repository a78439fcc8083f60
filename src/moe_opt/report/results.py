"""Result files: JSON with the machine, the versions, the command and the date beside the figures."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

from moe_opt import __version__
from moe_opt.errors import ConfigError


def machine_facts() -> dict[str, Any]:
    """What a figure depends on: processor, cores, versions and date. Nothing that identifies the machine."""
    import numpy
    import scipy

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "moe_opt": __version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _plain(value: Any) -> Any:
    """JSON has no nan and no NumPy numbers."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return None if not math.isfinite(value) else float(f"{value:.6g}")
    return value


def save_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result; the folder is made if it is missing. A reader sees the old file or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(_plain(result), indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def load_result(path: Path) -> dict[str, Any]:
    """Read a result file; anything but a JSON object with a `kind` is an error that says so."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; `moe-opt simulate --out {path}` writes one")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(result, dict) or "kind" not in result:
        raise ConfigError(f"{path}: not a result file: no field `kind`")
    return result
