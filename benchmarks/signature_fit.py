"""Expert signatures: fit time, rho on real routing, the token table beside exact counts, time of a decision.

    python benchmarks/signature_fit.py                     # about a minute on one core
    MOE_OPT_DATA=/path/to/data python benchmarks/signature_fit.py --repeats 5

Without the data folder only the timings are measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result

from moe_opt.cluster import Request, RunningRequest, Worker
from moe_opt.cluster.expert_counts import count_experts, split_sequences
from moe_opt.cluster.policies.locality import EldrPolicy
from moe_opt.cluster.signature import SignatureModel
from moe_opt.cluster.token_table import TokenTable

ESFT_TASKS = ("intent", "law", "summary", "translation")
OLMOE_DOMAINS = ("arxiv", "github", "wikipedia")


def planted_prompts(prompts: int, layers: int, experts: int, domains: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Prefill counts and decode probabilities [N, L, E] of prompts with a domain's taste and one of their own."""
    rng = np.random.default_rng(0)
    taste = rng.gamma(0.3, size=(domains, layers, experts))[rng.integers(0, domains, prompts)]
    probs = taste * rng.gamma(3.0, size=(prompts, layers, experts))
    probs /= probs.sum(axis=-1, keepdims=True)
    return rng.poisson(probs * 1_600), rng.poisson(probs * 800) / 100


def measure_fit(repeats: int) -> dict[str, Any]:
    prefill, decode = planted_prompts(1_000, 48, 128)
    cpu, wall = [], []
    for _ in range(repeats):
        started, ticking = time.perf_counter(), time.process_time()
        model = SignatureModel.fit(prefill, decode, 16)
        cpu.append(time.process_time() - ticking)
        wall.append(time.perf_counter() - started)
    return {
        "prompts": 1_000,
        "layers": 48,
        "experts": 128,
        "workers": 16,
        "cpu_seconds": round(statistics.median(cpu), 2),
        "wall_seconds": round(statistics.median(wall), 2),
        "repeats": repeats,
        "layers_kept": len(model.layers),
    }


def measure_decision(repeats: int) -> list[dict[str, Any]]:
    """CPU microseconds a request of `EldrPolicy.assign` with full 48 x 128 signatures."""
    prefill, decode = planted_prompts(256, 48, 128)
    rng = np.random.default_rng(0)
    rows = []
    for workers in (8, 16, 24):
        model = SignatureModel.fit(prefill, decode, workers, weighting="count", layers="all")
        signatures = model.transform(prefill)
        loads = rng.integers(0, 12, workers)
        fleet = [
            Worker(k, 64, {f"old{k}-{j}": RunningRequest(500) for j in range(load)}) for k, load in enumerate(loads)
        ]
        for batch in (1, 8, 64):
            waiting = [Request(f"r{i}", 500, signature=signatures[i]) for i in range(batch)]
            policy = EldrPolicy(model)
            seconds = []
            for _ in range(max(20, repeats * 400 // batch)):
                ticking = time.process_time()
                policy.assign(waiting, fleet, 0.0)
                seconds.append(time.process_time() - ticking)
            each = np.array(seconds) / batch * 1e6
            rows.append(
                {
                    "workers": workers,
                    "waiting": batch,
                    "p50_us": round(float(np.median(each)), 1),
                    "p99_us": round(float(np.percentile(each, 99)), 1),
                }
            )
    return rows


def esft_prompts(data: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First half of each published sequence as prefill, the rest as decode: [161, 26, 64] twice, and the task."""
    arrays = np.load(data / "routing" / "esft_dsv2lite_token_routing.npz")
    parts = [split_sequences(arrays[f"{task}_ids"], arrays[f"{task}_seq"], 64) for task in ESFT_TASKS]
    tasks = np.repeat(np.arange(len(parts)), [len(counts) for counts, _ in parts])
    return np.concatenate([p for p, _ in parts]), np.concatenate([d for _, d in parts]), tasks


def active_experts(decode: np.ndarray, groups: np.ndarray, batch: int = 8, draws: int = 400) -> float:
    """Expected distinct experts per layer of a decode step whose batch comes from one of the groups.

    sum over experts of 1 - prod over the batch's requests of (1 - p), p from `decode` [N, L, E].
    """
    rng = np.random.default_rng(0)
    idle = 1.0 - np.clip(decode, 0.0, 1.0)
    total = 0.0
    for _ in range(draws):
        group = np.flatnonzero(groups == groups[rng.integers(len(groups))])
        members = rng.choice(group, batch, replace=len(group) < batch)
        total += float((1.0 - idle[members].prod(axis=0)).sum(axis=-1).mean())
    return total / draws


def measure_esft(data: Path) -> dict[str, Any]:
    prefill, decode, tasks = esft_prompts(data)
    rows = []
    for weighting in ("count", "count-idf", "log-count", "binary"):
        for layers in ("all", "greedy"):
            model = SignatureModel.fit(prefill, decode, 4, weighting=weighting, layers=layers)
            rows.append(
                {
                    "weighting": weighting,
                    "layers": layers,
                    "kept": len(model.layers),
                    "rho": round(model.rho, 4),
                }
            )
    model = SignatureModel.fit(prefill, decode, 4)
    # Held out: fitted on one half of the prompts, measured on the other.
    order = np.random.default_rng(0).permutation(len(prefill))
    train, test = order[::2], order[1::2]
    half = SignatureModel.fit(prefill[train], decode[train], 4)
    clusters = {}
    for kind in ("balanced", "vanilla"):
        fitted = SignatureModel.fit(prefill, decode, 4, clustering=kind)
        nearest = fitted.similarity(fitted.transform(prefill)).argmax(axis=1)
        clusters[kind] = {
            "nearest_share": [round(float(share), 3) for share in fitted.shares],
            "active_experts": round(active_experts(decode, nearest), 2),
        }
    return {
        "prompts": len(prefill),
        "chosen": model.weighting,
        "cross_validated_rho": {name: round(rho, 4) for name, rho in model.cross_validated_rho.items()},
        "rho": round(model.rho, 4),
        "layers_kept": list(model.layers),
        "held_out_rho": round(half.rho_of(half.transform(prefill[test]), decode[test]), 4),
        "rows": rows,
        "clusters": clusters,
        "active_experts_mixed": round(active_experts(decode, np.zeros(len(decode), dtype=int)), 2),
        "active_experts_by_task": round(active_experts(decode, tasks), 2),
    }


def olmoe_prompts(
    data: Path, prompts: int = 300, tokens: int = 200, topic_words: int = 300
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Prompts resampled from OLMoE's published (token, expert, count) rows, three layers, 64 experts, top-8.

    A prompt draws a domain, a topic of `topic_words` of its tokens, then tokens; each token's experts follow the
    published frequencies of that token in that domain. Context beyond the domain is not in the data.

    Returns:
        token ids [T] and experts [T, 3, 8] of each prompt's prefill, decode probabilities [N, 3, 64].
    """
    arrays = np.load(data / "routing" / "olmoe_token_expert_counts.npz")
    rng = np.random.default_rng(0)
    tables, vocabularies = [], []
    for domain in OLMOE_DOMAINS:
        layers = [arrays[f"olmoe_{domain}_L{slot}"] for slot in range(3)]
        size = max(int(rows[:, 0].max()) for rows in layers) + 1
        table = np.zeros((size, 3, 64))
        for slot, rows in enumerate(layers):
            np.add.at(table[:, slot], (rows[:, 0], rows[:, 1]), rows[:, 2])
        tables.append(table)
        vocabularies.append(np.flatnonzero((table.sum(axis=-1) > 0).all(axis=1)))

    def route(domain: int, ids: np.ndarray) -> np.ndarray:
        weights = tables[domain][ids] + 1e-3
        return np.argsort(-(np.log(weights) + rng.gumbel(size=weights.shape)), axis=-1)[..., :8]

    ids, routed, decode = [], [], []
    for number in range(prompts):
        domain = number % 3
        topic = rng.choice(vocabularies[domain], topic_words, replace=False)
        seen = tables[domain][topic].sum(axis=(1, 2))
        chances = seen * rng.gamma(0.5, size=topic_words)
        words = rng.choice(topic, 2 * tokens, p=chances / chances.sum())
        ids.append(words[:tokens])
        routed.append(route(domain, words[:tokens]))
        decode.append(count_experts(route(domain, words[tokens:]), 64) / tokens)
    return ids, routed, np.stack(decode)


def measure_token_table(data: Path) -> dict[str, Any]:
    ids, routed, decode = olmoe_prompts(data)
    prefill = np.stack([count_experts(experts, 64) for experts in routed])
    train, test = slice(0, 200), slice(200, None)
    model = SignatureModel.fit(prefill[train], decode[train], 3)
    rows = [
        {
            "signature": "exact",
            "rho": round(model.rho_of(model.transform(prefill[test]), decode[test]), 4),
        }
    ]
    for rank in (4, 16, 32, 64):
        for source in ("routing", "counts"):
            table = (
                TokenTable.fit_routing(np.concatenate(ids[train]), np.concatenate(routed[train]), 64, rank=rank)
                if source == "routing"
                else TokenTable.fit_counts(ids[train], prefill[train], rank=rank)
            )
            own = model.with_token_table(table)
            signatures = np.stack([own.transform_tokens(prompt) for prompt in ids[test]])
            rows.append(
                {
                    "signature": f"token table from {source}",
                    "rank": table.rank,
                    "kilobytes": table.nbytes // 1_000,
                    "rho": round(own.rho_of(signatures, decode[test]), 4),
                }
            )
    return {"calibration_prompts": 200, "held_out_prompts": 100, "weighting": model.weighting, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("MOE_OPT_DATA", default)))
    args = parser.parse_args()

    figures: dict[str, Any] = {"fit": measure_fit(args.repeats)}
    print("fit of 1,000 prompts x 48 layers x 128 experts, 16 workers:", figures["fit"])
    figures["decision"] = measure_decision(args.repeats)
    for row in figures["decision"]:
        print("decision:", row)
    if (args.data / "routing").is_dir():
        figures["esft"] = measure_esft(args.data)
        for name, value in figures["esft"].items():
            for line in value if name == "rows" else [value]:
                print("ESFT", name, line)
        figures["token_table"] = measure_token_table(args.data)
        for row in figures["token_table"]["rows"]:
            print("token table, resampled OLMoE prompts:", row)
    else:
        print(f"no routing data under {args.data}: set MOE_OPT_DATA for rho on real routing")
    write_result("signature_fit", figures)


if __name__ == "__main__":
    main()
