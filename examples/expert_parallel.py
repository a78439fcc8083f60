"""The demo model on two expert-parallel ranks, each with prompts of its own.

    python examples/expert_parallel.py                                     # starts two processes
    torchrun --nproc-per-node 2 examples/expert_parallel.py                # or start them yourself

A rank holds half of the experts and some replicas (1.5 x); the ranks generate in lock step, and METRO chooses which
replica of each expert a step reads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

MODEL = Path(__file__).parent / "demo_model"
PROMPTS = (["def area(radius):", "The court held that"], ["Die Stadt liegt", "La ciudad es", "She opened the door"])


def main() -> None:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from moe_opt import MoEOptConfig, MoEOptimizedForCausalLM

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    settings = MoEOptConfig(expert_parallel={"method": "metro", "replication": 1.5})
    model = MoEOptimizedForCausalLM.from_pretrained(MODEL, moe_opt=settings, dtype=torch.float32)
    parallel = model.moe_opt.expert_parallel
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    batch = tokenizer(PROMPTS[parallel.rank % 2], padding=True, padding_side="left", return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=12, do_sample=False, synced_gpus=True)
    texts = tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    held = len(parallel.held_experts(0))
    read = model.moe_opt.last_step.active_experts.tolist()
    print(
        f"rank {parallel.rank} of {parallel.num_ranks}: holds {held} of {model.moe_opt.num_experts} experts a layer, "
        f"read {read} in the last step; first continuation {texts[0]!r}",
        flush=True,
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        sys.exit(subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode)
