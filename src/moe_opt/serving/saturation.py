"""How much work hides the expert transfers of a streaming model, measured at start (MoE-Prefill, B.4, Eq. 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from moe_opt.errors import ConfigError

_PASSES = 3
_LARGEST = 16.0


@dataclass(frozen=True)
class Calibration:
    """What a few forward passes of `tokens` tokens showed.

    Attributes:
        slowdown: max(1, max_l T_l / T_0): how many times such a pass has to be to hide the slowest transfer. T_l is a
            layer's time with its wait for weights, T_0 the time of a layer that waits for none.
        layer_seconds: T_l of all layers but the last. compute_seconds: T_0.
    """

    tokens: int
    slowdown: float
    layer_seconds: tuple[float, ...]
    compute_seconds: float

    @property
    def factor(self) -> float:
        """`slowdown` up to the next power of two, at most 16: what decides which rows run together must not hang on
        the last digit of a time."""
        return min(_LARGEST, 2.0 ** math.ceil(math.log2(self.slowdown) - 0.1))


def calibrate(model: Any, tokens: int) -> Calibration | None:
    """Time the layers of a model that streams its experts in passes of `tokens` tokens; None if it streams none.

    The first layer of the paper, whose experts are on every rank, waits for nothing. With offloading every layer may
    wait, so that T_0 is the median of the layers' times without their waits.
    """
    streaming = getattr(model.moe_opt, "async_ep", None)
    if streaming is None:
        return None
    if streaming.num_layers < 2:
        return Calibration(tokens, 1.0, (), 0.0)
    length = min(tokens, int(getattr(model.config.get_text_config(), "max_position_embeddings", tokens)))
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(max(1, tokens // length), length, dtype=torch.int64, device=device)
    ids += torch.arange(length, device=device) % int(model.config.get_text_config().vocab_size)  # experts differ
    times: list[list[tuple[float, float]]] = []
    with torch.inference_mode():
        for _ in range(_PASSES + 1):
            streaming.marks = []
            try:
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
                times.append(streaming.layer_times(streaming.marks))
            finally:
                streaming.marks = None
    times = times[1:]  # the first has nothing under way when it begins
    layers = tuple(median(found[layer][0] for found in times) for layer in range(len(times[0])))
    compute = median(seconds - waited for found in times for seconds, waited in found)
    return Calibration(tokens, max(1.0, max(layers) / compute), layers, compute)


def parse_factor(text: str) -> float | None:
    """`--saturation`: None for "auto", else the factor that the operator pins.

    Raises:
        ConfigError: neither.
    """
    if text == "auto":
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 1.0 <= factor <= _LARGEST:
        raise ConfigError(f"--saturation must be auto or a factor from 1 to {_LARGEST:.0f}, got {text!r}")
    return factor
