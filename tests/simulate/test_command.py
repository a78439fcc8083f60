"""`moe-opt simulate` and `moe-opt plot` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_opt.cli import main
from moe_opt.workloads import TraceRequest
from moe_opt.workloads.plain import write_plain


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    rows = [TraceRequest(f"r{i}", i * 0.01, int(rng.integers(10, 500)), int(rng.integers(2, 40))) for i in range(250)]
    path = tmp_path / "trace.jsonl"
    write_plain(rows, path)
    return str(path)


def _simulate(trace: str, *rest: str) -> int:
    return main(["simulate", "--trace", trace, "--model", "qwen3-30b-a3b", *rest])


def test_heavy_load_table_and_figure(trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    args = ["--pool", "16", "--warmup", "20", "--workers", "2", "--slots", "4", "--policies", "jsq,br-0"]
    assert _simulate(trace_file, *args, "--record-loads", "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("| jsq", "| br-0", "±"))
    result = json.loads(out.read_text())
    assert {"machine", "settings", "rows", "loads"} <= result.keys()
    assert result["rows"][0]["metrics"]["imbalance"]["replicates"] == 3
    assert main(["plot", str(out), "--out", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_rates_sweep_gives_curves(trace_file: str, tmp_path: Path) -> None:
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    args = ["--rates", "20,80", "--no-barrier", "--workers", "3", "--replicates", "1", "--policies", "jsq"]
    assert _simulate(trace_file, *args, "--out", str(out)) == 0
    for what in ("tpot", "ttft", "throughput"):
        assert main(["plot", str(out), "--what", what, "--out", str(picture)]) == 0


def test_events_and_options(trace_file: str, capsys: pytest.CaptureFixture) -> None:
    args = ["--rates", "50", "--workers", "2", "--replicates", "1", "--policies", "jsq,br-h", "--poisson"]
    args += ["--fail", "0.5:1", "--recover", "1.0:1", "--drain", "1.5:0", "--scale-up", "0.2"]
    assert _simulate(trace_file, *args, "--option", "br-h:horizon=8", "--kv-capacity", "5000") == 0
    assert "br-h" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, message",
    [
        (["--policies", "nope"], "unknown routing policy 'nope'"),
        (["--policies", "jsq", "--option", "br-h:horizon=8"], "--option is"),
        (["--policies", "br-h", "--option", "br-h:speed=8"], "no option 'speed'"),
        (["--pool", "8", "--rates", "3"], "not both"),
        (["--rates", "fast"], "expected numbers"),
        (["--fail", "soon"], "expected TIME:WORKER"),
        (["--rates", "1,2", "--workers", "1,2"], "not both"),
        (["--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["--device", "abacus"], "unknown device"),
        (["--trace", "nothing"], "no trace 'nothing'"),
        (["--poisson"], "--poisson needs --rates"),
        (["--pool", "100000", "--policies", "jsq"], "too short"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(
    trace_file: str, args: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert _simulate(trace_file, *args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_plot_of_a_single_setting_says_what_to_do(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "r.json"
    assert _simulate(trace_file, "--rates", "50", "--replicates", "1", "--policies", "jsq", "--out", str(out)) == 0
    assert main(["plot", str(out), "--out", str(tmp_path / "x.png")]) == 2
    assert "--rates" in capsys.readouterr().err
    assert main(["plot", str(out), "--what", "loads", "--out", str(tmp_path / "x.png")]) == 2
    assert "--record-loads" in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", "--help"])
    assert stop.value.code == 0
    assert "moe-opt simulate --trace azure-conv" in capsys.readouterr().out
