"""``hooks="root"``: only the root hook is ours; PyTorch's wait hook and communication hook work on top of it.

What those two read keeps its meaning: ``ddp._submodule_to_event[module].popleft().wait(stream=...)``, ``param._mp_param``
(which owns its storage), ``param._fp_param`` and ``_free_storage(param._mp_param)``.  Their defects stay.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _C
from . import ddp as native
from .casts import new_engine
from .guards import Guards, held_by
from .hooks import is_called, weakly
from .options import Options
from .parameters import Managed, managed_parameters


class RootModel:
    """The root hook of one wrapper."""

    def __init__(self, ddp: DistributedDataParallel, precision: _MixedPrecision, options: Options) -> None:
        self.precision, self.options = precision, options
        self._ddp = weakref.ref(ddp)
        self._module = ddp.module
        self.casts = 0
        self.rebuilds = 0
        self._hooked: list[tuple[nn.Module, int, Any]] = []
        self._plan(ddp)
        expose = weakly(self.expose, None)
        self.guards = Guards(ddp.module, None, expose, read=expose)
        self._step_hook = register_optimizer_step_pre_hook(weakly(self._before_step, None))
        weakref.finalize(self, self._step_hook.remove)

    # --- put in place ------------------------------------------------------------------------------------------------

    @classmethod
    def install(cls, ddp: DistributedDataParallel, precision: _MixedPrecision, options: Options) -> None:
        """Puts our hook where PyTorch's root hook is registered; sets PyTorch's mixed precision up where it is missing."""
        if precision.param_dtype is None or precision.reduce_dtype is None:
            raise ValueError("Options.hooks='root': PyTorch's own hooks need both param_dtype and reduce_dtype")
        if options.prefetch or options.reuse_unchanged or options.wait != "root":
            raise ValueError("Options: prefetch, reuse_unchanged and wait='module' need hooks='all'")
        if options.full_precision_modules or options.output_dtype is not None or options.autocast:
            raise ValueError(
                "Options: full_precision_modules, output_dtype and autocast need hooks='all': PyTorch's own hooks cast every "
                "parameter and every input"
            )
        if not options.cast_forward_inputs:
            raise ValueError("Options: cast_forward_inputs=False needs hooks='all': PyTorch's own hooks cast every input")
        if ddp.mixed_precision is None:
            native.restore_masters(ddp)
            ddp.mixed_precision = precision
            native.equip_mixed_precision(ddp)
        native.restore_masters(ddp)
        model = cls(ddp, precision, options)
        function = type(ddp)._root_copy_hook
        for key, hook in ddp.module._forward_pre_hooks.items():
            if getattr(hook, "__func__", None) is function and getattr(hook, "__self__", None) is ddp:
                model._hooked.append((ddp.module, key, hook))
        for module, key, _ in model._hooked:
            module._forward_pre_hooks[key] = _RootHook(model)
        ddp.__dict__["_ddp_mp_root"] = model

    def uninstall(self, ddp: DistributedDataParallel) -> None:
        """PyTorch's root hook again, masters in place."""
        self.expose()
        for module, key, hook in self._hooked:
            module._forward_pre_hooks[key] = hook
        self.guards.detach()
        self._step_hook.remove()
        ddp._submodule_to_event = defaultdict(deque)
        del ddp.__dict__["_ddp_mp_root"]

    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapper, while it lives."""
        return self._ddp()

    # --- the plan ----------------------------------------------------------------------------------------------------

    def _plan(self, ddp: DistributedDataParallel) -> None:
        dtype = self.precision.param_dtype
        assert dtype is not None  # install() said so
        self.rows = [
            row
            for row in managed_parameters(ddp.module, ddp.parameters_to_ignore)
            if row.floating and row.master.dtype is not dtype and _owns_storage(row)
        ]
        by_device: dict[torch.device, list[Managed]] = {}
        for row in self.rows:
            by_device.setdefault(row.master.device, []).append(row)
        self.groups = [_RootGroup(rows, dtype, self.options) for rows in by_device.values()]
        bucket_of = {id(row.master): (g, b) for g, group in enumerate(self.groups) for row, b in group.buckets()}
        self._module_events = [
            (module, max((bucket_of[id(p)] for p in module._parameters.values() if id(p) in bucket_of), default=(0, 0)))
            for module in ddp.module.modules()
        ]

    # --- state that others ask for -----------------------------------------------------------------------------------

    @property
    def under_way(self) -> str:
        """``backward`` or ``forward`` while one is under way in this thread; empty between them.

        No hook of ours sees the end of a forward, so the stack is asked.
        """
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if is_called(self._module) else ""

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to write parameters: masters in place."""
        low = any(row.master.dtype is self.precision.param_dtype for row in self.rows)
        if not low or held_by(optimizer).isdisjoint(id(row.master) for row in self.rows):
            return
        if self.under_way:
            raise RuntimeError(
                f"ddp_mp: an optimizer stepped inside a {self.under_way} of a model with Options.hooks='root', where its "
                "parameters are low-precision copies; call optimizer.step() after backward, or ddp_mp.unpatch(ddp) first"
            )
        self.expose()

    def expose(self) -> None:
        """Masters in place, unless a forward or a backward is under way in this thread."""
        if not self.under_way:
            for group in self.groups:
                group.engine.reclaim()

    # --- the hook ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Casts every parameter on the private stream, and fills the queues that PyTorch's wait hook empties."""
        ddp: Any = self._ddp()
        if ddp is None or not self.groups:
            return
        for group in self.groups:
            if not group.cast():
                self.rebuilds += 1
                self._plan(ddp)
                self.run()
                return
        self.casts += 1
        queues: defaultdict[nn.Module, _Events] = defaultdict(_Events)
        events = [[group.engine.event(b) for b in range(group.bucket_count)] for group in self.groups]
        for module, (g, b) in self._module_events:
            queues[module].append(events[g][b])
        ddp._submodule_to_event = queues


class _Events(deque[_C.Event]):
    """The events of one module.  A copy is empty: events belong to this process and to this pass."""

    def __reduce__(self) -> Any:
        return _Events, ()


class _RootGroup:
    """The parameters of one device; each copy is the parameter's own ``_mp_param``."""

    def __init__(self, rows: list[Managed], dtype: torch.dtype, options: Options) -> None:
        self.rows, self.dtype = rows, dtype
        self.engine = new_engine(rows, dtype, options)
        self.lows = [self._low(row) for row in rows]
        self.masters = [row.master.data for row in rows]
        self.bytes = [row.master.numel() * dtype.itemsize for row in rows]
        self._storages = [low.untyped_storage() for low in self.lows]
        for row, master in zip(rows, self.masters, strict=True):
            row.master.__dict__["_fp_param"] = master
        self._allocate()
        self.engine.bind(self.masters, self.lows, None)
        self.bucket_count = len(self.engine.buckets)
        for storage in self._storages:
            storage.resize_(0)

    def _low(self, row: Managed) -> torch.Tensor:
        low = getattr(row.master, "_mp_param", None)
        if low is None or low.dtype is not self.dtype or low.shape != row.master.shape:
            low = torch.empty_like(row.master, dtype=self.dtype, requires_grad=False)
            row.master.__dict__["_mp_param"] = low
        return low

    def buckets(self) -> list[tuple[Managed, int]]:
        return [(row, bucket) for row, (bucket, _) in zip(self.rows, self.engine.rows, strict=True)]

    def _allocate(self) -> None:
        for storage, nbytes in zip(self._storages, self.bytes, strict=True):
            if storage.size() != nbytes:
                storage.resize_(nbytes)

    def low_bytes(self) -> int:
        """Bytes of low-precision memory held now."""
        return sum(storage.size() for storage in self._storages)

    def cast(self) -> bool:
        """Casts and switches; False when the plan must be built anew."""
        self.engine.reclaim()
        for row in self.rows:
            # as PyTorch's root hook: its reduction wants gradients in the computing type
            grad = row.master.grad
            if grad is not None and grad.dtype is not self.dtype:
                grad.data = grad.to(self.dtype)
        self._allocate()
        status = self.engine.begin()
        if status == _C.MOVED:
            for index in self.engine.moved():
                row = self.rows[index]
                if row.master.shape != self.masters[index].shape:
                    raise ValueError(
                        f"parameter {row.name!r}: expected shape {tuple(self.masters[index].shape)}, found "
                        f"{tuple(row.master.shape)}; wrap the module again"
                    )
                if row.master.dtype is not self.masters[index].dtype:
                    return False
                self.masters[index] = row.master.__dict__["_fp_param"] = row.master.data
                self.engine.rebind_master(index, self.masters[index])
            status = self.engine.begin()
        return status == _C.UNCHANGED


class _RootHook:
    """The forward pre-hook, in the place of PyTorch's; refers to the model weakly."""

    def __init__(self, model: RootModel) -> None:
        self._model = weakref.ref(model)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        model = self._model()
        if model is not None:
            model.run()


def _owns_storage(row: Managed) -> bool:
    """Whether the engine can read the parameter and write its copy flat; others keep PyTorch's way, which is none here."""
    try:
        dense = bool(_C.describe(row.master)["dense"])
    except BufferError as error:
        raise RuntimeError(f"Options.hooks='root': parameter {row.name!r} cannot be read: {error}") from error
    if not dense:
        raise RuntimeError(
            f"Options.hooks='root': parameter {row.name!r} has gapped or overlapping memory; make it contiguous, or use "
            "hooks='all'"
        )
    return True


def root_of(ddp: Any) -> RootModel | None:
    """The root hook of a wrapper, which may be compiled, or None."""
    found = getattr(native.uncompiled(ddp), "__dict__", {}).get("_ddp_mp_root")
    return found if isinstance(found, RootModel) else None
