"""Where training stands: forwards that a backward may still come for."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch

from .hooks import leave_alone
from .leaves import Generation


class Region:
    """Whether the module computes in low precision now: for hooks that torch.compile looks into, a plain attribute."""

    def __init__(self) -> None:
        self.low = False


class Pass:
    """One forward of the wrapped module that was computed with gradients.

    Attributes:
        generation: the leaves that its graph was computed with; None when nothing was cast.
        earlier: other leaves that the same forward had computed with before, as before an optimizer step inside it.
        sync: whether its backward is to be reduced; set at the end of the wrapper's forward, used up by one backward.
        done: whether a backward has gone through it.
        kept: whether that backward kept the graph (``retain_graph``), so that another may come.
        abandoned: the model is not patched any more, so that its backward would not be reduced.
        thread: the thread that ran it.
    """

    __slots__ = ("abandoned", "done", "earlier", "generation", "hook", "kept", "sync", "thread")

    def __init__(self, generation: Generation | None, earlier: Sequence[Generation] = ()) -> None:
        self.generation, self.earlier = generation, earlier
        self.sync = self.done = self.kept = self.abandoned = False
        self.thread = get_ident()
        self.hook: weakref.ref[OutputHook] | None = None
        if generation is not None:
            generation.passes.append(self)
        for held in earlier:
            held.passes.append(self)

    @property
    def generations(self) -> list[Generation]:
        """All leaves that its graph may hold."""
        return [*self.earlier, *([] if self.generation is None else [self.generation])]

    @property
    def pending(self) -> bool:
        """Whether a backward may still come: none has, or one that kept the graph, and the graph (or an output) is alive."""
        if self.done and not self.kept:
            return False
        return self.hook is None or self.hook() is not None

    @property
    def watched(self) -> bool:
        """Whether the end of its graph can be seen."""
        return self.hook is not None

    def watch(
        self,
        outputs: list[torch.Tensor],
        on_backward: Callable[[Pass], None],
        on_dead: Callable[[object], None],
        keep: object,
    ) -> None:
        """Calls ``on_backward(self)`` when a backward reaches any of the outputs, ``on_dead`` when graph and outputs are gone.

        The hook object belongs to the graph alone: its life is the graph's.  It keeps ``keep`` alive until finish(): a
        wrapper may be a temporary that is gone when its backward comes.
        """
        hook = OutputHook(self, on_backward, keep)
        self.hook = weakref.ref(hook, on_dead)
        for tensor in outputs:
            _put(hook, tensor)

    def finish(self) -> None:
        """A backward went through it."""
        self.done = True
        hook = self.hook() if self.hook is not None else None
        if hook is not None and not self.kept:
            hook.keep = None


def _put(hook: OutputHook, tensor: Any) -> None:
    """``tensor.register_hook(hook)``, which takes 24 us in a training step: 19 of them for a handle that nobody needs."""
    node: Any = tensor.grad_fn
    if type(tensor) is torch.Tensor and tensor._backward_hooks is None and hasattr(node, "_register_hook_dict"):
        tensor._backward_hooks = OrderedDict({-1: hook})  # handles count from 0: a later one never takes this key
        node._register_hook_dict(tensor)
    else:
        tensor.register_hook(hook)


class Training:
    """Where the training of one plan stands.

    Attributes:
        passes: forwards that a backward may still come for, the oldest first.
        ended: the forward that ended last, unless a synchronised one has begun since then.
        forwarding: stands for a forward under way, which a backward inside it belongs to.
        running: the backward under way, which :mod:`ddp_mp.backward` follows.
        on_backward: called with a forward when a backward reaches its outputs.
        on_dead: called when the graph of a forward, and its outputs, are gone.
    """

    __slots__ = ("ended", "forwarding", "on_backward", "on_dead", "passes", "running")

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.ended: Pass | None = None
        self.forwarding: Pass | None = None
        self.running: Any = None
        self.on_backward: Callable[[Pass], None]
        self.on_dead: Callable[[object], None]

    def add(self, new: Pass, outputs: list[torch.Tensor], keep: object) -> None:
        """A forward with gradients ended with these outputs (those that require grad)."""
        # a forward without a known output cannot be seen to die: the next forward takes its place
        for earlier in self.passes:
            if earlier.hook is None:
                earlier.finish()
        self.passes = [p for p in self.passes if p.pending]
        if outputs:
            new.watch(outputs, self.on_backward, self.on_dead, keep)
        self.passes.append(new)
        self.ended = new


class OutputHook:
    """A tensor hook on the outputs of one forward."""

    __torch_unserializable__ = True  # saving an output loses nothing without it: no warning

    __slots__ = ("__weakref__", "_on_backward", "_pass", "keep")

    def __init__(self, owner: Pass, on_backward: Callable[[Pass], None], keep: object) -> None:
        self._pass, self._on_backward, self.keep = owner, on_backward, keep

    def __call__(self, grad: Any) -> None:
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and (compiled.in_compiled_autograd_region or compiled.compiled_autograd_enabled):
            raise RuntimeError(
                "ddp_mp does not work under compiled autograd, which runs a graph without what a backward needs of it: call "
                "backward() outside of it, or set torch._dynamo.config.compiled_autograd = False"
            )
        if self._pass.abandoned:
            raise RuntimeError(
                "ddp_mp: the model was unpatched, or its wrapper dropped, after the forward that this backward belongs to, so "
                "that its gradients would not be reduced; keep the wrapper and run the forward again"
            )
        self._on_backward(self._pass)


leave_alone(OutputHook.__call__.__code__)
