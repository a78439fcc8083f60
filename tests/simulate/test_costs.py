"""Step prices, expert counts, intervals and published model sizes against hand computation."""

from __future__ import annotations

import numpy as np
import pytest

from moe_opt.cluster import make_policy
from moe_opt.devices import device_preset
from moe_opt.errors import ConfigError
from moe_opt.simulate import (
    MODELS,
    BatchExperts,
    FleetConfig,
    ProfileExperts,
    StepCost,
    get_model,
    mean_interval,
    simulate,
)
from moe_opt.workloads import TraceRequest


@pytest.mark.parametrize(
    "name, total, active",  # billions of parameters, as the model cards say
    [
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("deepseek-v2-lite", 15.7, 2.4),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
        ("mixtral-8x7b", 46.7, 12.9),
        ("olmoe-1b-7b", 6.9, 1.3),
    ],
)
def test_presets_have_the_published_sizes(name: str, total: float, active: float) -> None:
    model = get_model(name)
    assert model.total_parameters / 1e9 == pytest.approx(total, rel=0.01)
    # some cards leave the embedding table out of the active count
    spare = MODELS[name]["vocab_size"] * MODELS[name]["hidden_size"] / 1e9
    assert model.active_parameters / 1e9 - spare - 0.1 <= active <= model.active_parameters / 1e9 + 0.1


def test_step_cost_of_a_preset_is_bytes_over_bandwidth() -> None:
    model, device = get_model("mixtral-8x7b"), device_preset("A100-80GB")
    cost = StepCost.of(model, device, overhead=1e-3, efficiency=0.5, tensor_parallel=2)
    rate = device.memory_bandwidth * 0.5 * 2
    assert cost.per_expert == pytest.approx(3 * 4096 * 14336 * 2 / rate)
    assert cost.per_kv_token == pytest.approx(32 * 2 * 8 * 128 * 2 / rate, rel=0.05)  # and a little compute
    assert cost.fixed == pytest.approx(1e-3 + model.resident_bytes / rate)


@pytest.mark.parametrize("bad", [{"efficiency": 0.0}, {"efficiency": 1.5}, {"tensor_parallel": 0}])
def test_impossible_rates_are_refused(bad: dict) -> None:
    with pytest.raises(ConfigError):
        StepCost.of(get_model("mixtral-8x7b"), device_preset("H100"), **bad)


def test_even_choices_of_a_batch() -> None:
    experts = BatchExperts(num_layers=2, num_experts=4, top_k=1)
    experts.start(1)
    assert experts.distinct(0) == 0
    experts.add(0, 0)
    assert experts.distinct(0) == pytest.approx(2)
    experts.add(0, 1)
    assert experts.distinct(0) == pytest.approx(2 * 4 * (1 - 0.75**2))


def test_profiles_count_the_union() -> None:
    same, other = [[1.0, 0.0, 0.5]], [[0.0, 1.0, 0.5]]
    experts = ProfileExperts(np.array([same, same, other]))
    experts.start(2)
    experts.add(0, 0)
    experts.add(0, 1)
    assert experts.distinct(0) == pytest.approx(1 + 0.75)
    experts.remove(0, 1)
    experts.add(0, 2)
    assert experts.distinct(0) == pytest.approx(2 + 0.75)
    experts.remove(0, 0)
    assert experts.distinct(0) == pytest.approx(1.5)
    assert experts.distinct(1) == 0


def test_profiles_agree_with_drawn_steps() -> None:
    rng = np.random.default_rng(0)
    probs = rng.uniform(0, 0.5, (6, 3, 8))
    experts = ProfileExperts(probs)
    experts.start(1)
    for row in range(6):
        experts.add(0, row)
    drawn = (rng.uniform(size=(4000, *probs.shape)) < probs).any(axis=1).sum(axis=(1, 2)).mean()
    assert experts.distinct(0) == pytest.approx(drawn, rel=0.01)


def test_the_busiest_rank_counts() -> None:
    probs = np.array([[[1.0, 1.0, 0.0, 0.0]], [[0.0, 0.0, 0.0, 1.0]]])
    experts = ProfileExperts(probs, ranks=2)  # experts 0 and 1 on rank 0
    experts.start(1)
    experts.add(0, 0)
    experts.add(0, 1)
    assert experts.distinct(0) == pytest.approx(2)


def test_experts_enter_the_step_time() -> None:
    trace = [TraceRequest("a", 0.0, 1, 2), TraceRequest("b", 0.0, 1, 2)]
    cost = StepCost(fixed=0.01, per_expert=1e-3)
    result = simulate(trace, make_policy("jsq"), FleetConfig.uniform(1, 2), cost, experts=BatchExperts(1, 4, 1))
    assert result.finished == pytest.approx([2 * (0.01 + 1e-3 * 1.75)] * 2)
    assert result.summary()["active_experts"] == pytest.approx(1.75)


def test_interval_is_students_t() -> None:
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841, 3), abs=1e-3)
    assert np.isnan(mean_interval([5.0]).low)
    with pytest.raises(ConfigError):
        mean_interval([])
