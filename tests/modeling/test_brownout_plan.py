"""Algorithm 1 against its plain-code reference, the paper's example, and what must hold for any counts."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.errors import ConfigError
from moe_opt.modeling.brownout import (
    delegate_per_group,
    delegate_per_token,
    merge_duplicates,
    plan_brownout,
    plan_brownout_reference,
    tokens_per_expert,
)
from moe_opt.modeling.brownout_cpu import plan_brownout_cpu
from moe_opt.modeling.kernels.native import library


def delegate_on_host(native, *args, **options):
    """`delegate_per_group` in C++ or in NumPy."""
    with mock.patch.object(library, "if_loaded", return_value=library.load() if native else None):
        return delegate_per_group(*args, **options)


PAPER_COUNTS = [2, 4, 1, 5, 2, 1, 2, 3]
# Thresholds that floats cannot hold exactly are where a careless comparison goes wrong.
THRESHOLDS = st.sampled_from([0.0, 0.1, 0.2, 0.28, 0.3, 0.4, 0.55, 0.56, 0.57, 0.58, 0.6, 0.7, 0.9, 0.999, 1.0])


@st.composite
def problems(draw):
    experts = draw(st.integers(1, 40))
    counts = draw(st.lists(st.integers(0, 60), min_size=experts, max_size=experts))
    ways = draw(st.integers(1, experts))
    groups = [e // ways for e in range(experts)]
    draw(st.randoms()).shuffle(groups)
    return counts, groups


def test_the_papers_example_in_groups_of_four():
    plan = plan_brownout(torch.tensor(PAPER_COUNTS), 0.6, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    # E1 E3 E7 stay; UE0 takes E0 E2; UE1 takes E4 E5 E6
    assert plan.slot_of_expert.tolist() == [8, 1, 8, 3, 9, 9, 9, 7]


def test_an_expert_alone_in_its_group_runs_itself():
    groups = torch.tensor([e // 3 for e in range(8)])
    plan = plan_brownout(torch.tensor(PAPER_COUNTS), 0.6, groups)
    assert plan.slot_of_expert.tolist() == [8, 1, 8, 3, 9, 9, 6, 7]


def test_full_brownout_drops_what_partial_delegates():
    plan = plan_brownout(torch.tensor(PAPER_COUNTS), 0.6, torch.zeros(8, dtype=torch.int64), "full")
    assert plan.slot_of_expert.tolist() == [-1, 1, -1, 3, -1, -1, -1, 7]


def test_products_that_floats_round_up_keep_no_extra_expert():
    # 0.28 * 25 is 7.000000000000001: the expert with 7 tokens alone reaches the threshold
    counts = torch.tensor([7, 6, 6, 6])
    for threshold in (0.28, torch.tensor(0.28), torch.tensor(0.28, dtype=torch.float32)):
        plan = plan_brownout(counts, threshold, torch.zeros(4, dtype=torch.int64))
        assert plan.slot_of_expert.tolist() == [0, 4, 4, 4]


@settings(max_examples=300, deadline=None)
@given(problems(), THRESHOLDS, st.sampled_from(["zero", "full", "partial"]))
def test_plan_equals_the_reference(problem, threshold, strategy):
    counts, groups = problem
    want = plan_brownout_reference(counts, threshold, groups, strategy)
    got = plan_brownout(torch.tensor(counts), threshold, torch.tensor(groups), strategy)
    assert got.slot_of_expert.tolist() == want
    on_device = plan_brownout(
        torch.tensor(counts), torch.tensor(threshold, dtype=torch.float64), torch.tensor(groups), strategy
    )
    assert on_device.slot_of_expert.tolist() == want


@settings(max_examples=300, deadline=None)
@given(problems(), THRESHOLDS, st.sampled_from(["zero", "full", "partial"]), st.data())
def test_numpy_plan_equals_the_torch_plan(problem, threshold, strategy, data):
    counts, groups = problem
    flags = st.lists(st.booleans(), min_size=len(counts), max_size=len(counts))
    pinned = np.array(data.draw(flags)) if data.draw(st.booleans()) else None
    scores = st.lists(st.integers(0, 9), min_size=len(counts), max_size=len(counts))
    priority = np.array(data.draw(scores), dtype=np.float32) if data.draw(st.booleans()) else None
    want = plan_brownout(
        torch.tensor(counts), threshold, torch.tensor(groups), strategy,
        pinned=None if pinned is None else torch.from_numpy(pinned),
        priority=None if priority is None else torch.from_numpy(priority),
    ).slot_of_expert.tolist()  # fmt: skip
    got = plan_brownout_cpu(np.array(counts), threshold, np.array(groups), strategy, pinned=pinned, priority=priority)
    identity = list(range(len(counts)))
    assert (identity if got is None else got.tolist()) == want


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0, 1))
def test_what_must_hold_for_any_plan(problem, threshold):
    counts, groups = problem
    slots = plan_brownout(torch.tensor(counts), threshold, torch.tensor(groups)).slot_of_expert.tolist()
    experts = len(counts)
    before = {e for e in range(experts) if counts[e]}
    after = {slots[e] for e in before}
    assert len(after) <= len(before)
    for expert in range(experts):
        assert slots[expert] in (expert, experts + groups[expert])
        if counts[expert] == 0:
            assert slots[expert] == expert
    delegated = [e for e in before if slots[e] >= experts]
    assert all(sum(groups[e] == groups[d] for e in delegated) > 1 for d in delegated)
    kept = sum(counts[e] for e in before if slots[e] == e)
    assert kept >= threshold * sum(counts) * (1 - 1e-6)
    if delegated:  # no delegated expert has more tokens than the smallest kept one, but for lone members of a group
        lone = {e for e in before if slots[e] == e and sum(groups[e] == groups[d] for d in delegated) == 0}
        floor = [counts[e] for e in before if slots[e] == e and e not in lone]
        assert not floor or max(counts[d] for d in delegated) <= max(floor)


def test_a_threshold_of_one_keeps_experts_beyond_a_million_tokens():
    counts = torch.tensor([3_000_000, 1])
    for one in (1.0, torch.tensor(1.0)):
        assert plan_brownout(counts, one, torch.tensor([0, 0])).slot_of_expert.tolist() == [0, 1]


def test_per_token_strategies_and_wrong_values_are_rejected():
    counts, groups = torch.tensor([1, 2]), torch.tensor([0, 0])
    for strategy in ("reroute", "top-k"):
        with pytest.raises(ConfigError, match="per token"):
            plan_brownout(counts, 0.5, groups, strategy)
    with pytest.raises(ConfigError, match="unknown"):
        plan_brownout(counts, 0.5, groups, "some")
    with pytest.raises(ConfigError, match="1.2"):
        plan_brownout(counts, 1.2, groups)


def test_the_plan_compiles_into_one_graph():
    compiled = torch.compile(plan_brownout, fullgraph=True, backend="aot_eager")
    counts, groups = torch.tensor(PAPER_COUNTS), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    for threshold in (0.6, 0.2):
        got = compiled(counts, torch.tensor(threshold, dtype=torch.float64), groups)
        assert got.slot_of_expert.tolist() == plan_brownout_reference(PAPER_COUNTS, threshold, groups.tolist())


def test_pinned_experts_stay_and_count_as_kept():
    counts = torch.tensor([5, 4, 3, 1])
    pinned = torch.tensor([False, False, False, True])
    groups = torch.zeros(4, dtype=torch.int64)
    # 1 (pinned) + 5 reach 0.4 * 13 = 5.2
    assert plan_brownout(counts, 0.4, groups, pinned=pinned).slot_of_expert.tolist() == [0, 4, 4, 3]


def test_priority_keeps_as_many_originals_as_counts_would():
    counts, groups = torch.tensor([5, 4, 3, 1]), torch.zeros(4, dtype=torch.int64)
    by_count = plan_brownout(counts, 0.5, groups).slot_of_expert
    by_mass = plan_brownout(counts, 0.5, groups, priority=torch.tensor([0.1, 0.2, 0.9, 0.8])).slot_of_expert
    assert by_count.tolist() == [0, 1, 4, 4]
    assert by_mass.tolist() == [4, 4, 2, 3]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31 - 1))
def test_merging_keeps_each_slots_weight_and_computes_it_once(tokens, top_k, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 4, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    merged = merge_duplicates(ids, weights)
    for token in range(tokens):
        want: dict[int, float] = {}
        for slot, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if slot >= 0:
                want[slot] = want.get(slot, 0.0) + weight
        pairs = zip(merged.ids[token].tolist(), merged.weights[token].tolist(), strict=True)
        got = [(slot, weight) for slot, weight in pairs if slot >= 0]
        assert sorted(slot for slot, _ in got) == sorted(want)
        assert all(abs(want[slot] - weight) < 1e-5 for slot, weight in got)
    assert (merged.weights[merged.ids < 0] == 0).all()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**31 - 1),
    st.sampled_from(["full", "partial"]),
    st.sampled_from(["count", "mass", "error"]),
    THRESHOLDS,
    st.booleans(),
)
def test_host_and_device_code_delegate_alike(seed, strategy, keep, threshold, native):
    generator = torch.Generator().manual_seed(seed)
    tokens, experts, top_k = 9, 8, 3
    weights, ids = torch.rand(tokens, experts, generator=generator).softmax(-1).topk(top_k)
    valid = torch.rand(tokens, generator=generator) > 0.2
    exact = torch.rand(tokens, generator=generator) > 0.7
    groups = torch.arange(experts) // 4
    options = {"valid": valid, "exact": exact, "keep": keep, "error_per_expert": torch.rand(experts)}
    host = delegate_on_host(native, ids, weights, threshold, groups, strategy, **options)
    on_device = torch.tensor(threshold, dtype=torch.float64)
    device = delegate_per_group(ids, weights, on_device, groups, strategy, **options)
    if host is None:  # nothing saved: the device cannot know, and computes what the router chose
        assert torch.equal(device.ids[valid], ids[valid])
        return
    assert torch.equal(host.ids, device.ids)
    assert torch.allclose(host.weights, device.weights)
    assert torch.equal(host.ids[valid & exact], ids[valid & exact])
    assert (host.ids[~valid] == -1).all()


def test_top_k_keeps_the_heaviest_experts_and_the_gate_mass():
    ids = torch.tensor([[3, 1, 2], [0, 1, 2]])
    weights = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]])
    got = delegate_per_token(ids, weights, 0.6, 4, "top-k")
    assert got.ids.tolist() == [[-1, 1, 2], [0, 1, -1]]
    assert torch.allclose(got.weights.sum(1), weights.sum(1))
    assert torch.allclose(got.weights[0], torch.tensor([0.0, 0.625, 0.375]))


def test_top_k_never_leaves_a_token_without_its_first_expert():
    got = delegate_per_token(torch.tensor([[3, 1]]), torch.tensor([[0.3, 0.7]]), 0.0, 4, "top-k")
    assert got.ids.tolist() == [[-1, 1]]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(0, 0.95))
def test_reroute_reads_nothing_that_the_batch_would_not_read_anyway(seed, threshold):
    generator = torch.Generator().manual_seed(seed)
    tokens, experts, top_k = 7, 16, 4
    scores = torch.randn(tokens, experts, generator=generator) * 2
    weights, ids = scores.softmax(-1).topk(top_k)
    device = torch.tensor(threshold, dtype=torch.float64)
    fewer = delegate_per_token(ids, weights, threshold, experts, "top-k")
    moved = delegate_per_token(ids, weights, threshold, experts, "reroute", scores=scores)
    assert (fewer is None) == (moved is None)
    if fewer is None or moved is None:  # every expert is some token's own: nothing to save, nothing changes
        return
    assert torch.equal(fewer.ids, delegate_per_token(ids, weights, device, experts, "top-k").ids)
    read = tokens_per_expert(fewer.ids, experts) > 0
    assert torch.equal(tokens_per_expert(moved.ids, experts) > 0, read)
    assert torch.allclose(moved.weights.sum(1), weights.sum(1), atol=1e-6)
    for row in moved.ids.tolist():  # no expert twice for one token
        own = [slot for slot in row if slot >= 0]
        assert len(own) == len(set(own))
    assert ((moved.ids >= 0).sum(1) >= (fewer.ids >= 0).sum(1)).all()


def test_per_token_strategies_leave_exact_rows_alone():
    weights, ids = (torch.rand(5, 8, generator=torch.Generator().manual_seed(1)) * 4).softmax(-1).topk(3)
    exact = torch.tensor([True, False, True, False, False])
    for strategy in ("reroute", "top-k"):
        got = delegate_per_token(ids, weights, 0.2, 8, strategy, exact=exact)
        assert torch.equal(got.ids[exact], ids[exact])
        assert torch.equal(got.weights[exact], weights[exact])


def test_a_plan_that_saves_no_read_is_not_applied():
    ids = torch.tensor([[0, 1], [1, 0]])  # each expert is the first of one token
    weights = torch.tensor([[0.7, 0.3], [0.7, 0.3]])
    assert delegate_per_token(ids, weights, 0.5, 4, "top-k") is None
    assert delegate_per_group(ids, weights, 0.9, torch.tensor([0, 0, 1, 1]), "partial") is None


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31 - 1), THRESHOLDS, st.sampled_from(["full", "partial"]), st.booleans())
def test_one_token_takes_the_plan_of_any_batch(seed, threshold, strategy, native):
    """NumPy's shortcut for batch 1, and C++, against the device code."""
    generator = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(1, 12, generator=generator).softmax(-1).topk(5)
    groups = torch.arange(12) // 3
    host = delegate_on_host(native, ids, weights, threshold, groups, strategy)
    device = delegate_per_group(ids, weights, torch.tensor(threshold, dtype=torch.float64), groups, strategy)
    assert torch.equal(ids if host is None else host.ids, device.ids)
