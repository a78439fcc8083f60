"""United experts: their files, what they fit, and what they compute."""

import json

import pytest
import torch
from families import make_batch, make_stock
from transformers import AutoModelForCausalLM

import moe_opt
from moe_opt import UnitedExperts
from moe_opt.errors import ConfigError, IncompatibleUnitedExpertsError
from moe_opt.modeling.brownout import plan_brownout_reference


def test_the_average_is_the_average(tiny):
    united = UnitedExperts.from_average(tiny, ways=3)
    module = tiny.moe_opt.layers[1][1]
    assert united.config.groups[1] == [0, 0, 0, 1, 1, 1, 2, 2]  # ceil(8 / 3) groups
    for name in ("gate_up_proj", "down_proj"):
        want = getattr(module, name)[6:8].mean(0)
        assert torch.allclose(united.tensors[1][name][2], want, atol=1e-6)
    weighted = UnitedExperts.from_average(tiny, ways=8, weights=torch.eye(8)[:3] * 1e9)
    assert torch.allclose(weighted.tensors[1]["down_proj"][0], module.down_proj[1], atol=1e-5)


def browned_layer(family):
    """A first layer with 4-way stand-ins, ten tokens with top-3 experts each, and where Algorithm 1 sends them."""
    ours = moe_opt.MoEOptimizedForCausalLM.from_config(make_stock(family).config)
    ours.load_state_dict(make_stock(family).state_dict())
    moe_opt.attach_united_experts(ours, UnitedExperts.from_average(ours, ways=4))
    torch.manual_seed(0)
    hidden = torch.randn(10, 32)
    weights, ids = torch.randn(10, 8).softmax(-1).topk(3)
    return ours.requires_grad_(False).moe_opt, hidden, ids, weights


def plain_layer(module, hidden, ids, weights, strategy):
    """A loop over tokens and experts (Eq. 5 and 6) at threshold 0.4."""
    counts = torch.bincount(ids.flatten(), minlength=8).tolist()
    slots = plan_brownout_reference(counts, 0.4, [e // 4 for e in range(8)], strategy)
    names = [n for n in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias") if hasattr(module, n)]
    table = {n: torch.cat([getattr(module, n), getattr(module.united, n)]) for n in names}

    def expert(slot, x):
        up, down = table["gate_up_proj"][slot], table["down_proj"][slot]
        x = x @ up if module.is_transposed else up @ x
        x = module._apply_gate(x + table["gate_up_proj_bias"][slot] if "gate_up_proj_bias" in table else x)
        x = x @ down if module.is_transposed else down @ x
        return x + table["down_proj_bias"][slot] if "down_proj_bias" in table else x

    rows = []
    for token, chosen in enumerate(ids.tolist()):
        kept = [(weight, slots[e]) for weight, e in zip(weights[token], chosen, strict=True) if slots[e] >= 0]
        rows.append(sum((w * expert(slot, hidden[token]) for w, slot in kept), torch.zeros_like(hidden[token])))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["partial", "full"])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_a_browned_layer_computes_what_the_plan_says(family, strategy):
    runtime, hidden, ids, weights = browned_layer(family)
    module = runtime.layers[0][1]
    want = plain_layer(module, hidden, ids, weights, strategy)
    runtime.set_brownout(threshold=0.4, strategy=strategy)
    for pooled in (True, False):
        runtime._pool = (lambda *a: None) if not pooled else type(runtime)._pool.__get__(runtime)
        got = runtime.run_layer(0, module, hidden, ids, weights)
        assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_gradients_of_a_browned_layer_are_those_of_the_plan(family):
    runtime, hidden, ids, weights = browned_layer(family)
    module = runtime.layers[0][1]
    module.united.requires_grad_(True)
    leaves = [hidden.requires_grad_(True), weights.requires_grad_(True), *module.united.parameters()]
    runtime.set_brownout(threshold=0.4)
    mine = torch.autograd.grad(runtime.run_layer(0, module, hidden, ids, weights).square().sum(), leaves)
    want = torch.autograd.grad(plain_layer(module, hidden, ids, weights, "partial").square().sum(), leaves)
    assert all(gradient.abs().sum() > 0 for gradient in want)
    for one, other in zip(mine, want, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)


def test_gradients_reach_united_experts_and_nothing_else(tiny):
    moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(tiny, ways=4))
    tiny.requires_grad_(False)
    for _, module in tiny.moe_opt.layers:
        module.united.requires_grad_(True)
    tiny.moe_opt.set_brownout(threshold=0.0)
    tiny(**make_batch()).logits.square().mean().backward()
    for _, module in tiny.moe_opt.layers:
        assert module.united.down_proj.grad.abs().sum() > 0
        assert module.down_proj.grad is None


def test_files_go_out_and_come_back(tiny, tmp_path):
    united = UnitedExperts.from_average(tiny, ways=4)
    united.save_pretrained(tmp_path)
    again = UnitedExperts.from_pretrained(tmp_path)
    assert again.config == united.config
    for a, b in zip(again.tensors, united.tensors, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert "4-way united experts" in (tmp_path / "README.md").read_text()


def test_several_ways_in_one_place(tiny, tmp_path):
    for ways in (2, 4):
        UnitedExperts.from_average(tiny, ways=ways).save_pretrained(tmp_path / f"ways-{ways}")
    assert UnitedExperts.from_pretrained(tmp_path, ways=2).ways == 2
    with pytest.raises(IncompatibleUnitedExpertsError, match=r"2, 4 ways: say which"):
        UnitedExperts.from_pretrained(tmp_path)
    with pytest.raises(IncompatibleUnitedExpertsError, match=r"no 8-way united experts, only 2, 4"):
        UnitedExperts.from_pretrained(tmp_path, ways=8)
    with pytest.raises(ConfigError, match="at least 1"):
        UnitedExperts.from_pretrained(tmp_path, ways=0)


def damage(path, **changes):
    file = path / "united_experts_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": [[0] * 7] * 3}, "groups of layer 0"),
        ({"groups": [[0, 2] * 4] * 3}, "groups of layer 0"),
        ({"num_layers": 5}, "do not fit 5 layers"),
        ({"format_version": 99}, "format version 99"),
        ({"ways": "four"}, "ways must be an integer"),
    ],
)
def test_a_damaged_config_is_refused(tiny, tmp_path, changes, message):
    UnitedExperts.from_average(tiny, ways=4).save_pretrained(tmp_path)
    damage(tmp_path, **changes)
    with pytest.raises(IncompatibleUnitedExpertsError, match=message):
        UnitedExperts.from_pretrained(tmp_path)


def test_missing_and_truncated_files_are_refused(tiny, tmp_path):
    with pytest.raises(IncompatibleUnitedExpertsError, match="holds no united_experts_config.json"):
        UnitedExperts.from_pretrained(tmp_path)
    UnitedExperts.from_average(tiny, ways=4).save_pretrained(tmp_path)
    weights = tmp_path / "united_experts.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(IncompatibleUnitedExpertsError, match="damaged"):
        UnitedExperts.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(IncompatibleUnitedExpertsError, match="is missing"):
        UnitedExperts.from_pretrained(tmp_path)


def test_united_experts_of_another_model_change_nothing(tiny, tmp_path):
    batch = make_batch()
    with torch.no_grad():
        want = tiny(**batch).logits
    twin = AutoModelForCausalLM.from_config(tiny.config, moe_opt=True)  # same shape, other weights
    with pytest.raises(IncompatibleUnitedExpertsError, match="belong to another model"):
        moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(twin, ways=4))
    other = AutoModelForCausalLM.from_config(make_stock("olmoe").config, moe_opt=True)
    with pytest.raises(IncompatibleUnitedExpertsError, match="needs \\("):
        moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(other, ways=4))
    fewer = AutoModelForCausalLM.from_config(make_stock("glm4_moe").config, moe_opt=True)
    with pytest.raises(IncompatibleUnitedExpertsError, match="2 MoE layers of 8 experts do not fit"):
        moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(fewer, ways=4))
    assert tiny.moe_opt.united_config is None
    with torch.no_grad():
        assert torch.equal(tiny(**batch).logits, want)


def test_a_fine_tuned_base_still_fits(tiny):
    united = UnitedExperts.from_average(tiny, ways=4)
    with torch.no_grad():
        for _, module in tiny.moe_opt.layers:
            module.down_proj.mul_(1.02).add_(torch.randn_like(module.down_proj) * 0.1 * module.down_proj.std())
    moe_opt.attach_united_experts(tiny, united)


@pytest.mark.parametrize("ways", [0, 9, 2.0, True])
def test_wrong_ways(tiny, ways):
    with pytest.raises(ConfigError, match="ways must be an integer between 1 and the 8 experts"):
        UnitedExperts.from_average(tiny, ways=ways)


@torch.no_grad()
def test_detaching_returns_to_exact_output(tiny):
    want = tiny(**make_batch()).logits
    united = UnitedExperts.from_average(tiny, ways=4)
    moe_opt.attach_united_experts(tiny, united)
    tiny.moe_opt.set_brownout(threshold=0.2)
    tiny(**make_batch())
    back = moe_opt.detach_united_experts(tiny)
    assert torch.equal(back.tensors[0]["down_proj"], united.tensors[0]["down_proj"])
    assert torch.equal(tiny(**make_batch()).logits, want)
    assert tiny.moe_opt.brownout("decode").threshold == 1.0
    assert not any("united" in key for key in tiny.state_dict())
    with pytest.raises(ConfigError, match="no united experts attached"):
        moe_opt.detach_united_experts(tiny)


def test_models_without_moe_opt_are_told_so(tiny_dir):
    stock = AutoModelForCausalLM.from_pretrained(tiny_dir)
    united = UnitedExperts.from_average(stock, ways=2)  # merging needs no runtime
    with pytest.raises(ConfigError, match="was not loaded with moe_opt"):
        moe_opt.attach_united_experts(stock, united)
