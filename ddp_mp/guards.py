"""What is put on the modules of a patched model beside the hooks around its forward, and on PyTorch while there is one.

A copy of a module is an ordinary module: none of our hooks comes along, and no leaf.  Loads and optimizer steps write masters,
which matters to leaves that are promised to hold their values, and inside a forward.  What is registered in a module may change
the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_post_hook

from .autocast import own_forward
from .hooks import callers

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


# Files of PyTorch that go through process-wide hooks of ours.
_HOOKED_FILES = nn_module.__file__, register_optimizer_step_post_hook.__code__.co_filename


class Guards:
    """What knows of one wrapped module's copies, loads and registrations.

    Args:
        module: the wrapped module.
        model: the patched model, for :func:`owners`; None: it is none of those.
        written: called when the masters are about to be written, by ``load_state_dict``, and when a parameter or a module is
            registered inside the module.
        read: called before a state dict or a copy is taken, where parameters may be something else than their masters
            (``hooks="root"``); None: they never are.
    """

    def __init__(
        self, module: nn.Module, model: Any, written: Callable[[], None], read: Callable[[], None] | None = None
    ) -> None:
        # weakly: a graph keeps the patched model, a module may keep an output, and nobody would see that cycle
        self.model: Callable[[], Any] = weakref.ref(model) if model is not None else lambda: None
        self.written, self.read = written, read
        self._modules: list[weakref.ref[nn.Module]] = []
        self._handles: list[Any] = []

        def loaded(*args: Any) -> None:
            written()

        def about_to_read(*args: Any) -> None:
            assert read is not None
            read()

        for guarded in module.modules():
            self._handles.append(guarded.register_load_state_dict_pre_hook(loaded))
            if read is not None:
                self._handles.append(guarded.register_state_dict_pre_hook(about_to_read))
        self.take_in(module)

    def take_in(self, module: nn.Module) -> None:
        """The module, and all inside it, is a part of the model."""
        for inner in module.modules():
            _State.of(inner).users.add(self)
            self._modules.append(weakref.ref(inner))

    def detach(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for reference in self._modules:
            guarded = reference()
            if guarded is not None:
                _State.of(guarded).forget(self, guarded)
        self._modules = []


def owners(module: nn.Module) -> set[Any]:
    """Patched models that any part of ``module`` belongs to."""
    return {guards.model() for inner in module.modules() for guards in _users(inner)} - {None}


class _State:
    """Instance-level ``__getstate__``: what ``copy.deepcopy`` and ``pickle`` take of a module, without our hooks and leaves.

    Attributes:
        users: the guards of the patched models that the module is a part of, which may be several.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.users: weakref.WeakSet[Guards] = weakref.WeakSet()

    @classmethod
    def of(cls, module: nn.Module) -> _State:
        """The module's, made where there is none."""
        found = module.__dict__.get("__getstate__")
        if not isinstance(found, cls) or found._module() is not module:
            found = module.__dict__["__getstate__"] = cls(module)
        return found

    def forget(self, user: Guards, module: nn.Module) -> None:
        """A model is patched no more."""
        self.users.discard(user)
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
        for guards in self.users:
            if guards.read is not None:
                guards.read()
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


def _users(module: nn.Module) -> list[Guards]:
    """The guards of the patched models that the module is a part of."""
    return list(_State.of(module).users) if isinstance(module.__dict__.get("__getstate__"), _State) else []


def _is_ours(hook: Any) -> bool:
    """Whether one of our files has made the hook; those of ``hooks="root"`` are where PyTorch's own would be."""
    file = getattr(hook, "__module__", None) or ""
    return file.startswith(f"{__package__}.") and file != f"{__package__}.root"


def _show_masters(state: dict[str, Any]) -> None:
    """The second list of weights that ``nn.RNNBase`` keeps."""
    names = state.get("_flat_weights_names")
    if names is not None:
        state["_flat_weights"] = [state["_parameters"].get(name) for name in names]


class _Everywhere:
    """PyTorch's process-wide hooks while models are patched: after optimizer steps, and where something is registered."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []
        self._handles: list[Any] = []

    def add(self, model: Any) -> None:
        """From now on ``model.after_step(optimizer)`` is called, and the model's guards hear of what is registered."""
        self._models.append(weakref.ref(model))
        if not self._handles:
            self._handles = [
                register_optimizer_step_post_hook(self._after_step),
                nn_module.register_module_parameter_registration_hook(self._registered),
                nn_module.register_module_module_registration_hook(self._registered),
            ]

    def remove(self, model: Any) -> None:
        """The model is patched no more.

        The collector may find that out while PyTorch goes through the very hooks, as modules are built or an optimizer steps:
        they stay then, until the next model goes.
        """
        self._models = [reference for reference in self._models if reference() not in (None, model)]
        if not self._models and not any(frame.f_code.co_filename in _HOOKED_FILES for frame in callers()):
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def models(self) -> list[Any]:
        """Those that are patched now."""
        return [model for reference in self._models if (model := reference()) is not None]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for reference in self._models:
            model = reference()
            if model is not None:
                model.after_step(optimizer)

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        for guards in _users(module):
            guards.written()
            if isinstance(value, nn.Module):
                guards.take_in(value)


everywhere = _Everywhere()


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """``id`` of every parameter that the optimizer steps."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
