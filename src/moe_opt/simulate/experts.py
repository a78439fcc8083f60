"""How many distinct experts a step reads: from the batch size alone, or from each request's own activation
profile.

A step is a draw; these are expectations over it, exact when requests choose independently of each other: an
expert is idle only if every request leaves it out, so E[distinct] = sum over layers and experts of 1 - prod_r
(1 - p_r).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_opt.errors import ConfigError
from moe_opt.flops import FlopsModel


class ExpertModel(Protocol):
    """Expected distinct experts of a barrier group, kept up to date as requests come and go."""

    def start(self, num_groups: int) -> None:
        """Forget everything; groups are 0 .. num_groups - 1."""

    def add(self, group: int, index: int) -> None:
        """Row `index` of the trace decodes in `group` from now on."""

    def remove(self, group: int, index: int) -> None:
        """It ended or left."""

    def distinct(self, group: int) -> float:
        """Expected distinct experts, summed over layers, that the busiest rank of the group reads in a
        step."""


class BatchExperts:
    """Every token chooses `top_k` of `num_experts` evenly: the count depends on the batch size alone.

    `ranks` devices of the group share the experts (expert parallelism), each with an even share.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int, ranks: int = 1):
        if not 1 <= top_k <= num_experts or num_layers < 1 or ranks < 1:
            raise ConfigError("experts: need 1 <= top_k <= num_experts, and layers and ranks of at least 1")
        self._layers, self._experts, self._top_k, self._ranks = num_layers, num_experts, top_k, ranks
        self._batch: list[int] = []

    @classmethod
    def of(cls, model: FlopsModel, ranks: int = 1) -> BatchExperts:
        """The shape of a model preset."""
        return cls(model.num_moe_layers, model.num_experts, model.top_k, ranks)

    def start(self, num_groups: int) -> None:
        self._batch = [0] * num_groups

    def add(self, group: int, index: int) -> None:
        self._batch[group] += 1

    def remove(self, group: int, index: int) -> None:
        self._batch[group] -= 1

    def distinct(self, group: int) -> float:
        idle = (1.0 - self._top_k / self._experts) ** self._batch[group]
        return self._layers * self._experts * (1.0 - idle) / self._ranks


class ProfileExperts:
    """Each request has its own activation probabilities, as measured: the input that ELDR's routing acts
    on."""

    def __init__(self, profiles: NDArray[np.floating], ranks: int = 1, hosts: NDArray[np.int64] | None = None):
        """`profiles` [N, L, E]: probability that a decode step of request n activates expert e of layer l;
        row i of the trace has profile i modulo N. `hosts` [L, E] gives the rank of each expert (contiguous
        blocks by default)."""
        if profiles.ndim != 3:
            raise ConfigError(f"profiles must have shape [requests, layers, experts], not {profiles.shape}")
        if ranks < 1:
            raise ConfigError(f"ranks must be at least 1, not {ranks}")
        count, layers, experts = profiles.shape
        clipped = np.clip(profiles.reshape(count, -1), 0.0, 1.0 - 1e-9)
        self._log_idle = np.log1p(-clipped)
        self._shape, self._ranks = (layers, experts), ranks
        if hosts is None:
            hosts = np.broadcast_to(np.arange(experts) * ranks // experts, (layers, experts))
        if hosts.shape != (layers, experts) or hosts.min() < 0 or hosts.max() >= ranks:
            raise ConfigError(f"hosts must have shape {(layers, experts)} and ranks 0 .. {ranks - 1}")
        self._rank_of = (np.arange(layers)[:, None] * ranks + hosts).ravel()
        self._sum: list[NDArray[np.float64]] = []
        self._batch: list[int] = []

    def start(self, num_groups: int) -> None:
        self._sum = [np.zeros(self._log_idle.shape[1]) for _ in range(num_groups)]
        self._batch = [0] * num_groups

    def add(self, group: int, index: int) -> None:
        self._sum[group] += self._log_idle[index % len(self._log_idle)]
        self._batch[group] += 1

    def remove(self, group: int, index: int) -> None:
        self._batch[group] -= 1
        if self._batch[group] == 0:
            self._sum[group][:] = 0.0  # rounding does not pile up over an idle moment
        else:
            self._sum[group] -= self._log_idle[index % len(self._log_idle)]

    def distinct(self, group: int) -> float:
        active = -np.expm1(np.minimum(self._sum[group], 0.0))
        if self._ranks == 1:
            return float(active.sum())
        layers, _ = self._shape
        per_rank = np.bincount(self._rank_of, weights=active, minlength=layers * self._ranks)
        return float(per_rank.reshape(layers, self._ranks).max(axis=1).sum())
