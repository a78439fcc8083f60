"""Prometheus metrics: TGI's names, so that its dashboards keep working, and ours beside them (`moe_opt_*`).

TGI's counters have no `_total` suffix, which prometheus_client always appends; `render` takes it off theirs.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moe_opt.serving.engine.types import EngineStats, FinishEvent, StepReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TGI_TOTAL = re.compile(r"^((?:# (?:HELP|TYPE) )?tgi_\w+?)_total\b", re.MULTILINE)
_CREATED = re.compile(r"^(?:# (?:HELP|TYPE) )?\w+_created\b.*\n", re.MULTILINE)


class Metrics:
    """All metrics of one worker. Safe to update from the event loop and from the engine's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._last_counts: dict[str, int] = {}

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

        self.request_count = counter("tgi_request_count", "Requests received")
        self.request_success = counter("tgi_request_success", "Requests answered")
        self.request_failure = counter("tgi_request_failure", "Requests that failed, by kind", ("err",))
        self.request_duration = histogram("tgi_request_duration", "Seconds from arrival to the last token", _SECONDS)
        self.validation_duration = histogram("tgi_request_validation_duration", "Seconds in validation", _SECONDS)
        self.queue_duration = histogram("tgi_request_queue_duration", "Seconds in the queue", _SECONDS)
        self.inference_duration = histogram("tgi_request_inference_duration", "Seconds in the engine", _SECONDS)
        self.time_per_token = histogram(
            "tgi_request_mean_time_per_token_duration", "Seconds per generated token, mean of a request", _SECONDS
        )
        self.generated_tokens = histogram("tgi_request_generated_tokens", "Generated tokens of a request", _TOKENS)
        self.input_length = histogram("tgi_request_input_length", "Prompt tokens of a request", _TOKENS)
        self.max_new_tokens = histogram("tgi_request_max_new_tokens", "Tokens that a request may generate", _TOKENS)
        self.skipped_tokens = histogram(
            "tgi_request_skipped_tokens", "Prompt tokens found in the prefix cache", (0, *_TOKENS)
        )

        self.queue_size = gauge("tgi_queue_size", "Requests waiting")
        self.batch_size = gauge("tgi_batch_current_size", "Requests running")
        self.batch_max_tokens = gauge("tgi_batch_current_max_tokens", "KV tokens of the running requests")
        self.batch_total_tokens = gauge("tgi_batch_max_total_tokens", "KV tokens that fit")
        self.batch_next_size = histogram("tgi_batch_next_size", "Requests of a step", _TOKENS)
        self.batch_count = counter("tgi_batch_inference_count", "Engine steps begun", ("method",))
        self.batch_success = counter("tgi_batch_inference_success", "Engine steps done", ("method",))
        self.batch_failure = counter("tgi_batch_inference_failure", "Requests that failed in a step")
        self.batch_duration = histogram("tgi_batch_inference_duration", "Seconds of a step", _STEP, ("method",))
        self.forward_duration = histogram(
            "tgi_batch_forward_duration", "Seconds of the model alone", _STEP, ("method",)
        )
        self.decode_duration = histogram(
            "tgi_batch_decode_duration", "Seconds of a step outside the model", _STEP, ("method",)
        )
        self.filter_duration = histogram(
            "tgi_batch_filter_duration", "Seconds to drop finished requests (part of the step here)", _STEP, ("method",)
        )
        self.concat_count = counter("tgi_batch_concat", "Steps that prefilled beside decoding requests", ("reason",))
        self.concat_duration = histogram(
            "tgi_batch_concat_duration", "Seconds of steps that prefilled beside decoding requests", _STEP, ("reason",)
        )

        self.ttft = histogram("moe_opt_time_to_first_token_seconds", "Submission to first token", _SECONDS)
        self.tpot = histogram("moe_opt_time_per_output_token_seconds", "Between two tokens of a request", _STEP)
        self.threshold = gauge("moe_opt_brownout_threshold", "Brownout threshold, 1 is exact", ("phase",))
        self.slo = gauge("moe_opt_slo_seconds", "Latency objective", ("phase",))
        self.slo_p90 = gauge("moe_opt_slo_p90_seconds", "p90 that the controller sees", ("phase",))
        self.slo_misses = counter("moe_opt_slo_misses", "First or later tokens above their objective", ("phase",))
        self.tokens = counter("moe_opt_tokens", "Tokens by phase of their step and brownout", ("phase", "browned"))
        self.browned_requests = counter("moe_opt_browned_requests", "Requests with a step below threshold 1")
        self.active_experts = gauge("moe_opt_active_experts", "Expert weights read per layer, last step", ("phase",))
        self.active_experts_read = counter(
            "moe_opt_active_experts_read", "Expert weights read per layer, summed over steps", ("phase",)
        )
        self.united_ways = gauge("moe_opt_united_ways", "Experts behind one united expert, 0 without any")
        self.kv_pages = gauge("moe_opt_kv_pages", "KV pages by state", ("state",))
        self.kv_transfer_bytes = gauge("moe_opt_kv_transfer_bytes", "Handed-over KV that waits to be fetched")
        self.kv_transfers = counter("moe_opt_kv_transfers", "KV of prompts handed over, by outcome", ("outcome",))
        self.preemptions = counter("moe_opt_preemptions", "Requests recomputed because pages ran out")
        self.cancelled = counter("moe_opt_cancelled_requests", "Requests that their client gave up")
        self.prefix_hit_tokens = counter("moe_opt_prefix_hit_tokens", "Prompt tokens found in the prefix cache")
        self.prefix_query_tokens = counter("moe_opt_prefix_query_tokens", "Prompt tokens looked up")

    # ------------------------------------------------------------- requests

    def request_received(self) -> None:
        self.request_count.inc()

    def request_validated(self, prompt_tokens: int, max_new_tokens: int) -> None:
        self.input_length.observe(prompt_tokens)
        self.max_new_tokens.observe(max_new_tokens)

    def request_succeeded(self, arrived: float, validation: float, finish: FinishEvent) -> None:
        """`arrived`: time.monotonic(); `validation`: seconds."""
        timings = finish.timings
        self.request_success.inc()
        self.request_duration.observe(time.monotonic() - arrived)
        self.validation_duration.observe(validation)
        self.queue_duration.observe(timings.queue)
        self.inference_duration.observe(timings.inference)
        self.time_per_token.observe(timings.inference / max(1, finish.generated_tokens))
        self.generated_tokens.observe(finish.generated_tokens)
        self.skipped_tokens.observe(finish.cached_tokens)
        if finish.browned:
            self.browned_requests.inc()

    def request_failed(self, kind: str) -> None:
        self.request_failure.labels(kind).inc()

    # ------------------------------------------------------------- steps

    def step(self, report: StepReport) -> None:
        """One engine step; called on the engine's thread."""
        method = report.phase
        self.batch_next_size.observe(report.requests)
        self.batch_count.labels(method).inc()
        self.batch_success.labels(method).inc()
        self.batch_duration.labels(method).observe(report.seconds)
        self.forward_duration.labels(method).observe(report.forward_seconds)
        self.decode_duration.labels(method).observe(max(0.0, report.seconds - report.forward_seconds))
        if report.prefill_tokens and report.decode_tokens:
            self.concat_count.labels("waiting").inc()
            self.concat_duration.labels("waiting").observe(report.seconds)
        browned = "true" if report.browned_share > 0 else "false"
        self.tokens.labels(method, browned).inc(report.prefill_tokens + report.decode_tokens)
        for seconds in report.ttft:
            self.ttft.observe(seconds)
        for seconds in report.tpot:
            self.tpot.observe(seconds)
        if report.active_experts is not None:
            self.active_experts.labels(method).set(report.active_experts)
            self.active_experts_read.labels(method).inc(report.active_experts)

    def engine_stats(self, stats: EngineStats) -> None:
        """A snapshot, taken when somebody reads the metrics."""
        self.queue_size.set(stats.waiting)
        self.batch_size.set(stats.running)
        self.batch_max_tokens.set(stats.kv_tokens)
        self.batch_total_tokens.set(stats.total_pages * stats.page_size)
        self.kv_pages.labels("free").set(stats.free_pages)
        self.kv_pages.labels("used").set(stats.used_pages)
        self.kv_pages.labels("cached").set(stats.cached_pages)
        with self._lock:
            self._advance("failed", stats.failed, self.batch_failure.inc)
            self._advance("preemptions", stats.preemptions, self.preemptions.inc)
            self._advance("cancelled", stats.cancelled, self.cancelled.inc)
            self._advance("prefix_hits", stats.prefix_hit_tokens, self.prefix_hit_tokens.inc)
            self._advance("prefix_queries", stats.prefix_query_tokens, self.prefix_query_tokens.inc)

    def kv_transfer(self, waiting_bytes: int, outcomes: Mapping[str, int]) -> None:
        """State of the hand-off between workers, taken when somebody reads the metrics."""
        self.kv_transfer_bytes.set(waiting_bytes)
        with self._lock:
            for outcome, count in outcomes.items():
                self._advance(f"kv_{outcome}", count, self.kv_transfers.labels(outcome).inc)

    def _advance(self, key: str, count: int, add: Callable[[float], None]) -> None:
        add(max(0, count - self._last_counts.get(key, 0)))
        self._last_counts[key] = count

    def render(self) -> str:
        """The text that Prometheus scrapes."""
        text = generate_latest(self.registry).decode()
        return _TGI_TOTAL.sub(r"\1", _CREATED.sub("", text))
