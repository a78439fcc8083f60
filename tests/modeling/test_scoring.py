"""Scores from trees of tokens, against a plain forward pass per choice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from families import VOCAB, make_stock
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt import MoEOptimizedForCausalLM
from moe_opt.errors import ConfigError
from moe_opt.flops import FlopsModel
from moe_opt.modeling.score_item import ScoreItem
from moe_opt.modeling.scoring import (
    ScoreStats,
    build_trees,
    score_items,
    shares_prefixes,
    subtree_ends,
)

FAMILIES = (
    "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "gemma4_text", "glm4_moe", "granitemoe",
    "minimax_m2",
)  # fmt: skip


@torch.no_grad()
def plain_scores(model: Any, items: list[ScoreItem]) -> list[list[float]]:
    out = []
    for item in items:
        row = []
        for choice in item.choices:
            ids = torch.tensor([[*item.prompt, *choice]])
            logits = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
            first = len(item.prompt)
            row.append(float(sum(logits[first + j - 1, token] for j, token in enumerate(choice))))
        out.append(row)
    return out


def siblings(seed: int = 0, prefix: int = 20) -> list[ScoreItem]:
    """Items that share a long prefix, two that repeat, one that shares nothing; choices of 1 to 4 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    shared = ids(prefix)
    items = [ScoreItem(shared + ids(1 + k), [ids(1), ids(3), ids(4)]) for k in range(4)]
    first = items[0].choices[1]
    items.append(ScoreItem(items[0].prompt, [first, [*first[:2], 5], [*first, 7]]))
    items.append(ScoreItem(ids(9), [ids(2), ids(1)]))
    items.append(items[2])
    return items


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_plain_passes(family: str) -> None:
    model = make_stock(family)
    items = siblings()
    stats = ScoreStats()
    found = score_items(model, items, stats=stats)
    expected = plain_scores(model, items)
    assert shares_prefixes(model)
    assert stats.computed < stats.asked / 2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-4)
    for tokens in (1, 40):  # every tree alone; small batches
        again = score_items(model, items, max_batch_tokens=tokens)
        for mine, theirs in zip(again, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=2e-4)
    alone = score_items(model, items, share_prefixes=False)
    for mine, theirs in zip(alone, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-4)


def test_hybrids_run_every_choice_by_itself() -> None:
    model = make_stock("nemotron_h")
    assert not shares_prefixes(model)
    items = siblings()[:3]
    for mine, theirs in zip(score_items(model, items), plain_scores(model, items), strict=True):
        assert mine == pytest.approx(theirs, abs=2e-4)


def test_padding_of_trees_is_not_read(demo_model_dir) -> None:
    model = MoEOptimizedForCausalLM.from_pretrained(demo_model_dir, moe_opt=True, dtype=torch.float32)
    items = siblings(prefix=40)
    stock = make_stock("qwen2_moe")
    assert score_items(stock, items)  # a model without moe_opt takes the same path
    with model.moe_opt.record(num_requests=1) as recorder:
        stats = ScoreStats()
        score_items(model, items, stats=stats)
    assert int(recorder.counts[0, 0].sum()) <= stats.computed * model.moe_opt.top_k


token_lists = st.lists(st.integers(1, 3), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(
    items=st.lists(st.tuples(token_lists, st.lists(token_lists, min_size=1, max_size=3)), min_size=1, max_size=6),
    limit=st.integers(1, 30),
    share=st.booleans(),
)
def test_trees_hold_every_sequence(items, limit: int, share: bool) -> None:
    given_items = [ScoreItem(*item) for item in items]
    seen = set()
    for tree in build_trees(given_items, limit, share):
        parents: list[int] = []
        latest: dict[int, int] = {}
        for node, depth in enumerate(tree.depths):
            parents.append(latest[depth - 1] if depth else -1)
            latest[depth] = node
        for number, index, nodes, choice in tree.targets:
            seen.add((number, index))
            item = given_items[number]
            assert list(choice) == item.choices[index]
            assert len(nodes) == len(choice)
            node, path = nodes[-1], []
            while node >= 0:
                path.append(tree.tokens[node])
                node = parents[node]
            assert path[::-1] == [*item.prompt, *choice[:-1]]
            assert all(parents[b] == a for a, b in itertools.pairwise(nodes))
    assert seen == {(n, i) for n, item in enumerate(given_items) for i in range(len(item.choices))}


@settings(max_examples=80, deadline=None)
@given(steps=st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_subtree_ends_against_plain_code(steps: list[int]) -> None:
    depths = [0]
    for step in steps:
        depths.append(min(step, depths[-1] + 1))
    ends = subtree_ends(depths)
    for node, depth in enumerate(depths):
        later = [other for other in range(node + 1, len(depths)) if depths[other] <= depth]
        assert ends[node] == (later[0] if later else len(depths))


def test_siblings_cost_one_prefix_pass() -> None:
    """Counted FLOPs of 20 siblings are within 2 % of Eq. 2: the prefix once, then each suffix after it."""
    from torch.utils.flop_counter import FlopCounterMode

    model = make_stock("qwen3_moe")
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(3, VOCAB, (100,), generator=generator).tolist()
    items = [ScoreItem([*prefix, 3 + k], [[5], [6]]) for k in range(20)]
    with FlopCounterMode(display=False) as counter:
        score_items(model, items)
    flops = FlopsModel.from_config(model.config)
    layers, heads, width = 3, 4, 8
    tokens = len(prefix) + 20
    # Eager attention multiplies all pairs of the row; Eq. 2 counts the pairs that a causal kernel needs.
    pairs = sum(range(1, len(prefix) + 1)) + 20 * (len(prefix) + 1)
    counted = counter.get_total_flops() - 4 * layers * heads * width * (tokens**2 - pairs)
    # Every sibling's logits, and of the prefix none.
    head = 2 * model.config.hidden_size * model.config.vocab_size
    expected = flops.prefill(len(prefix)) - head + 20 * flops.prefill(1, len(prefix))
    assert counted == pytest.approx(expected, rel=0.02)


def test_wrong_items_are_refused() -> None:
    model = make_stock("qwen2_moe")
    with pytest.raises(ConfigError, match="at least one token"):
        score_items(model, [ScoreItem([1], [[]])])
    with pytest.raises(ConfigError, match="at least one token"):
        score_items(model, [ScoreItem([], [[1]])])
    with pytest.raises(ConfigError, match="the model takes 128"):
        score_items(model, [ScoreItem([5] * 128, [[1, 2]])])
