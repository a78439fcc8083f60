"""What composes: PEFT, torch.compile, gradient checkpointing, offload. docs/composition.md is the table."""

import pytest
import torch
from families import make_batch, make_stock
from transformers import AutoModelForCausalLM

import moe_opt
from moe_opt import UnitedExperts


def logits(model, **batch):
    with torch.no_grad():
        return model(**(batch or make_batch())).logits


@pytest.fixture
def browned(tiny):
    moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(tiny, ways=4))
    tiny.moe_opt.set_brownout(threshold=0.3)
    return tiny


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_follows_thresholds_without_recompiling(browned, backend):
    torch._dynamo.reset()
    compiled = torch.compile(browned, backend=backend)
    runtime = browned.moe_opt
    logits(browned)  # builds the shared storages
    logits(compiled)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for threshold in (0.5, 0.2, 0.0):
        runtime.set_brownout(threshold=threshold)
        got, read = logits(compiled), runtime.last_step.active_experts
        assert torch.allclose(got, logits(browned), atol=1e-5)
        assert torch.equal(read, runtime.last_step.active_experts)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_compiled_models_see_new_weights(browned):
    torch._dynamo.reset()
    logits(browned)  # builds the shared storages
    compiled = torch.compile(browned, backend="aot_eager")
    logits(compiled)
    state = {k: v * 1.5 if k.endswith("down_proj") else v.clone() for k, v in browned.state_dict().items()}
    browned.load_state_dict(state, assign=True)
    assert torch.allclose(logits(compiled), logits(browned), atol=1e-5)


def test_compiled_exact_output_equals_compiled_stock(tiny_dir, tiny):
    torch._dynamo.reset()
    stock = torch.compile(AutoModelForCausalLM.from_pretrained(tiny_dir), backend="aot_eager")
    assert torch.equal(logits(stock), logits(torch.compile(tiny, backend="aot_eager")))


def test_recording_under_compile(tiny):
    torch._dynamo.reset()
    compiled = torch.compile(tiny, backend="aot_eager")
    with tiny.moe_opt.record(num_requests=3) as want:
        logits(tiny)
    with tiny.moe_opt.record(num_requests=3) as got:
        logits(compiled)
    assert torch.equal(want.counts, got.counts)


def test_gradient_checkpointing_recomputes_the_same_brownout(browned):
    batch = make_batch()

    def gradients():
        browned.zero_grad()
        browned(**batch, labels=batch["input_ids"]).loss.backward()
        return [p.grad.clone() for p in browned.parameters() if p.grad is not None]

    browned.train()
    want = gradients()
    browned.gradient_checkpointing_enable()
    with browned.moe_opt.record(num_requests=3) as rec:
        got = gradients()
    assert len(got) == len(want)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))
    assert int(rec.prefill[0, 0].sum()) == 11 * 2  # the recomputation is not counted again


def test_training_gradients_equal_stock(tiny_dir, tiny):
    stock = AutoModelForCausalLM.from_pretrained(tiny_dir)
    batch = make_batch()
    for model in (stock, tiny):
        model(**batch, labels=batch["input_ids"]).loss.backward()
    for a, b in zip(stock.parameters(), tiny.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("targets", [["mlp.experts.gate_up_proj"], ["united.gate_up_proj", "united.down_proj"]])
def test_lora_on_originals_or_on_united_experts(browned, targets):
    """One or the other: PEFT wraps the experts module, and no longer finds a parameter below the wrapper."""
    from peft import LoraConfig, get_peft_model

    want = logits(browned)
    adapted = get_peft_model(browned, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets))
    assert torch.allclose(logits(adapted), want, atol=1e-5)  # LoRA starts at zero
    assert adapted.moe_opt is browned.moe_opt
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name and "experts" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    changed = logits(adapted)
    assert not torch.allclose(changed, want, atol=1e-3)
    adapted(**make_batch(), labels=make_batch()["input_ids"]).loss.backward()
    trained = [p for name, p in adapted.named_parameters() if "experts" in name and "lora_B" in name]
    assert trained
    assert all(p.grad is not None for p in trained)
    merged = adapted.merge_and_unload()
    assert torch.allclose(logits(merged), changed, atol=1e-4)


def test_disk_offload_keeps_exact_and_browned_output(tiny_dir, tmp_path, browned):
    want = logits(browned)
    united = UnitedExperts.from_model(browned)
    browned.moe_opt.set_brownout(threshold=1.0)
    exact = logits(browned)
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
                  "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        tiny_dir, moe_opt=True, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert model.moe_opt.layers[1][1].down_proj.device.type == "meta"
    assert torch.equal(logits(model), exact)
    moe_opt.attach_united_experts(model, united)
    model.moe_opt.set_brownout(threshold=0.3)
    assert torch.allclose(logits(model), want, atol=1e-5)
    assert model.moe_opt.layers[1][1].united.pool is None  # offloaded layers take two products


def test_device_map_auto(tiny_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt=True, device_map="auto")
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(tiny_dir)))


def test_batched_kernel_under_brownout(tiny_dir, browned):
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt=True, experts_implementation="batched_mm")
    moe_opt.attach_united_experts(model, UnitedExperts.from_average(model, ways=4))
    model.moe_opt.set_brownout(threshold=0.3)
    assert torch.allclose(logits(model), logits(browned), atol=1e-5)


def test_inference_mode_and_grad_mode_agree(browned):
    with torch.inference_mode():
        fast = browned(**make_batch()).logits.clone()
    slow = browned(**make_batch()).logits
    assert torch.allclose(fast, slow, atol=1e-5)


def test_two_models_in_one_process_do_not_share_settings(tiny_dir, browned):
    other = AutoModelForCausalLM.from_pretrained(tiny_dir, moe_opt=True)
    stock = AutoModelForCausalLM.from_pretrained(tiny_dir)
    assert torch.equal(logits(other), logits(stock))
    assert not torch.equal(logits(browned), logits(stock))


def test_a_stock_model_can_use_the_registered_name():
    stock = make_stock("mixtral")
    want = logits(stock)
    stock.set_experts_implementation("moe_opt")  # no runtime: the stock kernel runs
    assert torch.equal(logits(stock), want)
