"""ServeGen (Alibaba Model Studio): per-client rate windows and length percentiles become generated requests.

Each client is a renewal process whose gaps follow the published fit of a window (Gamma or Weibull, else
Gamma from rate and CV); its lengths are drawn by inverse CDF from the 101-point percentiles of the six-hour
window. Input and output are drawn independently: their joint law is not published."""

from __future__ import annotations

import bisect
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_opt.errors import ConfigError
from moe_opt.workloads.files import read_csv, read_jsonl, real_number, whole_number
from moe_opt.workloads.rows import TraceRequest

WINDOW_S = 600.0  # one row of the client file describes this many seconds


class ClientWindow(NamedTuple):
    """Arrivals of one client over one window."""

    start: float  # seconds
    rate: float  # requests per second
    cv: float  # of the gaps
    fit: str  # name of the published fit
    p1: float  # shape
    p2: float  # scale, seconds


class LengthWindow(NamedTuple):
    """Token-length quantiles of one client from `start` on."""

    start: float
    prompt: NDArray[np.float64]  # 101 quantiles
    output: NDArray[np.float64]


def servegen_models(windows_path: Path) -> list[str]:
    """Names of the models in the client file."""
    return sorted({row["model"] for _, row in read_csv(windows_path, ("model",))})


def _read_windows(path: Path, model: str) -> dict[str, list[ClientWindow]]:
    windows: dict[str, list[ClientWindow]] = defaultdict(list)
    for line, row in read_csv(path, ("model", "client", "t_s", "rate_req_s", "cv", "fit", "p1", "p2")):
        if row["model"] != model:
            continue
        numbers = [real_number(row[k] or 0, k, path, line) for k in ("t_s", "rate_req_s", "cv", "p1", "p2")]
        start, rate, cv, p1, p2 = numbers
        windows[row["client"]].append(ClientWindow(start, rate, cv, row["fit"], p1, p2))
    return {client: sorted(rows) for client, rows in windows.items()}


def _quantiles(value: Any, name: str, path: Path, line: int) -> NDArray[np.float64]:
    if not isinstance(value, list) or len(value) < 2:
        raise ConfigError(f"{path}, line {line}: {name} must be a list of at least two quantiles")
    points = np.array([whole_number(v, name, path, line) for v in value], dtype=np.float64)
    if np.any(np.diff(points) < 0):
        raise ConfigError(f"{path}, line {line}: {name} must not decrease")
    return points


def _read_lengths(path: Path, model: str) -> dict[str, list[LengthWindow]]:
    lengths: dict[str, list[LengthWindow]] = defaultdict(list)
    for line, row in read_jsonl(path, ("model", "client", "t_s", "output_tokens_pct")):
        if row["model"] == model:
            # multimodal rows have no total: their text is counted, their images are not
            field = "input_tokens_pct" if "input_tokens_pct" in row else "text_tokens_pct"
            prompt = _quantiles(row.get(field), field, path, line)
            output = _quantiles(row["output_tokens_pct"], "output_tokens_pct", path, line)
            start = real_number(row["t_s"], "t_s", path, line)
            lengths[str(row["client"])].append(LengthWindow(start, prompt, output))
    return {client: sorted(rows, key=lambda w: w.start) for client, rows in lengths.items()}


def _gaps(window: ClientWindow, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if window.fit == "Gamma" and window.p1 > 0 and window.p2 > 0:
        return rng.gamma(window.p1, window.p2, size=count)
    if window.fit == "Weibull" and window.p1 > 0 and window.p2 > 0:
        return window.p2 * rng.weibull(window.p1, size=count)
    shape = 1.0 / max(window.cv, 1e-2) ** 2
    return rng.gamma(shape, 1.0 / (window.rate * shape), size=count)


def _window_arrivals(window: ClientWindow, rng: np.random.Generator) -> NDArray[np.float64]:
    """Arrival times inside one window, seconds from the start of the data.

    Fitted gaps need not reproduce the published rate exactly, so they are scaled to a mean of 1 / rate.
    """
    expected = window.rate * WINDOW_S
    count = max(8, int(expected * 2 + 6 * np.sqrt(expected) * max(1.0, window.cv)))
    gaps = _gaps(window, count, rng)
    mean = float(gaps.mean())
    if mean <= 0:
        return np.zeros(0)
    times = np.cumsum(gaps * (1.0 / window.rate / mean))
    times = times - times[0] * rng.uniform()  # a window opens in the middle of a gap
    return window.start + times[times < WINDOW_S]


def generate_servegen(
    windows_path: Path,
    lengths_path: Path,
    model: str,
    *,
    start: float = 0.0,
    duration: float = 1800.0,
    seed: int = 0,
    limit: int | None = None,
) -> list[TraceRequest]:
    """Requests of `model` in [start, start + duration) seconds, arrivals from 0 s; `domain` is the client.

    Clients without published lengths are left out. `limit` keeps the first so many requests.
    """
    windows = _read_windows(windows_path, model)
    lengths = _read_lengths(lengths_path, model)
    if not windows:
        known = ", ".join(servegen_models(windows_path))
        raise ConfigError(f"{windows_path}: no model {model!r}; known models: {known}")
    clients = sorted(windows.keys() & lengths.keys())
    if not clients:
        raise ConfigError(f"{lengths_path}: no client of {model!r} has published lengths")
    drawn: list[tuple[float, int, int, str]] = []
    for client in clients:
        rng = np.random.default_rng([seed, int.from_bytes(client.encode(), "little") % 2**32])
        starts = [w.start for w in lengths[client]]
        for window in windows[client]:
            if window.rate <= 0 or window.start + WINDOW_S <= start or window.start >= start + duration:
                continue
            times = _window_arrivals(window, rng)
            law = lengths[client][max(0, bisect.bisect_right(starts, window.start) - 1)]
            grid = np.linspace(0.0, 1.0, len(law.prompt))
            prompts = np.interp(rng.uniform(size=len(times)), grid, law.prompt)
            outputs = np.interp(rng.uniform(size=len(times)), np.linspace(0.0, 1.0, len(law.output)), law.output)
            for t, p, o in zip(times, prompts, outputs, strict=True):
                if start <= t < start + duration:
                    drawn.append((float(t) - start, max(1, round(p)), max(1, round(o)), client))
    drawn.sort()
    return [TraceRequest(f"r{i}", t, p, o, domain=client) for i, (t, p, o, client) in enumerate(drawn[:limit])]
