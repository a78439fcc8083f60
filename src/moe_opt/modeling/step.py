"""One forward pass: what it knows about its tokens, and what it read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moe_opt.modeling.brownout import tokens_per_expert


class ForwardContext:
    """What one forward pass knows about its tokens; made by the hook on the base model or by `MoERuntime.batch`.

    Attributes:
        phase: "prefill" | "decode". valid: bool [T] or None, False for padding. exact: bool [T] or None, tokens that
        keep their experts. rows: int64 [T] or None, request of each token, -1 = ignore. shape: (B, S) of the inputs.
    """

    def __init__(
        self,
        phase: str,
        valid: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        exact: torch.Tensor | None = None,
        shape: tuple[int, int] | None = None,
    ) -> None:
        self.phase = phase
        self.valid = valid
        self.rows = rows
        self.exact = exact
        self.shape = shape
        self.open = True  # closed once the pass is over; a recomputation in backward still finds phase and padding
        self.highest_row = shape[0] - 1 if shape is not None and rows is None else None

    def valid_for(self, tokens: int, device: torch.device) -> torch.Tensor | None:
        if self.valid is None or self.valid.shape[0] != tokens:
            return None
        return self.valid.to(device)

    def exact_for(self, tokens: int, device: torch.device) -> torch.Tensor | None:
        if self.exact is None or self.exact.shape[0] != tokens:
            return None
        return self.exact.to(device)

    def request_rows(self, tokens: int, device: torch.device) -> torch.Tensor | None:
        """int64 [T], -1 for padding; None if the pass has another number of tokens than its inputs."""
        if self.rows is not None:
            rows = self.rows.to(device)
        elif self.shape is not None:
            batch, length = self.shape
            rows = torch.arange(batch, device=device).repeat_interleave(length)
        else:
            return None
        if rows.shape[0] != tokens:
            return None
        valid = self.valid_for(tokens, device)
        return rows if valid is None else torch.where(valid, rows, -1)


class StepStats:
    """What the last forward pass read. Tensors stay on the device until an attribute is read."""

    def __init__(self, context: ForwardContext, num_layers: int, num_slots: int, num_experts: int) -> None:
        self._context = context
        self._num_slots = num_slots
        self._num_experts = num_experts
        self._routed: list[torch.Tensor | None] = [None] * num_layers
        self._computed: list[torch.Tensor | None] = [None] * num_layers
        self._read: list[torch.Tensor | None] = [None] * num_layers  # under expert parallelism: what this rank ran

    @property
    def phase(self) -> str:
        return self._context.phase

    @property
    def active_experts(self) -> torch.Tensor:
        """int64 [L] on the CPU: distinct expert weights read, united ones included, shared ones and padding not. Under
        expert parallelism those that this rank read, for all ranks' tokens."""
        read = [own if own is not None else done for own, done in zip(self._read, self._computed, strict=True)]
        return self._distinct(read)

    @property
    def routed_experts(self) -> torch.Tensor:
        """int64 [L] on the CPU: distinct experts that the router chose; what exact output would have read."""
        return self._distinct(self._routed)

    @property
    def delegated_share(self) -> torch.Tensor:
        """float64 [L] on the CPU: share of (unpadded) assignments that their own expert did not compute."""
        return torch.stack(
            [self._share(routed, done) for routed, done in zip(self._routed, self._computed, strict=True)]
        ).cpu()

    def _distinct(self, layers: list[torch.Tensor | None]) -> torch.Tensor:
        return torch.stack([self._distinct_of(ids) for ids in layers]).cpu()

    def _distinct_of(self, ids: torch.Tensor | None) -> torch.Tensor:
        if ids is None:
            return torch.zeros((), dtype=torch.int64)
        valid = self._context.valid_for(ids.shape[0], ids.device)
        if ids.device.type == "cpu":  # NumPy's calls cost a fifth of torch's, and this is read after every step
            chosen = ids.numpy() if valid is None else ids.numpy()[valid.numpy()]
            inside = chosen[(chosen >= 0) & (chosen < self._num_slots)]
            return torch.tensor(np.count_nonzero(np.bincount(inside, minlength=1)))
        return (tokens_per_expert(ids, self._num_slots, valid) > 0).sum().cpu()

    def _share(self, routed: torch.Tensor | None, computed: torch.Tensor | None) -> torch.Tensor:
        if routed is None or computed is None:
            return torch.zeros((), dtype=torch.float64)
        if routed is computed:
            return torch.zeros((), dtype=torch.float64)
        if routed.device.type == "cpu" and not torch.compiler.is_compiling():
            moves = routed.numpy() != computed.numpy()
            counted = self._context.valid_for(routed.shape[0], routed.device)
            moves = moves if counted is None else moves[counted.numpy()]
            return torch.tensor(float(moves.mean()) if moves.size else 0.0, dtype=torch.float64)
        moved = (routed != computed).to(torch.float64)
        valid = self._context.valid_for(routed.shape[0], routed.device)
        if valid is None:
            return moved.mean().cpu()
        return ((moved * valid.unsqueeze(1)).sum() / (valid.sum() * routed.shape[1]).clamp_min(1)).cpu()


def holds_tokens(past: Any) -> bool:
    """Whether a KV cache has tokens. A static cache may keep its length on the device, where asking would sync; it
    only meets one-token inputs while decoding."""
    length = past.get_seq_length() if hasattr(past, "get_seq_length") else 1
    return True if isinstance(length, torch.Tensor) else length > 0


def valid_tokens(mask: Any, shape: tuple[int, int]) -> torch.Tensor | None:
    """bool [B * S] from a 2-d attention mask [B, >= S]; None where no mask speaks about single tokens."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[0] != shape[0]:
        return None
    if mask.shape[1] < shape[1]:
        return None
    return mask[:, mask.shape[1] - shape[1] :].reshape(-1).to(torch.bool)
