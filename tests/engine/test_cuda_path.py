"""What CUDA would run, as far as a CPU can tell: the arguments of paged FlashAttention and the static tensors of
captured decode steps. torch's kernel and CUDA's graphs are stood in for by what their documentation says they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_engines import finish_of, generated, make_engine, make_model, request, run, tokens_of

from moe_opt import UnitedExperts, attach_united_experts, detach_united_experts
from moe_opt.serving.engine import attention_choice, attention_cuda, model_runner
from moe_opt.serving.engine.attention import GatherAttention, LayerKV, RunsAttention, Span
from moe_opt.serving.engine.attention_choice import choose_backend
from moe_opt.serving.engine.attention_cuda import VarlenAttention
from moe_opt.serving.engine.cuda_graphs import DecodeGraphs, Forward

CPU = torch.device("cpu")
PROMPTS = [tuple(range(5, 26)), tuple(range(60, 40, -1)), (7,), tuple(range(30, 70))]


def documented_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn` as its docstring has it: causal from the bottom right."""
    assert seqused_k is not None
    assert block_table is not None
    assert cu_seq_k is None
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert key.shape == value.shape
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert max_q >= int((cu_seq_q[1:] - cu_seq_q[:-1]).max())
    assert max_k >= int(seqused_k.max())
    page = key.shape[1]
    out, lses = torch.zeros_like(query), torch.zeros(query.shape[:2])
    for row, length in enumerate(seqused_k.tolist()):
        first, last = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        pages = block_table[row, : -(-length // page)].long()
        keys, values = (pool[pages].flatten(0, 1)[:length].repeat_interleave(query.shape[1] // key.shape[2], 1)
                        for pool in (key, value))  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), keys.float()) * (scale or 1)
        at = torch.arange(length - (last - first), length).unsqueeze(1)
        seen = torch.arange(length).unsqueeze(0)
        hidden = seen > at + window_size[1]
        if window_size[0] >= 0:
            hidden = hidden | (seen < at - window_size[0])
        scores = scores.masked_fill(hidden, float("-inf"))
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.float()).to(out.dtype)
        lses[first:last] = scores.logsumexp(-1).T
    return (out, lses) if return_aux is not None else out


def replayed(forward: Forward) -> tuple[Callable[[], None], torch.Tensor]:
    """What capture and replay do to tensors: the same kernels on the same addresses, output included."""
    forward()
    output = forward().clone()

    def replay() -> None:
        output.copy_(forward())

    return replay, output


@pytest.fixture(name="varlen")
def _varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines attend through `VarlenAttention` over the documented kernel."""
    monkeypatch.setattr(attention_cuda, "varlen_attn", documented_varlen_attn)
    monkeypatch.setattr(
        model_runner, "choose_backend", lambda device, page_size, *rest: VarlenAttention(device, page_size)
    )


def with_graphs(engine: Any) -> DecodeGraphs:
    """Give an engine captured decode steps, whose captures are replayed on the CPU."""
    runner = engine.runner
    runner.graphs = DecodeGraphs(
        runner.model, runner.backend, runner.counts, CPU,
        max_batch=engine.config.max_batch_size,
        max_pages=-(-runner.max_total_tokens // engine.config.page_size),
        scratch_page=runner.num_pages,
        page_size=engine.config.page_size,
        capture=replayed,
    )  # fmt: skip
    return runner.graphs


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3", "gemma4_text"])
def test_tokens_are_generates_through_block_tables(varlen: None, family: str) -> None:
    engine = make_engine(family, kv_pages=24, max_batch_prefill_tokens=7)
    try:
        outcomes = run(engine, *(request(str(i), p, max_new_tokens=10) for i, p in enumerate(PROMPTS)))
    finally:
        engine.close()
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(outcomes[str(index)]) == generated(family, prompt, 10)


def test_captured_decode_steps_give_the_same_tokens_and_the_same_signatures(varlen: None) -> None:
    requests = [request(str(i), p, max_new_tokens=6 + 2 * i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    results = []
    for captured in (False, True):
        engine = make_engine(kv_pages=40, max_batch_size=3)
        try:
            graphs = with_graphs(engine) if captured else None
            results.append(run(engine, *requests))
            if graphs is not None:
                assert {size for size, _, _ in graphs._graphs} == {1, 2, 3}
        finally:
            engine.close()
    eager, replay = results
    for name in eager:
        assert tokens_of(eager[name]) == tokens_of(replay[name])
        one, other = finish_of(eager[name]), finish_of(replay[name])
        assert (one.expert_counts == other.expert_counts).all()
        assert (one.decode_expert_counts == other.decode_expert_counts).all()


def test_captured_steps_follow_brownout_and_exchanged_united_experts(varlen: None) -> None:
    model = make_model()
    attach_united_experts(model, UnitedExperts.from_average(model, ways=4))
    engine = make_engine(kv_pages=40, max_batch_size=3)
    try:
        graphs = with_graphs(engine)
        engine.add(request("exact", PROMPTS[0], exact=True, max_new_tokens=14))
        engine.add(request("browned", PROMPTS[1], max_new_tokens=14, ignore_eos=True))
        engine.add(request("browned too", PROMPTS[3], max_new_tokens=14, ignore_eos=True))
        outcomes: dict[str, list[Any]] = {"exact": [], "browned": [], "browned too": []}
        for step in range(100):
            if step == 4:
                engine.set_brownout(threshold=0.0, phase="decode")
            if step == 8:
                engine.swap_united(UnitedExperts.from_average(model, ways=2))
                assert not graphs._graphs
            for name, outcome in engine.step():
                outcomes[name].append(outcome)
            if not engine.has_work:
                break
    finally:
        engine.close()
        model.moe_opt.set_brownout(threshold=1.0)
        detach_united_experts(model)
    assert tokens_of(outcomes["exact"]) == generated("qwen2_moe", PROMPTS[0], 14)
    for name in ("browned", "browned too"):
        finish = finish_of(outcomes[name])
        assert finish.lowest_threshold == 0.0
        assert 0 < finish.browned_share < 1


def test_the_kernel_is_used_only_where_it_computes_the_right_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (4, 4, 2, 8, torch.float32)
    monkeypatch.setattr(attention_cuda, "varlen_attn", documented_varlen_attn)
    backend = VarlenAttention(CPU, 4)
    assert attention_choice._difference(backend, GatherAttention(CPU, 4), *shapes, CPU) < 1e-5

    class OffByOne(VarlenAttention):
        def attend(self, layer: LayerKV, *args: Any) -> torch.Tensor:
            return super().attend(layer, *args).roll(1, 0)

    assert attention_choice._difference(OffByOne(CPU, 4), GatherAttention(CPU, 4), *shapes, CPU) > 2e-2
    assert isinstance(choose_backend(CPU, *shapes), RunsAttention)


def test_padding_rows_of_a_captured_step_touch_nobody(varlen: None) -> None:
    backend = VarlenAttention(CPU, 4)
    buffers = backend.static_buffers(4, 3)
    slots = torch.tensor([5, 40, 40, 40])
    backend.begin_static([Span(0, 1, 6, [0, 1], [])], buffers, slots)
    assert buffers["tables"].tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert buffers["lengths"].tolist() == [6, 1, 1, 1]
    assert buffers["starts"].tolist() == [0, 1, 2, 3, 4]
