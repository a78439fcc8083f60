"""Engines of an expert-parallel group step together (METRO): every rank has an engine and requests of its own, and a
forward pass is all ranks' or nobody's.

Before each step the ranks say in one small collective whether they have work, whether they want to end, and which
brownout thresholds they want. If anybody has work, all run a pass; who has none brings a token of padding. Loads are
counted alike on every rank, so that all find the same new placement at the same step; weights move meanwhile, and all
change over at once when the last one has its own.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
from typing import Any

import torch
import torch.distributed as dist

from moe_opt.errors import MoEOptError
from moe_opt.modeling.phase_settings import PHASES
from moe_opt.modeling.placement import ExpertPlacement, rebalance_experts
from moe_opt.modeling.rebalancing import Rebalance

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.005  # how long a rank without work waits for a request before it asks the others again
_DECAY = 0.5  # what counts of the loads so far after each look at them


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What the group does next. run: a forward pass. leaving: a rank wants to end. over: all have ended."""

    run: bool
    leaving: bool
    over: bool


class LockStep:
    """The group's side of one engine; used on the engine's thread alone.

    Args:
        runtime: `MoERuntime` of a model with `expert_parallel`. rebalance_steps: look for a better placement every so
            many passes; 0 never does. timeout: seconds after which a rank that does not answer is given up.

    Attributes:
        moved: expert weights that came to this rank by rebalancing.
    """

    def __init__(self, runtime: Any, rebalance_steps: int = 0, timeout: float = 120.0) -> None:
        self._runtime = runtime
        self._parallel = runtime.expert_parallel
        self._rebalance_steps = rebalance_steps
        limit = datetime.timedelta(seconds=timeout)
        # Groups of their own: flags go between forward passes, weights beside them.
        self._flags = dist.new_group(backend="gloo", timeout=limit)
        self._weights = dist.new_group(timeout=limit) if rebalance_steps else None
        self._change: Rebalance | None = None
        self._passes = 0
        self._differ = False
        self.moved = 0

    def turn(self, work: bool, leaving: bool, ended: bool, wanted: dict[str, float]) -> Turn:
        """Agree on the next step. All ranks call it together.

        Args:
            work: this rank has requests to run. leaving: it takes no more. ended: it has none and will not step again.
            wanted: brownout threshold per phase that this rank would like; the lowest of all applies.

        Raises:
            MoEOptError: another rank is gone, or weights could not be moved.
        """
        ready = self._change is not None and self._change.ready
        mine = torch.tensor(
            [work, leaving, ended, ready, self._parallel.settings_digest(), *(wanted[phase] for phase in PHASES)],
            dtype=torch.float64,
        )
        rows = [torch.empty_like(mine) for _ in range(self._parallel.num_ranks)]
        try:
            dist.all_gather(rows, mine, group=self._flags)
        except (RuntimeError, dist.DistError) as error:
            raise MoEOptError(f"a rank of the expert-parallel group is gone: {str(error).splitlines()[0]}") from error
        table = torch.stack(rows)
        self._apply(table)
        if self._change is not None and bool(table[:, 3].all()):
            received = self._change.finish()
            self.moved += received
            logger.info("experts rebalanced: %d weights came to rank %d", received, self._parallel.rank)
            self._change = None
        run = bool(table[:, 0].any())
        if run:
            self._passes += 1
            if self._rebalance_steps and self._passes % self._rebalance_steps == 0 and self._change is None:
                self._look()
        return Turn(run, bool(table[:, 1].any()), bool(table[:, 2].all()))

    def _apply(self, table: torch.Tensor) -> None:
        differ = bool((table[:, 4] != table[0, 4]).any())
        if differ and not self._differ:
            logger.warning(
                "strategy, keep rule, layers or ways of brownout differ between the ranks: the group stays exact until "
                "they are alike"
            )
        self._differ = differ
        lowest = table[:, 5:].min(0).values.tolist()
        for phase, threshold in zip(PHASES, lowest, strict=True):
            agreed = 1.0 if differ else threshold
            if self._runtime.brownout(phase).threshold != agreed:
                self._runtime.set_brownout(threshold=agreed, phase=phase)

    def _look(self) -> None:
        """Begin to move experts to where the loads so far want them."""
        parallel = self._parallel
        loads, current = parallel.load_counts.cpu().clone(), parallel.placement
        parallel.load_counts *= _DECAY

        def find() -> ExpertPlacement:
            return rebalance_experts(current, loads)[0]

        self._change = Rebalance(parallel, find, self._weights)
        self._change.start()
