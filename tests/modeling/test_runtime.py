"""Phases, padding, exact rows, statistics and the recorder."""

import pytest
import torch
from families import make_batch
from transformers import StaticCache

import moe_opt
from moe_opt import UnitedExperts
from moe_opt.errors import ConfigError, MoEOptError


@pytest.fixture
def united(tiny):
    moe_opt.attach_united_experts(tiny, UnitedExperts.from_average(tiny, ways=4))
    return tiny


def logits(model, **batch):
    with torch.no_grad():
        return model(**batch).logits


def test_each_phase_has_a_threshold_of_its_own(united):
    runtime = united.moe_opt
    batch = make_batch()
    exact = united.generate(**batch, max_new_tokens=3, min_new_tokens=3, do_sample=False, return_dict_in_generate=True,
                            output_logits=True)  # fmt: skip
    runtime.set_brownout(threshold=0.0, phase="decode")
    late = united.generate(**batch, max_new_tokens=3, min_new_tokens=3, do_sample=False, return_dict_in_generate=True,
                           output_logits=True)  # fmt: skip
    assert torch.equal(exact.logits[0], late.logits[0])
    assert not torch.equal(exact.logits[1], late.logits[1])
    assert runtime.last_step.phase == "decode"
    runtime.set_brownout(threshold=1.0, phase="decode")
    runtime.set_brownout(threshold=0.0, phase="prefill")
    early = united.generate(**batch, max_new_tokens=1, do_sample=False, return_dict_in_generate=True,
                            output_logits=True)  # fmt: skip
    assert not torch.equal(exact.logits[0], early.logits[0])
    assert runtime.last_step.phase == "prefill"


def test_a_one_token_prompt_is_prefill_and_a_static_cache_decodes(united):
    runtime = united.moe_opt
    logits(united, input_ids=torch.tensor([[5]]))
    assert runtime.last_step.phase == "prefill"
    united.generate(torch.tensor([[5]]), max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert runtime.last_step.phase == "decode"
    cache = StaticCache(config=united.config, max_cache_len=16)
    logits(united, input_ids=torch.tensor([[5, 6, 7]]), past_key_values=cache)
    assert runtime.last_step.phase == "prefill"
    logits(united, input_ids=torch.tensor([[8]]), past_key_values=cache)
    assert runtime.last_step.phase == "decode"


def test_what_is_left_out_persists(united):
    runtime = united.moe_opt
    runtime.set_brownout(threshold=0.5, strategy="full", layers=[1], keep="mass")
    runtime.set_brownout(threshold=0.25, phase="decode")
    assert runtime.brownout("prefill").threshold == 0.5
    decode = runtime.brownout("decode")
    assert (decode.threshold, decode.strategy, decode.keep, decode.layers) == (0.25, "full", "mass", {1})
    runtime.set_brownout(layers=None)
    assert runtime.brownout("decode").layers is None


def test_layers_can_be_exempt(united):
    runtime = united.moe_opt
    runtime.set_brownout(threshold=0.0, layers=[1])
    logits(united, **make_batch())
    share = runtime.last_step.delegated_share
    assert share[0] == 0
    assert share[1] > 0
    assert share[2] == 0
    runtime.config.brownout_layers = [2]  # as loaded with MoEOptConfig(brownout_layers=[2])
    logits(united, **make_batch())
    assert runtime.last_step.delegated_share.sum() == 0
    runtime.set_brownout(layers=None)
    logits(united, **make_batch())
    assert (runtime.last_step.delegated_share > 0).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 1.2}, "1.2"),
        ({"threshold": -0.1}, r"\[0, 1\]"),
        ({"threshold": float("nan")}, r"\[0, 1\]"),
        ({"threshold": "low"}, "number"),
        ({"threshold": True}, "number"),
        ({"strategy": "some"}, "unknown brownout strategy 'some'"),
        ({"phase": "both"}, "unknown phase 'both'"),
        ({"keep": "best"}, "unknown keep rule 'best'"),
        ({"layers": [3]}, "layer 3 does not exist"),
    ],
)
def test_wrong_settings_change_nothing(united, change, message):
    united.moe_opt.set_brownout(threshold=0.7)
    before = (united.moe_opt.brownout("prefill"), united.moe_opt.brownout("decode"))
    with pytest.raises(ConfigError, match=message):
        united.moe_opt.set_brownout(**{"threshold": 0.1, **change})
    assert (united.moe_opt.brownout("prefill"), united.moe_opt.brownout("decode")) == before


def test_partial_brownout_needs_united_experts(tiny):
    with pytest.raises(ConfigError, match="none are attached"):
        tiny.moe_opt.set_brownout(threshold=0.5)
    tiny.moe_opt.set_brownout(threshold=0.5, strategy="top-k")
    with pytest.raises(ConfigError, match="none are attached"):
        tiny.moe_opt.set_brownout(strategy="partial")


def test_statistics_need_a_pass(tiny):
    with pytest.raises(MoEOptError, match="run the model once"):
        _ = tiny.moe_opt.last_step


@pytest.mark.parametrize("strategy", ["partial", "full", "reroute", "top-k"])
def test_padding_changes_neither_plan_nor_counts(united, strategy):
    """Rows with other padding tokens and more of them give the same counts and the same outputs."""
    runtime = united.moe_opt
    runtime.set_brownout(threshold=0.3, strategy=strategy)
    batch = make_batch(batch=3, length=9)
    short = logits(united, **batch)
    read, share = runtime.last_step.active_experts, runtime.last_step.delegated_share
    junk = torch.randint(3, 90, (3, 6), generator=torch.Generator().manual_seed(5))
    padded = {
        "input_ids": torch.cat([junk, batch["input_ids"]], 1),
        "attention_mask": torch.cat([torch.zeros(3, 6, dtype=torch.int64), batch["attention_mask"]], 1),
    }
    positions = (padded["attention_mask"].cumsum(1) - 1).clamp_min(0)
    first = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    short = logits(united, **batch, position_ids=first)
    long = logits(united, **padded, position_ids=positions)
    real = batch["attention_mask"].bool()
    assert torch.allclose(long[:, 6:][real], short[real], atol=1e-5)
    assert torch.equal(runtime.last_step.active_experts, read)
    assert torch.equal(runtime.last_step.delegated_share, share)


def test_exact_rows_share_a_batch_with_browned_ones(united):
    runtime = united.moe_opt
    batch = {"input_ids": make_batch(batch=4, length=6)["input_ids"]}
    want = logits(united, **batch)
    runtime.set_brownout(threshold=0.0)
    browned = logits(united, **batch)
    browned_read = runtime.last_step.active_experts
    rows = torch.arange(4).repeat_interleave(6)
    with runtime.batch(rows, phase="prefill", exact=rows == 2):
        mixed = logits(united, **batch)
    assert torch.allclose(mixed[2], want[2], atol=1e-5)
    assert not torch.allclose(mixed[0], want[0], atol=1e-5)
    assert (runtime.last_step.active_experts >= browned_read).all()
    with runtime.batch(rows, phase="prefill", exact=torch.ones(24, dtype=torch.bool)):
        assert torch.allclose(logits(united, **batch), want, atol=1e-6)
    assert not torch.allclose(browned, want, atol=1e-5)


def test_active_experts_counts_the_union_of_what_runs(united):
    runtime = united.moe_opt
    runtime.set_brownout(threshold=0.0)
    logits(united, **make_batch(batch=4, length=12))
    assert (runtime.last_step.active_experts <= 2).all()  # 8 experts in 2 groups
    assert (runtime.last_step.routed_experts > 5).all()
    assert runtime.last_step.active_experts.dtype == torch.int64


def test_packed_batches_name_their_requests(tiny):
    runtime = tiny.moe_opt
    ids = make_batch()["input_ids"].reshape(1, -1)
    owner = torch.randint(-1, 4, (ids.numel(),), generator=torch.Generator().manual_seed(0))
    with runtime.record(num_requests=4) as rec, runtime.batch(owner, phase="decode"):
        logits(tiny, input_ids=ids)
    want = torch.bincount(owner[owner >= 0], minlength=4) * runtime.top_k
    assert torch.equal(rec.decode.sum(2), want.unsqueeze(1).expand(4, 3))
    assert rec.prefill.sum() == 0


def test_counts_are_the_routers_choices_even_under_brownout(united):
    runtime = united.moe_opt
    batch = make_batch()
    with runtime.record(num_requests=3) as exact:
        logits(united, **batch)
    runtime.set_brownout(threshold=0.0, strategy="full", layers=[2])  # the last layer: the others see the same inputs
    with runtime.record(num_requests=3) as browned:
        logits(united, **batch)
    assert torch.equal(exact.counts, browned.counts)


def test_recorders_nest_and_end(tiny):
    runtime = tiny.moe_opt
    batch = make_batch()
    with runtime.record(num_requests=3) as outer:
        logits(tiny, **batch)
        with runtime.record(num_requests=5) as inner:
            logits(tiny, **batch)
    logits(tiny, **batch)
    assert torch.equal(outer.counts, 2 * inner.counts[:3])
    assert inner.counts[3:].sum() == 0


def test_too_few_requests_is_an_error(tiny):
    with pytest.raises(ConfigError, match="num_requests=2.*met request 2"), tiny.moe_opt.record(num_requests=2):
        logits(tiny, **make_batch(batch=3))
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="num_requests must be"):
            tiny.moe_opt.record(num_requests=wrong)
    logits(tiny, **make_batch(batch=3))  # the failed recorder is gone


def test_keep_rules_read_as_many_originals(united):
    runtime = united.moe_opt
    batch = make_batch(batch=6, length=12)
    kept = {}
    for keep in ("count", "mass", "error"):
        runtime.set_brownout(threshold=0.4, keep=keep, layers=[0])
        logits(united, **batch)
        ids = runtime.last_step._computed[0]
        kept[keep] = int((torch.bincount(ids[(ids >= 0) & (ids < 8)], minlength=8) > 0).sum())
    assert abs(kept["mass"] - kept["count"]) <= 2  # lone members of a group stay beside the rule's own number
    assert abs(kept["error"] - kept["count"]) <= 2


def test_static_caches_keep_padding_out(united):
    """`generate` gives the model a 4-d mask there, in which no padding can be seen."""
    runtime = united.moe_opt
    runtime.set_brownout(threshold=0.3)
    seen = []
    for cache in ("dynamic", "static"):
        with runtime.record(num_requests=3) as rec:
            out = united.generate(
                **make_batch(), cache_implementation=cache, max_new_tokens=4, min_new_tokens=4, do_sample=False,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        seen.append((rec.counts, torch.stack(out.logits)))
    assert torch.equal(seen[0][0].sum((1, 2)), seen[1][0].sum((1, 2)))
    assert torch.allclose(seen[0][1], seen[1][1], atol=1e-4)


def test_a_packed_batch_of_another_length_is_an_error(united):
    rows = torch.zeros(5, dtype=torch.int64)
    with (
        united.moe_opt.batch(rows, phase="prefill", exact=torch.ones(5, dtype=torch.bool)),
        pytest.raises(ConfigError, match="5 tokens, but the forward pass has 1 x 6"),
    ):
        logits(united, input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]]))
    logits(united, input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]]))


def test_a_positional_mask_counts(tiny):
    batch = make_batch()
    with tiny.moe_opt.record(num_requests=3) as rec, torch.no_grad():
        tiny.model(batch["input_ids"], batch["attention_mask"])
    assert rec.prefill[:, 0].sum(1).tolist() == [22, 18, 14]


def test_a_pass_in_another_thread_is_refused_while_one_runs(tiny):
    import threading

    errors = []

    def other():
        try:
            logits(tiny, **make_batch())
        except MoEOptError as error:
            errors.append(str(error))

    def during(*_):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    handle = tiny.model.layers[1].register_forward_pre_hook(during)
    logits(tiny, **make_batch())
    handle.remove()
    assert len(errors) == 1
    assert "another thread" in errors[0]
    during()  # taking turns is fine
    assert len(errors) == 1


def test_choosing_a_stock_kernel_later_keeps_brownout_and_recording(united):
    runtime = united.moe_opt
    runtime.set_brownout(threshold=0.0)
    united.set_experts_implementation("eager")
    assert runtime.kernel == "eager"
    assert united.get_experts_implementation()[""] == "eager"
    with runtime.record(num_requests=3) as rec:
        logits(united, **make_batch())
    assert rec.counts.sum() > 0
    assert (runtime.last_step.active_experts <= 2).all()
    with pytest.raises(ConfigError, match="does not go with moe_opt"):
        united.set_experts_implementation("deepgemm")


def test_thresholds_may_be_numpy_or_tensors(united):
    import numpy as np

    for value in (np.float32(0.25), torch.tensor(0.25), np.float64(0.25)):
        united.moe_opt.set_brownout(threshold=value)
        assert united.moe_opt.brownout("decode").threshold == 0.25
    for layers in (5, ["a"], [1.5], "01"):
        with pytest.raises(ConfigError, match="layers must be indices"):
            united.moe_opt.set_brownout(layers=layers)
