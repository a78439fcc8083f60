"""Layouts, neuron alignment, neuron selection and the closed-form down projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import make_batch, make_stock

from moe_opt import MoEOptimizedForCausalLM
from moe_opt.distill.calibration import collect_samples, statistics
from moe_opt.distill.initialise import fit_down_projection, group_tasks, initial_weights
from moe_opt.distill.layout import activations, from_neurons, per_assignment, to_neurons
from moe_opt.modeling.experts import expert_tensors

FAMILIES = ("qwen2_moe", "mixtral", "gpt_oss", "nemotron_h")


def load(family: str) -> Any:
    model = MoEOptimizedForCausalLM.from_config(make_stock(family).config, dtype=torch.float32)
    model.load_state_dict(make_stock(family).state_dict())
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def layer(request: pytest.FixtureRequest) -> Any:
    """(module, sample, statistics) of a family's first MoE layer."""
    model = load(request.param)
    samples = collect_samples(model, make_batch(16, 24)["input_ids"], 4)
    module = model.moe_opt.layers[0][1]
    return module, samples[0], statistics(module, samples[0])


def group_error(module: Any, sample: Any, tensors: dict[str, torch.Tensor], groups: list[int]) -> float:
    """Mean squared error of the layer's output at threshold 0."""
    group = torch.tensor(groups)
    exact = per_assignment(module, expert_tensors(module), sample.hidden, sample.ids, "grouped_mm")
    other = per_assignment(module, tensors, sample.hidden, group[sample.ids], "grouped_mm")
    return float(((exact - other) * sample.weights.unsqueeze(-1)).sum(1).square().mean())


def test_neurons_and_back_is_the_identity(layer: Any) -> None:
    module = layer[0]
    tensors = expert_tensors(module)
    back = from_neurons(module, to_neurons(module, tensors))
    assert set(back) == set(tensors)
    for name, value in tensors.items():
        assert torch.equal(back[name], value)


def test_an_expert_is_its_activations_times_its_down_projection(layer: Any) -> None:
    module, sample, _ = layer
    neurons = to_neurons(module, expert_tensors(module))
    ids = torch.full((len(sample.hidden), 1), 3)
    expected = per_assignment(module, expert_tensors(module), sample.hidden, ids, "grouped_mm")[:, 0]
    bias = neurons["in_bias"][3] if "in_bias" in neurons else None
    out = activations(module, neurons["in"][3], bias, sample.hidden) @ neurons["down"][3]
    if "down_bias" in neurons:
        out = out + neurons["down_bias"][3]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_permuted_copies_are_aligned_and_merged_without_loss(layer: Any) -> None:
    module, sample, stats = layer
    neurons = {key: value.clone() for key, value in to_neurons(module, expert_tensors(module)).items()}
    size = neurons["down"].shape[1]
    for member in range(1, 4):  # experts 1 to 3 become permutations of expert 0
        order = torch.randperm(size, generator=torch.Generator().manual_seed(member))
        for key, value in neurons.items():
            value[member] = value[0] if key == "down_bias" else value[0][order]
    before = {name: value.clone() for name, value in expert_tensors(module).items()}
    groups = [0, 0, 0, 0, 1, 2, 3, 4]
    try:
        for name, value in from_neurons(module, neurons).items():
            getattr(module, name).copy_(value)
        merged = to_neurons(module, initial_weights(module, sample, stats, groups, "aligned", None))
        plain = to_neurons(module, initial_weights(module, sample, stats, groups, "average", None))
    finally:
        for name, value in before.items():
            getattr(module, name).copy_(value)
    sorted_rows = [torch.sort(found["down"][0].sum(1)).values for found in (merged, neurons)]
    torch.testing.assert_close(*sorted_rows, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(torch.sort(plain["down"][0].sum(1)).values, sorted_rows[1], atol=1e-3)


@pytest.mark.parametrize("method", ["average", "frequency", "aligned", "selection"])
def test_a_group_of_one_is_the_expert_itself(layer: Any, method: str) -> None:
    module, sample, stats = layer
    groups = [0, 0, 0, 1, 1, 1, 2, 3]
    found = initial_weights(module, sample, stats, groups, method, 1e-3)
    for name, value in expert_tensors(module).items():
        assert found[name].shape == (4, *value.shape[1:])
        assert torch.equal(found[name][3], value[7].float())


@pytest.mark.parametrize("method", ["average", "frequency", "aligned", "selection"])
def test_the_closed_form_lowers_the_error_of_every_initialisation(layer: Any, method: str) -> None:
    module, sample, stats = layer
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    plain = initial_weights(module, sample, stats, groups, method, None)
    fitted = initial_weights(module, sample, stats, groups, method, 1e-3)
    assert group_error(module, sample, fitted, groups) < 0.9 * group_error(module, sample, plain, groups)


def test_selected_neurons_beat_averaged_ones(layer: Any) -> None:
    module, sample, stats = layer
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    error = {
        method: group_error(module, sample, initial_weights(module, sample, stats, groups, method, 1e-3), groups)
        for method in ("average", "selection")
    }
    assert error["selection"] < error["average"]


def test_ridge_recovers_a_down_projection_that_explains_the_target_exactly(layer: Any) -> None:
    module, sample, _ = layer
    groups = [0] * 8
    task = group_tasks(module, sample, torch.ones(len(sample.hidden)), groups)[0]
    neurons = {key: value[2].float() for key, value in to_neurons(module, expert_tensors(module)).items()}
    fired = activations(module, neurons["in"], neurons.get("in_bias"), task.hidden)
    out = fired @ neurons["down"] + neurons.get("down_bias", 0)
    task.target = out * task.gate.unsqueeze(1)
    start = {**neurons, "down": torch.zeros_like(neurons["down"])}
    if "down_bias" in start:
        start["down_bias"] = torch.zeros_like(start["down_bias"])
    found = fit_down_projection(module, start, task, 1e-7)
    torch.testing.assert_close(found["down"], neurons["down"], atol=2e-3, rtol=2e-2)
