"""Decode steps as captured CUDA graphs: one launch instead of one per kernel.

A graph is captured per padded batch size and per brownout setting (the threshold itself is a tensor that changes in
place). Padding rows have request -1, so that they are not browned out, and write to a page of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from moe_opt.modeling.runtime import StepStats
from moe_opt.serving.engine.attention import Span
from moe_opt.serving.engine.attention_cuda import VarlenAttention
from moe_opt.serving.engine.expert_counts import PageExpertCounts

Forward = Callable[[], torch.Tensor]
Capture = Callable[[Forward], tuple[Callable[[], None], torch.Tensor]]


def capture_on_cuda(forward: Forward) -> tuple[Callable[[], None], torch.Tensor]:
    """(replay, output) of `forward`, which reads and writes static tensors only."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lazily made workspaces must exist before the capture
        for _ in range(2):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()
    return graph.replay, output


@dataclasses.dataclass(slots=True)
class _Graph:
    tokens: torch.Tensor  # int64 [4, B]: ids, positions, slots, pages
    rows: torch.Tensor  # int64 [B]: row of each token, -1 for padding
    exact: torch.Tensor | None  # bool [B]
    buffers: dict[str, torch.Tensor]
    replay: Callable[[], None]
    logits: torch.Tensor
    stats: StepStats


class DecodeGraphs:
    """Captures on first use, replays afterwards.

    Args:
        model: the engine's. backend: its attention. counts: its page counts or None.
        max_pages: of one sequence. scratch_page: where padding rows write. capture: `capture_on_cuda`.
    """

    def __init__(
        self,
        model: Any,
        backend: VarlenAttention,
        counts: PageExpertCounts | None,
        device: torch.device,
        *,
        max_batch: int,
        max_pages: int,
        scratch_page: int,
        page_size: int,
        capture: Capture = capture_on_cuda,
    ) -> None:
        self._model = model
        self._backend = backend
        self._counts = counts
        self._device = device
        self._sizes = sorted(
            {*(2**power for power in range(max_batch.bit_length()) if 2**power < max_batch), max_batch}
        )
        self._max_pages = max_pages
        self._scratch = (0, 0, scratch_page * page_size, scratch_page)
        self._capture = capture
        self._graphs: dict[Hashable, _Graph] = {}

    def clear(self) -> None:
        """Forget every graph: weights have moved."""
        self._graphs.clear()

    def run(
        self,
        packed: torch.Tensor,
        spans: Sequence[Span],
        exact: torch.Tensor | None,
        setting: Hashable,
        fresh_pages: Sequence[int],
    ) -> tuple[torch.Tensor, StepStats]:
        """Logits [n, V] and statistics of a decode step.

        Args:
            packed: int64 [4, n] on the CPU: ids, positions, slots, pages. spans: n single-token spans.
            exact: bool [n] on the CPU or None. setting: everything about brownout that changes the kernels launched.
        """
        count = packed.shape[1]
        size = next(size for size in self._sizes if size >= count)
        key = (size, exact is not None, setting)
        graph = self._graphs.get(key)
        new = graph is None
        if graph is None:
            graph = self._empty(size, exact is not None)
        if new:
            made = graph
            self._load(graph, packed, spans, exact)
            graph.tokens[3].fill_(self._scratch[3])  # warming up must not count this step's tokens
            if self._counts is not None:
                self._counts.begin(graph.tokens[3], ())
            graph.replay, graph.logits = self._capture(lambda: self._forward(made))
            graph.stats = self._model.moe_opt.last_step
            self._graphs[key] = graph
        self._load(graph, packed, spans, exact)
        if self._counts is not None:
            self._counts.begin(graph.tokens[3], fresh_pages)
        graph.replay()
        return graph.logits[:count], graph.stats

    def _empty(self, size: int, with_exact: bool) -> _Graph:
        device = self._device
        empty = torch.empty(0, device=device)
        return _Graph(
            tokens=torch.zeros(4, size, dtype=torch.int64, device=device),
            rows=torch.full((size,), -1, dtype=torch.int64, device=device),
            exact=torch.zeros(size, dtype=torch.bool, device=device) if with_exact else None,
            buffers=self._backend.static_buffers(size, self._max_pages),
            replay=lambda: None,
            logits=empty,
            stats=None,  # type: ignore[arg-type]
        )

    def _load(
        self,
        graph: _Graph,
        packed: torch.Tensor,
        spans: Sequence[Span],
        exact: torch.Tensor | None,
    ) -> None:
        size, count = graph.rows.shape[0], packed.shape[1]
        tokens = torch.tensor(self._scratch, dtype=torch.int64).unsqueeze(1).repeat(1, size)
        tokens[:, :count] = packed
        graph.tokens.copy_(tokens)
        rows = torch.full((size,), -1, dtype=torch.int64)
        rows[:count] = torch.arange(count)
        graph.rows.copy_(rows)
        if graph.exact is not None and exact is not None:
            graph.exact[:count].copy_(exact)
        self._backend.begin_static(spans, graph.buffers, graph.tokens[2])

    def _forward(self, graph: _Graph) -> torch.Tensor:
        runtime = self._model.moe_opt
        with torch.inference_mode(), runtime.batch(graph.rows, "decode", exact=graph.exact):
            return self._model(
                input_ids=graph.tokens[0].unsqueeze(0), position_ids=graph.tokens[1].unsqueeze(0), use_cache=False
            ).logits[0]
