"""Post-accumulate hooks of ours that run after all others of a parameter, whenever those were registered.

PyTorch's reducer hears of a gradient when every such hook has run, so that what hooks do to ``.grad`` is reduced.  Ours are
hooks like any other, which run in the order of the dictionary that the parameter lists them in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

Hook = Callable[[Any], None]


class _OursLast(OrderedDict[int, Hook]):
    """A parameter's hooks by the number of their handle; those in ``ours`` stay behind all others."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: list[int] = []

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, hook)
        if key not in self.ours:
            for last in self.ours:
                _move_to_end(self, last)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        if key in self.ours:
            self.ours.remove(key)


def _move_to_end(hooks: OrderedDict[int, Hook], key: int) -> None:
    """``OrderedDict.move_to_end`` would not do: autograd goes through the hooks in the order of the plain dictionary."""
    hook = hooks[key]
    OrderedDict.__delitem__(hooks, key)
    OrderedDict.__setitem__(hooks, key, hook)


class LastHooks:
    """Our hooks on the parameters of one model."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._hooked: list[tuple[Any, int]] = []  # parameters, and the identity of the tensor inside
        self._among_others: list[tuple[Any, int]] = []  # in dictionaries that were there before: handles refer to those

    def put(self, param: Any, hook: Hook) -> None:
        """Registers ``hook`` on a leaf that requires grad."""
        if param._post_accumulate_grad_hooks is None:
            param._post_accumulate_grad_hooks = _OursLast()
        hooks = param._post_accumulate_grad_hooks
        handle = RemovableHandle(hooks)
        if isinstance(hooks, _OursLast):
            hooks.ours.append(handle.id)
        else:
            self._among_others.append((hooks, handle.id))
        hooks[handle.id] = hook
        _call(param)
        self._handles.append(handle)
        self._hooked.append((param, param._cdata))

    def order(self) -> None:
        """Before a backward: moves ours behind those that were registered since."""
        for hooks, key in self._among_others:
            if key in hooks and next(reversed(hooks)) != key:
                _move_to_end(hooks, key)

    def put_again(self) -> None:
        """Puts hooks back on parameters whose inner tensor was swapped (``torch.utils.swap_tensors``).

        The tensor that went away took what calls the hooks along; the parameter still lists them.
        """
        for position, (param, tensor) in enumerate(self._hooked):
            if param._cdata != tensor:
                _call(param)
                self._hooked[position] = (param, param._cdata)

    def remove(self) -> None:
        """Takes our hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooked, self._among_others = [], [], []


def _call(param: Any) -> None:
    """Makes autograd call the post-accumulate hooks that the parameter lists; without effect where it does already.

    They are listed by the Python object and called by the tensor inside, which may have been swapped for another.
    """
    param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
