"""What happens around a forward of the wrapped module: masters are cast, leaves are placed, and taken back at its end."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from . import ddp as native
from .autocast import LOW
from .casts import ReplacedError
from .explanations import explain
from .hooks import in_range, profiling, untraced
from .leaves import Generation, Placement, take_back
from .step import Pass
from .tensors import cast_tensors, tensors_in

if TYPE_CHECKING:
    from .model import PatchedModel
    from .plan import Plan

#: The transform of torch.func that is under way in this thread, or None.
_transform = torch._C._functorch.peek_interpreter_stack

#: What is warned of beside parameters, which are warned of by name.
_AUTOCAST = "torch.autocast"


class _Call:
    """One call of the wrapped module under way.

    Attributes:
        frame: that of ``nn.Module.__call__`` or, where a compiler has taken the call apart, of what runs our hook.
        handled: the exception being handled when the call began: an error of the call is another one.
        plan: None where plain tensors stand in for the parameters (``functional_call``).
        earlier: each stands for leaves that were placed before, which the graph of the call may still need.
        trained: which leaves required grad when they were taken back in mid-forward.
        stands_for: what a backward inside this forward belongs to.
        inside: the module called itself, or a checkpoint computes it again inside a backward.
        awaited: whether its graph may have a backward.
    """

    __slots__ = (
        "awaited",
        "earlier",
        "frame",
        "handled",
        "inside",
        "placement",
        "plan",
        "stands_for",
        "thread",
        "trained",
        "was_low",
    )

    def __init__(self, frame: FrameType) -> None:
        found: FrameType | None = frame
        while found is not None and found.f_code.co_name != "_call_impl":
            found = found.f_back
        self.frame, self.thread = found or frame, get_ident()
        self.handled = sys.exc_info()[1]
        self.plan: Plan | None = None
        self.placement: Placement | None = None
        self.earlier: list[Pass] = []
        self.trained: list[bool] = []
        self.stands_for: Pass | None = None
        self.was_low = self.inside = self.awaited = False

    def is_over(self) -> bool:
        """Whether the call has ended, in whatever thread, as when an interrupt kept hooks from running."""
        if self.frame.f_code.co_name != "_call_impl":
            return False  # the call says when it ends
        try:
            self.frame.clear()  # which Python can do only when it has
        except RuntimeError:
            return False
        return True


class Forward:
    """The wrapped module's hooks, registered with ``prepend`` so that hooks of others see leaves.

    Attributes:
        calls: those under way, in whatever thread, the oldest first; with some that an interrupt ended.
        forwards: how many there were.
        full_depth: how many blocks of ``full_precision()`` are around calls.
    """

    def __init__(self, model: PatchedModel) -> None:
        options, dtype, module = model.options, model.precision.param_dtype, model.root
        self._model, self._root = weakref.ref(model), weakref.ref(module)
        self._input_dtype = dtype if options.cast_forward_inputs and not options.autocast else None
        self._output_dtype = options.output_dtype
        self._low = dtype if dtype in LOW else None
        self._region = model.region
        self.calls: list[_Call] = []
        self._warned: set[str] = set()
        self.forwards = 0
        self.full_depth = 0
        own, owner = self._root, weakref.ref(self)  # a patched model goes with its wrapper, whose module may be kept

        def before(root: nn.Module, args: Any, kwargs: Any) -> Any:
            forward = owner()
            # a clone of the module carries this hook too
            return forward._enter(args, kwargs) if forward is not None and root is own() else None

        def after(root: nn.Module, args: Any, output: Any) -> Any:
            forward = owner()
            return forward._leave(output) if forward is not None and root is own() else None

        self._handles = [
            module.register_forward_pre_hook(untraced(before), prepend=True, with_kwargs=True),
            module.register_forward_hook(untraced(after), always_call=True),
        ]

    def detach(self) -> None:
        """Removes the hooks from the module, and ends calls that an interrupt has left."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for call in self.calls:
            self._put_away(call)
        self.calls = []

    @property
    def under_way(self) -> bool:
        """Whether a call of the module is under way, in whatever thread."""
        self.drop_dead()
        return bool(self.calls)

    def drop_dead(self) -> None:
        """Takes back what calls have left that an interrupt ended: no hook runs after KeyboardInterrupt."""
        for call in [call for call in self.calls if call.is_over()] if self.calls else ():
            self.calls.remove(call)
            self._put_away(call)

    def run(self, *inputs: Any, **kwargs: Any) -> Any:
        """``_run_ddp_forward`` of the wrapper: an interrupt, after which PyTorch calls no hook, leaves no leaf in place."""
        model = self._model()
        assert model is not None, "the wrapper has it"
        ddp: Any = model.wrapper()
        call, autocasts = type(ddp)._run_ddp_forward, model.plan.autocasts
        if is_compiling():
            return call(ddp, *inputs, **kwargs)
        try:
            if not autocasts or self.full_depth:
                return call(ddp, *inputs, **kwargs)
            with autocasts[0].around_call():
                return call(ddp, *inputs, **kwargs)
        except BaseException:
            self.drop_dead()
            raise

    # --- the start ---------------------------------------------------------------------------------------------------

    def _enter(self, args: Any, kwargs: Any) -> Any:
        """Returns what the module gets in the place of its arguments; None: these."""
        if self.calls:
            self.drop_dead()
        call = _Call(sys._getframe(2))
        if _transform() is None:
            self._begin(call)
        else:
            with torch._C._DisableFuncTorch():  # which would wrap leaves that are made now, and they outlive it
                self._begin(call)
        self.calls.append(call)
        self.forwards += 1
        plan = call.plan
        if plan is None:
            return None
        if self._low is not None and call.placement is not None and torch.is_autocast_enabled(plan.device_type):
            self._look_at_autocast(call, torch.get_autocast_dtype(plan.device_type))
        if self._input_dtype is None or self.full_depth:
            return None
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):  # the most frequent call, without a search
            return (cast_tensors(args[0], self._input_dtype),), kwargs
        return cast_tensors((args, kwargs), self._input_dtype)

    def _begin(self, call: _Call) -> None:
        model = self._model()
        assert model is not None, "it has this object"
        caller = DistributedDataParallel._active_ddp_module
        if caller is not None and caller is not model.wrapper():
            native.require_own_call(caller, model.root)
        plan = model.follow() if model.dirty or model.plan.added else model.plan
        if plan is None:
            return
        try:
            self._place(call, plan)
        except ReplacedError as error:
            plan = model.follow(str(error))
            if plan is not None:
                self._place(call, plan)

    def _place(self, call: _Call, plan: Plan) -> None:
        training, region, pool = plan.training, self._region, plan.pool
        pool.require_plan()
        if training.running is not None:
            plan.backward.drop_dead()
        call.plan, call.was_low = plan, region.low
        call.inside = training.running is not None or (bool(self.calls) and self._inner() is not None)
        if self.full_depth or not pool.rows:
            region.low = plan.casts and not self.full_depth
        else:
            try:
                call.placement = pool.place_present()
                region.low = True
                if pool.moved:
                    plan.reducer.hook_again()  # swap_tensors() gives a master another address, and takes hooks away
                _wait(plan)
            except BaseException:
                self._put_away(call)
                call.plan = None
                raise
        if not call.inside:
            call.stands_for = training.forwarding = Pass(None)

    def _look_at_autocast(self, call: _Call, other: torch.dtype) -> None:
        """Warns once of an autocast around the model whose type is another one than that of its leaves."""
        if other is not self._low and not call.inside:
            self._warn(
                _AUTOCAST,
                f"ddp_mp: this model computes in {self._low}, and it is called inside torch.autocast of {other}; give both the "
                "same type, or leave the autocast out and patch with ddp_mp.Options(autocast=True)",
            )

    # --- the end -----------------------------------------------------------------------------------------------------

    def _inner(self) -> _Call | None:
        """The innermost call of this thread."""
        thread = get_ident()
        for call in reversed(self.calls):
            if call.thread == thread:
                return call
        return None

    def _leave(self, output: Any) -> Any:
        """Returns what the caller gets in the output's place; None: the output."""
        call = self._inner()
        if call is not None:
            try:
                self._end(call, output)
            finally:
                self.calls.remove(call)
                if profiling():
                    in_range("ddp_mp::restore", self._put_away)(call)
                else:
                    self._put_away(call)
        if self._output_dtype is None or self._inner() is not None or (call is not None and self.full_depth):
            return None  # a module that called itself casts what leaves the outermost call
        return cast_tensors(output, self._output_dtype)

    def _end(self, call: _Call, output: Any) -> None:
        plan, placement, error = call.plan, call.placement, sys.exc_info()[1]
        if plan is None:
            return
        if plan.waits.learns:
            plan.waits.learned()
        if placement is not None:
            for group in plan.pool.groups:
                group.engine.wait()  # with wait="module", what no module has waited for: masters may be written from now on
            self._carry(placement)
            if len(self.calls) > 1:
                self._share(call)
        if error is not call.handled:
            if placement is not None and isinstance(error, (RuntimeError, TypeError)):
                model = self._model()
                explain(error, self._root(), model is not None and model.options.autocast)
            return
        if call.inside or not torch.is_grad_enabled():
            return
        outputs = [t for t in tensors_in(output) if t.requires_grad and t.grad_fn is not None]
        if outputs or plan.trains:
            own = None if placement is None else placement.generation
            new = Pass(own, [g for g in _earlier(call) if g is not own] if call.earlier else ())
            plan.training.add(new, outputs, (self._model(), plan))
            call.awaited = True

    def _share(self, call: _Call) -> None:
        """The graph of a call around this one is that of this one too, and needs its leaves."""
        assert call.placement is not None
        outer = [c for c in self.calls if c is not call and c.thread == call.thread]
        if outer:
            outer[-1].earlier += [Pass(g) for g in {*_earlier(call), call.placement.generation}]

    def _put_away(self, call: _Call) -> None:
        plan, placement = call.plan, call.placement
        if plan is None:
            return
        call.placement = None
        self._region.low = call.was_low
        if plan.training.forwarding is call.stands_for:
            plan.training.forwarding = None
        for held in call.earlier:
            held.finish()
        if placement is not None:
            take_back(placement)
            if not call.awaited:
                plan.pool.free(placement.generation)
        if call.earlier:
            plan.pool.free_unused()

    # --- masters and leaves inside a forward -------------------------------------------------------------------------

    def show_masters(self) -> Callable[[], None]:
        """Forwards of this thread find masters in their sites, until the function that is returned is called.

        Then they go on with leaves that hold what the masters have, which may have been written meanwhile.
        """
        thread, region = get_ident(), self._region
        calls = [call for call in self.calls if call.placement is not None and call.thread == thread]
        if not calls:
            return lambda: None
        was_low = region.low
        for call in calls:
            self._leave_leaves(call)
        region.low = False

        def show_leaves() -> None:
            for call in calls:
                self._place_again(call)
            region.low = was_low

        return show_leaves

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
        _wait(plan)

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
                self._warn(
                    row.name,
                    f"ddp_mp: parameter {row.name!r} was written inside the forward, where the module holds its {leaf.dtype} "
                    "leaf: the values are carried to the master, rounded; write inside `with ddp_mp.full_precision(ddp):`, "
                    "where the module holds its masters",
                )
        generation.sites.remember()

    def _warn(self, subject: str, text: str) -> None:
        """Warns once of each subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(text, stacklevel=4)


def _wait(plan: Plan) -> None:
    """The current stream waits for casts that have just begun."""
    if profiling() or plan.waits.in_ranges:
        plan.waits.wait_in_range()
        return
    for wait, bucket in plan.waits.at_root:
        wait(bucket)


def _earlier(call: _Call) -> set[Generation]:
    return {held.generation for held in call.earlier if held.generation is not None}
