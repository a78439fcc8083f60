"""What the two stages minimise, checked against the plain formulas; and what is kept out of the trained state."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from families import make_batch, make_stock

from moe_opt import MoEOptimizedForCausalLM, UnitedExperts, attach_united_experts
from moe_opt.distill.calibration import collect_samples, statistics
from moe_opt.distill.config import StageSettings
from moe_opt.distill.divergence import HeadDivergence
from moe_opt.distill.layout import per_assignment
from moe_opt.distill.objectives import LayerObjective, LogitObjective, ThresholdSampler
from moe_opt.distill.students import Students, add_lora
from moe_opt.modeling.experts import expert_tensors


def load(family: str) -> Any:
    model = MoEOptimizedForCausalLM.from_config(make_stock(family).config, dtype=torch.float32)
    model.load_state_dict(make_stock(family).state_dict())
    return model.requires_grad_(False).eval()


@pytest.fixture(params=["qwen2_moe", "gpt_oss", "granitemoe"])
def model(request: pytest.FixtureRequest) -> Any:
    return load(request.param)


def ids(rows: int = 4, seed: int = 5) -> torch.Tensor:
    return make_batch(rows, 12, seed)["input_ids"].clamp_min(3)


def fixed(threshold: float) -> StageSettings:
    return StageSettings(steps=1, threshold=[threshold, threshold], zero_share=0.0)


def students_of(model: Any, *ways: int) -> Students:
    return Students({way: UnitedExperts.from_average(model, way) for way in ways})


def backward(loss: torch.Tensor) -> None:
    loss.backward()


def test_the_layer_loss_is_the_error_of_what_the_layer_puts_out_under_brownout(model: Any) -> None:
    """Measured through serving's own path: the layer's browned-out output less its exact output."""
    students = students_of(model, 3)
    tokens = ids()
    samples = collect_samples(model, tokens, 4)
    scales = [statistics(module, s).output_scale for (_, module), s in zip(model.moe_opt.layers, samples, strict=True)]
    objective = LayerObjective(model, fixed(0.4), scales, 4, ThresholdSampler(fixed(0.4), 0))
    loss = objective(students, tokens, torch.arange(4), backward)[3]

    attach_united_experts(model, students.to_united(3))
    expected = 0.0
    for index, ((_, module), sample) in enumerate(zip(model.moe_opt.layers, samples, strict=True)):
        exact = module(sample.hidden, sample.ids, sample.weights)
        model.moe_opt.set_brownout(threshold=0.4)
        with torch.no_grad():
            browned = model.moe_opt.run_layer(index, module, sample.hidden, sample.ids, sample.weights)
        model.moe_opt.set_brownout(threshold=1.0)
        expected += float((browned - exact).square().sum(-1).mean()) / scales[index] / len(samples)
    assert expected > 1e-4
    assert float(loss) == pytest.approx(expected, rel=1e-3)


def test_the_papers_loss_is_equation_4_over_the_groups_tokens(model: Any) -> None:
    students = students_of(model, 4)
    tokens = ids()
    samples = collect_samples(model, tokens, 4)
    settings = StageSettings(steps=1, objective="paper")
    objective = LayerObjective(model, settings, [1.0] * len(samples), 4, ThresholdSampler(settings, 0))
    loss = objective(students, tokens, torch.arange(4), backward)[4]
    expected = 0.0
    for index, ((_, module), sample) in enumerate(zip(model.moe_opt.layers, samples, strict=True)):
        mine, own = students.tensors(4, index), expert_tensors(module)
        for row, experts in enumerate(sample.ids.tolist()):
            for expert in experts:
                token = sample.hidden[row : row + 1]
                united = per_assignment(module, mine, token, torch.tensor([[expert // 4]]), "grouped_mm").detach()
                original = per_assignment(module, own, token, torch.tensor([[expert]]), "grouped_mm")
                expected += float((united - original).square().sum()) / sample.ids.numel() / len(samples)
    assert float(loss) == pytest.approx(expected, rel=1e-3)


def test_both_stages_reach_every_student_and_no_weight_of_the_teacher(model: Any) -> None:
    tokens = ids()
    for stage in ("layers", "logits"):
        students = students_of(model, 2, 4)
        sampler = ThresholdSampler(fixed(0.0), 0)
        if stage == "layers":
            objective: Any = LayerObjective(model, fixed(0.0), [1.0] * model.moe_opt.num_layers, 2, sampler)
        else:
            objective = LogitObjective(model, students, fixed(0.0), 2, sampler)
        objective(students, tokens, torch.arange(4), backward)
        reached = [p.grad is not None and bool(p.grad.abs().sum() > 0) for p in students.parameters()]
        assert all(reached), stage
        assert all(p.grad is None for p in model.parameters())
        if stage == "logits":
            objective.close()
            assert model.moe_opt.united_config is None


def test_the_logit_loss_is_the_divergence_that_serving_would_show(model: Any) -> None:
    students = students_of(model, 4)
    objective = LogitObjective(model, students, fixed(0.2), 4, ThresholdSampler(fixed(0.2), 0))
    tokens = ids()
    loss = objective(students, tokens, torch.arange(4), backward)[4]
    objective.close()
    with torch.no_grad():
        exact = model(tokens).logits.log_softmax(-1)
        attach_united_experts(model, students.to_united(4))
        model.moe_opt.set_brownout(threshold=0.2)
        browned = model(tokens).logits.log_softmax(-1)
    expected = (exact.exp() * (exact - browned)).sum(-1).mean()
    assert float(expected) > 1e-4
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)


def test_the_text_itself_counts_with_its_weight(model: Any) -> None:
    """Beside the divergence stands the browned-out model's cross-entropy, and its gradient reaches the students."""
    students = students_of(model, 4)
    tokens = ids()
    found, slopes = {}, {}
    for weight in (0.0, 0.5):
        stage = dataclasses.replace(fixed(0.2), label_weight=weight)
        objective = LogitObjective(model, students, stage, 4, ThresholdSampler(stage, 0))
        found[weight] = float(objective(students, tokens, torch.arange(4), backward)[4])
        objective.close()
        slopes[weight] = [p.grad.clone() for p in students.parameters()]
        for parameter in students.parameters():
            parameter.grad = None
    with torch.no_grad():
        attach_united_experts(model, students.to_united(4))
        model.moe_opt.set_brownout(threshold=0.2)
        logits = model(tokens).logits[:, :-1]
    model.moe_opt.remove_united()
    text = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    assert found[0.5] - found[0.0] == pytest.approx(0.5 * float(text) / tokens.numel(), rel=1e-3)
    assert any(not torch.allclose(a, b) for a, b in zip(slopes[0.0], slopes[0.5], strict=True))


def test_chunked_and_plain_divergence_agree_in_value_and_gradient() -> None:
    model = load("qwen2_moe")
    tokens = ids(3)
    results = []
    for chunked in (True, False):
        divergence = HeadDivergence(model, label_weight=0.3)
        assert divergence.chunked
        divergence.chunked = chunked
        states = model.base_model(tokens).last_hidden_state
        mine = (states + 0.1 * torch.sin(states * 7)).detach().requires_grad_()
        head = (lambda x: x) if chunked else model.get_output_embeddings()
        loss = divergence(head(mine), head(states), tokens)
        loss.backward()
        results.append((loss.detach(), mine.grad))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-7, rtol=1e-4)


def test_a_family_that_scales_its_logits_is_noticed() -> None:
    config = make_stock("granitemoe").config
    config.logits_scaling = 4.0
    model = MoEOptimizedForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert not HeadDivergence(model, 0.0).chunked


def test_thresholds_depend_on_position_and_way_alone() -> None:
    sampler = ThresholdSampler(StageSettings(threshold=[0.2, 0.6], zero_share=0.5), seed=3)
    drawn = [sampler.draw(position, 2) for position in range(400)]
    assert drawn == [ThresholdSampler(sampler.settings, 3).draw(position, 2) for position in range(400)]
    zeros = sum(t == 0 for t in drawn)
    assert 150 < zeros < 250
    assert all(t == 0 or 0.2 <= t <= 0.6 for t in drawn)
    assert drawn != [sampler.draw(position, 4) for position in range(400)]


def test_lora_starts_at_the_weights_trains_only_its_matrices_and_is_merged() -> None:
    model = load("qwen2_moe")
    students = students_of(model, 4)
    before = students.to_united(4)
    trained = add_lora(students, rank=2, alpha=None)
    names = [name for name, p in students.named_parameters() if p.requires_grad]
    assert trained > 0
    assert names
    assert all("lora_" in name for name in names)
    for layer, tensors in enumerate(before.tensors):
        for name, value in tensors.items():
            torch.testing.assert_close(students.tensors(4, layer)[name].detach(), value)

    objective = LogitObjective(model, students, fixed(0.0), 4, ThresholdSampler(fixed(0.0), 0))
    optimizer = torch.optim.Adam([p for p in students.parameters() if p.requires_grad], lr=1e-2)
    tokens = ids()
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(float(objective(students, tokens, torch.arange(4), backward)[4]))
        optimizer.step()
    objective.close()
    assert losses[-1] < 0.8 * losses[0]

    merged = students.to_united(4)
    fresh = Students({4: merged})  # no LoRA in it: what was saved has it merged
    after = LogitObjective(model, fresh, fixed(0.0), 4, ThresholdSampler(fixed(0.0), 0))
    final = float(after(fresh, tokens, torch.arange(4), backward)[4])
    assert final < losses[-1]
