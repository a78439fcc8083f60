"""`accelerate launch -m moe_opt.distill --config RECIPE.yaml`: the same as `moe-opt distill`, in every process."""

from __future__ import annotations

import sys

from moe_opt.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["distill", *sys.argv[1:]]))
