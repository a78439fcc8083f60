"""The roofline of one MoE layer, against sums by hand."""

from __future__ import annotations

import pytest

from moe_opt.devices import device_preset
from moe_opt.errors import ConfigError
from moe_opt.flops import FlopsModel
from moe_opt.regime import Regime

QWEN3 = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}


def regime(device: str = "H100") -> Regime:
    return Regime.from_model(FlopsModel.from_config(QWEN3), device_preset(device))


def test_sizes_of_an_expert() -> None:
    found = regime()
    assert found.expert_bytes == 3 * 2048 * 768 * 2
    assert found.expert_flops == 2 * 3 * 2048 * 768
    assert found.distinct_experts(1) == pytest.approx(8)
    assert found.distinct_experts(100_000) == pytest.approx(128)


def test_one_token_is_memory_bound_and_a_long_prefill_is_not() -> None:
    found = regime()
    # One token: each expert's bytes against two FLOPs per parameter.
    ratio = found.read_seconds(1) / found.compute_seconds(1)
    assert ratio == pytest.approx(989.5e12 / 3.35e12, rel=1e-6)
    border = found.largest_memory_bound_step()
    assert found.memory_bound(border)
    assert not found.memory_bound(border + 1)
    assert 1024 < border < 10_000, "decode batches of the paper are memory-bound on an H100"


def test_more_bandwidth_moves_the_border_down() -> None:
    assert regime("H200").largest_memory_bound_step() < regime("H100").largest_memory_bound_step()


def test_when_metro_pays() -> None:
    found = regime("A100-80GB")
    least = found.least_experts_saved()
    assert found.metro_pays(least * 1.01)
    assert not found.metro_pays(least * 0.99)


def test_dense_models_have_no_regime() -> None:
    dense = FlopsModel.from_config({**QWEN3, "mlp_only_layers": list(range(48)), "intermediate_size": 6144})
    with pytest.raises(ConfigError, match="no MoE layers"):
        Regime.from_model(dense, device_preset("H100"))
