"""Place the demo model's experts on four ranks, some twice, and choose replicas for real decode batches.

    python examples/place_experts.py

Records the router's choices on a few texts, places by load, and compares the busiest rank under METRO, the paper's
greedy choice and EPLB's even split.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from moe_opt import MoEOptimizedForCausalLM
from moe_opt.modeling.metro import choose_replicas
from moe_opt.modeling.placement import place_experts

MODEL = Path(__file__).parent / "demo_model"
TEXTS = [
    "def add(a, b):\n    return",
    "The court held that the",
    "Die Stadt liegt an der",
    "What are the symptoms of",
    "Solve for x: 2x + 3 =",
    "La ciudad se encuentra en",
    "She walked to the window and",
    "Once the data is loaded, print",
]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = MoEOptimizedForCausalLM.from_pretrained(MODEL, moe_opt=True, dtype=torch.float32)
    batch = tokenizer(TEXTS, padding=True, padding_side="left", return_tensors="pt")
    with model.moe_opt.record(num_requests=len(TEXTS)) as recorder:
        model.generate(**batch, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    load = recorder.decode.sum(0)  # [L, E]

    placement = place_experts(load, num_ranks=4, slots_per_rank=12)  # 32 experts in 48 slots
    replicated = int((placement.hosts.sum(2) > 1).sum())
    print(f"{model.moe_opt.num_layers} layers of {model.moe_opt.num_experts} experts on 4 ranks of 12 slots")
    print(f"{replicated} experts have more than one replica")
    with torch.no_grad(), model.moe_opt.record(num_requests=len(TEXTS)) as step:
        model(input_ids=batch.input_ids[:, -1:])  # one decode-sized step
    tokens = step.counts.sum(0)
    for method in ("metro", "greedy", "eplb"):
        busiest = [
            int(choose_replicas(tokens[layer], placement.hosts[layer], method=method).sum(0).max())
            for layer in range(len(tokens))
        ]
        print(f"{method:>7}: busiest rank reads {busiest} experts, {sum(busiest)} over all layers")


if __name__ == "__main__":
    main()
