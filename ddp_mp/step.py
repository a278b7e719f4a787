"""Where training stands: forwards that a backward may still come for, and the backward that is under way."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from threading import get_ident
from typing import Any, Protocol

import torch

from .hooks import leave_alone
from .leaves import Generation, Placement


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

    def watch(self, outputs: list[torch.Tensor], training: Training, keep: object) -> None:
        """Tells ``training.follower`` when a backward reaches any of the outputs, and when graph and outputs are gone.

        The hook object belongs to the graph alone: its life is the graph's.  It keeps ``keep`` alive until finish(): a
        wrapper may be a temporary that is gone when its backward comes.
        """
        hook = OutputHook(self, training.follower, keep)
        self.hook = weakref.ref(hook, training.on_dead)
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


class Running:
    """The backward under way.

    Attributes:
        task: autograd's number of the graph task.
        sync: whether it is to be reduced.
        passes: the forwards that it has reached.
        placements: their leaves, in the modules for what a checkpoint computes again.
        was_low: whether the module computed in low precision before.
        hidden: a forward whose outputs the loss did not come through.
        thread: the thread that it was found in.
    """

    __slots__ = ("hidden", "passes", "placements", "sync", "task", "thread", "was_low")

    def __init__(self, task: int, sync: bool, was_low: bool) -> None:
        self.task, self.sync, self.was_low = task, sync, was_low
        self.passes: list[Pass] = []
        self.placements: list[Placement] = []
        self.hidden: Pass | None = None
        self.thread = get_ident()

    def known_to(self, thread: int) -> bool:
        """Whether it runs in this thread, or was most likely started by it: autograd may have threads of its own."""
        return thread == self.thread or any(thread == reached.thread for reached in self.passes)


class Follower(Protocol):
    """What hears of the backwards of a plan."""

    def start(self, reached: Pass) -> None:
        """A backward reached the outputs of this forward."""

    def graph_died(self) -> None:
        """A forward was discarded: its graph and its outputs are gone."""


class Training:
    """Where the training of one plan stands.

    Args:
        follower: hears of backwards, and owns this object.

    Attributes:
        passes: forwards that a backward may still come for, the oldest first.
        ended: the forward that ended last, unless a synchronised one has begun since then.
        forwarding: stands for a forward under way, which a backward inside it belongs to.
        running: the backward under way, or None.
        shared: another wrapper trains some of the same masters.
        before_patch: whether a forward from before the model was patched may still have its backward.
        previous: the training of the plan before, while forwards keep it.
        futures: those of buffer communication hooks, waited for at the end of the next backward.
    """

    def __init__(self, follower: Follower) -> None:
        self.follower = reference = weakref.ref(follower)
        self.passes: list[Pass] = []
        self.ended: Pass | None = None
        self.forwarding: Pass | None = None
        self.running: Running | None = None
        self.shared = self.before_patch = False
        self.previous: weakref.ref[Training] | None = None
        self.futures: list[Any] = []

        def on_dead(_hook: object) -> None:
            alive = reference()
            if alive is not None:
                alive.graph_died()

        self.on_dead = on_dead

    def add(self, new: Pass, outputs: list[torch.Tensor], keep: object) -> None:
        """A forward with gradients ended with these outputs (those that require grad)."""
        if self.passes:
            # a forward without a known output cannot be seen to die: the next forward takes its place
            for earlier in self.passes:
                if earlier.hook is None:
                    earlier.finish()
            self.forget_done()
        if outputs:
            new.watch(outputs, self, keep)
        self.passes.append(new)
        self.ended = new

    def forget_done(self) -> None:
        """Keeps the forwards that a backward may still come for."""
        self.passes = [p for p in self.passes if p.pending]

    def abandon(self) -> None:
        """The model is not patched any more: a backward of an earlier forward is an error from now on."""
        for waiting in self.passes:
            waiting.abandoned = True


class OutputHook:
    """A tensor hook on the outputs of one forward."""

    __torch_unserializable__ = True  # saving an output loses nothing without it: no warning

    __slots__ = ("__weakref__", "_follower", "_pass", "keep")

    def __init__(self, owner: Pass, follower: weakref.ref[Follower], keep: object) -> None:
        self._pass, self._follower, self.keep = owner, follower, keep

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
        follower = self._follower()
        if follower is not None:
            follower.start(self._pass)


leave_alone(OutputHook.__call__.__code__)
