"""The parts of a model that our CPU kernels compute, for as long as an engine has the model.

Modules are recognised by what they compute, not by their names: a part is taken if a trial gives what the kernel
gives. Linear layers, MLPs, norms and routers get a forward function of their own; the rotary embedding is a function
in a family's module of Transformers, which stands replaced while an engine is open, for inputs like the engine's.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from moe_opt.modeling.kernels.native import library
from moe_opt.modeling.kernels.native_linear import linear, mlp_or_none, takes_linear
from moe_opt.modeling.kernels.native_rows import norm_or_none, rotary_or_none, router_or_none

_ROTARY = "apply_rotary_pos_emb"

_lock = threading.Lock()
# By module name: what stood there, and how many models want it replaced.
_replaced: dict[str, tuple[Callable[..., Any], int]] = {}


class NativeModules:
    """Takes over the parts of a model that a kernel of ours computes as they do; `remove` gives them back."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[nn.Module] = []
        self._rotary: list[str] = []
        loaded = library.load()
        if loaded is None:
            return
        try:
            self._take(model, loaded)
        except BaseException:
            self.remove()
            raise

    def _take(self, model: nn.Module, loaded: ctypes.CDLL) -> None:
        tiles = bool(loaded.moe_opt_has_tiles())
        for module in model.modules():  # from the outside in: an MLP is tried with its own layers
            if "forward" in module.__dict__:  # somebody's hook
                continue
            forward = _forward_or_none(module, loaded, tiles)
            if forward is not None:
                module.forward = forward
                self._modules.append(module)
        for name in sorted({type(module).__module__ for module in model.modules()}):
            if _replace_rotary(name, loaded):
                self._rotary.append(name)

    def __len__(self) -> int:
        return len(self._modules)

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules.clear()
        for name in self._rotary:
            _restore_rotary(name)
        self._rotary.clear()


def _forward_or_none(module: nn.Module, loaded: ctypes.CDLL, tiles: bool) -> Callable[..., Any] | None:
    name = type(module).__name__.lower()
    if "norm" in name:
        return norm_or_none(module, loaded)
    if "router" in name:
        return router_or_none(module, loaded)
    if not tiles:
        return None
    if takes_linear(module):
        assert isinstance(module, nn.Linear)
        return linear(module, loaded)
    return mlp_or_none(module, loaded)


def _replace_rotary(name: str, loaded: ctypes.CDLL) -> bool:
    module = sys.modules.get(name)
    with _lock:
        if name in _replaced:
            own, count = _replaced[name]
            _replaced[name] = own, count + 1
            return True
        found = getattr(module, _ROTARY, None)
        ours = rotary_or_none(found, loaded) if callable(found) else None
        if ours is None:
            return False
        assert callable(found)
        _replaced[name] = found, 1
        setattr(module, _ROTARY, ours)
        return True


def _restore_rotary(name: str) -> None:
    with _lock:
        own, count = _replaced.pop(name)
        if count > 1:
            _replaced[name] = own, count - 1
        else:
            setattr(sys.modules[name], _ROTARY, own)
