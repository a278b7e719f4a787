"""Callbacks that do not keep their owner alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R], otherwise: R) -> Callable[P, R]:
    """A callable that calls the bound method, or returns ``otherwise`` once the method's object is gone.

    Hooks that PyTorch, a module or a parameter keeps are made so: a patched model goes with its wrapper.
    """
    bound: Any = method
    owner, function = weakref.ref(bound.__self__), bound.__func__  # WeakMethod binds anew at each call: 2 us in training

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        alive = owner()
        return otherwise if alive is None else function(alive, *args, **kwargs)

    return call
