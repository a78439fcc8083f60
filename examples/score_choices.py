"""Which choice follows? Scores a few questions on the demo model, shared prefixes computed once.

python examples/score_choices.py
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from moe_opt import MoEOptimizedForCausalLM
from moe_opt.modeling.score_item import ScoreItem
from moe_opt.modeling.scoring import ScoreStats, score_items

MODEL = Path(__file__).parent / "demo_model"
ARTICLE = (
    "The tenant shall pay the rent on the first day of every month. If the rent is not paid within ten days, the "
    "landlord may end this contract in writing. Repairs of the roof, the walls and the heating are the landlord's. "
) * 4
LABELS = ["law", "cooking", "sport", "music", "rent", "weather", "travel", "money"]


def main() -> None:
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = MoEOptimizedForCausalLM.from_pretrained(MODEL, moe_opt=True, dtype=torch.float32)

    def item(prompt: str, choices: list[str]) -> ScoreItem:
        return ScoreItem(
            tokenizer(prompt)["input_ids"], [tokenizer(c, add_special_tokens=False)["input_ids"] for c in choices]
        )

    items = [item(f"{ARTICLE}\nLabel: {label}\nDoes the label apply? Answer:", [" yes", " no"]) for label in LABELS]
    for share in (False, True):
        stats = ScoreStats()
        start = time.perf_counter()
        values = score_items(model, items, share_prefixes=share, stats=stats)
        print(
            f"{'shared prefixes' if share else 'one by one':<16} {time.perf_counter() - start:5.2f} s, "
            f"{stats.computed:,} of {stats.asked:,} tokens computed"
        )
    for label, (yes, no) in zip(LABELS, values, strict=True):
        print(f"{label:>8}: yes {torch.tensor([yes, no]).softmax(0)[0]:.2f}")


if __name__ == "__main__":
    main()
