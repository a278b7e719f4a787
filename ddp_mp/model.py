"""One patched model: its parts, and the plan, which follows the module's parameters."""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from . import _C, agreement
from . import ddp as native
from .autocast import LOW
from .backward import inputs
from .buckets import LooseBucket
from .comm import Communicator
from .ddp_reducer import LoggerStandIn, ReducerStandIn
from .forward import Forward
from .full_precision import FullPrecisionModules
from .guards import Guards, everywhere, held_by
from .hooks import weakly
from .log import logger
from .options import Options
from .parameters import managed_parameters
from .plan import Plan
from .stand_ins import stand_ins
from .step import Region


class PatchedModel:
    """What ``patch`` puts into a wrapper with ``hooks="all"``.

    The wrapper owns it; module hooks refer to it weakly, so that it goes with the wrapper.
    """

    def __init__(self, ddp: DistributedDataParallel, precision: _MixedPrecision, options: Options) -> None:
        self.precision, self.options = precision, options
        self.wrapper = weakref.ref(ddp)
        # weakly: a graph keeps this object, and a module may keep an output: a cycle that nobody would see
        self._module: weakref.ref[nn.Module] = weakref.ref(ddp.module)
        self.comm = Communicator(ddp.process_group)
        self.built_with: _MixedPrecision | None = None  # what the wrapper's constructor was given
        self.overrides: native.Overrides
        self.dirty = False  # something was registered inside the module, or a state dict was loaded
        self.rebuilds = 0
        self._warned = False  # of masters that are low precision
        self.region = Region()
        self.plan = self._new_plan(ddp)
        self.forward = Forward(self)
        self.guards = Guards(ddp.module, self, weakly(self.written, None))
        everywhere.add(self)
        inputs.watch(self)
        stand_ins.watch(self)
        _tell_shared()

    # --- state that others ask for -----------------------------------------------------------------------------------

    @property
    def root(self) -> nn.Module:
        """The wrapped module."""
        module = self._module()
        assert module is not None, "asked of a model whose module is gone"
        return module

    def is_of(self, module: nn.Module) -> bool:
        """Whether this is the wrapped module, which may be gone while a graph keeps the rest."""
        return self._module() is module

    @property
    def under_way(self) -> str:
        """``backward`` or ``forward`` while one is under way, in whatever thread; empty between them."""
        self.plan.backward.drop_dead()
        if self.plan.training.running is not None:
            return "backward"
        return "forward" if self.forward.under_way else ""

    def leaves_of(self, master: torch.Tensor) -> list[nn.Parameter]:
        """Every leaf that stands for a master in a graph that may still have a backward."""
        return self.plan.leaves_of(master)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer has stepped, and may have written masters."""
        self.plan.pool.maybe_written()  # a fused optimizer counts no version
        if not (self.forward.calls or self.options.prefetch or self.options.reuse_unchanged):
            return
        held = held_by(optimizer)
        if held.isdisjoint(self.plan.ids):
            return
        self.masters_changed()
        self.forward.drop_dead()
        self.forward.show_masters()()
        trained = {id(row.master) for row in self.plan.rows if row.master.requires_grad}
        if self.options.prefetch and trained <= held and not self.under_way:
            self.plan.pool.prefetch()

    def full_precision(self) -> Callable[[], None]:
        """Masters in what this thread has under way, and in calls that begin from now on; what is returned ends it."""
        show_leaves = self.plan.backward.show_masters(), self.forward.show_masters()
        self.forward.full_depth += 1

        def leave() -> None:
            self.forward.full_depth -= 1
            self.plan.pool.maybe_written()
            for show in show_leaves:
                show()

        return leave

    def masters_changed(self) -> None:
        """The masters were written: no leaves are promised to hold their values any more."""
        self.plan.pool.changed()

    def written(self) -> None:
        """The masters are about to be written, or something is registered inside the module."""
        self.masters_changed()
        self.dirty = True

    # --- parts -------------------------------------------------------------------------------------------------------

    def stand_in(self, ddp: Any, logged: tuple[dict[str, str], dict[str, int]]) -> None:
        """Takes the place of the wrapper's reducer and of its logger, which last said ``logged``."""
        ddp.logger = LoggerStandIn(*logged)
        ddp.reducer = ReducerStandIn(self, bool(ddp.static_graph))

    def tell_ranks(self) -> None:
        """Tells the other ranks what this one has now; they are to compare it before the next reduction."""
        ddp = self.wrapper()
        if ddp is None:
            return
        changed = agreement.say(ddp, self.comm.process_group, self._description(ddp))
        self.comm.unsettled = weakly(self._compare_ranks, None) if changed else None

    def _compare_ranks(self) -> None:
        ddp = self.wrapper()
        if ddp is not None:
            agreement.compare(ddp, self.comm.process_group, self._description(ddp), self.options.agree_seconds)

    def _description(self, ddp: DistributedDataParallel) -> agreement.Description:
        return {
            "options": agreement.of_options(self.precision, self.options),
            "wrapper": agreement.of_wrapper(ddp, self.comm.hook),
            **agreement.of_plan(self.plan),
        }

    def detach(self) -> None:
        """Nothing of ours is left on the module or its parameters, however much of this object was built."""
        for part in ("forward", "plan", "guards"):
            if part in self.__dict__:
                getattr(self, part).detach()
        everywhere.remove(self)
        inputs.forget(self)
        stand_ins.forget(self)
        _tell_shared()

    def __del__(self) -> None:
        """The wrapper is gone: the module is an ordinary one again."""
        if not sys.is_finalizing():
            self.detach()

    # --- the plan follows the module ---------------------------------------------------------------------------------

    def _new_plan(self, ddp: DistributedDataParallel) -> Plan:
        caps = native.bucket_caps(ddp)
        plan = Plan(self.root, ddp.parameters_to_ignore, caps, self.precision, self.options, self.comm, self.region)
        self._warn_of_low_masters([row.name for row in plan.pool.rows if row.master.dtype in LOW])
        return plan

    def _warn_of_low_masters(self, names: list[str]) -> None:
        """Says once that masters are no full precision: what an optimizer adds to them is rounded away."""
        if names and not self._warned:
            self._warned = True
            warnings.warn(
                f"ddp_mp: the masters of this model are low precision themselves, {self.root.get_parameter(names[0]).dtype} in "
                f"{_listed(names)}, so that small updates are lost; keep the model in float32 and leave out .half(), "
                ".bfloat16() and .to(dtype)",
                stacklevel=6,
            )

    def follow(self, what: str = "") -> Plan | None:
        """The plan for what the module holds now, before a forward.

        It is a new one where parameters did something, which ``what`` says, or where something was registered in the module
        that the plan does not know.  None while plain tensors stand in for the parameters (``functional_call``).
        """
        plan, ddp = self.plan, self.wrapper()
        if ddp is None or plan.has_stand_ins():
            return None
        rows = managed_parameters(self.root, ddp.parameters_to_ignore)
        added = plan.require_same_model(rows)
        full_modules = FullPrecisionModules(self.root, self.options, self.precision.param_dtype, plan.region)
        if what or not plan.same_as(full_modules.mark(rows), full_modules):
            self._rebuild(ddp)
            log_plan(self, f"plan built anew, as parameters {what or 'were replaced'}, for")
        self.plan.added = added
        self.dirty = False
        return self.plan

    def _rebuild(self, ddp: DistributedDataParallel) -> None:
        old = self.plan
        old.retire()
        self.plan = self._new_plan(ddp)
        self.plan.reducer.rounds = old.reducer.rounds
        self.plan.training.previous = weakref.ref(old.training)
        self.rebuilds += 1
        self.tell_ranks()
        _tell_shared()


def _tell_shared() -> None:
    """Tells plans that train some of the same masters: the next reduces what one leaves in ``.grad``, so that none is early."""
    plans = [model.plan for model in everywhere.models()]
    for plan in plans:
        plan.training.shared = any(other is not plan and not plan.ids.isdisjoint(other.ids) for other in plans)


_SHOWN = 8  # names of parameters in one line of the log


def log_plan(model: PatchedModel, what: str) -> None:
    """Says what was planned for a model, and what of it the engine leaves to PyTorch."""
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info("%s %s: %s", what, type(model.root).__name__, summary(model))
    fallback = model.plan.pool.fallback
    if fallback is not None:
        logger.info(
            "cast by PyTorch, one by one, as their memory cannot be read flat: %s", _listed([r.name for r in fallback.rows])
        )
    loose = [bucket.names[0] for bucket in model.plan.reducer.buckets if isinstance(bucket, LooseBucket)]
    if loose:
        logger.info("reduced one by one, as their gradients cannot be packed: %s", _listed(loose))


def summary(model: PatchedModel) -> str:
    """One line: what is cast, by what, and how gradients are reduced."""
    plan, precision = model.plan, model.precision
    groups = [f"{len(group.engine.buckets)} on {group.device} by {_backend(group.device.type)}" for group in plan.pool.groups]
    full = len(plan.full_modules.outermost)
    parts = [
        f"{len(plan.pool.rows)} of {len(plan.rows)} parameters cast to {precision.param_dtype}",
        f"cast buckets: {', '.join(groups) or 'none'}",
        f"gradients reduced in {precision.reduce_dtype or precision.param_dtype or 'their own types'} in "
        f"{len(plan.reducer.buckets)} buckets over {model.comm.process_group.size()} ranks",
        *([f"{full} modules in full precision"] if full else []),
        str(model.options),
    ]
    return "; ".join(parts)


def _backend(device_type: str) -> str:
    if device_type == "cpu":
        return f"the host backend ({_C.build_info()['simd']})"
    return f"the CUDA backend ({_C.build_info()['cuda']})"


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def model_of(ddp: Any) -> PatchedModel | None:
    """The patched model of a wrapper, which may be compiled, or None."""
    found = getattr(native.uncompiled(ddp), "__dict__", {}).get("_ddp_mp")
    return found if isinstance(found, PatchedModel) else None
