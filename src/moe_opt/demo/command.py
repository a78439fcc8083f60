"""`moe-opt demo STAGE`."""

from __future__ import annotations

import argparse
import importlib

HELP = "See a capability work on the demo model, with real text in ten domains and languages."
EXAMPLE = """moe-opt demo
moe-opt demo brownout
moe-opt demo serve
moe-opt demo fleet
moe-opt demo brownout --output out/demo --threads 4"""

# stage -> module with `run(args) -> int`
STAGES = {
    "brownout": "moe_opt.demo.brownout",
    "serve": "moe_opt.demo.serve",
    "fleet": "moe_opt.demo.fleet",
}
# What `make demo` shows: what brownout costs and saves, then a fleet. "serve" takes minutes: a burst needs its time.
USUAL = ("brownout", "fleet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", nargs="?", choices=list(STAGES), help=f"default: {' and then '.join(USUAL)}")
    parser.add_argument("--model", help="folder or Hub id (default: the demo model of this checkout)")
    parser.add_argument("--output", default="out/demo", help="folder for tables and plots (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: its own choice)")


def run(args: argparse.Namespace) -> int:
    for stage in USUAL if args.stage is None else (args.stage,):
        code = int(importlib.import_module(STAGES[stage]).run(args))
        if code:
            return code
    return 0
