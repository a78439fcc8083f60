"""Paged FlashAttention inside torch (`torch.nn.attention.varlen.varlen_attn` with a block table), for CUDA.

Not every torch has it, and kernels differ in the dtypes, head sizes and page sizes that they take: attention_choice.py
tries it first.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from moe_opt.serving.engine.attention import (
    LayerKV,
    Span,
    store,
    with_sinks,
)

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
except ImportError:  # torch 2.11 builds without it
    varlen_attn = None


class VarlenAttention:
    """One kernel call per layer for all sequences of a step, which finds their pages through a block table.

    `begin` makes fresh tensors for each step. `begin_static` fills tensors of a fixed size in place, so that a captured
    decode step finds them where it left them.
    """

    by_head = False

    def __init__(self, device: torch.device, page_size: int) -> None:
        self._device = device
        self._page_size = page_size
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._tables = torch.empty(0, dtype=torch.int32, device=device)
        self._lengths = self._starts = self._tables
        self._longest_query = self._longest_key = 0

    @staticmethod
    def supported() -> bool:
        """Whether this torch has the kernel with a block table."""
        return varlen_attn is not None and "block_table" in inspect.signature(varlen_attn).parameters

    def begin(self, spans: Sequence[Span], slots: torch.Tensor) -> None:
        self._slots = slots
        pages = max(-(-span.length // self._page_size) for span in spans)
        tables = torch.zeros(len(spans), pages, dtype=torch.int32)
        self._fill(tables, spans)
        self._tables = tables.to(self._device, non_blocking=True)
        self._lengths = self._int32([span.length for span in spans])
        self._starts = self._int32([*(span.start for span in spans), spans[-1].start + spans[-1].count])
        self._longest_query = max(span.count for span in spans)
        self._longest_key = max(span.length for span in spans)

    def static_buffers(self, rows: int, pages: int) -> dict[str, torch.Tensor]:
        """Block tables, lengths and query starts for `rows` single-token spans of at most `pages` pages."""
        return {
            "tables": torch.zeros(rows, pages, dtype=torch.int32, device=self._device),
            "lengths": torch.ones(rows, dtype=torch.int32, device=self._device),
            "starts": torch.arange(rows + 1, dtype=torch.int32, device=self._device),
        }

    def begin_static(self, spans: Sequence[Span], buffers: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        """As `begin`, for single-token spans. Rows beyond `spans` are padding: they read slot 0, one token long, and
        what they give is thrown away. slots: the static tensor of KV slots."""
        tables, lengths = buffers["tables"], buffers["lengths"]
        filled = torch.zeros(tables.shape, dtype=torch.int32)
        self._fill(filled, spans)
        tables.copy_(filled, non_blocking=True)
        padding = tables.shape[0] - len(spans)
        lengths.copy_(torch.tensor([span.length for span in spans] + [1] * padding, dtype=torch.int32))
        self._slots, self._tables, self._lengths, self._starts = slots, tables, lengths, buffers["starts"]
        self._longest_query = 1
        self._longest_key = tables.shape[1] * self._page_size

    def attend(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        store(layer, self._slots, key, value)
        slots, kv_heads, dim = layer.keys.shape
        paged = (slots // self._page_size, self._page_size, kv_heads, dim)
        extra: dict[str, Any] = {"return_aux": AuxRequest(lse=True)} if sinks is not None else {}
        out = varlen_attn(
            query.contiguous(),
            layer.keys.view(paged),
            layer.values.view(paged),
            self._starts,
            None,
            self._longest_query,
            self._longest_key,
            scale=scale,
            window_size=(-1 if layer.window is None else layer.window - 1, 0),
            enable_gqa=query.shape[1] != kv_heads,
            seqused_k=self._lengths,
            block_table=self._tables,
            **extra,
        )
        if sinks is not None:
            out, lse = out
            out = with_sinks(out, lse, sinks.view(1, -1))
        return out[..., : layer.value_dim]

    def _fill(self, tables: torch.Tensor, spans: Sequence[Span]) -> None:
        for row, span in enumerate(spans):
            held = -(-span.length // self._page_size)
            tables[row, :held] = torch.as_tensor(span.pages[:held], dtype=torch.int32)

    def _int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self._device, non_blocking=True)
