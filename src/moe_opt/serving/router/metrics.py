"""Prometheus metrics of the router: `moe_opt_router_*`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_DECISION = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)
_STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_WINDOW = 1024


class RouterMetrics:
    """Counters and histograms, and short windows of latencies for the dashboard."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"moe_opt_router_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"moe_opt_router_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"moe_opt_router_{name}", text, registry=self.registry, buckets=buckets)

        self.requests = counter("requests", "Requests received", ("route",))
        self.failures = counter("failures", "Requests that ended with an error of the router's", ("err",))
        self.completed = counter("completed", "Requests that ended well")
        self.disconnects = counter("disconnects", "Requests that their client gave up")
        self.retries = counter("retries", "Tries with another worker, by what the first one did", ("reason",))
        self.signatures = counter("signatures", "Requests by the source of their expert signature", ("source",))
        self.decisions = counter("decisions", "Requests sent to a decode worker", ("worker",))
        self.decision_seconds = histogram("decision_seconds", "One run of the decode policy", _DECISION)
        self.decision_waiting = histogram(
            "decision_waiting", "Requests that a decision chose from", (1, 2, 4, 8, 16, 64)
        )
        self.band = histogram("band_size", "Decode workers in the band of similar experts", (1, 2, 3, 4, 6, 8, 16, 32))
        self.prefill_seconds = histogram("prefill_seconds", "Arrival to the end of prefill", _SECONDS)
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to the first token", _SECONDS)
        self.tpot = histogram("time_per_output_token_seconds", "Between two tokens, mean of a stream", _STEP)
        self.waiting = gauge("waiting", "Requests that wait, for prefill or for decode", ("stage",))
        self.up = gauge("worker_up", "Whether a worker answers", ("worker", "role"))
        self.running = gauge("worker_running", "Requests of this router on a worker", ("worker",))
        self.kv_tokens = gauge("worker_kv_tokens", "KV tokens of this router's requests on a worker", ("worker",))
        self.utilisation = gauge("worker_kv_utilisation", "Share of a worker's KV in use, as it says", ("worker",))
        self.active_experts = gauge("worker_active_experts", "Expert weights read per layer, last step", ("worker",))
        self._recent: dict[str, deque[float]] = {"ttft": deque(maxlen=_WINDOW), "tpot": deque(maxlen=_WINDOW)}

    def note(self, what: str, seconds: float) -> None:
        """A latency, for the window that the dashboard shows."""
        self._recent[what].append(seconds)

    def recent(self, what: str) -> dict[str, float | None]:
        """p50, p90 and p99 of the newest 1,024 samples, seconds."""
        values = sorted(self._recent[what])
        return {f"p{p}": _quantile(values, p / 100) for p in (50, 90, 99)}

    def render(self) -> bytes:
        return generate_latest(self.registry)


def _quantile(values: Sequence[float], share: float) -> float | None:
    return values[min(len(values) - 1, int(share * len(values)))] if values else None
