"""Multiple choice by log-likelihood: each choice is scored as a continuation of the prompt, nothing is generated.

The ids of a choice are `tokenizer(prompt)` followed by `tokenizer(choice, add_special_tokens=False)`, with nothing in
between: a space that belongs there belongs into a template.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_opt.errors import ConfigError
from moe_opt.evaluation.perplexity import ReadCounter
from moe_opt.evaluation.texts import TokenRows, domain_name, read_rows


@dataclasses.dataclass(frozen=True)
class Question:
    prompt: str
    choices: tuple[str, ...]
    label: int


@dataclasses.dataclass(frozen=True)
class ChoiceSet:
    name: str
    questions: tuple[Question, ...]

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return float(np.mean([1 / len(question.choices) for question in self.questions]))


class Continuation(NamedTuple):
    log_prob: float  # sum over the continuation's tokens, nats
    greedy: bool  # whether each of its tokens was the likeliest


class ChoiceScores(NamedTuple):
    """One entry a question, in the set's order."""

    log_probs: list[list[float]]  # [Q][choices], sums, nats
    picked: NDArray[np.int64]  # [Q] choice with the highest sum
    picked_norm: NDArray[np.int64]  # [Q] choice with the highest sum per character
    labels: NDArray[np.int64]  # [Q]

    @property
    def accuracy(self) -> float:
        return float((self.picked == self.labels).mean())

    @property
    def accuracy_norm(self) -> float:
        """Accuracy when sums are divided by the choice's length in characters, which takes away the pull of short
        choices."""
        return float((self.picked_norm == self.labels).mean())


def read_choices(
    path: Path,
    *,
    limit: int | None = None,
    prompt_template: str = "{prompt}",
    choice_template: str = "{choice}",
    shots: int = 0,
    seed: int = 0,
) -> ChoiceSet:
    """Read a JSONL set with rows of `prompt`, `choices` and `label` (0-based).

    A set with `label` and `label_name` but no `choices` (intents) gets all label names of the file as choices.

    Args:
        limit: this many questions, drawn by `seed`. prompt_template, choice_template: `str.format` with the row's
            fields, and `choice`. shots: solved questions, drawn by `seed` and left out of the set, before each prompt,
            two newlines apart.

    Raises:
        ConfigError: rows that are no multiple choice, templates that name unknown fields, or too few rows.
    """
    rows = list(read_rows(path))
    names = _label_names(rows)
    questions = [_question(path, number, row, names, prompt_template, choice_template) for number, row in rows]
    if len(questions) <= shots:
        raise ConfigError(f"{path}: {len(questions)} questions are too few for {shots} shots")
    order = np.random.default_rng(seed).permutation(len(questions))
    examples = [questions[i] for i in order[:shots]]
    kept = [questions[i] for i in sorted(order[shots:][:limit])]
    before = "".join(f"{q.prompt}{q.choices[q.label]}\n\n" for q in examples)
    return ChoiceSet(
        domain_name(path), tuple(dataclasses.replace(question, prompt=before + question.prompt) for question in kept)
    )


def _label_names(rows: Sequence[tuple[int, dict[str, Any]]]) -> dict[int, str]:
    return {
        row["label"]: row["label_name"]
        for _, row in rows
        if isinstance(row.get("label"), int) and isinstance(row.get("label_name"), str)
    }


def _question(
    path: Path, number: int, row: dict[str, Any], names: dict[int, str], prompt_template: str, choice_template: str
) -> Question:
    label, choices = row.get("label"), row.get("choices")
    if choices is None and isinstance(label, int) and label in names:
        order = sorted(names)
        choices, label = [names[key].replace("_", " ") for key in order], order.index(label)
    if not isinstance(row.get("prompt"), str) or not isinstance(choices, list) or not isinstance(label, int):
        raise ConfigError(f'{path}:{number}: multiple choice needs "prompt", a list "choices" and a number "label"')
    if len(choices) < 2 or not 0 <= label < len(choices):
        raise ConfigError(f"{path}:{number}: label {label} does not name one of {len(choices)} choices")
    try:
        prompt = prompt_template.format(**row)
        filled = tuple(choice_template.format(**row, choice=choice) for choice in choices)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"{path}:{number}: the template does not fit the row: {error!r}") from error
    return Question(prompt, filled, label)


@torch.no_grad()
def continuation_log_probs(
    model: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 16,
    max_length: int | None = None,
    reads: ReadCounter | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[Continuation]:
    """Log-likelihood of each continuation after its context.

    Batches are right-padded with a mask, so brownout neither counts nor serves padding, and hold pairs of like
    length.

    Args:
        pairs: (context ids, continuation ids), both not empty. max_length: positions of the model; contexts are cut on
            the left so that all but the last token, which predicts nothing, fit. progress: called with the number of
            pairs done.

    Raises:
        ConfigError: an empty context or continuation, or a continuation that alone is too long.
    """
    sequences: list[tuple[list[int], int]] = []
    for context, continuation in pairs:
        if not context or not continuation:
            raise ConfigError("a context and a continuation need at least one token each")
        ids = [*context, *continuation]
        if max_length is not None and len(ids) > max_length + 1:
            if len(continuation) > max_length:
                raise ConfigError(f"a continuation of {len(continuation)} tokens does not fit {max_length} positions")
            ids = ids[-(max_length + 1) :]
        sequences.append((ids, len(continuation)))
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i][0]))  # stable: a question's choices meet
    out: list[Continuation] = [Continuation(0.0, False)] * len(sequences)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for index, found in zip(chosen, _score_batch(model, [sequences[i] for i in chosen]), strict=True):
            out[index] = found
        if reads is not None:
            reads.add(model.moe_opt)
        if progress is not None:
            progress(len(chosen))
    return out


def _score_batch(model: Any, batch: Sequence[tuple[list[int], int]]) -> list[Continuation]:
    longest = max(len(tokens) for tokens, _ in batch) - 1
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (tokens, _) in enumerate(batch):
        ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        mask[row, : len(tokens) - 1] = 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    logits = model(input_ids=ids, attention_mask=None if bool(mask.all()) else mask, use_cache=False).logits
    out = []
    for row, (tokens, length) in enumerate(batch):
        first = len(tokens) - length
        part = logits[row, first - 1 : len(tokens) - 1].float().log_softmax(-1)
        target = torch.tensor(tokens[first:], device=part.device)
        log_prob = part.gather(1, target.unsqueeze(1)).sum()
        out.append(Continuation(float(log_prob), bool((part.argmax(-1) == target).all())))
    return out


def choice_pairs(tokenizer: Any, questions: ChoiceSet) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, choice ids) of every choice of every question, in order.

    Raises:
        ConfigError: a prompt or choice without tokens.
    """
    pairs: list[tuple[list[int], list[int]]] = []
    for question in questions.questions:
        context = tokenizer(question.prompt)["input_ids"]
        for choice in question.choices:
            continuation = tokenizer(choice, add_special_tokens=False)["input_ids"]
            if not context or not continuation:
                raise ConfigError(f"{questions.name}: no tokens in prompt {question.prompt!r} or choice {choice!r}")
            pairs.append((context, continuation))
    return pairs


def choice_batch(tokenizer: Any, questions: ChoiceSet, size: int) -> TokenRows:
    """The first batch that `score_choices` runs, as rows to time a step on."""
    pairs = sorted(choice_pairs(tokenizer, questions), key=lambda pair: -len(pair[0]) - len(pair[1]))[:size]
    longest = len(pairs[0][0]) + len(pairs[0][1]) - 1
    ids = torch.zeros(len(pairs), longest, dtype=torch.int64)
    attention = torch.zeros(len(pairs), longest, dtype=torch.bool)
    for row, (context, choice) in enumerate(pairs):
        tokens = [*context, *choice][:-1]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        attention[row, : len(tokens)] = True
    return TokenRows(ids, attention, attention.clone(), torch.zeros(len(pairs), dtype=torch.int64), [questions.name])


def score_choices(
    model: Any,
    tokenizer: Any,
    questions: ChoiceSet,
    *,
    batch_size: int = 16,
    reads: ReadCounter | None = None,
    progress: Callable[[int], Any] | None = None,
) -> ChoiceScores:
    """Score every choice of every question; ties go to the first choice.

    Raises:
        ConfigError: a prompt or choice without tokens.
    """
    pairs = choice_pairs(tokenizer, questions)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    found = iter(
        continuation_log_probs(model, pairs, batch_size=batch_size, max_length=limit, reads=reads, progress=progress)
    )
    log_probs = [[next(found).log_prob for _ in question.choices] for question in questions.questions]
    per_character = [
        [value / max(len(choice), 1) for value, choice in zip(values, question.choices, strict=True)]
        for values, question in zip(log_probs, questions.questions, strict=True)
    ]
    return ChoiceScores(
        log_probs,
        np.array([int(np.argmax(values)) for values in log_probs]),
        np.array([int(np.argmax(values)) for values in per_character]),
        np.array([question.label for question in questions.questions]),
    )
