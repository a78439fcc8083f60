"""`model.moe_opt`: what a loaded model is asked to do, step by step, and what it did."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_opt.config import MoEOptConfig
from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.modeling.brownout import (
    KEEP_RULES,
    PER_TOKEN_STRATEGIES,
    STRATEGIES,
    Delegation,
    delegate_per_group,
    delegate_per_token,
)
from moe_opt.modeling.experts import (
    STATE_ATTRIBUTE,
    UNITED_ATTRIBUTE,
    ExpertsProxy,
    LayerState,
    expert_tensors,
    find_moe_layers,
    prepare_fused,
    run_chosen,
    stock_function,
)
from moe_opt.modeling.phase_settings import PHASES, PhaseSettings, check_phase, checked_layers, checked_threshold
from moe_opt.modeling.recorder import ExpertRecorder
from moe_opt.modeling.router_scores import RouterScores
from moe_opt.modeling.step import ForwardContext, StepStats, holds_tokens, valid_tokens
from moe_opt.modeling.united import UnitedExperts, UnitedExpertsConfig
from moe_opt.modeling.united_weights import ExpertPool, UnitedWeights, united_weights

if TYPE_CHECKING:
    from moe_opt.modeling.async_ep import StreamedExperts
    from moe_opt.modeling.expert_parallel import ExpertParallel

_UNSET: Any = object()  # "leave as it is", where None has a meaning of its own


class MoERuntime:
    """Handle of a loaded model. Settings apply to the next forward pass; nothing here moves a weight but
    `install_united` and `remove_united`.

    Attributes:
        config: `MoEOptConfig`. layers: (name, experts module) in forward order. num_layers, num_experts: ints.
        united_config: config of the attached united experts, or None.
    """

    def __init__(self, model: nn.Module, config: MoEOptConfig) -> None:
        self.config = config
        self.layers: list[tuple[str, nn.Module]] = []
        self.recorders: list[ExpertRecorder] = []
        self.united_config: UnitedExpertsConfig | None = None
        self.kernel = config.kernels
        self._model = model
        self._settings = {phase: PhaseSettings() for phase in PHASES}
        self._threshold_tensors: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._context: ForwardContext | None = None
        self._given: ForwardContext | None = None
        self._expected_valid: torch.Tensor | None = None
        self._thread = 0
        self._last: StepStats | None = None
        self._scores: RouterScores | None = None
        self._error_per_expert: list[torch.Tensor | None] = []
        self.expert_parallel: ExpertParallel | None = None
        self.async_ep: StreamedExperts | None = None
        self.base_fingerprint: list[list[float]] | None = None  # of all experts, where this process lets go of some
        self.bind(model)
        base = getattr(model, "base_model", model)
        base.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        base.register_forward_hook(self._after_forward, always_call=True)

    def bind(self, model: nn.Module) -> None:
        """Find the MoE layers (again, after a quantizer replaced modules) and give each its index."""
        self.layers = find_moe_layers(model)
        if self.config.kernels == "auto":
            self.kernel = model.get_correct_experts_implementation(None)
        elif self.config.kernels == "fused":
            prepare_fused()
        self._error_per_expert = [None] * len(self.layers)
        for index, (name, module) in enumerate(self.layers):
            setattr(module, STATE_ATTRIBUTE, LayerState(self, index, name))
        outside = [i for i in self.config.brownout_layers or [] if i >= len(self.layers)]
        if outside:
            raise ConfigError(
                f"moe_opt: brownout_layers names layer {outside[0]}, but the model has {len(self.layers)} MoE layers"
            )

    # ------------------------------------------------------------- what it is

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        return int(self.layers[0][1].num_experts)

    @property
    def top_k(self) -> int:
        """Routed experts per token, from the model's config."""
        config = self._model.config.get_text_config()
        for key in (
            "num_experts_per_tok",
            "num_experts_per_token",
            "top_k_experts",
            "moe_k",
            "moe_topk",
            "top_k",
        ):
            value = getattr(config, key, None)
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, int):
                return value
        raise MoEOptError(f"the config of {type(self._model).__name__} does not say how many experts a token takes")

    @property
    def device(self) -> torch.device:
        """Device of the first MoE layer's weights; where they are offloaded, the device they run on."""
        if self.async_ep is not None:
            return self.async_ep.device
        module = self.layers[0][1]
        hook = getattr(module, "_hf_hook", None)
        execution = getattr(hook, "execution_device", None)
        if execution is not None:
            return torch.device(execution)
        device = module.down_proj.device
        return torch.device("cpu") if device.type == "meta" else device

    @property
    def last_step(self) -> StepStats:
        """Statistics of the last forward pass."""
        if self._last is None:
            raise MoEOptError("no forward pass yet: run the model once, then read last_step")
        return self._last

    # ------------------------------------------------------------- brownout

    def brownout(self, phase: str) -> PhaseSettings:
        """The settings of one phase."""
        check_phase(phase)
        return self._settings[phase]

    def set_brownout(
        self,
        threshold: float = _UNSET,
        strategy: str = _UNSET,
        phase: str | None = None,
        keep: str = _UNSET,
        layers: Sequence[int] | None = _UNSET,
    ) -> None:
        """Change brownout from the next forward pass on. What is left out stays as it is.

        Args:
            threshold: in [0, 1]; 1 is exact output. strategy: "zero" | "full" | "partial" | "reroute" | "top-k".
            phase: "prefill", "decode" or None for both.
            keep: which originals a browned-out step keeps: those with most tokens ("count", the paper), most gate mass
                ("mass"), or highest predicted output error of their stand-in ("error"), at equal numbers.
            layers: indices of MoE layers that may brown out; None lifts the restriction (`brownout_layers` of the
                config stays in force).

        Raises:
            ConfigError: before anything is changed.
        """
        if phase is not None:
            check_phase(phase)
        changes: dict[str, Any] = {}
        if threshold is not _UNSET:
            changes["threshold"] = checked_threshold(threshold)
            if changes["threshold"] < 1 and self.async_ep is not None:
                raise ConfigError(
                    "brownout saves nothing while whole layers are streamed (async_ep): every expert's weights move "
                    "whether it is read or not; keep the threshold at 1 or load without async_ep"
                )
        if strategy is not _UNSET:
            if strategy not in STRATEGIES:
                raise ConfigError(f"unknown brownout strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
            if strategy == "reroute" and self.expert_parallel is not None:
                raise ConfigError(
                    "reroute needs the router's scores of all ranks' tokens: under expert parallelism "
                    "choose partial, full or top-k"
                )
            changes["strategy"] = strategy
        if keep is not _UNSET:
            if keep not in KEEP_RULES:
                raise ConfigError(f"unknown keep rule {keep!r}; choose one of {', '.join(KEEP_RULES)}")
            changes["keep"] = keep
        if layers is not _UNSET:
            changes["layers"] = None if layers is None else checked_layers(layers, self.num_layers)
        new = {
            name: dataclasses.replace(self._settings[name], **changes)
            for name in (PHASES if phase is None else (phase,))
        }
        for settings in new.values():
            if settings.active and settings.strategy == "partial" and self.united_config is None:
                raise ConfigError(
                    "strategy 'partial' delegates to united experts and none are attached: "
                    "attach_united_experts(model, united), or choose 'full', 'reroute' or 'top-k'"
                )
        self._settings.update(new)
        for device in {self._layer_device(module) for _, module in self.layers}:
            for name in PHASES:  # made here, so that a compiled forward pass never reads the number itself
                self._threshold_tensor(name, device).fill_(self._settings[name].threshold)
        wants_scores = any(s.active and s.strategy == "reroute" for s in self._settings.values())
        if wants_scores and self._scores is None:
            self._scores = RouterScores(self._model, self.layers, self.num_experts)
        elif not wants_scores and self._scores is not None:
            self._scores.remove()
            self._scores = None

    def _active_settings(self, index: int, phase: str) -> PhaseSettings | None:
        settings = self._settings[phase]
        if not settings.active or (settings.layers is not None and index not in settings.layers):
            return None
        allowed = self.config.brownout_layers
        return None if allowed is not None and index not in allowed else settings

    def _threshold(self, phase: str, device: torch.device) -> torch.Tensor | float:
        """A float on the CPU; elsewhere, and for a compiler, a 0-d tensor that changes in place, so that neither a
        captured graph nor a compiled one has to be built again."""
        if device.type == "cpu" and not torch.compiler.is_compiling():
            return self._settings[phase].threshold
        return self._threshold_tensor(phase, device)

    def _threshold_tensor(self, phase: str, device: torch.device) -> torch.Tensor:
        key = (phase, device)
        if key not in self._threshold_tensors:
            with torch.inference_mode(False):
                self._threshold_tensors[key] = torch.full(
                    (), self._settings[phase].threshold, dtype=torch.float64, device=device
                )
        return self._threshold_tensors[key]

    # ------------------------------------------------------------- united experts

    def install_united(self, united: UnitedExperts) -> None:
        """Put checked united experts into the layers (`attach_united_experts` does the checking)."""
        self._remove_modules()
        for index, (name, module) in enumerate(self.layers):
            reference = module.down_proj
            device = self._layer_device(module)
            tensors = {
                key: value.detach().to(device=device, dtype=reference.dtype).clone()
                for key, value in united.tensors[index].items()
            }
            child = UnitedWeights(tensors, united.group_of_expert(index).to(device))
            setattr(module, UNITED_ATTRIBUTE, child)
            self._ignored_keys().update(f"{name}.{UNITED_ATTRIBUTE}.{key}" for key in tensors)
        self.united_config = united.config

    def remove_united(self) -> None:
        """Take the united experts off and return to exact output."""
        self._remove_modules()
        self._settings = {name: dataclasses.replace(s, threshold=1.0) for name, s in self._settings.items()}
        for tensor in self._threshold_tensors.values():
            tensor.fill_(1.0)

    def _remove_modules(self) -> None:
        for name, module in self.layers:
            united = united_weights(module)
            child = module._modules.pop(UNITED_ATTRIBUTE, None)
            if child is None:
                continue
            if united is not None and united.pool is not None:  # give the originals a storage of their own again
                united.pool = None
                for parameter in module._parameters.values():
                    if parameter is not None:
                        parameter.data = parameter.data.clone()
            self._ignored_keys().difference_update(
                f"{name}.{UNITED_ATTRIBUTE}.{key}" for key, _ in child.named_parameters()
            )
        self._error_per_expert = [None] * self.num_layers
        self.united_config = None

    def _ignored_keys(self) -> set[str]:
        """Keys that the model's own shards leave out: united experts have a file of their own."""
        if not isinstance(self._model._keys_to_ignore_on_save, set):
            self._model._keys_to_ignore_on_save = set(self._model._keys_to_ignore_on_save or ())
        return self._model._keys_to_ignore_on_save

    def _layer_device(self, module: nn.Module) -> torch.device:
        hook = getattr(module, "_hf_hook", None)
        execution = getattr(hook, "execution_device", None)
        if execution is not None:
            return torch.device(execution)
        device = module.down_proj.device
        return torch.device("cpu") if device.type == "meta" else device

    # ------------------------------------------------------------- recording and batches

    def record(self, num_requests: int) -> ExpertRecorder:
        """Count the router's choices per request while the context is open. Row b of a [B, S] batch is request b;
        packed callers name the request of each token with `batch`. Masked padding is ignored."""
        return ExpertRecorder(self, num_requests)

    @contextlib.contextmanager
    def batch(
        self,
        request_ids: torch.Tensor | Sequence[int],
        phase: str = "decode",
        exact: torch.Tensor | Sequence[bool] | None = None,
    ) -> Iterator[None]:
        """Describe the packed batch of the forward passes inside.

        Args:
            request_ids: int64 [T], the request of each token, -1 = ignore (padding: neither counted nor browned out).
            phase: a step with any prefill token is a "prefill" step. exact: bool [T], tokens that keep their experts.
        """
        check_phase(phase)
        rows = torch.as_tensor(request_ids, dtype=torch.int64, device=self.device).reshape(-1)
        exact_rows = None
        if exact is not None:
            exact_rows = torch.as_tensor(exact, dtype=torch.bool, device=self.device).reshape(-1)
            if exact_rows.shape != rows.shape:
                raise ConfigError(f"batch: {exact_rows.numel()} exact flags for {rows.numel()} request ids")
        outer = self._given
        self._given = ForwardContext(phase, valid=rows >= 0, rows=rows, exact=exact_rows)
        try:
            yield
        finally:
            self._given = outer

    def expect_padding(self, mask: Any, inputs: Any) -> None:
        """Remember the padding of the forward pass that `generate` is about to make. mask: [B, >= S] or anything."""
        ids = inputs.get("input_ids")
        ids = inputs.get("inputs_embeds") if ids is None else ids
        self._expected_valid = None if ids is None else valid_tokens(mask, (int(ids.shape[0]), int(ids.shape[1])))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._claim_for_this_thread()
        inputs = kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs.get("inputs_embeds")
        if inputs is None and args:
            inputs = args[0]
        expected, self._expected_valid = self._expected_valid, None
        if self._given is not None:
            given = self._given
            if (
                inputs is not None
                and given.rows is not None
                and given.rows.numel() != inputs.shape[0] * inputs.shape[1]
            ):
                raise ConfigError(
                    f"batch names the requests of {given.rows.numel()} tokens, but the forward pass has "
                    f"{inputs.shape[0]} x {inputs.shape[1]}"
                )
            self._context = ForwardContext(given.phase, given.valid, given.rows, given.exact)
        elif inputs is None:
            self._context = ForwardContext("prefill")
        else:
            shape = (int(inputs.shape[0]), int(inputs.shape[1]))
            past = kwargs.get("past_key_values")
            decoding = shape[1] == 1 and past is not None and holds_tokens(past)
            valid = valid_tokens(kwargs["attention_mask"] if "attention_mask" in kwargs else _second(args), shape)
            if valid is None and expected is not None and expected.numel() == shape[0] * shape[1]:
                valid = expected
            self._context = ForwardContext("decode" if decoding else "prefill", valid, shape=shape)
        if self.expert_parallel is not None:
            if inputs is None:
                raise MoEOptError("expert parallelism needs input_ids or inputs_embeds as an argument of the model")
            self.expert_parallel.begin(int(inputs.shape[0]) * int(inputs.shape[1]), self._context.phase)
        slots = 2 * self.num_experts  # never more united experts than originals
        self._last = StepStats(self._context, self.num_layers, slots, self.num_experts)

    def _claim_for_this_thread(self) -> None:
        """A step's context is one per model; two passes at once would read each other's padding and exact rows."""
        thread = threading.get_ident()
        if self._context is not None and self._context.open and self._thread != thread:
            raise MoEOptError(
                "this model is in a forward pass of another thread: a model loaded with moe_opt serves one pass at a "
                "time (give each thread a copy, or take turns)"
            )
        self._thread = thread

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        context, stats = self._context, self._last
        if context is None or not context.open:
            return
        context.open = False
        if output is not None and stats is not None:
            for recorder in self.recorders:
                recorder.add(context, stats._routed)

    # ------------------------------------------------------------- one layer of one step

    def run_layer(
        self,
        index: int,
        module: nn.Module,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """One layer's experts: the stock kernel on the router's choice, or on what brownout makes of it."""
        context = self._context
        stats = self._last if context is not None and context.open else None
        if stats is not None:
            stats._routed[index] = ids
            stats._computed[index] = ids
        if self.async_ep is not None:
            return self.async_ep.run(index, module, hidden, ids, weights)
        if self.expert_parallel is not None:
            return self._run_layer_in_group(index, module, hidden, ids, weights, stats)
        settings = self._active_settings(index, context.phase if context is not None else "prefill")
        if settings is None:
            return stock_function(module, self.kernel)(module, hidden, ids, weights)
        delegation = self._delegate(index, settings, context, module, ids, weights)
        if delegation is None:
            return stock_function(module, self.kernel)(module, hidden, ids, weights)
        if stats is not None:
            stats._computed[index] = delegation.ids
        return self._run_delegated(module, hidden, delegation)

    def _run_layer_in_group(
        self,
        index: int,
        module: nn.Module,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        stats: StepStats | None,
    ) -> torch.Tensor:
        assert self.expert_parallel is not None
        context = self._context
        valid = context.valid_for(ids.shape[0], ids.device) if context is not None else None
        exact = context.exact_for(ids.shape[0], ids.device) if context is not None else None
        out, computed = self.expert_parallel.run(index, module, hidden, ids, weights, valid, exact)
        if stats is not None:
            stats._read[index] = computed
        return out

    def delegate_gathered(
        self,
        index: int,
        module: nn.Module,
        phase: str,
        ids: torch.Tensor,
        weights: torch.Tensor,
        valid: torch.Tensor,
        exact: torch.Tensor | None,
    ) -> Delegation | None:
        """What brownout makes of the tokens of a whole expert-parallel group; None where they stay as routed."""
        settings = self._active_settings(index, phase)
        if settings is None:
            return None
        return self._delegate_tokens(index, settings, phase, module, ids, weights, valid, exact)

    def _delegate(
        self,
        index: int,
        settings: PhaseSettings,
        context: ForwardContext | None,
        module: nn.Module,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> Delegation | None:
        tokens = ids.shape[0]
        phase = context.phase if context is not None else "prefill"
        valid = context.valid_for(tokens, ids.device) if context is not None else None
        exact = context.exact_for(tokens, ids.device) if context is not None else None
        return self._delegate_tokens(index, settings, phase, module, ids.to(torch.int64), weights, valid, exact)

    def _delegate_tokens(
        self,
        index: int,
        settings: PhaseSettings,
        phase: str,
        module: nn.Module,
        ids: torch.Tensor,
        weights: torch.Tensor,
        valid: torch.Tensor | None,
        exact: torch.Tensor | None,
    ) -> Delegation | None:
        tokens = ids.shape[0]
        threshold = self._threshold(phase, ids.device)
        if settings.strategy in PER_TOKEN_STRATEGIES:
            scores = self._scores.of_layer(index, tokens) if self._scores is not None else None
            return delegate_per_token(
                ids, weights, threshold, self.num_experts, settings.strategy,
                scores=scores, valid=valid, exact=exact,
            )  # fmt: skip
        united = united_weights(module)
        groups = (
            united.group_of_expert
            if united is not None
            else torch.arange(self.num_experts, device=ids.device)  # only "full" runs without united experts
        )
        error = self._stand_in_error(index, module, united) if settings.keep == "error" else None
        return delegate_per_group(
            ids, weights, threshold, groups, settings.strategy,
            valid=valid, exact=exact, keep=settings.keep, error_per_expert=error,
        )  # fmt: skip

    def _stand_in_error(self, index: int, module: nn.Module, united: UnitedWeights | None) -> torch.Tensor | None:
        """float [E]: squared output error of each expert's stand-in, from the checkpoint's calibration if it has one,
        else the squared distance of the down projections relative to the layer's mean."""
        if united is None or self.united_config is None:
            return None
        if self._error_per_expert[index] is None:
            calibrated = self.united_config.metrics.get("error_per_expert")
            if calibrated is not None:
                error = torch.tensor(calibrated[index], dtype=torch.float32)
            else:
                with torch.no_grad():
                    stand_in = united.down_proj[united.group_of_expert]
                    error = (module.down_proj.float() - stand_in.float()).square().flatten(1).sum(1).cpu()
            error = error / error.mean().clamp_min(1e-12)
            self._error_per_expert[index] = error.to(united.group_of_expert.device)
        return self._error_per_expert[index]

    def _run_delegated(self, module: nn.Module, hidden: torch.Tensor, delegation: Delegation) -> torch.Tensor:
        kernel = stock_function(module, self.kernel if self.kernel in ("batched_mm", "fused") else "grouped_mm")
        ids, weights = delegation
        count = int(module.num_experts)
        child = module._modules.get(UNITED_ATTRIBUTE)
        if child is None:
            originals = ExpertsProxy(module, expert_tensors(module))
            return kernel(originals, hidden, torch.where(ids < 0, count, ids), weights)
        pool = self._pool(module, child)
        if pool is not None:
            both = pool.proxy(module)
            if self.kernel != "fused":  # that one knows what -1 is
                ids = torch.where(ids < 0, both.num_experts, ids)
            return kernel(both, hidden, ids, weights)
        originals = ExpertsProxy(module, expert_tensors(module))
        stand_ins = ExpertsProxy(module, child(hidden))
        if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            # training: each of the two would carry all assignments along
            own = torch.where(ids < count, ids, -1)
            return run_chosen(kernel, originals, hidden, own, weights) + run_chosen(
                kernel, stand_ins, hidden, ids - count, weights
            )
        own = torch.where((ids < 0) | (ids >= count), count, ids)
        other = torch.where(ids < count, stand_ins.num_experts, ids - count)
        out = kernel(originals, hidden, own, weights.masked_fill(own == count, 0))
        rest = weights.masked_fill(other == stand_ins.num_experts, 0)
        return out + kernel(stand_ins, hidden, other, rest)

    def _pool(self, module: nn.Module, child: nn.Module) -> ExpertPool | None:
        """The layer's shared storage, built on first use; None where parameters cannot or must not share one."""
        if not isinstance(child, UnitedWeights):  # an adapter wraps it: its weights are computed, not stored
            return None
        if torch.compiler.is_compiling():
            return child.pool
        if torch.is_grad_enabled() and any(
            p.requires_grad for p in (*module._parameters.values(), *child._parameters.values()) if p is not None
        ):
            return None  # gradients have to reach the parameters themselves
        pool = child.pool
        if pool is not None and not pool.intact(module, child):
            pool = None
        if pool is None and ExpertPool.possible(module, child):
            pool = ExpertPool(module, child)
        child.pool = pool
        return pool


def _second(args: tuple[Any, ...]) -> Any:
    """The attention mask of a call with positional arguments: every base model takes (input_ids, attention_mask)."""
    return args[1] if len(args) > 1 else None
