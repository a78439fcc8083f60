"""Logs and traces: JSON lines if asked for, OpenTelemetry spans if an endpoint is given."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from moe_opt.errors import ConfigError

logger = logging.getLogger("moe_opt.serving")
_PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: timestamp, level, target, message, and the fields passed as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, Any] = {
            "timestamp": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class PlainFormatter(logging.Formatter):
    """The same for people: the fields follow the message as key=value."""

    def __init__(self) -> None:
        super().__init__(_PLAIN)

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={value}" for key, value in getattr(record, "fields", {}).items())
        text = super().format(record)
        return f"{text} {fields}" if fields else text


def setup_logging(level: str, json_output: bool) -> None:
    """Send the package's logs to standard error.

    Raises:
        ConfigError: an unknown level.
    """
    # TGI's LOG_LEVEL may be a filter ("info,text_generation_router=debug"): the first word counts.
    word = level.split(",")[0].strip().upper()
    number = logging.getLevelNamesMapping().get(
        {"TRACE": "DEBUG", "WARN": "WARNING", "OFF": "CRITICAL"}.get(word, word)
    )
    if number is None:
        raise ConfigError(f"unknown log level {level!r}: choose debug, info, warning or error")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if json_output else PlainFormatter())
    root = logging.getLogger("moe_opt")
    root.handlers[:] = [handler]
    root.setLevel(number)
    root.propagate = False


def _exporter(endpoint: str) -> Any:
    """gRPC as TGI sends it; HTTP where the address says so, by its path or by the usual port 4318."""
    if "/v1/traces" in endpoint or endpoint.rstrip("/").endswith(":4318"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        url = endpoint if "/v1/traces" in endpoint else endpoint.rstrip("/") + "/v1/traces"
        return HttpExporter(endpoint=url)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))


class Tracer:
    """Spans of requests. Without an endpoint every span is free of cost."""

    def __init__(self, endpoint: str | None = None, service_name: str = "moe-opt") -> None:
        self._tracer: Any = None
        self._provider: Any = None
        self._propagate: Any = None
        if endpoint is None:
            return
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = _exporter(endpoint)
        except ImportError as error:
            raise ConfigError(
                "--otlp-endpoint needs OpenTelemetry: pip install opentelemetry-sdk "
                f"opentelemetry-exporter-otlp-proto-grpc (or -http for an endpoint with /v1/traces); {error}"
            ) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("moe_opt.serving")
        self._propagate = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def span(self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """A server span around a request; `traceparent` in the headers makes it a child. What the caller puts into the
        yielded dict becomes attributes when the span ends."""
        late: dict[str, Any] = {}
        if self._tracer is None:
            yield late
            return
        from opentelemetry.trace import SpanKind

        context = self._propagate.extract({key.lower(): value for key, value in headers.items()})
        with self._tracer.start_as_current_span(
            name, context=context, kind=SpanKind.SERVER, attributes=dict(attributes)
        ) as span:
            try:
                yield late
            finally:
                span.set_attributes(late)

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()
