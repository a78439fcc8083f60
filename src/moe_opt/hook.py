"""The `moe_opt=` keyword of `AutoModelForCausalLM`, installed without importing Transformers.

`import moe_opt` must stay light, and users import Transformers before or after it. If the auto classes are there,
they are wrapped at once; if not, a finder wraps them the moment they are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_TARGET = "transformers.models.auto.modeling_auto"
_METHODS = ("from_pretrained", "from_config")
_MARK = "_moe_opt_original"
_MISSING = object()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds only `_TARGET`, through the other finders, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _wrap(module)

    def __getattr__(self, name: str) -> Any:  # get_source and friends
        return getattr(self._loader, name)


_FINDER = _Finder()


def hook() -> None:
    """Install the keyword; harmless when repeated."""
    module = sys.modules.get(_TARGET)
    if module is not None and hasattr(module, "AutoModelForCausalLM"):
        _wrap(module)
    elif _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def unhook() -> None:
    """Give `AutoModelForCausalLM` its own methods back. `MoEOptimizedForCausalLM` keeps working."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    module = sys.modules.get(_TARGET)
    auto_class = getattr(module, "AutoModelForCausalLM", None)
    if auto_class is None:
        return
    for name in _METHODS:
        current = auto_class.__dict__.get(name)
        original = getattr(getattr(current, "__func__", None), _MARK, None)
        if original is None:
            continue
        if original is _MISSING:
            delattr(auto_class, name)  # it was inherited
        else:
            setattr(auto_class, name, original)


def _wrap(module: ModuleType) -> None:
    auto_class: Any = module.AutoModelForCausalLM
    for name in _METHODS:
        own = auto_class.__dict__.get(name, _MISSING)
        if hasattr(getattr(own, "__func__", None), _MARK):
            continue
        setattr(auto_class, name, _with_keyword(auto_class, name, own))


def _with_keyword(auto_class: Any, name: str, own: Any) -> Any:
    inherited = getattr(auto_class, name).__func__

    def method(cls: Any, *args: Any, moe_opt: Any = None, **kwargs: Any) -> Any:
        if moe_opt is None or moe_opt is False:
            return inherited(cls, *args, **kwargs)
        if cls is not auto_class:
            raise TypeError(f"moe_opt= is a keyword of AutoModelForCausalLM itself, not of {cls.__name__}")
        from moe_opt.modeling.auto import MoEOptimizedForCausalLM

        return getattr(MoEOptimizedForCausalLM, name)(*args, moe_opt=moe_opt, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"{auto_class.__qualname__}.{name}"
    method.__doc__ = inherited.__doc__
    setattr(method, _MARK, own)
    return classmethod(method)
