"""`moe-opt serve`, and the same under the name `text-generation-launcher`."""

from __future__ import annotations

import argparse
import sys

from moe_opt.errors import MoEOptError
from moe_opt.serving.expert_group import for_rank, own_rank, run_group
from moe_opt.serving.launch_flags import add_arguments as add_flags
from moe_opt.serving.launch_flags import given_flags, resolve
from moe_opt.serving.preflight import preflight

HELP = "serve a MoE model over TGI's and OpenAI's HTTP API"
EXAMPLE = """
moe-opt serve --model-id examples/demo_model --port 8080
moe-opt serve --model-id examples/demo_model --united-experts examples/demo_model/united --ways 4 --slo-tpot 0.02
curl 127.0.0.1:8080/generate -X POST -H 'Content-Type: application/json' \\
    -d '{"inputs": "What is a router?", "parameters": {"max_new_tokens": 20}}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 0 after an orderly end, 1 if the engine died."""
    values, warnings = resolve(args)
    for warning in warnings:
        print(f"moe-opt serve: {warning}", file=sys.stderr)
    rank = own_rank(values)
    if values["expert_parallel"] is not None and rank is None:
        for number in range(values["expert_parallel"]):  # what is wrong for all is said once
            for bound in preflight(for_rank(values, number)):
                bound.close()
        return run_group([sys.executable, "-m", "moe_opt.cli", "serve", *given_flags(args)], values)
    values = for_rank(values, rank or 0)
    sockets = preflight(values)
    try:
        from moe_opt.serving.worker import serve  # only now: it imports torch and Transformers

        return serve(values, sockets)
    finally:
        for bound in sockets:
            bound.close()


def launcher_main(argv: list[str] | None = None) -> int:
    """Entry point `text-generation-launcher`: starts what TGI's launcher would, with the same flags."""
    parser = argparse.ArgumentParser(
        prog="text-generation-launcher",
        description="moe-opt's server under the name of TGI's launcher.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  text-generation-launcher --model-id examples/demo_model --port 8080",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (MoEOptError, OSError) as error:
        print(f"text-generation-launcher: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(launcher_main())
