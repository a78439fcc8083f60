"""The frontend of prefill-only scoring in real processes: co-location of prefixes and saturation, each left out.

    python benchmarks/scoring_frontend.py                         # about three minutes

Multi-selection requests as MoE-Prefill (section 3) decomposes them: every choice of a question is a request of its own
behind the question's prompt, in random order. Two scoring processes share the queue; what decides where a request goes
is the scheduler alone (Algorithm 1, and the same without one of its rules). No KV is kept from one round to the next,
so that siblings share their prefix only where they meet in a round: the queue is sorted by prompts, which the paper's
cache makes unnecessary.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from common import write_result
from scoring import MODEL, SETS, read_set
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from moe_opt.cluster.prefill import PrefillScheduler
from moe_opt.cluster.prefill_baselines import LoadOnlyScheduler, PrefixOnlyScheduler, ShortestPrefillScheduler
from moe_opt.modeling.score_item import ScoreItem
from moe_opt.modeling.scoring import ScoreStats
from moe_opt.serving.score_pool import ScorerPool, ScorerSettings

BOTH = "co-location and saturation"
# scheduler, and whether the queue is sorted by prompts
SCHEDULERS: dict[str, tuple[type[PrefillScheduler], bool]] = {
    BOTH: (PrefillScheduler, True),
    "without co-location": (LoadOnlyScheduler, True),
    "without saturation": (PrefixOnlyScheduler, True),
    "in the order of arrival": (PrefillScheduler, False),
    "in the order of arrival, without co-location": (LoadOnlyScheduler, False),
    "shortest prefill first (PrefillOnly)": (ShortestPrefillScheduler, False),
}
PAPER = "MoE-Prefill, Fig. 10: +16 to +18 % for its frontend over vLLM's default scheduler at 8 GPUs"


def requests(name: str, tokenizer: Any, questions: int) -> list[ScoreItem]:
    """A set's questions as binary siblings: one item per choice."""
    items, _ = read_set(name, tokenizer, questions)
    return [ScoreItem([*item.prompt, *choice], [[5], [6]]) for item in items for choice in item.choices]


def synthetic(prefixes: int, siblings: int, length: int, hot: int) -> list[ScoreItem]:
    """Siblings behind a few prefixes, the first of them with `hot` times as many: one worker must not get it all."""
    draw = random.Random(0)
    items = []
    for number in range(prefixes):
        prefix = [draw.randrange(3, 8000) for _ in range(length)]
        for _ in range(siblings * (hot if number == 0 else 1)):
            items.append(ScoreItem([*prefix, *(draw.randrange(3, 8000) for _ in range(24))], [[5], [6]]))
    return items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=60, help="of each set")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = AutoConfig.from_pretrained(MODEL)
    mix = [item for name in SETS for item in requests(name, tokenizer, args.questions)]
    loads = {
        "multi-selection, eight sets": mix,
        "20 siblings behind each of 24 prefixes of 512": synthetic(24, 20, 512, 1),
        "the same, one prefix with 20 times as many": synthetic(24, 20, 512, 20),
    }
    for items in loads.values():
        random.Random(1).shuffle(items)
    settings = ScorerSettings(str(MODEL), "bfloat16", "cpu", 2048, True)
    figures: list[dict[str, Any]] = []
    pools = {
        name: ScorerPool(settings, args.workers, config, scheduler=kind, sort=sort)
        for name, (kind, sort) in SCHEDULERS.items()
    }
    try:
        for load, items in loads.items():
            seconds: dict[str, list[float]] = {name: [] for name in pools}
            for repeat in range(args.repeats + 1):
                for name, pool in pools.items():
                    pool.stats = ScoreStats()
                    start = time.perf_counter()
                    pool.score(items)
                    if repeat:  # the first one warms up
                        seconds[name].append(time.perf_counter() - start)
            best = min(seconds[BOTH])
            for name, pool in pools.items():
                row = {
                    "load": load,
                    "scheduler": name,
                    "requests_per_second": round(len(items) / min(seconds[name]), 1),
                    "of_both_rules": round(best / min(seconds[name]), 3),
                    "prefix_hit_rate": round(pool.stats.prefix_hit_rate, 4),
                }
                figures.append(row)
                print(row, flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    print(f"paper: {PAPER}")
    write_result("scoring_frontend", {"workers": args.workers, "rows": figures, "paper": PAPER})


if __name__ == "__main__":
    main()
