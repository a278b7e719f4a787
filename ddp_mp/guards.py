"""Puts masters in place for whoever uses the parameters outside forward and backward.

Between a forward and its backward the parameters are low-precision copies.  Saving, loading, copying and optimizer steps must
see masters; a backward that comes later switches to the copies again by itself.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .parameters import Managed


class Guards:
    """Hooks on one wrapped module that put masters in place before its parameters are read, copied or written.

    Args:
        module: the wrapped module; every submodule that holds a managed parameter is guarded too.
        expose: puts masters in place, unless a forward or a backward is under way.
        copied: puts masters in place for a copy of the module, or raises.
        written: the masters are about to be written.
        master_of: the master behind a parameter that is its copy now.
        hooked: other modules that carry hooks of ours.
        hook_ids: keys of our hooks in the modules' hook dictionaries, which a copy must not carry along.
    """

    def __init__(
        self,
        module: nn.Module,
        rows: list[Managed],
        expose: Callable[[], None],
        copied: Callable[[], None],
        written: Callable[[], None],
        master_of: Callable[[torch.Tensor], torch.Tensor | None],
        hooked: Iterable[nn.Module],
        hook_ids: Callable[[], set[int]],
    ) -> None:
        homes = {id(home) for row in rows for home, _ in row.sites}
        ids = {id(m) for m in hooked}
        # weakly: a graph keeps the patched model, a module may keep an output, and nobody would see that cycle
        self._modules: list[weakref.ref[nn.Module]] = []
        self._handles: list[Any] = []
        for guarded in module.modules():
            holds = guarded is module or id(guarded._parameters) in homes
            if holds:
                self._handles.append(guarded.register_state_dict_pre_hook(_Before(expose)))
                self._handles.append(guarded.register_state_dict_post_hook(_Masters(master_of)))
                self._handles.append(guarded.register_load_state_dict_pre_hook(_Before(written)))
            if holds or id(guarded) in ids:
                _State.of(guarded).users[id(self)] = (copied, self._ids(hook_ids))
                self._modules.append(weakref.ref(guarded))

    def _ids(self, hook_ids: Callable[[], set[int]]) -> Callable[[], set[int]]:
        guards = weakref.ref(self)

        def ids() -> set[int]:
            own = guards()
            return hook_ids() | ({h.id for h in own._handles} if own is not None else set())

        return ids

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


class _Before:
    """A hook that exposes the masters and otherwise does nothing, whatever it is called with."""

    def __init__(self, expose: Callable[[], None]) -> None:
        self._expose = expose

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._expose()


class _Masters:
    """A state dict taken during a forward or backward, as by a thread that saves, gets masters all the same."""

    def __init__(self, master_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._master_of = master_of

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        for key, param in module._parameters.items():
            found = state_dict.get(prefix + key)
            if param is None or found is param or not isinstance(found, torch.Tensor):
                continue
            master = self._master_of(param)
            if master is not None and found.dtype is not master.dtype:
                state_dict[prefix + key] = master


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


class _State:
    """Instance-level ``__getstate__``: what ``copy.deepcopy`` and ``pickle`` take of a module.

    Masters are put in place, and our hooks are left out.
    The copy is an ordinary module: nothing of ours comes along.

    Attributes:
        users: the patched models that the module is a part of, which may be several: of each, what puts its masters in place
            and what tells its hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.users: dict[int, tuple[Callable[[], None], Callable[[], set[int]]]] = {}

    @classmethod
    def of(cls, module: nn.Module) -> _State:
        """The module's, made where there is none."""
        found = module.__dict__.get("__getstate__")
        if not isinstance(found, cls):
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
        for copied, _ in list(self.users.values()):
            copied()
        own: Any = getattr(type(module), "__getstate__", None)
        custom = own is not None and own is not getattr(object, "__getstate__", None)
        state = own(module) if custom else module.__dict__
        if not isinstance(state, dict):
            return state
        state = copy.copy(state)
        state.pop("__getstate__", None)
        ids = set().union(*(own() for _, own in list(self.users.values())))
        for name in _HOOK_DICTS:
            hooks = state.get(name)
            if hooks and any(key in hooks for key in ids):
                state[name] = type(hooks)((k, v) for k, v in hooks.items() if k not in ids)
        return state


class _OptimizerGuard:
    """Process-wide hooks around optimizer steps, for the models whose parameters the optimizer holds.

    Before a step masters are put in place.  After it the model is told that they were written; whether the optimizer covers
    all of them says whether the next forward's casts may start.
    """

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []

    def add(self, model: Any) -> None:
        self._models[model] = None
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]

    def remove(self, model: Any) -> None:
        self._models.pop(model, None)
        if not self._models:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        exposed = [model for model in list(self._models) if model.needs_exposing]
        if not exposed:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in exposed:
            if held.isdisjoint(model.parameter_ids):
                continue
            if model.under_way:
                raise RuntimeError(
                    f"ddp_mp: an optimizer stepped inside a {model.under_way} of a patched model, where its parameters are "
                    "low-precision copies; call optimizer.step() after backward, or ddp_mp.unpatch(ddp) first"
                )
            model.expose()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        watching = [model for model in list(self._models) if model.watches_steps]
        if not watching:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in watching:
            if not held.isdisjoint(model.parameter_ids):
                model.stepped(covered=model.trained_ids <= held)


optimizer_guard = _OptimizerGuard()
