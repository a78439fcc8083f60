"""Drawn expert choices and the shape of the Pareto curve."""

from __future__ import annotations

import numpy as np

from moe_opt.devices import device_preset
from moe_opt.simulate.metro import (
    decode_pareto,
    draw_tokens_per_expert,
    gain_at_slo,
    pareto_front,
    zipf_popularity,
)
from moe_opt.simulate.models import MODELS, get_model, kv_heads


def test_tokens_choose_distinct_experts() -> None:
    rng = np.random.default_rng(0)
    counts = draw_tokens_per_expert(zipf_popularity(16, 1.0, rng), 50, 4, rng)
    assert counts.sum() == 200
    assert counts.max() <= 50


def test_pareto_of_table_ii() -> None:
    name = "qwen3-30b-a3b"
    common = {"hidden_size": MODELS[name]["hidden_size"], "kv_heads": kv_heads(name), "sampled_layers": 2}
    model, device = get_model(name), device_preset("B200")
    eplb = decode_pareto(model, device, 8, (256, 64), replication=1.5, method="eplb", **common)
    best = decode_pareto(model, device, 8, (256, 64), replication=1.5, method="optimal", **common)
    assert len(eplb) == 4 * 2
    assert all(b.busiest_experts <= e.busiest_experts for b, e in zip(best, eplb, strict=True))
    front = pareto_front(eplb)
    assert [p.tpot for p in front] == sorted(p.tpot for p in front)
    assert [p.throughput for p in front] == sorted(p.throughput for p in front)
    gains = gain_at_slo(best, eplb, [p.tpot for p in eplb])
    assert min(gains) >= 1.0
    assert np.isnan(gain_at_slo(best, eplb, [0.0])[0])
