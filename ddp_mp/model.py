"""One patched model: builds the parts, connects them, and builds them anew when the module's parameters are others."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from . import native
from .backward import Backward
from .borders import Borders
from .comm import Communicator
from .forward import Forward
from .guards import Guards, optimizer_guard
from .log import log_plan, logger
from .low import LowPrecision, Region
from .options import Options
from .parameters import Managed, Unwatched, managed_parameters
from .reducer import Reducer
from .standin import LoggerStandIn, ReducerStandIn
from .waits import Waits
from .weak import weakly

# The property itself: a loop over many frozen parameters then runs in C.
_requires_grad: Callable[[torch.Tensor], bool] = vars(torch._C.TensorBase)["requires_grad"].__get__


class PatchedModel:
    """What ``patch`` puts into a wrapper with ``hooks="all"``.

    The wrapper owns it; module hooks refer to it weakly, so that it goes with the wrapper.
    """

    def __init__(self, ddp: DistributedDataParallel, precision: _MixedPrecision, options: Options) -> None:
        self.precision, self.options = precision, options
        self._ddp = weakref.ref(ddp)
        # weakly: a graph keeps this object, and a module may keep an output: a cycle that nobody would see
        self._module: weakref.ref[nn.Module] = weakref.ref(ddp.module)
        self.comm = Communicator(ddp.process_group)
        self.comm.hook = native.user_hook(ddp)
        self.built_with: _MixedPrecision | None = None  # what the wrapper's constructor was given
        self.overrides = native.Overrides(ddp)
        self.dirty = False  # something was registered inside the module, or a state dict was loaded
        self.rebuilds = 0
        self.region = Region()
        self.borders = self._new_borders()
        self.rows = self._find_rows(ddp, self.borders)
        self._added: set[int] = set()  # parameters that came later and are not reduced: an error once they would be trained
        self.low = self._new_low()
        self.backward = Backward(self.low, ddp.static_graph)
        self.reducer = self._new_reducer(ddp)
        self.backward.reducer = self.reducer
        self.backward.keeper = weakref.ref(self)
        self.low.on_moved = weakly(self._moved, None)
        self.forward = Forward(
            ddp.module, self.low, self.backward, self._new_waits(), weakly(self._prepare, False), options.output_dtype
        )
        self.borders.attach()
        self.guards = self._new_guards()
        optimizer_guard.add(self)

    # --- state that others ask for -----------------------------------------------------------------------------------

    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapper, while it lives."""
        return self._ddp()

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
    def needs_exposing(self) -> bool:
        """Whether masters are not in place now."""
        return self.low.is_low

    @property
    def under_way(self) -> str:
        """``backward`` or ``forward`` while one is under way, in whatever thread; empty between them."""
        self.backward.drop_dead()
        if self.backward.running:
            return "backward"
        return "forward" if self.backward.forwarding else ""

    @property
    def watches_steps(self) -> bool:
        """Whether anything depends on knowing of optimizer steps."""
        return self.options.prefetch or self.options.reuse_unchanged

    @property
    def parameter_ids(self) -> set[int]:
        """``id`` of every managed parameter."""
        return {id(row.param) for row in self.rows}

    def casts(self, param: torch.Tensor) -> bool:
        """Whether a low-precision copy is made of the parameter."""
        return any(row.param is param for row in self.low.rows)

    @property
    def trained_ids(self) -> set[int]:
        """``id`` of every parameter that gets a gradient."""
        return {id(row.param) for row in self.rows if row.param.requires_grad}

    def stepped(self, covered: bool) -> None:
        """An optimizer wrote masters; ``covered``: all that are trained."""
        self.masters_changed()
        if covered and self.options.prefetch and not self.backward.running:
            self.low.prefetch(live=self.backward.live())

    def masters_changed(self) -> None:
        """The masters were written; copies that were kept, or are in place, are not theirs any more."""
        self.low.changed()

    def copied(self) -> None:
        """The parameters are about to be copied: masters are put in place for it."""
        self._require_between("copied")

    def written(self) -> None:
        """The masters are about to be written: they are put in place for it."""
        self._require_between("loaded")
        self.masters_changed()
        self.dirty = True

    def expose(self) -> None:
        """Masters in place, unless a forward or a backward is under way."""
        self.backward.expose()

    def _require_between(self, what: str) -> None:
        self.expose()
        if self.low.is_low and self.under_way:
            raise RuntimeError(
                f"ddp_mp: a patched model was {what} while a {self.under_way} of it is under way, in this or another thread: "
                "its parameters are low-precision copies then; do it between steps (state_dict() gives masters at any time)"
            )

    def _master_of(self, param: torch.Tensor) -> torch.Tensor | None:
        return self.low.master_of(param)

    # --- parts -------------------------------------------------------------------------------------------------------

    def stand_in(self, ddp: Any, logger: LoggerStandIn) -> None:
        """Takes the place of the wrapper's reducer and logger."""
        ddp.logger = logger
        ddp.reducer = ReducerStandIn(self.reducer, self.backward, self.comm, weakly(self._any_unused, False))

    def detach(self) -> None:
        """Masters in place, and nothing of ours left on the module or its parameters."""
        self.expose()
        self.low.switch_back()
        self.low.release()
        self.backward.abandon()
        self.forward.detach()
        self.borders.detach()
        self.guards.detach()
        self.reducer.detach()
        optimizer_guard.remove(self)

    def __del__(self) -> None:
        """The wrapper is gone: the module is an ordinary one again."""
        if hasattr(self, "guards") and not sys.is_finalizing():
            self.detach()

    def _new_borders(self) -> Borders:
        return Borders(self.root, self.options, self.precision.param_dtype, self.region)

    def _find_rows(self, ddp: DistributedDataParallel, borders: Borders) -> list[Managed]:
        rows = borders.mark(managed_parameters(self.root, ddp.parameters_to_ignore))
        for row in rows:
            row.own_reduction = row.full and self.precision.reduce_dtype is None
        return rows

    def _new_low(self) -> LowPrecision:
        low = LowPrecision([row for row in self.rows if not row.full], self.precision.param_dtype, self.options)
        low.region = self.region
        cast = {id(row) for row in low.rows}
        self._unwatched = Unwatched([row for row in self.rows if id(row) not in cast])
        return low

    def _new_waits(self) -> Waits:
        return Waits(self.root, self.low, by_module=self.options.wait == "module")

    def _new_guards(self) -> Guards:
        return Guards(
            self.root,
            self.rows,
            weakly(self.expose, None),
            weakly(self.copied, None),
            weakly(self.written, None),
            weakly(self._master_of, None),
            [*self.borders.modules, *self.forward.waits.modules],
            weakly(self._hook_ids, set()),
        )

    def _hook_ids(self) -> set[int]:
        return self.forward.hook_ids | self.borders.hook_ids

    def _any_unused(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and bool(ddp.find_unused_parameters or ddp.static_graph)

    def _new_reducer(self, ddp: DistributedDataParallel) -> Reducer:
        precision = self.precision
        self._frozen = [row.param for row in self.rows if not row.param.requires_grad]
        return Reducer(
            [row for row in self.rows if row.param.requires_grad],
            self.comm,
            precision.reduce_dtype or precision.param_dtype,
            native.bucket_caps(ddp),
            weakly(self.backward.late, None),
            weakly(self.backward.error, None),
        )

    # --- the plan follows the module ---------------------------------------------------------------------------------

    def _prepare(self, replaced: bool) -> bool:
        """Before a forward: builds the plan anew when the module holds other parameters than it did.

        Returns whether the parameters are to be cast: not while plain tensors stand in for them (``functional_call``).
        """
        thawed = any(map(_requires_grad, self._frozen))
        replaced = replaced or self._unwatched.replaced()
        if not (replaced or self.dirty or thawed):
            if self._unwatched.swapped():
                self.reducer.hook_again()
            return True
        ddp = self._ddp()
        if ddp is None or self._has_stand_ins():
            return False
        borders = self._new_borders()
        rows = self._find_rows(ddp, borders)
        replaced = replaced or [(id(r.param), r.full) for r in rows] != [(id(r.param), r.full) for r in self.rows]
        if replaced or thawed or borders.module_ids() != self.borders.module_ids():
            self._check_same_model(rows)
            self._rebuild(ddp, rows, borders)
            what = "parameters" if replaced else "full-precision modules"
            why = "parameters require grad now" if thawed else f"{what} were replaced"
            log_plan(self, f"plan built anew, as {why}, for")
        elif self._added:
            self._check_same_model(rows)
        self.reducer.hook_again()
        self.dirty = bool(self._added)
        return True

    def _moved(self) -> None:
        """Masters were found at another address."""
        logger.debug("masters were found at another address and taken up")
        self.reducer.hook_again()

    def _has_stand_ins(self) -> bool:
        present = (home.get(key) for row in self.rows for home, key in row.sites)
        return any(isinstance(p, torch.Tensor) and not isinstance(p, nn.Parameter) for p in present)

    def _check_same_model(self, rows: list[Managed]) -> None:
        known = [row for row in self.rows if id(row.param) not in self._added]
        by_id = {id(row.param): row for row in known}  # under another name, as when it is pruned or parametrised
        by_name = {row.name: row for row in known}
        before = [by_id.get(id(row.param)) or by_name.get(row.name) for row in rows]
        self._added = {id(r.param) for r, old in zip(rows, before, strict=True) if old is None and r.param.requires_grad}
        for row, old in zip(rows, before, strict=True):
            if id(row.param) in self._added and torch.is_grad_enabled():
                raise RuntimeError(
                    f"parameter {row.name!r} was added after DistributedDataParallel was built, so that its gradient would "
                    "not be reduced; wrap the module again"
                )
            if old is not None and old.param.shape != row.param.shape:
                raise ValueError(
                    f"parameter {row.name!r}: expected shape {tuple(old.param.shape)}, found {tuple(row.param.shape)}; "
                    "DistributedDataParallel cannot take another shape: wrap the module again"
                )

    def _rebuild(self, ddp: Any, rows: list[Managed], borders: Borders) -> None:
        self.low.switch_back()
        self.guards.detach()
        self.reducer.detach()
        self.borders.detach()
        self.rows, self.borders = rows, borders
        self.borders.attach()
        self.low = self._new_low()
        self.reducer = self._new_reducer(ddp)
        self.backward.replace(self.low, self.reducer)
        self.low.on_moved = weakly(self._moved, None)
        self.forward.waits.detach()
        self.forward.low, self.forward.waits = self.low, self._new_waits()
        self.guards = self._new_guards()
        self.stand_in(ddp, ddp.logger)
        self.rebuilds += 1


def model_of(ddp: Any) -> PatchedModel | None:
    """The patched model of a wrapper, which may be compiled, or None."""
    found = getattr(native.uncompiled(ddp), "__dict__", {}).get("_ddp_mp")
    return found if isinstance(found, PatchedModel) else None
