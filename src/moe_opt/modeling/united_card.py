"""The README.md (Hub model card) of a united-experts checkpoint, generated from its config."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_opt.modeling.united import UnitedExperts


def model_card(united: UnitedExperts) -> str:
    """Markdown with the Hub's YAML header: base model, shape, recipe, figures, usage, licence."""
    config = united.config
    base = config.base_model or "unknown"
    header = ["---", "library_name: moe_opt", "tags: [moe_opt, united-experts, mixture-of-experts]"]
    if config.base_model and config.base_model.count("/") == 1:
        header.append(f"base_model: {config.base_model}")
    model = config.recipe.get("model")
    if isinstance(model, dict) and model.get("licence"):
        header.append(f"license: {model['licence']}")
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
    if config.metrics:
        lines += ["## Figures", "", *_figures(config.metrics), ""]
    if config.recipe:
        lines += ["## Recipe", "", *_data_line(config.recipe)]
        lines += ["```json", json.dumps(config.recipe, indent=2), "```", ""]
    lines += ["## Licence", "", _licence(config.recipe), ""]
    return "\n".join(lines)


def _figures(metrics: dict[str, Any]) -> list[str]:
    """The brownout table, if it was measured, and the single values. Long lists stay in the config file."""
    lines = []
    rows, exact = metrics.get("brownout"), metrics.get("exact")
    if rows and exact:
        lines += [
            f"Next-token accuracy on {metrics['held_out_sequences']} held-out sequences of "
            f"{metrics['sequence_length']} tokens, {metrics['batch_size']} to a forward pass:",
            "",
            "| threshold | accuracy | relative loss | perplexity | experts read a layer |",
            "|---|---|---|---|---|",
            f"| 1 (exact) | {exact['accuracy']:.4f} | 0 % | {exact['perplexity']:.2f} | {exact['experts_read']:.1f} |",
        ]
        lines += [
            f"| {row['threshold']:g} | {row['accuracy']:.4f} | {100 * row['relative_loss']:.2f} % | "
            f"{row['perplexity']:.2f} | {row['experts_read']:.1f} |"
            for row in rows
        ]
        lines.append("")
    told = {"brownout", "exact", "error_per_expert", "held_out_sequences", "sequence_length", "batch_size"}
    single = {key: value for key, value in metrics.items() if not (rows and key in told) and key != "error_per_expert"}
    if single:
        lines += ["| measure | value |", "|---|---|"]
        lines += [
            f"| {key} | {f'{value:.4g}' if isinstance(value, float) else json.dumps(value)} |"
            for key, value in single.items()
        ]
    return lines


def _data_line(recipe: dict[str, Any]) -> list[str]:
    data = recipe.get("data")
    if not isinstance(data, dict):
        return []
    source = ", ".join(data.get("data_files") or [str(data.get("path"))])
    return [f"Trained on {source} ({data.get('split')} split), in packed sequences of {data.get('length')} tokens.", ""]


def _licence(recipe: dict[str, Any]) -> str:
    model = recipe.get("model")
    named = model.get("licence") if isinstance(model, dict) else None
    return f"As the base model's{f' ({named})' if named else ''}: these weights are derived from it."
