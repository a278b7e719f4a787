"""Copies of a patched module, and what is written while it is patched.

A copy of a module is an ordinary module: none of our hooks comes along, and no leaf.  Loads and optimizer steps write masters,
which matters to leaves that are promised to hold their values, and inside a forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .autocast import own_forward

# Hook dictionaries of nn.Module, each keyed by the id of the hook's handle.
_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


class Guards:
    """What is put on the modules of one wrapped module beside the hooks around its forward.

    Args:
        module: the wrapped module.
        written: the masters are about to be written, by ``load_state_dict``.
        read: called before a state dict or a copy is taken, where parameters may be something else than their masters
            (``hooks="root"``); None: they never are.
    """

    def __init__(self, module: nn.Module, written: Callable[[], None], read: Callable[[], None] | None = None) -> None:
        # weakly: a graph keeps the patched model, a module may keep an output, and nobody would see that cycle
        self._modules: list[weakref.ref[nn.Module]] = []
        self._handles: list[Any] = []

        def loaded(*args: Any) -> None:
            written()

        def about_to_read(*args: Any) -> None:
            if read is not None:
                read()

        for guarded in module.modules():
            self._handles.append(guarded.register_load_state_dict_pre_hook(loaded))
            if read is not None:
                self._handles.append(guarded.register_state_dict_pre_hook(about_to_read))
            _State.of(guarded).users[id(self)] = about_to_read
            self._modules.append(weakref.ref(guarded))

    def detach(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for reference in self._modules:
            guarded = reference()
            if guarded is not None:
                _State.of(guarded).forget(id(self), guarded)
        self._modules = []


class _State:
    """Instance-level ``__getstate__``: what ``copy.deepcopy`` and ``pickle`` take of a module, without our hooks and leaves.

    Attributes:
        users: by the id of their guards, the patched models that the module is a part of, which may be several: what each one
            does before a copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.users: dict[int, Callable[[], None]] = {}

    @classmethod
    def of(cls, module: nn.Module) -> _State:
        """The module's, made where there is none."""
        found = module.__dict__.get("__getstate__")
        if not isinstance(found, cls) or found._module() is not module:
            found = module.__dict__["__getstate__"] = cls(module)
        return found

    def forget(self, user: int, module: nn.Module) -> None:
        """A model is patched no more."""
        self.users.pop(user, None)
        if not self.users:
            module.__dict__.pop("__getstate__", None)

    def __call__(self) -> Any:
        module = self._module()
        assert module is not None
        own: Any = getattr(type(module), "__getstate__", None)
        custom = own is not None and own is not getattr(object, "__getstate__", None)
        state = own(module) if custom else module.__dict__
        if not isinstance(state, dict):
            return state
        for about_to_read in list(self.users.values()):
            about_to_read()
        parameters = module._parameters
        # an entry of the name of a parameter is a leaf, of a forward under way
        state = {key: value for key, value in state.items() if key not in parameters and key != "__getstate__"}
        _show_masters(state)
        ids = {key for name in _HOOK_DICTS for key, hook in (state.get(name) or {}).items() if _is_ours(hook)}
        for name in _HOOK_DICTS:
            hooks = state.get(name)
            if hooks and not ids.isdisjoint(hooks):
                state[name] = type(hooks)((k, v) for k, v in hooks.items() if k not in ids)
        ours, before = own_forward(state.get("forward"))
        if ours:
            del state["forward"]
            state |= {} if before is None else {"forward": before}
        return state


def _is_ours(hook: Any) -> bool:
    """Whether one of our files has made the hook; those of ``hooks="root"`` are where PyTorch's own would be."""
    file = getattr(hook, "__module__", None) or ""
    return file.startswith(f"{__package__}.") and file != f"{__package__}.root"


def _show_masters(state: dict[str, Any]) -> None:
    """The second list of weights that ``nn.RNNBase`` keeps."""
    names = state.get("_flat_weights_names")
    if names is not None:
        state["_flat_weights"] = [state["_parameters"].get(name) for name in names]


class _OptimizerSteps:
    """The process-wide hook after optimizer steps, and the models that hear of them."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []
        self._handle: Any = None

    def add(self, model: Any) -> None:
        """``model.after_step(optimizer)`` is called from now on, while the model lives."""
        self._models.append(weakref.ref(model))
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self, model: Any) -> None:
        """The model is patched no more."""
        self._models = [reference for reference in self._models if reference() not in (None, model)]
        if not self._models and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def models(self) -> list[Any]:
        """Those that are patched now."""
        return [model for reference in self._models if (model := reference()) is not None]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for reference in self._models:
            model = reference()
            if model is not None:
                model.after_step(optimizer)


optimizer_steps = _OptimizerSteps()


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """``id`` of every parameter that the optimizer steps."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
