"""`MoEOptimizedForCausalLM`: any MoE model of Transformers, with `model.moe_opt`.

A model is loaded by a dynamic subclass of the class that the auto mapping resolves. The subclass keeps the name and
module of its base, so that checkpoint conversions, `architectures` and loss lookup find what they always found.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers.auto import AutoQuantizationConfig

from moe_opt.config import KERNELS, MoEOptConfig
from moe_opt.errors import ConfigError, IncompatibleUnitedExpertsError, UnsupportedModelError
from moe_opt.modeling.experts import IMPLEMENTATION, check_family, prepare_fused
from moe_opt.modeling.runtime import MoERuntime
from moe_opt.modeling.united import UnitedExperts, attach_united_experts, holds_united_experts

# What the load under way asked for: `cls(config)` deep inside from_pretrained has no argument to carry it.
_REQUEST: contextvars.ContextVar[_Request | None] = contextvars.ContextVar("moe_opt_request", default=None)
_RUNTIME = "_moe_opt_runtime"
_HUB_KEYS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
_OWN_FOLDER = "."
_READ_QUANTISED = ("fp8", "mxfp4")  # checkpoints whose experts `expert_formats.py` decodes

logger = logging.getLogger(__name__)


class _Request:
    """The `moe_opt=` value of a load, resolved once the checkpoint's config is known."""

    def __init__(self, value: Any, kernels: str | None) -> None:
        self.value = value
        self.kernels = kernels
        self.reads_shard = False  # a rank of an expert-parallel group reads its own experts only

    def resolve(self, saved: Any) -> MoEOptConfig:
        config = MoEOptConfig.resolve(self.value, saved if isinstance(saved, Mapping) else None)
        if self.kernels is not None:
            config.kernels = self.kernels
        return config


class _MoEOptMixin:
    """What the dynamic subclass adds to a Transformers model."""

    _moe_opt_base: type

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        check_family(self._moe_opt_base, config)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        request = _REQUEST.get() or _Request(True, None)
        settings = request.resolve(getattr(config, "moe_opt", None))
        self.__dict__[_RUNTIME] = runtime = MoERuntime(self, settings)  # type: ignore[arg-type]
        if settings.async_ep is not None:
            self._leave_experts_out(runtime, settings)
        elif settings.expert_parallel is not None and request.reads_shard:
            self._strip(runtime)
        self.set_experts_implementation(IMPLEMENTATION)  # type: ignore[attr-defined]

    def _leave_experts_out(self, runtime: MoERuntime, settings: MoEOptConfig) -> None:
        """Before the weights are read: streamed experts are not among them."""
        from moe_opt.modeling.async_ep import needs_streaming
        from moe_opt.modeling.experts import expert_tensors

        assert settings.async_ep is not None
        if settings.united_experts is not None:
            raise ConfigError("moe_opt: united experts have no use while whole layers are streamed (async_ep)")
        if settings.async_ep.mode == "auto":
            experts = sum(
                value.numel() * value.element_size()
                for _, module in runtime.layers
                for value in expert_tensors(module).values()
            )
            everything = sum(p.numel() * p.element_size() for p in self.parameters())  # type: ignore[attr-defined]
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if not needs_streaming(experts, everything - experts, device):
                settings.async_ep = None
                return
            settings.async_ep.mode = "offload"
            logger.warning(
                "the model (%.1f GB) does not fit the free memory of %s: its experts (%.1f GB) are streamed "
                "(async_ep='offload')", everything / 1e9, device, experts / 1e9,
            )  # fmt: skip
        self._strip(runtime)

    def _strip(self, runtime: MoERuntime) -> None:
        from moe_opt.modeling.async_ep import strip_experts

        strip_experts(runtime.layers)
        ignored = getattr(self, "_keys_to_ignore_on_load_unexpected", None)
        self._keys_to_ignore_on_load_unexpected = {*(ignored or ()), r"experts\."}

    @property
    def moe_opt(self) -> MoERuntime:
        """The handle for brownout, recording and statistics."""
        return self.__dict__[_RUNTIME]

    def get_experts_implementation(self) -> dict[str, str | None]:
        """The kernels that run where nothing is browned out; `generate` reads this to choose one for decode."""
        found = super().get_experts_implementation()  # type: ignore[misc]
        return {key: self.moe_opt.kernel if name == IMPLEMENTATION else name for key, name in found.items()}

    def set_experts_implementation(self, experts_implementation: str | dict[str, str]) -> None:
        """Choose that kernel. The experts function itself stays moe_opt's, or brownout would end without a word."""
        wanted = experts_implementation
        if isinstance(wanted, dict):
            wanted = next((name for name in wanted.values() if name in KERNELS), IMPLEMENTATION)
        if wanted == IMPLEMENTATION:
            super().set_experts_implementation(IMPLEMENTATION)  # type: ignore[misc]
        elif wanted == "fused":
            self.moe_opt.kernel = wanted
            prepare_fused()
        elif wanted in KERNELS:
            self.moe_opt.kernel = self.get_correct_experts_implementation(  # type: ignore[attr-defined]
                None if wanted == "auto" else wanted
            )
        else:
            raise ConfigError(
                f"experts_implementation={wanted!r} does not go with moe_opt; choose one of {', '.join(KERNELS)}"
            )

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """As in Transformers; settings go to `config.json["moe_opt"]`, united experts to files of their own, which a
        plain `AutoModelForCausalLM` ignores."""
        runtime = self.moe_opt
        if runtime.expert_parallel is not None:
            raise ConfigError("this model holds one rank's experts only: load it without expert_parallel to save it")
        if runtime.async_ep is not None:
            raise ConfigError("this model's experts are streamed and not in it: load it without async_ep to save it")
        attached = runtime.united_config is not None
        settings = runtime.config.to_dict()
        if attached:
            settings.update(united_experts=_OWN_FOLDER, ways=runtime.united_config.ways)  # type: ignore[union-attr]
        elif settings.get("united_experts") == _OWN_FOLDER:  # they were taken off, and will not be in the new folder
            settings.pop("united_experts")
            settings.pop("ways", None)
        before = getattr(self.config, "moe_opt", None)  # type: ignore[attr-defined]
        self.config.moe_opt = settings  # type: ignore[attr-defined]
        main_process = kwargs.get("is_main_process", True)
        try:
            if attached and main_process and not os.path.isfile(save_directory):
                UnitedExperts.from_model(self).save_pretrained(save_directory, card=False)  # type: ignore[arg-type]
            return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        finally:
            if before is None:
                del self.config.moe_opt  # type: ignore[attr-defined]
            else:
                self.config.moe_opt = before  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Pickle looks a class up by module and name, and would find the base.
        return (_new_instance, (self._moe_opt_base,), self.__dict__)


def _new_instance(base: type) -> nn.Module:
    cls: Any = optimized_class(base)
    return cls.__new__(cls)


@functools.cache
def optimized_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The subclass of a Transformers model class that carries `moe_opt`."""
    if issubclass(base, _MoEOptMixin):
        return base
    body: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_moe_opt_base": base,
    }
    prepare = getattr(base, "prepare_inputs_for_generation", None)
    if prepare is not None:
        body["prepare_inputs_for_generation"] = _remembering_padding(prepare)
    return type(base.__name__, (_MoEOptMixin, base), body)


def _remembering_padding(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` turns its [B, S] mask into a 4-d one for static caches, in which padding can no longer be told."""

    @functools.wraps(prepare)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = prepare(self, *args, **kwargs)
        self.moe_opt.expect_padding(kwargs.get("attention_mask"), inputs)
        return inputs

    return prepare_inputs_for_generation


class _OptimizedMapping:
    """The causal-LM auto mapping with every class replaced by its optimized subclass."""

    def __getitem__(self, key: Any) -> Any:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[key]
        if isinstance(found, (list, tuple)):
            return tuple(optimized_class(cls) for cls in found)
        return optimized_class(found)

    def __contains__(self, key: Any) -> bool:
        return key in MODEL_FOR_CAUSAL_LM_MAPPING

    def __iter__(self) -> Iterator[Any]:
        return iter(MODEL_FOR_CAUSAL_LM_MAPPING)

    def keys(self) -> Any:
        return MODEL_FOR_CAUSAL_LM_MAPPING.keys()

    def register(self, key: Any, value: Any, exist_ok: bool = False) -> None:
        MODEL_FOR_CAUSAL_LM_MAPPING.register(key, value, exist_ok=exist_ok)


class MoEOptimizedForCausalLM(_BaseAutoModelClass):
    """Loads any MoE model of Transformers' experts interface; see `from_pretrained`."""

    _model_mapping = _OptimizedMapping()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        moe_opt: Any = True,
        **kwargs: Any,
    ) -> Any:
        """Load a checkpoint as `AutoModelForCausalLM.from_pretrained` does, and give it `model.moe_opt`.

        Args:
            pretrained_model_name_or_path: a folder or Hub id, stock or saved by moe_opt.
            moe_opt: True, a dict of settings or a `MoEOptConfig`. What is left out comes from
                `config.json["moe_opt"]`, if the checkpoint has it.
            **kwargs: anything `from_pretrained` takes. `experts_implementation` names the kernel that runs where
                nothing is browned out.

        Raises:
            UnsupportedModelError: dense models and families outside the experts interface, before weights are read.
            ConfigError, IncompatibleUnitedExpertsError: settings or united experts that do not fit.
        """
        request = _make_request(moe_opt, kwargs)
        hub = {key: kwargs[key] for key in _HUB_KEYS if kwargs.get(key) is not None}
        with_info = bool(kwargs.get("output_loading_info"))
        united = _load_named(request, hub)  # before the model's weights: a wrong name should not cost minutes
        source = str(pretrained_model_name_or_path)
        request.reads_shard = kwargs.get("device_map") is None and kwargs.get("quantization_config") is None
        _keep_modules(request, source, kwargs, hub)
        token = _REQUEST.set(request)
        try:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
            if not _read_shard(loaded[0] if with_info else loaded, request, source, hub):
                request.reads_shard = False  # stored in a way that only Transformers reads: whole, then
                loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        finally:
            _REQUEST.reset(token)
        _finish(loaded[0] if with_info else loaded, united, source, hub)
        return loaded

    @classmethod
    def from_config(cls, config: Any, *, moe_opt: Any = True, **kwargs: Any) -> Any:
        """Build a model with fresh weights, as `AutoModelForCausalLM.from_config` does."""
        request = _make_request(moe_opt, kwargs)
        united = _load_named(request, {})
        token = _REQUEST.set(request)
        try:
            # A copy: the experts implementation is written into the config, and the caller's may serve other models.
            model = super().from_config(copy.deepcopy(config), **kwargs)
        finally:
            _REQUEST.reset(token)
        _finish(model, united, None, {})
        return model


def _keep_modules(request: _Request, source: str, kwargs: dict[str, Any], hub: dict[str, Any]) -> None:
    """Where we read a quantised checkpoint's experts ourselves, Transformers must not put its own experts modules in
    the place of the model's; what it does read (attention, shared experts) it then dequantises."""
    if kwargs.get("quantization_config") is not None:
        return
    given = kwargs.get("config")
    try:
        config = given.to_dict() if given is not None else PretrainedConfig.get_config_dict(source, **hub)[0]
    except OSError:
        return  # no checkpoint there: from_pretrained says so best
    settings = request.resolve(config.get("moe_opt"))
    if settings.async_ep is None and settings.expert_parallel is None:
        return
    stored = config.get("quantization_config") or {}
    stored = stored if isinstance(stored, Mapping) else stored.to_dict()
    if stored.get("quant_method") in _READ_QUANTISED:
        kwargs["quantization_config"] = AutoQuantizationConfig.from_dict({**stored, "dequantize": True})


def _make_request(moe_opt: Any, kwargs: dict[str, Any]) -> _Request:
    if moe_opt is False or moe_opt is None:
        raise ConfigError("MoEOptimizedForCausalLM always optimizes: use AutoModelForCausalLM to load without moe_opt")
    MoEOptConfig.resolve(moe_opt)  # wrong settings fail here, before anything is read
    kernels = kwargs.pop("experts_implementation", None)
    if kernels == IMPLEMENTATION:
        kernels = None
    if kernels is not None and kernels not in KERNELS:
        raise ConfigError(
            f"experts_implementation={kernels!r} does not go with moe_opt; choose one of {', '.join(KERNELS)}"
        )
    return _Request(moe_opt, kernels)


def _load_named(request: _Request, hub: dict[str, Any]) -> UnitedExperts | None:
    """United experts that the caller named; those that a checkpoint names are found once it is loaded."""
    config = MoEOptConfig.resolve(request.value)
    if config.united_experts in (None, _OWN_FOLDER):
        return None
    options = {key: value for key, value in hub.items() if key not in ("revision", "subfolder")}
    return UnitedExperts.from_pretrained(str(config.united_experts), ways=config.ways, **options)


def _finish(model: Any, united: UnitedExperts | None, source: str | None, hub: dict[str, Any]) -> None:
    """After the weights are in: look the layers up once more (a quantizer may have replaced them), and attach."""
    runtime: MoERuntime = model.moe_opt
    runtime.bind(model)
    config = runtime.config
    if config.async_ep is not None:
        _stream_experts(model, runtime, source, hub)
    if config.expert_parallel is not None:
        from moe_opt.modeling.expert_parallel import ExpertParallel

        if runtime.expert_parallel is None:
            runtime.expert_parallel = ExpertParallel(runtime, config.expert_parallel)
            runtime.expert_parallel.shard()
    if config.united_experts is None:
        if config.ways is not None:
            raise ConfigError("moe_opt: ways is set but united_experts is not: say where they are")
        return
    if united is None and config.united_experts != _OWN_FOLDER:  # named by the checkpoint's config
        options = {key: value for key, value in hub.items() if key not in ("revision", "subfolder")}
        united = UnitedExperts.from_pretrained(config.united_experts, ways=config.ways, **options)
    if united is None:
        united = _load_from_own_folder(model, source, config.ways, hub)
    if united is None:
        # A stock model saved a config that was ours, or there is no checkpoint: nothing is lost but the stand-ins.
        if source is not None:
            logger.warning(
                "%s: config.json mentions united experts, but none are beside it; loading without them", source
            )
        config.united_experts = config.ways = None
        return
    attach_united_experts(model, united)


def _read_shard(model: Any, request: _Request, source: str, hub: dict[str, Any]) -> bool:
    """Give a rank of an expert-parallel group its experts. False if the checkpoint cannot be read expert by expert."""
    runtime: MoERuntime = model.moe_opt
    if runtime.config.expert_parallel is None or runtime.config.async_ep is not None or not request.reads_shard:
        return True
    from moe_opt.modeling.async_ep import checkpoint_folder
    from moe_opt.modeling.expert_parallel import ExpertParallel
    from moe_opt.modeling.expert_source import ExpertSource

    try:
        experts = ExpertSource(checkpoint_folder(source, hub), runtime.layers)
    except (UnsupportedModelError, ConfigError) as error:
        logger.info("every rank reads the whole checkpoint: %s", error)
        return False
    parallel = ExpertParallel(runtime, runtime.config.expert_parallel)
    parallel.load(experts)
    runtime.expert_parallel = parallel
    logger.info("rank %d read %.1f MB of experts", parallel.rank, experts.bytes_read / 1e6)
    return True


def _stream_experts(model: Any, runtime: MoERuntime, source: str | None, hub: dict[str, Any]) -> None:
    from moe_opt.modeling.async_ep import StreamedExperts, checkpoint_folder
    from moe_opt.modeling.expert_source import ExpertSource

    if source is None:
        raise ConfigError("async_ep streams experts from a checkpoint: use from_pretrained")
    experts = ExpertSource(checkpoint_folder(source, hub), runtime.layers)
    assert runtime.config.async_ep is not None
    runtime.async_ep = StreamedExperts(runtime, experts, runtime.config.async_ep, model.device)


def _load_from_own_folder(
    model: Any, source: str | None, ways: int | None, hub: dict[str, Any]
) -> UnitedExperts | None:
    """United experts beside the model's weights; `source` may be an adapter, whose base has them. None: not there."""
    if source is None:
        return None
    for place in dict.fromkeys((source, str(getattr(model.config, "name_or_path", "") or source))):
        if Path(place).is_dir() and not holds_united_experts(Path(place) / hub.get("subfolder", "")):
            continue
        try:
            return UnitedExperts.from_pretrained(place, ways=ways, prefer_own=True, **hub)
        except IncompatibleUnitedExpertsError:
            if Path(place).is_dir():
                raise  # there, but damaged
    return None
