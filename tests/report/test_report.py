"""Tables and pictures: what is written is what was given, and errors say what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_opt.errors import ConfigError
from moe_opt.report import format_interval, format_value, load_result, machine_facts, markdown_table, save_result
from moe_opt.report.plots import plot_curves, plot_loads, plot_signature_map

PNG = b"\x89PNG"


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (12.345, "12.3"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (-0.5, "-0.500"),
        (float("nan"), "–"),
        (None, "–"),
        (float("inf"), "inf"),
        (7, "7"),
        ("x", "x"),
        (True, "True"),
    ],
)
def test_values_read_well(value: object, text: str) -> None:
    assert format_value(value) == text


def test_interval_without_replicates_is_the_mean() -> None:
    assert format_interval(12.0, 10.0, 14.0) == "12.0 ± 2.00"
    assert format_interval(12.0, float("nan"), float("nan")) == "12.0"


def test_table_is_aligned_and_escapes_bars() -> None:
    table = markdown_table(["name", "x"], [["a|b", 1.5], ["c", 20000]])
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].startswith("|--")
    assert lines[1].endswith(":|")
    assert "a\\|b" in lines[2]
    assert "20,000" in lines[3]
    with pytest.raises(ConfigError):
        markdown_table(["a"], [[1, 2]])


def test_results_survive_nan_and_arrays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.json"
    save_result(path, {"kind": "x", "a": np.array([1, 2]), "b": float("nan"), "c": np.float64(0.1 + 0.2)})
    assert load_result(path) == {"kind": "x", "a": [1, 2], "b": None, "c": 0.3}
    json.loads(path.read_text())  # strict JSON
    assert {"processor", "cores", "date", "numpy"} <= machine_facts().keys()


def test_what_is_not_a_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    (tmp_path / "b.json").write_text("{")
    for name, message in (("a.json", "kind"), ("b.json", "not a JSON"), ("c.json", "no such file")):
        with pytest.raises(ConfigError, match=message):
            load_result(tmp_path / name)


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    plot_loads({"jsq": rng.integers(0, 1000, (50, 4)), "br-0": rng.integers(0, 900, (50, 4))}, tmp_path / "l.png")
    curves = {"a": [(1.0, 2.0), (2.0, float("nan"))], "b": [(1.0, 3.0)]}
    plot_curves(curves, tmp_path / "sub" / "c.png", xlabel="x", ylabel="y", log_x=True)
    plot_signature_map(rng.normal(size=(20, 5)), ["x", "y"] * 10, tmp_path / "s.png", centroids=rng.normal(size=(3, 5)))
    for name in ("l.png", "sub/c.png", "s.png"):
        assert (tmp_path / name).read_bytes()[:4] == PNG


def test_pictures_without_data_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record-loads"):
        plot_loads({}, tmp_path / "l.png")
    with pytest.raises(ConfigError, match="no points"):
        plot_curves({}, tmp_path / "c.png", xlabel="x", ylabel="y")
    with pytest.raises(ConfigError, match="same number"):
        plot_signature_map(np.ones((3, 2)), ["a"], tmp_path / "s.png")
    with pytest.raises(ConfigError, match="bad"):
        plot_curves({"a": [(1.0, 1.0)]}, tmp_path / "c.bad", xlabel="x", ylabel="y")
