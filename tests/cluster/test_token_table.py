"""Token-table signatures: expected expert counts from token ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_opt.cluster.expert_counts import count_experts
from moe_opt.cluster.signature import SignatureModel
from moe_opt.cluster.token_table import TokenTable
from moe_opt.errors import ConfigError

LAYERS, EXPERTS, TOP_K, VOCABULARY = 4, 12, 2, 60


@pytest.fixture(scope="module")
def corpus():
    """Prompts of four kinds with vocabularies of their own; experts mostly follow the token.

    Returns:
        token ids and experts [T, L, k] of prefill per prompt, decode probabilities [N, L, E].
    """
    rng = np.random.default_rng(0)
    home = rng.integers(0, EXPERTS, size=(VOCABULARY, LAYERS, TOP_K))
    kind_words = rng.dirichlet(np.full(VOCABULARY, 0.15), size=4)

    def route(ids):
        experts = home[ids]
        astray = rng.random(experts.shape) < 0.2
        return np.where(astray, rng.integers(0, EXPERTS, size=experts.shape), experts)

    prompts, routed, decode = [], [], []
    for number in range(100):
        words = rng.dirichlet(20 * kind_words[number % 4] + 0.02)
        ids = rng.choice(VOCABULARY, size=int(rng.integers(40, 120)), p=words)
        prompts.append(ids)
        routed.append(route(ids))
        decode.append(count_experts(route(rng.choice(VOCABULARY, size=200, p=words)), EXPERTS) / 200)
    return prompts, routed, np.stack(decode)


@pytest.fixture(scope="module")
def prefill(corpus):
    return np.stack([count_experts(experts, EXPERTS) for experts in corpus[1]])


def relative_error(expected, actual) -> float:
    return float(np.linalg.norm(expected - actual) / np.linalg.norm(actual))


def tables(corpus, prefill, rank: int = 48) -> dict[str, TokenTable]:
    prompts, routed, _ = corpus
    return {
        "routing": TokenTable.fit_routing(
            np.concatenate(prompts[:70]), np.concatenate(routed[:70]), EXPERTS, rank=rank
        ),
        "counts": TokenTable.fit_counts(prompts[:70], prefill[:70], rank=rank),
    }


@pytest.mark.parametrize("source", ["routing", "counts"])
def test_predicts_held_out_prompts_better_than_the_average_token(corpus, prefill, source):
    table = tables(corpus, prefill)[source]
    average = table.mean.reshape(LAYERS, EXPERTS)
    held_out = list(zip(corpus[0][70:], prefill[70:], strict=True))
    ours = np.mean([relative_error(table.expected_counts(ids), counts) for ids, counts in held_out])
    naive = np.mean([relative_error(len(ids) * average, counts) for ids, counts in held_out])
    assert ours < 0.5 * naive


@pytest.mark.parametrize("source", ["routing", "counts"])
def test_its_signatures_rank_held_out_prompts_almost_like_exact_ones(corpus, prefill, source):
    prompts, _, decode = corpus
    table = tables(corpus, prefill)[source]
    model = SignatureModel.fit(prefill[:70], decode[:70], 4).with_token_table(table)
    exact = model.rho_of(model.transform(prefill[70:]), decode[70:])
    estimated = model.rho_of(np.stack([model.transform_tokens(ids) for ids in prompts[70:]]), decode[70:])
    assert exact > 0.8
    assert estimated > exact - 0.08


def test_full_rank_is_each_tokens_average(corpus):
    ids, experts = np.concatenate(corpus[0]), np.concatenate(corpus[1])
    table = TokenTable.fit_routing(ids, experts, EXPERTS, rank=1_000)
    for token in np.unique(ids)[:10]:
        average = count_experts(experts[ids == token], EXPERTS) / (ids == token).sum()
        np.testing.assert_allclose(table.expected_counts([token]), average, atol=0.05)  # int8 rounding


def test_lower_rank_is_smaller_and_not_better(corpus, prefill):
    low, high = tables(corpus, prefill, 2)["routing"], tables(corpus, prefill, 48)["routing"]
    assert low.rank == 2
    assert low.nbytes < high.nbytes
    errors = [
        np.mean([relative_error(t.expected_counts(i), c) for i, c in zip(corpus[0], prefill, strict=True)])
        for t in (low, high)
    ]
    assert errors[0] > errors[1]


def test_unseen_tokens_count_as_the_average_of_their_prompt(corpus):
    table = TokenTable.fit_routing(np.concatenate(corpus[0]), np.concatenate(corpus[1]), EXPERTS)
    average = table.mean.reshape(LAYERS, EXPERTS)
    np.testing.assert_allclose(table.expected_counts([VOCABULARY + 5] * 3), 3 * average, rtol=1e-5)
    seen = corpus[0][0][:1]
    mixed = table.expected_counts([*seen, VOCABULARY + 5])
    np.testing.assert_allclose(mixed, 2 * table.expected_counts(seen), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(average.sum(axis=1), TOP_K, rtol=1e-5)
    assert table.expected_counts([]).tolist() == np.zeros((LAYERS, EXPERTS)).tolist()


@given(st.lists(st.integers(0, VOCABULARY + 10), max_size=50))
def test_counts_add_up_and_are_never_negative(ids):
    rng = np.random.default_rng(0)
    table = TokenTable.fit_routing(
        np.arange(VOCABULARY).repeat(5),
        rng.integers(0, EXPERTS, size=(5 * VOCABULARY, LAYERS, TOP_K)),
        EXPERTS,
        rank=8,
    )
    expected = table.expected_counts(np.array(ids, dtype=np.int64))
    assert expected.shape == (LAYERS, EXPERTS)
    assert expected.min() >= 0
    assert expected.sum() >= 0.8 * LAYERS * TOP_K * len(ids)


def test_one_token_and_uniform_routing_need_no_rank():
    table = TokenTable.fit_routing([3, 3], np.zeros((2, 1, 1), dtype=int), 2)
    assert table.rank == 0
    assert table.expected_counts([3]).tolist() == [[1.0, 0.0]]
    flat = TokenTable.fit_counts([[0, 1], [1, 0]], np.ones((2, 1, 2)))
    np.testing.assert_allclose(flat.expected_counts([0, 1]), [[1.0, 1.0]], atol=1e-6)


def test_is_saved_with_its_model(corpus, prefill, tmp_path):
    table = tables(corpus, prefill)["counts"]
    model = SignatureModel.fit(prefill, corpus[2], 3).with_token_table(table)
    model.save(tmp_path / "m.npz")
    loaded = SignatureModel.load(tmp_path / "m.npz")
    for ids in corpus[0][:5]:
        np.testing.assert_array_equal(loaded.transform_tokens(ids), model.transform_tokens(ids))
    assert model.with_token_table(None).token_table is None


def test_same_seed_same_table(corpus, prefill):
    first, second = (tables(corpus, prefill)["routing"] for _ in range(2))
    np.testing.assert_array_equal(first.codes, second.codes)
    np.testing.assert_array_equal(first.basis, second.basis)


@pytest.mark.parametrize(
    "call",
    [
        lambda: TokenTable.fit_routing([], np.zeros((0, 1, 1), dtype=int), 2),
        lambda: TokenTable.fit_routing([1, 2], np.zeros((1, 1, 1), dtype=int), 2),
        lambda: TokenTable.fit_routing([1], np.zeros((1, 1, 1)), 2),
        lambda: TokenTable.fit_routing([1], np.full((1, 1, 1), 2), 2),
        lambda: TokenTable.fit_routing([-1], np.zeros((1, 1, 1), dtype=int), 2),
        lambda: TokenTable.fit_routing([0.5], np.zeros((1, 1, 1), dtype=int), 2),
        lambda: TokenTable.fit_counts([[1]], np.ones((1, 1, 2))),
        lambda: TokenTable.fit_counts([[1], []], np.ones((2, 1, 2))),
        lambda: TokenTable.fit_counts([[1], [2]], np.ones((3, 1, 2))),
        lambda: TokenTable.fit_counts([[1], [2]], -np.ones((2, 1, 2))),
    ],
)
def test_refuses(call):
    with pytest.raises(ConfigError):
        call()


def test_a_table_of_another_model_is_refused(prefill, corpus):
    model = SignatureModel.fit(prefill, corpus[2], 3)
    with pytest.raises(ConfigError, match="no token table"):
        model.transform_tokens([1])
    with pytest.raises(ConfigError, match="layers"):
        model.with_token_table(TokenTable.fit_routing([1], np.zeros((1, 1, 1), dtype=int), 2))
