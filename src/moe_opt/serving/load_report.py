"""What a load test measured: percentiles, attainment of objectives, CSV, JSON and plots."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_opt.errors import ConfigError
from moe_opt.serving.loadgen import RequestRecord

_PERCENTILES = (50, 90, 95, 99)


def summarize_load(
    records: Sequence[RequestRecord], *, slo_ttft: float | None = None, slo_tpot: float | None = None
) -> dict[str, Any]:
    """Figures over all requests, and per stage where there are several. Times in seconds, rates per second.

    `slo.attainment` is the share of requests that were answered and met every given objective (TPOT as the mean of
    the request); `slo.tokens_missing_tpot` is the share of later tokens whose own gap exceeded it.
    """
    if not records:
        raise ConfigError("no request was sent")
    summary = _figures(records, slo_ttft, slo_tpot)
    stages = list(dict.fromkeys(record.stage for record in records))
    if len(stages) > 1:
        summary["stages"] = {
            stage: _figures([r for r in records if r.stage == stage], slo_ttft, slo_tpot) for stage in stages
        }
    return summary


def _figures(records: Sequence[RequestRecord], slo_ttft: float | None, slo_tpot: float | None) -> dict[str, Any]:
    ok = [record for record in records if record.status == "ok"]
    seconds = max(r.finished for r in records) - min(r.sent for r in records)
    out_tokens = sum(record.output_tokens for record in ok)
    gaps = [gap for record in ok for gap in record.gaps]
    shares = [record.browned_share for record in ok if record.browned_share is not None]
    out: dict[str, Any] = {
        "requests": len(records),
        "ok": len(ok),
        "overloaded": sum(r.status == "overloaded" for r in records),
        "failed": sum(r.status in ("error", "timeout") for r in records),
        "seconds": round(seconds, 4),
        "requests_per_second": _rate(len(ok), seconds),
        "prompt_tokens": sum(record.prompt_tokens for record in ok),
        "output_tokens": out_tokens,
        "output_tokens_per_second": _rate(out_tokens, seconds),
        "ttft": percentiles([r.ttft for r in ok]),
        "tpot": percentiles([r.tpot for r in ok]),
        "inter_token": percentiles(gaps),
        "e2e": percentiles([r.e2e for r in ok]),
        "generator_lateness": percentiles([r.sent - r.scheduled for r in records]),
        "browned_requests": sum(1 for share in shares if share > 0),
        "browned_share": round(float(np.mean(shares)), 6) if shares else None,
    }
    if slo_ttft is not None or slo_tpot is not None:
        met = sum(_meets(r, slo_ttft, slo_tpot) for r in ok)
        out["slo"] = {
            "ttft": slo_ttft,
            "tpot": slo_tpot,
            "attainment": round(met / len(records), 6),
            "tokens_missing_tpot": (
                None if slo_tpot is None or not gaps else round(float(np.mean(np.array(gaps) > slo_tpot)), 6)
            ),
        }
    return out


def _meets(record: RequestRecord, slo_ttft: float | None, slo_tpot: float | None) -> bool:
    late = slo_ttft is not None and (record.ttft is None or record.ttft > slo_ttft)
    slow = slo_tpot is not None and record.tpot is not None and record.tpot > slo_tpot
    return not late and not slow


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 4) if seconds > 0 else 0.0


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, p50, p90, p95, p99 and maximum (linear interpolation); None without values."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if known.size == 0:
        return None
    out = {"mean": float(known.mean())}
    out.update({f"p{q}": float(np.percentile(known, q)) for q in _PERCENTILES})
    out["max"] = float(known.max())
    return {key: round(value, 6) for key, value in out.items()}


def write_csv(path: Path, records: Sequence[RequestRecord]) -> None:
    """One line per request."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["id", "stage", "status", "scheduled", "sent", "finished", "ttft", "tpot", "e2e", "prompt_tokens",
             "output_tokens", "lowest_threshold", "browned_share", "error"]
        )  # fmt: skip
        for r in records:
            numbers = [r.scheduled, r.sent, r.finished, r.ttft, r.tpot, r.e2e]
            writer.writerow(
                [r.id, r.stage, r.status, *("" if n is None else f"{n:.6f}" for n in numbers), r.prompt_tokens,
                 r.output_tokens, r.lowest_threshold, r.browned_share, r.error]
            )  # fmt: skip


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The figures as a table for the terminal; times in milliseconds."""
    lines = []
    for name, part in [("all", summary), *summary.get("stages", {}).items()]:
        lines.append(
            f"{name}: {part['ok']}/{part['requests']} answered "
            f"({part['overloaded']} overloaded, {part['failed']} failed) in {part['seconds']:.1f} s, "
            f"{part['requests_per_second']:.2f} requests/s, {part['output_tokens_per_second']:.1f} tokens/s"
        )
        for key, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("inter_token", "inter-token"), ("e2e", "end to end")):
            if part[key] is not None:
                columns = "  ".join(f"{q} {part[key][q] * 1000:9.1f}" for q in ("mean", "p50", "p90", "p95", "p99"))
                lines.append(f"  {label:<11} ms  {columns}")
        if part.get("slo"):
            slo = part["slo"]
            missing = slo["tokens_missing_tpot"]
            tail = "" if missing is None else f"; tokens above the TPOT objective {missing * 100:.1f} %"
            lines.append(f"  objectives met by {slo['attainment'] * 100:.1f} % of requests{tail}")
        if part["browned_requests"]:
            lines.append(f"  browned: {part['browned_requests']} requests, mean share {part['browned_share']:.3f}")
    return lines


def plot_load(
    path: Path,
    runs: Mapping[str, Sequence[RequestRecord]],
    *,
    thresholds: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    slo_tpot: float | None = None,
    slo_ttft: float | None = None,
) -> None:
    """TTFT and inter-token latency over time for one or several runs, thresholds below where there are any.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'moe_opt[plot]'") from error
    figure, axes = plt.subplots(3 if thresholds else 2, 1, figsize=(9, 8), sharex=True)
    for name, records in runs.items():
        ok = [r for r in records if r.status == "ok"]
        axes[0].plot([r.sent for r in ok], [1000 * (r.ttft or 0) for r in ok], ".", markersize=4, label=name)
        points = sorted((b, 1000 * (b - a)) for r in ok for a, b in zip(r.token_times, r.token_times[1:], strict=False))
        if points:
            seconds, p90 = _rolling_p90(points)
            axes[1].plot(seconds, p90, label=f"{name}, p90 of each second")
    axes[0].set_ylabel("TTFT, ms")
    axes[1].set_ylabel("inter-token, ms")
    for axis, slo in ((axes[0], slo_ttft), (axes[1], slo_tpot)):
        if slo is not None:
            axis.axhline(1000 * slo, color="black", linestyle="--", linewidth=1, label="objective")
        axis.legend(loc="upper right", fontsize=8)
    if thresholds:
        for name, samples in thresholds.items():
            axes[2].step([s[0] for s in samples], [s[2] for s in samples], where="post", label=f"{name}, decode")
            axes[2].step([s[0] for s in samples], [s[1] for s in samples], ":", where="post", label=f"{name}, prefill")
        axes[2].set_ylim(-0.05, 1.05)
        axes[2].set_ylabel("threshold")
        axes[2].legend(loc="lower right", fontsize=8)
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _rolling_p90(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    by_second: dict[int, list[float]] = {}
    for when, value in points:
        by_second.setdefault(int(when), []).append(value)
    seconds = sorted(by_second)
    return [s + 0.5 for s in seconds], [float(np.percentile(by_second[s], 90)) for s in seconds]
