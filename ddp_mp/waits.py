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

from .hooks import in_range, profiling, weakly
from .leaves import LeafPool


class Waits:
    """Waits for one plan of one wrapped module.

    A parameter counts as covered when every module that holds it was called in the first forward; the others (attention's
    output projection, parameter containers, weights that only a functional call uses) are waited for at the root.

    Attributes:
        at_root: what the root's forward calls once the masters have been cast: each engine's ``wait()``, with the bucket up to
            which it waits; -1: all.
        in_ranges: whether the modules' hooks show in a trace.
        learns: whether the next forward shows which modules are called.
    """

    def __init__(self, module: nn.Module, pool: LeafPool, by_module: bool) -> None:
        self._module, self._pool = weakref.ref(module), pool
        self._handles: list[Any] = []
        self.learns = by_module and any(len(group.engine.buckets) > 1 for group in pool.groups)
        self._called: set[int] = set()
        self._covered: list[tuple[Any, int, Callable[..., None]]] = []  # (a module's hooks, our key there, our hook)
        self.in_ranges = False
        self.at_root: list[tuple[Callable[[int], None], int]] = [(group.engine.wait, -1) for group in pool.groups]
        if self.learns:
            learn = weakly(self._learn, None)
            for inner in module.modules():
                self._handles.append(inner.register_forward_pre_hook(learn, prepend=True))

    def detach(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._covered = [], []

    def wait_in_range(self) -> None:
        """The waits at the root while a profiler runs, and once afterwards: the modules' hooks show in a trace only then."""
        if profiling() is not self.in_ranges:
            self.in_ranges = profiling()
            for hooks, key, hook in self._covered:
                if key in hooks:
                    hooks[key] = in_range("ddp_mp::wait", hook) if self.in_ranges else hook
        in_range("ddp_mp::wait", self._wait)()

    def _wait(self) -> None:
        for wait, bucket in self.at_root:
            wait(bucket)

    def learned(self) -> None:
        """The root's forward returned.  After the first one the modules that were called are known."""
        self.learns = False
        self.detach()
        module = self._module()
        for index, group in enumerate(self._pool.groups if module is not None else ()):
            self._hook_group(index, group, module, self._called)

    def _learn(self, module: nn.Module, args: Any) -> None:
        if self.learns:
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
        self.at_root[index] = group.engine.wait, root
        for inner in module.modules():  # never the root: its bucket is waited for there already
            bucket = bucket_of_home.get(id(inner._parameters), 0)
            if bucket > root:
                hook = group.engine.wait_hook(bucket)
                handle = inner.register_forward_pre_hook(hook, prepend=True)
                self._handles.append(handle)
                self._covered.append((inner._forward_pre_hooks, handle.id, hook))
