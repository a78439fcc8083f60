"""One rank of an expert-parallel test: `torchrun` runs it; the parent wrote the models, the job and what to expect.

Writes OUT/rank-R.json: the largest differences found, and what the rank read. A failed check ends the process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe_opt
from moe_opt import MoEOptimizedForCausalLM, UnitedExperts
from moe_opt.modeling.placement import rebalance_experts

ROWS = ((2, 7), (1, 5), (3, 4), (0, 0))  # batch and length of each rank's prompts; rank 3 has none


def prompts(rank: int, vocabulary: int) -> torch.Tensor:
    batch, length = ROWS[rank]
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(3, vocabulary, (batch, length), generator=generator)


@torch.no_grad()
def prefill_and_decode(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the prompts, and of one more token each."""
    first = model(input_ids=ids, use_cache=True)
    token = first.logits[:, -1:].argmax(-1)
    second = model(input_ids=token, past_key_values=first.past_key_values, use_cache=True)
    return first.logits, second.logits


def run_case(case: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    expected = torch.load(case["expected"])
    settings = {case.get("feature", "expert_parallel"): case["settings"], "kernels": "grouped_mm"}
    model = MoEOptimizedForCausalLM.from_pretrained(case["model"], moe_opt=settings, dtype=torch.float32).eval()
    parallel = model.moe_opt.expert_parallel or model.moe_opt.async_ep
    held = [int(module.down_proj.shape[0]) for _, module in model.moe_opt.layers]
    found_bytes = [
        sum(tensor.numel() * tensor.element_size() for tensor in module._parameters.values() if tensor is not None)
        for _, module in model.moe_opt.layers
    ]
    if case.get("brownout") is not None:
        united = UnitedExperts.from_pretrained(case["united"])
        moe_opt.attach_united_experts(model, united)
        model.moe_opt.set_brownout(threshold=case["brownout"])
    found: dict[str, Any] = {"held": held, "difference": 0.0, "read": [], "planned": []}
    found["loaded"], found["bytes"] = getattr(parallel, "bytes_read", None), sum(found_bytes)
    ids = prompts(rank, case["vocabulary"])
    if ids.numel() == 0:
        parallel.idle()
        parallel.idle()
    else:
        logits = prefill_and_decode(model, ids)
        if "logits" in expected:
            found["difference"] = max(
                float((mine - theirs).abs().max())
                for mine, theirs in zip(logits, expected["logits"][rank], strict=True)
            )
    if ids.numel() == 0:
        return found  # `last_step` of padding says nothing of this rank's own
    found["read"] = model.moe_opt.last_step.active_experts.tolist()
    for choice in getattr(parallel, "activated", []):
        found["planned"].append(None if choice is None else int((choice == rank).sum()))
    if case.get("rebalance"):
        load = torch.rand(
            model.moe_opt.num_layers, model.moe_opt.num_experts, generator=torch.Generator().manual_seed(5)
        )
        placement, moves = rebalance_experts(parallel.placement, load**4)
        found["received"] = parallel.rebalance(placement)
        found["moved"] = [sum(target == rank for _, target in layer) for layer in moves]
        again = prefill_and_decode(model, ids)
        found["difference"] = max(
            [found["difference"]]
            + [float((a - b).abs().max()) for a, b in zip(again, expected["logits"][rank], strict=True)]
        )
    if case.get("generate"):
        with model.moe_opt.record(num_requests=len(ids)) as recorder:
            out = model.generate(ids, max_new_tokens=6, do_sample=False, synced_gpus=True, pad_token_id=0)
        found["tokens"] = out.tolist()
        found["recorded"] = recorder.counts.sum((1, 2)).tolist()
    return found


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for case in job["cases"]:
        results.append(run_case(case, rank, ranks))
        dist.barrier()
    (Path(job["out"]) / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
