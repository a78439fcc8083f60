"""`moe-opt bench` against a real server, and its arithmetic on records that were written by hand."""

import csv
import json

import pytest

from moe_opt.cli import main
from moe_opt.errors import ConfigError
from moe_opt.serving.bench_command import parse_profile, stage_labels
from moe_opt.serving.load_report import percentiles, summarize_load
from moe_opt.serving.loadgen import RequestRecord


def record(times, *, sent=0.0, finished=None, status="ok", stage="all", **extra):
    finished = times[-1] if finished is None else finished
    return RequestRecord(
        "r", stage, sent, sent, finished, list(times), status, output_tokens=len(times), prompt_tokens=10, **extra
    )


def test_the_figures_of_a_request_written_by_hand():
    one = record([1.5, 1.7, 2.1], sent=1.0)
    assert one.ttft == 0.5
    assert one.gaps == pytest.approx([0.2, 0.4])
    assert one.tpot == pytest.approx(0.3)
    assert one.e2e == pytest.approx(1.1)
    late = record([5.0], sent=2.0, finished=5.0)
    failed = record([], sent=0.0, finished=4.0, status="overloaded")
    summary = summarize_load([one, late, failed], slo_ttft=1.0, slo_tpot=0.31)
    assert (summary["requests"], summary["ok"], summary["overloaded"], summary["failed"]) == (3, 2, 1, 0)
    assert summary["seconds"] == 5.0
    assert summary["output_tokens_per_second"] == pytest.approx(4 / 5)
    # `one` meets both objectives; `late` misses TTFT; the refused request counts as missed too.
    assert summary["slo"]["attainment"] == pytest.approx(1 / 3, abs=1e-6)
    assert summary["slo"]["tokens_missing_tpot"] == 0.5
    assert summary["inter_token"]["mean"] == pytest.approx(0.3)


def test_stages_are_summed_apart_and_brownout_is_averaged():
    records = [
        record([1, 2], stage="calm", browned_share=0.0, lowest_threshold=1.0),
        record([1, 3], stage="burst", browned_share=0.5, lowest_threshold=0.2),
    ]
    summary = summarize_load(records)
    assert summary["browned_requests"] == 1
    assert summary["browned_share"] == 0.25
    assert summary["stages"]["burst"]["tpot"]["p50"] == 2
    assert summary["stages"]["calm"]["browned_requests"] == 0
    assert percentiles([]) is None
    assert percentiles([1.0, None, 3.0])["p50"] == 2.0


def test_profiles_and_their_stages():
    profile = parse_profile("10:2,5:8")
    assert profile == [(10.0, 2.0), (5.0, 8.0)]
    assert stage_labels(profile, [0.0, 9.9, 10.0, 14.0, 15.0]) == ["1: 2/s", "1: 2/s", "2: 8/s", "2: 8/s", "2: 8/s"]
    with pytest.raises(ConfigError, match="10-2"):
        parse_profile("10-2")


@pytest.mark.parametrize("dialect", ["tgi", "openai"])
def test_a_burst_against_a_real_server_writes_all_reports(server, tmp_path, capsys, dialect):
    out = tmp_path / "report"
    code = main(
        ["bench", "--url", server.url, "--dialect", dialect, "--burst", "1:4,1:8", "--prompt-tokens", "20",
         "--output-tokens", "5", "--slo-tpot", "10", "--slo-ttft", "30", "--out", str(out)]
    )  # fmt: skip
    assert code == 0
    summary = json.loads((out / "summary.json").read_text())
    rows = list(csv.DictReader((out / "requests.csv").open()))
    assert len(rows) == summary["requests"] == summary["ok"] > 0
    assert set(summary["stages"]) <= {"1: 4/s", "2: 8/s"}
    assert all(row["output_tokens"] == "5" for row in rows)
    assert all(18 <= int(row["prompt_tokens"]) <= 23 for row in rows)
    assert summary["output_tokens"] == 5 * len(rows)
    assert summary["slo"]["attainment"] == 1.0
    assert summary["lowest_threshold"] == {"prefill": 1.0, "decode": 1.0}
    assert summary["machine"]["cores"] >= 1
    assert (out / "load.png").stat().st_size > 1000
    assert "tokens/s" in capsys.readouterr().out
    # Open loop: each request left at its own time, not after the one before had ended.
    sent = sorted(float(row["sent"]) for row in rows)
    finished = [float(row["finished"]) for row in rows]
    assert any(later < end for later in sent[1:] for end in finished) or len(rows) < 3


def test_capacity_and_a_trace(server, data_dir, capsys):
    arguments = ["bench", "--url", server.url, "--output-tokens", "4", "--prompt-tokens", "16", "--requests", "6"]
    assert main([*arguments, "--concurrency", "3"]) == 0
    assert "6/6 answered" in capsys.readouterr().out
    # The trace's own lengths, cut to what the server takes.
    assert main(["bench", "--url", server.url, "--trace", "azure-conv", "--requests", "3", "--rate", "20"]) == 0
    assert "3/3 answered" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--rate", "1", "--url", "http://127.0.0.1:9"], "nobody answers"),
        (["--rate", "1", "--url", "nonsense"], "address"),
        (["--rate", "1", "--burst", "1:1"], "one of"),
        ([], "one of"),
        (["--rate", "1", "--requests", "0"], "--requests"),
        (["--rate", "1", "--slo-tpot", "0"], "--slo-tpot"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, arguments, word):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert word in error
