"""Moving expert weights to a new placement, beside the forward passes that still use the old one (METRO, section V).

The ranks' engines go on stepping. A thread of each rank sends and receives, on a process group of its own, into new
storage; when all ranks have theirs, they change over between two steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.modeling.experts import expert_tensor_names
from moe_opt.modeling.placement import ExpertPlacement

if TYPE_CHECKING:
    from moe_opt.modeling.expert_parallel import ExpertParallel


class Rebalance:
    """One change of placement. All ranks make it at the same step.

    Args:
        find: gives the new placement, the same on every rank; runs on the thread, for it may take a while. The current
            placement itself ends the change at once.
        group: of all ranks, used by nobody else meanwhile; None for the default one, which only `run` may use.

    Attributes:
        received: expert weights that came to this rank, over all layers.
    """

    def __init__(
        self, parallel: ExpertParallel, find: Callable[[], ExpertPlacement], group: dist.ProcessGroup | None = None
    ) -> None:
        self._parallel = parallel
        self._find = find
        self._group = group
        self._placement: ExpertPlacement | None = None
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self.received = 0

    def start(self) -> None:
        """Begin to move."""
        self._thread = threading.Thread(target=self._run_quietly, name="moe-opt-rebalance", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether this rank has all it wants.

        Raises:
            MoEOptError: the move failed; the old placement stays.
        """
        if self._thread is None or self._thread.is_alive():
            return False
        if self._error is not None:
            raise MoEOptError(f"expert weights could not be moved: {self._error}") from self._error
        return True

    def run(self) -> None:
        """Move on this thread."""
        placement = self._find()
        parallel = self._parallel
        if placement.hosts.shape != parallel.placement.hosts.shape:
            raise ConfigError(
                f"the new placement has shape {list(placement.hosts.shape)}, the current one "
                f"{list(parallel.placement.hosts.shape)}"
            )
        for layer, (_, module) in enumerate(parallel.runtime.layers):
            self._move_layer(layer, module, parallel.placement.hosts[layer], placement.hosts[layer])
        self._placement = placement

    def finish(self) -> int:
        """Change over; between two steps, on all ranks at the same one. Returns `received`."""
        assert self._placement is not None
        parallel = self._parallel
        for layer, tensors in self._tensors.items():
            module = parallel.runtime.layers[layer][1]
            for key, tensor in tensors.items():
                module._parameters[key] = nn.Parameter(tensor, False)
        parallel.take(self._placement)
        self._tensors.clear()
        return self.received

    def _run_quietly(self) -> None:
        try:
            with torch.no_grad():
                self.run()
        except Exception as error:  # `ready` says it on the engine's thread
            self._error = error

    def _move_layer(self, layer: int, module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
        rank = self._parallel.rank
        moves = torch.nonzero(new & ~old).tolist()
        had, wants = (torch.nonzero(hosts[:, rank]).flatten().tolist() for hosts in (old, new))
        if not moves and had == wants:
            return
        tensors = {}
        for key in expert_tensor_names(module):
            before = module._parameters[key]
            assert before is not None
            before = before.detach()
            after = before.new_empty((len(wants), *before.shape[1:]))
            kept = [(slot, had.index(expert)) for slot, expert in enumerate(wants) if expert in had]
            if kept:
                to, where = zip(*kept, strict=True)
                after[list(to)] = before[list(where)]
            for expert, target in moves:
                source = int(torch.nonzero(old[expert])[0])
                if source == rank:
                    dist.send(before[had.index(expert)].contiguous(), self._global(target), self._group)
                elif target == rank:
                    dist.recv(after[wants.index(expert)], self._global(source), self._group)
            tensors[key] = after
        self._tensors[layer] = tensors
        self.received += sum(target == rank for _, target in moves)

    def _global(self, rank: int) -> int:
        group = self._group if self._group is not None else self._parallel.group
        return rank if group is None else dist.get_global_rank(group, rank)
