"""Where the current stream waits for the casts.

The root is right for every model: nothing in the module runs before all leaves hold their values.  With ``wait="module"`` the
root waits for the first bucket, and for whatever is not known to be covered.  Each other bucket is waited for where the modules
that hold its parameters are called, so that casts overlap the first layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from .hooks import profiling, span, weakly
from .leaves import LeafPool


class Waits:
    """Waits for one plan of one wrapped module.

    A parameter counts as covered when every module that holds it was called in the first forward; the others (attention's
    output projection, parameter containers, weights that only a functional call uses) are waited for at the root.
    """

    def __init__(self, module: nn.Module, pool: LeafPool, by_module: bool) -> None:
        self._module, self._pool = weakref.ref(module), pool
        self._handles: list[Any] = []
        self._called: set[int] | None = None
        self._covered: list[tuple[Any, int, Callable[..., None]]] = []  # (a module's hooks, our key there, our hook)
        self._in_ranges = False
        # at the root: each engine's wait(), and the bucket up to which it waits; -1: all
        self._waits: list[tuple[Callable[[int], None], int]] = [(group.engine.wait, -1) for group in pool.groups]
        if by_module and any(len(group.engine.buckets) > 1 for group in pool.groups):
            self._called = set()
            learn = weakly(self._learn, None)
            for inner in module.modules():
                self._handles.append(inner.register_forward_pre_hook(learn, prepend=True))

    def detach(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._covered = [], []

    @property
    def modules(self) -> list[nn.Module]:
        """Modules that may carry hooks of ours, beside those that hold a parameter."""
        module = self._module()
        return [] if self._called is None or module is None else list(module.modules())

    @property
    def hook_ids(self) -> set[int]:
        """Keys of our hooks in the modules' hook dictionaries."""
        return {handle.id for handle in self._handles}

    def at_root(self) -> None:
        """The root's forward starts: the masters have just been cast."""
        if self._covered and profiling() is not self._in_ranges:
            self._put_into_ranges(profiling())
        with span("ddp_mp::wait"):
            for wait, bucket in self._waits:
                wait(bucket)

    def _put_into_ranges(self, on: bool) -> None:
        """The modules' hooks, with ranges around them while a profiler runs; plain ones cost nothing."""
        self._in_ranges = on
        for hooks, key, hook in self._covered:
            if key in hooks:
                hooks[key] = _in_range(hook) if on else hook

    def forward_ended(self) -> None:
        """The root's forward returned.  After the first one the modules that were called are known."""
        if self._called is None:
            return
        called, self._called = self._called, None
        self.detach()
        module = self._module()
        for index, group in enumerate(self._pool.groups if module is not None else ()):
            self._hook_group(index, group, module, called)

    def _learn(self, module: nn.Module, args: Any) -> None:
        if self._called is not None:
            self._called.add(id(module._parameters))

    def _hook_group(self, index: int, group: Any, module: Any, called: set[int]) -> None:
        bucket_of_home: dict[int, int] = {}
        called = called - {id(module._parameters)}  # the root's own: it would wait for them before they are cast
        root = 0
        for row, (bucket, _) in zip(group.rows, group.engine.rows, strict=True):
            homes = [id(site.parameters) for site in row.sites]
            if not all(home in called for home in homes):
                root = max(root, bucket)
            for home in homes:
                bucket_of_home[home] = max(bucket, bucket_of_home.get(home, 0))
        self._waits[index] = group.engine.wait, root
        for inner in module.modules():  # never the root: its bucket is waited for there already
            bucket = bucket_of_home.get(id(inner._parameters), 0)
            if bucket > root:
                hook = group.engine.wait_hook(bucket)
                handle = inner.register_forward_pre_hook(hook, prepend=True)
                self._handles.append(handle)
                self._covered.append((inner._forward_pre_hooks, handle.id, hook))


def _in_range(hook: Callable[..., None]) -> Callable[..., None]:
    def wait(*args: Any) -> None:
        with span("ddp_mp::wait"):
            hook(*args)

    return wait
