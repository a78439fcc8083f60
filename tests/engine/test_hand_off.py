"""A request moves from engine to engine: its KV, its expert counts, its output so far."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import TEN, finish_of, generated, make_engine, request, run, tokens_of

from moe_opt.serving.engine.types import GenerationRequest, InvalidRequestError, SamplingParams

PROMPT = tuple(range(5, 26))


def prefill(family, prompt, *, exact=False, **engine_settings):
    engine = make_engine(family, **engine_settings)
    try:
        asked = dataclasses.replace(request("p", prompt, exact=exact, max_new_tokens=1), hand_off=True)
        finish = finish_of(run(engine, asked)["p"])
        assert engine.pool.used == 0  # what was handed over is a copy
        return finish
    finally:
        engine.close()


@pytest.mark.parametrize("family", TEN)
def test_decode_goes_on_from_handed_over_kv_as_generate_does(family: str) -> None:
    handed = prefill(family, PROMPT)
    engine = make_engine(family)
    try:
        asked = dataclasses.replace(request("d", PROMPT, max_new_tokens=9), kv=handed.kv)
        outcomes = run(engine, asked)["d"]
        steps = engine.stats().prefill_tokens
    finally:
        engine.close()
    assert tokens_of(outcomes) == generated(family, PROMPT, 9)
    assert finish_of(outcomes).imported_tokens == len(PROMPT) - 1
    assert steps == 1  # the last prompt token alone, for its logits


def test_expert_counts_come_along_and_nothing_is_counted_twice() -> None:
    alone = make_engine()
    try:
        whole = finish_of(run(alone, request("a", PROMPT, max_new_tokens=9))["a"])
    finally:
        alone.close()
    handed = prefill("qwen2_moe", PROMPT)
    np.testing.assert_array_equal(handed.expert_counts, whole.expert_counts)
    engine = make_engine()
    try:
        finish = finish_of(run(engine, dataclasses.replace(request("d", PROMPT, max_new_tokens=9), kv=handed.kv))["d"])
    finally:
        engine.close()
    np.testing.assert_array_equal(finish.expert_counts, whole.expert_counts)
    np.testing.assert_array_equal(finish.decode_expert_counts, whole.decode_expert_counts)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 40),
    page_sizes=st.tuples(st.sampled_from([2, 4, 7]), st.sampled_from([2, 4, 7])),
    chunk=st.integers(1, 20),
    done=st.integers(0, 8),
    warm=st.booleans(),
    with_kv=st.booleans(),
)
def test_a_request_may_move_at_any_token(length, page_sizes, chunk, done, warm, with_kv) -> None:
    prompt = tuple((7 * i) % 80 + 3 for i in range(length))
    expected = generated("qwen2_moe", prompt, 9)
    done = min(done, len(expected) - 1)
    handed = prefill("qwen2_moe", prompt, page_size=page_sizes[0], max_batch_prefill_tokens=chunk)
    engine = make_engine(page_size=page_sizes[1], max_batch_prefill_tokens=chunk)
    try:
        if warm:
            run(engine, request("w", prompt[: length // 2 + 1], max_new_tokens=2))
        asked = GenerationRequest(
            "d", prompt, SamplingParams(max_new_tokens=9), generated_ids=expected[:done],
            kv=handed.kv if with_kv else None,
        )  # fmt: skip
        outcomes = run(engine, asked)["d"]
        text = finish_of(outcomes).generated_text
        whole = finish_of(run(engine, request("whole", prompt, max_new_tokens=9))["whole"])
    finally:
        engine.close()
    assert expected[:done] + tokens_of(outcomes) == expected
    assert [event.index for event in outcomes[:-1]] == list(range(done, len(expected)))
    assert (text, finish_of(outcomes).generated_tokens) == (whole.generated_text, whole.generated_tokens)


def test_sampling_penalties_and_stop_strings_go_on_where_they_were() -> None:
    params = SamplingParams(
        do_sample=True, temperature=1.3, seed=11, repetition_penalty=1.2, frequency_penalty=0.4, max_new_tokens=14
    )
    engine = make_engine()
    try:
        whole = run(engine, GenerationRequest("a", PROMPT, params))["a"]
        ids = tokens_of(whole)
        for done in (1, 5, len(ids) - 1):
            rest = run(engine, GenerationRequest("b", PROMPT, params, generated_ids=ids[:done]))["b"]
            assert tokens_of(rest) == ids[done:]
        text = finish_of(whole).generated_text
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        params = dataclasses.replace(params, stop=(stop,))
        stopped = run(engine, GenerationRequest("c", PROMPT, params))["c"]
        ids = tokens_of(stopped)
        rest = run(engine, GenerationRequest("d", PROMPT, params, generated_ids=ids[:-1]))["d"]
    finally:
        engine.close()
    assert finish_of(rest).generated_text == finish_of(stopped).generated_text
    assert finish_of(rest).finish_reason == "stop_sequence"


def test_a_request_that_had_ended_ends_at_once_and_one_beyond_its_end_is_refused() -> None:
    engine = make_engine()
    try:
        whole = run(engine, request("a", PROMPT, max_new_tokens=6))["a"]
        params = SamplingParams(max_new_tokens=6)
        again = run(engine, GenerationRequest("b", PROMPT, params, generated_ids=tokens_of(whole)))["b"]
        assert len(again) == 1
        assert finish_of(again).generated_text == finish_of(whole).generated_text
        with pytest.raises(InvalidRequestError, match="behind the request's end"):
            engine.add(GenerationRequest("c", PROMPT, params, generated_ids=(*tokens_of(whole), 5)))
        assert not engine.has_work
    finally:
        engine.close()


def test_kv_of_other_tokens_or_of_another_model_is_not_used() -> None:
    handed = prefill("qwen2_moe", PROMPT)
    other = (*PROMPT[:3], 77, *PROMPT[4:])
    engine = make_engine()
    try:
        outcomes = run(engine, dataclasses.replace(request("d", other, max_new_tokens=4), kv=handed.kv))["d"]
        foreign = dataclasses.replace(handed.kv, fingerprint="0" * 32)
        second = run(engine, dataclasses.replace(request("e", PROMPT, max_new_tokens=4), kv=foreign))["e"]
    finally:
        engine.close()
    assert tokens_of(outcomes) == generated("qwen2_moe", other, 4)
    assert finish_of(outcomes).imported_tokens == finish_of(second).imported_tokens == 0
    assert tokens_of(second) == generated("qwen2_moe", PROMPT, 4)


def test_many_imports_in_a_small_pool_are_all_served() -> None:
    """Some are preempted after their KV came, and are computed again."""
    prompts = [tuple((5 * i + j) % 80 + 3 for j in range(12)) for i in range(8)]
    handed = [prefill("qwen2_moe", prompt) for prompt in prompts]
    engine = make_engine(kv_pages=14)
    try:
        outcomes = run(
            engine,
            *(
                dataclasses.replace(request(str(i), prompt, max_new_tokens=10), kv=handed[i].kv)
                for i, prompt in enumerate(prompts)
            ),
        )
        assert engine.scheduler.preemptions > 0
    finally:
        engine.close()
    for i, prompt in enumerate(prompts):
        assert tokens_of(outcomes[str(i)]) == generated("qwen2_moe", prompt, 10)
