"""What is scored. No torch, so that routers and schemas may name it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ScoreItem(NamedTuple):
    """A prompt and its choices as token ids, none of them empty."""

    prompt: Sequence[int]
    choices: Sequence[Sequence[int]]
