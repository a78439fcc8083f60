"""lm-eval runs a moe_opt model on a local task, exact and browned out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_opt.errors import ConfigError


@pytest.fixture
def adapter() -> Any:
    pytest.importorskip("lm_eval")
    from moe_opt.evaluation import lm_eval_adapter

    return lm_eval_adapter


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    rows = [
        {"query": f"Where does the {name} sleep?", "choices": ["the fence", "the red roof", "river"], "gold": i % 3}
        for i, name in enumerate(["fox", "dog", "cat", "owl", "grey fox", "red dog"])
    ]
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {
        "task": "tiny_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }


def _run(lm: Any, task: dict[str, Any]) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model=lm, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, batch_size=4
    )
    assert found is not None
    return found


def _sums(found: dict[str, Any]) -> list[list[float]]:
    return [[float(r[0]) for r in s["filtered_resps"]] for s in found["samples"]["tiny_local"]]


def test_a_task_gives_the_models_own_log_likelihoods(
    adapter: Any, model_dir: Path, task: dict[str, Any], model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    lm = adapter.MoEOptLM(str(model_dir), device="cpu", dtype="float32", batch_size=4)
    found = _run(lm, task)
    assert 0 <= found["results"]["tiny_local"]["acc,none"] <= 1
    for sample, sums in zip(found["samples"]["tiny_local"], _sums(found), strict=True):
        context = tokenizer(sample["doc"]["query"])["input_ids"]
        for choice, value in zip(sample["doc"]["choices"], sums, strict=True):
            ids = tokenizer(f"{sample['doc']['query']} {choice}")["input_ids"]
            with torch.no_grad():
                log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            direct = sum(float(log_probs[p - 1, ids[p]]) for p in range(len(context), len(ids)))
            assert value == pytest.approx(direct, abs=1e-3)


def test_brownout_is_set_by_model_arguments(
    adapter: Any, model_dir: Path, task: dict[str, Any], model: Any, tmp_path: Path
) -> None:
    from lm_eval.api.registry import get_model

    from moe_opt import UnitedExperts

    UnitedExperts.from_average(model, ways=4).save_pretrained(tmp_path / "united" / "ways-4")
    UnitedExperts.from_average(model, ways=2).save_pretrained(tmp_path / "united" / "ways-2")
    assert get_model("moe_opt") is adapter.MoEOptLM
    lm = adapter.MoEOptLM.create_from_arg_string(
        f"pretrained={model_dir},united_experts={tmp_path / 'united'},ways=4,threshold=0.0,dtype=float32",
        {"device": "cpu", "batch_size": 4},
    )
    browned = _sums(_run(lm, task))
    assert lm.model.moe_opt.brownout("prefill").threshold == 0
    assert lm.model.moe_opt.last_step.active_experts.max() <= 2
    lm.model.moe_opt.set_brownout(threshold=1.0)
    assert browned != _sums(_run(lm, task))


def test_padding_does_not_reach_the_brownout_counts(adapter: Any, model: Any, tokenizer: Any) -> None:
    lm = adapter.MoEOptLM(model, tokenizer=tokenizer, batch_size=2)
    short, long = (None, [5, 6], [7]), (None, list(range(3, 60)), [8])
    lm._loglikelihood_tokens([short, long], disable_tqdm=True)
    with model.moe_opt.record(num_requests=2) as record:
        lm._loglikelihood_tokens([short, long], disable_tqdm=True)
    per_row = record.counts.sum(dim=(1, 2)).tolist()
    assert per_row == [57 * 2 * 2, 2 * 2 * 2]  # tokens x layers x top-2, the longer row first


def test_long_texts_roll_through_the_whole_window(adapter: Any, model: Any, tokenizer: Any) -> None:
    from lm_eval.api.instance import Instance

    lm = adapter.MoEOptLM(model, tokenizer=tokenizer, batch_size=2, max_length=16)
    text = "The fox jumps over the red fence and then sleeps. " * 4
    (found,) = lm.loglikelihood_rolling(
        [Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)], disable_tqdm=True
    )
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > 16
    total = 0.0
    whole = [tokenizer.bos_token_id, *ids]
    with torch.no_grad():
        for start in range(0, len(ids), 16):
            end = min(start + 16, len(ids))
            window = whole[max(0, end - 16) : end]  # lm-eval fills the last window with what came before
            log_probs = model(input_ids=torch.tensor([window])).logits[0].log_softmax(-1)
            for place in range(start, end):
                total += float(log_probs[place - max(0, end - 16), ids[place]])
    assert found == pytest.approx(total, rel=1e-3)


def test_models_without_moe_opt_are_refused(adapter: Any, model: Any) -> None:
    with pytest.raises(ConfigError, match="not loaded with moe_opt"):
        adapter.MoEOptLM(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="attach them to the model instead"):
        adapter.MoEOptLM(model, ways=4)


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "moe_opt.evaluation.lm_eval_adapter", raising=False)
    for name in [n for n in sys.modules if n == "lm_eval" or n.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'lm-eval\[hf\]'"):
        import moe_opt.evaluation.lm_eval_adapter  # noqa: F401
