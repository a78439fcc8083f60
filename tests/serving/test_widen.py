"""Widened experts compute what the narrow ones do, so that a burst on them speaks about the same model."""

import pytest
import torch

from moe_opt import MoEOptimizedForCausalLM, UnitedExperts, attach_united_experts
from moe_opt.demo.serve import sparkline
from moe_opt.demo.widen import widen_experts
from moe_opt.errors import ConfigError


def test_a_widened_model_has_the_same_logits_exact_and_browned(served_model_dir, united_dir, tmp_path):
    wide_dir = widen_experts(served_model_dir, united_dir, tmp_path / "wide", 96)
    ids = torch.randint(10, 8000, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = []
    for folder, united in ((served_model_dir, united_dir), (wide_dir, wide_dir)):
        model = MoEOptimizedForCausalLM.from_pretrained(folder, moe_opt=True, dtype=torch.float32).eval()
        attach_united_experts(model, UnitedExperts.from_pretrained(united, ways=4), check_base=False)
        both = []
        for threshold in (1.0, 0.3):
            model.moe_opt.set_brownout(threshold=threshold, strategy="partial")
            with torch.no_grad():
                both.append(model(ids).logits)
        logits.append(both)
        assert model.config.moe_intermediate_size == (48 if folder == served_model_dir else 96)
    (exact, browned), (wide_exact, wide_browned) = logits
    assert not torch.equal(exact, browned)
    # Zero neurons may change the order in which a kernel adds, and nothing else.
    torch.testing.assert_close(wide_exact, exact, rtol=0, atol=1e-3)
    torch.testing.assert_close(wide_browned, browned, rtol=0, atol=1e-3)


def test_experts_cannot_become_narrower(served_model_dir, tmp_path):
    with pytest.raises(ConfigError, match="widened"):
        widen_experts(served_model_dir, None, tmp_path / "narrow", 8)


def test_a_sparkline_shows_low_and_full():
    assert sparkline([1.0] * 100, width=10) == "█" * 10
    assert sparkline([0.0, 1.0], width=2) == " █"
