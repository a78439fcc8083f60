"""Tables and the Pareto plot are made from results.json alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_opt.errors import ConfigError
from moe_opt.report.pareto import curves, loss_at_reads, pareto_front, percent, plot_pareto, threshold_table


def _cell(strategy: str, threshold: float, reads: float, loss: float, **other: Any) -> dict[str, Any]:
    united = "2-way" if strategy == "partial" else None
    return {
        "strategy": strategy, "threshold": threshold, "united": united, "keep": "count", "phase": "decode",
        "experts_read": reads, "relative_loss": loss, "relative_loss_se": 0.001, **other,
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    return {
        "exact": {"decode": {"experts_read": 20.0}},
        "cells": [
            _cell("partial", 0.0, 10.0, 0.02),
            _cell("partial", 1.0, 20.0, 0.0),
            _cell("full", 0.0, 0.0, 0.9),
            _cell("full", 1.0, 20.0, 0.0),
            _cell("full", 0.0, 1.0, 0.8, keep="mass"),
        ],
    }


def test_the_front_keeps_what_nothing_beats_in_both() -> None:
    assert pareto_front([(3, 1.0), (1, 5.0), (2, 5.0), (2, 2.0), (4, 1.0), (5, 0.5)]) == [
        (1, 5.0), (2, 2.0), (3, 1.0), (5, 0.5),
    ]  # fmt: skip
    assert pareto_front([]) == []


def test_curves_fall_by_threshold_and_keeping_rules_are_curves_of_their_own(results: dict[str, Any]) -> None:
    found = curves(results, "decode")
    assert list(found) == ["2-way", "full brownout", "full brownout, keep mass"]
    assert [c["threshold"] for c in found["2-way"]] == [1.0, 0.0]


def test_loss_between_cells_is_linear_and_outside_unknown(results: dict[str, Any]) -> None:
    cells = curves(results, "decode")["2-way"]
    assert loss_at_reads(cells, 15) == pytest.approx(0.01)
    assert loss_at_reads(cells, 20) == 0
    assert loss_at_reads(cells, 9) is None


def test_tables_leave_gaps_where_there_is_no_cell(results: dict[str, Any]) -> None:
    table = threshold_table(results, "decode", lambda c: percent(c["relative_loss"], c["relative_loss_se"]))
    assert table.splitlines()[0] == "| threshold | 2-way | full brownout | full brownout, keep mass |"
    assert table.splitlines()[2] == "| 1 | 0.00 ± 0.10 % | 0.00 ± 0.10 % |  |"
    assert percent(0.5, float("nan")) == "50.00 %"


def test_the_plot_is_written(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_pareto(results, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="no choices cells to plot"):
        plot_pareto(results, tmp_path / "q.png", kind="choices")


def test_reports_need_no_torch() -> None:
    code = "import sys, moe_opt.report.pareto, moe_opt.evaluation.losses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
