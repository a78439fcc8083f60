"""Muon on stacks of matrices, against a singular value decomposition and torch's own Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_opt.distill.config import DistillConfig, ModelSettings, TrainingSettings
from moe_opt.distill.muon import MuonAdamW, orthogonalise
from moe_opt.errors import ConfigError


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8), (1, 16, 16)])
def test_orthogonalise_keeps_directions_and_levels_singular_values(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalise(matrices)
    assert result.shape == matrices.shape
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    found = torch.linalg.svdvals(result)
    assert found.min() > 0.3
    assert found.max() < 1.4
    nearest = u @ v
    cosine = torch.nn.functional.cosine_similarity(result.flatten(1), nearest.flatten(1))
    assert cosine.min() > 0.95


def test_a_stack_is_stepped_as_torch_steps_its_matrices() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(2, 6, 10, generator=generator)
    stack = nn.Parameter(start.clone())
    single = [nn.Parameter(part.clone()) for part in start]
    mine = MuonAdamW([stack], 0.1)
    theirs = torch.optim.Muon(single, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(2, 6, 10, generator=generator)
        stack.grad = gradient.clone()
        for parameter, part in zip(single, gradient, strict=True):
            parameter.grad = part.clone()
        mine.step()
        theirs.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]), atol=0.02, rtol=0.02)


def test_other_parameters_take_adamw_steps() -> None:
    generator = torch.Generator().manual_seed(2)
    bias = nn.Parameter(torch.randn(7, generator=generator))
    twin = nn.Parameter(bias.detach().clone())
    mine = MuonAdamW([bias], 0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW([twin], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(4):
        bias.grad = torch.randn(7, generator=generator)
        twin.grad = bias.grad.clone()
        mine.step()
        theirs.step()
    torch.testing.assert_close(bias, twin)


def test_state_goes_on_where_it_was_saved() -> None:
    def run(steps: range, parameters: list[nn.Parameter], optimizer: MuonAdamW) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()

    def fresh() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(2, 4, 6)), nn.Parameter(torch.ones(3))]

    whole = fresh()
    run(range(6), whole, MuonAdamW(whole, 0.01))
    halves = fresh()
    first = MuonAdamW(halves, 0.01)
    run(range(3), halves, first)
    second = MuonAdamW(halves, 0.01)
    second.load_state_dict(first.state_dict())
    run(range(3, 6), halves, second)
    for a, b in zip(whole, halves, strict=True):
        assert torch.equal(a, b)


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"training\.optimizer 'sgd'"):
        DistillConfig(model=ModelSettings(name="x"), output="y", training=TrainingSettings(optimizer="sgd"))
