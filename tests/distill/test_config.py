"""Recipes are read key by key, and every mistake is one sentence that names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_opt.cli import main
from moe_opt.distill.config import DistillConfig
from moe_opt.errors import ConfigError

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_is_valid(path: Path) -> None:
    config = DistillConfig.from_yaml(path)
    assert config.layers.steps + config.logits.steps > 0
    assert config.ways


def test_the_recipes_that_users_were_promised_are_there() -> None:
    names = {path.stem for path in RECIPES}
    assert {"demo", "qwen1.5-moe-a2.7b-chat", "qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "gpt-oss-20b"} <= names


def test_stages_keep_their_own_defaults_where_a_recipe_is_silent(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("model: {name: m}\noutput: o\nlogits: {learning_rate: 1e-4}\n")
    config = DistillConfig.from_yaml(file)
    assert config.logits.learning_rate == 1e-4
    assert config.logits.steps == DistillConfig(model=config.model, output="o").logits.steps
    assert config.layers.steps == 0


def test_environment_variables_and_their_defaults_are_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text('model: {name: "${WHO:-m}"}\noutput: o\ndata: {data_files: ["${WHERE:-here}/*.jsonl"]}\n')
    monkeypatch.delenv("WHERE", raising=False)
    assert DistillConfig.from_yaml(file).data.data_files == ["here/*.jsonl"]
    monkeypatch.setenv("WHERE", "there")
    assert DistillConfig.from_yaml(file).data.data_files == ["there/*.jsonl"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("output: o", "model.name is missing"),
        ("model: {name: m}", "output is missing"),
        ("model: {name: m}\noutput: o\nways: [0]", "ways"),
        ("model: {name: m}\noutput: o\nwayz: [2]", "unknown key 'wayz'"),
        ("model: {name: m}\noutput: o\nlogits: {stepz: 1}", "unknown key 'stepz'"),
        ("model: {name: m}\noutput: o\nlogits: 3", "unknown key"),
        ("model: {name: m}\noutput: o\nlogits: {steps: many}", "must be int"),
        ("model: {name: m}\noutput: o\nlogits: {threshold: [0.5, 0.2]}", "logits.threshold"),
        ("model: {name: m}\noutput: o\nlogits: {label_weight: -1}", "logits.label_weight must be finite"),
        ("model: {name: m}\noutput: o\nlogits: {learning_rate: .nan}", "a finite learning_rate"),
        ("model: {name: m}\noutput: o\nlayers: {label_weight: 0.5}", "set logits.label_weight"),
        ("model: {name: m}\noutput: o\nlayers: {lora_rank: 8}", "set logits.lora_rank"),
        ("model: {name: m}\noutput: o\ngrouping: random", "unknown grouping 'random'"),
        ("model: {name: m}\noutput: o\ninitialisation: zeros", "unknown initialisation"),
        ("model: {name: m}\noutput: o\ntraining: {batch_size: 6, plan_size: 4}", "must divide"),
        ("model: {name: m}\noutput: o\ndata: {held_out: 1}", "held_out"),
        ("model: {name: '${NOT_SET_ANYWHERE}'}\noutput: o", "NOT_SET_ANYWHERE is not set"),
        ("- just\n- a list", "keys and values"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_reason(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        DistillConfig.from_yaml(file)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--config", "missing.yaml"], "no recipe at missing.yaml"),
        (["--config", "RECIPE", "--set", "logits.stepz=1"], "unknown key 'stepz'"),
        (["--config", "RECIPE", "--set", "logits"], "KEY=VALUE"),
        (["--config", "RECIPE"], "no tokenizer for name 'no-such-model-anywhere'"),
    ],
)
def test_the_command_fails_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(f"model: {{name: no-such-model-anywhere}}\noutput: {tmp_path}/o\ntraining: {{use_cpu: true}}\n")
    assert main(["distill", *(str(file) if a == "RECIPE" else a for a in arguments)]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1


def test_the_module_that_accelerate_launches_is_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moe_opt.distill", "--config", str(tmp_path / "none.yaml")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip().startswith("moe-opt distill: no recipe at")
