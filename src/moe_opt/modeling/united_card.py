"""The README.md (Hub model card) of a united-experts checkpoint, generated from its config."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_opt.modeling.united import UnitedExperts


def model_card(united: UnitedExperts) -> str:
    """Markdown with the Hub's YAML header: base model, shape, recipe, figures, usage, licence."""
    config = united.config
    base = config.base_model or "unknown"
    header = ["---", "library_name: moe_opt", "tags: [moe_opt, united-experts, mixture-of-experts]"]
    if config.base_model and config.base_model.count("/") == 1:
        header.append(f"base_model: {config.base_model}")
    header.append("---")
    united_count = max(max(groups) for groups in config.groups) + 1
    lines = [
        *header,
        "",
        f"# {config.ways}-way united experts of {base}",
        "",
        "United experts stand in for groups of rarely used experts while a server is short of time "
        "(BrownoutServe, section IV-B). Without a brownout threshold below 1 they change no output.",
        "",
        "| | |",
        "|---|---|",
        f"| base model | {base}{f' at {config.base_revision}' if config.base_revision else ''} |",
        f"| ways | {config.ways} |",
        f"| MoE layers | {config.num_layers} |",
        f"| experts a layer | {config.num_experts} originals, {united_count} united |",
        f"| parameters | {united.num_parameters:,} |",
        "",
        "## Use",
        "",
        "```python",
        "from moe_opt import MoEOptConfig, MoEOptimizedForCausalLM",
        "",
        f'model = MoEOptimizedForCausalLM.from_pretrained("{base}", '
        f'moe_opt=MoEOptConfig(united_experts="THIS_REPOSITORY", ways={config.ways}))',
        "model.moe_opt.set_brownout(threshold=0.4)",
        "```",
        "",
    ]
    if config.recipe:
        lines += ["## Recipe", "", "```json", json.dumps(config.recipe, indent=2), "```", ""]
    if config.metrics:
        lines += ["## Figures", "", *_metrics_table(config.metrics), ""]
    lines += ["## Licence", "", "As the base model's: these weights are derived from it.", ""]
    return "\n".join(lines)


def _metrics_table(metrics: dict[str, object]) -> list[str]:
    rows = ["| measure | value |", "|---|---|"]
    for key, value in metrics.items():
        shown = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
        rows.append(f"| {key} | {shown} |")
    return rows
