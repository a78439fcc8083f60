"""`MoEOptimizedForCausalLM`: any MoE model of Transformers, with `model.moe_opt`.

A model is loaded by a dynamic subclass of the class that the auto mapping resolves. The subclass keeps the name and
module of its base, so that checkpoint conversions, `architectures` and loss lookup find what they always found.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from moe_opt.config import KERNELS, MoEOptConfig
from moe_opt.errors import ConfigError
from moe_opt.modeling.experts import IMPLEMENTATION, check_family
from moe_opt.modeling.runtime import MoERuntime
from moe_opt.modeling.united import UnitedExperts, attach_united_experts

# What the load under way asked for: `cls(config)` deep inside from_pretrained has no argument to carry it.
_REQUEST: contextvars.ContextVar[_Request | None] = contextvars.ContextVar("moe_opt_request", default=None)
_RUNTIME = "_moe_opt_runtime"
_HUB_KEYS = ("revision", "token", "cache_dir", "local_files_only")


class _Request:
    """The `moe_opt=` value of a load, resolved once the checkpoint's config is known."""

    def __init__(self, value: Any, kernels: str | None) -> None:
        self.value = value
        self.kernels = kernels

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
        self.__dict__[_RUNTIME] = MoERuntime(self, settings)  # type: ignore[arg-type]
        self.set_experts_implementation(IMPLEMENTATION)  # type: ignore[attr-defined]

    @property
    def moe_opt(self) -> MoERuntime:
        """The handle for brownout, recording and statistics."""
        return self.__dict__[_RUNTIME]

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """As in Transformers; settings go to `config.json["moe_opt"]`, united experts to files of their own, which a
        plain `AutoModelForCausalLM` ignores."""
        runtime = self.moe_opt
        attached = runtime.united_config is not None
        settings = runtime.config.to_dict()
        if attached:
            settings.update(united_experts=".", ways=runtime.united_config.ways)  # type: ignore[union-attr]
        before = getattr(self.config, "moe_opt", None)  # type: ignore[attr-defined]
        self.config.moe_opt = settings  # type: ignore[attr-defined]
        push = kwargs.pop("push_to_hub", False)
        main_process = kwargs.get("is_main_process", True)
        try:
            if attached and main_process:
                UnitedExperts.from_model(self).save_pretrained(save_directory, card=False)  # type: ignore[arg-type]
            return super().save_pretrained(save_directory, *args, push_to_hub=push, **kwargs)  # type: ignore[misc]
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
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_moe_opt_base": base,
    }
    return type(base.__name__, (_MoEOptMixin, base), body)


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
        token = _REQUEST.set(request)
        try:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        finally:
            _REQUEST.reset(token)
        _finish(loaded[0] if with_info else loaded, pretrained_model_name_or_path, hub)
        return loaded

    @classmethod
    def from_config(cls, config: Any, *, moe_opt: Any = True, **kwargs: Any) -> Any:
        """Build a model with fresh weights, as `AutoModelForCausalLM.from_config` does."""
        token = _REQUEST.set(_make_request(moe_opt, kwargs))
        try:
            model = super().from_config(config, **kwargs)
        finally:
            _REQUEST.reset(token)
        _finish(model, None, {})
        return model


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


def _finish(model: Any, source: str | os.PathLike[str] | None, hub: dict[str, Any]) -> None:
    """After the weights are in: look the layers up once more (a quantizer may have replaced them), and attach."""
    runtime: MoERuntime = model.moe_opt
    runtime.bind(model)
    wanted = runtime.config.united_experts
    if wanted is None:
        if runtime.config.ways is not None:
            raise ConfigError("moe_opt: ways is set but united_experts is not: say where they are")
        return
    own_folder = wanted == "."
    if own_folder and source is None:
        raise ConfigError("moe_opt: united_experts='.' means the checkpoint's own folder, but there is no checkpoint")
    united = UnitedExperts.from_pretrained(
        source if own_folder and source is not None else wanted,
        ways=runtime.config.ways,
        **(hub if own_folder else {k: v for k, v in hub.items() if k != "revision"}),
    )
    attach_united_experts(model, united)
