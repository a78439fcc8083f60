"""Sampling against Transformers' own logits processors, and its promises about seeds and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from moe_opt.serving.engine import sampling
from moe_opt.serving.engine.sampling import PenaltyState, SampleRow, prompt_logprobs, sample, uniforms
from moe_opt.serving.engine.types import InvalidRequestError, SamplingParams

VOCAB = 300


def row(seed: int = 0, generated: int = 0, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, generated, last_token=5, penalties=None, grammar=None)


def logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([None, 0.3, 1.0, 2.5]),
                "top_k": st.sampled_from([None, 1, 3, 200, 1000]),
                "top_p": st.sampled_from([None, 0.1, 0.6, 0.95, 0.98, 1.0]),
                "typical_p": st.sampled_from([None, 0.2, 0.9]),
            }
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_warpers_keep_what_transformers_keeps(seed: int, rows: list[dict[str, Any]]) -> None:
    raw = logits(len(rows), seed)
    warped = sampling._warp(raw, [row(do_sample=True, **params) for params in rows])
    for index, params in enumerate(rows):
        expected = raw[index : index + 1]
        ids = torch.zeros(1, 1, dtype=torch.int64)
        if params["temperature"] is not None:
            expected = TemperatureLogitsWarper(params["temperature"])(ids, expected)
        if params["top_k"] is not None:
            expected = TopKLogitsWarper(params["top_k"])(ids, expected)
        undecided = torch.zeros(VOCAB, dtype=torch.bool)
        if params["top_p"] is not None and params["top_p"] < 1:
            undecided = on_the_limit(expected[0], params["top_p"])
            expected = TopPLogitsWarper(params["top_p"])(ids, expected)
        if params["typical_p"] is not None:
            if undecided.any():
                continue  # its distribution depends on that token
            expected = TypicalLogitsWarper(params["typical_p"])(ids, expected)
        torch.testing.assert_close(warped[index][~undecided], expected[0][~undecided])


def on_the_limit(scores: torch.Tensor, p: float) -> torch.Tensor:
    """bool [V]: tokens that Transformers' float32 sum may put on either side of p: mass before within 1e-6."""
    ordered, order = scores.double().sort(descending=True)
    probs = ordered.softmax(-1)
    close = (probs.cumsum(-1) - probs - p).abs() < 1e-6
    return torch.zeros_like(close).scatter_(0, order, close)


def test_top_p_is_exact_where_a_float32_sum_is_not() -> None:
    raw = logits(3, 746)[1:2]
    ordered, order = raw[0].double().sort(descending=True)
    probs = ordered.softmax(-1)
    expected = order[probs.cumsum(-1) - probs < 0.9999]  # the last of them by 1.3e-7
    assert set(sampling._top_p(raw, [0.9999])[0].isfinite().nonzero().flatten().tolist()) == set(expected.tolist())


def test_top_p_sorts_a_whole_row_only_where_the_best_few_are_not_enough() -> None:
    flat = torch.zeros(2, VOCAB)
    flat[0, 7] = 20.0
    kept = torch.isfinite(sampling._top_p(flat + torch.arange(VOCAB) * 1e-4, [0.9, 0.9]))
    assert kept[0].sum() == 1
    assert kept[1].sum() > sampling._FEW
    assert abs(int(kept[1].sum()) - 0.9 * VOCAB) < 6


def test_penalties() -> None:
    raw = logits(3)
    prompt = [4, 9, 9]
    states = [PenaltyState(prompt, VOCAB, raw.device) for _ in range(3)]
    for token in (4, 20, 20):
        for state in states:
            state.add(token)
    rows = [row(repetition_penalty=1.7), row(frequency_penalty=0.5), row(presence_penalty=0.5)]
    for one, state in zip(rows, states, strict=True):
        one.penalties = state
    shaped = sampling._shape(raw, rows)
    met = torch.tensor([[*prompt, 4, 20, 20]])
    torch.testing.assert_close(shaped[:1], RepetitionPenaltyLogitsProcessor(1.7)(met, raw[:1].clone()))
    for index, (at_4, at_20, at_9) in ((1, (0.5, 1.0, 0.0)), (2, (0.5, 0.5, 0.0))):
        change = raw[index] - shaped[index]
        assert change[4].item() == pytest.approx(at_4)
        assert change[20].item() == pytest.approx(at_20)
        assert change[9].item() == at_9
        assert change.count_nonzero() == 2


def test_a_row_is_not_touched_by_what_others_ask_for() -> None:
    raw = logits(3)
    raw[1] = raw[0]
    penalised = row(do_sample=True, seed=3, repetition_penalty=1.5, top_p=0.5, watermark=True)
    penalised.penalties = PenaltyState([1, 2, 3], VOCAB, raw.device)
    plain = row(do_sample=True, seed=8, generated=4)
    together = sample(raw, [plain, penalised, row()])
    alone = sample(raw[:1], [plain])
    assert together.tokens[0] == alone.tokens[0]
    assert together.tokens[2] == int(raw[2].argmax())


def test_a_seed_gives_the_same_tokens_and_positions_differ() -> None:
    raw = logits(1, scale=0.5).expand(64, -1)
    rows = [row(do_sample=True, seed=7, generated=index) for index in range(64)]
    first, again = sample(raw, rows), sample(raw, list(reversed(rows)))
    assert first.tokens == list(reversed(again.tokens))
    assert len(set(first.tokens)) > 32
    other = sample(raw, [row(do_sample=True, seed=8, generated=index) for index in range(64)])
    assert first.tokens != other.tokens


def test_samples_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    count = 20_000
    raw = probabilities.log().expand(count, -1)
    tokens = torch.tensor(sample(raw, [row(do_sample=True, seed=1, generated=index) for index in range(count)]).tokens)
    found = torch.bincount(tokens, minlength=4) / count
    # four standard deviations of a binomial
    assert (found - probabilities).abs().max() < 4 * (0.25 / count) ** 0.5


def test_uniforms_fill_the_unit_interval() -> None:
    values = uniforms(list(range(1000)) * 4, [0] * 1000 + [1] * 1000 + [2] * 1000 + [3] * 1000)
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    assert len(set(values.tolist())) == 4000
    assert uniforms([2**64 - 1], [0])[0] != uniforms([0], [0])[0]


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    raw = logits(2)
    result = sample(raw, [row(do_sample=True, temperature=0.1, top_k=1, top_n_tokens=3), row(top_n_tokens=1)])
    logprobs = raw.log_softmax(-1)
    for index in range(2):
        assert result.logprobs[index] == pytest.approx(logprobs[index, result.tokens[index]].item(), abs=1e-5)
    best = logprobs[0].topk(3)
    assert result.top[0][0] == best.indices.tolist()
    assert result.top[0][1] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert len(result.top[1][0]) == 1


def test_prompt_logprobs_are_those_of_the_following_tokens() -> None:
    raw = logits(4)
    expected = raw.log_softmax(-1)[torch.arange(4), torch.tensor([1, 5, 7, 2])]
    assert prompt_logprobs(raw, [1, 5, 7, 2]) == pytest.approx(expected.tolist(), abs=1e-5)


def test_rows_without_a_finite_choice_are_named() -> None:
    raw = logits(3)
    raw[1, 4] = float("nan")
    raw[2] = float("-inf")
    assert sample(raw, [row(), row(), row(do_sample=True)]).finite == [True, False, False]


def test_a_watermark_favours_half_of_the_vocabulary_that_depends_on_the_last_token() -> None:
    raw = torch.zeros(2, VOCAB)
    rows = [row(watermark=True), row(watermark=True)]
    rows[1].last_token = 6
    shaped = sampling._shape(raw, rows)
    assert (shaped[0] == 2.0).sum() == VOCAB // 2
    assert not torch.equal(shaped[0], shaped[1])
    assert torch.equal(shaped[0], sampling._shape(raw, rows)[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5},
        {"typical_p": -1.0}, {"repetition_penalty": 0.0}, {"frequency_penalty": 2.5}, {"presence_penalty": -3.0},
        {"seed": -1}, {"max_new_tokens": 0}, {"top_n_tokens": -1}, {"stop": ("",)},
    ],
)  # fmt: skip
def test_parameters_out_of_range_name_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"`{next(iter(wrong))}`"):
        SamplingParams(**wrong)
