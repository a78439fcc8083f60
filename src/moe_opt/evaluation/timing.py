"""Step time beside exact output in the same minutes: the two take turns, so a busy machine slows both alike."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_opt.evaluation.texts import TokenRows


class StepTime(NamedTuple):
    step_ms: float  # median
    exact_step_ms: float  # median
    ratio: float  # median of the ratios of neighbours


@torch.no_grad()
def time_step(
    model: Any,
    rows: TokenRows,
    phase: str,
    *,
    use_exact: Callable[[], None],
    use_browned: Callable[[], None],
    batch_size: int,
    prompt: int = 32,
    repeats: int = 10,
) -> StepTime:
    """Time one whole-model step on the first batch of `rows`, exact and browned-out in turn.

    Args:
        phase: "prefill" runs [B, S]; "decode" runs one token a row after a prefill of `prompt` tokens.
        use_exact, use_browned: switch the model's brownout; the model is left browned-out.
        repeats: pairs timed, after one that is not.
    """
    ids = rows.ids[:batch_size].to(model.device)
    mask = rows.attention[:batch_size]
    attention = None if bool(mask.all()) else mask.to(model.device, torch.int64)
    cache: Any = None
    if phase == "decode":
        use_exact()
        cache = model(input_ids=ids[:, :prompt], use_cache=True, logits_to_keep=1).past_key_values

    def step() -> float:
        if phase == "decode":
            past = copy.deepcopy(cache)  # a step appends to it
            _wait(model.device)
            start = time.perf_counter()
            model(input_ids=ids[:, prompt : prompt + 1], past_key_values=past, use_cache=True)
        else:
            _wait(model.device)
            start = time.perf_counter()
            model(input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=1)
        _wait(model.device)
        return time.perf_counter() - start

    exact, browned = [], []
    for repeat in range(repeats + 1):
        use_exact()
        first = step()
        use_browned()
        second = step()
        if repeat >= 1:
            exact.append(first)
            browned.append(second)
    ratio = statistics.median(b / e for b, e in zip(browned, exact, strict=True))
    return StepTime(statistics.median(browned) * 1e3, statistics.median(exact) * 1e3, ratio)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
