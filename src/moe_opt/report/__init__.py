"""Tables and plots from results. matplotlib is imported only when something is drawn."""

from moe_opt.report.results import load_result, machine_facts, save_result
from moe_opt.report.tables import format_interval, format_value, markdown_table

__all__ = [
    "format_interval",
    "format_value",
    "load_result",
    "machine_facts",
    "markdown_table",
    "save_result",
]
