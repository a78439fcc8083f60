"""The grid measures every strategy on the same tokens, and leaves the model as it found it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_moe import SENTENCES

from moe_opt import UnitedExperts, attach_united_experts
from moe_opt.errors import ConfigError
from moe_opt.evaluation.choices import read_choices
from moe_opt.evaluation.grid import GridOptions, Setting, evaluate_grid, plan_settings
from moe_opt.evaluation.perplexity import score_prefill
from moe_opt.evaluation.texts import TokenRows, make_rows

OPTIONS = GridOptions(prefill_batch=3, decode_batch=4, prompt=8, timing_repeats=2, progress=False)


def _rows(tokenizer: Any, multiple_of: int = 1) -> TokenRows:
    texts = {"forward": SENTENCES, "backward": SENTENCES[::-1]}
    return make_rows(texts, tokenizer, length=24, tokens=24 * 8, multiple_of=multiple_of)


@pytest.fixture
def results(model: Any, tokenizer: Any, quiz: Path) -> dict[str, Any]:
    united = {f"{ways}-way": UnitedExperts.from_average(model, ways=ways) for ways in (2, 4)}
    settings = plan_settings(["partial", "full", "reroute", "top-k"], [0.0, 0.5, 1.0], united)
    return evaluate_grid(
        model,
        tokenizer,
        settings,
        united=united,
        prefill_rows=_rows(tokenizer),
        decode_rows=_rows(tokenizer, 4),
        choice_sets=[read_choices(quiz)],
        options=OPTIONS,
    )


def test_all_strategies_fill_the_grid(results: dict[str, Any]) -> None:
    cells = results["cells"]
    assert len(cells) == (2 + 3) * 3 * 2
    assert {(c["strategy"], c["ways"]) for c in cells} == {
        ("partial", 2), ("partial", 4), ("full", None), ("reroute", None), ("top-k", None),
    }  # fmt: skip
    for cell in cells:
        assert cell["perplexity"] > 1
        assert cell["step_time_ratio"] > 0
        assert set(cell["domains"]) == {"forward", "backward"}
        assert cell["relative_loss"] == pytest.approx(np.mean([d["relative_loss"] for d in cell["domains"].values()]))
        assert cell["relative_loss_pooled"] == pytest.approx(1 - cell["accuracy"] / cell["exact_accuracy"])
        assert cell["experts_read"] <= cell["experts_read_exact"] + 1e-9
        assert ("choices" in cell) == (cell["phase"] == "prefill")
        if cell["threshold"] == 1:
            assert cell["relative_loss"] == 0
            assert cell["perplexity_ratio"] == 1
            assert cell["agreement"] == 1
        else:
            assert cell["perplexity_ratio"] != 1
    json.dumps(results)


def test_experts_read_at_threshold_zero_are_those_of_the_plan(results: dict[str, Any]) -> None:
    prefill = {
        (c["strategy"], c["ways"]): c["experts_read"]
        for c in results["cells"]
        if c["phase"] == "prefill" and c["threshold"] == 0
    }
    assert prefill["full", None] == 0
    assert prefill["partial", 2] <= 4
    assert prefill["partial", 4] <= 2
    assert results["exact"]["prefill"]["experts_read"] > 6  # of 8


def test_a_cell_is_what_a_direct_run_gives(results: dict[str, Any], model: Any, tokenizer: Any) -> None:
    attach_united_experts(model, UnitedExperts.from_average(model, ways=4))
    model.moe_opt.set_brownout(threshold=0.5, strategy="partial")
    rows = _rows(tokenizer)
    direct = score_prefill(model, rows, batch_size=3)
    (cell,) = (c for c in results["cells"] if (c["phase"], c["ways"], c["threshold"]) == ("prefill", 4, 0.5))
    assert cell["accuracy"] == pytest.approx(direct.accuracy)
    assert cell["perplexity"] == pytest.approx(direct.perplexity, rel=1e-5)


def test_the_model_is_given_back_exact_and_with_its_own_united_experts(model: Any, tokenizer: Any) -> None:
    own = UnitedExperts.from_average(model, ways=8)
    attach_united_experts(model, own)
    batch = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        before = model(input_ids=batch).logits
    evaluate_grid(
        model,
        tokenizer,
        [Setting("partial", 0.0, "four"), Setting("reroute", 0.5)],
        united={"four": UnitedExperts.from_average(model, ways=4)},
        prefill_rows=_rows(tokenizer),
        options=OPTIONS,
    )
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch).logits, before)
    assert UnitedExperts.from_model(model).ways == 8


def test_keeping_rules_are_an_axis_where_they_act(model: Any, tokenizer: Any) -> None:
    united = {"4-way": UnitedExperts.from_average(model, ways=4)}
    settings = plan_settings(["partial", "top-k"], [0.4], united, keep=["count", "mass", "error"])
    assert [(s.strategy, s.keep) for s in settings] == [
        ("partial", "count"), ("partial", "mass"), ("partial", "error"), ("top-k", "count"),
    ]  # fmt: skip
    found = evaluate_grid(model, tokenizer, settings, united=united, decode_rows=_rows(tokenizer, 4), options=OPTIONS)[
        "cells"
    ]
    assert len({c["perplexity"] for c in found}) == 4


def test_settings_that_mean_nothing_are_refused(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="'partial' needs united experts"):
        plan_settings(["partial"], [0.5], {})
    with pytest.raises(ConfigError, match="unknown strategy 'half'"):
        plan_settings(["half"], [0.5], {})
    with pytest.raises(ConfigError, match=r"thresholds lie in \[0, 1\], got 1.5"):
        plan_settings(["full"], [1.5], {})
    with pytest.raises(ConfigError, match="unknown keeping rule"):
        plan_settings(["full"], [0.5], {}, keep=["luck"])
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        evaluate_grid(model, tokenizer, [Setting("full", 0.5)], options=OPTIONS)
    with pytest.raises(ConfigError, match="unknown phase"):
        GridOptions(phases=("warmup",))
