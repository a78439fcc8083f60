"""Scores are those of the model itself, whatever the shape of the step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_moe import SENTENCES

from moe_opt import UnitedExperts, attach_united_experts
from moe_opt.errors import ConfigError
from moe_opt.evaluation.losses import compare_tokens, perplexity, relative_loss
from moe_opt.evaluation.perplexity import ReadCounter, score_decode, score_prefill
from moe_opt.evaluation.texts import TokenRows, make_rows


def _rows(ids: torch.Tensor, lengths: list[int] | None = None) -> TokenRows:
    attention = torch.ones_like(ids, dtype=torch.bool)
    for row, length in enumerate(lengths or []):
        attention[row, length:] = False
    scored = attention.clone()
    scored[:, 0] = False
    return TokenRows(ids, attention, scored, torch.zeros(len(ids), dtype=torch.int64), ["one"])


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 300, (6, 20), generator=torch.Generator().manual_seed(0))


def test_perplexity_is_the_exponent_of_the_library_loss(model: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    scores = score_prefill(model, _rows(ids), batch_size=6)
    assert len(scores.target) == 6 * 19
    assert scores.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_every_token_gets_the_log_probability_of_a_single_row_call(model: Any, ids: torch.Tensor) -> None:
    scores = score_prefill(model, _rows(ids), batch_size=4)
    for row in range(6):
        with torch.no_grad():
            logits = model(input_ids=ids[row : row + 1]).logits[0, :-1]
        nll = -logits.log_softmax(-1).gather(1, ids[row, 1:, None])[:, 0]
        chosen = scores.row == row
        np.testing.assert_allclose(scores.nll[chosen], nll.numpy(), atol=1e-4)
        np.testing.assert_array_equal(scores.predicted[chosen], logits.argmax(-1).numpy())
        np.testing.assert_array_equal(scores.target[chosen], ids[row, 1:].numpy())


def test_padding_changes_neither_scores_nor_brownout(model: Any, ids: torch.Tensor) -> None:
    lengths = [20, 7, 12, 20, 3, 9]
    attach_united_experts(model, UnitedExperts.from_average(model, ways=4))
    model.moe_opt.set_brownout(threshold=0.4, strategy="partial")
    first = score_prefill(model, _rows(ids, lengths), batch_size=6)
    wider = torch.nn.functional.pad(ids, (0, 9), value=5)
    second = score_prefill(model, _rows(wider, lengths), batch_size=6)
    assert len(first.target) == sum(length - 1 for length in lengths)
    np.testing.assert_array_equal(first.predicted, second.predicted)
    np.testing.assert_allclose(first.nll, second.nll, atol=1e-4)


def test_exact_decoding_scores_what_prefill_scores(model: Any, ids: torch.Tensor) -> None:
    rows = _rows(ids)
    whole = score_prefill(model, rows)
    stepped = score_decode(model, rows, batch_size=4, prompt=6)
    assert len(stepped.target) == 6 * (20 - 1 - 6)
    late = np.tile(np.arange(19) >= 6, 6)  # the first scored token is the one after the first decoded one
    np.testing.assert_array_equal(stepped.target, whole.target[late])
    np.testing.assert_allclose(stepped.nll, whole.nll[late], atol=1e-3)


def test_decode_steps_read_what_their_rows_choose(model: Any, ids: torch.Tensor) -> None:
    rows, counter = _rows(ids), ReadCounter()
    score_decode(model, rows, batch_size=2, prompt=6, reads=counter)
    assert counter.steps == 3 * 13
    exact = counter.mean()
    assert 2 <= exact["experts_read"] <= 4  # two rows, top-2
    model.moe_opt.set_brownout(threshold=0.0, strategy="full", phase="decode")
    counter = ReadCounter()
    score_decode(model, rows, batch_size=2, prompt=6, reads=counter)
    assert counter.mean()["experts_read"] == 0
    assert counter.mean()["experts_routed"] > 0
    assert counter.mean()["delegated_share"] == 1


def test_decode_leaves_the_prompt_exact(model: Any, ids: torch.Tensor) -> None:
    """Brownout set for decode must not touch prefill: nothing changes where every step is prefill."""
    model.moe_opt.set_brownout(threshold=0.0, strategy="full", phase="decode")
    browned = score_prefill(model, _rows(ids))
    model.moe_opt.set_brownout(threshold=1.0)
    np.testing.assert_array_equal(browned.nll, score_prefill(model, _rows(ids)).nll)


def test_decode_refuses_padding_and_long_prompts(model: Any, ids: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="one length"):
        score_decode(model, _rows(ids, [20, 20, 20, 5, 20, 20]), prompt=4)
    with pytest.raises(ConfigError, match="leaves nothing to decode"):
        score_decode(model, _rows(ids), prompt=19)


def test_relative_loss_by_hand() -> None:
    exact = np.array([1, 1, 1, 1, 0, 0, 1, 1], dtype=bool)  # 6 right
    ours = np.array([1, 1, 0, 1, 0, 1, 1, 0], dtype=bool)  # 5 right
    rows = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    loss, error = relative_loss(ours, exact, rows)
    assert loss == pytest.approx(1 - 5 / 6)
    residual = np.array([2 - 5 / 6 * 2, 1 - 5 / 6 * 2, 1 - 0, 1 - 5 / 6 * 2])
    assert error == pytest.approx(np.sqrt((residual**2).sum() * 4 / 3) / 6)
    assert relative_loss(exact, exact, rows) == (0.0, 0.0)


def test_relative_loss_without_a_right_token_is_not_a_number() -> None:
    nothing = np.zeros(4, dtype=bool)
    assert math.isnan(relative_loss(nothing, nothing, np.arange(4))[0])


def test_standard_error_is_what_repeated_draws_show() -> None:
    random = np.random.default_rng(0)
    losses, errors = [], []
    for _ in range(300):
        difficulty = np.repeat(random.uniform(0.1, 0.9, 60), 20)  # tokens of a row share their difficulty
        exact = random.random(1200) < difficulty
        ours = np.where(random.random(1200) < 0.1, random.random(1200) < 0.8 * difficulty, exact)
        loss, error = relative_loss(ours, exact, np.repeat(np.arange(60), 20))
        losses.append(loss)
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(losses), rel=0.15)


def test_perplexity_ratio() -> None:
    nll, exact = np.array([1.0, 3.0]), np.array([1.0, 2.0])
    figures = compare_tokens(np.array([True, False]), np.array([True, True]), nll, exact, np.array([0, 1]))
    assert figures["perplexity_ratio"] == pytest.approx(math.exp(0.5))
    assert perplexity(np.array([2000.0])) == math.inf


def test_packed_rows_hold_the_domains_evenly_and_do_not_ask_for_bos(tokenizer: Any) -> None:
    texts = {"a": SENTENCES, "b": SENTENCES[::-1]}
    rows = make_rows(texts, tokenizer, length=16, tokens=16 * 12, seed=3)
    assert rows.ids.shape == (12, 16)
    assert rows.domain.bincount().tolist() == [6, 6]
    assert not rows.padded
    assert not (rows.scored & (rows.ids == tokenizer.bos_token_id)).any()
    assert rows.num_scored == 12 * 15 - int((rows.ids[:, 1:] == tokenizer.bos_token_id).sum())
    again = make_rows(texts, tokenizer, length=16, tokens=16 * 12, seed=3)
    assert torch.equal(rows.ids, again.ids)
    assert len(make_rows(texts, tokenizer, length=16, tokens=16 * 12, multiple_of=5)) == 10


def test_padded_rows_hold_a_text_each(tokenizer: Any) -> None:
    rows = make_rows({"a": SENTENCES}, tokenizer, length=64, tokens=64 * 5, layout="padded")
    assert len(rows) == 5
    for row in range(5):
        length = int(rows.attention[row].sum())
        assert tokenizer.decode(rows.ids[row, 1 : length - 1]) in SENTENCES
        assert rows.ids[row, length - 1] == tokenizer.eos_token_id
        assert not rows.scored[row, length:].any()


def test_texts_too_short_for_a_row_are_named(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="tiny: its texts are too short"):
        make_rows({"tiny": ["hi"]}, tokenizer, length=64, tokens=640)
