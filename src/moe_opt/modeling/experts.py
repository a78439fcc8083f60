"""Finds the MoE layers of any model, and the one experts function that serves them all.

Transformers routes every family of its experts interface through
`ALL_EXPERTS_FUNCTIONS[name](module, hidden[T, H], top_k_index[T, k], top_k_weights[T, k])`. That call knows neither
the layer nor the phase, so each experts module carries a `LayerState` that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_opt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from moe_opt.modeling.runtime import MoERuntime

IMPLEMENTATION = "moe_opt"
STATE_ATTRIBUTE = "_moe_opt_state"
UNITED_ATTRIBUTE = "united"

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
_FUSED_TOKENS = 256
_EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class LayerState:
    """What an experts module knows about itself: its index among the MoE layers, and the runtime it belongs to."""

    def __init__(self, runtime: MoERuntime, index: int, name: str) -> None:
        self.runtime = runtime
        self.index = index
        self.name = name


def is_experts_module(module: nn.Module) -> bool:
    """True for a module whose class carries Transformers' `@use_experts_implementation`."""
    return (
        hasattr(type(module).forward, "__wrapped__")
        and hasattr(module, "has_gate")
        and hasattr(module, "is_transposed")
        and hasattr(module, "num_experts")
    )


def find_moe_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The (name, experts module) pairs of a model in forward order.

    Raises:
        UnsupportedModelError: dense models, configurations without MoE layers, families outside the interface.
    """
    layers = [(name, module) for name, module in model.named_modules() if is_experts_module(module)]
    if not layers:
        raise UnsupportedModelError(_why_no_layers(type(model), getattr(model, "config", None)))
    counts = {int(module.num_experts) for _, module in layers}
    if len(counts) > 1:
        raise UnsupportedModelError(
            f"moe_opt needs the same number of routed experts in every MoE layer, but {type(model).__name__} has "
            f"{sorted(counts)}"
        )
    return layers


def check_family(model_class: Any, config: Any) -> None:
    """Refuse a class that can have no MoE layer of the interface, before any weight is read."""
    if not model_class._can_set_experts_implementation():
        raise UnsupportedModelError(_why_no_layers(model_class, config))


def _config_expert_count(config: Any) -> int:
    """The number of routed experts that a config declares, 0 for a dense one."""
    if config is None:
        return 0
    nested = [config, getattr(config, "text_config", None), getattr(config, "ffn_config", None)]
    found = [
        value
        for part in nested
        if part is not None
        for key in _EXPERT_COUNT_KEYS
        if isinstance(value := getattr(part, key, None), int)
    ]
    return max(found, default=0)


def _why_no_layers(model_class: Any, config: Any) -> str:
    name = model_class.__name__
    family = getattr(config, "model_type", "unknown")
    if _config_expert_count(config) <= 1:
        return (
            f"{name} (model_type {family!r}) is a dense model: it has no routed experts for moe_opt to act on. "
            "Load it without moe_opt."
        )
    if not model_class._can_set_experts_implementation():
        return (
            f"{name} (model_type {family!r}) keeps its experts outside Transformers' experts interface "
            "(@use_experts_implementation), which is the one hook that moe_opt uses. Load it without moe_opt."
        )
    return (
        f"{name} (model_type {family!r}) declares experts, but no layer of this configuration has an experts module "
        "that the experts interface serves (all layers dense, or the experts were replaced by a quantizer). Load it "
        "without moe_opt."
    )


def stock_function(module: nn.Module, kernel: str) -> Callable[..., torch.Tensor]:
    """The experts function for `kernel`: "eager" is the class's own loop, "fused" ours, the others Transformers'."""
    if kernel == "fused":
        return fused_or_grouped
    if kernel == "eager":
        return type(module).forward.__wrapped__  # type: ignore[attr-defined]
    return ALL_EXPERTS_FUNCTIONS[kernel]


def prepare_fused() -> None:
    """Start-up work of the fused kernels, so that the first forward pass does not wait for a C++ compiler."""
    if not torch.cuda.is_available():  # with a GPU the model is on its way there, and Triton compiles for itself
        from moe_opt.modeling.kernels.native import library

        library.load()


def fused_or_grouped(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Our fused kernels for decode-sized steps: Triton on a GPU, C++ on a CPU. `grouped_mm` for everything else: many
    tokens, gradients, compiled graphs, layouts that are not fused. `module` may be an `ExpertsProxy`."""
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        fused = _fused_on_cpu if hidden_states.device.type == "cpu" else _fused_in_triton
        out = fused(module, hidden_states, top_k_index, top_k_weights)
        if out is not None:
            return out
    if isinstance(module, ExpertsProxy):  # its dropped assignments are sentinels there
        top_k_index = torch.where(top_k_index < 0, module.num_experts, top_k_index)
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)


def _fused_on_cpu(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
    from moe_opt.modeling.kernels.native_experts import native_experts_or_none

    return native_experts_or_none(module, hidden, ids, weights)


def _fused_in_triton(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor | None:
    if hidden.shape[0] > _FUSED_TOKENS:
        return None
    from moe_opt.modeling.kernels.fused_experts import FusedWeights, fused_experts

    storage = FusedWeights.of(module)
    return None if storage is None else fused_experts(hidden, ids, weights, storage)


class ExpertsProxy:
    """Stands for an experts module with other weights: the shape that Transformers' kernels read, and no more.

    `num_experts` slots; ids equal to `num_experts` are sentinels: kernels sort them behind all groups and spend no
    matrix product on them (`_is_expert_parallel` switches that on), so a dropped assignment costs no GEMM.
    """

    def __init__(self, module: nn.Module, weights: dict[str, torch.Tensor]) -> None:
        self.module = module
        self.num_experts = next(iter(weights.values())).shape[0]
        self.has_gate = module.has_gate
        self.has_bias = module.has_bias
        self.is_transposed = module.is_transposed
        # Transformers 5.17 knows neither post norms nor the sentinel switch (its sentinels are always on).
        self.has_post_expert_norm = getattr(module, "has_post_expert_norm", False)
        self._is_expert_parallel = True
        self.__dict__.update(weights)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.module._apply_gate(gate_up)

    def act_fn(self, up: torch.Tensor) -> torch.Tensor:
        return self.module.act_fn(up)

    def post_expert_norm(self, out: torch.Tensor) -> torch.Tensor:
        return self.module.post_expert_norm(out)


def run_chosen(
    kernel: Callable[..., torch.Tensor], module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`kernel` on the assignments whose id is not negative, and on no other row: fewer activations to hold and to
    differentiate. How many there are depends on the data, so a GPU would have to wait for the number.

    Args: hidden [T, H]; ids int64 [T, k]; weights [T, k]. Returns: [T, H].
    """
    token, choice = torch.nonzero(ids >= 0, as_tuple=True)
    out = torch.zeros_like(hidden)
    if not len(token):
        return out
    rows = kernel(module, hidden.index_select(0, token), ids[token, choice, None], weights[token, choice, None])
    return out.index_add(0, token, rows)


def expert_tensor_names(module: nn.Module) -> list[str]:
    """Names of the module's tensors with a leading expert dimension, weights first."""
    return [name for name in (*_WEIGHTS, *_BIASES) if getattr(module, name, None) is not None]


def expert_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's `[E, ...]` tensors as its kernels see them (after hooks and parametrisations)."""
    return {name: getattr(module, name) for name in expert_tensor_names(module)}


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function registered as "moe_opt": stock kernel unless the step browns out this layer.

    Args:
        hidden_states: [T, H]. top_k_index: int64 [T, k], the router's choice. top_k_weights: [T, k].

    Returns: [T, H], the weighted sum over each token's experts.
    """
    state: LayerState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is None:  # an experts module on its own, or one that was built after the runtime
        return stock_function(module, "grouped_mm")(module, hidden_states, top_k_index, top_k_weights)
    runtime = state.runtime
    return runtime.run_layer(state.index, module, hidden_states, top_k_index, top_k_weights)


def register() -> None:
    """Make `experts_implementation="moe_opt"` known to Transformers; harmless when repeated."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


register()
