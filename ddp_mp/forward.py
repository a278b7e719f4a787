"""What happens around a forward of the wrapped module: masters are cast, leaves are placed, and taken back at its end."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn

from .autocast import LOW, other_autocast
from .explanations import explain
from .hooks import CallFrame, module_call, span, untraced, weakly
from .leaves import Generation, Placement, ReplacedError, take_back
from .options import Options
from .plan import Plan
from .step import Pass
from .tensors import cast_tensors, tensors_in

#: The transform of torch.func that is under way in this thread, or None.
_transform = torch._C._functorch.peek_interpreter_stack

#: Stands for the warning of an autocast among the names of parameters that were warned of.
_AUTOCAST = "torch.autocast"


class _Call:
    """One call of the wrapped module under way."""

    __slots__ = ("earlier", "frame", "handled", "inside", "placement", "plan", "stands_for", "trained", "was_low")

    def __init__(self, frame: FrameType, handled: BaseException | None) -> None:
        self.frame = CallFrame(frame)
        self.handled = handled  # the exception being handled when the call began: an error of the call is another one
        self.plan: Plan | None = None  # None: plain tensors stand in for the parameters (functional_call)
        self.placement: Placement | None = None
        self.earlier: list[Pass] = []  # each stands for leaves that were placed before, which its graph may still need
        self.trained: list[bool] = []  # which leaves required grad when they were taken back in mid-forward
        self.was_low = False
        self.stands_for: Pass | None = None  # what a backward inside this forward belongs to
        self.inside = False  # the module called itself, or a checkpoint computes it again inside a backward


class Forward:
    """The wrapped module's hooks, registered with ``prepend`` so that hooks of others see leaves.

    Args:
        module: the wrapped module.
        prepare: called before each forward, and with True when a parameter was replaced; gives the plan, or None where plain
            tensors stand in for the parameters.
        keep: what a graph keeps alive until its backward.
        dtype: what parameters are cast to, and floating-point inputs where the options say so; None: nothing is cast.
    """

    def __init__(
        self,
        module: nn.Module,
        prepare: Callable[[bool], Plan | None],
        keep: Callable[[], object],
        dtype: torch.dtype | None,
        options: Options,
    ) -> None:
        self._prepare, self._keep = prepare, keep
        self._dtype = dtype if options.cast_forward_inputs and not options.autocast else None
        self._low = dtype if dtype in LOW else None
        self._autocast, self._root = options.autocast, weakref.ref(module)
        self._output_dtype = options.output_dtype
        self._calls: list[_Call] = []
        self._warned: set[str] = set()
        self.forwards = 0
        self.full_depth = 0  # blocks of full_precision() around calls
        enter, leave = weakly(self._enter, None), weakly(self._leave, None)

        def before(root: nn.Module, args: Any, kwargs: Any) -> Any:
            # a clone of the module carries this hook too
            return enter(module_call(sys._getframe(1)), args, kwargs) if root is own() else None

        def after(root: nn.Module, args: Any, output: Any) -> Any:
            return leave(output) if root is own() else None

        own = weakref.ref(module)
        self._handles = [
            module.register_forward_pre_hook(untraced(before), prepend=True, with_kwargs=True),
            module.register_forward_hook(untraced(after), always_call=True),
        ]

    def detach(self) -> None:
        """Removes the hooks from the module, and ends calls that an interrupt has left."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for call in self._calls:
            self._put_away(call)
        self._calls = []

    @property
    def hook_ids(self) -> set[int]:
        """Keys of our hooks in the module's hook dictionaries."""
        return {handle.id for handle in self._handles}

    @property
    def under_way(self) -> bool:
        """Whether a call of the module is under way, in whatever thread."""
        self.drop_dead()
        return bool(self._calls)

    def drop_dead(self) -> None:
        """Takes back what calls have left that an interrupt ended: no hook runs after KeyboardInterrupt."""
        for call in [call for call in self._calls if call.frame.is_over()]:
            self._calls.remove(call)
            self._put_away(call)

    # --- the hooks ---------------------------------------------------------------------------------------------------

    def _enter(self, frame: FrameType, args: Any, kwargs: Any) -> Any:
        if self._calls:
            self.drop_dead()
        call = _Call(frame, sys.exc_info()[1])
        if _transform() is None:
            self._begin(call)
        else:
            with torch._C._DisableFuncTorch():  # which would wrap leaves that are made now, and they outlive it
                self._begin(call)
        self._calls.append(call)
        self.forwards += 1
        if call.placement is not None and not call.inside and self._low is not None:
            self._look_at_autocast(call.plan, self._low)
        if call.plan is None or self._dtype is None or self.full_depth:
            return None
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):  # the most frequent call, without a search
            return (cast_tensors(args[0], self._dtype),), kwargs
        return cast_tensors((args, kwargs), self._dtype)

    def _look_at_autocast(self, plan: Plan | None, low: torch.dtype) -> None:
        """Warns once of an autocast around the model whose type is another one than that of its leaves."""
        other = other_autocast(plan.device_type, low) if plan is not None else None
        if other is not None and _AUTOCAST not in self._warned:
            self._warned.add(_AUTOCAST)
            warnings.warn(
                f"ddp_mp: this model computes in {low}, and it is called inside torch.autocast of {other}; give both the same "
                "type, or leave the autocast out and patch with ddp_mp.Options(autocast=True)",
                stacklevel=3,
            )

    def _begin(self, call: _Call) -> None:
        plan = self._prepare(False)
        if plan is None:
            return
        plan.backward.drop_dead()
        try:
            self._place(call, plan)
        except ReplacedError:
            plan = self._prepare(True)
            if plan is None:
                return
            self._place(call, plan)

    def _place(self, call: _Call, plan: Plan) -> None:
        call.plan, call.was_low = plan, plan.region.low
        call.inside = self._inner() is not None or plan.backward.running
        if self.full_depth or not plan.pool.rows:
            plan.region.low = plan.casts and not self.full_depth
        else:
            try:
                call.placement = plan.pool.place_present()
                plan.region.low = True
                if plan.pool.moved:
                    plan.reducer.hook_again()  # swap_tensors() gives a master another address, and takes hooks away
                plan.waits.at_root()
            except BaseException:
                self._put_away(call)
                call.plan = None
                raise
        if not call.inside:
            call.stands_for = plan.backward.forwarding = Pass(None)

    def _inner(self) -> _Call | None:
        """The innermost call of this thread."""
        thread = get_ident()
        return next((call for call in reversed(self._calls) if call.frame.thread == thread), None)

    def _leave(self, output: Any) -> Any:
        """Returns what the caller gets in the output's place; None: the output."""
        call = self._inner()
        if call is not None:
            try:
                self._end(call, output)
            finally:
                self._calls.remove(call)
                self._put_away(call)
        if self._output_dtype is None or self._inner() is not None or (call is not None and self.full_depth):
            return None  # a module that called itself casts what leaves the outermost call
        return cast_tensors(output, self._output_dtype)

    def _end(self, call: _Call, output: Any) -> None:
        plan = call.plan
        if plan is None:
            return
        plan.waits.forward_ended()
        if call.placement is not None:
            plan.pool.wait()  # with wait="module", of what no module has waited for: masters may be written from now on
            self._carry(call.placement)
        error = sys.exc_info()[1]
        failed = error is not call.handled
        if failed and call.placement is not None and isinstance(error, (RuntimeError, TypeError)):
            explain(error, self._root(), self._autocast)
        outer = next((c for c in reversed(self._calls) if c is not call and c.frame.thread == call.frame.thread), None)
        if outer is not None and call.placement is not None:
            # the graph of the outer call is that of this one too
            outer.earlier += [Pass(g) for g in {*self._earlier(call), call.placement.generation}]
        if not (failed or call.inside) and torch.is_grad_enabled():
            outputs = [t for t in tensors_in(output) if t.requires_grad and t.grad_fn is not None]
            if outputs or plan.trains:
                own = None if call.placement is None else call.placement.generation
                new = Pass(own, [g for g in self._earlier(call) if g is not own])
                plan.backward.add(new, outputs, (self._keep(), plan))

    @staticmethod
    def _earlier(call: _Call) -> set[Generation]:
        return {held.generation for held in call.earlier if held.generation is not None}

    def _put_away(self, call: _Call) -> None:
        plan, placement = call.plan, call.placement
        if plan is None:
            return
        with span("ddp_mp::restore"):
            call.placement = None
            plan.region.low = call.was_low
            if plan.backward.forwarding is call.stands_for:
                plan.backward.forwarding = None
            for held in call.earlier:
                held.finish()
            if placement is not None:
                take_back(placement)
                plan.pool.free(placement.generation)
            if call.earlier:
                plan.pool.free_unused()

    # --- masters and leaves inside a forward -------------------------------------------------------------------------

    def masters_stepped(self) -> None:
        """Masters were written inside a forward of this thread: what it goes on to compute uses their new values."""
        self.show_masters()()

    def show_masters(self) -> Callable[[], None]:
        """Forwards of this thread find masters in their sites, until the function that is returned is called."""
        calls = self._placed_here()
        lows = [(call.plan.region, call.plan.region.low) for call in calls if call.plan is not None]
        for call in calls:
            self._leave_leaves(call)
        for region, _ in lows:
            region.low = False

        def show_leaves() -> None:
            for call in calls:
                self._place_again(call)
            for region, low in lows:
                region.low = low

        return show_leaves

    def _placed_here(self) -> list[_Call]:
        """Calls of this thread that have placed leaves, the outermost first."""
        thread = get_ident()
        return [call for call in self._calls if call.placement is not None and call.frame.thread == thread]

    def _leave_leaves(self, call: _Call) -> None:
        """Takes the leaves of a forward back; its graph may hold them, as far as it goes."""
        placement, call.placement = call.placement, None
        assert placement is not None
        self._carry(placement)
        take_back(placement)
        call.trained = [leaf.requires_grad for leaf in placement.generation.leaves]
        call.earlier.append(Pass(placement.generation))

    @staticmethod
    def _place_again(call: _Call) -> None:
        """Places leaves that hold what the masters have now; those that were placed before stay as they are.

        A leaf that required grad before does so still, where its master does not now: a GAN that freezes one side while the
        other one steps thaws it later in the same forward.  What arrives for a master that is still frozen then is dropped.
        """
        plan = call.plan
        assert plan is not None
        plan.pool.changed()
        call.placement = plan.pool.place_present()
        call.placement.generation.train_again(call.trained)
        plan.waits.at_root()

    def _carry(self, placement: Placement) -> None:
        """What the module has written into leaves, and set on them, reaches the masters."""
        generation = placement.generation
        changed = generation.sites.changed()
        if changed is None:
            return
        written, toggled = changed
        for index in toggled:
            generation.rows[index].master.requires_grad_(generation.leaves[index].requires_grad)
        with torch.no_grad():
            for index in written:
                row, leaf = generation.rows[index], generation.leaves[index].data
                untouched = row.master.data.to(leaf.dtype) == leaf
                row.master.copy_(torch.where(untouched, row.master.data, leaf.to(row.master.dtype)))
                self._warn(row.name, leaf.dtype)
        generation.sites.remember()

    def _warn(self, name: str, dtype: torch.dtype) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"ddp_mp: parameter {name!r} was written inside the forward, where the module holds its {dtype} leaf: the "
                "values are carried to the master, rounded; write inside `with ddp_mp.full_precision(ddp):`, where the module "
                "holds its masters",
                stacklevel=3,
            )
