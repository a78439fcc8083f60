"""`RunsAttention` with the one-token rows of a step in a single call of ours per layer (native/attention.cpp), and
chunks of prompts in one each (native/prefill.cpp).

A decode step of 32 sequences is otherwise 32 attention calls a layer, and rows that share a prefix are merged piece by
piece. Here a call writes the new keys and values and attends for all rows. Chunks go torch's way where the processor
has no tiles for them and in other dtypes than bfloat16.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import torch

from moe_opt.errors import MoEOptError
from moe_opt.modeling.kernels.native import library
from moe_opt.serving.engine.attention import LayerKV, RunsAttention, Span, visible_runs

WIDEST_VALUE = 1024  # kWidest of attention.cpp


@dataclasses.dataclass(slots=True)
class _Runs:
    """What the one-token rows read: row r the runs begins[r] ... begins[r + 1] - 1. All int64."""

    begins: torch.Tensor
    first: torch.Tensor
    tokens: torch.Tensor


class NativeAttention(RunsAttention):
    """Work depends on a sequence's own length alone. Made by attention_choice.py with the loaded library."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        super().__init__()
        self._attend = loaded.moe_opt_attend
        self._prefill = loaded.moe_opt_prefill
        self._runs: dict[int | None, _Runs] = {}
        self._chunk_runs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._layers: dict[tuple[int, int], library.KV] = {}

    @staticmethod
    def takes(dtype: torch.dtype, value_dim: int) -> bool:
        return dtype in library.DTYPES and value_dim <= WIDEST_VALUE

    def begin(self, spans: Sequence[Span], slots: torch.Tensor) -> None:
        super().begin(spans, slots.contiguous())
        self._runs = {}
        self._chunk_runs = {}

    def attend(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens, heads, _ = query.shape
        runs = self._runs.get(layer.window)
        if runs is None:
            runs = self._runs[layer.window] = self._runs_of(layer.window)
        out = query.new_empty(tokens, heads, layer.value_dim)
        singles = len(self._singles)
        denominators = None if sinks is None else sinks.float().contiguous()
        query, key, value = (_rows_contiguous(tensor) for tensor in (query, key, value))
        failed = self._attend(
            self._layer(layer), _rows(query), _rows(key), _rows(value), self._slots.data_ptr(), tokens, singles, heads,
            runs.begins.data_ptr(), runs.first.data_ptr(), runs.tokens.data_ptr(), scale,
            None if denominators is None else denominators.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MoEOptError(f"attention kernel: values of {layer.value_dim} dimensions; it takes {WIDEST_VALUE}")
        for span in self._chunks:
            rows = slice(span.start, span.start + span.count)
            if not self._prefill_chunk(layer, span, query[rows], scale, denominators, out[rows]):
                out[rows] = self._chunk(layer, span, query[rows], scale, sinks)[:, :, : layer.value_dim]
        return out

    def _prefill_chunk(
        self,
        layer: LayerKV,
        span: Span,
        query: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> bool:
        """Write a chunk's attention to `out`; False where the kernel has no form for it."""
        if query.dtype != torch.bfloat16:
            return False
        read = 0 if layer.window is None else max(0, span.length - span.count + 1 - layer.window)
        runs = self._chunk_runs.get((span.start, read))
        if runs is None:
            found = torch.tensor(visible_runs(span, read), dtype=torch.int64)
            runs = self._chunk_runs[span.start, read] = found[:, 0].contiguous(), found[:, 1].contiguous()
        first, tokens = runs
        failed = self._prefill(
            self._layer(layer), _rows(query), query.shape[1], span.count, span.length, read, first.data_ptr(),
            tokens.data_ptr(), len(first), layer.window or 0, scale, None if sinks is None else sinks.data_ptr(),
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return not failed

    def _runs_of(self, window: int | None) -> _Runs:
        begins, first, tokens = [0], [], []
        for span in self._singles:
            for start, count in visible_runs(span, span.length - window if window is not None else 0):
                first.append(start)
                tokens.append(count)
            begins.append(len(first))
        return _Runs(*(torch.tensor(values, dtype=torch.int64) for values in (begins, first, tokens)))

    def _layer(self, layer: LayerKV) -> library.KV:
        known = (layer.keys.data_ptr(), layer.values.data_ptr())
        if known not in self._layers:
            slot, head, _ = layer.keys.stride()
            assert layer.keys.stride() == layer.values.stride()
            _, kv_heads, dim = layer.keys.shape
            number = library.DTYPES[layer.keys.dtype]
            self._layers[known] = library.KV(*known, slot, head, kv_heads, dim, layer.value_dim, number)
        return self._layers[known]


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _rows(tensor: torch.Tensor) -> library.Rows:
    return library.Rows(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))
