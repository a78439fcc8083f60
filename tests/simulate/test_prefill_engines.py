"""Prefill tier, prefill-only engines and measured profiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe_opt.cluster import make_policy
from moe_opt.cluster.prefill import PrefillScheduler
from moe_opt.cluster.prefill_baselines import LoadOnlyScheduler, ShortestPrefillScheduler
from moe_opt.devices import device_preset
from moe_opt.errors import ConfigError
from moe_opt.simulate import FleetConfig, StepCost, get_model
from moe_opt.simulate.prefill_only import PrefillEngines, simulate_prefill
from moe_opt.simulate.prefill_tier import BlockCache, PrefillTier, simulate_pd
from moe_opt.simulate.profiles import load_esft_profiles, split_by_sequence
from moe_opt.workloads import TraceRequest, backlog, multi_selection_requests
from moe_opt.workloads.files import data_dir

MODEL = get_model("qwen3-30b-a3b")
H100 = device_preset("H100")


def test_block_cache_forgets_the_least_recently_used() -> None:
    cache = BlockCache(3)
    assert cache.store([1, 2]) == []
    assert cache.store([3]) == []
    assert cache.match([1, 2, 4]) == 2
    cache.store([1])
    assert cache.store([5]) == [2]
    assert cache.match([2]) == 0
    assert BlockCache(0).store([7]) == [7]


def test_prefill_tier_queues_at_the_first_free_worker() -> None:
    tier = PrefillTier(2, MODEL, H100, overhead=0.0)
    one = MODEL.prefill(1000) / (H100.flops() * tier.efficiency)
    trace = [TraceRequest(f"r{i}", 0.0, 1000, 1) for i in range(3)]
    assert tier.ready(trace) == pytest.approx([one, one, 2 * one])


def test_prefix_caching_shortens_prefill() -> None:
    tier = PrefillTier(1, MODEL, H100, overhead=0.0, cache_blocks=10, block_tokens=100)
    trace = [TraceRequest(f"r{i}", 0.0, 1000, 1, tuple(range(10))) for i in range(2)]
    first, second = np.diff([0.0, *tier.ready(trace)])
    assert second == pytest.approx(MODEL.prefill(1, 999) / MODEL.prefill(1000) * first)


def test_ttft_counts_from_the_arrival_and_rows_stay_in_place() -> None:
    # the long prompt arrives first and is prefilled last
    trace = [TraceRequest("long", 0.0, 50_000, 2), TraceRequest("short", 0.001, 100, 3)]
    tier = PrefillTier(2, MODEL, H100)
    result = simulate_pd(trace, tier, make_policy("jsq"), FleetConfig.uniform(1, 4), StepCost(fixed=0.01))
    ready = tier.ready(trace)
    assert ready[0] > ready[1]
    assert result.tokens.tolist() == [2, 3]
    assert (result.ttft > np.array(ready) - [0.0, 0.001]).all()
    assert result.arrival.tolist() == [0.0, 0.001]


def _engines(count: int = 4, cache_blocks: int = 100_000) -> PrefillEngines:
    return PrefillEngines(count, MODEL, H100, cache_blocks, block_tokens=16)


def _siblings() -> list[TraceRequest]:
    return backlog(multi_selection_requests(25, rate=1000.0, seed=2, prefix_tokens=(512, 4096)))


@pytest.mark.parametrize("scheduler", [PrefillScheduler, LoadOnlyScheduler, ShortestPrefillScheduler])
@pytest.mark.parametrize("batch", [None, 1])
def test_every_prompt_is_prefilled_once(scheduler, batch) -> None:
    trace = _siblings()
    result = simulate_prefill(trace, scheduler(MODEL.prefill, 1e15), _engines(), batch_requests=batch)
    assert not np.isnan(result.finished).any()
    assert (result.cached_tokens < result.prompt_tokens).all()
    assert (result.worker >= 0).all()
    if batch == 1:
        assert result.batches == len(trace)


def test_co_location_computes_each_prefix_once() -> None:
    trace = _siblings()
    ours = simulate_prefill(trace, PrefillScheduler(MODEL.prefill, 2e15), _engines()).summary()
    blind = simulate_prefill(trace, LoadOnlyScheduler(MODEL.prefill, 2e15), _engines()).summary()
    assert ours["hit_rate"] > blind["hit_rate"]
    assert ours["flops"] < blind["flops"]
    assert ours["throughput"] > blind["throughput"]


def test_flops_are_those_of_the_engines_own_cache() -> None:
    # without a cache nothing carries over between batches
    trace = [TraceRequest(f"r{i}", 0.0, 64, 1, (1, 2, 3, 4)) for i in range(2)]
    scheduler = PrefillScheduler(MODEL.prefill, 1e18)
    result = simulate_prefill(trace, scheduler, _engines(1, cache_blocks=0), batch_requests=1)
    assert result.flops == pytest.approx(2 * MODEL.prefill(64))
    together = simulate_prefill(trace, PrefillScheduler(MODEL.prefill, 1e18), _engines(1, cache_blocks=0))
    assert together.flops == pytest.approx(MODEL.prefill(64) + MODEL.prefill(1, 63))


def test_a_small_batch_waits_for_its_transfers() -> None:
    trace = [TraceRequest("a", 0.0, 16, 1)]
    engines = _engines(4)
    result = simulate_prefill(trace, PrefillScheduler(MODEL.prefill, 1e15), engines)
    assert result.finished[0] == pytest.approx(engines.launch + 48 * engines.layer_transfer())
    assert result.summary()["exposed_transfer"] > 0.9


needs_data = pytest.mark.skipif(not (data_dir() / "routing").is_dir(), reason="shared data are not present")


@needs_data
def test_profiles_are_counts_of_the_published_choices() -> None:
    profiles = load_esft_profiles(prompt_tokens=32, decode_tokens=24)
    assert (profiles.prefill_counts.sum(axis=2) == 32 * 6).all()
    assert (profiles.cached_counts <= profiles.prefill_counts).all()
    assert np.allclose(profiles.decode_probs.sum(axis=2), 6)
    assert set(profiles.domains) == {"intent", "law", "summary", "translation"}
    fit, held = split_by_sequence(profiles)
    assert not set(fit.sequences.tolist()) & set(held.sequences.tolist())
    assert len(fit) + len(held) == len(profiles)
    assert set(fit.domains) == set(held.domains)


def test_missing_profiles_say_where_they_should_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MOE_OPT_DATA"):
        load_esft_profiles(tmp_path / "nothing.npz")
