"""The two losses of training: next-token cross-entropy computed in chunks, and per-layer load balance."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64  # rows of 8,192 fp32 logits that fit in a core's cache


def softmax_gradient_(logits: Tensor, targets: Tensor) -> Tensor:
    """Turns logits [N, vocab] into the gradient of their summed cross-entropy, in place; returns that sum."""
    total = torch.zeros((), dtype=torch.float32)
    for block, target in zip(logits.split(BLOCK), targets.split(BLOCK), strict=True):
        gradient = block.float()
        gradient -= gradient.amax(dim=-1, keepdim=True)
        total -= gradient.gather(1, target[:, None]).sum()
        gradient.exp_()
        normaliser = gradient.sum(dim=-1, keepdim=True)
        total += normaliser.log().sum()
        gradient /= normaliser
        gradient.scatter_add_(1, target[:, None], gradient.new_full((len(target), 1), -1.0))
        block.copy_(gradient)
    return total


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T` that never holds all logits.

    Full fp32 logits of one step are hundreds of megabytes, and writing them took longer than the matmul. Here each
    chunk's gradient is formed at once, in a buffer that the next chunk reuses.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        tokens, vocab = hidden.shape[0], weight.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32)
        buffer = torch.empty(chunk, vocab, dtype=hidden.dtype)
        total = torch.zeros((), dtype=torch.float32)
        for start in range(0, tokens, chunk):
            part = hidden[start : start + chunk]
            logits = torch.mm(part, weight.t(), out=buffer[: len(part)])
            total += softmax_gradient_(logits, targets[start : start + chunk])
            torch.mm(logits, weight, out=grad_hidden[start : start + chunk])
            grad_weight += logits.t() @ part
        ctx.save_for_backward(grad_hidden / tokens, grad_weight / tokens)
        return total / tokens

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_output[0], (grad_weight * grad_output[0]).to(grad_hidden.dtype), None, None


class LoadBalance:
    """Collects every router's choice during a forward pass and turns it into Switch's auxiliary loss.

    Transformers sums the choices of all layers before it compares experts, so that one layer may starve an expert
    that another layer favours. Here each layer is balanced by itself, over the whole mixed-domain batch: a domain may
    prefer some experts, but no expert is left unused.
    """

    def __init__(self, model: nn.Module) -> None:
        self.losses: list[Tensor] = []
        self.loads: list[Tensor] = []
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._collect)

    def _collect(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        if not module.training:
            return
        logits, _, chosen = outputs
        experts = logits.shape[-1]
        load = torch.bincount(chosen.reshape(-1), minlength=experts).float() / chosen.numel()
        self.losses.append(experts * (load * F.softmax(logits.float(), dim=-1).mean(0)).sum())
        self.loads.append(load)

    def pop(self) -> tuple[Tensor, Tensor]:
        """The mean loss over layers (1 when balanced) and the loads [layers, experts] since the last call."""
        loss, loads = torch.stack(self.losses).mean(), torch.stack(self.loads)
        self.losses, self.loads = [], []
        return loss, loads
