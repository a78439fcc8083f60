"""`moe-opt score` as a user runs it: files in, files out, kills, bad rows, several processes."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt import MoEOptimizedForCausalLM
from moe_opt.cli import main
from moe_opt.serving.saturation import Calibration, calibrate
from moe_opt.serving.score_rows import BadRow, ScoreRow, parse_row

TEXTS = ["The court held that", "def add(a, b):", "Question: what is two and two?", "Die Stadt liegt an der"]


def make_rows(count: int) -> list[dict[str, Any]]:
    rows = []
    for k in range(count):
        prompt = f"{TEXTS[k % 4]} the same beginning of every prompt of its kind, number {k // 4}. Answer:"
        rows.append({"id": f"row-{k}", "prompt": prompt, "choices": [" yes", " no, not at all", f" {k}"]})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def arguments(model: Path, source: Path, output: Path, *more: str) -> list[str]:
    common = ["--dtype", "float32", "--quiet", "--window", "16", "--max-batch-tokens", "1024", "--device", "cpu"]
    return ["score", "--model-id", str(model), "--input", str(source), "--output", str(output), *common, *more]


def test_scores_are_those_of_plain_model_calls(demo_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = make_rows(24)
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert main(arguments(demo_model_dir, source, tmp_path / "out.jsonl")) == 0
    found = read_rows(tmp_path / "out.jsonl")
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32).eval()
    for row, result in zip(rows, found, strict=True):
        prompt = tokenizer(row["prompt"])["input_ids"]
        expected = []
        for choice in row["choices"]:
            ids = tokenizer(choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
            expected.append(sum(float(logits[len(prompt) + j - 1, t]) for j, t in enumerate(ids)))
        assert result["logprobs"] == pytest.approx(expected, abs=2e-3)
        assert result["probabilities"] == pytest.approx(torch.tensor(expected).softmax(0).tolist(), abs=1e-3)
        assert result["choice"] == max(range(3), key=lambda k: result["logprobs"][k])


def kill_and_restart(model: Path, source: Path, folder: Path, times: int, seed: int) -> None:
    """Kill -9 at random moments, start again each time; compare with a run that was left alone."""
    whole, killed = folder / "whole.jsonl", folder / "killed.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "moe_opt.cli"]
    started = time.monotonic()
    subprocess.run([*command, *arguments(model, source, whole)], env=environment, check=True, timeout=250)
    seconds = time.monotonic() - started
    moments = random.Random(seed)
    for _ in range(times):
        process = subprocess.Popen(
            [*command, *arguments(model, source, killed)], env=environment, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=moments.uniform(0.3, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([*command, *arguments(model, source, killed)], env=environment, check=True, timeout=250)
    assert killed.read_bytes() == whole.read_bytes()


def test_killed_and_started_again(demo_model_dir: Path, tmp_path: Path) -> None:
    kill_and_restart(demo_model_dir, write_rows(tmp_path / "in.jsonl", make_rows(200)), tmp_path, 2, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_ten_times(demo_model_dir: Path, tmp_path: Path) -> None:
    kill_and_restart(demo_model_dir, write_rows(tmp_path / "in.jsonl", make_rows(1500)), tmp_path, 10, seed=1)


def test_half_a_window_is_cut_off_and_done_again(demo_model_dir: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", make_rows(40))
    output, progress = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.progress"
    assert main(arguments(demo_model_dir, source, output)) == 0
    whole = output.read_bytes()
    state = json.loads(progress.read_text())
    lines = whole.splitlines(keepends=True)
    state.update(lines=16, rows=16, output_bytes=sum(map(len, lines[:16])), complete=False)
    progress.write_text(json.dumps(state))
    output.write_bytes(b"".join(lines[:21]) + b'{"id": "row-21", "logpr')  # killed in the middle of a line
    assert main(arguments(demo_model_dir, source, output)) == 0
    assert output.read_bytes() == whole
    assert main(arguments(demo_model_dir, source, output)) == 0, "a complete job has nothing left to do"
    assert output.read_bytes() == whole


def test_bad_rows_are_named_and_skipped(demo_model_dir: Path, tmp_path: Path, capsys) -> None:
    good = make_rows(3)
    lines = [
        json.dumps(good[0]),
        "not json",
        json.dumps({"id": 1, "prompt": "", "choices": ["a"]}),
        "",
        json.dumps({"id": 2, "prompt": "a", "choices": []}),
        json.dumps({"id": 3, "prompt": "word " * 5000, "choices": ["a"]}),
        json.dumps([1, 2]),
        json.dumps({"prompt": good[1]["prompt"], "choices": good[1]["choices"]}),
    ]
    source = tmp_path / "in.jsonl.gz"
    with gzip.open(source, "wt") as file:
        file.write("\n".join(lines))
    assert main(arguments(demo_model_dir, source, tmp_path / "out.jsonl")) == 0
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == ["row-0", 8]
    errors = read_rows(tmp_path / "out.jsonl.errors.jsonl")
    assert [row["line"] for row in errors] == [2, 3, 5, 6, 7]
    assert "the model takes" in errors[3]["error"]
    assert "5 bad rows" in capsys.readouterr().err


def test_parquet_both_ways(demo_model_dir: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = make_rows(20)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    assert main(arguments(demo_model_dir, tmp_path / "in.parquet", tmp_path / "out.parquet")) == 0
    assert main(arguments(demo_model_dir, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")) == 0
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == read_rows(tmp_path / "out.jsonl")
    assert not (tmp_path / "out.parquet.part.jsonl").exists()


def test_two_processes(demo_model_dir: Path, tmp_path: Path) -> None:
    rows = make_rows(32)
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert main(arguments(demo_model_dir, source, tmp_path / "one.jsonl")) == 0
    assert main(arguments(demo_model_dir, source, tmp_path / "two.jsonl", "--workers", "2")) == 0
    for one, two in zip(read_rows(tmp_path / "one.jsonl"), read_rows(tmp_path / "two.jsonl"), strict=True):
        assert one["id"] == two["id"]
        assert one["logprobs"] == pytest.approx(two["logprobs"], abs=2e-3)


def test_streamed_experts_score_alike_and_a_restart_keeps_what_was_measured(
    demo_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(40)
    source = write_rows(tmp_path / "in.jsonl", rows)
    plain, streamed = tmp_path / "plain.jsonl", tmp_path / "streamed.jsonl"
    assert main(arguments(demo_model_dir, source, plain)) == 0
    capsys.readouterr()
    assert main(arguments(demo_model_dir, source, streamed, "--async-ep", "offload")) == 0
    assert "of the transfers hidden" in capsys.readouterr().err
    for one, two in zip(read_rows(plain), read_rows(streamed), strict=True):
        assert one["logprobs"] == pytest.approx(two["logprobs"], abs=2e-3)
    progress = tmp_path / ".streamed.jsonl.progress"
    state = json.loads(progress.read_text())
    factor = state["measured"]["saturation"]
    assert factor in (1, 2, 4, 8, 16)
    # as if killed behind the first window, on a machine that would measure something else
    whole = streamed.read_bytes()
    lines = whole.splitlines(keepends=True)
    state.update(lines=16, rows=16, output_bytes=sum(map(len, lines[:16])), complete=False)
    progress.write_text(json.dumps(state))
    monkeypatch.setattr("moe_opt.serving.score_pool.calibrate", lambda *_: pytest.fail("measured again"))
    assert main(arguments(demo_model_dir, source, streamed, "--async-ep", "offload")) == 0
    assert streamed.read_bytes() == whole


def test_processes_that_stream_agree_on_the_saturation(demo_model_dir: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", make_rows(32))
    assert main(arguments(demo_model_dir, source, tmp_path / "one.jsonl")) == 0
    flags = ("--async-ep", "offload", "--workers", "2", "--saturation", "2")
    assert main(arguments(demo_model_dir, source, tmp_path / "two.jsonl", *flags)) == 0
    assert json.loads((tmp_path / ".two.jsonl.progress").read_text())["measured"] == {"saturation": 2.0}
    for one, two in zip(read_rows(tmp_path / "one.jsonl"), read_rows(tmp_path / "two.jsonl"), strict=True):
        assert one["logprobs"] == pytest.approx(two["logprobs"], abs=2e-3)


def test_calibration_times_layers_with_and_without_their_waits(demo_model_dir: Path) -> None:
    model = MoEOptimizedForCausalLM.from_pretrained(demo_model_dir, moe_opt={"async_ep": "offload"}).eval()
    streaming = model.moe_opt.async_ep
    move = streaming._move

    def slowly(layer: int, slot: int) -> None:
        time.sleep(0.05)  # far longer than a layer of 64 tokens computes
        move(layer, slot)

    streaming._move = slowly
    found = calibrate(model, 64)
    assert found is not None
    assert len(found.layer_seconds) == model.moe_opt.num_layers - 1
    assert max(found.layer_seconds) >= 0.04
    assert found.compute_seconds < 0.04
    assert found.slowdown == pytest.approx(max(found.layer_seconds) / found.compute_seconds)
    assert streaming.marks is None
    assert calibrate(MoEOptimizedForCausalLM.from_pretrained(demo_model_dir, moe_opt=True).eval(), 64) is None


@pytest.mark.parametrize(
    ("slowdown", "factor"), [(1.0, 1), (1.05, 1), (1.3, 2), (2.0, 2), (2.1, 2), (3.0, 4), (9.0, 16), (1e6, 16)]
)
def test_the_factor_is_a_power_of_two(slowdown: float, factor: float) -> None:
    assert Calibration(64, slowdown, (), 1.0).factor == factor


def test_what_cannot_work_is_one_line(demo_model_dir: Path, tmp_path: Path, capsys) -> None:
    source = write_rows(tmp_path / "in.jsonl", make_rows(2))
    output = tmp_path / "out.jsonl"
    assert main(arguments(demo_model_dir, tmp_path / "none.jsonl", output)) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(arguments(demo_model_dir, source, source)) == 2
    assert "same file" in capsys.readouterr().err
    output.write_text("mine\n")
    assert main(arguments(demo_model_dir, source, output)) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert output.read_text() == "mine\n"
    assert main(arguments(demo_model_dir, source, output, "--overwrite")) == 0
    assert len(read_rows(output)) == 2
    assert main(arguments(demo_model_dir, source, output, "--no-share-prefixes")) == 2
    assert "another job (other share_prefixes)" in capsys.readouterr().err
    for factor in ("0.5", "many", "nan"):
        assert main(arguments(demo_model_dir, source, output, "--saturation", factor)) == 2
        assert "--saturation must be auto or a factor from 1 to 16" in capsys.readouterr().err


@settings(max_examples=100, deadline=None)
@given(content=st.one_of(st.binary(max_size=40), st.dictionaries(st.text(max_size=8), st.integers()), st.integers()))
def test_parsing_never_raises(content: Any) -> None:
    assert parse_row(3, content) is None or isinstance(parse_row(3, content), (BadRow, ScoreRow))
