"""Attention over the paged KV pool, on Transformers' attention interface.

The engine runs a model on one packed row `[1, T]`: the tokens of all sequences of a step, behind one another. Every
layer's attention comes here, writes its new keys and values to their slots of the pool, and reads those of each
sequence. Which tokens belong to whom is in the `Span`s of the step.

`RunsAttention` is for CPUs: neighbouring pages are read as a view of the pool, without a copy, and a run that several
sequences share (a common prefix) is read once for all of them. `GatherAttention` copies each sequence's tokens
together and works anywhere. `VarlenAttention` (attention_cuda.py) is paged FlashAttention inside torch.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from moe_opt.errors import MoEOptError

IMPLEMENTATION = "moe_opt_paged"
LAYER_ATTRIBUTE = "_moe_opt_kv_layer"

# Set while `kv_pool.find_layers` looks which modules attend: called with (module, key, value, sinks, other arguments).
_TRIAL: contextvars.ContextVar[Callable[..., None] | None] = contextvars.ContextVar("moe_opt_kv_trial", default=None)

_MAX_RUNS = 4  # a sequence in more pieces than this is copied together: each piece costs a kernel call per layer


@dataclasses.dataclass(slots=True)
class Span:
    """One sequence in a step: `count` new tokens at rows `start` to `start + count - 1` of the packed batch.

    Attributes:
        length: tokens with KV, the new ones included. pages: all pages of the sequence, in order.
        runs: (first slot, number of tokens) of neighbouring slots; together they are the `length` tokens.
    """

    start: int
    count: int
    length: int
    pages: Sequence[int]
    runs: list[tuple[int, int]]


@dataclasses.dataclass(slots=True)
class LayerKV:
    """One attention layer's part of the pool.

    Attributes:
        keys, values: [slots, kv_heads, head_dim], in memory by head or by slot as the backend likes it; values that
            are narrower than keys (MLA) are padded to the keys' width, `value_dim` is their own.
        window: how many positions back it sees, its own included; None for all.
    """

    index: int
    keys: torch.Tensor
    values: torch.Tensor
    value_dim: int
    window: int | None
    owner: AttentionBackend


class AttentionBackend(Protocol):
    """Attention of one step. `begin` is called once per step, `attend` once per layer. `by_head`: memory order of the
    pool, heads outermost or slots outermost."""

    by_head: bool

    def begin(self, spans: Sequence[Span], slots: torch.Tensor) -> None:
        """spans: in row order and without gaps. slots: int64 [T], where each new token's KV goes."""
        ...

    def attend(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query: [T, heads, dim]. key, value: [T, kv_heads, dim]. sinks: [heads]. Returns [T, heads, value_dim]."""
        ...  # fmt: skip


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered as "moe_opt_paged". query: [1, heads, T, dim]; key, value: [1, kv_heads, T, dim]."""
    layer = module.__dict__.get(LAYER_ATTRIBUTE)
    if layer is None:
        trial = _TRIAL.get()
        if trial is None:
            raise MoEOptError(
                "attention 'moe_opt_paged' runs inside the engine only: use model.set_attn_implementation('sdpa') for "
                "anything else"
            )
        trial(module, key, value, s_aux, kwargs)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = layer.owner.attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale, s_aux
    )
    return out.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None  # spans say who sees whom


AttentionInterface.register(IMPLEMENTATION, paged_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def store(layer: LayerKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write new keys and values, [T, kv_heads, dim], to their slots."""
    layer.keys.index_copy_(0, slots, key)
    if layer.value_dim == layer.values.shape[2]:
        layer.values.index_copy_(0, slots, value)
    else:
        layer.values[:, :, : layer.value_dim].index_copy_(0, slots, value)


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Add a sink to each head's softmax denominator after the fact. out: [..., dim]; lse, sinks: [...] of out."""
    return out * torch.sigmoid(lse.float() - sinks.float()).unsqueeze(-1).to(out.dtype)


# ---------------------------------------------------------------------------------------------- CPU


@dataclasses.dataclass(slots=True)
class _Piece:
    """Consecutive slots that the same single-token rows read; `rows` index the decode part of the batch."""

    first: int
    tokens: int
    rows: list[int]


@dataclasses.dataclass(slots=True)
class _DecodePlan:
    """How a step's single-token spans read the pool.

    Attributes:
        gathered: (row, slots) of sequences in too many pieces. simple: every row is one piece of its own; then `order`
            has the rows by place in the pool and `cuts` the lengths of gap, piece, gap, piece, ..., rest.
    """

    pieces: list[_Piece]
    gathered: list[tuple[int, torch.Tensor]]
    simple: bool
    order: list[int]
    cuts: list[int]


_flash = torch._scaled_dot_product_flash_attention_for_cpu  # (out, logsumexp), heads may share keys


class RunsAttention:
    """Reads runs of neighbouring slots in place, one kernel call per run and layer; partial results of one row are
    merged by their log-sum-exp. Work depends on a sequence's own length alone."""

    by_head = True  # one head's keys lie in a row: 15 % faster to read than with the other heads' in between

    def __init__(self) -> None:
        self._singles: list[Span] = []
        self._chunks: list[Span] = []
        self._slots = torch.empty(0, dtype=torch.int64)
        self._plans: dict[int | None, _DecodePlan] = {}

    def begin(self, spans: Sequence[Span], slots: torch.Tensor) -> None:
        leading = 0
        while leading < len(spans) and spans[leading].count == 1:
            leading += 1
        self._singles, self._chunks = list(spans[:leading]), list(spans[leading:])
        self._slots = slots
        self._plans = {}

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
        singles = len(self._singles)
        parts = []
        if singles:
            parts.append(self._decode(layer, query[:singles], scale, sinks))
        for span in self._chunks:
            rows = query[span.start : span.start + span.count]
            parts.append(self._chunk(layer, span, rows, scale, sinks))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if out.shape[2] == layer.value_dim else out[:, :, : layer.value_dim]

    # ------------------------------------------------------------- one token per sequence

    def _decode(self, layer: LayerKV, query: torch.Tensor, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
        rows, heads, dim = query.shape
        kv_heads = layer.keys.shape[1]
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)  # heads that share keys become rows of a matrix
        plan = self._plans.get(layer.window)
        if plan is None:
            plan = self._plans[layer.window] = self._plan(layer.window, layer.keys.shape[0])
        if not plan.simple or sinks is not None:
            return self._decode_in_pieces(layer, plan, grouped, scale, sinks)
        # All views are cut in one call each: made one by one they cost a tenth of a step.
        queries = grouped.split(1)
        keys = layer.keys.transpose(0, 1).unsqueeze(0).split(plan.cuts, 2)[1::2]
        values = layer.values.transpose(0, 1).unsqueeze(0).split(plan.cuts, 2)[1::2]
        outs = list(queries)
        for row, key, value in zip(plan.order, keys, values, strict=True):
            outs[row] = _flash(queries[row], key, value, scale=scale)[0]
        return torch.cat(outs).reshape(rows, heads, dim)

    def _decode_in_pieces(
        self, layer: LayerKV, plan: _DecodePlan, grouped: torch.Tensor, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        rows, kv_heads, group, dim = grouped.shape
        found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(rows)]
        for piece in plan.pieces:
            keys = layer.keys[piece.first : piece.first + piece.tokens].transpose(0, 1).unsqueeze(0)
            values = layer.values[piece.first : piece.first + piece.tokens].transpose(0, 1).unsqueeze(0)
            query = grouped[piece.rows].transpose(0, 1).reshape(1, kv_heads, len(piece.rows) * group, dim)
            out, lse = _flash(query, keys, values, scale=scale)
            out = out.reshape(kv_heads, len(piece.rows), group, dim)
            lse = lse.reshape(kv_heads, len(piece.rows), group)
            for position, row in enumerate(piece.rows):
                found[row].append((out[:, position], lse[:, position]))
        for row, slots in plan.gathered:
            keys = layer.keys.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            values = layer.values.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            out, lse = _flash(grouped[row : row + 1], keys, values, scale=scale)
            found[row].append((out[0], lse[0]))
        merged = [parts[0] if len(parts) == 1 else _merge(parts) for parts in found]
        result = torch.stack([out for out, _ in merged])
        if sinks is not None:
            lse = torch.stack([lse for _, lse in merged])
            result = with_sinks(result, lse, sinks.view(1, kv_heads, group))
        return result.reshape(rows, kv_heads * group, dim)

    def _plan(self, window: int | None, slots: int) -> _DecodePlan:
        pieces: dict[tuple[int, int], _Piece] = {}
        gathered = []
        for row, span in enumerate(self._singles):
            runs = visible_runs(span, span.length - window if window is not None else 0)
            if len(runs) > _MAX_RUNS:
                gathered.append((row, _slots_of(runs)))
                continue
            for first, tokens in runs:
                pieces.setdefault((first, tokens), _Piece(first, tokens, [])).rows.append(row)
        in_order = sorted(pieces.values(), key=lambda piece: piece.first)
        cuts, at = [], 0
        for piece in in_order:
            cuts += [piece.first - at, piece.tokens]
            at = piece.first + piece.tokens
        order = [row for piece in in_order for row in piece.rows]
        simple = sorted(order) == list(range(len(self._singles))) == list(range(len(in_order))) and min(cuts) >= 0
        return _DecodePlan(list(pieces.values()), gathered, simple, order, [*cuts, slots - at])

    # ------------------------------------------------------------- several tokens of one sequence

    def _chunk(
        self, layer: LayerKV, span: Span, query: torch.Tensor, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        heads = query.shape[1]
        before = span.length - span.count
        first = 0 if layer.window is None else max(0, before + 1 - layer.window)
        keys, values = self._read(layer, span, first)
        query = query.transpose(0, 1).unsqueeze(0)
        if layer.window is not None and span.length > layer.window:
            at = torch.arange(before, span.length).unsqueeze(1)
            seen = torch.arange(first, span.length).unsqueeze(0)
            hidden = (seen > at) | (seen <= at - layer.window)
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
            out, lse = _flash(query, keys, values, attn_mask=mask[None, None], scale=scale)
        elif before == 0:
            out, lse = _flash(query, keys, values, is_causal=True, scale=scale)
        else:  # what came before is visible to all of the chunk, the chunk itself is causal
            past = _flash(query, keys[:, :, :before], values[:, :, :before], scale=scale)
            own = _flash(query, keys[:, :, before:], values[:, :, before:], is_causal=True, scale=scale)
            out, lse = _merge([past, own])
        if sinks is not None:
            out = with_sinks(out, lse, sinks.view(1, heads, 1))
        return out[0].transpose(0, 1)

    def _read(self, layer: LayerKV, span: Span, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_heads, length - first, dim] of a sequence's tokens from `first` on."""
        runs = visible_runs(span, first)
        if len(runs) == 1:
            start, tokens = runs[0]
            pair = layer.keys[start : start + tokens], layer.values[start : start + tokens]
        else:
            slots = _slots_of(runs)
            pair = layer.keys.index_select(0, slots), layer.values.index_select(0, slots)
        return pair[0].transpose(0, 1).unsqueeze(0), pair[1].transpose(0, 1).unsqueeze(0)


def visible_runs(span: Span, first: int) -> list[tuple[int, int]]:
    """The span's runs from its token `first` on."""
    if first <= 0:
        return span.runs
    out = []
    for start, tokens in span.runs:
        if first < tokens:
            out.append((start + first, tokens - first))
            first = 0
        else:
            first -= tokens
    return out


def _slots_of(runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.arange(start, start + tokens) for start, tokens in runs])


def _merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over keys that were attended to in parts. Each: out [..., dim], logsumexp [...]."""
    lses = torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp()
    out = sum(out.float() * weight.unsqueeze(-1) for (out, _), weight in zip(parts, weights, strict=True))
    assert isinstance(out, torch.Tensor)
    return out.to(parts[0][0].dtype), lse


# ---------------------------------------------------------------------------------------------- anywhere


class GatherAttention:
    """Copies each sequence's keys and values together, padded to the longest of its kind (single tokens, chunks), and
    attends in plain torch. The reference of the others, and the fallback where they do not run."""

    by_head = False

    def __init__(self, device: torch.device, page_size: int) -> None:
        self._device = device
        self._page_size = page_size
        self._groups: list[_Gathered] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def begin(self, spans: Sequence[Span], slots: torch.Tensor) -> None:
        self._slots = slots
        singles = [span for span in spans if span.count == 1]
        chunks = [span for span in spans if span.count > 1]
        groups = ([singles] if singles else []) + [[chunk] for chunk in chunks]
        self._groups = [self._gathered(group) for group in groups]

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
        tokens, heads, dim = query.shape
        kv_heads = layer.keys.shape[1]
        out = query.new_empty(tokens, heads, layer.value_dim)
        for group in self._groups:
            batch, count = group.rows.shape
            keys = layer.keys[group.slots]  # [B, L, kv_heads, dim]
            values = layer.values[group.slots][..., : layer.value_dim]
            q = query[group.rows].reshape(batch, count, kv_heads, heads // kv_heads, dim)
            scores = torch.einsum("bckgd,blkd->bkgcl", q.float(), keys.float()) * scale
            hidden = group.seen > group.at
            if layer.window is not None:
                hidden = hidden | (group.seen <= group.at - layer.window)
            scores = scores.masked_fill(hidden.view(batch, 1, 1, count, -1), float("-inf"))
            if sinks is None:
                weights = scores.softmax(-1)
            else:
                sink = sinks.float().view(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, count, -1)
                weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
            result = torch.einsum("bkgcl,blkd->bckgd", weights, values.float())
            out[group.rows] = result.reshape(batch, count, heads, -1).to(out.dtype)
        return out

    def _gathered(self, spans: list[Span]) -> _Gathered:
        size = self._page_size
        longest = max(span.length for span in spans)
        pages = torch.zeros(len(spans), -(-longest // size), dtype=torch.int64)
        for row, span in enumerate(spans):
            held = -(-span.length // size)
            pages[row, :held] = torch.as_tensor(span.pages[:held])
        slots = (pages.unsqueeze(2) * size + torch.arange(size)).flatten(1)[:, :longest]
        count = spans[0].count
        start = torch.tensor([span.start for span in spans])
        before = torch.tensor([span.length - span.count for span in spans])
        steps = torch.arange(count)
        return _Gathered(
            slots=slots.to(self._device),
            rows=(start.unsqueeze(1) + steps).to(self._device),
            at=(before.unsqueeze(1) + steps).unsqueeze(2).to(self._device),
            seen=torch.arange(longest).view(1, 1, -1).to(self._device),
        )


@dataclasses.dataclass(slots=True)
class _Gathered:
    slots: torch.Tensor  # int64 [B, L]: pool slot of each token; padding points at slots that `seen` hides
    rows: torch.Tensor  # int64 [B, count]: rows of the packed batch
    at: torch.Tensor  # int64 [B, count, 1]: position of each query
    seen: torch.Tensor  # int64 [1, 1, L]: position of each key
