"""A request's KV outside the pages of an engine: what prefill hands to decode."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import torch

from moe_opt.modeling.united import weight_fingerprint

_SAMPLED = 8  # numbers of each parameter that enter the fingerprint


@dataclasses.dataclass(frozen=True, slots=True)
class KVState:
    """KV of the first tokens of a sequence, on the CPU.

    Attributes:
        tokens: the ids that it belongs to, from the start of the prompt; N of them.
        keys, values: per attention layer, [N, kv_heads, dim] in the cache's dtype; values are stored as wide as keys.
        counts: integers [pages, L, E], the router's choices per page of `page_size` tokens; None if nobody counted.
        page_size: of the engine that computed it.
        browned_from: first token computed under brownout, None where all is exact.
        lowest_threshold: of the steps that computed it.
        fingerprint: of the model, see `fingerprint_of`; KV of another model is no use.
    """

    tokens: tuple[int, ...]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    counts: torch.Tensor | None
    page_size: int
    browned_from: int | None
    lowest_threshold: float
    fingerprint: str

    @property
    def nbytes(self) -> int:
        tensors = [*self.keys, *self.values] + ([self.counts] if self.counts is not None else [])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def covers(self, tokens: list[int]) -> bool:
        """Whether it is the KV of the beginning of `tokens`."""
        return len(self.tokens) <= len(tokens) and tuple(tokens[: len(self.tokens)]) == self.tokens


def fingerprint_of(model: Any, layers: list[Any]) -> str:
    """Equal for engines whose KV is interchangeable: the same layers, dtype, config and weights.

    Weights are sampled, a few numbers of each parameter: enough to tell a fine-tuned checkpoint from its base. Experts
    count as a whole, whichever of them this process holds. United experts are left out; what they had a part in is
    marked by `KVState.browned_from`.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = model.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "moe_opt", "dtype", "torch_dtype"):
        config.pop(key, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for layer in layers:
        digest.update(f"{layer.kv_heads}/{layer.key_dim}/{layer.value_dim}/{layer.dtype}".encode())
    runtime = model.moe_opt
    experts = runtime.base_fingerprint or weight_fingerprint(runtime.layers)
    digest.update(json.dumps(experts).encode())
    own = {id(parameter) for _, module in runtime.layers for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if "united" in name or parameter.device.type == "meta" or id(parameter) in own:
            continue
        sample = parameter.detach().reshape(-1)[:_SAMPLED].to("cpu", torch.float32)
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()
