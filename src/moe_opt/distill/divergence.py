"""Divergence of two models' next-token distributions from their last hidden states, without holding all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

_CHUNK_VALUES = {"cpu": 1 << 19}  # logits that exist at a time: what a core's cache holds, or what a GPU likes
_CHUNK_VALUES_ELSEWHERE = 1 << 28


class HeadDivergence:
    """KL(exact || browned out), mean over positions, plus `label_weight` times the text's cross-entropy.

    Models whose head is a plain matrix go through `_ChunkedDivergence`, at the cost of one chunk of logits. Families
    that scale or cap their logits are found by comparison, and go through their own forward.
    """

    def __init__(self, model: Any, label_weight: float) -> None:
        self.model = model
        self.label_weight = label_weight
        self.head = model.get_output_embeddings()
        self.chunked = self._head_is_a_matrix()

    @torch.no_grad()
    def _head_is_a_matrix(self) -> bool:
        if self.head is None or type(self.head) is not torch.nn.Linear:
            return False
        device = self.model.get_input_embeddings().weight.device
        probe = torch.arange(3, 11, device=device).unsqueeze(0)
        own = self.model(probe, use_cache=False).logits
        states = self.model.base_model(probe, use_cache=False).last_hidden_state
        plain = self.head(states.to(self.head.weight.device))
        return bool(torch.allclose(own.float(), plain.float(), atol=1e-3, rtol=1e-3))

    def states(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states [B, S, H], or logits [B, S, V] where the head is not a plain matrix."""
        if self.chunked:
            return self.model.base_model(input_ids, use_cache=False).last_hidden_state
        return self.model(input_ids, use_cache=False).logits

    def __call__(self, browned: torch.Tensor, exact: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Scalar loss. browned, exact: what `states` gave; input_ids int64 [B, S], the text itself."""
        labels = torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=-1).reshape(-1).to(browned.device)
        mine = browned.reshape(-1, browned.shape[-1])
        theirs = exact.reshape(-1, exact.shape[-1])
        if self.chunked:
            weight, bias = self.head.weight, self.head.bias
            return _ChunkedDivergence.apply(
                mine.to(weight.device), theirs.to(weight.device), weight, bias, labels.to(weight.device),
                self.label_weight,
            )  # fmt: skip
        log_mine = mine.float().log_softmax(-1)
        loss = functional.kl_div(log_mine, theirs.float().log_softmax(-1), reduction="sum", log_target=True)
        loss = loss / len(labels)
        if self.label_weight:
            loss = loss + self.label_weight * functional.nll_loss(
                log_mine, labels, ignore_index=-1, reduction="sum"
            ) / len(labels)
        return loss


class _ChunkedDivergence(torch.autograd.Function):
    """Forms each chunk's gradient at once; only the gradient of the hidden states is kept (the head is frozen)."""

    @staticmethod
    def forward(
        ctx: Any,
        mine: torch.Tensor,
        theirs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        label_weight: float,
    ) -> torch.Tensor:
        tokens = len(mine)
        gradient = torch.empty_like(mine)
        total = torch.zeros((), device=mine.device, dtype=torch.float32)
        chunk = max(1, _CHUNK_VALUES.get(mine.device.type, _CHUNK_VALUES_ELSEWHERE) // len(weight))
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            exact, log_exact_sum, share = _softmax(functional.linear(theirs[part], weight, bias))
            browned, log_sum, slope = _softmax(functional.linear(mine[part], weight, bias))
            total += log_sum.sum() - log_exact_sum.sum()
            total += torch.dot(exact.view(-1), share.view(-1)) - torch.dot(browned.view(-1), share.view(-1))
            if label_weight:
                chosen = labels[part]
                known = (chosen >= 0).to(slope.dtype)
                at_label = browned.gather(1, chosen.clamp_min(0)[:, None])[:, 0]
                total += label_weight * ((log_sum - at_label) * known).sum()
                # (slope - share) + label_weight * (slope of the known rows - 1 at their labels)
                slope *= (1 + label_weight * known)[:, None]
                slope.scatter_add_(1, chosen.clamp_min(0)[:, None], -label_weight * known[:, None])
            slope -= share
            gradient[part] = slope.to(weight.dtype) @ weight / tokens
        ctx.save_for_backward(gradient)
        return total / tokens

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None, None, None


def _softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 logits less their maximum [T, V], the log of the sum of their exponentials [T], and the softmax [T, V].

    Each of the passes over T x V values is as dear as the head's product on a CPU: one exponential, the rest in place.
    """
    shifted = logits.float()
    shifted -= shifted.amax(-1, keepdim=True)
    share = shifted.exp()
    total = share.sum(-1)
    share *= total.reciprocal()[:, None]
    return shifted, total.log(), share
