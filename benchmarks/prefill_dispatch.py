"""What an expert-parallel prefill moves between ranks: an all-gather of all tokens, or an all-to-all to their experts.

    OMP_NUM_THREADS=1 python benchmarks/prefill_dispatch.py

Counts on real routing (DeepSeek-V2-Lite: 64 experts, 6 a token, hidden 2048 in bf16), and seconds of dispatch and
combine in gloo groups of processes on this machine. The paper (METRO, section IV-C) describes decode only; there is no
figure of its to stand beside these.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import write_result

from moe_opt.cluster.placement import place_by_load
from moe_opt.modeling.replica_dispatch import (
    TokenExchange,
    gather_tokens,
    reduce_scatter,
    share_of_ranks,
    split_evenly,
)

DATA = Path(os.environ.get("MOE_OPT_DATA", "../shared/data"))
HIDDEN, LAYER, REPLICATION = 2048, 10, 1.25


def routing(ranks: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices of `tokens` tokens a rank, int64 [ranks * tokens, 6], and hosts of the experts, bool [64, ranks]."""
    recorded = np.load(DATA / "routing" / "esft_dsv2lite_token_routing.npz")
    ids = np.concatenate([recorded[f"{task}_ids"][:, LAYER].astype(np.int64) for task in ("law", "summary")])
    load = np.bincount(ids.ravel(), minlength=64).astype(float)
    hosts = place_by_load(load, ranks, -(-int(64 * REPLICATION) // ranks))
    return torch.from_numpy(ids[: ranks * tokens].copy()), torch.from_numpy(np.asarray(hosts, dtype=bool))


def moved(ranks: int, tokens: int) -> dict[str, float]:
    """Rows that leave a rank per token, there and back, under either dispatch."""
    ids, hosts = routing(ranks, tokens)
    owner = split_evenly(ids, hosts)
    goes = torch.stack([(owner == rank).any(1) for rank in range(ranks)], dim=1)
    own = torch.arange(ranks).repeat_interleave(tokens)
    away = goes.clone()
    away[torch.arange(len(goes)), own] = False
    return {
        "all_gather": 2 * (ranks - 1),
        "all_to_all": round(2 * float(away.sum()) / len(goes), 2),
        "share_of_ranks": round(float(goes.float().mean()), 3),
        "share_if_uniform": round(share_of_ranks(ids.shape[1], ranks), 3),
    }


def rank_main(rank: int, ranks: int, tokens: int, rounds: int, folder: str) -> None:
    """One process of a group: dispatch and combine both ways, taking turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    ids, hosts = routing(ranks, tokens)
    mine = ids[rank * tokens : (rank + 1) * tokens]
    hidden = torch.randn(tokens, HIDDEN).to(torch.bfloat16)
    weights = torch.ones(mine.shape, dtype=torch.bfloat16)
    sizes = [tokens] * ranks

    def all_gather() -> None:
        gathered = gather_tokens(hidden, mine, weights, None, None, sizes, None)
        split_evenly(gathered.ids, hosts)
        assert gathered.hidden is not None
        out = torch.empty_like(hidden)
        reduce_scatter(out, gathered.hidden)

    def all_to_all() -> None:
        gathered = gather_tokens(None, mine, weights, None, None, sizes, None)
        owner = split_evenly(gathered.ids, hosts)
        goes = torch.stack([(owner == other).any(1) for other in range(ranks)], dim=1)
        exchange = TokenExchange(goes, rank, tokens, None)
        exchange.combine(exchange.dispatch(hidden))

    seconds: dict[str, list[float]] = {"all_gather": [], "all_to_all": []}
    for _ in range(rounds + 1):
        for name, run in (("all_gather", all_gather), ("all_to_all", all_to_all)):
            dist.barrier()
            started = time.perf_counter()
            run()
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    if rank == 0:
        torch.save({name: statistics.median(values[1:]) for name, values in seconds.items()}, f"{folder}/seconds.pt")
    dist.destroy_process_group()


def timed(ranks: int, tokens: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (ranks, tokens, rounds, folder), nprocs=ranks)
        return torch.load(f"{folder}/seconds.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="prompt tokens of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--timed", default="2,4,8", help="ranks of the groups that are started and timed")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/prefill_dispatch.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("ranks  rows moved a token: all-gather  all-to-all  ratio   seconds: all-gather  all-to-all  ratio")
    for ranks in map(int, args.ranks.split(",")):
        row: dict[str, Any] = {"ranks": ranks, "tokens_per_rank": args.tokens, "rows": moved(ranks, args.tokens)}
        there = row["rows"]
        line = f"{ranks:5d} {there['all_gather']:31.0f} {there['all_to_all']:11.1f} "
        line += f"{there['all_to_all'] / there['all_gather']:6.2f}"
        if str(ranks) in args.timed.split(","):
            row["seconds"] = timed(ranks, args.tokens, args.rounds)
            both = row["seconds"]
            line += f" {both['all_gather']:21.3f} {both['all_to_all']:11.3f} "
            line += f"{both['all_to_all'] / both['all_gather']:6.2f}"
        print(line, flush=True)
        rows.append(row)
    if args.save:
        write_result("prefill_dispatch", {"hidden": HIDDEN, "dtype": "bfloat16", "rows": rows})


if __name__ == "__main__":
    main()
