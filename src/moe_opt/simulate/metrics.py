"""What a run yields: per-step series, per-request times, their summaries, and confidence intervals over
replicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from moe_opt.errors import ConfigError


class Interval(NamedTuple):
    """A mean over replicates with its two-sided confidence interval (Student's t)."""

    mean: float
    low: float
    high: float
    replicates: int


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean and confidence interval; one value alone has no interval (both ends are nan)."""
    if not values:
        raise ConfigError("a confidence interval needs at least one value")
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) < 2:
        return Interval(mean, float("nan"), float("nan"), 1)
    half = float(stats.t.ppf(0.5 + confidence / 2, len(data) - 1) * data.std(ddof=1) / np.sqrt(len(data)))
    return Interval(mean, mean - half, mean + half, len(data))


@dataclass(slots=True)
class SimResult:
    """One run. Times in seconds, loads in KV tokens; nan where a request did not get that far.

    The step series hold one row per step of a barrier group, or per sample where every worker has its own
    clock.
    """

    arrival: NDArray[np.float64]  # [N] when a request reached the pool
    admitted: NDArray[np.float64]  # [N] when it was last assigned to a worker
    first_token: NDArray[np.float64]  # [N]
    finished: NDArray[np.float64]  # [N]
    worker: NDArray[np.int64]  # [N] the worker that finished it, -1 for none
    tokens: NDArray[np.int64]  # [N] output tokens generated
    lost_steps: NDArray[np.int64]  # [N] times it went back to the pool (failure, preemption)
    step_end: NDArray[np.float64]  # [T] end of the step
    step_seconds: NDArray[np.float64]  # [T] duration, the weight of the row in time averages
    step_spread: NDArray[np.float64]  # [T] max - min KV load over the workers
    step_mean: NDArray[np.float64]  # [T] mean KV load
    step_max: NDArray[np.float64]  # [T]
    step_experts: NDArray[np.float64]  # [T] expected distinct experts of the busiest rank (mean over groups)
    step_waiting: NDArray[np.int64]  # [T] requests in the pool at the last decision before the step
    end: float  # seconds: when the last step ended
    decision_seconds: NDArray[np.float64]  # wall-clock time of each call of the policy
    loads: NDArray[np.int64] | None = None  # [T, W] per-worker KV loads, where asked for
    output_lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [N] of the trace

    @property
    def ttft(self) -> NDArray[np.float64]:
        """Seconds from reaching the pool to the first decoded token, of the finished requests."""
        done = ~np.isnan(self.finished)
        return self.first_token[done] - self.arrival[done]

    @property
    def tpot(self) -> NDArray[np.float64]:
        """Seconds per output token after the first, of finished requests with at least two."""
        done = ~np.isnan(self.finished) & (self.tokens > 1)
        return (self.finished[done] - self.first_token[done]) / (self.tokens[done] - 1)

    def window(self, warmup_steps: int = 0, min_waiting: int = 0) -> NDArray[np.bool_]:
        """Steps to average over: after the warm-up, with at least `min_waiting` requests in the pool."""
        keep = np.arange(len(self.step_end)) >= warmup_steps
        return keep & (self.step_waiting >= min_waiting)

    def imbalance(self, warmup_steps: int = 0, min_waiting: int = 0, *, by_time: bool = False) -> float:
        """Mean max - min KV load over workers, per step (BalanceRoute section 6.1) or weighted by time."""
        keep = self.window(warmup_steps, min_waiting)
        if not keep.any():
            raise ConfigError(
                f"no step after {warmup_steps} warm-up steps with {min_waiting} waiting: the trace is too short"
            )
        return float(np.average(self.step_spread[keep], weights=self.step_seconds[keep] if by_time else None))

    def throughput(self, warmup_steps: int = 0, min_waiting: int = 0) -> float:
        """Output tokens per second; over a window, from the tokens of its steps."""
        if warmup_steps == 0 and min_waiting == 0:
            return float(self.tokens.sum() / self.end) if self.end > 0 else 0.0
        keep = self.window(warmup_steps, min_waiting)
        return float(self.step_tokens[keep].sum() / self.step_seconds[keep].sum())

    step_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [T] tokens generated

    def summary(self, warmup_steps: int = 0, min_waiting: int = 0) -> dict[str, float]:
        """The figures of the papers' tables: imbalance (tokens), TTFT and TPOT (s), throughput (tokens/s)."""
        keep = self.window(warmup_steps, min_waiting)
        tpot, ttft = self.tpot, self.ttft
        decisions = self.decision_seconds
        values = {
            "finished": float((~np.isnan(self.finished)).sum()),
            "throughput": self.throughput(warmup_steps, min_waiting) if keep.any() else 0.0,
            "imbalance": self.imbalance(warmup_steps, min_waiting) if keep.any() else float("nan"),
            "active_experts": float(self.step_experts[keep].mean()) if keep.any() else float("nan"),
            "kv_tokens_mean": float(self.step_mean[keep].mean()) if keep.any() else float("nan"),
            "steps": float(keep.sum()),
            "end": self.end,
        }
        for name, data in (("ttft", ttft), ("tpot", tpot)):
            for tag, q in (("p50", 50), ("p95", 95), ("p99", 99)):
                values[f"{name}_{tag}"] = float(np.percentile(data, q)) if len(data) else float("nan")
            values[f"{name}_mean"] = float(data.mean()) if len(data) else float("nan")
        for tag, q in (("p50", 50), ("p99", 99)):
            values[f"decision_ms_{tag}"] = float(np.percentile(decisions, q) * 1e3) if len(decisions) else 0.0
        return values
