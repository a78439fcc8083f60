"""A tiny Qwen2-MoE with moe_opt, and a tokenizer of its own: no network, no demo model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_moe import SENTENCES, build_model, train
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moe_opt.evaluation.texts import make_rows


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=256
    )


@pytest.fixture(scope="session")
def weights(tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    trained = build_model(len(tokenizer))
    rows = make_rows({"all": SENTENCES}, tokenizer, length=24, tokens=24 * 16)
    train(trained, rows.ids)
    return trained.state_dict()


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast, weights: dict[str, torch.Tensor]) -> Any:
    built = build_model(len(tokenizer))
    built.load_state_dict(weights)
    return built


@pytest.fixture(scope="session")
def model_dir(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast, weights: dict[str, torch.Tensor]
) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-moe"
    built = build_model(len(tokenizer))
    built.load_state_dict(weights)
    built.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, Path]:
    """Two domains as JSONL, one of them gzipped."""
    first, second = tmp_path / "corpus_animals.jsonl", tmp_path / "plain.jsonl.gz"
    rows = [json.dumps({"text": " ".join(SENTENCES[i:] + SENTENCES[:i])}) for i in range(60)]
    first.write_text("\n".join(rows[:30]) + "\n", encoding="utf-8")
    with gzip.open(second, "wt", encoding="utf-8") as file:
        file.write("\n".join(rows[30:]) + "\n")
    return first, second


@pytest.fixture
def quiz(tmp_path: Path) -> Path:
    path = tmp_path / "quiz.jsonl"
    rows = [
        {"prompt": f"Where does the {name} sleep?", "choices": ["the fence", "the roof", "river"], "label": i % 3}
        for i, name in enumerate(["fox", "dog", "cat", "owl", "grey fox", "red dog", "green cat"])
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path
