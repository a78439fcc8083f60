"""Choices are scored as the model itself would score prompt and choice, one call a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_opt.errors import ConfigError
from moe_opt.evaluation.choices import continuation_log_probs, read_choices, score_choices


def _direct(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        log_probs = model(input_ids=torch.tensor([context + continuation])).logits[0].log_softmax(-1)
    places = range(len(context) - 1, len(context) + len(continuation) - 1)
    picked = [int(log_probs[place].argmax()) for place in places]
    return sum(float(log_probs[p, t]) for p, t in zip(places, continuation, strict=True)), picked == continuation


def test_scores_equal_direct_calls_row_by_row(model: Any, tokenizer: Any, quiz: Path) -> None:
    questions = read_choices(quiz, prompt_template="Question: {prompt}\nAnswer:", choice_template=" {choice}")
    scores = score_choices(model, tokenizer, questions, batch_size=5)
    right = 0
    for question, found in zip(questions.questions, scores.log_probs, strict=True):
        context = tokenizer(question.prompt)["input_ids"]
        expected = [
            _direct(model, context, tokenizer(choice, add_special_tokens=False)["input_ids"])[0]
            for choice in question.choices
        ]
        assert found == pytest.approx(expected, abs=1e-3)
        right += max(range(3), key=expected.__getitem__) == question.label
    assert scores.accuracy == pytest.approx(right / len(questions.questions))


def test_per_character_accuracy_takes_away_the_pull_of_short_choices(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "lengths.jsonl"
    row = {"prompt": "The fox jumps over the red", "choices": [" fence and then sleeps.", " d"], "label": 0}
    path.write_text(json.dumps(row), encoding="utf-8")
    scores = score_choices(model, tokenizer, read_choices(path))
    (long, short) = scores.log_probs[0]
    assert scores.picked[0] == (0 if long > short else 1)
    assert scores.picked_norm[0] == 0  # a text it was trained on, likely letter by letter
    assert scores.accuracy_norm == 1
    assert long / 23 > short / 2


def test_greedy_continuations_are_recognised(model: Any) -> None:
    context = [5, 9, 11]
    with torch.no_grad():
        best = int(model(input_ids=torch.tensor([context])).logits[0, -1].argmax())
    found = continuation_log_probs(model, [(context, [best]), (context, [(best + 1) % 50 + 3]), (context, [best, 7])])
    assert found[0].greedy
    assert not found[1].greedy
    assert found[2].log_prob == pytest.approx(_direct(model, context, [best, 7])[0], abs=1e-4)


def test_long_contexts_are_cut_on_the_left(model: Any) -> None:
    context = list(range(3, 43))
    (found,) = continuation_log_probs(model, [(context, [50, 51])], max_length=11)
    assert found.log_prob == pytest.approx(_direct(model, context[-10:], [50, 51])[0], abs=1e-4)
    with pytest.raises(ConfigError, match="does not fit 11 positions"):
        continuation_log_probs(model, [([3], list(range(3, 20)))], max_length=11)


def test_batching_does_not_change_scores_under_padding(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for size in (3, 17, 5, 9, 30, 2):
        ids = torch.randint(3, 300, (size + 2,), generator=generator).tolist()
        pairs.append((ids[:-2], ids[-2:]))
    together = continuation_log_probs(model, pairs, batch_size=6)
    alone = continuation_log_probs(model, pairs, batch_size=1)
    assert [c.log_prob for c in together] == pytest.approx([c.log_prob for c in alone], abs=1e-3)


def test_shots_come_first_and_are_left_out_of_the_set(quiz: Path) -> None:
    plain = read_choices(quiz)
    shot = read_choices(quiz, shots=2, seed=1)
    assert len(shot.questions) == len(plain.questions) - 2
    before, _, last = shot.questions[0].prompt.rpartition("\n\n")
    assert last in {q.prompt for q in plain.questions}
    for example in before.split("\n\n"):
        solved = [q.prompt + q.choices[q.label] for q in plain.questions]
        assert example in solved
        assert not any(example.startswith(q.prompt.rpartition("\n\n")[2]) for q in shot.questions)


def test_label_names_become_choices(tmp_path: Path) -> None:
    path = tmp_path / "intents.jsonl"
    rows = [{"prompt": "hi", "label": 7, "label_name": "say_hello"}, {"prompt": "bye", "label": 3, "label_name": "go"}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    questions = read_choices(path).questions
    assert questions[0].choices == ("go", "say hello")
    assert [q.label for q in questions] == [1, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": "b"}, "multiple choice needs"),
        ({"prompt": "a", "choices": ["x", "y"], "label": 2}, "label 2 does not name one of 2 choices"),
        ({"prompt": "a", "label": [1, 2], "label_name": ["x"]}, "multiple choice needs"),
        (["no", "object"], "expected a JSON object"),
    ],
)
def test_rows_that_are_no_multiple_choice_are_named(tmp_path: Path, row: Any, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        read_choices(path)
    assert "bad.jsonl:1" in str(error.value)


def test_templates_with_unknown_fields_are_named(quiz: Path) -> None:
    with pytest.raises(ConfigError, match="'subject'"):
        read_choices(quiz, prompt_template="{subject}: {prompt}")
