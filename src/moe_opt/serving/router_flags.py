"""Flags that `moe-opt router` and `moe-opt launch` share."""

from __future__ import annotations

import argparse
import dataclasses
import socket
from typing import Any

from moe_opt.cluster.policies import policy_names
from moe_opt.errors import ConfigError
from moe_opt.serving.router.config import RouterSettings

_DEFAULTS = RouterSettings()
_FLOATS = {
    "pool_ttl": "seconds that a request may wait for a worker",
    "prefill_saturation": "prompt tokens under way on a prefill worker at which it gets no more",
    "prefill_utilisation": "share of a prefill worker's KV at which it gets no more",
    "backoff": "seconds before the first retry, doubled for each further one",
    "poll": "seconds between two looks at a worker's health and metrics",
    "poll_timeout": "seconds for each of these looks",
    "connect_timeout": "seconds to connect to a worker",
    "prefill_timeout": "seconds for a prefill",
    "request_timeout": "seconds for a whole answer; default: no bound",
    "idle_timeout": "seconds between two pieces of a worker's stream",
    "write_timeout": "seconds that a client may leave a stream unread",
}
_INTS = {
    "max_concurrent_requests": "requests in the router; more get 429",
    "max_running": "requests that a decode worker runs, where it does not tell",
    "bypass_margin": "with --pool-bypass, requests above a worker's batch",
    "retries": "further workers tried for a request",
    "payload_limit": "bytes of a request body",
}


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="jsq", help=f"decode routing: {', '.join(policy_names())} (default: jsq)")
    parser.add_argument("--signature-model", metavar="FILE", help="of `moe-opt fit-signatures`; eldr needs it")
    parser.add_argument(
        "--policy-option", action="append", default=[], metavar="KEY=VALUE",
        help="option of the policy, for instance tau=0.1 or horizon=48; may be repeated",
    )  # fmt: skip
    parser.add_argument("--pool-bypass", action="store_true", help="with br-0: send requests on at once (D.6)")
    parser.add_argument("--hostname", default="0.0.0.0", help="address to listen on (default: 0.0.0.0)")
    parser.add_argument("--port", type=int, default=3000, help="port to listen on; 0 takes a free one (default: 3000)")
    parser.add_argument("--api-key", help="key that clients send, and that the router sends to workers")
    parser.add_argument("--trace", metavar="FILE", help="append every decision as a JSON line")
    parser.add_argument("--graceful-termination-timeout", type=float, default=90.0, help="seconds after SIGTERM")
    parser.add_argument("--json-output", action="store_true", help="logs as JSON lines")
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error (default: info)")
    parser.add_argument("--otlp-endpoint", help="OpenTelemetry collector for traces")
    bounds = parser.add_argument_group("bounds")
    for kind, table in ((float, _FLOATS), (int, _INTS)):
        for name, text in table.items():
            default = getattr(_DEFAULTS, name)
            shown = "" if default is None else f" (default: {default:g})"
            bounds.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text + shown)


def router_settings(args: argparse.Namespace) -> RouterSettings:
    """Raises ConfigError for a value out of range."""
    options: dict[str, object] = {}
    for text in args.policy_option:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--policy-option {text}: expected KEY=VALUE")
        options[key.replace("-", "_")] = _value(value)
    values: dict[str, Any] = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(RouterSettings)
        if field.name not in ("options",)
    }
    return RouterSettings(**values, options=options)


def _value(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def listen(hostname: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError if the port is taken."""
    sock = socket.socket(socket.AF_INET6 if ":" in hostname else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((hostname, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"cannot listen on {hostname}:{port} ({error}): choose another --port") from error
    return sock
