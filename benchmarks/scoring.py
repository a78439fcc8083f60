"""Scoring choices: throughput against plain model calls, what shared prefixes save, and whether accuracy holds.

    OMP_NUM_THREADS=2 python benchmarks/scoring.py               # a few minutes

Real multiple-choice sets (a mix, as in Table 2 of MoE-Prefill), and synthetic siblings behind prefixes of several
lengths. "plain" is one `model(...)` call per choice, "padded" a right-padded batch of the same choices, which is what
most evaluation code does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from common import write_result
from transformers import AutoTokenizer
from transformers.utils import logging

from moe_opt import MoEOptimizedForCausalLM
from moe_opt.evaluation.choices import continuation_log_probs
from moe_opt.modeling.score_item import ScoreItem
from moe_opt.modeling.scoring import ScoreStats, score_items

DATA = Path(os.environ.get("MOE_OPT_DATA", "../shared/data"))
MODEL = Path(__file__).resolve().parent.parent / "examples" / "demo_model"
SETS = ("mmlu", "arc_challenge", "openbookqa", "piqa", "winogrande", "social_iqa", "copa_balanced", "aqua_rat")
LENGTHS = {"short": 64, "medium": 256, "long": 512, "ultra-long": 1536}
SIBLINGS = 20
PAPER = "MoE-Prefill: 1.35-1.37x throughput over the best baseline, 29.8-36.2 % MFU (H100s, other models)"


def read_set(name: str, tokenizer: Any, count: int) -> tuple[list[ScoreItem], list[int]]:
    items, labels = [], []
    with gzip.open(DATA / "classification" / f"{name}.jsonl.gz", "rt") as lines:
        for line in lines:
            row = json.loads(line)
            if not isinstance(row.get("choices"), list) or not isinstance(row.get("label"), int):
                continue
            prompt = tokenizer(f"Question: {row['prompt']}\nAnswer:")["input_ids"]
            if len(prompt) > 1500:
                continue
            choices = [tokenizer(f" {choice}", add_special_tokens=False)["input_ids"] for choice in row["choices"]]
            items.append(ScoreItem(prompt, choices))
            labels.append(row["label"])
            if len(items) == count:
                break
    return items, labels


@torch.no_grad()
def plain(model: Any, items: list[ScoreItem]) -> list[list[float]]:
    """One call a choice."""
    out = []
    for item in items:
        row = []
        for choice in item.choices:
            ids = torch.tensor([[*item.prompt, *choice]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(item.prompt) - 1 : -1].float().log_softmax(-1)
            row.append(float(logits.gather(1, torch.tensor(choice).unsqueeze(1)).sum()))
        out.append(row)
    return out


def padded(model: Any, items: list[ScoreItem]) -> list[list[float]]:
    """Right-padded batches of 16."""
    pairs = [(item.prompt, choice) for item in items for choice in item.choices]
    found = iter(continuation_log_probs(model, pairs, batch_size=16))
    return [[next(found).log_prob for _ in item.choices] for item in items]


def accuracy(values: list[list[float]], labels: list[int]) -> float:
    return sum(row.index(max(row)) == label for row, label in zip(values, labels, strict=True)) / len(labels)


def timed(run: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


@torch.no_grad()
def decoded_accuracy(model: Any, tokenizer: Any, items: list[ScoreItem], labels: list[int]) -> float:
    """Answering by letters, autoregressively: the first generated token names a choice, or none."""
    right = 0
    for item, label in zip(items, labels, strict=True):
        out = model.generate(torch.tensor([list(item.prompt)]), max_new_tokens=8, do_sample=False)[
            0, len(item.prompt) :
        ]
        text = tokenizer.decode(out, skip_special_tokens=True).strip().lower()
        texts = [tokenizer.decode(list(choice)).strip().lower() for choice in item.choices]
        hits = [index for index, choice in enumerate(texts) if text.startswith(choice[:12])]
        right += hits[:1] == [label]
    return right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=60, help="of each set")
    args = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = MoEOptimizedForCausalLM.from_pretrained(MODEL, moe_opt=True, dtype=torch.float32).eval()
    figures: dict[str, Any] = {"sets": [], "siblings": [], "paper": PAPER}
    everything: list[ScoreItem] = []
    for name in SETS:
        items, labels = read_set(name, tokenizer, args.questions)
        everything += items
        ours, ours_seconds = timed(lambda items=items: score_items(model, items))
        theirs, plain_seconds = timed(lambda items=items: plain(model, items))
        worst = max(abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
        row = {
            "set": name,
            "questions": len(items),
            "accuracy": round(accuracy(ours, labels), 4),
            "accuracy_plain": round(accuracy(theirs, labels), 4),
            "accuracy_decoded": round(decoded_accuracy(model, tokenizer, items[:20], labels[:20]), 4),
            "largest_difference_nats": float(f"{worst:.2g}"),
            "speedup_over_plain": round(plain_seconds / ours_seconds, 2),
        }
        figures["sets"].append(row)
        print(row, flush=True)
    stats = ScoreStats()
    _, ours_seconds = timed(lambda: score_items(model, everything, stats=stats))
    _, alone_seconds = timed(lambda: score_items(model, everything, share_prefixes=False))
    _, padded_seconds = timed(lambda: padded(model, everything))
    figures["mix"] = {
        "choices_per_second": round(stats.choices / ours_seconds, 1),
        "prefix_hit_rate": round(stats.prefix_hit_rate, 4),
        "over_padded_batches": round(padded_seconds / ours_seconds, 2),
        "over_no_sharing": round(alone_seconds / ours_seconds, 2),
    }
    print(figures["mix"], flush=True)
    generator = torch.Generator().manual_seed(0)
    for name, length in LENGTHS.items():
        prefix = torch.randint(3, 8000, (length,), generator=generator).tolist()
        suffixes = torch.randint(3, 8000, (SIBLINGS, 12), generator=generator).tolist()
        items = [ScoreItem([*prefix, *suffix], [[5], [6]]) for suffix in suffixes]
        score_items(model, items[:2])
        _, ours_seconds = timed(lambda items=items: score_items(model, items))
        _, plain_seconds = timed(lambda items=items: plain(model, [i._replace(choices=i.choices[:1]) for i in items]))
        row = {
            "prefix": name,
            "tokens": length,
            "siblings": SIBLINGS,
            "speedup": round(plain_seconds / ours_seconds, 2),
        }
        figures["siblings"].append(row)
        print(row, flush=True)
    print(f"paper: {PAPER}")
    write_result("scoring", figures)


if __name__ == "__main__":
    main()
