"""Greedy tokens are `generate`'s, for every family, whatever happens around a request."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_engines import TEN, finish_of, generated, make_engine, make_model, request, run, tokens_of

from moe_opt import UnitedExperts, attach_united_experts, detach_united_experts
from moe_opt.errors import UnsupportedModelError
from moe_opt.serving.engine.types import FinishEvent, TokenEvent

LONGEST = 16


def prompts(seed: int = 1) -> list[tuple[int, ...]]:
    """Twelve prompts of 1 to 40 tokens, most of which share a beginning with another one."""
    rng = random.Random(seed)
    base = tuple(rng.randrange(3, 96) for _ in range(24))
    own = [tuple(rng.randrange(3, 96) for _ in range(length)) for length in (1, 2, 4, 7, 11, 16)]
    return [*own, base, *(base[: 4 * index] + tail for index, tail in enumerate(own[1:], start=1))]


@pytest.mark.parametrize("family", [*TEN, "deepseek_v2"])
def test_equals_generate_with_chunks_preemption_and_prefix_hits(family: str) -> None:
    engine = make_engine(family, kv_pages=20, max_batch_prefill_tokens=7)
    try:
        outcomes = run(engine, *(request(str(i), p, max_new_tokens=LONGEST) for i, p in enumerate(prompts())))
        stats = engine.stats()
    finally:
        engine.close()
    for index, prompt in enumerate(prompts()):
        assert tokens_of(outcomes[str(index)]) == generated(family, prompt, LONGEST), f"prompt {index}"
        finish = finish_of(outcomes[str(index)])
        assert finish.prompt_tokens == len(prompt)
        assert finish.finish_reason == ("length" if finish.generated_tokens == LONGEST else "eos_token")
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert stats.used_pages == 0


SCHEDULES = st.fixed_dictionaries(
    {
        "family": st.sampled_from(TEN),
        "page_size": st.sampled_from([1, 3, 4, 16]),
        "spare_pages": st.integers(0, 30),
        "max_batch_size": st.integers(1, 6),
        "max_batch_prefill_tokens": st.integers(1, 40),
        "decode_between_prefills": st.integers(0, 3),
        "prefix_caching": st.booleans(),
        # (prompt, output tokens, step of submission, steps until it is cancelled or None)
        "requests": st.lists(
            st.tuples(
                st.integers(0, 11),
                st.integers(1, LONGEST),
                st.integers(0, 30),
                st.one_of(st.none(), st.none(), st.integers(0, 20)),
            ),
            min_size=1,
            max_size=8,
        ),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEDULES)
def test_equals_generate_under_any_schedule(schedule: dict[str, Any]) -> None:
    pages = -(-(40 + LONGEST) // schedule["page_size"]) + schedule["spare_pages"]
    engine = make_engine(
        schedule["family"],
        page_size=schedule["page_size"],
        kv_pages=pages,
        max_batch_size=schedule["max_batch_size"],
        max_batch_prefill_tokens=schedule["max_batch_prefill_tokens"],
        decode_between_prefills=schedule["decode_between_prefills"],
        prefix_caching=schedule["prefix_caching"],
    )
    outcomes: dict[str, list[Any]] = {str(i): [] for i in range(len(schedule["requests"]))}
    cancelled = set()
    try:
        step = 0
        while engine.has_work or any(at >= step for _, _, at, _ in schedule["requests"]):
            for index, (prompt, count, at, cancel_after) in enumerate(schedule["requests"]):
                if at == step:
                    engine.add(request(str(index), prompts()[prompt], max_new_tokens=count))
                if cancel_after is not None and at + cancel_after == step and engine.cancel(str(index)):
                    cancelled.add(str(index))
            for name, outcome in engine.step():
                assert name not in cancelled
                outcomes[name].append(outcome)
            engine.check()
            step += 1
            assert step < 2000, "the schedule does not end"
        assert engine.stats().used_pages == 0
    finally:
        engine.close()
    for index, (prompt, count, _, _) in enumerate(schedule["requests"]):
        found = outcomes[str(index)]
        expected = generated(schedule["family"], prompts()[prompt], LONGEST)[:count]
        if str(index) in cancelled:
            assert tokens_of(found) == expected[: len(found)]
            assert all(isinstance(event, TokenEvent) for event in found)
        else:
            assert isinstance(found[-1], FinishEvent), found[-1]
            assert tokens_of(found) == expected


BROWNOUTS = st.fixed_dictionaries(
    {
        "kv_pages": st.integers(18, 50),
        "max_batch_prefill_tokens": st.integers(3, 40),
        # (prompt, output tokens, step of submission, whether it asks for exact output)
        "requests": st.lists(
            st.tuples(st.integers(0, 11), st.integers(1, LONGEST), st.integers(0, 20), st.booleans()),
            min_size=2,
            max_size=7,
        ),
        # (step, threshold, strategy, phase, ways to exchange or 0)
        "changes": st.lists(
            st.tuples(
                st.integers(0, 30),
                st.sampled_from([0.0, 0.3, 0.7, 1.0]),
                st.sampled_from(["partial", "full", "reroute", "top-k"]),
                st.sampled_from([None, "prefill", "decode"]),
                st.sampled_from([0, 0, 2, 4]),
            ),
            min_size=1,
            max_size=6,
        ),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(BROWNOUTS)
def test_exact_requests_equal_generate_under_any_brownout(case: dict[str, Any]) -> None:
    model = make_model("qwen2_moe")
    attach_united_experts(model, UnitedExperts.from_average(model, ways=4))
    engine = make_engine(
        "qwen2_moe",
        kv_pages=case["kv_pages"],
        max_batch_prefill_tokens=case["max_batch_prefill_tokens"],
    )
    outcomes: dict[str, list[Any]] = {str(i): [] for i in range(len(case["requests"]))}
    try:
        step = 0
        while engine.has_work or any(at >= step for _, _, at, _ in case["requests"]):
            for at, threshold, strategy, phase, ways in case["changes"]:
                if at == step:
                    engine.set_brownout(threshold=threshold, strategy=strategy, phase=phase)
                    if ways:
                        engine.swap_united(UnitedExperts.from_average(model, ways=ways))
            for index, (prompt, count, at, exact) in enumerate(case["requests"]):
                if at == step:
                    engine.add(request(str(index), prompts()[prompt], exact=exact, max_new_tokens=count))
            for name, outcome in engine.step():
                outcomes[name].append(outcome)
            engine.check()
            step += 1
            assert step < 2000, "the schedule does not end"
    finally:
        engine.close()
        model.moe_opt.set_brownout(threshold=1.0, strategy="partial")
        detach_united_experts(model)
    for index, (prompt, count, _, exact) in enumerate(case["requests"]):
        finish = finish_of(outcomes[str(index)])
        if exact:
            assert tokens_of(outcomes[str(index)]) == generated("qwen2_moe", prompts()[prompt], LONGEST)[:count]
            assert not finish.browned
        else:
            assert finish.browned == (finish.lowest_threshold < 1)


@pytest.mark.parametrize("family", ["lfm2_moe", "nemotron_h"])
def test_hybrids_are_refused_by_name_with_the_reason(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{family}.*KV pages"):
        make_engine(family)


def test_a_refused_or_closed_model_keeps_its_own_attention() -> None:
    model = make_model("lfm2_moe")
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError):
        make_engine("lfm2_moe")
    assert model.config._attn_implementation == before
    model = make_model("qwen2_moe")
    before = model.config._attn_implementation
    make_engine("qwen2_moe").close()
    assert model.config._attn_implementation == before
