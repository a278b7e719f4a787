"""What happens around a backward: leaves are placed while it runs, then masters have full-precision gradients.

A backward is recognised by a hook on the outputs of a forward, which belongs to the outermost graph task even when blocks
inside are checkpointed, or, where a loss does not come from an output, by the first gradient that arrives.

A graph leads to the leaves that a forward was computed with, and to the master itself where a loss uses it directly.  What
``torch.autograd.grad`` and ``backward(inputs=)`` are asked of a master is asked of its leaves too: inputs that are masters are
widened to both, and results are summed in the master's type, differentiably.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Protocol

import torch
from torch.autograd import Variable

from .hooks import in_range, profiling, weakly
from .leaves import LeafPool, place, take_back, uncover
from .log import logger
from .reducer import Reducer
from .step import Pass, Region, Running, Training

#: Whether the backward under way was asked to keep its graph (``retain_graph``).
_graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph


class Backward:
    """Follows the backwards of one plan.

    Args:
        pool: the leaves.
        region: says whether the module computes in low precision.
        make_reducer: makes what takes gradients from there on, of what hears of a gradient while no backward is known, and of
            what hears of an error in a hook.

    Thread safety: autograd calls the hooks from its own threads, one at a time, under the GIL.
    """

    def __init__(
        self,
        pool: LeafPool,
        region: Region,
        make_reducer: Callable[[Callable[[int, bool], None], Callable[[], None]], Reducer],
    ) -> None:
        self.pool, self.region = pool, region
        self.training = Training(self)
        self.reducer = make_reducer(weakly(self._late, None), weakly(self.fail, None))
        self._warned = False

    def drop_dead(self) -> None:
        """Cleans up after a backward that ended with an error outside our hooks, should its end not have been reported.

        Called at a forward: in a thread that started a backward it must be over by then.  What another thread has under way
        goes on.
        """
        running = self.training.running
        if running is not None and torch._C._current_graph_task_id() == -1 and running.known_to(get_ident()):
            self.fail()

    # --- backwards ---------------------------------------------------------------------------------------------------

    def show_masters(self) -> Callable[[], None]:
        """What a backward of this thread computes again finds masters, until the function that is returned is called."""
        running = self.training.running
        if running is None or not running.placements or not running.known_to(get_ident()):
            return lambda: None
        show_leaves, was_low, self.region.low = uncover(running.placements), self.region.low, False

        def end() -> None:
            show_leaves()
            self.region.low = was_low

        return end

    def _late(self, row: int, elsewhere: bool) -> None:
        """A gradient arrived and no backward is known: the last forward's, whose outputs the loss did not come through.

        ``elsewhere``: on a master that has a leaf.  That backward is none of ours: the gradient is where it belongs.
        """
        if elsewhere and not self.training.before_patch:
            return
        if self.training.forwarding is not None:
            self._begin(self.training.forwarding)
            return
        pending = [p for p in self.training.passes if p.pending] or self.training.passes[-1:]
        if pending and not pending[-1].watched:
            self._begin(pending[-1])
            return
        hidden = Pass(None)  # the forward itself may still have a backward through its outputs
        hidden.sync = pending[-1].sync if pending else self.training.before_patch
        self._begin(hidden)
        assert self.training.running is not None
        self.training.running.hidden = pending[-1] if pending else None

    def start(self, reached: Pass) -> None:
        """A backward reached the outputs of this forward."""
        running = self.training.running
        if running is not None:
            if reached in running.passes and running.task == torch._C._current_graph_task_id():
                return
            if reached not in running.passes:
                self._reach(running, reached)
                if reached.sync and not running.sync:
                    running.sync = True
                    self.reducer.upgrade()
                self.reducer.gradients.early = False
                return
            self.fail()  # the same forward again, in another task: the backward that we know ended with an error
        try:
            self._begin(reached)
        except BaseException:
            self.fail()
            raise

    def _begin(self, reached: Pass) -> None:
        running = self.training.running = Running(torch._C._current_graph_task_id(), reached.sync, self.region.low)
        self._reach(running, reached)
        # graphs that wait, which the backward may go through too
        others = self.training.passes != [reached] and [p for p in self.training.passes if p is not reached and p.pending]
        several = bool(reached.earlier or (others and _are_of_other_casts(others, reached)))
        early = not several and self._may_reduce_early(reached, others or ())
        self.reducer.begin(reached.sync, early=early, several=several)
        Variable._execution_engine.queue_callback(_End(self, running))

    def _reach(self, running: Running, reached: Pass) -> None:
        """Outputs of this forward take part: its leaves are placed, for what a checkpoint computes again."""
        running.passes.append(reached)
        finished = reached.done and not reached.kept  # autograd has its own error for a graph that is gone
        reached.kept = _graph_is_kept()
        if reached.generation is not None and not finished and reached is not self.training.forwarding:
            for generation in reached.generations:
                generation.match_again()
            running.placements.append(place(reached.generation))
            self.region.low = True

    def _may_reduce_early(self, reached: Pass, others: Sequence[Pass]) -> bool:
        """Whether a gradient that arrived is complete: not while other forwards or wrappers may add to it."""
        if self.training.shared or reached is self.training.forwarding or reached.hook is None:
            return False
        reference = self.training.previous
        previous = None if reference is None else reference()
        if previous is not None and any(p.pending for p in previous.passes):
            return False
        return not others or all(p.sync for p in others)

    def _finish(self, running: Running) -> None:
        training, reducer = self.training, self.reducer
        if training.running is not running:
            return
        try:
            touched = reducer.gradients.fires > 0
            if touched:
                for reached in running.passes:
                    if reached is not training.forwarding:
                        reached.finish()
            if profiling():
                in_range("ddp_mp::restore", self._put_away)(running)
                in_range("ddp_mp::finish", self._reduce)(running, touched)
            else:
                self._put_away(running)
                self._reduce(running, touched)
            while training.futures:
                training.futures.pop(0).wait()
        except BaseException:
            self.fail()
            raise
        training.running = None

    def _put_away(self, running: Running) -> None:
        placements, running.placements = running.placements, []
        for placement in placements:
            take_back(placement)
        self.region.low = running.was_low
        for reached in running.passes:
            for generation in reached.generations:
                self.pool.free(generation)

    def _reduce(self, running: Running, touched: bool) -> None:
        if not touched:  # torch.autograd.grad: no gradient was accumulated, a backward is still to come
            self.reducer.cancel()
            return
        complete = self.reducer.finish(running.sync)
        self.training.before_patch = False
        if not self.pool.rows:
            self._warn_when_uncast(running)
        for done in (*running.passes, running.hidden):
            if done is not None:
                done.sync = done.sync and not complete
        self.training.forget_done()

    def _warn_when_uncast(self, running: Running) -> None:
        if self.pool.dtype is not None and running.passes[0].watched and not self._warned:
            self._warned = True
            warnings.warn(
                f"ddp_mp: a training step of a patched model ended without any cast to {self.pool.dtype}: every parameter is "
                "ignored by DistributedDataParallel, has that type already, or stays in full precision by "
                "Options.full_precision_modules",
                stacklevel=2,
            )

    def fail(self) -> None:
        """Leaves are taken back and hold no gradient; what masters have in ``.grad`` stays."""
        running, self.training.running = self.training.running, None
        if running is None:
            return
        logger.debug("a backward failed: what it has left on leaves is dropped")
        for reached in running.passes:
            reached.done = reached.done or reached is not self.training.forwarding
        try:
            self._put_away(running)
        finally:
            self.reducer.abort()

    def graph_died(self) -> None:
        """A forward was discarded: its leaves are freed, unless another one needs them.

        Python may find out anywhere, also in the middle of our own work, which sees to it then.
        """
        if self.training.running is None:
            self.pool.free_unused()


def _are_of_other_casts(others: Sequence[Pass], reached: Pass) -> bool:
    """Whether graphs that wait hold leaves of other casts than that of this forward."""
    return any(p.earlier or p.generation is not reached.generation for p in others)


class _End:
    """The engine's callback at the end of the outermost graph task.

    A backward that fails outside our hooks never calls it, but drops it before the error reaches the user.  Where gradients
    have arrived on masters themselves, it queues itself once more: PyTorch's reducer of another wrapper may have queued the
    end of its own reduction meanwhile, and comes first then.
    """

    __slots__ = ("_again", "_owner", "_running")

    def __init__(self, owner: Backward, running: Running) -> None:
        self._owner, self._running = weakref.ref(owner), running
        self._again = True

    def __call__(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        if self._again and owner.reducer.gradients.direct:
            self._again = False
            Variable._execution_engine.queue_callback(self)
            return
        owner._finish(self._running)

    def __del__(self) -> None:
        owner = self._owner()
        if owner is not None and owner.training.running is self._running:
            owner.fail()


# --- inputs: what is asked of masters ----------------------------------------------------------------------------------------


class Owner(Protocol):
    """What knows of the leaves of a wrapped module."""

    def leaves_of(self, master: torch.Tensor) -> list[torch.nn.Parameter]:
        """Every leaf that stands for a master in a graph that may still have a backward."""


class _Inputs:
    """PyTorch's way to the engine while models are patched: all that ``torch.autograd`` runs passes through it.

    Others may wrap it too, after us, and only the outermost wrapper can be taken off: below another one ours stays, and passes
    everything through.
    """

    def __init__(self) -> None:
        self._owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._ours: Any = None
        self._original: Any = None

    def watch(self, owner: Owner) -> None:
        """Masters of the owner are widened from now on, while it lives."""
        self._owners.add(owner)
        home: Any = torch.autograd
        if self._ours is None:
            self._original = home._engine_run_backward
            self._ours = home._engine_run_backward = self._wrapper(self._original)

    def forget(self, owner: Owner) -> None:
        """The owner is patched no more."""
        self._owners.discard(owner)
        home: Any = torch.autograd
        if not self._owners and home._engine_run_backward is self._ours:
            home._engine_run_backward = self._original
            self._ours = self._original = None

    def _wrapper(self, original: Any) -> Any:
        @functools.wraps(original)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = args[3] if len(args) > 3 else ()  # behind gradients and two flags
            leaves = self._leaves(inputs) if inputs else None
            if leaves is None:
                return original(outputs, *args, **kwargs)
            wide = tuple(tensor for value, more in zip(inputs, leaves, strict=True) for tensor in (value, *more))
            if len(args) == 4:  # torch.autograd.backward
                return original(outputs, *args[:3], wide, **kwargs)
            found = iter(original(outputs, *args[:3], wide, True, *args[5:], **kwargs))  # one of several may be unused
            sums = [_sum(value, [next(found) for _ in (value, *more)]) for value, more in zip(inputs, leaves, strict=True)]
            if not args[4]:
                _require_used(sums)
            return tuple(sums)

        return run

    def _leaves(self, inputs: Sequence[Any]) -> list[list[torch.nn.Parameter]] | None:
        """For each input the leaves that stand for it; None where there is none at all."""
        if not any(isinstance(value, torch.nn.Parameter) for value in inputs):
            return None
        owners = list(self._owners)
        leaves = [[leaf for owner in owners for leaf in owner.leaves_of(value)] for value in inputs]
        return leaves if any(leaves) else None


def _sum(master: Any, found: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of what the engine found for a master and its leaves; the user's hooks on the master see what leaves had."""
    total, on_leaves = found[0], [part.to(master.dtype) for part in found[1:] if part is not None]
    if not on_leaves:
        return total
    part = functools.reduce(torch.add, on_leaves)
    for hook in list((master._backward_hooks or {}).values()):
        changed = hook(part)
        part = part if changed is None else changed
    return part if total is None else total + part


def _require_used(sums: Sequence[torch.Tensor | None]) -> None:
    for index, value in enumerate(sums):
        if value is None:
            raise RuntimeError(
                f"The differentiated Tensor at index {index} appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )


inputs = _Inputs()
