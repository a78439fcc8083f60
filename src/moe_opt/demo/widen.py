"""The same model with wider experts: zero neurons that change no output and have to be read all the same.

The demo model's experts are so small that reading them costs nothing beside the rest of a step. In the models that
people serve, reading experts is what a decode step does. Zero neurons give the demo model that property and leave
every output as it is, but for the order in which a kernel adds; so a burst shows on two cores what it shows on a large
model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from moe_opt.errors import ConfigError
from moe_opt.modeling.united import CONFIG_NAME, UnitedExperts


def widen_experts(source: str | Path, united: str | Path | None, out: str | Path, intermediate_size: int) -> Path:
    """Write a copy of a model, and of its united experts, whose experts have `intermediate_size` neurons.

    Args:
        source: folder of a Qwen2-MoE or Qwen3-MoE model. united: folder with `ways-K/` folders, or None.
        out: folder to write; the united experts go to `ways-K/` in it.

    Raises:
        ConfigError: the model's experts have no `moe_intermediate_size`, or are wider already.
    """
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source)
    old = getattr(model.config, "moe_intermediate_size", None)
    if old is None or old > intermediate_size:
        raise ConfigError(f"{source}: experts of {old} neurons cannot be widened to {intermediate_size}")
    config = type(model.config).from_dict({**model.config.to_dict(), "moe_intermediate_size": intermediate_size})
    wide = type(model)(config).to(model.dtype)
    state = {
        name: _widened(name, tensor, old, intermediate_size) if ".experts." in name else tensor
        for name, tensor in model.state_dict().items()
    }
    wide.load_state_dict(state)
    wide.generation_config = model.generation_config
    out = Path(out)
    wide.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    for folder in sorted(Path(united).glob("ways-*")) if united is not None else []:
        if not (folder / CONFIG_NAME).is_file():
            continue
        experts = UnitedExperts.from_pretrained(folder)
        experts.tensors = [
            {name: _widened(name, tensor, old, intermediate_size) for name, tensor in layer.items()}
            for layer in experts.tensors
        ]
        experts.config.fingerprint = None  # samples of the narrow weights
        experts.save_pretrained(out / folder.name, card=False)
    return out


def _widened(name: str, tensor: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """gate_up_proj [E, 2 * I, H] and down_proj [E, H, I] with zeros for the added neurons; anything else unchanged."""
    if name.endswith("gate_up_proj"):
        out = tensor.new_zeros(tensor.shape[0], 2 * new, tensor.shape[2])
        out[:, :old] = tensor[:, :old]
        out[:, new : new + old] = tensor[:, old:]
        return out
    if name.endswith("down_proj"):
        out = tensor.new_zeros(tensor.shape[0], tensor.shape[1], new)
        out[:, :, :old] = tensor
        return out
    return tensor
