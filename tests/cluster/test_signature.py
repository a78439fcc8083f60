"""Expert signatures: rho, layers, weighting, transform, files."""

from __future__ import annotations

import io
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing import esft_prompts, planted
from scipy.stats import spearmanr

from moe_opt.cluster.expert_counts import count_experts, idf, split_sequences
from moe_opt.cluster.signature import SignatureModel
from moe_opt.cluster.signature_rho import PairGram, greedy_layers, ranks, sample_pairs, spearman
from moe_opt.errors import ConfigError


@pytest.fixture(scope="module")
def fitted():
    prefill, decode, domain = planted()
    return SignatureModel.fit(prefill, decode, 4), prefill, decode, domain


def cosine_distances(vectors: np.ndarray) -> np.ndarray:
    flat = vectors.reshape(len(vectors), -1).astype(float)
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    return (1 - flat @ flat.T)[np.triu_indices(len(flat), 1)]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=30))
def test_spearman_agrees_with_scipy_ties_included(pairs):
    x, y = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    got = spearman(x, ranks(y))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert got == 0.0
    else:
        assert got == pytest.approx(spearmanr(x, y)[0])


@given(st.integers(2, 60), st.integers(1, 400), st.integers(0, 1_000))
def test_sampled_pairs_are_distinct_and_ordered(count, limit, seed):
    first, second = sample_pairs(count, limit, np.random.default_rng(seed))
    assert len(first) == min(limit, count * (count - 1) // 2)
    assert len(set(zip(first.tolist(), second.tolist(), strict=True))) == len(first)
    assert (first >= 0).all()
    assert (first < second).all()
    assert (second < count).all()


def test_pair_numbers_hold_for_many_prompts():
    first, second = sample_pairs(200_000, 5_000, np.random.default_rng(0))
    assert ((first >= 0) & (first < second) & (second < 200_000)).all()


def test_greedy_layers_by_trying_everything():
    prefill, decode, _ = planted(30, 5, 8)
    first, second = np.triu_indices(30, 1)
    target = cosine_distances(decode)
    order = greedy_layers(PairGram.of(prefill.astype(float), first, second), ranks(target))
    chosen: list[int] = []
    for layer, rho in zip(order.order, order.rho, strict=True):
        scores = {
            other: spearmanr(cosine_distances(prefill[:, [*chosen, other]]), target)[0]
            for other in range(5)
            if other not in chosen
        }
        assert scores[int(layer)] == pytest.approx(max(scores.values()))
        assert rho == pytest.approx(scores[int(layer)])
        chosen.append(int(layer))
    layers, rho = order.best()
    assert rho == order.rho.max()
    assert sorted(layers) == sorted(chosen[: len(layers)])


def test_rho_is_what_the_paper_defines(fitted):
    model, prefill, decode, _ = fitted
    expected = spearmanr(cosine_distances(model.transform(prefill)), cosine_distances(decode))[0]
    assert model.rho == pytest.approx(expected, abs=1e-4)
    assert model.rho_of(model.transform(prefill), decode) == pytest.approx(expected, abs=1e-4)
    assert model.rho > 0.7


def test_transform_step_by_step(fitted):
    _, prefill, decode, _ = fitted
    model = SignatureModel.fit(prefill, decode, 4, weighting="count-idf", layers=(1, 4))
    weights = np.log((len(prefill) + 1) / ((prefill > 0).sum(0) + 1))
    vector = np.concatenate([prefill[7, layer] * weights[layer] for layer in (1, 4)])
    np.testing.assert_allclose(model.transform(prefill[7]), vector / np.linalg.norm(vector), rtol=1e-5)
    np.testing.assert_allclose(idf(prefill.astype(float)), weights)


def test_one_and_many_agree_and_are_unit_vectors(fitted):
    model, prefill, _, _ = fitted
    many = model.transform(prefill)
    assert many.shape == (120, len(model.layers) * 16)
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(model.transform(prefill[3]), many[3])
    assert model.centroids.shape == (4, many.shape[1])
    np.testing.assert_allclose(np.linalg.norm(model.centroids, axis=1), 1, rtol=1e-5)


def test_scaling_a_prompt_does_not_turn_its_signature(fitted):
    model, prefill, _, _ = fitted
    np.testing.assert_allclose(model.transform(prefill[0] * 7), model.transform(prefill[0]), atol=1e-6)


def test_what_the_weighting_zeroes_falls_back_to_raw_counts():
    prefill, decode, _ = planted(20, 2, 4, tokens=50_000)  # every expert fires everywhere: every IDF is 0
    model = SignatureModel.fit(prefill, decode, 2, weighting="count-idf", layers="all")
    assert (model.idf_weights == 0).all()
    raw = prefill[0].reshape(-1) / np.linalg.norm(prefill[0])
    np.testing.assert_allclose(model.transform(prefill[0]), raw, rtol=1e-5)
    assert model.transform(np.zeros((2, 4))).tolist() == [0.0] * 8
    assert SignatureModel.fit(prefill, decode, 2).weighting == "count"


def test_prompts_of_one_domain_share_a_centroid(fitted):
    model, prefill, _, domain = fitted
    nearest = model.similarity(model.transform(prefill)).argmax(axis=1)
    purity = sum(np.bincount(domain[nearest == k]).max() for k in np.unique(nearest)) / len(domain)
    assert purity > 0.9


def test_noise_layers_are_left_out():
    prefill, decode, _ = planted(90, 4, 12)
    noise = np.random.default_rng(1).poisson(20, size=(90, 3, 12))
    model = SignatureModel.fit(np.concatenate([noise, prefill], axis=1), np.concatenate([noise * 0, decode], 1), 3)
    assert min(model.layers) >= 3


def test_weighting_is_chosen_by_held_out_rho():
    prefill, decode, _ = planted(120, 4, 16, seed=2)
    assert SignatureModel.fit(prefill, decode, 4).weighting == "count"
    # Two experts that every prompt uses, in amounts that say nothing about decode: IDF takes them out.
    rng = np.random.default_rng(3)
    common = rng.integers(1, 2_000, size=(120, 4, 2))
    noisy = np.concatenate([prefill, common], axis=2)
    quiet = np.concatenate([decode, np.zeros((120, 4, 2))], axis=2)
    model = SignatureModel.fit(noisy, quiet, 4)
    assert model.weighting == "count-idf"
    assert model.cross_validated_rho["count-idf"] > model.cross_validated_rho["count"] + 0.1


def test_real_routing_wants_raw_counts(data_dir):
    """On ESFT's DeepSeek-V2-Lite routing IDF hurts: 0.78 against 0.69 over all layers."""
    prefill, decode, tasks = esft_prompts(data_dir)
    raw = SignatureModel.fit(prefill, decode, 4, weighting="count", layers="all")
    weighted = SignatureModel.fit(prefill, decode, 4, weighting="count-idf", layers="all")
    assert raw.rho == pytest.approx(0.784, abs=0.005)
    assert weighted.rho == pytest.approx(0.690, abs=0.005)
    model = SignatureModel.fit(prefill, decode, 4)
    assert model.weighting == "count"
    assert model.rho >= raw.rho
    nearest = model.similarity(model.transform(prefill)).argmax(axis=1)
    groups = [[t for t, n in zip(tasks, nearest, strict=True) if n == k] for k in range(4)]
    pure = sum(max(map(group.count, group)) for group in groups if group)
    assert pure > 0.9 * len(tasks)


def test_the_same_seed_gives_the_same_model(fitted):
    model, prefill, decode, _ = fitted
    again = SignatureModel.fit(prefill, decode, 4)
    np.testing.assert_array_equal(again.centroids, model.centroids)
    assert (again.layers, again.weighting, again.rho) == (model.layers, model.weighting, model.rho)


@pytest.mark.parametrize("weighting", ["count", "count-idf", "log-count", "binary"])
@pytest.mark.parametrize("clustering", ["balanced", "vanilla"])
def test_every_variant_of_the_ablation_fits(fitted, weighting, clustering):
    _, prefill, decode, _ = fitted
    model = SignatureModel.fit(prefill, decode, 5, weighting=weighting, clustering=clustering, layers="all")
    assert model.centroids.shape[0] == 5
    assert model.layers == tuple(range(6))
    assert model.cross_validated_rho == {}


@pytest.mark.parametrize("workers", [1, 3])
def test_the_fewest_prompts_that_will_do(workers):
    prefill, decode, _ = planted(3, 2, 4)
    model = SignatureModel.fit(prefill, decode, workers)
    assert model.centroids.shape[0] == workers


def test_decode_that_is_the_same_for_all_gives_rho_0():
    prefill, decode, _ = planted(12, 2, 4)
    model = SignatureModel.fit(prefill, np.ones_like(decode), 2)
    assert (model.rho, model.layers) == (0.0, (0, 1))


def test_inputs_are_left_alone(fitted):
    _, prefill, decode, _ = fitted
    before = prefill.copy(), decode.copy()
    SignatureModel.fit(prefill, decode, 4).transform(prefill)
    np.testing.assert_array_equal(prefill, before[0])
    np.testing.assert_array_equal(decode, before[1])


def test_save_and_load(fitted, tmp_path):
    model, prefill, _, _ = fitted
    path = tmp_path / "model.signatures"
    model.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.signatures"]
    loaded = SignatureModel.load(path)
    np.testing.assert_array_equal(loaded.transform(prefill), model.transform(prefill))
    np.testing.assert_array_equal(loaded.centroids, model.centroids)
    assert (loaded.layers, loaded.rho, loaded.weighting) == (model.layers, model.rho, model.weighting)
    assert loaded.cross_validated_rho == model.cross_validated_rho
    assert loaded.similarity_mean == model.similarity_mean


class Explosive:
    def __reduce__(self):
        return (pytest.fail, ("code from a model file was run",))


def test_a_file_with_a_pickle_is_refused(tmp_path):
    path = tmp_path / "evil.npz"
    np.savez(path, meta=np.array([Explosive()], dtype=object))
    with pytest.raises(ConfigError, match="not a signature model"):
        SignatureModel.load(path)
    path.write_bytes(pickle.dumps(Explosive()))
    with pytest.raises(ConfigError, match="not a signature model"):
        SignatureModel.load(path)


def test_damaged_files_are_refused(fitted, tmp_path):
    model, _, _, _ = fitted
    path = tmp_path / "model.npz"
    model.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError):
        SignatureModel.load(path)
    with pytest.raises(FileNotFoundError):
        SignatureModel.load(tmp_path / "absent.npz")
    with np.load(io.BytesIO(whole)) as file:
        arrays = {name: file[name] for name in file.files}
    for name, wrong in {
        "centroids": arrays["centroids"][:, :-1],
        "layers": arrays["layers"] + 99,
        "shares": arrays["shares"][:-1],
        "idf_weights": -arrays["idf_weights"] - 1,
    }.items():
        np.savez(path, **{**arrays, name: wrong})
        with pytest.raises(ConfigError):
            SignatureModel.load(path)
    assert zipfile.is_zipfile(io.BytesIO(whole))


def broken(value: float) -> np.ndarray:
    counts = np.ones((8, 2, 4))
    counts[3, 1, 2] = value
    return counts


@pytest.mark.parametrize(
    ("prefill", "decode", "workers", "message"),
    [
        (np.ones((8, 4)), np.ones((8, 4)), 2, "shape"),
        (np.ones((8, 2, 4)), np.ones((8, 2, 5)), 2, "another model"),
        (np.ones((8, 2, 4)), np.ones((7, 2, 4)), 2, "8 prompts"),
        (broken(-1), np.ones((8, 2, 4)), 2, "negative"),
        (broken(np.nan), np.ones((8, 2, 4)), 2, "NaN"),
        (np.ones((8, 2, 4)), broken(np.inf), 2, "infinity"),
        (np.ones((8, 2, 4)), np.ones((8, 2, 4)), 9, "too few"),
        (np.ones((2, 2, 4)), np.ones((2, 2, 4)), 1, "too few"),
        (np.ones((8, 2, 4)), np.ones((8, 2, 4)), 0, "num_workers"),
        (np.ones((8, 2, 4)), np.ones((8, 2, 4)), 1.5, "num_workers"),
        (np.ones((0, 2, 4)), np.ones((0, 2, 4)), 1, "empty"),
        (np.full((8, 2, 4), "x"), np.ones((8, 2, 4)), 1, "numbers"),
        (np.ones((8, 2, 4)) * 1j, np.ones((8, 2, 4)), 1, "real"),
    ],
)
def test_fit_refuses(prefill, decode, workers, message):
    with pytest.raises(ConfigError, match=message):
        SignatureModel.fit(prefill, decode, workers)


def test_fit_refuses_unknown_options_and_transform_other_models(fitted):
    model, prefill, decode, _ = fitted
    for options in (
        {"weighting": "tf"},
        {"layers": "some"},
        {"layers": (0, 6)},
        {"layers": ()},
        {"clustering": "x"},
    ):
        with pytest.raises(ConfigError):
            SignatureModel.fit(prefill, decode, 4, **options)
    for wrong in (np.ones((6, 15)), np.ones(6), -np.ones((6, 16)), np.full((6, 16), np.nan)):
        with pytest.raises(ConfigError):
            model.transform(wrong)
    with pytest.raises(ConfigError, match="signatures"):
        model.rho_of(model.transform(prefill[:5]), decode)


@given(st.lists(st.lists(st.integers(-1, 4), min_size=6, max_size=6), max_size=12))
@settings(max_examples=50)
def test_count_experts_by_counting(tokens):
    experts = np.array(tokens, dtype=np.int64).reshape(len(tokens), 3, 2)
    counts = count_experts(experts, 5)
    for layer in range(3):
        for expert in range(5):
            assert counts[layer, expert] == (experts[:, layer] == expert).sum()


def test_split_sequences_by_hand():
    experts = np.array([[[0]], [[1]], [[1]], [[2]], [[2]], [[0]]])
    prefill, decode = split_sequences(experts, [7, 7, 7, 3, 3, 9], 3)
    assert prefill[:, 0].tolist() == [[0, 0, 1], [1, 0, 0]]  # sequences 3 and 7; 9 has no decode
    assert decode[:, 0].tolist() == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    for arguments in ((experts, [1, 2], 3), (experts, range(6), 3), (experts, [7] * 6, 3, 1.0), (experts, [7] * 6, 2)):
        with pytest.raises(ConfigError):
            split_sequences(*arguments)


def test_count_experts_refuses():
    for experts, number in (
        (np.zeros((2, 2)), 4),
        (np.full((1, 1, 1), 4), 4),
        (np.full((1, 1, 1), -2), 4),
        (np.zeros((1, 1, 1)), 4),
    ):
        with pytest.raises(ConfigError, match="experts"):
            count_experts(experts, number)
