"""`moe-opt eval` from the outside: files written, and one clear line for what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_opt.cli import main
from moe_opt.errors import ConfigError
from moe_opt.evaluation.texts import is_held_out, read_texts

SMALL = ["--length", "24", "--tokens", "192", "--batch", "4", "--decode-tokens", "128", "--decode-length", "16",
         "--decode-prompt", "8", "--decode-batch", "4", "--timing-repeats", "1", "--quiet"]  # fmt: skip


def test_writes_json_markdown_and_a_plot(
    model_dir: Path, corpus: tuple[Path, Path], quiz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = main(
        ["eval", "--model", str(model_dir), "--united", "average", "--ways", "2", "4", "--split", "all",
         "--strategies", "partial", "full", "reroute", "top-k", "--thresholds", "1", "0.5", "0",
         "--data", *map(str, corpus), "--choices", str(quiz), "--output", str(out), *SMALL]
    )  # fmt: skip
    assert code == 0
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert len(results["cells"]) == 5 * 3 * 2
    assert set(results["exact"]["prefill"]["domains"]) == {"animals", "plain"}
    assert results["model"]["experts"] == 8
    assert results["machine"]["cores"] >= 1
    assert str(tmp_path) not in json.dumps(results)
    markdown = (out / "results.md").read_text(encoding="utf-8")
    assert "| threshold | 2-way | 4-way | full brownout | reroute | top-k |" in markdown
    assert markdown.strip() in capsys.readouterr().out
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_undefined_figures_are_null_in_json(model_dir: Path, corpus: tuple[Path, Path], tmp_path: Path) -> None:
    """A single sequence has no standard error; JSON has no nan."""
    code = main(
        ["eval", "--model", str(model_dir), "--strategies", "full", "--thresholds", "0.5", "--split", "all",
         "--data", str(corpus[0]), "--phases", "prefill", "--length", "24", "--tokens", "24", "--timing-repeats", "0",
         "--quiet", "--output", str(tmp_path)]
    )  # fmt: skip
    assert code == 0
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    assert "NaN" not in text
    assert json.loads(text)["cells"][0]["relative_loss_se"] is None


def test_saved_united_experts_are_read_by_ways(
    model_dir: Path, corpus: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_opt import MoEOptimizedForCausalLM, UnitedExperts

    model = MoEOptimizedForCausalLM.from_pretrained(model_dir, moe_opt=True)
    for ways in (2, 4):
        UnitedExperts.from_average(model, ways=ways).save_pretrained(tmp_path / "united" / f"ways-{ways}")
    command = ["eval", "--model", str(model_dir), "--united", str(tmp_path / "united"), "--thresholds", "0",
               "--split", "all", "--data", str(corpus[0]), "--phases", "prefill", *SMALL]  # fmt: skip
    assert main([*command, "--ways", "4"]) == 0
    assert "| threshold | 4-way |" in capsys.readouterr().out
    assert main(command) == 2
    assert "2, 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --data with texts or --choices"),
        (["--data", "missing.jsonl"], "missing.jsonl: no such file"),
        (["--data", "{corpus}", "--strategies", "partial"], "needs united experts: add --united PATH"),
        (["--data", "{corpus}", "--united", "average"], "--united average needs --ways"),
        (["--data", "{corpus}", "--united", "average", "--ways", "9"], "between 1 and the 8 experts"),
        (["--data", "{corpus}", "--united", "average", "--strategies", "full"], "--united has no use without"),
        (["--data", "{corpus}", "--thresholds", "1.2"], "thresholds lie in [0, 1], got 1.2"),
        (["--data", "{corpus}", "--strategies", "most"], "unknown strategy 'most'"),
        (["--data", "{corpus}", "--keep", "luck"], "unknown keeping rule 'luck'"),
        (["--data", "{corpus}", "--phases", "warmup"], "unknown phase 'warmup'"),
        (["--data", "{corpus}", "--dtype", "float99"], "unknown dtype 'float99'"),
        (["--data", "{corpus}", "--device", "tpu9"], "device 'tpu9' cannot be used"),
        (["--data", "{corpus}", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--data", "{corpus}", "--length", "100000"], "tokens make no row of 100000"),
        (["--data", "{corpus}", "--decode-prompt", "500"], "leaves nothing to decode"),
        (["--data", "{corpus}", "--layout", "loose"], "unknown layout 'loose'"),
        (["--data", "{corpus}", "{corpus}"], "two of the --data files have the same name"),
        (["--choices", "{quiz}", "--shots", "9"], "too few for 9 shots"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_two(
    arguments: list[str],
    message: str,
    model_dir: Path,
    corpus: tuple[Path, Path],
    quiz: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [a.format(corpus=corpus[0], quiz=quiz) for a in arguments]
    assert main(["eval", "--model", str(model_dir), "--split", "all", "--quiet", *filled]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert lines[-1].startswith("moe-opt eval: ")
    assert "Traceback" not in "".join(lines)


def test_a_wrong_model_is_named(
    model_dir: Path, corpus: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def last_line(model: Path, *more: str) -> str:
        assert main(["eval", "--model", str(model), "--data", str(corpus[0]), "--split", "all", "--quiet", *more]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "no such model folder" in last_line(tmp_path / "missing")
    assert "no config.json" in last_line(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((model_dir / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    assert "has no tokenizer" in last_line(bare)
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "file" in last_line(model_dir, "--output", str(tmp_path / "file" / "out"))


def test_only_held_out_texts_are_read_unless_asked(tmp_path: Path) -> None:
    texts = [f"text number {i}" for i in range(200)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts), encoding="utf-8")
    assert read_texts(path) == [t for t in texts if is_held_out(t)]
    assert 0 < len(read_texts(path)) < 30
    assert read_texts(path, "all") == texts
    path.write_text(json.dumps({"text": next(t for t in texts if not is_held_out(t))}), encoding="utf-8")
    with pytest.raises(ConfigError, match="use --split all"):
        read_texts(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"{broken", b'{"question": "?"}', b"[1]"])
def test_damaged_files_are_named_with_their_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.jsonl:1: "):
        read_texts(path, "all")


def test_a_truncated_gzip_is_an_error_not_a_crash(tmp_path: Path, corpus: tuple[Path, Path]) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(corpus[1].read_bytes()[:-40])
    with pytest.raises(ConfigError, match="not readable as JSONL"):
        read_texts(path, "all")


def test_choices_alone_have_reads_times_and_a_plot(model_dir: Path, quiz: Path, tmp_path: Path) -> None:
    code = main(
        ["eval", "--model", str(model_dir), "--choices", str(quiz), "--shots", "1", "--thresholds", "1", "0",
         "--strategies", "full", "top-k", "--timing-repeats", "1", "--quiet", "--output", str(tmp_path)]
    )  # fmt: skip
    assert code == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    cells = {(c["strategy"], c["threshold"]): c for c in results["cells"]}
    assert cells["full", 0.0]["choice_experts_read"] == 0
    assert 0 < cells["top-k", 0.0]["choice_experts_read"] < results["exact"]["choices"]["quiz"]["experts_read"] + 1e-9
    assert cells["top-k", 0.0]["step_time_ratio"] > 0
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".png") == ["pareto_choices.png"]
    assert "Step time against exact output" in (tmp_path / "results.md").read_text(encoding="utf-8")
