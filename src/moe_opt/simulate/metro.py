"""Replica choice seen from the fleet: how many experts does the busiest rank read per step, and what does
that buy?

METRO section III: in the memory-bound regime a step lasts as long as its busiest rank needs to read its
activated experts. `decode_pareto` prices the configurations of Table II with the very replica choice that
a forward pass makes (`moe_opt.cluster.replicas`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_opt.cluster.placement import place_by_load
from moe_opt.cluster.replicas import ReplicaTable
from moe_opt.devices import Device
from moe_opt.errors import ConfigError
from moe_opt.flops import FlopsModel


def zipf_popularity(num_experts: int, exponent: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Choice weights that fall as rank^-exponent, experts in random order; 0 is even."""
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    return rng.permutation(weights / weights.sum())


def draw_tokens_per_expert(
    popularity: NDArray[np.float64], tokens: int, top_k: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """[E] tokens per expert when each token draws `top_k` distinct experts (Gumbel top-k on the
    log-weights)."""
    scores = np.log(popularity)[None, :] + rng.gumbel(size=(tokens, len(popularity)))
    chosen = np.argpartition(scores, -top_k, axis=1)[:, -top_k:]
    return np.bincount(chosen.ravel(), minlength=len(popularity))


@dataclass(frozen=True, slots=True)
class Collectives:
    """Latencies in seconds of collectives at decode sizes, beside the bytes they move (METRO section
    IV-C)."""

    all_reduce: float = 8e-6  # per attention and per MoE block under tensor parallelism
    exchange: float = 20e-6  # dispatch or combine under expert parallelism
    metro: float = 26e-6  # Algorithm 1 per layer: the paper's highest figure, measured on an A100


class ParetoPoint(NamedTuple):
    """One configuration of Table II under one replica choice."""

    method: str
    replication: float
    batch: int  # requests in flight over all devices
    tensor_parallel: int
    expert_parallel: int
    tpot: float  # seconds per output token
    throughput: float  # output tokens per second over all devices
    busiest_experts: float  # mean over layers


def decode_step_seconds(
    model: FlopsModel,
    device: Device,
    busiest_experts: float,
    *,
    batch: int,
    context: int,
    tensor_parallel: int,
    expert_parallel: int,
    metro: bool,
    hidden_size: int,
    kv_heads: int,
    efficiency: float = 0.8,
    collectives: Collectives | None = None,
    overhead: float = 1e-3,
) -> float:
    """A decode step of `batch` requests on tensor_parallel x expert_parallel devices.

    Attention is data-parallel over the expert ranks and split tensor_parallel ways within each; so is every
    expert."""
    cost = collectives or Collectives()
    rate = device.memory_bandwidth * efficiency * tensor_parallel
    peak = device.flops("fp8" if model.weight_bytes <= 1 else "bfloat16") * efficiency * tensor_parallel
    rows = -(-batch // expert_parallel)
    layers = model.num_moe_layers
    split = min(tensor_parallel, kv_heads) / tensor_parallel  # how far tensor parallelism divides the KV cache
    reads = model.resident_bytes + rows * model.kv_bytes(context) / split
    reads += layers * busiest_experts * model.expert_bytes
    compute = rows * model.decode(context) / peak
    activations = rows * hidden_size * 2.0 / device.interconnect_bandwidth  # bf16 rows of one rank, once over a link
    talk = 0.0
    if tensor_parallel > 1:
        ring = 2.0 * (tensor_parallel - 1) / tensor_parallel
        talk += 2 * model.num_layers * (cost.all_reduce + ring * activations)
    if expert_parallel > 1:
        talk += 2 * layers * (cost.exchange + min(model.top_k, expert_parallel - 1) * activations)
        talk += layers * cost.metro if metro else 0.0
    return overhead + max(reads / rate, compute) + talk


def decode_pareto(
    model: FlopsModel,
    device: Device,
    num_devices: int,
    batches: Sequence[int],
    *,
    replication: float,
    method: str,
    hidden_size: int,
    kv_heads: int,
    exponent: float = 0.6,
    context: int = 2048,
    sampled_layers: int = 6,
    seed: int = 0,
    collectives: Collectives | None = None,
) -> list[ParetoPoint]:
    """Every configuration of Table II: batch sizes x (TP, EP) with TP * EP = `num_devices`.

    Expert choices are Zipf with `exponent`, drawn anew for each of `sampled_layers` layers; placement knows
    the popularity but not the batch. METRO's own cost is charged where it runs."""
    if replication < 1:
        raise ConfigError(f"replication must be at least 1, not {replication}")
    points: list[ParetoPoint] = []
    degree = 1
    while degree <= num_devices:
        ep, tp = degree, num_devices // degree
        for batch in batches:
            rng = np.random.default_rng([seed, batch, ep])
            busiest = []
            for _ in range(sampled_layers):
                popularity = zipf_popularity(model.num_experts, exponent, rng)
                slots = -(-round(model.num_experts * replication) // ep)
                hosts = place_by_load(popularity, ep, max(slots, -(-model.num_experts // ep)))
                tokens = draw_tokens_per_expert(popularity, batch, model.top_k, rng)
                busiest.append(ReplicaTable(hosts).busiest(tokens, method))
            mean = float(np.mean(busiest))
            seconds = decode_step_seconds(
                model,
                device,
                mean,
                batch=batch,
                context=context,
                tensor_parallel=tp,
                expert_parallel=ep,
                metro=method in ("metro", "greedy") and replication > 1,
                hidden_size=hidden_size,
                kv_heads=kv_heads,
                collectives=collectives,
            )
            points.append(ParetoPoint(method, replication, batch, tp, ep, seconds, batch / seconds, mean))
        degree *= 2
    return points


def pareto_front(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Points that no other beats in both TPOT and throughput, by rising TPOT."""
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda p: (p.tpot, -p.throughput)):
        if not front or point.throughput > front[-1].throughput:
            front.append(point)
    return front


def best_throughput(points: Sequence[ParetoPoint], slo: float) -> float:
    """Highest throughput (tokens/s) of a configuration within `slo` seconds per token; 0 if there is none."""
    return max((p.throughput for p in points if p.tpot <= slo), default=0.0)


def gain_at_slo(ours: Sequence[ParetoPoint], theirs: Sequence[ParetoPoint], slos: Sequence[float]) -> list[float]:
    """Throughput ratio ours / theirs at each objective that both can meet; nan elsewhere."""
    gains = []
    for slo in slos:
        a, b = best_throughput(ours, slo), best_throughput(theirs, slo)
        gains.append(a / b if a > 0 and b > 0 else float("nan"))
    return gains
