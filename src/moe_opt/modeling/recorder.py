"""Records which experts the router chose, per request, layer and phase.

A layer only hands over the tensor that the router produced anyway; once per forward pass all layers together become
one scatter into the counts, on the device and without a host sync.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from moe_opt.errors import ConfigError

if TYPE_CHECKING:
    from moe_opt.modeling.runtime import MoERuntime
    from moe_opt.modeling.step import ForwardContext


class ExpertRecorder:
    """Expert counts of a batch of requests. Made by `MoERuntime.record`, used as a context manager.

    Attributes:
        counts, prefill, decode: int64 [B, L, E] on the model's device: assignments of request b's tokens to expert e
            of MoE layer l, as the router chose them, before any brownout. `counts` is the sum of the two phases.
    """

    def __init__(self, runtime: MoERuntime, num_requests: int) -> None:
        if isinstance(num_requests, bool) or not isinstance(num_requests, int) or num_requests < 1:
            raise ConfigError(f"record: num_requests must be an integer of at least 1, got {num_requests!r}")
        self._runtime = runtime
        self.num_requests = num_requests
        self._phases: dict[str, torch.Tensor] = {}

    def __enter__(self) -> ExpertRecorder:
        self._runtime.recorders.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runtime.recorders.remove(self)

    @property
    def prefill(self) -> torch.Tensor:
        return self._phase("prefill")

    @property
    def decode(self) -> torch.Tensor:
        return self._phase("decode")

    @property
    def counts(self) -> torch.Tensor:
        return self.prefill + self.decode

    def _phase(self, phase: str) -> torch.Tensor:
        if phase not in self._phases:
            shape = (self.num_requests, self._runtime.num_layers, self._runtime.num_experts)
            with torch.inference_mode(False):  # counts outlive the forward pass that makes them
                self._phases[phase] = torch.zeros(shape, dtype=torch.int64, device=self._runtime.device)
        return self._phases[phase]

    def add(self, context: ForwardContext, routed: list[torch.Tensor | None]) -> None:
        """Count one forward pass. routed: per MoE layer int64 [T, k], None for a layer that did not run."""
        counts = self._phase(context.phase)
        present = [layer for layer, ids in enumerate(routed) if ids is not None]
        if not present:
            return
        tensors = [ids for ids in routed if ids is not None]
        tokens = tensors[0].shape[0]
        if any(ids.shape != tensors[0].shape for ids in tensors):
            for layer, ids in zip(present, tensors, strict=True):
                self._scatter(counts, context, [layer], ids.to(counts.device).unsqueeze(0), ids.shape[0])
            return
        stacked = torch.stack([ids.to(counts.device, non_blocking=True) for ids in tensors])
        self._scatter(counts, context, present, stacked, tokens)

    def _scatter(
        self,
        counts: torch.Tensor,
        context: ForwardContext,
        layers: list[int],
        ids: torch.Tensor,
        tokens: int,
    ) -> None:
        """ids: int64 [len(layers), T, k]."""
        num_requests, num_layers, num_experts = counts.shape
        rows = context.request_rows(tokens, counts.device)
        if rows is None:
            return  # not a token of any request: the pass has another number of tokens than its inputs
        self._check_rows(rows, context)
        kept = (rows >= 0) & (rows < num_requests)
        layer = torch.tensor(layers, device=counts.device)
        # out-of-range rows land on bin 0 with weight 0
        base = rows.clamp(0, num_requests - 1).unsqueeze(0) * num_layers + layer.unsqueeze(1)  # [l, T]
        index = base.unsqueeze(2) * num_experts + ids
        weight = kept.to(torch.int64).view(1, -1, 1).expand_as(index)
        counts.view(-1).scatter_add_(0, index.reshape(-1), weight.reshape(-1))

    def _check_rows(self, rows: torch.Tensor, context: ForwardContext) -> None:
        highest = context.highest_row if context.highest_row is not None else -1
        if rows.device.type == "cpu" and rows.numel() and not torch.compiler.is_compiling():
            highest = max(highest, int(rows.max()))
        if highest >= self.num_requests:
            raise ConfigError(
                f"record(num_requests={self.num_requests}) met request {highest}: give the number of rows of the "
                "batch (times num_return_sequences or beams)"
            )
