"""Attention over pages against attention over plain tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.errors import MoEOptError
from moe_opt.modeling.kernels.native import library
from moe_opt.serving.engine.attention import (
    AttentionBackend,
    GatherAttention,
    LayerKV,
    RunsAttention,
    Span,
    paged_attention,
)
from moe_opt.serving.engine.attention_native import NativeAttention

PAGE = 4
HEADS, KV_HEADS, DIM = 4, 2, 8


def plain_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None, sinks: Any
) -> torch.Tensor:
    """query [n, H, D] at the last n positions of keys, values [L, K, D]; float64 and element by element."""
    count, length = query.shape[0], keys.shape[0]
    out = torch.empty(count, HEADS, values.shape[2], dtype=torch.float64)
    for row in range(count):
        at = length - count + row
        first = 0 if window is None else max(0, at - window + 1)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = keys[first : at + 1, kv].double() @ query[row, head].double() * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: at + 1 - first]
            out[row, head] = weights @ values[first : at + 1, kv].double()
    return out


class Scene:
    """Sequences with random KV in a random arrangement of pages, some sharing their first pages."""

    def __init__(self, seed: int, singles: int, chunks: int, scattered: bool, value_dim: int) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        lengths = [(rng.randint(1, 40), 1) for _ in range(singles)]
        lengths += [
            (before + count, count)
            for before, count in ((rng.randint(0, 20), rng.randint(1, 15)) for _ in range(chunks))
        ]
        free = list(range(12 * (singles + chunks)))
        if scattered:
            rng.shuffle(free)
        self.keys = torch.zeros(len(free) * PAGE, KV_HEADS, DIM)
        self.values = torch.zeros(len(free) * PAGE, KV_HEADS, DIM)
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.spans: list[Span] = []
        self.value_dim = value_dim
        slots: list[int] = []
        new_keys, new_values = [], []
        start = 0
        shared: list[int] = []
        for length, count in lengths:
            pages = [free.pop(0) for _ in range(-(-length // PAGE))]
            full_before = (length - count) // PAGE
            if shared and rng.random() < 0.5:
                reuse = min(full_before, len(shared))
                pages[:reuse] = shared[:reuse]
            keys, values = torch.randn(length, KV_HEADS, DIM), torch.randn(length, KV_HEADS, value_dim)
            where = [pages[i // PAGE] * PAGE + i % PAGE for i in range(length)]
            for index in range(length - count):
                if pages[index // PAGE] in shared:
                    keys[index], values[index] = self.keys[where[index]], self.values[where[index], :, :value_dim]
                self.keys[where[index]] = keys[index]
                self.values[where[index], :, :value_dim] = values[index]
            self.history.append((keys, values))
            self.spans.append(Span(start, count, length, pages, runs_of(pages, length)))
            slots += where[length - count :]
            new_keys.append(keys[length - count :])
            new_values.append(values[length - count :])
            start += count
            if not shared:
                shared = pages[:full_before]
        self.slots = torch.tensor(slots)
        self.new_keys, self.new_values = torch.cat(new_keys), torch.cat(new_values)
        self.query = torch.randn(start, HEADS, DIM)

    def layer(self, backend: AttentionBackend, window: int | None) -> LayerKV:
        return LayerKV(0, self.keys.clone(), self.values.clone(), self.value_dim, window, backend)


def runs_of(pages: list[int], length: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index, page in enumerate(pages):
        tokens = min(PAGE, length - index * PAGE)
        if runs and runs[-1][0] + runs[-1][1] == page * PAGE:
            runs[-1] = (runs[-1][0], runs[-1][1] + tokens)
        else:
            runs.append((page * PAGE, tokens))
    return runs


def make_backend(name: str) -> AttentionBackend:
    if name == "runs":
        return RunsAttention()
    if name == "gather":
        return GatherAttention(torch.device("cpu"), PAGE)
    loaded = library.load()
    if loaded is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    return NativeAttention(loaded)


@settings(max_examples=90, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    singles=st.integers(0, 4),
    chunks=st.integers(0, 2),
    scattered=st.booleans(),
    window=st.sampled_from([None, 1, 3, 10]),
    sinks=st.booleans(),
    value_dim=st.sampled_from([DIM, 5]),
    backend=st.sampled_from(["runs", "gather", "native"]),
)
def test_equals_plain_attention(
    seed: int,
    singles: int,
    chunks: int,
    scattered: bool,
    window: int | None,
    sinks: bool,
    value_dim: int,
    backend: str,
) -> None:
    if not singles + chunks:
        return
    scene = Scene(seed, singles, chunks, scattered, value_dim)
    paged = make_backend(backend)
    sink = torch.randn(HEADS) if sinks else None
    paged.begin(scene.spans, scene.slots)
    layer = scene.layer(paged, window)
    out = paged.attend(layer, scene.query, scene.new_keys, scene.new_values, 0.3, sink)
    for span, (keys, values) in zip(scene.spans, scene.history, strict=True):
        rows = slice(span.start, span.start + span.count)
        expected = plain_attention(scene.query[rows], keys, values, 0.3, window, sink)
        torch.testing.assert_close(out[rows].double(), expected, atol=2e-6, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 3, 4, 5, 8]),
    dims=st.sampled_from([(64, 64), (24, 24), (80, 70), (33, 33)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_the_native_kernel_over_blocks_heads_and_dtypes(
    lengths: list[int], group: int, dims: tuple[int, int], dtype: torch.dtype, threads: int, seed: int
) -> None:
    backend = make_backend("native")
    torch.manual_seed(seed)
    (dim, value_dim), rows = dims, len(lengths)
    starts = [sum(lengths[:row]) for row in range(rows)]
    pool = [torch.randn(sum(lengths), KV_HEADS, dim).to(dtype) for _ in range(2)]
    query, key = torch.randn(rows, KV_HEADS * group, dim).to(dtype), torch.randn(rows, KV_HEADS, dim).to(dtype)
    value = torch.randn(rows, KV_HEADS, value_dim).to(dtype)
    spans = [Span(row, 1, length, [], [(starts[row], length)]) for row, length in enumerate(lengths)]
    backend.begin(spans, torch.tensor([start + length - 1 for start, length in zip(starts, lengths, strict=True)]))
    layer = LayerKV(0, pool[0], pool[1], value_dim, None, backend)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = backend.attend(layer, query, key, value, dim**-0.5, None)
    finally:
        torch.set_num_threads(before)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        keys, values = pool[0][start : start + length], pool[1][start : start + length, :, :value_dim]
        assert torch.equal(keys[-1], key[row])
        assert torch.equal(values[-1], value[row])
        weights = torch.einsum(
            "kgd,lkd->kgl", query[row].double().view(KV_HEADS, group, dim), keys.double() * dim**-0.5
        ).softmax(-1)
        expected = torch.einsum("kgl,lkd->kgd", weights, values.double()).reshape(KV_HEADS * group, value_dim)
        close = {"atol": 5e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 1e-2}
        torch.testing.assert_close(out[row].double(), expected, **close)


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200)), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 3]),
    dims=st.sampled_from([(64, 64), (32, 16), (128, 128), (96, 48), (40, 40)]),  # the last goes torch's way
    window=st.sampled_from([None, 1, 30, 129, 500]),
    sinks=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_chunks_in_bfloat16_over_blocks_runs_and_windows(
    chunks: list[tuple[int, int]],
    group: int,
    dims: tuple[int, int],
    window: int | None,
    sinks: bool,
    threads: int,
    seed: int,
) -> None:
    backend = make_backend("native")
    torch.manual_seed(seed)
    (dim, value_dim), heads = dims, KV_HEADS * group
    lengths = [before + count for before, count in chunks]
    # each sequence in two runs, the second half of its slots in front of the first half of the pool
    total = sum(lengths)
    pool = [torch.randn(2 * total, KV_HEADS, dim).to(torch.bfloat16) for _ in range(2)]
    spans, slots, where, row, at = [], [], [], 0, 0
    for length, (_, count) in zip(lengths, chunks, strict=True):
        cut = length // 2
        runs = [run for run in ((total + at, cut), (at, length - cut)) if run[1]]
        own = [slot for first, tokens in runs for slot in range(first, first + tokens)]
        spans.append(Span(row, count, length, [], runs))
        slots += own[length - count :]
        where.append(own)
        row, at = row + count, at + length
    query = torch.randn(row, heads, dim).to(torch.bfloat16)
    key, value = (torch.randn(row, KV_HEADS, width).to(torch.bfloat16) for width in dims)
    sink = torch.randn(heads) if sinks else None
    backend.begin(spans, torch.tensor(slots))
    layer = LayerKV(0, pool[0], pool[1], value_dim, window, backend)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = backend.attend(layer, query, key, value, dim**-0.5, sink)
    finally:
        torch.set_num_threads(before)
    for span, own in zip(spans, where, strict=True):
        rows = slice(span.start, span.start + span.count)
        keys, values = pool[0][own].double(), pool[1][own][:, :, :value_dim].double()
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), keys) * dim**-0.5
        seen, position = torch.arange(span.length), torch.arange(span.length - span.count, span.length).unsqueeze(1)
        hidden = (seen > position) | (seen <= position - (window or span.length))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sink is not None:
            scores = torch.cat([scores, sink.double().view(heads, 1, 1).expand(-1, span.count, 1)], 2)
        weights = scores.softmax(2)[:, :, : span.length]
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(out[rows].double(), expected, atol=1.5e-2, rtol=1e-2)


def test_a_shared_run_is_read_once_for_all_that_share_it() -> None:
    backend = RunsAttention()
    spans = [Span(row, 1, 12, [0, 1, 4 + row], [(0, 8), (16 + 4 * row, 4)]) for row in range(3)]
    backend.begin(spans, torch.arange(3))
    plan = backend._plan(None, 64)
    assert [(piece.first, piece.tokens, piece.rows) for piece in plan.pieces] == [
        (0, 8, [0, 1, 2]), (16, 4, [0]), (20, 4, [1]), (24, 4, [2]),
    ]  # fmt: skip


def test_a_row_reads_its_own_past_and_nothing_that_grows_with_the_others() -> None:
    backend = RunsAttention()
    lengths = [3, 400, 17]
    spans = [Span(row, 1, length, [], [(1000 * row, length)]) for row, length in enumerate(lengths)]
    backend.begin(spans, torch.arange(3))
    plan = backend._plan(None, 4096)
    assert plan.simple
    assert {piece.rows[0]: piece.tokens for piece in plan.pieces} == dict(enumerate(lengths))
    assert [piece.tokens for piece in backend._plan(10, 4096).pieces] == [3, 10, 10]


def test_outside_an_engine_the_attention_says_what_to_do() -> None:
    with pytest.raises(MoEOptError, match="set_attn_implementation"):
        paged_attention(torch.nn.Module(), *(torch.zeros(1, 1, 1, 1),) * 3, None)
