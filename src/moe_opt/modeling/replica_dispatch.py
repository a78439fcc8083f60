"""Moving tokens between the ranks of an expert-parallel group, and the even split.

Decode-sized steps all-gather the tokens, one collective a layer. Larger steps may gather the router's choices alone and
send each token's state to those ranks that compute something for it (all-to-all), which moves less where a token's
experts lie on few of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

_VALID, _EXACT = 1, 2

# torch 2.13 renames both and warns about the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gathered(NamedTuple):
    """The step's tokens of all ranks, each rank's part padded to the longest."""

    hidden: torch.Tensor | None  # [N, H]; None where only the choices were gathered
    ids: torch.Tensor  # int64 [N, k]
    weights: torch.Tensor  # [N, k]
    valid: torch.Tensor  # bool [N], False for padding
    exact: torch.Tensor | None  # bool [N], tokens that keep their experts
    total: int  # tokens before padding


def gather_tokens(
    hidden: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    valid: torch.Tensor | None,
    exact: torch.Tensor | None,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None,
) -> Gathered:
    """All-gather dispatch (METRO section IV-C). States, weights, choices and flags of a token travel as one row of
    bytes, so that there is one collective.

    Args: hidden [T, H], None to gather the choices alone; ids int64 [T, k]; weights [T, k]; valid, exact bool [T] or
    None. sizes: T of every rank.
    """
    tokens, top_k = ids.shape
    flags = torch.full((tokens, 1), _VALID, dtype=torch.int32, device=ids.device)
    if valid is not None:
        flags *= valid.view(-1, 1)
    if exact is not None:
        flags += _EXACT * exact.view(-1, 1).to(torch.int32)
    parts = [
        weights.contiguous().view(torch.uint8),
        torch.cat([ids.to(torch.int32), flags], dim=1).view(torch.uint8),
    ]
    if hidden is not None:
        parts.append(hidden.contiguous().view(torch.uint8))
    row = torch.cat(parts, dim=1)
    ranks, longest = len(sizes), max(sizes)
    if tokens < longest:
        row = torch.nn.functional.pad(row, (0, 0, 0, longest - tokens))  # flags 0: not valid
    if ranks > 1:
        everyone = row.new_empty((ranks * longest, row.shape[1]))
        all_gather(everyone, row, group=group)
    else:
        everyone = row
    gates, numbers, *states = everyone.split([part.shape[1] for part in parts], dim=1)
    choices = numbers.contiguous().view(torch.int32)
    bits = choices[:, top_k]
    return Gathered(
        hidden=states[0].contiguous().view(hidden.dtype) if hidden is not None else None,
        ids=choices[:, :top_k].to(torch.int64),
        weights=gates.contiguous().view(weights.dtype),
        valid=(bits & _VALID) != 0,
        exact=((bits & _EXACT) != 0),
        total=sum(sizes),
    )


class TokenExchange:
    """One layer's all-to-all: each token's state goes to the ranks that compute something for it, once to each, and
    their sums come back.

    All ranks know all choices, so that nobody has to ask how many rows will come; the counts are read by the host.

    Args:
        goes: bool [N, G], which ranks compute something for each token, of all ranks' tokens in `gather_tokens`' order.
        rank: this one. tokens: its own.

    Attributes:
        rows: int64 [R], the tokens (rows of `goes`) that this rank computes for, ascending.
    """

    def __init__(self, goes: torch.Tensor, rank: int, tokens: int, group: dist.ProcessGroup | None) -> None:
        ranks = goes.shape[1]
        longest = goes.shape[0] // ranks
        mine = goes[rank * longest : rank * longest + tokens]
        self._tokens = tokens
        self._group = group
        self._sent = torch.nonzero(mine.t())[:, 1]  # by rank, then by token
        self.rows = torch.nonzero(goes[:, rank])[:, 0]
        counts = torch.stack([mine.sum(0), goes[:, rank].view(ranks, longest).sum(1)])
        self._out_counts, self._in_counts = counts.tolist()

    def dispatch(self, hidden: torch.Tensor) -> torch.Tensor:
        """States of this rank's tokens [T, H] -> states of `rows` [R, H]."""
        received = hidden.new_empty((len(self.rows), hidden.shape[1]))
        dist.all_to_all_single(
            received, hidden[self._sent].contiguous(), self._in_counts, self._out_counts, group=self._group
        )
        return received

    def combine(self, partial: torch.Tensor) -> torch.Tensor:
        """What was computed for `rows` [R, H] -> the sum of all ranks' parts for this rank's tokens [T, H]."""
        returned = partial.new_empty((len(self._sent), partial.shape[1]))
        dist.all_to_all_single(returned, partial.contiguous(), self._out_counts, self._in_counts, group=self._group)
        out = torch.zeros(self._tokens, partial.shape[1], dtype=torch.float32, device=partial.device)
        return out.index_add_(0, self._sent, returned.float()).to(partial.dtype)


def share_of_ranks(top_k: int, ranks: int) -> float:
    """Share of the ranks that a token's experts lie on, if each choice is as likely to be on any: what an all-to-all
    moves of an all-gather."""
    return 1.0 - (1.0 - 1.0 / ranks) ** top_k


def split_evenly(ids: torch.Tensor, hosts: torch.Tensor) -> torch.Tensor:
    """EPLB's even token split: an expert's i-th token goes to its (i mod replicas)-th host.

    Args: ids int64 [N, k], -1 = none. hosts bool [E, G].

    Returns: the rank of each assignment, int64 [N, k]; 0 where there is none.
    """
    experts = hosts.shape[0]
    flat = torch.where(ids < 0, experts, ids).reshape(-1)
    order = torch.argsort(flat, stable=True)
    in_order = flat[order]
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(flat)
    position[order] = torch.arange(len(flat), device=ids.device) - starts[in_order]
    replicas = hosts.sum(1)
    # Row e lists the hosts of expert e first, ascending.
    ranks_of_expert = torch.argsort((~hosts).to(torch.int8), dim=1, stable=True)
    expert = flat.clamp_max(experts - 1)
    rank = ranks_of_expert[expert, position % replicas[expert]]
    return torch.where(flat < experts, rank, 0).view_as(ids)
