"""A tiny teacher on disk with a character tokenizer, some text, and recipes for them."""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "modeling"))  # families.py

from families import VOCAB, make_stock

from moe_opt.distill.config import DistillConfig

torch.set_num_threads(1)


def character_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<bos>", "<eos>", "<unk>", *string.ascii_letters, *string.digits, *" .,;:!?-'\n"]
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols[:VOCAB])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def save_teacher(family: str, folder: Path) -> Path:
    make_stock(family).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher("qwen2_moe", tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8))) for _ in range(60)]
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    with file.open("w") as out:
        for _ in range(120):
            out.write(json.dumps({"text": " ".join(draw.choices(words, k=30)) + "."}) + "\n")
    return file


@pytest.fixture
def recipe(teacher_dir: Path, text_file: Path, tmp_path: Path) -> Callable[..., DistillConfig]:
    """A recipe that runs in seconds; keyword arguments change sections of it."""

    def make(**changes: Any) -> DistillConfig:
        data: dict[str, Any] = {
            "model": {"name": str(teacher_dir), "dtype": "float32"},
            "data": {"path": "json", "data_files": [str(text_file)], "length": 32, "held_out": 10},
            "ways": [2, 4],
            "calibration_tokens": 512,
            "layers": {"steps": 0},
            "logits": {"steps": 0},
            "training": {"batch_size": 4, "plan_size": 2, "save_steps": 2, "logging_steps": 1, "use_cpu": True},
            "measure": {"sequences": 4, "batch_size": 2, "thresholds": [0.0]},
            "output": str(tmp_path / "out"),
            "work": str(tmp_path / "work"),
        }
        for key, value in changes.items():
            data[key] = {**data[key], **value} if isinstance(value, dict) else value
        file = tmp_path / "recipe.yaml"
        file.write_text(json.dumps(data))  # JSON is YAML
        return DistillConfig.from_yaml(file)

    return make
