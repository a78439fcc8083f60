"""MoE-Prefill's frontend (section 8.3): co-location and saturation against other schedulers, backend held
fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from common import log, store

from moe_opt.cluster.prefill import PrefillScheduler, saturation_from_transfers
from moe_opt.cluster.prefill_baselines import LoadOnlyScheduler, PrefixOnlyScheduler, ShortestPrefillScheduler
from moe_opt.devices import device_preset
from moe_opt.simulate import get_model
from moe_opt.simulate.prefill_only import PrefillEngines, simulate_prefill
from moe_opt.workloads import TraceRequest, backlog, load_trace, multi_selection_requests

MODEL, DEVICE = "qwen3-235b-a22b", "H200"


def _count_load(scheduler: type[PrefillScheduler], batch: int, block: int) -> PrefillScheduler:
    """Load in requests, as vLLM's default dispatch counts it; a worker closes at `batch` of them."""
    return scheduler(lambda suffix, cached: 1.0, float(batch), block)


def compare(section: str, trace: list[TraceRequest], block: int, count: int = 8) -> None:
    """Throughput of every scheduler on the same engines and cache."""
    model = get_model(MODEL)
    kv_room = 40e9 / model.kv_bytes_per_token  # tokens of KV cache per engine, 40 GB
    engines = PrefillEngines(count, model, device_preset(DEVICE), int(kv_room / block), block)
    transfers = [engines.layer_transfer()] * model.num_moe_layers
    # the compute of a batch runs at `efficiency` of the peak: so must the threshold that covers the transfers
    saturation = saturation_from_transfers(engines.flops_per_second * engines.efficiency, transfers)
    cost = model.prefill
    mean_cost = sum(cost(r.prompt_tokens, 0) for r in trace) / len(trace)
    per_batch = max(1, round(saturation / mean_cost))
    schedulers: dict[str, tuple[Callable[[], PrefillScheduler], int | None]] = {
        "least requests (vLLM's default)": (lambda: _count_load(LoadOnlyScheduler, per_batch, block), None),
        "least FLOPs, prefix-blind": (lambda: LoadOnlyScheduler(cost, saturation, block), None),
        "PrefillOnly, batch 1": (lambda: ShortestPrefillScheduler(cost, saturation, block), 1),
        "PrefillOnly, same batch": (lambda: ShortestPrefillScheduler(cost, saturation, block), None),
        "longest prefix, no saturation": (lambda: PrefixOnlyScheduler(cost, saturation, block), None),
        "MoE-Prefill": (lambda: PrefillScheduler(cost, saturation, block), None),
        "MoE-Prefill, threshold / 4": (lambda: PrefillScheduler(cost, saturation / 4, block), None),
        "MoE-Prefill, threshold x 4": (lambda: PrefillScheduler(cost, saturation * 4, block), None),
    }
    rows: dict[str, Any] = {}
    for label, (make, batch) in schedulers.items():
        rows[label] = simulate_prefill(trace, make(), engines, batch_requests=batch).summary()
        log(f"{section} {label}: {rows[label]['throughput']:,.0f} tokens/s, hits {rows[label]['hit_rate']:.1%}")
    store(section, {"rows": rows, "requests": len(trace), "saturation": saturation, "engines": count})


def mooncake() -> None:
    """Conversation prompts of the trace as a backlog; only the prompts matter."""
    trace = [replace(r, output_tokens=1) for r in load_trace("mooncake-conv", limit=1000)]
    compare("moe_prefill-mooncake", backlog(trace), 512)


def mooncake_open() -> None:
    """The same prompts at the trace's own arrival times on 16 engines: below saturation, so that a worker
    with the prefix is usually open."""
    trace = [replace(r, output_tokens=1) for r in load_trace("mooncake-conv", limit=1500)]
    compare("moe_prefill-mooncake-open", trace, 512, count=16)


def multi_selection() -> None:
    """Sibling requests with shared prefixes, a third of them over a prefix seen before."""
    trace = multi_selection_requests(100, rate=1000.0, block_tokens=64, suffix_tokens=(16, 96))
    compare("moe_prefill-multi-selection", backlog(trace), 64)


SECTIONS = {
    "moe_prefill-mooncake": mooncake,
    "moe_prefill-mooncake-open": mooncake_open,
    "moe_prefill-multi-selection": multi_selection,
}
