"""The runs that led to a checkpoint, as its recipe tells them: the last one whole, of others what was different."""

from __future__ import annotations

from typing import Any

EARLIER = "earlier"
_REMARK = "remark"  # a sentence about one run, which no other inherits


def with_history(recipe: dict[str, Any], start: dict[str, Any] | None) -> dict[str, Any]:
    """A recipe with the runs before it.

    Args: start: the recipe of the checkpoint that training began from; None where it began from the model.

    Returns: the recipe without its own `start`, and under "earlier", the latest first, the settings of each run before
        it that differ from the recipe's.
    """
    recipe = {key: value for key, value in recipe.items() if key not in ("start", EARLIER)}
    if start is None:
        return recipe
    return {**recipe, EARLIER: [_differences(run, recipe) for run in runs(start)]}


def runs(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """All runs that a recipe tells of, each whole, the latest first. Checkpoints of before hold them one in the other,
    under "start"."""
    own = {key: value for key, value in recipe.items() if key not in ("start", EARLIER)}
    start = recipe.get("start")
    shared = {key: value for key, value in own.items() if key != _REMARK}
    before = runs(start) if isinstance(start, dict) else [_merged(shared, run) for run in recipe.get(EARLIER, [])]
    return [own, *before]


def _differences(run: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in run.items():
        theirs = other.get(key)
        if isinstance(value, dict) and isinstance(theirs, dict):
            value = _differences(value, theirs)
            if value:
                found[key] = value
        elif value != theirs:
            found[key] = value
    return found


def _merged(recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(recipe)
    for key, value in changes.items():
        mine = merged.get(key)
        merged[key] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged
