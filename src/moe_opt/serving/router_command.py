"""`moe-opt router`."""

from __future__ import annotations

import argparse
import asyncio

from moe_opt.errors import ConfigError
from moe_opt.serving.router_flags import add_router_arguments, listen, router_settings

HELP = "route requests to prefill and decode workers, ours or vLLM's"
EXAMPLE = """
moe-opt serve --model-id examples/demo_model --kv-role prefill --port 8100 &
moe-opt serve --model-id examples/demo_model --kv-role decode --port 8200 &
moe-opt router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --policy br-0 --port 8080
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for role, text in (
        ("prefill", "computes prompts"),
        ("decode", "generates"),
        ("both", "does both (no hand-off without a prefill worker)"),
    ):
        parser.add_argument(
            f"--{role}", action="append", default=[], metavar="[ID=]URL[@RANK]",
            help=f"worker that {text}; may be repeated",
        )  # fmt: skip
    add_router_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Route until SIGTERM or Ctrl-C."""
    from moe_opt.serving.observability import Tracer, setup_logging
    from moe_opt.serving.router.config import ROLES, WorkerSpec
    from moe_opt.serving.router.router import Router
    from moe_opt.serving.router.server import loop_factory, serve_router

    setup_logging(args.log_level, args.json_output)
    specs = [WorkerSpec.parse(text, role) for role in ROLES for text in getattr(args, role)]
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ConfigError(f"two workers are called the same: {', '.join(sorted(names))}")
    router = Router(router_settings(args), specs, api_key=args.api_key, trace=args.trace)
    sock = listen(args.hostname, args.port)
    tracer = Tracer(args.otlp_endpoint, "moe-opt.router")
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve_router(router, sock, graceful=args.graceful_termination_timeout, tracer=tracer))
    finally:
        sock.close()
