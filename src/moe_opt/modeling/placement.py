"""Placement of expert replicas on the ranks of an expert-parallel group, over tensors and all layers.

The algorithms are `moe_opt.cluster.placement`; here they meet a model: recorded loads in, slots per rank out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_opt.cluster.placement import (
    check_slots,
    place_by_activation,
    place_by_load,
    place_hierarchically,
    rebalance,
    sample_batches,
)
from moe_opt.errors import ConfigError

PLACEMENTS = ("eplb", "hierarchical", "activation")


@dataclass(frozen=True)
class ExpertPlacement:
    """Which rank holds which expert.

    Attributes:
        hosts: bool [L, E, G].
        slots_per_rank: expert weights that a rank has room for in each layer.
    """

    hosts: torch.Tensor
    slots_per_rank: int

    @property
    def num_ranks(self) -> int:
        return int(self.hosts.shape[2])

    def slots(self) -> torch.Tensor:
        """int64 [L, G, S]: the expert in each slot of each rank, ascending, -1 for an empty slot."""
        layers, experts, ranks = self.hosts.shape
        ids = torch.arange(experts).view(1, experts, 1).expand(layers, experts, ranks)
        table = torch.where(self.hosts.cpu(), ids, experts).sort(dim=1).values[:, : self.slots_per_rank]
        if experts < self.slots_per_rank:
            table = torch.nn.functional.pad(table, (0, 0, 0, self.slots_per_rank - experts), value=experts)
        return torch.where(table == experts, -1, table).transpose(1, 2).contiguous()

    def experts_of(self, layer: int, rank: int) -> list[int]:
        """Ids of the experts that a rank holds in a layer, ascending."""
        return torch.nonzero(self.hosts[layer, :, rank]).flatten().tolist()

    def save(self, path: str | Path) -> None:
        """Write as JSON: ranks of every expert of every layer."""
        ranks = [[torch.nonzero(row).flatten().tolist() for row in layer] for layer in self.hosts.cpu()]
        data = {"num_ranks": self.num_ranks, "slots_per_rank": self.slots_per_rank, "ranks_of_expert": ranks}
        Path(path).write_text(json.dumps(data) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ExpertPlacement:
        """Read what `save` wrote.

        Raises:
            ConfigError: not such a file.
        """
        try:
            data = json.loads(Path(path).read_text())
            ranks, groups = data["ranks_of_expert"], int(data["num_ranks"])
            hosts = torch.zeros(len(ranks), len(ranks[0]), groups, dtype=torch.bool)
            for layer, experts in enumerate(ranks):
                for expert, members in enumerate(experts):
                    hosts[layer, expert, members] = True
            return cls(hosts, int(data["slots_per_rank"]))
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"{path} is no placement that moe_opt has saved: {error}") from error


def place_experts(
    load: torch.Tensor | np.ndarray | Sequence[Sequence[float]],
    num_ranks: int,
    slots_per_rank: int,
    *,
    method: str = "eplb",
    routing: torch.Tensor | np.ndarray | None = None,
    batch_size: int = 64,
    samples: int = 32,
    num_nodes: int = 1,
    num_groups: int | None = None,
    seed: int = 0,
) -> ExpertPlacement:
    """Decide which rank holds which experts; spare slots hold replicas.

    Args:
        load: [L, E], tokens (or any weight) per expert of every MoE layer, none negative.
        num_ranks: G. slots_per_rank: expert weights that fit on a rank in each layer; G * slots >= E.
        method: "eplb" (replicas by load, packed by load), "hierarchical" (EPLB's, within nodes; `num_nodes`,
            `num_groups`), or "activation" (fewest activated experts on the busiest rank, from `routing`).
        routing: int64 [T, L, k], recorded choices, -1 ignored; "activation" only. batch_size: tokens of a decode step
            over all ranks that "activation" optimises for. samples: batches it draws.

    Returns: `ExpertPlacement`, `hosts` bool [L, E, G] on the CPU.

    Raises:
        ConfigError: shapes or numbers that do not fit.
    """
    table = torch.as_tensor(load).detach().cpu().to(torch.float64).numpy()
    if table.ndim != 2:
        raise ConfigError(f"load must be [layers, experts], got shape {table.shape}")
    if not np.isfinite(table).all() or (table < 0).any():
        raise ConfigError("load holds negative or non-finite values")
    layers, experts = table.shape
    check_slots(experts, num_ranks, slots_per_rank)
    recorded = None
    if method == "activation":
        if routing is None:
            raise ConfigError("placement 'activation' needs `routing`, recorded choices [tokens, layers, top-k]")
        recorded = torch.as_tensor(routing).detach().cpu().numpy()
        if recorded.ndim != 3 or recorded.shape[1] != layers:
            raise ConfigError(f"routing must be [tokens, {layers} layers, top-k], got shape {recorded.shape}")
    elif method not in PLACEMENTS:
        raise ConfigError(f"unknown placement {method!r}; choose one of {', '.join(PLACEMENTS)}")
    hosts = np.empty((layers, experts, num_ranks), dtype=bool)
    for layer in range(layers):
        if recorded is not None:
            batches = sample_batches(recorded[:, layer], experts, batch_size, samples, seed + layer)
            hosts[layer] = place_by_activation(batches, num_ranks, slots_per_rank, seed=seed + layer)
        elif method == "hierarchical":
            groups = num_groups if num_groups is not None else num_nodes
            hosts[layer] = place_hierarchically(table[layer], num_ranks, slots_per_rank, num_nodes, groups)
        else:
            hosts[layer] = place_by_load(table[layer], num_ranks, slots_per_rank)
    return ExpertPlacement(torch.from_numpy(hosts), slots_per_rank)


def rebalance_experts(
    current: ExpertPlacement, load: torch.Tensor | np.ndarray, **options: Any
) -> tuple[ExpertPlacement, list[list[tuple[int, int]]]]:
    """A placement for new loads whose ranks (and nodes, for "hierarchical") are named so that the fewest of its weights
    have to move. `options` go to `place_experts`.

    Returns: the placement, and per layer the (expert, rank) pairs that have to be loaded.
    """
    wanted = place_experts(load, current.num_ranks, current.slots_per_rank, **options)
    if wanted.hosts.shape != current.hosts.shape:
        raise ConfigError(f"load is for {list(wanted.hosts.shape[:2])}, the placement {list(current.hosts.shape[:2])}")
    hosts, moves = [], []
    for before, after in zip(current.hosts.cpu().numpy(), wanted.hosts.numpy(), strict=True):
        found = rebalance(before, after, int(options.get("num_nodes", 1)))
        hosts.append(found.hosts)
        moves.append(found.moves)
    return ExpertPlacement(torch.from_numpy(np.stack(hosts)), current.slots_per_rank), moves
