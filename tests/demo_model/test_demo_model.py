"""The committed demo model: small enough, better than a trigram, and with every expert in use."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "demo_model"
CORPUS = Path(os.environ.get("MOE_OPT_DATA", ROOT.parent / "shared" / "data")) / "corpus"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    return json.loads((FOLDER / "metrics.json").read_text())


def held_out(domain: str, count: int) -> list[str]:
    path = CORPUS / f"corpus_{domain}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = (json.loads(line)["text"] for line in lines)
        return [text for text in texts if zlib.crc32(text.encode()) % 20 == 0][:count]


def test_weights_keep_within_their_limits(model: Any) -> None:
    files = list(FOLDER.glob("*.safetensors"))
    assert len(files) > 1, "sharded, so that loading shards is exercised"
    assert sum(file.stat().st_size for file in files) <= 24e6
    routed = [p for name, p in model.named_parameters() if ".experts." in name]
    assert 0 < sum(p.numel() * 2 for p in routed) <= 18e6


def test_shape_is_what_the_demos_need(model: Any) -> None:
    config = model.config
    assert config.architectures == ["Qwen2MoeForCausalLM"]
    assert config.num_experts >= 32
    assert config.num_experts_per_tok >= 4
    assert config.num_hidden_layers >= 4


@pytest.mark.parametrize("domain", ["code", "medical", "lang_zh"])
def test_held_out_loss_is_below_the_trigrams(domain: str, model: Any, tokenizer: Any, metrics: dict[str, Any]) -> None:
    nats, tokens = 0.0, 0
    for text in held_out(domain, 12):
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)["input_ids"]
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1].float()
        nats += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
    assert nats / tokens < metrics["held_out"]["domains"][domain]["trigram"]


def test_every_recorded_domain_beats_the_trigram(metrics: dict[str, Any]) -> None:
    for name, row in metrics["held_out"]["domains"].items():
        assert row["model"] < row["trigram"] < row["unigram"], name


def test_every_expert_is_used(model: Any, tokenizer: Any) -> None:
    texts = [
        text
        for domain in ("code", "math", "medical", "legal", "lang_ru", "lang_zh", "general")
        for text in held_out(domain, 4)
    ]
    read = torch.zeros(model.config.num_hidden_layers, model.config.num_experts, dtype=torch.bool)
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)["input_ids"]
        with torch.inference_mode():
            router_logits = model(ids, output_router_logits=True).router_logits
        for layer, logits in enumerate(router_logits):
            read[layer, logits.topk(model.config.num_experts_per_tok).indices.flatten()] = True
    assert read.all(), f"never read (layer, expert): {(~read).nonzero().tolist()}"


def test_same_domain_batches_read_fewer_experts(metrics: dict[str, Any]) -> None:
    for size, row in metrics["specialisation"]["distinct_experts"]["all"].items():
        assert row["same_domain"] < row["mixed"], size


@pytest.mark.parametrize(
    "text",
    [
        "naïve  résumé\n\tÄÖÜ ß",
        "Привет, мир!",
        "你好，世界。",
        "🙂👩‍👩‍👧 ∑x² ≤ 3",
        " leading, trailing ",
        "\u0000\u200d",
    ],
)
def test_tokenizer_round_trips_any_text(text: str, tokenizer: Any) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_renders_turns(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|bos|><|system|>\nBe brief.\n<|user|>\nHello\n<|assistant|>\nHi.<|eos|><|user|>\nBye\n<|assistant|>\n"
    )
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|user|>")) == 2


def test_generation_stops_at_the_end_of_text(model: Any, tokenizer: Any) -> None:
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    ids = tokenizer("def add(a, b):", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=8).shape[1] > ids["input_ids"].shape[1]
