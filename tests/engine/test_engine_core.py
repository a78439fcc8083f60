"""The engine step by step: prefixes, brownout, signatures, bounds, failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_engines import (
    finish_of,
    generated,
    make_engine,
    make_model,
    make_tokenizer,
    request,
    run,
    tokens_of,
)

from moe_opt import UnitedExperts, attach_united_experts, detach_united_experts
from moe_opt.errors import ConfigError
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.engine import Engine
from moe_opt.serving.engine.types import (
    GenerationError,
    GenerationRequest,
    InvalidRequestError,
    OverloadedError,
    SamplingParams,
    StepReport,
    TokenEvent,
)

PROMPT = tuple(range(5, 26))
OTHER = tuple(range(60, 40, -1))


@pytest.fixture(name="browned_engine")
def _browned_engine() -> Any:
    """An engine with averaged united experts attached; exact until a test says otherwise."""
    model = make_model("qwen2_moe")
    attach_united_experts(model, UnitedExperts.from_average(model, ways=4))
    engine = make_engine("qwen2_moe")
    yield engine
    engine.close()
    model.moe_opt.set_brownout(threshold=1.0, strategy="partial", keep="count", layers=None)
    detach_united_experts(model)


# ---------------------------------------------------------------------------------------------- prefixes


def test_a_second_request_reuses_the_full_pages_of_the_first() -> None:
    engine = make_engine()
    try:
        first = run(engine, request("a", PROMPT, max_new_tokens=5))
        again = run(engine, request("b", PROMPT, max_new_tokens=5))
        longer = run(engine, request("c", PROMPT + OTHER, max_new_tokens=5))
        changed = run(engine, request("d", (PROMPT[0] + 1, *PROMPT[1:]), max_new_tokens=5))
    finally:
        engine.close()
    assert finish_of(first["a"]).cached_tokens == 0
    assert finish_of(again["b"]).cached_tokens == 20
    assert finish_of(longer["c"]).cached_tokens == 20
    assert finish_of(changed["d"]).cached_tokens == 0
    assert tokens_of(first["a"]) == tokens_of(again["b"])


def test_generated_tokens_are_reused_by_the_next_turn_of_a_chat() -> None:
    engine = make_engine()
    try:
        first = run(engine, request("a", PROMPT, max_new_tokens=12, ignore_eos=True))
        turn = PROMPT + tokens_of(first["a"]) + OTHER
        second = run(engine, request("b", turn, max_new_tokens=3))
    finally:
        engine.close()
    # 21 prompt tokens and 11 generated ones with KV fill eight pages of four
    assert finish_of(second["b"]).cached_tokens == 32


def test_adapters_do_not_share_prefixes() -> None:
    engine = make_engine()
    try:
        for name, adapter in (("a", None), ("b", "french"), ("c", "french")):
            engine.add(GenerationRequest(name, PROMPT, SamplingParams(max_new_tokens=2), adapter=adapter))
            outcomes = []
            while engine.has_work:
                outcomes += engine.step()
            assert outcomes[-1][1].cached_tokens == (20 if name == "c" else 0)
    finally:
        engine.close()


def test_without_prefix_caching_nothing_is_kept() -> None:
    engine = make_engine(prefix_caching=False)
    try:
        run(engine, request("a", PROMPT, max_new_tokens=5))
        assert engine.stats().cached_pages == 0
        assert finish_of(run(engine, request("b", PROMPT, max_new_tokens=5))["b"]).cached_tokens == 0
    finally:
        engine.close()


# ---------------------------------------------------------------------------------------------- fairness


def test_a_long_prompt_and_running_requests_do_not_starve_each_other() -> None:
    reports: list[StepReport] = []
    config = EngineConfig(page_size=4, kv_pages=64, max_batch_size=4, max_batch_prefill_tokens=8)
    engine = Engine(make_model(), make_tokenizer(), config, on_step=reports.append)
    try:
        engine.add(request("talks", PROMPT[:5], max_new_tokens=30, ignore_eos=True))
        engine.step()
        engine.add(request("reads", PROMPT[::-1] * 4, max_new_tokens=2))
        del reports[:]
        order = []
        while engine.has_work:
            order += [name for name, outcome in engine.step() if isinstance(outcome, TokenEvent)]
    finally:
        engine.close()
    # 84 prompt tokens, 8 a step, and a token for the other request in each of those steps
    assert [(r.prefill_tokens, r.decode_tokens) for r in reports[:11]] == [(8, 1)] * 10 + [(4, 1)]
    assert order[:12] == ["talks"] * 11 + ["reads"]


@pytest.mark.parametrize("pause", [1, 3])
def test_pure_decode_steps_can_be_put_between_prefill_steps(pause: int) -> None:
    reports: list[StepReport] = []
    config = EngineConfig(
        page_size=4, kv_pages=64, max_batch_size=4, max_batch_prefill_tokens=8, decode_between_prefills=pause
    )
    engine = Engine(make_model(), make_tokenizer(), config, on_step=reports.append)
    try:
        engine.add(request("talks", PROMPT[:5], max_new_tokens=30, ignore_eos=True))
        engine.step()
        engine.add(request("reads", PROMPT, max_new_tokens=2))
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
    phases = "".join(report.phase[0] for report in reports)
    assert phases.startswith("p" + ("d" * pause + "p") * 3)


def test_first_come_first_served() -> None:
    engine = make_engine(max_batch_size=2)
    try:
        outcomes = run(engine, *(request(str(i), OTHER[i:], max_new_tokens=4, ignore_eos=True) for i in range(6)))
    finally:
        engine.close()
    finished = [finish_of(outcomes[str(i)]).timings for i in range(6)]
    assert all(timings.queue >= 0 and timings.prefill > 0 for timings in finished)
    firsts = [outcomes[str(i)][0].time for i in range(6)]
    assert firsts == sorted(firsts)
    assert finished[0].time_to_first_token <= finished[5].time_to_first_token


# ---------------------------------------------------------------------------------------------- signatures


def recorded(prompt: tuple[int, ...], output: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """[L, E] counts of a prompt and of generated tokens, by the recorder of the modelling core."""
    model = make_model("qwen2_moe")
    ids = torch.tensor([[*prompt, *output]])
    with torch.inference_mode(), model.moe_opt.record(num_requests=1) as whole:
        model(input_ids=ids)
    with torch.inference_mode(), model.moe_opt.record(num_requests=1) as first:
        model(input_ids=ids[:, : len(prompt)])
    return first.prefill[0].numpy(), (whole.prefill - first.prefill)[0].numpy()


def test_signatures_count_every_token_once_and_survive_prefix_hits_and_preemption() -> None:
    expected = recorded(PROMPT, generated("qwen2_moe", PROMPT, 9)[:-1])  # the last token never runs
    engine = make_engine(max_batch_prefill_tokens=6)
    try:
        fresh = run(engine, request("a", PROMPT, max_new_tokens=9))
        hit = run(engine, request("b", PROMPT, max_new_tokens=9))
    finally:
        engine.close()
    tight = make_engine(kv_pages=14, prefix_caching=False)
    try:
        crowd = [request(f"r{i}", PROMPT, max_new_tokens=9) for i in range(3)]
        crowded = run(tight, *crowd)
        assert tight.stats().preemptions > 0
    finally:
        tight.close()
    finishes = [finish_of(fresh["a"]), finish_of(hit["b"]), *(finish_of(crowded[f"r{i}"]) for i in range(3))]
    assert finishes[1].cached_tokens == 20
    for finish in finishes:
        np.testing.assert_array_equal(finish.expert_counts, expected[0])
        np.testing.assert_array_equal(finish.decode_expert_counts, expected[1])


def test_signatures_are_not_made_where_nobody_asks() -> None:
    engine = make_engine()
    try:
        engine.add(GenerationRequest("a", PROMPT, SamplingParams(max_new_tokens=2)))
        outcomes = []
        while engine.has_work:
            outcomes += engine.step()
    finally:
        engine.close()
    assert outcomes[-1][1].expert_counts is None


# ---------------------------------------------------------------------------------------------- brownout


def test_exact_requests_keep_their_tokens_beside_browned_ones(browned_engine: Engine) -> None:
    browned_engine.set_brownout(threshold=0.2)
    outcomes = run(
        browned_engine,
        request("exact", PROMPT, exact=True, max_new_tokens=12),
        request("browned", OTHER, max_new_tokens=12),
        request("browned too", PROMPT, max_new_tokens=12),
    )
    exact, browned = finish_of(outcomes["exact"]), finish_of(outcomes["browned"])
    assert tokens_of(outcomes["exact"]) == generated("qwen2_moe", PROMPT, 12)
    assert (exact.browned, exact.browned_share, exact.lowest_threshold) == (False, 0.0, 1.0)
    assert (browned.browned, browned.lowest_threshold) == (True, 0.2)
    assert 0 < browned.browned_share < 1
    assert tokens_of(outcomes["browned"]) != generated("qwen2_moe", OTHER, 12)
    events = [event for event in outcomes["browned"] if isinstance(event, TokenEvent)]
    assert {event.threshold for event in events} == {0.2}
    assert browned.browned_share == pytest.approx(sum(event.browned_share for event in events) / len(events))


def test_browned_pages_are_reused_only_under_brownout_and_never_by_exact_requests(browned_engine: Engine) -> None:
    browned_engine.set_brownout(threshold=0.2)
    run(browned_engine, request("maker", PROMPT, max_new_tokens=2))
    hit = run(browned_engine, request("hit", PROMPT, max_new_tokens=2))
    exact = run(browned_engine, request("exact", PROMPT, exact=True, max_new_tokens=2))
    assert finish_of(hit["hit"]).cached_tokens == 20
    assert finish_of(exact["exact"]).cached_tokens == 0
    browned_engine.pool.forget_prefixes()
    run(browned_engine, request("maker", PROMPT, max_new_tokens=2))
    browned_engine.set_brownout(threshold=1.0)
    plain = run(browned_engine, request("plain", PROMPT, max_new_tokens=12))
    assert finish_of(plain["plain"]).cached_tokens == 0
    assert tokens_of(plain["plain"]) == generated("qwen2_moe", PROMPT, 12)
    exact = run(browned_engine, request("exact", PROMPT, exact=True, max_new_tokens=2))
    assert finish_of(exact["exact"]).cached_tokens == 20, "exact pages serve exact requests"


def test_a_request_browned_on_the_way_publishes_its_later_pages_as_browned(browned_engine: Engine) -> None:
    engine = browned_engine
    engine.add(request("turns", PROMPT, max_new_tokens=30, ignore_eos=True))
    for _ in range(8):
        engine.step()
    engine.set_brownout(threshold=0.0, strategy="partial")
    tokens: list[int] = []
    sequence = engine.scheduler.running[0]
    while engine.has_work:
        tokens = list(sequence.tokens)
        engine.step()
    engine.set_brownout(threshold=1.0)
    again = run(engine, request("again", tuple(tokens), exact=True, max_new_tokens=2))
    # 21 prompt tokens and 5 or 6 exact generated ones: no page behind those may be read
    assert 20 <= finish_of(again["again"]).cached_tokens <= 28


def test_a_threshold_changes_between_two_steps_and_a_wrong_one_changes_nothing(browned_engine: Engine) -> None:
    engine = browned_engine
    engine.add(request("a", PROMPT, max_new_tokens=6, ignore_eos=True))
    seen = []
    for threshold in (1.0, 1.0, 0.5, 0.0, 1.0, 1.0, 1.0):
        engine.set_brownout(threshold=threshold, phase="decode")
        seen += [outcome.threshold for _, outcome in engine.step() if isinstance(outcome, TokenEvent)]
    # two steps of prefill (21 tokens, 16 at a time), then one token a step
    assert seen == [1.0, 0.5, 0.0, 1.0, 1.0, 1.0]
    with pytest.raises(ConfigError):
        engine.set_brownout(threshold=1.5)
    assert engine.brownout().decode.threshold == 1.0
    assert engine.brownout().ways == 4


def test_united_experts_are_exchanged_while_requests_run(browned_engine: Engine) -> None:
    engine = browned_engine
    engine.set_brownout(threshold=0.0)
    engine.add(request("exact", PROMPT, exact=True, max_new_tokens=20))
    engine.add(request("browned", OTHER, max_new_tokens=20, ignore_eos=True))
    outcomes: dict[str, list[Any]] = {"exact": [], "browned": []}
    for step in range(1000):
        if step == 6:
            engine.swap_united(UnitedExperts.from_average(engine.runner.model, ways=2))
            assert engine.brownout().ways == 2
        if step == 12:
            engine.swap_united(None)
            assert engine.brownout().ways is None
        for name, outcome in engine.step():
            outcomes[name].append(outcome)
        engine.check()
        if not engine.has_work:
            break
    engine.swap_united(UnitedExperts.from_average(engine.runner.model, ways=4))
    assert tokens_of(outcomes["exact"]) == generated("qwen2_moe", PROMPT, 20)
    finish = finish_of(outcomes["browned"])
    assert finish.generated_tokens == 20
    assert outcomes["browned"][-2].threshold == 1.0, "nothing to delegate to any more"


# ---------------------------------------------------------------------------------------------- details


def test_prompt_details_are_the_models_logprobs_with_and_without_chunks() -> None:
    for budget in (64, 5):
        engine = make_engine(max_batch_prefill_tokens=budget)
        try:
            run(engine, request("warm", PROMPT, max_new_tokens=2))
            outcomes = run(engine, request("a", PROMPT, max_new_tokens=3, decoder_input_details=True, top_n_tokens=2))
        finally:
            engine.close()
        with torch.inference_mode():
            logits = make_model("qwen2_moe")(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        prefill = finish_of(outcomes["a"]).prefill
        assert [token.id for token in prefill] == list(PROMPT)
        assert prefill[0].logprob is None
        expected = logits[:-1].gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1).tolist()
        assert [token.logprob for token in prefill[1:]] == pytest.approx(expected, abs=1e-4)
        first = outcomes["a"][0]
        assert first.token.logprob == pytest.approx(logits[-1].max().item(), abs=1e-4)
        assert first.top_tokens[0].id == first.token.id
        assert len(first.top_tokens) == 2


def test_a_sampled_request_repeats_itself_by_seed_whatever_is_around_it() -> None:
    params = {"do_sample": True, "seed": 11, "temperature": 2.0, "max_new_tokens": 12, "ignore_eos": True}
    engine = make_engine()
    try:
        alone = run(engine, request("a", PROMPT, **params))
    finally:
        engine.close()
    crowded = make_engine(kv_pages=12, max_batch_prefill_tokens=5)
    try:
        others = [request(f"r{i}", OTHER[i:], max_new_tokens=10, ignore_eos=True) for i in range(3)]
        together = run(crowded, *others, request("a", PROMPT, **params))
        unseeded = run(crowded, request("b", PROMPT, **{**params, "seed": None}))
        assert crowded.stats().preemptions > 0
    finally:
        crowded.close()
    assert tokens_of(alone["a"]) == tokens_of(together["a"])
    assert finish_of(alone["a"]).seed == 11
    assert finish_of(unseeded["b"]).seed is not None
    assert tokens_of(unseeded["b"]) != tokens_of(alone["a"])


def test_a_step_report_says_what_the_step_did() -> None:
    reports: list[StepReport] = []
    engine = Engine(
        make_model("qwen2_moe"),
        make_tokenizer(),
        EngineConfig(page_size=4, kv_pages=64, max_batch_size=4, max_batch_prefill_tokens=16),
        on_step=reports.append,
    )
    try:
        run(engine, request("a", PROMPT, max_new_tokens=4, ignore_eos=True))
    finally:
        engine.close()
    assert [(r.phase, r.prefill_tokens, r.decode_tokens) for r in reports] == [
        ("prefill", 16, 0), ("prefill", 5, 0), ("decode", 0, 1), ("decode", 0, 1), ("decode", 0, 1),
    ]  # fmt: skip
    assert [len(r.ttft) for r in reports] == [0, 1, 0, 0, 0]
    assert [len(r.tpot) for r in reports] == [0, 0, 1, 1, 1]
    assert all(0 < r.forward_seconds <= r.seconds for r in reports)
    # one token reads its two experts in every layer
    assert [r.active_experts for r in reports[2:]] == [2.0, 2.0, 2.0]


# ---------------------------------------------------------------------------------------------- bounds and failures


@pytest.mark.parametrize(
    "wrong, message",
    [
        (GenerationRequest("a", ()), "no tokens"),
        (GenerationRequest("a", (3, 96)), "token id 96"),
        (GenerationRequest("a", (-1,)), "token id -1"),
        (GenerationRequest("a", (3,) * 200), "more than the 128 tokens"),
        (GenerationRequest("a", (3,) * 100, SamplingParams(max_new_tokens=29)), "more than the 128 tokens"),
    ],
)
def test_requests_that_can_never_run_are_refused(wrong: GenerationRequest, message: str) -> None:
    engine = make_engine()
    try:
        with pytest.raises(InvalidRequestError, match=message):
            engine.add(wrong)
        assert not engine.has_work
    finally:
        engine.close()


def test_without_max_new_tokens_a_request_may_fill_what_is_left() -> None:
    engine = make_engine(max_total_tokens=40)
    try:
        outcomes = run(engine, request("a", PROMPT, ignore_eos=True))
    finally:
        engine.close()
    assert finish_of(outcomes["a"]).generated_tokens == 40 - len(PROMPT)
    assert finish_of(outcomes["a"]).finish_reason == "length"


def test_a_full_queue_refuses_and_an_id_is_used_once() -> None:
    engine = make_engine(max_waiting=1, max_batch_size=1)
    try:
        engine.add(request("a", PROMPT))
        with pytest.raises(InvalidRequestError, match="in use"):
            engine.add(request("a", PROMPT))
        engine.add(request("b", PROMPT))
        with pytest.raises(OverloadedError):
            engine.add(request("c", PROMPT))
    finally:
        engine.close()


def test_a_failing_forward_ends_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_batch_size=2)
    try:
        engine.add(request("a", PROMPT, max_new_tokens=4))
        engine.add(request("b", OTHER, max_new_tokens=4))
        engine.add(request("waits", OTHER, max_new_tokens=4))
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(
                engine.runner.backend, "begin", lambda *args: (_ for _ in ()).throw(RuntimeError("no memory"))
            )
            failed = dict(engine.step())
        engine.check()
        assert set(failed) <= {"a", "b"}
        assert all(isinstance(error, GenerationError) and "no memory" in str(error) for error in failed.values())
        outcomes: dict[str, list[Any]] = {}
        while engine.has_work:
            for name, outcome in engine.step():
                outcomes.setdefault(name, []).append(outcome)
        engine.check()
        assert tokens_of(outcomes["waits"]) == generated("qwen2_moe", OTHER, 4)
        assert engine.stats().failed == len(failed)
        assert engine.stats().used_pages == 0
    finally:
        engine.close()


def test_even_a_failing_scheduler_answers_everyone_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_batch_size=1)
    try:
        for name in ("runs", "waits"):
            engine.add(request(name, PROMPT, max_new_tokens=4))
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine.pool, "take", None)
            failed: dict[str, Any] = {}
            while engine.has_work:
                failed.update(dict(engine.step()))
        engine.check()
        assert set(failed) == {"runs", "waits"}
        assert all(isinstance(error, GenerationError) for error in failed.values())
        assert tokens_of(run(engine, request("later", PROMPT, max_new_tokens=4))["later"]) == generated(
            "qwen2_moe", PROMPT, 4
        )
    finally:
        engine.close()


def test_one_requests_text_error_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    try:
        engine.add(request("bad", PROMPT, max_new_tokens=6))
        engine.add(request("good", OTHER, max_new_tokens=6))
        broken = engine.scheduler.waiting[0].detokenizer
        assert broken is not None
        monkeypatch.setattr(broken, "_decode", None)
        outcomes: dict[str, list[Any]] = {}
        while engine.has_work:
            for name, outcome in engine.step():
                outcomes.setdefault(name, []).append(outcome)
            engine.check()
    finally:
        engine.close()
    assert isinstance(outcomes["bad"][-1], GenerationError)
    assert tokens_of(outcomes["good"]) == generated("qwen2_moe", OTHER, 6)


def test_an_observer_that_fails_hurts_nobody() -> None:
    def observer(report: StepReport) -> None:
        raise RuntimeError("observer")

    engine = Engine(make_model(), make_tokenizer(), EngineConfig(kv_pages=8), on_step=observer)
    try:
        assert finish_of(run(engine, request("a", PROMPT, max_new_tokens=3))["a"]).generated_tokens == 3
    finally:
        engine.close()


def test_one_model_runs_in_one_engine_at_a_time() -> None:
    engine = make_engine()
    try:
        with pytest.raises(ConfigError, match="close that one first"):
            make_engine()
    finally:
        engine.close()
    engine.close()
    make_engine().close()


@pytest.mark.parametrize("wrong", [{"page_size": 0}, {"max_batch_size": -1}, {"kv_memory": 100}, {"max_waiting": True}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_engine(**{"kv_pages": None, **wrong})


def test_an_engine_that_fails_to_start_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generated("qwen2_moe", PROMPT, 4)
    model = make_model("qwen2_moe")

    def refuse(*_: Any) -> None:
        raise ConfigError("no fingerprint today")

    with monkeypatch.context() as patched:
        patched.setattr("moe_opt.serving.engine.model_runner.fingerprint_of", refuse)
        with pytest.raises(ConfigError, match="no fingerprint today"):
            Engine(model, make_tokenizer(), EngineConfig(page_size=4, kv_pages=8))
    assert not any("forward" in module.__dict__ or "_moe_opt_kv_layer" in module.__dict__ for module in model.modules())
    engine = make_engine("qwen2_moe")
    try:
        assert tokens_of(run(engine, request("a", PROMPT, max_new_tokens=4))["a"]) == expected
    finally:
        engine.close()
