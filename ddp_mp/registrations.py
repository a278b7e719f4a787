"""Learns of parameters and modules that are registered inside patched modules, by hooks that PyTorch has for all modules."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch.nn.modules import module as nn_module

from .hooks import callers
from .model import PatchedModel


class _Registrations:
    """Learns of parameters and modules that are registered inside patched modules, by PyTorch's global hooks."""

    def __init__(self) -> None:
        self._watched: weakref.WeakKeyDictionary[Any, weakref.WeakSet[PatchedModel]] = weakref.WeakKeyDictionary()
        self._models: set[weakref.ref[PatchedModel]] = set()
        self._handles: list[Any] = []

    def watch(self, module: Any, model: PatchedModel) -> None:
        for inner in module.modules():
            self._watched.setdefault(inner, weakref.WeakSet()).add(model)
        self._models.add(weakref.ref(model, self._gone))
        if not self._handles:
            self._handles = [
                nn_module.register_module_parameter_registration_hook(self._registered),
                nn_module.register_module_module_registration_hook(self._registered),
            ]

    def forget(self, model: PatchedModel) -> None:
        for inner, models in list(self._watched.items()):
            models.discard(model)
            if not models:
                del self._watched[inner]
        self._models.discard(weakref.ref(model))
        self._end_when_idle()

    def _gone(self, model: weakref.ref[PatchedModel]) -> None:
        """A model went without unpatch.  The collector may find out while PyTorch goes through the very hooks, as modules are
        built: they stay then, until the next model comes or goes."""
        self._models.discard(model)
        if not sys.is_finalizing() and not any(frame.f_code.co_filename == nn_module.__file__ for frame in callers()):
            self._end_when_idle()

    def _end_when_idle(self) -> None:
        if not self._models:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def owners(self, module: Any) -> set[PatchedModel]:
        """Patched models that any part of ``module`` belongs to."""
        return {model for inner in module.modules() for model in self._watched.get(inner, ())}

    def _registered(self, module: Any, name: str, value: Any) -> None:
        for model in list(self._watched.get(module, ())):
            model.dirty = True
            for inner in value.modules() if isinstance(value, nn_module.Module) else ():
                self._watched.setdefault(inner, weakref.WeakSet()).add(model)


registrations = _Registrations()
