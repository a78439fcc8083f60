"""SLO-aware latency control: a brownout threshold that keeps the p90 latency just below its objective.

BrownoutServe, Section IV-E, Algorithm 2. Prefill (time to first token) and decode (time per output token)
each have a controller. The controller has no clock: the caller passes its own, and calls `update` once per
control period.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from moe_opt.errors import ConfigError


class LatencyController:
    """Raises the threshold linearly while there is slack, and shrinks it by a factor when the objective is missed.

    Args:
        slo: latency objective, seconds.
        warning_factor: below `warning_factor * slo` there is slack (0.8 in the paper).
        increment: added to the threshold then (0.1 in the paper).
        shrink_ratio: the threshold is multiplied by it above `slo` (0.8 in the paper).
        window: seconds that a latency counts for (2 in the paper).
        period: `update` changes nothing within this many seconds of its last decision; 0 leaves the pace to
            the caller. The paper's authors decide every 5 s.

    The threshold starts at 1 (no brownout) and stays in [0, 1]. Only latencies seen under the current
    threshold count: those from before the last change say nothing about it. With none there is nothing to
    protect, and the threshold rises.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        slo: float,
        warning_factor: float = 0.8,
        increment: float = 0.1,
        shrink_ratio: float = 0.8,
        window: float = 2.0,
        period: float = 0.0,
    ):
        if not (math.isfinite(slo) and slo > 0):
            raise ConfigError(f"slo must be a positive number of seconds, got {slo!r}")
        if not 0 < warning_factor <= 1:
            raise ConfigError(f"warning_factor must lie in (0, 1], got {warning_factor!r}")
        if not 0 < increment <= 1:
            raise ConfigError(f"increment must lie in (0, 1], got {increment!r}")
        if not 0 <= shrink_ratio < 1:
            raise ConfigError(f"shrink_ratio must lie in [0, 1), got {shrink_ratio!r}")
        if not window > 0:
            raise ConfigError(f"window must be a positive number of seconds, got {window!r}")
        if not period >= 0:
            raise ConfigError(f"period must be 0 or more seconds, got {period!r}")
        self.slo = slo
        self.warning_line = warning_factor * slo
        self.increment = increment
        self.shrink_ratio = shrink_ratio
        self.window = window
        self.period = period
        self.threshold = 1.0
        self._samples: deque[tuple[float, float]] = deque()  # (time, latency) under the current threshold
        self._decided = -math.inf

    def observe(self, latency: float, now: float) -> None:
        """Takes in one latency, seconds, that was measured at `now`.

        Raises:
            ConfigError: a latency that is negative or not finite (a request that never ended has no latency).
        """
        if not (math.isfinite(latency) and latency >= 0):
            raise ConfigError(f"latency must be 0 or more seconds, got {latency!r}")
        self._samples.append((now, latency))
        self._forget(now)

    def p90(self, now: float) -> float | None:
        """The 90th percentile (linear interpolation) of the latencies that count at `now`; None without any."""
        self._forget(now)
        recent = [latency for time, latency in self._samples if now - self.window <= time <= now]
        return float(np.percentile(recent, 90)) if recent else None

    def update(self, now: float) -> float:
        """One control decision at `now`; returns the threshold from now on, in [0, 1]."""
        if now - self._decided < self.period:
            return self.threshold
        self._decided = now
        p90 = self.p90(now)
        changed = self.threshold
        if p90 is None or p90 < self.warning_line:
            changed = min(1.0, self.threshold + self.increment)
        elif p90 > self.slo:
            changed = max(0.0, self.threshold * self.shrink_ratio)
        if changed != self.threshold:
            self.threshold = changed
            self._samples.clear()
        return self.threshold

    def _forget(self, now: float) -> None:
        """Drops samples older than the window, so that memory is bounded by the rate of requests."""
        while self._samples and self._samples[0][0] < now - self.window:
            self._samples.popleft()
