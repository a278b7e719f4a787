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

from .hooks import CallFrame, module_call, span, untraced, weakly
from .leaves import Placement, ReplacedError, take_back
from .options import Options
from .plan import Plan
from .step import Pass
from .tensors import cast_tensors, tensors_in

#: The transform of torch.func that is under way in this thread, or None.
_transform = torch._C._functorch.peek_interpreter_stack


class _Call:
    """One call of the wrapped module under way."""

    __slots__ = ("frame", "handled", "inside", "placement", "plan", "stands_for", "was_low")

    def __init__(self, frame: FrameType, handled: BaseException | None) -> None:
        self.frame = CallFrame(frame)
        self.handled = handled  # the exception being handled when the call began: an error of the call is another one
        self.plan: Plan | None = None  # None: plain tensors stand in for the parameters (functional_call)
        self.placement: Placement | None = None
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
        dtype: what floating-point inputs are cast to; None: they are left alone.
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
        if call.plan is None or self._dtype is None or self.full_depth:
            return None
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):  # the most frequent call, without a search
            return (cast_tensors(args[0], self._dtype),), kwargs
        return cast_tensors((args, kwargs), self._dtype)

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
        failed = sys.exc_info()[1] is not call.handled
        if not (failed or call.inside) and torch.is_grad_enabled():
            outputs = [t for t in tensors_in(output) if t.requires_grad and t.grad_fn is not None]
            if outputs or plan.trains:
                new = Pass(None if call.placement is None else call.placement.generation)
                plan.backward.add(new, outputs, (self._keep(), plan))

    def _put_away(self, call: _Call) -> None:
        plan, placement = call.plan, call.placement
        if plan is None:
            return
        with span("ddp_mp::restore"):
            call.placement = None
            plan.region.low = call.was_low
            if plan.backward.forwarding is call.stands_for:
                plan.backward.forwarding = None
            if placement is not None:
                take_back(placement)
                plan.pool.free(placement.generation)

    # --- masters and leaves inside a forward -------------------------------------------------------------------------

    def masters_stepped(self) -> None:
        """Masters were written inside a forward of this thread: what it goes on to compute uses their new values."""
        call = self._inner()
        if call is not None and call.placement is not None and call.plan is not None:
            self._carry(call.placement)
            placement, call.placement = call.placement, None
            call.placement = _placed_again(call.plan, _requires_grad(placement), placement)
            call.plan.waits.at_root()
            call.plan.pool.free(placement.generation)

    def show_masters(self) -> Callable[[], None] | None:
        """Inside a forward of this thread: its sites hold masters until the function that is returned is called.

        None outside a forward.
        """
        call = self._inner()
        if call is None or call.placement is None or call.plan is None:
            return None
        plan, placement = call.plan, call.placement
        self._carry(placement)
        take_back(placement)
        placement.generation.placed += 1  # its memory stays
        plan.region.low, call.placement = False, None
        trained = _requires_grad(placement)

        def show_leaves() -> None:
            placement.generation.placed -= 1
            call.placement = _placed_again(plan, trained)
            plan.region.low = True
            plan.waits.at_root()
            plan.pool.free(placement.generation)

        return show_leaves

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


def _requires_grad(placement: Placement) -> list[bool]:
    return [leaf.requires_grad for leaf in placement.generation.leaves]


def _placed_again(plan: Plan, trained: list[bool], instead_of: Placement | None = None) -> Placement:
    """Leaves with the masters' present values inside a forward, which had placed leaves before.

    ``trained``: which of those required grad.  They do so still where the master does not now: a GAN that freezes one side
    while the other one steps thaws it later in the same forward.  What arrives for a master that is still frozen is dropped.
    """
    placement = plan.pool.place_present(instead_of=instead_of)
    generation = placement.generation
    frozen = [leaf for leaf, was in zip(generation.leaves, trained, strict=True) if was and not leaf.requires_grad]
    for leaf in frozen:
        leaf.requires_grad_(True)
    if frozen:
        generation.sites.changed()  # so that this is not taken for the module's own doing
    return placement
