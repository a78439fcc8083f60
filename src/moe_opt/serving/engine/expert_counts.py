"""Expert signatures per KV page: the router's choices for the tokens of a page live and die with its KV, so that a
request that finds its prefix in the cache has that prefix's counts too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from moe_opt.modeling.runtime import ForwardContext


class PageExpertCounts:
    """Counts [pages, L, E] on the model's device: a byte each where a page has fewer than 256 tokens, since no token
    counts an expert twice. That is 0.4 % of the KV beside them at Qwen3-30B-A3B's shape.

    Put into `MoERuntime.recorders` while the engine's passes run: the runtime then hands over each pass's routed
    experts, and one scatter counts them.
    """

    def __init__(self, num_pages: int, num_layers: int, num_experts: int, device: torch.device, page_size: int) -> None:
        self._shape = (num_layers, num_experts)
        self.dtype = torch.uint8 if page_size < 256 else torch.int32
        self._counts = torch.zeros(num_pages * num_layers * num_experts, dtype=self.dtype, device=device)
        self._layer = torch.arange(num_layers, device=device).view(-1, 1, 1)
        self._pages = torch.empty(0, dtype=torch.int64, device=device)
        self._ones = torch.empty(0, dtype=self.dtype, device=device)

    def begin(self, pages: torch.Tensor, fresh: Sequence[int]) -> None:
        """Before a pass. pages: int64 [T], page of each token, on the device. fresh: pages that start anew."""
        if fresh:
            self._counts.view(-1, self._shape[0] * self._shape[1])[torch.as_tensor(fresh)] = 0
        self._pages = pages

    def add(self, context: ForwardContext, routed: list[torch.Tensor | None]) -> None:
        """Count one pass. routed: per MoE layer int64 [T, k], None for a layer that did not run."""
        layers, experts = self._shape
        present = [ids for ids in routed if ids is not None]
        ids = torch.stack(present)  # [l, T, k]
        layer = self._layer if len(present) == layers else self._layer[[i is not None for i in routed]]
        index = (self._pages.view(1, -1, 1) * layers + layer) * experts + ids
        if self._ones.numel() < index.numel():
            self._ones = torch.ones(index.numel(), dtype=self.dtype, device=index.device)
        self._counts.scatter_add_(0, index.view(-1), self._ones[: index.numel()])

    def of(self, pages: Sequence[int]) -> np.ndarray:
        """int64 [L, E]: what the tokens in these pages were routed to."""
        chosen = self._counts.view(-1, *self._shape)[torch.as_tensor(pages, device=self._counts.device)]
        return chosen.sum(0, dtype=torch.int64).cpu().numpy()

    def of_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """[pages, L, E] on the CPU: the counts of each of these pages."""
        return self._counts.view(-1, *self._shape)[torch.as_tensor(pages, device=self._counts.device)].cpu()

    def put(self, pages: Sequence[int], counts: torch.Tensor | None) -> None:
        """Replace the counts of these pages, by [pages, L, E] or by nothing."""
        index = torch.as_tensor(pages, device=self._counts.device)
        new = 0 if counts is None else counts.to(self._counts.device, self.dtype)
        self._counts.view(-1, *self._shape)[index] = new
