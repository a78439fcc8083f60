"""Expert-parallel forward of one lock-step group (METRO): ranks own expert replicas, attention is data-parallel.

Every rank runs its own batch. In each MoE layer the ranks all-gather their tokens with the router's choices, so that
all know the step's counts (section IV-C); each finds the same plan of replicas, computes the assignments that the plan
gives it, and a reduce-scatter brings every rank the sum for its own tokens. Of larger steps only the choices are
gathered where that moves less, and tokens go by all-to-all to the ranks that compute for them. One small collective at
the start of a forward pass tells how many tokens each rank brings, which fixes all shapes of that pass.

Ranks must run forward passes together: `generate(synced_gpus=True)`, an engine in lock step, or `idle()` for a rank
that has nothing to do.
"""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moe_opt.cluster.replicas import ReplicaTable
from moe_opt.config import ExpertParallelConfig
from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.modeling.experts import ExpertsProxy, expert_tensor_names, expert_tensors, stock_function
from moe_opt.modeling.metro import triton_works
from moe_opt.modeling.placement import ExpertPlacement, place_experts
from moe_opt.modeling.rebalancing import Rebalance
from moe_opt.modeling.replica_dispatch import (
    Gathered,
    TokenExchange,
    gather_tokens,
    reduce_scatter,
    share_of_ranks,
    split_evenly,
)
from moe_opt.modeling.united import weight_fingerprint

if TYPE_CHECKING:
    from moe_opt.modeling.expert_source import ExpertSource

_PHASES = ("decode", "prefill")  # by number in the header that ranks exchange
_WORTH_ROUTING = 0.75  # of what an all-gather moves, below which "auto" sends tokens by all-to-all


class LayerPlan:
    """One layer on this rank: which experts it holds, and the table that replicas are chosen from.

    United experts are held by every rank; they take part in the choice as experts with all ranks as hosts.

    Args: hosts bool [E, G] of the originals; united: their number U.
    """

    def __init__(self, hosts: torch.Tensor, united: int, rank: int, device: torch.device) -> None:
        ranks = hosts.shape[1]
        everywhere = torch.ones(united, ranks, dtype=torch.bool)
        self.hosts = torch.cat([hosts.cpu(), everywhere])
        self.table = ReplicaTable(self.hosts.numpy())
        held = torch.nonzero(self.hosts[:, rank]).flatten()
        self.num_held = len(held)
        # The slot of each expert in this rank's storage; one past the end for those of other ranks.
        slots = torch.full((len(self.hosts),), self.num_held, dtype=torch.int64)
        slots[held] = torch.arange(self.num_held)
        self.slot_of_expert = slots.to(device)
        self.hosts_on_device = self.hosts.to(device)
        self.device_replicas: Any = None
        if device.type == "cuda" and triton_works():
            from moe_opt.modeling.kernels.metro import DeviceReplicas

            self.device_replicas = DeviceReplicas.from_hosts(self.hosts, device)


class ExpertParallel:
    """The expert-parallel side of a `MoERuntime`; `runtime.expert_parallel`.

    Attributes:
        rank, num_ranks: of the process group. placement: `ExpertPlacement`. method: may be set between steps, on all
            ranks alike.
    """

    def __init__(self, runtime: Any, config: ExpertParallelConfig, group: dist.ProcessGroup | None = None) -> None:
        _require_processes()
        self.runtime = runtime
        self.config = config
        self.method = config.method
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.placement = self._placement()
        self._plans: list[LayerPlan | None] = [None] * runtime.num_layers
        self._sizes: list[int] = []
        self._phase = "prefill"
        # float64 [L, E]: choices of all ranks' tokens so far, equal on every rank; who rebalances lets them decay
        self.load_counts = torch.zeros(runtime.num_layers, runtime.num_experts, dtype=torch.float64)
        self.bytes_read: int | None = None  # of experts, where this rank read its own ones only
        self.activated: list[torch.Tensor | None] = [None] * runtime.num_layers  # bool [E + U, G] of the last step

    def _placement(self) -> ExpertPlacement:
        experts, layers = self.runtime.num_experts, self.runtime.num_layers
        if self.config.placement is not None:
            placement = ExpertPlacement.load(self.config.placement)
            if tuple(placement.hosts.shape) != (layers, experts, self.num_ranks):
                raise ConfigError(
                    f"{self.config.placement} places {list(placement.hosts.shape[:2])} experts on "
                    f"{placement.num_ranks} ranks; the model has {[layers, experts]}, the group {self.num_ranks} ranks"
                )
            return placement
        slots = self.config.slots_per_rank
        if slots is None:
            slots = -(-round(experts * self.config.replication) // self.num_ranks)
        return place_experts(torch.ones(layers, experts), self.num_ranks, slots)

    # ------------------------------------------------------------- weights

    def held_experts(self, layer: int) -> list[int]:
        """Ids of the experts whose weights this rank holds, ascending."""
        return self.placement.experts_of(layer, self.rank)

    def load(self, source: ExpertSource) -> None:
        """Read this rank's experts, and no others, from a checkpoint whose experts were left out so far. The parameters
        become `[held, ...]`, in id order."""
        self.runtime.base_fingerprint = weight_fingerprint(self.runtime.layers, source)
        device = self.runtime._model.device
        for index, (_, module) in enumerate(self.runtime.layers):
            held = self.held_experts(index)
            mine = {}
            for key in expert_tensor_names(module):
                whole = module.__dict__.pop(key)
                mine[key] = torch.empty(len(held), *whole.shape[1:], dtype=whole.dtype, device=device)
            for slot, expert in enumerate(held):
                source.read(index, {key: t[slot : slot + 1] for key, t in mine.items()}, expert, expert + 1)
            for key, tensor in mine.items():
                module._parameters[key] = nn.Parameter(tensor, False)
        self.bytes_read = source.bytes_read

    def shard(self) -> None:
        """Keep this rank's experts and let go of the others'. The parameters become `[held, ...]`, in id order."""
        self.runtime.base_fingerprint = weight_fingerprint(self.runtime.layers)
        for index, (name, module) in enumerate(self.runtime.layers):
            check_module(name, module)
            held = torch.tensor(self.held_experts(index))
            for key in expert_tensor_names(module):
                whole = module._parameters[key]
                assert whole is not None
                if whole.shape[0] == len(held) and len(held) != self.runtime.num_experts:
                    continue  # loaded sharded
                module._parameters[key] = nn.Parameter(whole.detach()[held.to(whole.device)].clone(), False)

    def plan(self, layer: int, module: nn.Module) -> LayerPlan:
        """The layer's plan, made anew when united experts were attached or the placement changed."""
        child = module._modules.get("united")
        united = int(child.down_proj.shape[0]) if child is not None else 0  # type: ignore[union-attr, index]
        found = self._plans[layer]
        if found is None or len(found.hosts) != self.runtime.num_experts + united:
            found = LayerPlan(self.placement.hosts[layer], united, self.rank, module.down_proj.device)  # type: ignore[arg-type]
            self._plans[layer] = found
        return found

    def rebalance(self, placement: ExpertPlacement) -> int:
        """Move weights to a new placement between two steps (all ranks call it, with the same one).

        Returns: how many expert weights this rank received, over all layers.
        """
        change = Rebalance(self, lambda: placement, self.group)
        with torch.no_grad():
            change.run()
        return change.finish()

    def take(self, placement: ExpertPlacement) -> None:
        """The weights lie as `placement` says from now on; see `Rebalance.finish`."""
        self.placement = placement
        self._plans = [None] * self.runtime.num_layers

    # ------------------------------------------------------------- a step

    def begin(self, tokens: int, phase: str) -> str:
        """Tell the group what this rank brings to the forward pass. Returns the step's phase: "prefill" if any rank has
        one.

        Raises:
            MoEOptError: ranks with different brownout settings; all ranks raise it.
        """
        device = self.runtime.device
        settings = [*(self.runtime.brownout(name).threshold for name in _PHASES), self.settings_digest()]
        mine = torch.tensor([tokens, _PHASES.index(phase), *settings], dtype=torch.float64, device=device)
        headers = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(headers, mine, group=self.group)
        rows = torch.stack(headers).cpu()
        if (rows[:, 2:4] != rows[0, 2:4]).any():
            raise MoEOptError(
                f"brownout thresholds differ between the ranks of the group ({rows[:, 2:4].tolist()}): set them alike"
            )
        if (rows[:, 2:4] < 1).any() and (rows[:, 4] != rows[0, 4]).any():
            raise MoEOptError("strategy, keep rule, layers or united experts differ between the ranks: set them alike")
        self._sizes = rows[:, 0].to(torch.int64).tolist()
        self._phase = _PHASES[int(rows[:, 1].max())]
        return self._phase

    def settings_digest(self) -> int:
        """A number for what brownout does here apart from the thresholds; ranks must agree on it."""
        found = [
            (s.strategy, s.keep, None if s.layers is None else tuple(sorted(s.layers)))
            for s in map(self.runtime.brownout, _PHASES)
        ]
        united = self.runtime.united_config
        return zlib.crc32(repr((found, None if united is None else united.ways)).encode())

    def run(
        self,
        layer: int,
        module: nn.Module,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        valid: torch.Tensor | None,
        exact: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer for the whole group.

        Args: as of the experts function, this rank's tokens; valid, exact: bool [T] or None.

        Returns: [T, H], and the experts that this rank computed, int64 [tokens of all ranks, k], -1 elsewhere.
        """
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise MoEOptError("expert parallelism is for inference: run under torch.no_grad()")
        if torch.compiler.is_compiling():
            raise MoEOptError("expert parallelism does not go with torch.compile")
        tokens = hidden.shape[0]
        if not self._sizes or self._sizes[self.rank] != tokens:
            raise MoEOptError(
                f"the experts of rank {self.rank} were given {tokens} tokens, announced were {self._sizes}: call the "
                "model, not its layers"
            )
        routed = self._routes(ids.shape[1])
        gathered = gather_tokens(
            None if routed else hidden, ids.to(torch.int64), weights, valid, exact, self._sizes, self.group
        )
        self._count(layer, gathered)
        plan = self.plan(layer, module)
        chosen_ids, chosen_weights = self._after_brownout(layer, module, gathered)
        owner = self._owners(layer, plan, chosen_ids, gathered.total)
        mine = owner == self.rank
        local = torch.where(mine, plan.slot_of_expert[chosen_ids.clamp_min(0)], plan.num_held)
        gates = chosen_weights.masked_fill(~mine, 0)
        proxy = ExpertsProxy(module, self._storage(module))
        own = self.runtime.kernel if self.runtime.kernel in ("batched_mm", "fused") else "grouped_mm"
        kernel = stock_function(module, own)
        if gathered.hidden is None:
            goes = torch.stack([(owner == rank).any(1) for rank in range(self.num_ranks)], dim=1)
            exchange = TokenExchange(goes, self.rank, tokens, self.group)
            received = exchange.dispatch(hidden)
            rows = exchange.rows
            partial = kernel(proxy, received, local[rows], gates[rows]) if len(rows) else torch.empty_like(received)
            out = exchange.combine(partial)
        else:
            out = self._combine(kernel(proxy, gathered.hidden, local, gates), tokens)
        return out, torch.where(mine, chosen_ids, -1)

    def _routes(self, top_k: int) -> bool:
        """Whether this step's tokens go only to the ranks that compute for them. The same on all ranks."""
        if self.num_ranks == 1 or sum(self._sizes) <= self.config.decode_tokens:
            return False
        if self.config.prefill_dispatch == "auto":
            return share_of_ranks(top_k, self.num_ranks) <= _WORTH_ROUTING
        return self.config.prefill_dispatch == "all-to-all"

    def _count(self, layer: int, gathered: Gathered) -> None:
        if self.load_counts.device != gathered.ids.device:
            self.load_counts = self.load_counts.to(gathered.ids.device)
        routed = gathered.ids * gathered.valid.unsqueeze(1)
        real = gathered.valid.unsqueeze(1).expand_as(routed).reshape(-1).to(torch.float64)
        self.load_counts[layer].scatter_add_(0, routed.reshape(-1), real)

    def _after_brownout(self, layer: int, module: nn.Module, gathered: Gathered) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and weights of all tokens after brownout, the same on every rank; padding has slot -1."""
        delegation = self.runtime.delegate_gathered(
            layer, module, self._phase, gathered.ids, gathered.weights, gathered.valid, gathered.exact
        )
        ids, weights = (gathered.ids, gathered.weights) if delegation is None else delegation
        return torch.where(gathered.valid.unsqueeze(1), ids, -1), weights

    def _owners(self, layer: int, plan: LayerPlan, ids: torch.Tensor, total: int) -> torch.Tensor:
        """int64 like ids: the rank that computes each assignment, -1 for none."""
        if self.method == "eplb" or total > self.config.decode_tokens:
            self.activated[layer] = None
            return torch.where(ids >= 0, split_evenly(ids, plan.hosts_on_device), -1)
        experts = len(plan.hosts)
        if plan.device_replicas is not None and self.method == "metro":
            from moe_opt.modeling.kernels.metro import choose_on_device

            bins = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
            flat = torch.where(ids < 0, experts, ids).reshape(-1)
            counts = bins.scatter_add_(0, flat, torch.ones_like(flat))[:experts]
            choice = choose_on_device(counts, plan.device_replicas).to(torch.int64)
        else:
            on_host = ids.cpu().numpy().reshape(-1)
            tokens = np.bincount(on_host[on_host >= 0], minlength=experts)
            choice = torch.from_numpy(plan.table.choose(tokens, self.method)).to(ids.device)
        self.activated[layer] = choice
        return torch.where(ids >= 0, choice[ids.clamp_min(0)].to(torch.int64), -1)

    def _storage(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """This rank's originals, then the united experts."""
        child = module._modules.get("united")
        if child is None:
            return expert_tensors(module)
        pool = self.runtime._pool(module, child)
        if pool is not None:
            return pool.weights
        return {key: torch.cat([value, getattr(child, key)]) for key, value in expert_tensors(module).items()}

    def _combine(self, partial: torch.Tensor, tokens: int) -> torch.Tensor:
        """Sum the ranks' parts [all tokens, H]; each rank takes its own rows."""
        if self.num_ranks == 1:
            return partial[:tokens]
        width = partial.shape[0] // self.num_ranks
        out = partial.new_empty((width, partial.shape[1]))
        reduce_scatter(out, partial.contiguous(), group=self.group)
        return out[:tokens]

    @torch.no_grad()
    def idle(self) -> None:
        """Take part in one forward pass of the others with nothing of one's own (one token of padding)."""
        model = self.runtime._model
        with self.runtime.batch([-1], phase="decode"):
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.runtime.device), use_cache=False)


def check_module(name: str, module: nn.Module) -> None:
    """Refuse experts whose weights are not plain parameters in memory.

    Raises:
        ConfigError
    """
    if hasattr(module, "_hf_hook"):
        raise ConfigError(f"{name} is offloaded by accelerate (device_map): expert parallelism needs it in memory")
    for key in expert_tensor_names(module):
        if type(module._parameters.get(key)) is not nn.Parameter:
            raise ConfigError(
                f"{name}.{key} is not a plain parameter (an adapter or a quantizer wraps it): expert parallelism "
                "does not go with that"
            )


def _require_processes() -> None:
    """A process group, made from the launcher's environment where there is none yet."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "expert_parallel needs one process per rank: start with `torchrun --nproc-per-node N script.py` "
            "(or `accelerate launch`), or call torch.distributed.init_process_group first"
        )
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
