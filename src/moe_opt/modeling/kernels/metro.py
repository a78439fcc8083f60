"""METRO's replica choice as one Triton program, equal to `moe_opt.cluster.replicas.choose_reference`.

The paper runs Algorithm 1 on one multiprocessor with a lock per rank (section V), so that the order of assignments, and
with it the plan, is left to chance. Here one program works through the experts in a fixed order: those with one host in
a single vector step, the activated others one by one, then at most `AUGMENTATIONS_PER_RANK * G` augmentations, each a
breadth-first search over ranks with one vector step a level. Equal inputs give equal plans on every rank, the shapes do
not depend on the data, and the host is never asked, so the launch can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_opt.cluster.replicas import AUGMENTATIONS_PER_RANK
from moe_opt.errors import ConfigError

MAX_RANKS = 62  # hosts of an expert are bits of an int64


@dataclass(frozen=True)
class DeviceReplicas:
    """A layer's placement on a device, as the kernel reads it.

    Attributes:
        masks: int64 [E], bit g set where rank g holds the expert. order: int32 [E], fewest hosts first, then by id.
        singles: how many of `order` have one host only.
    """

    masks: torch.Tensor
    order: torch.Tensor
    singles: int
    num_ranks: int

    @classmethod
    def from_hosts(cls, hosts: torch.Tensor, device: torch.device | str) -> DeviceReplicas:
        """hosts: bool [E, G] in host memory."""
        if hosts.shape[1] > MAX_RANKS:
            raise ConfigError(f"the METRO kernel takes at most {MAX_RANKS} ranks, got {hosts.shape[1]}")
        hosts = hosts.cpu()
        count = hosts.sum(1)
        if bool((count == 0).any()):
            raise ConfigError(f"experts {torch.nonzero(count == 0).flatten().tolist()} have no host")
        masks = (hosts.to(torch.int64) << torch.arange(hosts.shape[1])).sum(1)
        order = torch.argsort(count, stable=True).to(torch.int32)
        return cls(masks.to(device), order.to(device), int((count == 1).sum()), int(hosts.shape[1]))


def choose_on_device(
    tokens: torch.Tensor, replicas: DeviceReplicas, out: torch.Tensor | None = None, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """The rank that runs each expert: int32 [E], -1 without tokens. No host sync; give `out` and `scratch` (int32 [E])
    to allocate nothing.

    Args: tokens int64 [E] on the device of `replicas`.
    """
    experts = tokens.shape[0]
    if out is None:
        out = torch.empty(experts, dtype=torch.int32, device=tokens.device)
    if scratch is None:
        scratch = torch.empty(experts, dtype=torch.int32, device=tokens.device)
    _metro_kernel[(1,)](
        tokens, replicas.masks, replicas.order, out, scratch,
        experts, replicas.singles, replicas.num_ranks, AUGMENTATIONS_PER_RANK * replicas.num_ranks,
        EXPERTS=triton.next_power_of_2(experts), RANKS=triton.next_power_of_2(replicas.num_ranks),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _metro_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, masks_ptr, order_ptr, choice_ptr, active_ptr,
    num_experts, num_singles, num_ranks, limit,
    EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    rank = tl.arange(0, RANKS)
    inside = expert < num_experts
    tokens = tl.load(tokens_ptr + expert, mask=inside, other=0)
    masks = tl.load(masks_ptr + expert, mask=inside, other=0)
    active = (tokens > 0) & inside
    single = (masks & (masks - 1)) == 0

    # Experts with one host, all at once.
    on_rank = ((masks[:, None] >> rank[None, :]) & 1) != 0
    only = active & single
    load = tl.sum((on_rank & only[:, None]).to(tl.int32), axis=0)
    home = tl.sum(tl.where(on_rank, rank[None, :], 0), axis=1)
    tl.store(choice_ptr + expert, tl.where(only, home, -1).to(tl.int32), mask=inside)

    # The activated others, packed to the front in their fixed order, so that the loop is as long as their number.
    place = expert + num_singles
    here = place < num_experts
    queued = tl.load(order_ptr + place, mask=here, other=0)
    queued_active = here & (tl.load(tokens_ptr + queued, mask=here, other=0) > 0)
    position = tl.cumsum(queued_active.to(tl.int32), axis=0) - 1
    tl.store(active_ptr + position, queued.to(tl.int32), mask=queued_active)
    count = tl.sum(queued_active.to(tl.int32), axis=0)
    tl.debug_barrier()  # the stores above are read below by other threads of this program

    # Load first, rank second, in one number: the least of them is the lowest rank among the least loaded.
    full: tl.constexpr = 1 << 30
    for i in range(count):
        chosen = tl.load(active_ptr + i)
        mask = tl.load(masks_ptr + chosen)
        hosted = ((mask >> rank) & 1) != 0
        best = tl.min(tl.where(hosted, load * RANKS + rank, full), axis=0) % RANKS
        tl.store(choice_ptr + chosen, best.to(tl.int32))
        load += (rank == best).to(tl.int32)
    tl.debug_barrier()

    choice = tl.load(choice_ptr + expert, mask=inside, other=-1)
    movable = active & (single == 0)
    step = 0
    going = count > 0
    while going & (step < limit):
        in_group = rank < num_ranks
        source = RANKS - 1 - tl.max(tl.where(in_group, load * RANKS + (RANKS - 1 - rank), -1), axis=0) % RANKS
        highest = tl.max(tl.where(in_group, load, -1), axis=0)
        level = tl.where(rank == source, 0, -1)
        through = tl.full((RANKS,), EXPERTS, tl.int32)
        depth = 0
        target = full
        grew = True
        while grew & (target == full):
            # An expert may move if its rank was reached in the last step; it leads to those of its hosts not seen yet.
            at_rank = choice[:, None] == rank[None, :]
            level_of_expert = tl.max(tl.where(at_rank, level[None, :], -1), axis=1)
            leaving = movable & (level_of_expert == depth)
            leads = leaving[:, None] & on_rank & (level[None, :] < 0)
            first = tl.min(tl.where(leads, expert[:, None], EXPERTS), axis=0)
            new = (first < EXPERTS) & (level < 0)
            through = tl.where(new, first.to(tl.int32), through)
            depth += 1
            level = tl.where(new, depth, level)
            room = new & (load <= highest - 2)
            target = tl.min(tl.where(room, load * RANKS + rank, full), axis=0)
            grew = tl.sum(new.to(tl.int32), axis=0) > 0
        found = target < full
        end = target % RANKS
        load += tl.where(found & (rank == end), 1, 0) - tl.where(found & (rank == source), 1, 0)
        while found & (end != source):
            mover = tl.sum(tl.where(rank == end, through, 0), axis=0)
            previous = tl.sum(tl.where(expert == mover, choice, 0), axis=0)
            choice = tl.where(expert == mover, end, choice)
            end = previous
        going = found
        step += 1
    tl.store(choice_ptr + expert, choice.to(tl.int32), mask=inside)
