"""Whole runs: what is saved, that training helps, that a kill or a second process changes nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_opt import MoEOptConfig, MoEOptimizedForCausalLM, UnitedExperts, attach_united_experts
from moe_opt.distill import distill
from moe_opt.distill import trainer as trainer_module
from moe_opt.distill.config import DistillConfig
from moe_opt.distill.data import PackedSequences, StreamedSequences, is_held_out, load_texts, load_tokenizer
from moe_opt.distill.trainer import ProgressLines, check_processes
from moe_opt.errors import ConfigError

Recipe = Callable[..., DistillConfig]

# Runs a recipe in a process of its own; "KILL n" dies the hard way in the middle of optimizer step n.
RUNNER = """
import os, sys, torch
torch.set_num_threads(1)
from moe_opt.distill import distill, trainer
from moe_opt.distill.config import DistillConfig
kill = int(os.environ.get("KILL", "0"))
if kill:
    step = trainer.DistillTrainer.training_step
    def dying(self, *args, **kwargs):
        if self.state.global_step == kill:
            os._exit(9)
        return step(self, *args, **kwargs)
    trainer.DistillTrainer.training_step = dying
distill(DistillConfig.from_yaml(sys.argv[1]))
"""


def run(recipe_file: Path, *, processes: int = 1, kill: int = 0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KILL": str(kill), "HF_HUB_OFFLINE": "1"}
    script = recipe_file.with_suffix(".py")
    script.write_text(RUNNER)
    command = [sys.executable]
    if processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]
    return subprocess.run(
        [*command, str(script), str(recipe_file)], capture_output=True, text=True, env=env, timeout=240
    )


def tensors_of(folder: Path, way: int) -> list[torch.Tensor]:
    united = UnitedExperts.from_pretrained(folder, ways=way)
    return [value.float() for layer in united.tensors for value in layer.values()]


def losses_of(config: DistillConfig, stage: str) -> list[float]:
    return [row["loss"] for row in json.loads((config.work_folder / stage / "final" / "history.json").read_text())]


def divergence_of(teacher_dir: Path, folder: Path) -> float:
    """Of a browned-out teacher (threshold 0) from itself, with the united experts in `folder`, on fixed tokens."""
    model = MoEOptimizedForCausalLM.from_pretrained(teacher_dir, moe_opt=True)
    tokens = torch.randint(4, 30, (32, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(tokens).logits.log_softmax(-1)
        attach_united_experts(model, UnitedExperts.from_pretrained(folder, ways=4))
        model.moe_opt.set_brownout(threshold=0.0)
        browned = model(tokens).logits.log_softmax(-1)
    return float((exact.exp() * (exact - browned)).sum(-1).mean())


def test_a_run_writes_checkpoints_that_serve_and_both_stages_lower_their_loss(
    recipe: Recipe, teacher_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe(
        layers={"steps": 12, "learning_rate": 1e-2, "threshold": [0.0, 0.0]},
        logits={"steps": 12, "learning_rate": 1e-2, "threshold": [0.0, 0.0]},
        ridge=None, initialisation="average", grouping="output",
    )  # fmt: skip
    united = distill(config)
    assert sorted(united) == [2, 4]
    losses = losses_of(config, "layers")
    assert len(losses) == len(losses_of(config, "logits")) == 12
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    divergences = [
        divergence_of(teacher_dir, config.work_folder / folder) for folder in ("layers/final", "logits/final")
    ]
    assert divergences[1] < 0.95 * divergences[0]
    shown = capsys.readouterr().out
    assert "[layers] step 12/12" in shown
    assert "left" in shown

    for way in (2, 4):
        model = MoEOptimizedForCausalLM.from_pretrained(
            teacher_dir, moe_opt=MoEOptConfig(united_experts=str(config.output), ways=way)
        )
        model.moe_opt.set_brownout(threshold=0.0)
        model(torch.arange(4, 40).view(1, -1))
        assert int(model.moe_opt.last_step.active_experts.max()) <= 8 // way
        saved = UnitedExperts.from_pretrained(config.output, ways=way).config
        assert len(saved.metrics["error_per_expert"]) == model.moe_opt.num_layers
        assert saved.metrics["brownout"][0]["threshold"] == 0.0
        for stage in ("layers", "logits"):
            first, last = saved.metrics[f"loss_{stage}"]
            assert last < first
        assert saved.recipe["grouping"] == "output"
        assert str(Path(config.output).parent) not in saved.to_json()  # no folder of this machine
        card = (Path(config.output) / f"ways-{way}" / "README.md").read_text()
        assert "| threshold |" in card


def test_the_teacher_is_in_no_state_no_optimizer_and_no_checkpoint(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    original = trainer_module.DistillTrainer.training_step

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen["state"] = sum(v.numel() for v in self.model.state_dict().values())
        seen["stepped"] = sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])
        seen["students"] = sum(p.numel() for p in self.model.parameters())
        seen["teacher"] = sum(p.numel() for p in self.objective.model.parameters())
        seen["trainable teacher"] = sum(p.requires_grad for p in self.objective.model.parameters())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(trainer_module.DistillTrainer, "training_step", spy)
    config = recipe(layers={"steps": 2}, ways=[4])
    distill(config)
    assert seen["state"] == seen["stepped"] == seen["students"]
    assert seen["students"] < seen["teacher"] / 3
    assert seen["trainable teacher"] == 0
    checkpoint = config.work_folder / "layers" / "checkpoint-2"
    size = sum(file.stat().st_size for file in checkpoint.glob("model*.safetensors"))
    assert size < 1.1 * 4 * seen["students"] + 20_000


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it, nothing is saved."""


@pytest.mark.parametrize("stage", ["layers", "logits"])
def test_a_stop_at_any_step_changes_nothing(
    recipe: Recipe, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {stage: {"steps": 5, "learning_rate": 1e-2}, "ways": [4]}
    whole = recipe(**settings, output=str(tmp_path / "a"), work=str(tmp_path / "wa"))
    distill(whole)
    other = recipe(**settings, output=str(tmp_path / "b"), work=str(tmp_path / "wb"))
    step = trainer_module.DistillTrainer.training_step

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 3:  # one step after the checkpoint of step 2
            raise Killed
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.DistillTrainer, "training_step", dying)
        with pytest.raises(Killed):
            distill(other)
    torch.manual_seed(12345)  # what a new process would not share either
    distill(other)
    assert "goes on at step 2" in capsys.readouterr().out
    for a, b in zip(tensors_of(Path(whole.output), 4), tensors_of(Path(other.output), 4), strict=True):
        assert torch.equal(a, b)
    assert losses_of(whole, stage) == losses_of(other, stage)


def test_a_killed_process_is_taken_up_by_a_new_one(recipe: Recipe, tmp_path: Path) -> None:
    settings = {"layers": {"steps": 4, "learning_rate": 1e-2}, "ways": [4]}
    whole = recipe(**settings, output=str(tmp_path / "a"), work=str(tmp_path / "wa"))
    distill(whole)
    recipe(**settings, output=str(tmp_path / "b"), work=str(tmp_path / "wb"))
    file = tmp_path / "recipe.yaml"
    assert run(file, kill=3).returncode == 9
    done = run(file)
    assert done.returncode == 0, done.stderr
    for a, b in zip(tensors_of(Path(whole.output), 4), tensors_of(tmp_path / "b", 4), strict=True):
        assert torch.equal(a, b)


def test_two_processes_give_the_losses_and_weights_of_one(recipe: Recipe, tmp_path: Path) -> None:
    base = {
        "ways": [4],
        "save_dtype": "float32",
        "layers": {"steps": 4, "learning_rate": 1e-2},
        "logits": {"steps": 4, "learning_rate": 1e-2},
    }
    kinds = {
        "one": {"batch_size": 4, "processes": 1},
        "accumulated": {"batch_size": 2, "gradient_accumulation": 2},
        "two": {"batch_size": 2, "processes": 2},
    }
    configs = {}
    for name, training in kinds.items():
        configs[name] = recipe(
            **base, training=training, output=str(tmp_path / name), work=str(tmp_path / f"work-{name}")
        )
        if name == "two":
            done = run(tmp_path / "recipe.yaml", processes=2)
            assert done.returncode == 0, done.stderr
        else:
            distill(configs[name])
    for name in ("two", "accumulated"):
        for stage in ("layers", "logits"):
            assert losses_of(configs[name], stage) == pytest.approx(losses_of(configs["one"], stage), rel=1e-4)
        for a, b in zip(tensors_of(tmp_path / "one", 4), tensors_of(tmp_path / name, 4), strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def test_another_number_of_processes_than_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_processes(0, 1)
    with pytest.raises(ConfigError, match="asks for 2 processes, but 1"):
        check_processes(2, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="launcher started 2"):
        check_processes(0, 1)


def test_a_work_folder_of_another_recipe_is_refused(recipe: Recipe) -> None:
    distill(recipe(layers={"steps": 1}, ways=[4]))
    with pytest.raises(ConfigError, match="another recipe"):
        distill(recipe(layers={"steps": 1}, ways=[2]))


def test_mixed_precision_keeps_master_weights_in_fp32(recipe: Recipe) -> None:
    config = recipe(model={"dtype": "bfloat16"}, logits={"steps": 3, "learning_rate": 1e-3}, ways=[4])
    distill(config)
    final = UnitedExperts.from_pretrained(config.work_folder / "logits" / "final", ways=4)
    assert {value.dtype for layer in final.tensors for value in layer.values()} == {torch.float32}
    saved = UnitedExperts.from_pretrained(config.output, ways=4)
    assert {value.dtype for layer in saved.tensors for value in layer.values()} == {torch.bfloat16}


def test_ways_that_do_not_divide_and_lora_run_through(recipe: Recipe) -> None:
    config = recipe(ways=[3], logits={"steps": 2, "lora_rank": 2, "gradient_checkpointing": True})
    united = distill(config)[3]
    assert [len(set(groups)) for groups in united.config.groups] == [3] * united.config.num_layers
    assert set(united.tensors[0]) == {"gate_up_proj", "down_proj"}


# ------------------------------------------------------------------ data


def test_held_out_texts_are_never_trained_on_and_the_rest_is(recipe: Recipe, text_file: Path) -> None:
    config = recipe()
    tokenizer = load_tokenizer(config.model.name, None)
    rows = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    training = set(load_texts(config.data, tokenizer, 0, held_out=False))
    held_out = set(load_texts(config.data, tokenizer, 0, held_out=True))
    assert training | held_out == set(rows)
    assert not training & held_out
    assert held_out == {text for text in rows if is_held_out(text, 10)}
    assert held_out


def test_a_file_named_twice_is_trained_on_twice_and_measured_on_once(recipe: Recipe, text_file: Path) -> None:
    once = recipe()
    twice = recipe()
    twice.data.data_files = [str(text_file), str(text_file.parent / "*.jsonl")]
    tokenizer = load_tokenizer(once.model.name, None)

    def texts(config: Any, held_out: bool) -> list[str]:
        return sorted(load_texts(config.data, tokenizer, 0, held_out=held_out))

    assert texts(twice, False) == sorted(2 * texts(once, False))
    assert texts(twice, True) == texts(once, True)


def test_packed_data_is_one_fixed_order_that_starts_again_in_another(recipe: Recipe) -> None:
    config = recipe()
    tokenizer = load_tokenizer(config.model.name, None)
    long = PackedSequences(config.data, tokenizer, 10_000, seed=1)
    again = PackedSequences(config.data, tokenizer, 10_000, seed=1)
    unique = len(long.sequences)
    assert 20 < unique < 10_000
    assert all(torch.equal(long[p]["input_ids"], again[p]["input_ids"]) for p in (0, 7, unique, 3 * unique + 5))
    second_walk = {tuple(long[unique + p]["input_ids"].tolist()) for p in range(unique)}
    assert second_walk == {tuple(s.tolist()) for s in long.sequences}
    assert [int(long[p]["position"]) for p in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "streaming"])
def test_data_formats_give_the_same_texts(recipe: Recipe, text_file: Path, tmp_path: Path, kind: str) -> None:
    import gzip

    config = recipe()
    tokenizer = load_tokenizer(config.model.name, None)
    expected = set(load_texts(config.data, tokenizer, 0, held_out=False))
    if kind == "jsonl.gz":
        file = tmp_path / "t.jsonl.gz"
        file.write_bytes(gzip.compress(text_file.read_bytes()))
        config.data.data_files = [str(file)]
    elif kind == "parquet":
        import datasets

        datasets.load_dataset("json", data_files=str(text_file), split="train").to_parquet(tmp_path / "t.parquet")
        config.data.path, config.data.data_files = "parquet", [str(tmp_path / "t.parquet")]
    else:
        config.data.streaming = True
        stream = StreamedSequences(config.data, tokenizer, 200, seed=1)
        items = [item["input_ids"] for item in stream]
        assert len(items) == 200  # more than the data holds: it starts again
        assert all(torch.equal(a, b["input_ids"]) for a, b in zip(items[:30], stream, strict=False))
    assert set(load_texts(config.data, tokenizer, 0, held_out=False)) == expected


def test_data_that_is_not_there_is_one_sentence(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="no data at .*nothing.jsonl"):
        distill(recipe(data={"data_files": ["/nothing.jsonl"]}))
    with pytest.raises(ConfigError, match="has no column 'body'; it has text"):
        distill(recipe(data={"text": "body"}))
    with pytest.raises(ConfigError, match="cannot load data 'no-such/data-set'"):
        distill(recipe(data={"path": "no-such/data-set", "data_files": None}))


def test_progress_tells_when_the_stage_will_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    from types import SimpleNamespace

    lines = ProgressLines("layers", tokens_per_step=100)
    state = SimpleNamespace(global_step=0, max_steps=10, is_world_process_zero=True)
    lines.on_train_begin(None, state, None)
    lines.started -= 60
    state.global_step = 4
    lines.on_log(None, state, None, {"loss": 0.5, "loss_ways_4": 0.5})
    line = capsys.readouterr().out
    assert "step 4/10" in line
    assert "1:30 left" in line
