"""Text pieces, stop strings and grammars."""

from __future__ import annotations

import builtins
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import finish_of, generated, make_engine, make_tokenizer, request, run

from moe_opt.serving.engine.detokenize import Detokenizer, make_decoder, piece_of
from moe_opt.serving.engine.types import GenerationError, Grammar, InvalidRequestError, TokenEvent

DECODE = make_decoder(make_tokenizer())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 95), max_size=10), st.lists(st.integers(3, 95), max_size=40))
def test_pieces_put_together_are_the_text(prompt: list[int], output: list[int]) -> None:
    prompt = [*prompt, 40]  # a complete character: what a prompt leaves unfinished is the prompt's
    detokenizer = Detokenizer(DECODE, prompt)
    pieces = [detokenizer.push(token) for token in output]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == DECODE([40, *output])[1:]


def test_a_character_of_several_tokens_comes_whole_with_the_last_of_them() -> None:
    ids = make_tokenizer().encode("aé😀b", add_special_tokens=False)
    detokenizer = Detokenizer(DECODE, [4])
    assert [detokenizer.push(token) for token in ids] == ["a", "", "é", "", "", "", "😀", "b"]


def test_bytes_that_never_make_a_character_do_not_hold_the_text_up() -> None:
    start = make_tokenizer().encode("é", add_special_tokens=False)[0]
    detokenizer = Detokenizer(DECODE, [4])
    pieces = [detokenizer.push(start) for _ in range(12)]
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 12
    assert any(pieces)


def test_prompt_pieces_put_together_are_the_prompt() -> None:
    ids = make_tokenizer().encode("an example, with w words", add_special_tokens=False)
    assert "".join(piece_of(DECODE, ids, index) for index in range(len(ids))) == DECODE(ids)


PROMPT = (5, 17, 40, 8)


def text_of(outcomes: list[Any]) -> str:
    return "".join(event.token.text for event in outcomes if isinstance(event, TokenEvent) and not event.token.special)


def test_a_stop_string_across_tokens_ends_the_text_behind_it() -> None:
    engine = make_engine()
    try:
        free = run(engine, request("free", PROMPT, max_new_tokens=24, ignore_eos=True))
        text = text_of(free["free"])
        lengths = [len(event.token.text) for event in free["free"] if isinstance(event, TokenEvent)]
        second = sum(lengths[:6])
        stop = text[second - 1 : second + 1]  # the end of one token and the start of the next
        first = text.index(stop)
        stopped = run(engine, request("s", PROMPT, max_new_tokens=24, ignore_eos=True, stop=("never", stop)))
    finally:
        engine.close()
    finish = finish_of(stopped["s"])
    assert finish.finish_reason == "stop_sequence"
    assert finish.generated_text == text[: first + len(stop)]
    assert finish.generated_tokens < 24
    assert finish_of(free["free"]).generated_text == text


def test_an_end_token_ends_the_text_unless_ignored() -> None:
    engine = make_engine()
    try:
        for start in range(3, 90):
            prompt = (start, 9)
            expected = generated("qwen2_moe", prompt, 24)
            if expected[-1] == 2:
                break
        outcomes = run(
            engine,
            request("stops", prompt, max_new_tokens=40),
            request("goes on", prompt, max_new_tokens=40, ignore_eos=True),
        )
    finally:
        engine.close()
    finish = finish_of(outcomes["stops"])
    assert expected[-1] == 2, "no prompt of this model ends by itself"
    assert finish.finish_reason == "eos_token"
    assert finish.generated_tokens == len(expected)
    assert "</s>" not in finish.generated_text
    assert outcomes["stops"][-2].token.special
    assert finish_of(outcomes["goes on"]).generated_tokens == 40


# ---------------------------------------------------------------------------------------------- grammars

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(name="llguidance")
def _llguidance() -> Any:
    return pytest.importorskip("llguidance")


@pytest.mark.parametrize("value", [SCHEMA, json.dumps(SCHEMA)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_output_meets_a_json_schema(llguidance: Any, value: Any, do_sample: bool) -> None:
    engine = make_engine()
    try:
        params = {"grammar": Grammar("json", value), "max_new_tokens": 60, "do_sample": do_sample, "seed": 4}
        outcomes = run(engine, request("g", PROMPT, **params), request("plain", PROMPT, max_new_tokens=6))
    finally:
        engine.close()
    finish = finish_of(outcomes["g"])
    assert finish.finish_reason == "eos_token"
    made = json.loads(finish.generated_text)
    assert set(made) == {"name", "age"}
    assert made["age"] <= 99
    assert tuple(e.token.id for e in outcomes["plain"][:-1]) == generated("qwen2_moe", PROMPT, 6)


def test_output_meets_a_regular_expression(llguidance: Any) -> None:
    engine = make_engine()
    try:
        pattern = "(ab|c[0-9]{2})+x"
        outcomes = run(
            engine, request("g", PROMPT, grammar=Grammar("regex", pattern), max_new_tokens=80, do_sample=True)
        )
    finally:
        engine.close()
    finish = finish_of(outcomes["g"])
    if finish.finish_reason == "eos_token":
        assert re.fullmatch(pattern, finish.generated_text)
    assert re.match("(ab|c[0-9]{2}|a$|c[0-9]?$)*x?$", finish.generated_text)


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "(("), Grammar("json", "{not json"), Grammar("json", "[1]"), Grammar("json", {"type": "wrong"})],
)
def test_a_bad_grammar_is_that_requests_error_alone(llguidance: Any, grammar: Grammar) -> None:
    engine = make_engine()
    try:
        engine.add(request("good", PROMPT, max_new_tokens=4))
        with pytest.raises(InvalidRequestError, match="`grammar` does not compile"):
            engine.add(request("bad", PROMPT, grammar=grammar))
        engine.check()
        assert finish_of(_finish(engine)["good"]).generated_tokens == 4
    finally:
        engine.close()


def _finish(engine: Any) -> dict[str, list[Any]]:
    outcomes: dict[str, list[Any]] = {}
    while engine.has_work:
        for name, outcome in engine.step():
            outcomes.setdefault(name, []).append(outcome)
    return outcomes


def test_a_grammar_that_the_vocabulary_cannot_spell_fails_while_others_go_on(llguidance: Any) -> None:
    engine = make_engine()
    try:
        engine.add(request("capital", PROMPT, grammar=Grammar("regex", "aQ"), max_new_tokens=9))
        engine.add(request("good", PROMPT, max_new_tokens=9))
        outcomes = _finish(engine)
        engine.check()
    finally:
        engine.close()
    assert isinstance(outcomes["capital"][-1], GenerationError)
    assert finish_of(outcomes["good"]).generated_tokens == len(generated("qwen2_moe", PROMPT, 9))


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_llguidance(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    engine = make_engine()
    try:
        monkeypatch.setattr(builtins, "__import__", no_llguidance)
        with pytest.raises(InvalidRequestError, match="pip install llguidance"):
            engine.add(request("g", PROMPT, grammar=Grammar("regex", "a")))
    finally:
        engine.close()
