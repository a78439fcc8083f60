"""The expert-parallel forward in real gloo groups, against the same model in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ep_worker import ROWS, prefill_and_decode, prompts
from families import VOCAB, make_stock
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt import MoEOptConfig, MoEOptimizedForCausalLM, UnitedExperts
from moe_opt.errors import ConfigError
from moe_opt.modeling.placement import place_experts
from moe_opt.modeling.replica_dispatch import split_evenly

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral")
WORKER = Path(__file__).with_name("ep_worker.py")


def run_group(tmp_path: Path, ranks: int, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Start `ranks` processes on the cases. Returns per rank a list of what each case found."""
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"cases": cases, "out": str(tmp_path)}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(WORKER), str(job)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@torch.no_grad()
def save_case(tmp_path: Path, family: str, ranks: int) -> dict[str, Any]:
    """A tiny model on disk, and what one process makes of every rank's prompts."""
    make_stock(family).save_pretrained(tmp_path / family)
    return case_of(tmp_path / family, ranks)


def case_of(folder: Path, ranks: int) -> dict[str, Any]:
    single = MoEOptimizedForCausalLM.from_pretrained(folder, moe_opt=True, dtype=torch.float32).eval()
    logits, tokens = {}, {}
    for rank in range(ranks):
        ids = prompts(rank, VOCAB)
        if ids.numel():
            logits[rank] = prefill_and_decode(single, ids)
            tokens[rank] = single.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
    expected = folder.with_suffix(".pt")
    torch.save({"logits": logits}, expected)
    return {"model": str(folder), "expected": str(expected), "vocabulary": VOCAB, "tokens": tokens}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_one_process(tmp_path: Path, family: str) -> None:
    base = save_case(tmp_path, family, 2)
    cases = [
        {**base, "settings": {"method": method, "slots_per_rank": 6}}
        for method in ("metro", "greedy", "optimal", "eplb")
    ]
    cases.append({**base, "settings": {"decode_tokens": 0, "replication": 1.5}})  # every step takes the even split
    routed = {"decode_tokens": 0, "replication": 1.5, "prefill_dispatch": "all-to-all"}
    cases.append({**base, "settings": routed})  # every step sends tokens where they are computed
    cases.append({**base, "settings": {"slots_per_rank": 6}, "rebalance": True})
    cases.append({**base, "settings": {}, "generate": True})  # no replicas
    by_rank = run_group(tmp_path, 2, cases)
    for rank, found in enumerate(by_rank):
        for case, result in zip(cases, found, strict=True):
            assert result["difference"] < 2e-4, case["settings"]
            slots = case["settings"].get("slots_per_rank", 6 if "replication" in case["settings"] else 4)
            assert result["held"] == [slots] * len(result["held"]), "a rank holds its own experts only"
            assert result["loaded"] == result["bytes"], "and has read no others"
            for read, planned in zip(result["read"], result["planned"], strict=True):
                assert planned is None or read == planned
        assert found[-2]["received"] == sum(found[-2]["moved"])
        assert found[-1]["tokens"] == base["tokens"][rank]
        assert len(found[-1]["recorded"]) == ROWS[rank][0], "the recorder counts this rank's own requests"
        assert min(found[-1]["recorded"]) > 0


def test_four_ranks_one_of_them_idle(tmp_path: Path) -> None:
    base = save_case(tmp_path, "qwen3_moe", 4)
    cases = [{**base, "settings": {"method": "metro", "slots_per_rank": 3}}, {**base, "settings": {"method": "eplb"}}]
    for replication in (1.0, 1.5):  # top-2 of 4 ranks: "auto" sends tokens to the ranks that compute for them
        cases.append({**base, "settings": {"decode_tokens": 0, "replication": replication}})
    for found in run_group(tmp_path, 4, cases):
        for result in found:
            assert result["difference"] < 2e-4
            for read, planned in zip(result["read"], result["planned"], strict=True):
                assert planned is None or read == planned


def test_brownout_plans_over_the_whole_group(tmp_path: Path) -> None:
    """Two ranks with a threshold read what one process reads that sees both ranks' tokens at once."""
    base = save_case(tmp_path, "qwen3_moe", 2)
    model = MoEOptimizedForCausalLM.from_pretrained(base["model"], moe_opt=True, dtype=torch.float32).eval()
    UnitedExperts.from_average(model, ways=2).save_pretrained(tmp_path / "united")
    Path(base["expected"]).unlink()
    torch.save({}, base["expected"])
    case = {**base, "united": str(tmp_path / "united"), "brownout": 0.0, "settings": {"method": "metro"}}
    by_rank = run_group(tmp_path, 2, [case, {**case, "brownout": 1.0}])
    browned = [sum(found[0]["read"]) for found in by_rank]
    exact = [sum(found[1]["read"]) for found in by_rank]
    assert sum(browned) < sum(exact)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), experts=st.integers(1, 10), ranks=st.integers(1, 4))
def test_even_split_is_even(data: st.DataObject, experts: int, ranks: int) -> None:
    rows = st.lists(st.booleans(), min_size=ranks, max_size=ranks).filter(any)
    hosts = torch.tensor(data.draw(st.lists(rows, min_size=experts, max_size=experts)))
    ids = torch.tensor(data.draw(st.lists(st.integers(-1, experts - 1), min_size=2, max_size=40))[:40])
    ids = ids[: len(ids) // 2 * 2].view(-1, 2)
    rank = split_evenly(ids, hosts)
    for expert in range(experts):
        mine = rank[ids == expert]
        shares = torch.bincount(mine, minlength=ranks)[hosts[expert]]
        assert int(shares.sum()) == len(mine), "only hosts get tokens"
        assert int(shares.max()) - int(shares.min()) <= 1


def test_settings_and_what_cannot_work() -> None:
    assert MoEOptConfig(expert_parallel={"method": "greedy"}).to_dict()["expert_parallel"]["method"] == "greedy"
    assert MoEOptConfig(expert_parallel=False).to_dict() == {}
    with pytest.raises(ConfigError, match="unknown expert_parallel setting 'ranks'"):
        MoEOptConfig(expert_parallel={"ranks": 2})
    with pytest.raises(ConfigError, match="unknown expert_parallel method"):
        MoEOptConfig(expert_parallel={"method": "best"})
    with pytest.raises(ConfigError, match="at least 1"):
        MoEOptConfig(expert_parallel={"replication": 0.5})
    with pytest.raises(ConfigError, match="unknown prefill_dispatch 'mail'"):
        MoEOptConfig(expert_parallel={"prefill_dispatch": "mail"})


def test_without_a_launcher_it_says_how_to_start(tmp_path: Path) -> None:
    make_stock("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"):
        MoEOptimizedForCausalLM.from_pretrained(tmp_path, moe_opt={"expert_parallel": True})


def test_a_placement_of_another_model_is_refused(tmp_path: Path) -> None:
    import torch.distributed as dist

    make_stock("qwen3_moe").save_pretrained(tmp_path)
    place_experts(torch.ones(2, 8), 1, 8).save(tmp_path / "placement.json")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="the model has"):
            MoEOptimizedForCausalLM.from_pretrained(
                tmp_path, moe_opt={"expert_parallel": {"placement": str(tmp_path / "placement.json")}}
            )
        model = MoEOptimizedForCausalLM.from_pretrained(tmp_path, moe_opt={"expert_parallel": True})
        with pytest.raises(ConfigError, match="one rank's experts only"):
            model.save_pretrained(tmp_path / "copy")
    finally:
        dist.destroy_process_group()
