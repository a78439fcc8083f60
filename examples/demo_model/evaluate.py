"""Measures the demo model on held-out texts, against a unigram and a trigram model, and writes metrics.json.

python examples/demo_model/evaluate.py --model examples/demo_model
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experts  # noqa: F401  (registers "padded_grouped_mm")
import numpy as np
import torch
import torch.nn.functional as F
from data import DOMAINS, encode_domain, read_corpus
from ngram import Trigram, Unigram
from routing import (
    DECODE,
    PREFILL,
    Requests,
    batch_locality,
    prefill_decode_correlation,
    record_requests,
    signature_correlation,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

TOKENS_PER_DOMAIN = 30_000
LONGEST = 512
BATCH_TOKENS = 8192
REQUESTS_PER_DOMAIN = 48
TASKS = ["code", "math", "medical", "legal", "general"]
LANGUAGES = ["lang_de", "lang_es", "lang_fr", "lang_ru", "lang_zh"]
NATURAL = {"en", "de", "es", "fr", "ru", "zh"}  # code rows may name a programming language instead


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out text: its tokens, beginning with <|bos|>, and the bytes that the tokens after it stand for."""

    domain: str
    lang: str
    tokens: np.ndarray
    size: int


def held_out_texts(tokenizer: PreTrainedTokenizerFast, domain: str) -> list[HeldOut]:
    """Up to TOKENS_PER_DOMAIN tokens of one domain, each text cut at LONGEST tokens."""
    texts, total = [], 0
    for document in read_corpus(domain, held_out=True):
        tokens = tokenizer(document.text, truncation=True, max_length=LONGEST)["input_ids"]
        size = len(tokenizer.decode(tokens[1:]).encode())
        texts.append(HeldOut(domain, document.lang, np.array(tokens), size))
        total += len(tokens) - 1
        if total >= TOKENS_PER_DOMAIN:
            break
    return texts


def batches(texts: list[HeldOut]) -> Iterator[list[int]]:
    """Indices of texts of like length, at most BATCH_TOKENS with padding."""
    batch: list[int] = []
    for index in np.argsort([-len(text.tokens) for text in texts], kind="stable").tolist():
        if batch and len(texts[batch[0]].tokens) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    yield batch


@torch.inference_mode()
def model_nats(model: PreTrainedModel, texts: list[HeldOut]) -> np.ndarray:
    """The negative log-probability that the model gives to each text, its first token after <|bos|>."""
    nats = np.zeros(len(texts))
    for batch in batches(texts):
        longest = len(texts[batch[0]].tokens)
        ids = torch.full((len(batch), longest), model.config.pad_token_id)
        for row, index in enumerate(batch):
            ids[row, : len(texts[index].tokens)] = torch.from_numpy(texts[index].tokens)
        # Texts are padded on the right, where a causal model does not look.
        hidden = model.model(ids, use_cache=False).last_hidden_state
        for row, index in enumerate(batch):
            tokens = len(texts[index].tokens)
            logits = model.lm_head(hidden[row, : tokens - 1]).float()
            nats[index] = F.cross_entropy(logits, ids[row, 1:tokens], reduction="sum").item()
    return nats


def baseline_nats(tokenizer: PreTrainedTokenizerFast, texts: list[HeldOut]) -> tuple[np.ndarray, np.ndarray, int]:
    """The same for the unigram and the trigram model, trained on the very training texts; and their tokens."""
    stream = np.concatenate([encode_domain(tokenizer, domain, chat=False) for domain in DOMAINS])
    # In training a text's first words follow the <|eos|> of the text before and <|bos|>.
    contexts = [np.concatenate([[tokenizer.eos_token_id], text.tokens]) for text in texts]
    models = (Unigram(stream, len(tokenizer)), Trigram(stream, len(tokenizer)))
    unigram, trigram = (np.array([model.nats(text).sum() for text in contexts]) for model in models)
    return unigram, trigram, len(stream)


def summarise(texts: list[HeldOut], nats: dict[str, np.ndarray]) -> dict[str, Any]:
    """Nats per token of every model, and the demo model's bits per byte: by domain, by language, overall."""
    groups: dict[str, dict[str, list[int]]] = {"domains": defaultdict(list), "languages": defaultdict(list)}
    for index, text in enumerate(texts):
        groups["domains"][text.domain].append(index)
        if text.lang in NATURAL:
            groups["languages"][text.lang].append(index)

    def row(members: list[int]) -> dict[str, float]:
        tokens = sum(len(texts[index].tokens) - 1 for index in members)
        size = sum(texts[index].size for index in members)
        losses = {name: round(float(values[members].sum() / tokens), 4) for name, values in nats.items()}
        bits = float(nats["model"][members].sum() / math.log(2) / size)
        return {"texts": len(members), "tokens": tokens, **losses, "model_bits_per_byte": round(bits, 4)}

    table = {kind: {name: row(group[name]) for name in sorted(group)} for kind, group in groups.items()}
    return {**table, "all": row(list(range(len(texts))))}


def request_windows(tokenizer: PreTrainedTokenizerFast, domain: str) -> torch.Tensor:
    """Held-out requests of PREFILL + DECODE tokens: windows of texts that do not overlap."""
    length = PREFILL + DECODE
    windows: list[list[int]] = []
    for document in read_corpus(domain, held_out=True):
        tokens = tokenizer(document.text, add_special_tokens=False)["input_ids"]
        for start in range(0, len(tokens) - length + 2, length - 1):
            windows.append([tokenizer.bos_token_id, *tokens[start : start + length - 1]])
    return torch.tensor(windows[:REQUESTS_PER_DOMAIN])


def specialisation(requests: Requests) -> dict[str, Any]:
    """Expert use by domain and the measures of ELDR's Figs. 3, 4 and 7."""
    use = {domain: requests.reads[requests.domains == domain].mean(axis=(0, 1)).round(4).tolist() for domain in DOMAINS}
    load = requests.reads.mean(axis=(0, 1))
    top_k = requests.reads[0, 0, 0].sum()
    mixes = {"all": list(DOMAINS), "tasks": TASKS, "languages": LANGUAGES}
    return {
        "requests": len(requests.domains),
        "prefill_tokens": PREFILL,
        "decode_tokens": DECODE,
        "distinct_experts": {
            name: {
                str(size): {k: round(v, 2) for k, v in batch_locality(requests, domains, size).items()}
                for size in (8, 16, 32)
            }
            for name, domains in mixes.items()
        },
        "prefill_decode_correlation": round(prefill_decode_correlation(requests), 3),
        "signature_rho": round(signature_correlation(requests), 3),
        "smallest_load": round(float(load.min() * load.shape[-1] / top_k), 3),
        "largest_load": round(float(load.max() * load.shape[-1] / top_k), 3),
        "use": use,
    }


@torch.inference_mode()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[HeldOut]) -> dict[str, Any]:
    """A continuation of the start of one held-out text in every domain."""
    samples = {}
    for domain in DOMAINS:
        text = next(text for text in texts if text.domain == domain and len(text.tokens) > 100)
        prompt = torch.from_numpy(text.tokens[:24])[None]
        torch.manual_seed(0)
        output = model.generate(prompt, max_new_tokens=48, do_sample=True, temperature=0.6, top_p=0.9)
        samples[domain] = {
            "prompt": tokenizer.decode(prompt[0, 1:]),
            "continuation": tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True),
        }
    return samples


def sizes(model: PreTrainedModel) -> dict[str, int]:
    """Bytes of the weights as stored, and of the routed experts among them."""
    weights = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": sum(weights.values()),
        "routed_expert_bytes": sum(size for name, size in weights.items() if ".experts." in name),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("examples/demo_model"))
    parser.add_argument("--out", type=Path, help="where metrics.json goes; the model's folder by default")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("padded_grouped_mm")

    texts = [text for domain in DOMAINS for text in held_out_texts(tokenizer, domain)]
    print(f"scoring {len(texts)} held-out texts", flush=True)
    nats = {"model": model_nats(model, texts)}
    print("fitting the baselines", flush=True)
    nats["unigram"], nats["trigram"], training_tokens = baseline_nats(tokenizer, texts)
    print("recording expert use", flush=True)
    requests = record_requests(model, {domain: request_windows(tokenizer, domain) for domain in DOMAINS})
    metrics = {
        "sizes": sizes(model),
        "training": json.loads((args.model / "training.json").read_text()),
        "corpus_tokens": training_tokens,
        "held_out": summarise(texts, nats),
        "specialisation": specialisation(requests),
        "samples": sample(model, tokenizer, texts),
    }
    path = (args.out or args.model) / "metrics.json"
    path.write_text(json.dumps(metrics, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(metrics["held_out"], indent=1))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
