"""Markdown tables, aligned so that they also read well as plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_opt.errors import ConfigError


def format_value(value: object) -> str:
    """A cell: floats with three or more significant digits, thousands separated; None and nan as a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if isinstance(value, int) or size >= 1000:
        return f"{value:,.0f}"
    if size == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:.{min(decimals, 6)}f}"


def format_interval(mean: float, low: float, high: float) -> str:
    """`mean ± half-width`, or the mean alone where one run gives no interval."""
    if math.isnan(low) or math.isnan(high):
        return format_value(mean)
    return f"{format_value(mean)} ± {format_value((high - low) / 2)}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A GitHub table; the first column is left-aligned, the others right-aligned."""
    cells = [[format_value(value).replace("|", "\\|") for value in row] for row in rows]
    for row in cells:
        if len(row) != len(columns):
            raise ConfigError(f"a row has {len(row)} cells, the table {len(columns)} columns: {row}")
    widths = [max(len(str(c)), *(len(r[i]) for r in cells), 3) for i, c in enumerate(columns)]

    def line(values: Sequence[str]) -> str:
        padded = [v.ljust(w) if i == 0 else v.rjust(w) for i, (v, w) in enumerate(zip(values, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line([str(c) for c in columns]), rule, *(line(r) for r in cells)])
