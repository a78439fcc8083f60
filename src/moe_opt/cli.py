"""`moe-opt`: one command, a thin layer over the library.

A subcommand is a module with `HELP` (one line), `EXAMPLE` (shown under --help), `add_arguments(parser)` and
`run(args) -> int`. It is imported only when it is called, so that `moe-opt simulate` never pays for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from moe_opt import __version__
from moe_opt.errors import MoEOptError

# name -> (module, one line for `moe-opt --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("moe_opt.demo.command", "see brownout and a fleet work on the demo model"),
    "eval": (
        "moe_opt.evaluation.command",
        "accuracy lost and experts saved, over ways x thresholds x strategies",
    ),
    "distill": ("moe_opt.distill.command", "train united experts from a recipe"),
    "inspect": (
        "moe_opt.modeling.inspect",
        "MoE layers, experts, memory and which features apply to a model",
    ),
    "serve": ("moe_opt.serving.serve_command", "serve a MoE model over TGI's and OpenAI's HTTP API"),
    "score": ("moe_opt.serving.score_command", "probabilities of given choices for many prompts, by prefill alone"),
    "router": ("moe_opt.serving.router_command", "route requests to prefill and decode workers, ours or vLLM's"),
    "launch": ("moe_opt.serving.launch_command", "prefill and decode workers and their router on this machine"),
    "fit-signatures": ("moe_opt.serving.fit_command", "learn expert signatures for the router's policy eldr"),
    "bench": ("moe_opt.serving.bench_command", "load a running server and report latencies and kept objectives"),
    "simulate": ("moe_opt.simulate.command", "run routing policies over a trace on a simulated fleet"),
    "plot": ("moe_opt.report.command", "draw the figures of a result file"),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other failure does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _build_parser(command: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="moe-opt", description="Serve Mixture-of-Experts models from Hugging Face faster.")
    parser.add_argument("--version", action="version", version=f"moe-opt {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module_name, help_line) in COMMANDS.items():
        if name != command:  # listed by name only: its module is not imported
            subparsers.add_parser(name, help=help_line)
            continue
        module = importlib.import_module(module_name)
        sub = subparsers.add_parser(
            name,
            help=help_line,
            description=module.HELP,
            epilog="example:\n" + "\n".join(f"  {line}" for line in module.EXAMPLE.strip().splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; every expected failure is one line on stderr and exit code 2."""
    args_list = list(sys.argv[1:] if argv is None else argv)
    command = next((a for a in args_list if not a.startswith("-")), None)
    parser = _build_parser(command)
    args = parser.parse_args(args_list)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return int(args.run(args))
    except (MoEOptError, OSError, ValueError, ImportError, RuntimeError) as error:
        # The libraries below report wrong models, files and devices with the last three.
        if os.environ.get("MOE_OPT_DEBUG"):
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        print(f"moe-opt {args.command}: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"moe-opt {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
