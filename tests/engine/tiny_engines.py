"""Tiny engines: the models of tests/modeling/families.py with a tokenizer of 96 tokens."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "modeling"))

from families import VOCAB, _state, make_config

from moe_opt import MoEOptimizedForCausalLM
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.engine import Engine
from moe_opt.serving.engine.types import (
    FinishEvent,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)

TEN = (
    "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe", "gemma4_text", "granitemoe",
    "minimax_m2",
)  # fmt: skip


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: 3 special tokens, letters, digits and JSON's signs, the bytes of "é" and of a smiley, and words."""
    from tokenizers.pre_tokenizers import ByteLevel

    symbol = {bytes_of: char for char, bytes_of in _byte_symbols().items()}
    single = [*b' abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-', *"é😀".encode()]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for value in single:
        vocab[symbol[value]] = len(vocab)
    for index in range(VOCAB - len(vocab)):
        vocab[f"Ġw{index}"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    assert len(tokenizer) == VOCAB
    return tokenizer


def _byte_symbols() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(value): value for value in printable}
    rest = [value for value in range(256) if value not in printable]
    table.update({chr(256 + index): value for index, value in enumerate(rest)})
    return table


def make_model(family: str = "qwen2_moe") -> Any:
    """An optimized tiny model in float32; one object per family, shared by the tests."""
    return _model(family)


@functools.cache
def _model(family: str) -> Any:
    model = MoEOptimizedForCausalLM.from_config(make_config(family), dtype=torch.float32)
    model.load_state_dict(_state(family))
    return model.eval()


@functools.cache
def generated(family: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What `generate` gives, greedily, from the stock model's weights."""
    model = _stock(family)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=2
        )
    return tuple(out[0, len(prompt) :].tolist())


@functools.cache
def _stock(family: str) -> Any:
    from families import make_stock

    return make_stock(family)


def make_engine(family: str = "qwen2_moe", **settings: Any) -> Engine:
    settings = {"page_size": 4, "kv_pages": 64, "max_batch_size": 4, "max_batch_prefill_tokens": 16, **settings}
    return Engine(make_model(family), make_tokenizer(), EngineConfig(**settings))


def request(name: str, prompt: tuple[int, ...], exact: bool = False, **params: Any) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), SamplingParams(**params), exact=exact, expert_counts=True)


def run(engine: Engine, *requests: GenerationRequest) -> dict[str, list[Any]]:
    """All outcomes per request, running to the end and checking every invariant on the way."""
    for one in requests:
        engine.add(one)
    outcomes: dict[str, list[Any]] = {one.request_id: [] for one in requests}
    while engine.has_work:
        for name, outcome in engine.step():
            outcomes[name].append(outcome)
        engine.check()
    return outcomes


def tokens_of(outcomes: list[Any]) -> tuple[int, ...]:
    return tuple(event.token.id for event in outcomes if isinstance(event, TokenEvent))


def finish_of(outcomes: list[Any]) -> FinishEvent:
    assert isinstance(outcomes[-1], FinishEvent), outcomes[-1]
    return outcomes[-1]
