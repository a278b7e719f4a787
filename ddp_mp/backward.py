"""What happens around a backward: leaves are placed while it runs, then masters have full-precision gradients.

A backward is recognised by a hook on the outputs of a forward, which belongs to the outermost graph task even when blocks
inside are checkpointed, or, where a loss does not come from an output, by the first gradient that arrives.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.autograd import Variable

from .hooks import span, weakly
from .leaves import LeafPool, Placement, place, take_back, uncover
from .log import logger
from .reducer import Reducer
from .step import Pass, Region, Training

#: Whether the backward under way was asked to keep its graph (``retain_graph``).
_graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph


class _Running:
    """The backward under way."""

    __slots__ = ("hidden", "passes", "placements", "sync", "task", "thread", "was_low")

    def __init__(self, task: int, sync: bool, was_low: bool) -> None:
        self.task, self.sync, self.was_low = task, sync, was_low
        self.passes: list[Pass] = []
        self.placements: list[Placement] = []
        self.hidden: Pass | None = None  # a forward whose outputs the loss did not come through
        self.thread = get_ident()

    def known_to(self, thread: int) -> bool:
        """Whether it runs in this thread, or was most likely started by it: autograd may have threads of its own."""
        return thread == self.thread or any(thread == reached.thread for reached in self.passes)


class Backward:
    """Follows the backwards of one plan.

    Args:
        pool: the leaves.
        training: where training with them stands.
        region: says whether the module computes in low precision.

    Attributes:
        reducer: what becomes of gradients; set by the plan.

    Thread safety: autograd calls the hooks from its own threads, one at a time, under the GIL.
    """

    def __init__(self, pool: LeafPool, training: Training, region: Region) -> None:
        self.pool, self.training, self.region = pool, training, region
        self.reducer: Reducer
        self.shared = False  # another wrapper trains some of the same masters
        self.previous: Callable[[], Backward | None] = lambda: None  # that of the plan before, while forwards keep it
        self.before_patch = False  # whether a forward from before the model was patched may still have its backward
        self._warned = False
        training.on_backward, training.on_dead = weakly(self._start, None), weakly(self._graph_died, None)
        self.futures: list[Any] = []  # of buffer communication hooks: waited for at the end of the next backward

    def abandon(self) -> None:
        """The model is not patched any more: a backward of an earlier forward is an error from now on."""
        for waiting in self.training.passes:
            waiting.abandoned = True

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

    def late(self, row: int, elsewhere: bool) -> None:
        """A gradient arrived and no backward is known: the last forward's, whose outputs the loss did not come through.

        ``elsewhere``: on a master that has a leaf.  That backward is none of ours: the gradient is where it belongs.
        """
        if elsewhere and not self.before_patch:
            return
        if self.training.forwarding is not None:
            self._begin(self.training.forwarding)
            return
        pending = [p for p in self.training.passes if p.pending] or self.training.passes[-1:]
        if pending and not pending[-1].watched:
            self._begin(pending[-1])
            return
        hidden = Pass(None)  # the forward itself may still have a backward through its outputs
        hidden.sync = pending[-1].sync if pending else self.before_patch
        self._begin(hidden)
        assert self.training.running is not None
        self.training.running.hidden = pending[-1] if pending else None

    def _start(self, reached: Pass) -> None:
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
        running = self.training.running = _Running(torch._C._current_graph_task_id(), reached.sync, self.region.low)
        self._reach(running, reached)
        several = self._several_casts(reached)
        self.reducer.begin(reached.sync, early=not several and self._may_reduce_early(reached), several=several)
        Variable._execution_engine.queue_callback(_End(self, running))

    def _reach(self, running: _Running, reached: Pass) -> None:
        """Outputs of this forward take part: its leaves are placed, for what a checkpoint computes again."""
        running.passes.append(reached)
        finished = reached.done and not reached.kept  # autograd has its own error for a graph that is gone
        reached.kept = _graph_is_kept()
        if reached.generation is not None and not finished and reached is not self.training.forwarding:
            for generation in reached.generations:
                generation.match_again()
            running.placements.append(place(reached.generation))
            self.region.low = True

    def _may_reduce_early(self, reached: Pass) -> bool:
        """Whether a gradient that arrived is complete: not while other forwards or wrappers may add to it."""
        if self.shared or reached is self.training.forwarding or not reached.watched:
            return False
        previous = self.previous()
        if previous is not None and any(p.pending for p in previous.training.passes):
            return False
        return all(p is reached or p.sync or not p.pending for p in self.training.passes)

    def _several_casts(self, reached: Pass) -> bool:
        """Whether graphs that wait, which the backward may go through too, hold leaves of other casts."""
        waiting = [p for p in self.training.passes if p is not reached and p.pending]
        return bool(reached.earlier) or any(p.earlier or p.generation is not reached.generation for p in waiting)

    def _finish(self, running: _Running) -> None:
        if self.training.running is not running:
            return
        try:
            touched = self.reducer.gradients.fires > 0
            if touched:
                for reached in running.passes:
                    if reached is not self.training.forwarding:
                        reached.finish()
            self._put_away(running)
            with span("ddp_mp::finish"):
                if touched:
                    self._reduce(running)
                else:  # torch.autograd.grad: no gradient was accumulated, a backward is still to come
                    self.reducer.cancel()
            while self.futures:
                self.futures.pop(0).wait()
        except BaseException:
            self.fail()
            raise
        self.training.running = None

    def _put_away(self, running: _Running) -> None:
        with span("ddp_mp::restore"):
            placements, running.placements = running.placements, []
            for placement in placements:
                take_back(placement)
            self.region.low = running.was_low
            for generation in [each for reached in running.passes for each in reached.generations]:
                self.pool.free(generation)

    def _reduce(self, running: _Running) -> None:
        complete = self.reducer.finish(running.sync)
        self.before_patch = False
        self._warn_when_uncast(running)
        for done in (*running.passes, running.hidden):
            if done is not None:
                done.sync = done.sync and not complete
        self.training.passes = [p for p in self.training.passes if p.pending]

    def _warn_when_uncast(self, running: _Running) -> None:
        if not self.pool.rows and self.pool.dtype is not None and running.passes[0].watched and not self._warned:
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

    def _graph_died(self, _hook: object) -> None:
        """A forward was discarded: its leaves are freed, unless another one needs them.

        Python may find out anywhere, also in the middle of our own work, which sees to it then.
        """
        if self.training.running is None:
            self.pool.free_unused()

    def error(self) -> None:
        """A hook of the reducer failed."""
        self.fail()


class _End:
    """The engine's callback at the end of the outermost graph task.

    A backward that fails outside our hooks never calls it, but drops it before the error reaches the user.  Where gradients
    have arrived on masters themselves, it queues itself once more: PyTorch's reducer of another wrapper may have queued the
    end of its own reduction meanwhile, and comes first then.
    """

    __slots__ = ("_again", "_owner", "_running")

    def __init__(self, owner: Backward, running: _Running) -> None:
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
