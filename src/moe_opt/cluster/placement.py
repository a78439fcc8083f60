"""Which ranks hold which experts, some of them twice: EPLB's two placements and one that looks at activated experts.

NumPy arrays, one layer at a time; `moe_opt.modeling.placement` is the same over tensors and all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from moe_opt.cluster.replicas import ReplicaTable, _assign
from moe_opt.errors import ConfigError


def check_slots(num_experts: int, num_ranks: int, slots_per_rank: int) -> None:
    """Raises ConfigError where the slots cannot hold every expert once."""
    if num_ranks < 1 or slots_per_rank < 1:
        raise ConfigError(f"num_ranks and slots_per_rank must be at least 1, got {num_ranks} and {slots_per_rank}")
    if num_ranks * slots_per_rank < num_experts:
        raise ConfigError(
            f"{num_ranks} ranks of {slots_per_rank} slots cannot hold {num_experts} experts: at least "
            f"{-(-num_experts // num_ranks)} slots a rank are needed"
        )


def count_replicas(load: NDArray[np.floating], slots: int, most: int) -> NDArray[np.int64]:
    """int64 [E]: replicas of each expert, at most `most`; each spare slot goes to the most loaded replica (EPLB)."""
    replicas = np.ones(len(load), dtype=np.int64)
    for _ in range(slots - len(load)):
        share = np.where(replicas < most, load / replicas, -np.inf)
        if share.max() == -np.inf:
            break
        replicas[int(share.argmax())] += 1
    return replicas


def place_by_load(load: NDArray[np.floating], num_ranks: int, slots_per_rank: int) -> NDArray[np.bool_]:
    """EPLB's global placement, bool [E, G]: replicas by load, packed heaviest first onto the least loaded rank that has
    a slot and does not hold that expert yet."""
    check_slots(len(load), num_ranks, slots_per_rank)
    replicas = count_replicas(load, num_ranks * slots_per_rank, num_ranks)
    return _pack(load, replicas, num_ranks, slots_per_rank)


def _pack(
    load: NDArray[np.floating], replicas: NDArray[np.int64], num_ranks: int, slots_per_rank: int
) -> NDArray[np.bool_]:
    hosts = np.zeros((len(load), num_ranks), dtype=bool)
    held = np.zeros(num_ranks, dtype=np.int64)
    weight = np.zeros(num_ranks)
    # Many replicas first: they have the fewest ranks to choose from; then the heaviest.
    for expert in np.lexsort((-load / replicas, -replicas)):
        room = np.flatnonzero(held < slots_per_rank)
        order = room[np.lexsort((held[room], weight[room]))][: replicas[expert]]
        hosts[expert, order] = True
        held[order] += 1
        weight[order] += load[expert] / len(order)
    return hosts


def place_hierarchically(
    load: NDArray[np.floating], num_ranks: int, slots_per_rank: int, num_nodes: int, num_groups: int
) -> NDArray[np.bool_]:
    """EPLB's hierarchical placement, bool [E, G]: whole expert groups (consecutive ids, as in group-limited routing)
    are packed onto nodes, so that a token's experts stay within few nodes; replicas are made within each node."""
    experts = len(load)
    check_slots(experts, num_ranks, slots_per_rank)
    if num_nodes < 1 or num_ranks % num_nodes or num_groups % num_nodes or experts % num_groups:
        raise ConfigError(
            f"hierarchical placement needs num_ranks ({num_ranks}) and num_groups ({num_groups}) to be multiples of "
            f"num_nodes ({num_nodes}), and the {experts} experts a multiple of num_groups"
        )
    size = experts // num_groups
    by_group = load.reshape(num_groups, size).sum(axis=1)
    nodes = _pack(by_group, np.ones(num_groups, dtype=np.int64), num_nodes, num_groups // num_nodes)
    inner = num_ranks // num_nodes
    hosts = np.zeros((experts, num_ranks), dtype=bool)
    for node in range(num_nodes):
        members = (np.flatnonzero(nodes[:, node])[:, None] * size + np.arange(size)).ravel()
        hosts[members, node * inner : (node + 1) * inner] = place_by_load(load[members], inner, slots_per_rank)
    return hosts


def sample_batches(
    routing: NDArray[np.integer], num_experts: int, batch_size: int, samples: int, seed: int
) -> NDArray[np.int64]:
    """int64 [samples, E]: tokens per expert of random batches drawn from recorded choices `routing` [T, k]."""
    if not 1 <= batch_size <= len(routing):
        raise ConfigError(f"batch_size must lie in 1..{len(routing)} (the tokens recorded), got {batch_size}")
    random = np.random.default_rng(seed)
    batches = np.empty((samples, num_experts), dtype=np.int64)
    for row in batches:
        chosen = routing[random.choice(len(routing), batch_size, replace=False)]
        row[:] = np.bincount(chosen[chosen >= 0].ravel(), minlength=num_experts)
    return batches


def place_by_activation(
    batches: NDArray[np.int64],
    num_ranks: int,
    slots_per_rank: int,
    *,
    seed: int = 0,
    proposals: int = 1500,
) -> NDArray[np.bool_]:
    """A placement that lowers the expected number of experts that the busiest rank reads, bool [E, G].

    Starts from EPLB's packing of the experts' activation probabilities (spare slots to those most often activated),
    then hill-climbs: exchange two experts of two ranks, or let a replica give way to a second copy of another expert. A
    proposal stays if the mean busiest rank over `batches`, after METRO's own choice, does not rise.

    Args:
        batches: int64 [S, E], tokens per expert of sample batches (`sample_batches`), at the batch size to optimise.
    """
    experts = batches.shape[1]
    probability = (batches > 0).mean(axis=0) + 1e-9
    hosts = place_by_load(probability, num_ranks, slots_per_rank)
    if num_ranks == 1:
        return hosts
    random = np.random.default_rng(seed)
    best = mean_busiest(batches, hosts)
    for _ in range(proposals):
        a = int(random.integers(experts))
        from_ranks, other_ranks = np.flatnonzero(hosts[a]), np.flatnonzero(~hosts[a])
        if not len(other_ranks):
            continue
        rank, other = int(random.choice(from_ranks)), int(random.choice(other_ranks))
        trial = hosts.copy()
        trial[a, rank] = False
        if len(from_ranks) > 1 and random.random() < 0.5:
            absent = np.flatnonzero(~hosts[:, rank])  # the replica's slot goes to an expert that is not here yet
            if not len(absent):
                continue
            trial[int(random.choice(absent)), rank] = True
        else:
            candidates = np.flatnonzero(hosts[:, other] & ~hosts[:, rank])
            trial[a, other] = True
            if len(candidates):
                b = int(random.choice(candidates))
                trial[b, other], trial[b, rank] = False, True
            elif hosts[:, other].sum() >= slots_per_rank:
                continue
        found = mean_busiest(batches, trial)
        if found <= best:
            hosts, best = trial, found
    return hosts


def mean_busiest(batches: NDArray[np.int64], hosts: NDArray[np.bool_]) -> float:
    """Mean over batches of the experts that the busiest rank reads, after METRO's choice."""
    table = ReplicaTable(hosts)
    total = 0
    for tokens in batches:
        choice = _assign(tokens, table.fewest_first, table.starts, table.ranks, table.num_ranks, table.choice_limit)
        total += int(np.bincount(choice + 1, minlength=2)[1:].max())
    return total / len(batches)


class Rebalancing(NamedTuple):
    """A new placement whose ranks were renamed so that most experts stay where they are."""

    hosts: NDArray[np.bool_]  # [E, G]
    moves: list[tuple[int, int]]  # (expert, rank) pairs whose weights a rank has to load


def rebalance(current: NDArray[np.bool_], wanted: NDArray[np.bool_], num_nodes: int = 1) -> Rebalancing:
    """Rename the ranks of `wanted` so that the fewest of its weights have to move: an assignment problem on the overlap
    of the ranks' contents, solved exactly. Ranks are interchangeable within their node, and nodes with each other, so
    that a hierarchical placement stays one."""
    if current.shape != wanted.shape:
        raise ConfigError(f"placements of shapes {current.shape} and {wanted.shape} do not belong together")
    ranks = current.shape[1]
    if num_nodes < 1 or ranks % num_nodes:
        raise ConfigError(f"{ranks} ranks do not fall into {num_nodes} nodes")
    overlap = current.T.astype(np.int64) @ wanted.astype(np.int64)  # [old rank, new rank]
    size = ranks // num_nodes
    blocks = overlap.reshape(num_nodes, size, num_nodes, size).swapaxes(1, 2)  # [old node, new node, rank, rank]
    inner = [[linear_sum_assignment(block, maximize=True) for block in row] for row in blocks]
    kept = [
        [block[found].sum() for block, found in zip(*pair, strict=True)] for pair in zip(blocks, inner, strict=True)
    ]
    hosts = np.zeros_like(wanted)
    for old_node, new_node in zip(*linear_sum_assignment(np.array(kept), maximize=True), strict=True):
        old, new = inner[old_node][new_node]
        hosts[:, old_node * size + old] = wanted[:, new_node * size + new]
    moves = np.argwhere(hosts & ~current)
    return Rebalancing(hosts, [(int(expert), int(rank)) for expert, rank in moves])
