"""Where the demo model is, and the texts that the demos run on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_opt.errors import ConfigError
from moe_opt.workloads.sample_texts import sample_texts

_ENVIRONMENT = "MOE_OPT_DEMO_MODEL"


def find_demo_model(given: str | None = None) -> str:
    """A folder or Hub id: what the user named, else the demo model of the checkout.

    Raises:
        ConfigError: no model named and no checkout around.
    """
    if given:
        return given
    if named := os.environ.get(_ENVIRONMENT):
        return named
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        folder = root / "examples" / "demo_model"
        if (folder / "config.json").is_file():
            return str(folder)
    raise ConfigError(
        f"no demo model here: run inside a clone of the repository, pass --model PATH, or set {_ENVIRONMENT}"
    )


def demo_texts() -> tuple[dict[str, list[str]], dict[str, str]]:
    """(domain -> texts, domain -> prompt): written for this demo, ten domains and languages."""
    return sample_texts()


def load_united(model: Any, source: str) -> Mapping[str, Any]:
    """ "8-way" -> united experts: the trained ones beside the model, else averages (and the name says so)."""
    from moe_opt.modeling.united import UnitedExperts

    folder = Path(source) / "united"
    ways = sorted(int(path.name.removeprefix("ways-")) for path in folder.glob("ways-*") if path.is_dir())
    if ways:
        return {f"{k}-way": UnitedExperts.from_pretrained(folder, ways=k) for k in ways}
    usual = [k for k in (2, 4, 8) if k < model.moe_opt.num_experts]
    return {f"{k}-way average": UnitedExperts.from_average(model, ways=k) for k in usual}
