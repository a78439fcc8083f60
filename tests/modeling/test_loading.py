"""from_pretrained, from_config, save_pretrained: what a user may pass, and what may go wrong."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from families import make_batch, make_config, make_stock
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import moe_opt
from moe_opt import MoEOptConfig, MoEOptimizedForCausalLM, UnitedExperts
from moe_opt.errors import ConfigError, IncompatibleUnitedExpertsError, UnsupportedModelError


def logits(model):
    with torch.no_grad():
        return model(**make_batch()).logits


def test_the_three_ways_to_ask_give_the_same_model(tiny_dir):
    want = logits(AutoModelForCausalLM.from_pretrained(tiny_dir))
    for model in (
        MoEOptimizedForCausalLM.from_pretrained(tiny_dir),
        AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt={"brownout_layers": [1]}),
        AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt=MoEOptConfig(kernels="grouped_mm")),
    ):
        assert torch.equal(logits(model), want)
        assert type(model).__name__ == "Qwen2MoeForCausalLM"
        assert type(model).__module__ == "transformers.models.qwen2_moe.modeling_qwen2_moe"


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm", "batched_mm"])
def test_the_stock_kernel_that_was_asked_for_runs(tiny_dir, kernel):
    stock = AutoModelForCausalLM.from_pretrained(tiny_dir, experts_implementation=kernel)
    ours = AutoModelForCausalLM.from_pretrained(tiny_dir, experts_implementation=kernel, moe_opt=True)
    assert torch.equal(logits(stock), logits(ours))
    assert ours.moe_opt.kernel == kernel


def test_without_the_keyword_nothing_changes(tiny_dir):
    for value in (None, False):
        model = AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt=value)
        assert not hasattr(model, "moe_opt")


def test_from_config_and_meta_initialisation():
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(make_config("mixtral"))
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(make_config("mixtral"), moe_opt=True)
    assert torch.equal(logits(stock.eval()), logits(ours.eval()))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(make_config("mixtral"), moe_opt=True)
    assert empty.moe_opt.num_layers == 3
    assert empty.moe_opt.num_experts == 8
    assert empty.moe_opt.top_k == 2


@pytest.mark.parametrize("shard", ["10MB", "20KB"])
def test_saving_and_reloading_keeps_settings_and_united_experts(tiny, tmp_path, shard):
    stock = logits(tiny)
    moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(tiny, ways=4))
    tiny.moe_opt.config.brownout_layers = [0, 2]
    tiny.moe_opt.set_brownout(threshold=0.2)
    browned = logits(tiny)
    tiny.save_pretrained(tmp_path / "saved", max_shard_size=shard)

    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["moe_opt"] == {"brownout_layers": [0, 2], "united_experts": ".", "ways": 4}
    assert saved["architectures"] == ["Qwen2MoeForCausalLM"]
    assert not hasattr(tiny.config, "moe_opt")

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", moe_opt=True)
    assert torch.equal(logits(again), stock)  # thresholds are not stored
    again.moe_opt.set_brownout(threshold=0.2)
    assert torch.equal(logits(again), browned)
    assert again.moe_opt.united_config.ways == 4

    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert torch.equal(logits(plain), stock)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]

    again.save_pretrained(tmp_path / "twice")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "twice", moe_opt=True).moe_opt.united_config.ways == 4


def test_explicit_settings_override_saved_ones(tiny, tmp_path):
    moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(tiny, ways=4))
    tiny.save_pretrained(tmp_path / "model")
    UnitedExperts.from_average(tiny, ways=2).save_pretrained(tmp_path / "two")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model", moe_opt={"united_experts": str(tmp_path / "two")})
    assert other.moe_opt.united_config.ways == 2


def test_checkpoints_that_lost_their_united_experts_still_load(tiny, tmp_path):
    """Detached before saving, saved by a stock model, or only a config: the mention of united experts must not bar."""
    want = logits(tiny)
    moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(tiny, ways=4))
    tiny.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", moe_opt=True)
    moe_opt.detach_united_experts(again)
    again.save_pretrained(tmp_path / "detached")
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "stock")
    for folder in ("detached", "stock"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, moe_opt=True)
        assert torch.equal(logits(model), want)
        assert model.moe_opt.united_config is None
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "ours"), moe_opt=True)
    assert fresh.moe_opt.united_config is None
    (tmp_path / "parent").mkdir()
    (tmp_path / "ours").rename(tmp_path / "parent" / "sub")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "parent", subfolder="sub", moe_opt=True)
    assert model.moe_opt.united_config.ways == 4


def test_a_stock_state_dict_loads_with_united_experts_attached(tiny):
    state = {key: value.clone() for key, value in tiny.state_dict().items()}
    moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(tiny, ways=4))
    assert not tiny.load_state_dict(state).missing_keys


def test_the_callers_config_is_left_alone():
    config = make_config("mixtral")
    before = config._experts_implementation
    AutoModelForCausalLM.from_config(config, moe_opt=True)
    assert config._experts_implementation == before


def test_copies_and_pickles_work_on_their_own(tiny):
    moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(tiny, ways=4))
    tiny.moe_opt.set_brownout(threshold=0.2)
    want = logits(tiny)
    for twin in (copy.deepcopy(tiny), pickle.loads(pickle.dumps(tiny))):
        assert torch.equal(logits(twin), want)
        twin.moe_opt.set_brownout(threshold=1.0)
        assert torch.equal(logits(tiny), want)
        assert not torch.equal(logits(twin), want)


def test_moving_a_model_rebuilds_the_shared_storage(tiny):
    moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(tiny, ways=4))
    tiny.moe_opt.set_brownout(threshold=0.2)
    want = logits(tiny)
    assert all(module.united.pool is not None for _, module in tiny.moe_opt.layers)
    moved = tiny.to(torch.float64).to(torch.float32)
    assert torch.equal(logits(moved), want)
    state = {key: value.clone() for key, value in moved.state_dict().items()}
    moved.load_state_dict(state, assign=True)
    assert torch.equal(logits(moved), want)


def test_loading_into_bf16(tiny_dir):
    stock = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.bfloat16, moe_opt=True)
    moe_opt.attach_united_experts(ours, UnitedExperts.from_average(ours, ways=4))
    assert torch.equal(logits(stock), logits(ours))
    assert ours.moe_opt.layers[0][1].united.down_proj.dtype == torch.bfloat16


# ---------------------------------------------------------------- what must fail


def test_dense_models_are_refused_by_name(tmp_path):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM.*dense model"):
        AutoModelForCausalLM.from_pretrained(tmp_path, moe_opt=True)


def test_families_outside_the_interface_are_refused_by_name():
    from transformers import DbrxConfig

    config = DbrxConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=32)
    with pytest.raises(UnsupportedModelError, match="DbrxForCausalLM.*outside Transformers' experts interface"):
        AutoModelForCausalLM.from_config(config, moe_opt=True)


def test_a_configuration_without_moe_layers_is_refused():
    config = make_config("qwen3_moe", mlp_only_layers=[0, 1, 2])
    with pytest.raises(UnsupportedModelError, match="no layer of this configuration"):
        AutoModelForCausalLM.from_config(config, moe_opt=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"ways": 0}, "ways must be"),
        ({"kernels": "fast"}, "unknown kernels 'fast'"),
        ({"brown": 1}, "unknown setting 'brown'"),
        ("yes", "must be True, a dict or a MoEOptConfig"),
        ({"brownout_layers": [-1]}, "at least 0"),
        ({"async_ep": "fast"}, "unknown async_ep mode"),
        ({"expert_parallel": {"ranks": 2}}, "unknown expert_parallel setting"),
    ],
)
def test_wrong_settings_fail_before_anything_is_read(tmp_path, value, message):
    with pytest.raises(ConfigError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nowhere", moe_opt=value)


def test_settings_that_do_not_fit_the_model(tiny_dir, tmp_path):
    with pytest.raises(ConfigError, match="layer 7"):
        AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt={"brownout_layers": [7]})
    with pytest.raises(IncompatibleUnitedExpertsError, match="no folder with united experts"):
        AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt={"united_experts": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="ways is set but united_experts is not"):
        AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt={"ways": 2})
    with pytest.raises(ConfigError, match="experts_implementation='sonicmoe'"):
        AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt=True, experts_implementation="sonicmoe")


def test_a_failed_load_leaves_no_request_behind(tiny_dir):
    with pytest.raises(ConfigError):
        AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt={"brownout_layers": [7]})
    assert MoEOptimizedForCausalLM.from_pretrained(tiny_dir).moe_opt.config.brownout_layers is None


# ---------------------------------------------------------------- the keyword itself


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_moe_opt_imports_neither_torch_nor_transformers():
    out = run_python("import sys, moe_opt; print([m for m in ('torch', 'transformers') if m in sys.modules])")
    assert out.strip() == "[]"


@pytest.mark.parametrize("order", ["import moe_opt, transformers", "import transformers.models.auto, moe_opt"])
def test_the_keyword_works_in_either_import_order_and_can_be_undone(tiny_dir, order):
    out = run_python(
        f"{order}\n"
        "from transformers import AutoModelForCausalLM as A\n"
        "before = A.from_pretrained.__func__\n"
        "moe_opt.hook(); moe_opt.hook()\n"
        "assert A.from_pretrained.__func__ is before\n"
        f"m = A.from_pretrained({str(tiny_dir)!r}, moe_opt=True)\n"
        "print(m.moe_opt.num_layers)\n"
        "moe_opt.unhook(); moe_opt.unhook()\n"
        "assert 'moe_opt' not in A.from_pretrained.__module__\n"
        f"print(hasattr(A.from_pretrained({str(tiny_dir)!r}), 'moe_opt'))\n"
        f"print(moe_opt.MoEOptimizedForCausalLM.from_pretrained({str(tiny_dir)!r}).moe_opt.num_experts)\n"
        "moe_opt.hook()\n"
        f"print(A.from_pretrained({str(tiny_dir)!r}, moe_opt=True).moe_opt.top_k)\n"
    )
    assert out.split() == ["3", "False", "8", "2"]


def test_config_goes_to_json_and_back():
    config = MoEOptConfig(united_experts="org/name", ways=4, brownout_layers=range(2, 5))
    assert MoEOptConfig.from_json(config.to_json()) == config
    assert config.brownout_layers == [2, 3, 4]
    assert MoEOptConfig().to_dict() == {}


def test_make_stock_is_deterministic():
    a, b = make_stock("olmoe").state_dict(), make_stock("olmoe").state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)
