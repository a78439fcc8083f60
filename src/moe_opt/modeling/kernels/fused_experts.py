"""The experts of a decode step in three Triton kernels: lists, gate/up with activation, down with the routing weight.

A decode step has few tokens per expert, so its time is that of reading weights, and every kernel here is laid out for
that: a program owns a tile of one expert's weights, reads it once and applies it to all tokens of that expert. Nothing
is sorted and nothing depends on the data but the loops inside a program, so the launches can be captured in a CUDA
graph.

- `_list_kernel`, a program per slot: which tokens it has and with what weight. Brownout's remap (`slot_of_expert`) is
  applied here, and assignments of one token that end in the same slot are merged into one.
- `_gate_up_kernel`, `_down_kernel`, a program per slot and tile. Slots are those of the shared storage `[E + U]`.

Rows of a token are added up in the order of its assignments: equal inputs give equal outputs. `experts_reference`
(storage.py) says the same in plain torch.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from moe_opt.errors import ConfigError
from moe_opt.modeling.kernels.storage import ACTIVATIONS, FusedWeights

MAX_TOKENS = 256
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# (tile of output columns, tile of the reduction, warps, stages) by the width of the output; see benchmarks/fused_moe.py
_TILES = {"interpreter": (32, 32, 4, 1), "narrow": (32, 128, 4, 3), "wide": (64, 128, 4, 4)}


def fused_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    storage: FusedWeights,
    slot_of_expert: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum over each token's experts, [T, H] in `hidden`'s dtype; no host sync.

    Args:
        hidden: [T, H], T at most `MAX_TOKENS`. ids: int64 [T, k], expert or slot; outside 0 ... S - 1 is dropped.
        weights: [T, k]. slot_of_expert: int64 [E], brownout's plan, applied to `ids`; -1 drops.
    """
    tokens, width = hidden.shape
    top_k = ids.shape[1]
    if tokens > MAX_TOKENS:
        raise ConfigError(f"the fused kernel takes at most {MAX_TOKENS} tokens, got {tokens}")
    slots, inner = storage.slots, storage.intermediate
    device = hidden.device
    lists = torch.empty(slots, tokens, dtype=torch.int32, device=device)
    list_weights = torch.empty(slots, tokens, dtype=torch.float32, device=device)
    counts = torch.empty(slots, dtype=torch.int32, device=device)
    activated = torch.empty(tokens * top_k, inner, dtype=hidden.dtype, device=device)
    out = torch.zeros(tokens, top_k, width, dtype=torch.float32, device=device)
    _list_kernel[(slots,)](
        ids.contiguous(), weights.contiguous(), slot_of_expert if slot_of_expert is not None else ids,
        lists, list_weights, counts, tokens, top_k, 0 if slot_of_expert is None else slot_of_expert.shape[0],
        REMAP=slot_of_expert is not None,
        TOKENS=triton.next_power_of_2(tokens), TOP_K=triton.next_power_of_2(top_k),
    )  # fmt: skip
    gate_up, down = storage.gate_up, storage.down
    row, column = (2, 1) if storage.transposed else (1, 2)  # of gate_up: output columns, reduction
    tile_n, tile_k, warps, stages = _tiles(inner)
    _gate_up_kernel[(slots, triton.cdiv(inner, tile_n))](
        hidden.contiguous(), gate_up, _bias(storage.gate_up_bias, hidden), lists, counts, activated,
        width, inner, tokens, top_k, gate_up.stride(0), gate_up.stride(row), gate_up.stride(column),
        storage.alpha, storage.limit,
        ACTIVATION=ACTIVATIONS.index(storage.activation), INTERLEAVED=storage.interleaved,
        HAS_BIAS=storage.gate_up_bias is not None, UPCAST=INTERPRETING or hidden.dtype == torch.float32,
        TILE_M=16, TILE_N=tile_n, TILE_K=tile_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    tile_n, tile_k, warps, stages = _tiles(width)
    _down_kernel[(slots, triton.cdiv(width, tile_n))](
        activated, down, _bias(storage.down_bias, hidden), lists, list_weights, counts, out,
        inner, width, tokens, down.stride(0), down.stride(row), down.stride(column),
        HAS_BIAS=storage.down_bias is not None, UPCAST=INTERPRETING or hidden.dtype == torch.float32,
        TILE_M=16, TILE_N=tile_n, TILE_K=tile_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.sum(1).to(hidden.dtype)


def _tiles(columns: int) -> tuple[int, int, int, int]:
    if INTERPRETING:
        return _TILES["interpreter"]
    return _TILES["narrow" if columns <= 1024 else "wide"]


def _bias(bias: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if bias is None else bias.contiguous()  # a kernel needs some pointer


@triton.jit
def _list_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, weights_ptr, slot_ptr, lists_ptr, list_weights_ptr, counts_ptr,
    num_tokens, top_k, num_experts,
    REMAP: tl.constexpr, TOKENS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    token = tl.arange(0, TOKENS)
    choice = tl.arange(0, TOP_K)
    inside = (token[:, None] < num_tokens) & (choice[None, :] < top_k)
    at = token[:, None] * top_k + choice[None, :]
    ids = tl.load(ids_ptr + at, mask=inside, other=-1)
    if REMAP:
        known = inside & (ids >= 0) & (ids < num_experts)
        ids = tl.load(slot_ptr + ids, mask=known, other=-1)
    mine = inside & (ids == slot)
    weight = tl.load(weights_ptr + at, mask=mine, other=0.0).to(tl.float32)
    total = tl.sum(weight, axis=1)  # one token may come through several experts of a group
    first = tl.min(tl.where(mine, choice[None, :], TOP_K), axis=1)
    has = first < TOP_K
    position = tl.cumsum(has.to(tl.int32), axis=0) - 1
    tl.store(lists_ptr + slot * num_tokens + position, token * top_k + first, mask=has)
    tl.store(list_weights_ptr + slot * num_tokens + position, total, mask=has)
    tl.store(counts_ptr + slot, tl.sum(has.to(tl.int32), axis=0))


@triton.jit
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr, weight_ptr, bias_ptr, lists_ptr, counts_ptr, out_ptr,
    width, inner, num_tokens, top_k, stride_slot, stride_column, stride_row, alpha, limit,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    count = tl.load(counts_ptr + slot)
    if count == 0:
        return
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    in_column = column < inner
    gate_column = column
    up_column = column + inner
    if INTERLEAVED:
        gate_column = 2 * column
        up_column = 2 * column + 1
    base = weight_ptr + slot.to(tl.int64) * stride_slot
    for start in range(0, count, TILE_M):
        place = start + tl.arange(0, TILE_M)
        inside = place < count
        row = tl.load(lists_ptr + slot * num_tokens + place, mask=inside, other=0)
        token = row // top_k
        gate = tl.zeros((TILE_M, TILE_N), tl.float32)
        up = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in range(0, width, TILE_K):
            reduced = k + tl.arange(0, TILE_K)
            in_row = reduced < width
            x = tl.load(
                hidden_ptr + token[:, None] * width + reduced[None, :],
                mask=inside[:, None] & in_row[None, :], other=0.0,
            )  # fmt: skip
            mask = in_row[:, None] & in_column[None, :]
            w_gate = tl.load(
                base + gate_column[None, :] * stride_column + reduced[:, None] * stride_row, mask=mask, other=0.0
            )
            w_up = tl.load(
                base + up_column[None, :] * stride_column + reduced[:, None] * stride_row, mask=mask, other=0.0
            )
            if UPCAST:
                x, w_gate, w_up = x.to(tl.float32), w_gate.to(tl.float32), w_up.to(tl.float32)
            gate = tl.dot(x, w_gate, gate, input_precision="ieee")
            up = tl.dot(x, w_up, up, input_precision="ieee")
        if HAS_BIAS:
            bias = bias_ptr + slot * 2 * inner
            gate += tl.load(bias + gate_column, mask=in_column, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + up_column, mask=in_column, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == 0:
            result = gate * tl.sigmoid(gate) * up
        elif ACTIVATION == 1:
            inside_tanh = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            # tanh(x) = 2 * sigmoid(2 * x) - 1
            result = 0.5 * gate * (2.0 * tl.sigmoid(2.0 * inside_tanh)) * up
        else:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            result = (up + 1.0) * gate * tl.sigmoid(gate * alpha)
        tl.store(
            out_ptr + row[:, None] * inner + column[None, :], result.to(out_ptr.dtype.element_ty),
            mask=inside[:, None] & in_column[None, :],
        )  # fmt: skip


@triton.jit
def _down_kernel(  # type: ignore[no-untyped-def]
    inner_ptr, weight_ptr, bias_ptr, lists_ptr, list_weights_ptr, counts_ptr, out_ptr,
    inner, width, num_tokens, stride_slot, stride_column, stride_row,
    HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    count = tl.load(counts_ptr + slot)
    if count == 0:
        return
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    in_column = column < width
    base = weight_ptr + slot.to(tl.int64) * stride_slot
    for start in range(0, count, TILE_M):
        place = start + tl.arange(0, TILE_M)
        inside = place < count
        row = tl.load(lists_ptr + slot * num_tokens + place, mask=inside, other=0)
        weight = tl.load(list_weights_ptr + slot * num_tokens + place, mask=inside, other=0.0)
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in range(0, inner, TILE_K):
            reduced = k + tl.arange(0, TILE_K)
            in_row = reduced < inner
            x = tl.load(
                inner_ptr + row[:, None] * inner + reduced[None, :],
                mask=inside[:, None] & in_row[None, :], other=0.0,
            )  # fmt: skip
            w = tl.load(
                base + column[None, :] * stride_column + reduced[:, None] * stride_row,
                mask=in_row[:, None] & in_column[None, :], other=0.0,
            )  # fmt: skip
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            total = tl.dot(x, w, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias_ptr + slot * width + column, mask=in_column, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out_ptr + row[:, None] * width + column[None, :], total * weight[:, None],
            mask=inside[:, None] & in_column[None, :],
        )  # fmt: skip
