"""What happens around a backward: parameters are copies while it runs, then masters with full-precision gradients.

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

from .accumulators import inputs
from .log import logger
from .low import LowPrecision
from .passes import Pass
from .ranges import span
from .reducer import Reducer
from .weak import weakly


class _Running:
    """The backward under way."""

    __slots__ = ("passes", "sync", "task", "thread")

    def __init__(self, task: int, passes: list[Pass], sync: bool) -> None:
        self.task, self.passes, self.sync = task, passes, sync
        self.thread = get_ident()

    def known_to(self, thread: int) -> bool:
        """Whether it runs in this thread, or was most likely started by it: autograd may have threads of its own."""
        return thread == self.thread or any(thread == reached.thread for reached in self.passes)


class Backward:
    """Follows forwards and backwards of one wrapped module.

    Thread safety: autograd calls the hooks from its own threads, one at a time, under the GIL.
    """

    def __init__(self, low: LowPrecision, static_graph: bool) -> None:
        self.low = low
        self.reducer: Reducer  # set right after construction: each calls the other
        self.passes: list[Pass] = []
        self.static_graph = static_graph
        self.in_order = True  # static graph: whether buckets may be reduced before the backward ends
        self._first_round = static_graph
        self._running: _Running | None = None
        self._warned = False
        self.is_forwarding: Callable[[], bool] = lambda: False  # set by what follows forwards
        self._switching = False  # masters are being put back
        self.keeper: Callable[[], object] = lambda: None  # what a graph keeps alive until its backward: the patched model
        self._on_reached, self._on_dead = weakly(self._start, None), weakly(self._graph_died, None)
        self.futures: list[Any] = []  # of buffer communication hooks: waited for at the end of the next backward

    # --- forwards ----------------------------------------------------------------------------------------------------

    @property
    def forwarding(self) -> bool:
        """Whether a forward of this module is under way, in whatever thread."""
        return self.is_forwarding()

    @property
    def running(self) -> bool:
        """Whether a backward of this module is under way."""
        return self._running is not None

    def add(self, outputs: list[torch.Tensor]) -> Pass:
        """A forward with gradients ended with these outputs (those that require grad)."""
        # a forward without a known output cannot be seen to die: the next forward takes its place
        if self.passes:
            self.passes = [p for p in self.passes if p.pending and p.anchored]
        new = Pass(self.low.copies, self.low.epoch)
        if outputs:
            new.watch(outputs, self._on_reached, self._on_dead, keep=self.keeper())
        self.passes.append(new)
        return new

    def live(self) -> bool:
        """Whether some forward's graph still needs the present copies."""
        for p in self.passes:  # noqa: SIM110 - a generator costs 2 us in training
            if p.copies is self.low.copies and p.pending:
                return True
        return False

    def leave(self) -> None:
        """Masters in place; a graph that still needs the copies keeps them, but is not found by its parameters any more."""
        live = self.live()
        self.low.leave(live=live)
        if live:
            inputs.watch(self)

    def may_go_on(self) -> bool:
        """Whether a backward may still come for the graph of any forward."""
        return any(p.pending for p in self.passes)

    def switches(self, value: object) -> bool:
        """Whether this is a parameter that is switched between master and copy."""
        return self.low.switches(value)

    def set_static_graph(self) -> None:
        """The graph is the same in every iteration: the next backward shows what it looks like."""
        self.static_graph = self._first_round = True

    def replace(self, low: LowPrecision, reducer: Reducer) -> None:
        """The plan was built anew.  Graphs computed with the old one keep what they saved."""
        for old in self.passes:
            old.copies = None
        self.low, self.reducer = low, reducer

    def abandon(self) -> None:
        """The model is not patched any more: a backward of an earlier forward is an error from now on."""
        for waiting in self.passes:
            waiting.abandoned = True

    def drop_dead(self) -> None:
        """Cleans up after a backward that ended with an error outside our hooks, should its end not have been reported.

        Called at a forward and before the masters are used: in a thread that started a backward it must be over by then.
        What another thread has under way goes on.
        """
        running = self._running
        if running is not None and torch._C._current_graph_task_id() == -1 and running.known_to(get_ident()):
            self._fail()

    # --- backwards ---------------------------------------------------------------------------------------------------

    def late(self) -> None:
        """A gradient arrived and no backward is known: the last forward's, whose outputs the loss did not come through."""
        if self.forwarding:
            self._begin(None)  # so that the error takes back the gradient that arrived
            raise RuntimeError(
                "ddp_mp: a backward started inside a forward of the wrapped module (as with automatic_optimization=False in "
                "PyTorch Lightning): its parameters would be masters for the rest of that forward; run the backward after the "
                "forward has returned, or leave the model unpatched"
            )
        candidates = [p for p in self.passes if p.pending] or self.passes[-1:]
        self._begin(candidates[-1] if candidates else None)

    def _start(self, reached: Pass) -> None:
        running = self._running
        if running is not None:
            if reached in running.passes and running.task == torch._C._current_graph_task_id():
                return
            if reached not in running.passes:
                self._join(running, reached)
                return
            self._fail()  # the same forward again, in another task: the backward that we know ended with an error
        try:
            self._begin(reached)
        except BaseException:
            self._fail()
            raise

    def _begin(self, reached: Pass | None) -> None:
        sync = reached is not None and reached.sync
        passes = [] if reached is None else [reached]
        self._running = _Running(torch._C._current_graph_task_id(), passes, sync)
        if reached is not None:
            reached.kept = _graph_is_kept()
            self._put_copies(reached)
        self.reducer.begin(sync, early=self._may_reduce_early(reached))
        Variable._execution_engine.queue_callback(_End(self, self._running))

    def _put_copies(self, reached: Pass) -> None:
        """Parameters become the copies that the forward was computed with: a graph refers to some by the parameter itself."""
        if reached.copies is not None:
            self.low.enter_again(reached.copies)
            self.low.wait()
        if self.low.epoch != reached.epoch and torch.is_grad_enabled():
            reached.mixed = True  # create_graph: what is computed now goes to other accumulators

    def _join(self, running: _Running, reached: Pass) -> None:
        """Another forward's outputs take part in the backward under way.

        Autograd runs what was computed last first: when it gets to the outputs of an earlier forward, the later one's graph,
        which may have been computed with other copies, is done with.
        """
        running.passes.append(reached)
        reached.kept = _graph_is_kept()
        self._put_copies(reached)
        if reached.sync and not running.sync:
            running.sync = True
            self.reducer.upgrade()

    def _may_reduce_early(self, reached: Pass | None) -> bool:
        """Whether a gradient that arrived is complete: not while forwards with other accumulators may add to it."""
        if reached is None or not self.in_order or self._first_round:
            return False
        for p in self.passes:  # noqa: SIM110 - a generator costs 2 us in training
            if (p.epoch != reached.epoch or p.mixed or not p.sync) and p.pending:
                return False
        return True

    def _finish(self) -> None:
        running = self._running
        if running is None:
            return
        try:
            touched = self.reducer.touched()
            if touched:
                for reached in running.passes:
                    reached.finish()
            if touched or not self._goes_on(running):
                with span("ddp_mp::restore"):
                    self.leave()
            with span("ddp_mp::finish"):
                self._reduce(running, touched)
            if touched and running.passes:
                self._warn_when_uncast()
            while self.futures:
                self.futures.pop(0).wait()
        except BaseException:
            self._fail()
            raise
        self._running = None

    def _goes_on(self, running: _Running) -> bool:
        """Whether ``torch.autograd.grad`` kept a graph of the present copies.

        The next one, or what was computed from its result and the parameters, refers to what autograd has of the copies,
        which a switch to masters would end.  Gradients of before can only be given back to masters.
        """
        return not self.reducer.set_aside and any(
            reached.kept and reached.copies is self.low.copies and reached.pending for reached in running.passes
        )

    def _warn_when_uncast(self) -> None:
        if self.low.casts == 0 and self.low.dtype is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"ddp_mp: a training step of a patched model ended without any cast to {self.low.dtype}: every parameter is "
                "ignored by DistributedDataParallel, has that type already, stays in full precision by "
                "Options.full_precision_modules, or was used without the module being called",
                stacklevel=2,
            )

    def _reduce(self, running: _Running, touched: bool) -> None:
        if not touched:  # torch.autograd.grad: no gradient was accumulated, a backward is still to come
            self.reducer.cancel()
            return
        if self._first_round and running.sync:
            # with a static graph the first round shows whether gradients arrive once
            self.in_order = not self.reducer.refired()
            self._first_round = False
        complete = self.reducer.finish(running.sync)
        for done in running.passes:
            done.sync = done.sync and not complete
        self.passes = [p for p in self.passes if p.pending]

    def _fail(self) -> None:
        """Masters in place, gradients as they were before the backward."""
        logger.debug("a backward failed: masters are put in place, gradients become what they were before it")
        self._running = None
        self._switching = True
        try:
            self.leave()
        finally:
            self._switching = False
            self.low.switch_back()
            self.reducer.abort()

    def expose(self) -> None:
        """Masters in place for whoever is about to use them; a graph that waits for its backward keeps its copies.

        While a forward or a backward is under way, the copies stay for it.
        """
        self.drop_dead()
        if self._running is None and self.low.is_low and not self.forwarding:
            self._switching = True
            try:
                self.leave()
            finally:
                self._switching = False
            self.low.widen_gradients()

    def _graph_died(self, _anchor: object) -> None:
        """A forward was discarded: when no other is waiting for its backward, nothing needs the copies any more.

        Python may find out anywhere, also in the middle of our own work, where the next hook sees to it.
        """
        if self.forwarding or self._switching or self._running is not None:
            return
        if not any(waiting.pending for waiting in self.passes):
            self.expose()
            self.low.drop_unused()

    def error(self) -> None:
        """A hook of the reducer failed."""
        if self._running is not None:
            self._fail()


def _graph_is_kept() -> bool:
    """Whether the backward under way was asked to keep its graph (``retain_graph``); False where PyTorch cannot say."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is not None and bool(ask())


class _End:
    """The engine's callback at the end of the outermost graph task.

    A backward that fails outside our hooks never calls it, but drops it before the error reaches the user.
    """

    __slots__ = ("_owner", "_running")

    def __init__(self, owner: Backward, running: _Running) -> None:
        self._owner, self._running = weakref.ref(owner), running

    def __call__(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner._finish()

    def __del__(self) -> None:
        owner = self._owner()
        if owner is not None and owner._running is self._running:
            owner._fail()
