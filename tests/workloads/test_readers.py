"""Every reader against a literal, against damaged rows, and against the real files where they are present."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from moe_opt.errors import ConfigError
from moe_opt.workloads import TRACES, load_trace, rotate, summarize
from moe_opt.workloads.files import data_dir
from moe_opt.workloads.plain import write_plain
from moe_opt.workloads.rows import TraceRequest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def _write(path: Path, text: str) -> str:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return str(path)


def test_azure_sorts_and_keeps_subsecond_times(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
    rows = load_trace(_write(tmp_path / "a.csv.gz", text))
    assert [(r.prompt_tokens, r.output_tokens) for r in rows] == [(374, 44), (396, 109)]
    assert rows[0].arrival == 0.0
    assert rows[1].arrival == pytest.approx(4.314579, abs=1e-6)


def test_azure_2024_timestamps_carry_a_zone(tmp_path: Path) -> None:
    text = AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.5+00:00,2399,6\n"
    rows = load_trace(_write(tmp_path / "a.csv", text))
    assert rows[1].arrival == pytest.approx(1.49007, abs=1e-6)


def test_mooncake_gives_seconds_and_block_hashes(tmp_path: Path) -> None:
    row = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [4, 5]}
    rows = load_trace(_write(tmp_path / "m.jsonl", json.dumps(row) + "\n"))
    assert rows[0].arrival == 1.5
    assert rows[0].block_hashes == (4, 5)


def test_vidur_has_lengths_only(tmp_path: Path) -> None:
    text = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,2,12,5\n"
    rows = load_trace(_write(tmp_path / "v.csv", text))
    assert (rows[0].prompt_tokens, rows[0].output_tokens, rows[0].arrival) == (10, 2, 0.0)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_plain_form_survives_a_round_trip(tmp_path: Path, suffix: str) -> None:
    trace = [
        TraceRequest("a", 0.0, 5, 6, (1, 2), "law", 77),
        TraceRequest("b", 1.25, 7, 8),
    ]
    path = tmp_path / f"t{suffix}"
    write_plain(trace, path)
    assert load_trace(str(path)) == trace


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.csv", AZURE + "2023-11-16 18:15:46,x,4\n", "a.csv, line 2: ContextTokens is 'x'"),
        ("a.csv", AZURE + "yesterday,3,4\n", "a.csv, line 2: TIMESTAMP is 'yesterday'"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,3\n", "a.csv, line 2: 2 fields, expected 3"),
        ("m.jsonl", '{"input_length": 1}\n', "m.jsonl, line 1: no field timestamp, output_length"),
        (
            "m.jsonl",
            '{"timestamp":0,"input_length":1,"output_length":1}\n{"timestamp"\n',
            "m.jsonl, line 2: not JSON",
        ),
        ("p.csv", "arrival,prompt_tokens,output_tokens\n0,0,4\n", "line 2: prompt_tokens is '0'"),
        ("p.csv", "arrival,prompt_tokens,output_tokens\n-1,3,4\n", "line 2: arrival is '-1'"),
        ("p.csv", "arrival,prompt_tokens,output_tokens\nnan,3,4\n", "line 2: arrival is 'nan'"),
        ("p.csv", "arrival,prompt_tokens\n0,3\n", "line 1: no column output_tokens"),
        ("p.jsonl", '{"arrival":0,"prompt_tokens":true,"output_tokens":1}\n', "line 1: prompt_tokens is True"),
        ("p.csv", "id,arrival,prompt_tokens,output_tokens\na,0,1,1\na,1,1,1\n", "'a' occurs twice"),
        ("x.csv", "some,thing\n1,2\n", "x.csv, line 1: unknown trace format"),
        ("e.csv", AZURE, "holds no request"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_trace(_write(tmp_path / name, text))
    assert message in str(error.value)


def test_a_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress((AZURE * 50).encode())[:30])
    with pytest.raises(ConfigError, match=r"a\.csv\.gz"):
        load_trace(str(path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="azure-conv"):
        load_trace("nothing")


def test_missing_data_says_how_to_set_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPT_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="MOE_OPT_DATA"):
        load_trace("azure-conv")


def test_rotation_keeps_every_request_and_the_gaps() -> None:
    trace = [TraceRequest(f"r{i}", float(t), 1, 1) for i, t in enumerate((0, 1, 3, 6))]
    turned = rotate(trace, 2)
    assert [r.id for r in turned] == ["r2", "r3", "r0", "r1"]
    assert [r.arrival for r in turned] == [0, 3, 3, 4]


needs_data = pytest.mark.skipif(not (data_dir() / "traces").is_dir(), reason="shared data are not present")


@needs_data
@pytest.mark.parametrize(
    "name, requests, prompt, output",
    [
        ("azure-conv", 15492, 1180, 201),
        ("azure-code", 7055, 2032, 28),
        ("mooncake-conv", 9023, 12209, 347),
        ("mooncake-synthetic", 2994, 13625, 176),
        ("vidur-arxiv", 21192, 2582, 295),
    ],
)
def test_published_traces(name: str, requests: int, prompt: int, output: int) -> None:
    facts = summarize(load_trace(name))
    assert facts["requests"] == requests
    assert facts["mean_prompt_tokens"] == pytest.approx(prompt, abs=1)
    assert facts["mean_output_tokens"] == pytest.approx(output, abs=1)
    assert set(TRACES) >= {name}


@needs_data
def test_servegen_follows_the_published_rate_and_lengths() -> None:
    rows = load_trace("servegen-deepseek-r1", duration=600.0)
    again = load_trace("servegen-deepseek-r1", duration=600.0)
    other = load_trace("servegen-deepseek-r1", duration=600.0, seed=1)
    assert rows == again
    assert rows != other
    assert all(0 <= r.arrival < 600 for r in rows)
    # the same clients at another seed differ by noise only
    assert len(rows) == pytest.approx(len(other), rel=0.1)
    assert np.mean([r.output_tokens for r in rows]) == pytest.approx(np.mean([r.output_tokens for r in other]), rel=0.1)
    with pytest.raises(ConfigError, match="known models: deepseek-r1"):
        load_trace("servegen-nothing")
