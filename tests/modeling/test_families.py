"""Every family of the experts interface: stock outputs to the bit, brownout, recorder and united experts."""

import pytest
import torch
from families import FAMILIES, make_batch, make_stock
from transformers import AutoModelForCausalLM

import moe_opt

# `make test` takes the families whose expert layouts differ; `make test-matrix` takes all, in both dtypes.
SAMPLE = ("qwen2_moe", "gpt_oss", "deepseek_v3", "nemotron_h")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [
    pytest.param(
        (family, dtype),
        id=f"{family}-{dtype}",
        marks=() if family in SAMPLE and dtype == "float32" else pytest.mark.matrix,
    )
    for family in FAMILIES
    for dtype in DTYPES
]


@pytest.fixture(params=CASES)
def pair(request, tmp_path_factory):
    """(stock model, the same checkpoint loaded with moe_opt=True)"""
    family, dtype = request.param
    return load_pair(family, DTYPES[dtype], tmp_path_factory.mktemp(family))


def load_pair(family, dtype, folder):
    make_stock(family, dtype).save_pretrained(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, moe_opt=True)
    return stock, ours


@torch.no_grad()
def test_a_family_is_stock_until_asked_then_browns_out(pair):
    stock, ours = pair
    batch = make_batch()
    want = stock(**batch).logits
    assert torch.equal(ours(**batch).logits, want)
    runtime = ours.moe_opt
    routed = runtime.last_step.active_experts

    united = moe_opt.UnitedExperts.from_average(ours, ways=3)  # 8 experts: groups of 3, 3 and 2
    moe_opt.attach_united_experts(ours, united)
    assert torch.equal(ours(**batch).logits, want)
    for strategy in ("partial", "full", "reroute", "top-k"):
        runtime.set_brownout(threshold=0.3, strategy=strategy)
        got = ours(**batch).logits
        assert torch.isfinite(got).all()
        changed = bool((runtime.last_step.delegated_share > 0).any())
        assert changed or strategy in ("reroute", "top-k")  # these may find no read to save
        assert torch.equal(got, want) != changed
        assert (runtime.last_step.active_experts <= routed).all()
    runtime.set_brownout(threshold=1.0)
    assert torch.equal(ours(**batch).logits, want)


@torch.no_grad()
def test_greedy_and_sampled_generation_equal_stock(pair):
    stock, ours = pair
    batch = make_batch()
    options = {"max_new_tokens": 6, "min_new_tokens": 6}
    assert torch.equal(
        stock.generate(**batch, do_sample=False, **options), ours.generate(**batch, do_sample=False, **options)
    )
    samples = []
    for model in (stock, ours):
        torch.manual_seed(3)
        samples.append(model.generate(**batch, do_sample=True, temperature=0.8, **options))
    assert torch.equal(*samples)


@torch.no_grad()
def test_the_recorder_counts_every_real_token_of_every_layer(pair):
    _, ours = pair
    batch = make_batch()
    runtime = ours.moe_opt
    with runtime.record(num_requests=3) as rec:
        ours.generate(**batch, do_sample=False, max_new_tokens=4, min_new_tokens=4)
    tokens = batch["attention_mask"].sum(1)
    per_layer = rec.prefill.sum(2)
    assert torch.equal(per_layer, (tokens * runtime.top_k).unsqueeze(1).expand_as(per_layer))
    assert torch.equal(rec.decode.sum(2), torch.full_like(per_layer, 3 * runtime.top_k))
    assert torch.equal(rec.counts, rec.prefill + rec.decode)
    assert rec.counts.dtype == torch.int64
    assert rec.counts.shape == (3, runtime.num_layers, runtime.num_experts)
