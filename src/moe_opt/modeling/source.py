"""Telling a folder from a Hub id before a library turns a typing error into a riddle."""

from __future__ import annotations

import os
from pathlib import Path

from moe_opt.errors import ConfigError


def require_source(source: str) -> str:
    """Return `source` if it can name a model: a folder that exists, or something of a Hub id's form.

    Raises:
        ConfigError: a path that leads nowhere, or a folder without `config.json`.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{source} is no model folder: it has no config.json")
        return source
    if path.exists() or os.path.isabs(source) or source.startswith((".", "~")) or source.count("/") > 1:
        raise ConfigError(f"no model folder at {source}")
    return source
