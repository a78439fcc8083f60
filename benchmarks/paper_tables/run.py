"""Runs the paper tables: `python benchmarks/paper_tables/run.py [section ...]`, all of them without
arguments.

Figures go to benchmarks/results/paper_tables.json, one section at a time; `render.py` turns them into
docs/reproduction.md.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main(names: list[str]) -> int:
    """Run the named sections, then render the page."""
    sections = {}
    for module in ("balanceroute", "eldr", "moe_prefill", "metro"):
        sections |= importlib.import_module(module).SECTIONS
    unknown = [n for n in names if n not in sections]
    if unknown:
        print(f"no section {', '.join(unknown)}; sections: {', '.join(sections)}", file=sys.stderr)
        return 2
    for name in names or sections:
        sections[name]()
    importlib.import_module("render").render()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
