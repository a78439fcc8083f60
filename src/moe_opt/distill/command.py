"""`moe-opt distill`: train united experts from a recipe."""

from __future__ import annotations

import argparse
from typing import Any

from moe_opt.errors import ConfigError

HELP = "train united experts (BrownoutServe IV-B) from a recipe"
EXAMPLE = """
moe-opt distill --config recipes/demo.yaml
moe-opt distill --config recipes/demo.yaml --set logits.steps=20 --output my-united
accelerate launch -m moe_opt.distill --config recipes/qwen1.5-moe-a2.7b-chat.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="RECIPE.yaml", help="the recipe")
    parser.add_argument("--output", metavar="DIR", help="where ways-K/ go, instead of the recipe's folder")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="change one key of the recipe, for instance --set logits.steps=20 (may be repeated)",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="refuse to run on another number of processes")


def run(args: argparse.Namespace) -> int:
    from moe_opt.distill.config import DistillConfig

    config = DistillConfig.from_yaml(args.config, _overrides(args))
    try:
        import accelerate  # noqa: F401
        import datasets  # noqa: F401
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'moe_opt[distill]'") from error
    from moe_opt.distill.pipeline import distill

    distill(config)
    return 0


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("pyyaml is missing: pip install 'moe_opt[distill]'") from error
    found: dict[str, Any] = {}
    for setting in args.settings:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set takes KEY=VALUE, got {setting!r}")
        found[key] = yaml.safe_load(value)
    if args.output:
        found["output"] = args.output
    if args.processes is not None:
        found["training.processes"] = args.processes
    return found
