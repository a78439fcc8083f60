"""An experts function for training on CPU: grouped_mm over groups padded to a few sizes.

oneDNN compiles a kernel for every new matrix size, about 2 ms each. A router gives every expert another number of
tokens at every step, so stock grouped_mm spends over half of a training step in compiling. Groups padded to multiples
of 128 rows meet few sizes; the kernels are then found in oneDNN's cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

ROWS = 128


class Dispatch(torch.autograd.Function):
    """Copies tokens [T, H] to the rows of their experts; `slots` [T, k] says where each of a token's copies went."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return hidden.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        # embedding_bag gathers and adds in one pass, ten times as fast as index_select and sum.
        return F.embedding_bag(slots, grad_output[0], mode="sum"), None, None


class Collect(torch.autograd.Function):
    """The inverse of `Dispatch`: the sum [T, H] of each token's k rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return F.embedding_bag(slots, rows, mode="sum")

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (source,) = ctx.saved_tensors
        return grad_output[0].index_select(0, source), None, None


def padded_grouped_mm(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What `grouped_mm` computes, with each expert's rows padded to a multiple of `ROWS`."""
    tokens, top_k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=self.num_experts)
    padded = (counts + ROWS - 1) // ROWS * ROWS
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    rows = torch.arange(len(chosen)) + shift[chosen[order]]

    assignment = torch.zeros(int(ends[-1]), dtype=torch.long)
    used = torch.zeros(len(assignment), 1, dtype=hidden_states.dtype)
    assignment[rows], used[rows] = order, 1
    slots = torch.empty_like(chosen)
    slots[order] = rows
    slots = slots.view(tokens, top_k)
    source = assignment // top_k

    offsets = ends.to(torch.int32)
    x = Dispatch.apply(hidden_states, source, slots)
    x = F.grouped_mm(x, self.gate_up_proj.mT, offs=offsets)
    # The narrow activations take the router's weights, which are zero on padding: so are then all its gradients.
    x = self._apply_gate(x) * (top_k_weights.reshape(-1, 1).index_select(0, assignment) * used)
    x = F.grouped_mm(x, self.down_proj.mT, offs=offsets)
    return Collect.apply(x, source, slots)


ALL_EXPERTS_FUNCTIONS.register("padded_grouped_mm", padded_grouped_mm)
