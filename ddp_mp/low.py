"""The low-precision copies: their memory, and the switch of ``.data`` between masters and copies.

One :class:`_Group` a device holds an engine of the C extension, which owns the plan and does the work; this file decides
when memory is allocated, reused, released or left to a graph that still needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount

import torch

from . import _C
from .log import logger
from .options import Options
from .parameters import Managed, dense
from .ranges import span

DTYPE_NAME = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


class ReplacedError(Exception):
    """A module holds another parameter object than the plan knows: the plan must be built again."""


class Region:
    """Whether the module computes in low precision now: for hooks that torch.compile looks into, a plain attribute."""

    def __init__(self) -> None:
        self.low = False


class _Arenas:
    """One set of copies of one device: an arena a bucket, and a view of it a row.

    Autograd may keep views of an arena for backward, so memory is only given back while nobody but this object refers to
    it, and is otherwise left to those who do.
    """

    def __init__(self, rows: Sequence[Managed], engine: _C.Engine, dtype: torch.dtype, device: torch.device) -> None:
        self.bytes = [nbytes for _, _, nbytes in engine.buckets]
        self.arenas = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in self.bytes]
        self.lows = [
            _view_like(row.param, self.arenas[bucket], offset, dtype)
            for row, (bucket, offset) in zip(rows, engine.rows, strict=True)
        ]
        storages = [arena.untyped_storage() for arena in self.arenas]
        # bound and looked up once: both are used in every step
        self._storages = storages
        self._resize = [(storage.resize_, nbytes) for storage, nbytes in zip(storages, self.bytes, strict=True)]
        self._owners = [(storage._cdata, torch._C._storage_Use_Count(storage._cdata)) for storage in storages]
        self._references = list(map(getrefcount, storages))
        self._on_host = device.type == "cpu"
        self.allocated = True

    def allocate(self) -> None:
        for resize, nbytes in self._resize:
            resize(nbytes)
        self.allocated = True

    def release(self) -> bool:
        """Frees the memory and returns True, or returns False when somebody else still refers to some of it."""
        if list(map(getrefcount, self._storages)) != self._references:
            return False  # untyped_storage() of a copy gives this very object, which counts as one owner
        for storage, (address, owners) in zip(self._storages, self._owners, strict=True):
            if torch._C._storage_Use_Count(address) != owners or not storage.resizable():
                return False  # resizable: numpy, for one, marks memory that it looked at
            if self._on_host and storage.is_shared():
                return False  # another process may map it
        self.allocated = False  # first: an interrupt may leave some of it freed, and the next use then allocates all
        for resize, _ in self._resize:
            resize(0)
        return True


def _view_like(param: torch.Tensor, arena: torch.Tensor, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """The part of ``arena`` at ``offset`` bytes, with the type ``dtype`` and the shape and strides of ``param``."""
    nbytes = param.numel() * dtype.itemsize
    flat = arena[offset : offset + nbytes].view(dtype)
    return flat.as_strided(param.shape, param.stride())


class Copies:
    """One generation of copies over all devices.  A forward's graph belongs to the generation it was computed with."""

    def __init__(self, arenas: list[_Arenas]) -> None:
        self.arenas = arenas

    @property
    def allocated(self) -> bool:
        for arenas in self.arenas:  # noqa: SIM110 - a generator costs 2 us in training
            if not arenas.allocated:
                return False
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of low-precision memory held now."""
        return sum(sum(a.bytes) for a in self.arenas if a.allocated)


def new_engine(rows: Sequence[Managed], dtype: torch.dtype, options: Options) -> _C.Engine:
    """The engine of one device's parameters, in the order of ``rows``; not bound to masters and copies yet."""
    return _C.Engine(
        [row.param for row in rows],
        [row.name for row in rows],
        [(home, key, index) for index, row in enumerate(rows) for home, key in row.sites],
        DTYPE_NAME[dtype],
        options.first_bucket_bytes,
        options.bucket_bytes,
    )


def summed_counters(engines: Iterable[_C.Engine]) -> dict[str, int]:
    """Sums of the engines' counters."""
    total: dict[str, int] = {}
    for engine in engines:
        for key, value in engine.counters().items():
            total[key] = total.get(key, 0) + value
    return total


class _Group:
    """The parameters of one device that the engine can read, and their masters."""

    def __init__(self, rows: list[Managed], dtype: torch.dtype, options: Options) -> None:
        self.rows, self.dtype = rows, dtype
        self.device = rows[0].param.device
        self.masters = [row.param.data for row in rows]
        self.shapes = [row.param.shape for row in rows]
        self.engine = new_engine(rows, dtype, options)

    def new_arenas(self) -> _Arenas:
        for index in range(len(self.rows)):
            self._require_shape(index)
        with torch.inference_mode(False), torch.no_grad():
            return _Arenas(self.rows, self.engine, self.dtype, self.device)

    def bind(self, arenas: _Arenas) -> None:
        self.engine.bind(self.masters, arenas.lows, arenas.arenas)

    def begin(self) -> bool:
        """Casts and switches to the copies; takes up masters that moved, and returns whether any did.

        Raises ReplacedError when the plan must be built anew, ValueError by name for a parameter of another shape.
        """
        status = self.engine.begin()
        moved = status == _C.MOVED
        if moved:
            self._take_up(self.engine.moved())
            status = self.engine.begin()
        if status != _C.UNCHANGED:
            raise ReplacedError
        return moved

    def _take_up(self, moved: list[int]) -> None:
        for index in moved:
            self._require_shape(index)
        for index in moved:
            row, old = self.rows[index], self.masters[index]
            if row.param.dtype is not old.dtype or row.param.stride() != old.stride() or row.param.device != old.device:
                raise ReplacedError  # another type, layout or device: the plan is built anew
            self.masters[index] = row.param.data
            self.engine.rebind_master(index, self.masters[index])

    def _require_shape(self, index: int) -> None:
        row = self.rows[index]
        if row.param.shape != self.shapes[index]:
            raise ValueError(
                f"parameter {row.name!r}: expected shape {tuple(self.shapes[index])}, found {tuple(row.param.shape)}; "
                "DistributedDataParallel cannot take another shape: wrap the module again"
            )


class _Fallback:
    """Parameters that the engine cannot read (gapped memory, tensor subclasses): cast by PyTorch, one by one."""

    def __init__(self, rows: list[Managed], dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows, dtype
        self.masters: list[torch.Tensor] | None = None
        self.casts = 0

    def check(self) -> None:
        if any(home.get(key) is not row.param for row in self.rows for home, key in row.sites):
            raise ReplacedError

    def lower(self) -> None:
        if self.masters is not None:
            return
        self.masters = [row.param.data for row in self.rows]
        for row, master in zip(self.rows, self.masters, strict=True):
            row.param.data = master.to(self.dtype)
            self.casts += 1

    def restore(self) -> None:
        masters, self.masters = self.masters, None
        if masters is not None:
            for row, master in zip(self.rows, masters, strict=True):
                row.param.data = master


class LowPrecision:
    """All copies of one wrapped module.  Thread safety is the GIL's: one module trains in one thread at a time."""

    def __init__(self, rows: Sequence[Managed], dtype: torch.dtype | None, options: Options) -> None:
        cast = [r for r in rows if dtype is not None and r.floating and r.param.dtype is not dtype]
        readable = [r for r in cast if dense(r.param)]
        by_device: dict[torch.device, list[Managed]] = {}
        for row in readable:
            by_device.setdefault(row.param.device, []).append(row)
        self.rows = cast
        self.dtype = dtype
        self.groups = [_Group(g, dtype, options) for g in by_device.values()] if dtype is not None else []
        taken = {id(r) for r in readable}
        left = [r for r in cast if id(r) not in taken]
        self.fallback = _Fallback(left, dtype) if left and dtype is not None else None
        #: by the id of a parameter: what holds its master, and where
        self._places: dict[int, tuple[_Group | _Fallback, int]] = {}
        parts: list[_Group | _Fallback] = [*self.groups]
        for part in parts if self.fallback is None else [*parts, self.fallback]:
            self._places |= {id(row.param): (part, index) for index, row in enumerate(part.rows)}
        self._switched = [g.engine for g in self.groups] + ([self.fallback] if self.fallback is not None else [])
        self.region = Region()
        self.copies: Copies | None = None
        self.epoch = 0  # grows at every switch from masters to copies: a graph's gradient accumulators belong to one epoch
        self.stale = False  # the masters may have changed behind the copies
        self.on_moved: Callable[[], None] = lambda: None  # masters were found at another address
        self._keep = options.reuse_unchanged
        self._current = False  # the copies are promised to be those of the masters, and are in memory
        self._prefetching = False
        self.casts = 0  # forwards that cast the masters
        self.reused = 0  # forwards that found the copies in place

    @property
    def is_low(self) -> bool:
        """Whether any parameter is its low-precision copy now."""
        for group in self.groups:  # no generator: this runs in every forward
            if group.engine.is_low:
                return True
        return self.fallback is not None and self.fallback.masters is not None

    def master_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """The master behind a parameter that is its copy now, as of the last cast; None where no copy is made of it."""
        part, index = self._places.get(id(param), (None, 0))
        return None if part is None or part.masters is None else part.masters[index]

    def switches(self, value: object) -> bool:
        """Whether this is a parameter that copies are made of."""
        return id(value) in self._places

    @property
    def nbytes(self) -> int:
        """Bytes of low-precision memory held now."""
        return 0 if self.copies is None else self.copies.nbytes

    def enter(self, live: bool) -> None:
        """Parameters become fresh copies of the masters.  ``live``: a graph still needs the present copies.

        When the parameters are copies already, and nothing said that the masters changed, nothing is done.
        On any error all parameters are masters again.
        """
        if self.is_low:
            if not self.stale:
                self.reused += 1
                return
            self.switch_back()
        if self.fallback is not None:
            self.fallback.check()
        try:
            if self._current and not self.stale and self._resume():
                self.reused += 1
            else:
                self._begin(None if live else self.copies)
                for group in self.groups if self._keep else ():
                    group.engine.remember()  # now: a write until the next forward must show, to a master or to its copy
        except BaseException:
            self.switch_back()
            raise
        self._current = self._keep
        self.stale = False

    def enter_again(self, copies: Copies) -> None:
        """For a backward: parameters become the very copies that its forward used; cast again where their memory is gone."""
        if self.is_low and self.copies is copies:
            return
        self.switch_back()
        self._current = False  # these are the values of an earlier forward
        try:
            if not copies.allocated:
                self._begin(copies)
            else:
                if copies is not self.copies:
                    self._bind(copies)
                self._lower()
        except BaseException:
            self.switch_back()
            raise

    def prefetch(self, live: bool) -> None:
        """After an optimizer step, with masters in place: casts for the next forward.

        Never an error of its own: what fails here is logged and left to the next forward, which casts anew or raises it.
        """
        if self.is_low or not self.groups:
            return
        self._prefetching = True
        try:
            if self._cast_ahead(live):
                self._current, self.stale = True, False
                self.casts += 1
        except ReplacedError:
            return  # the next forward builds the plan anew
        except Exception as error:
            logger.warning("casting ahead failed and is left to the next forward: %s: %s", type(error).__name__, error)
            self._settle()
        finally:
            self._prefetching = False

    def _cast_ahead(self, live: bool) -> bool:
        """Casts with masters in place; False, and nothing is done, where the next forward has to take up what moved."""
        self._make_ready(None if live else self.copies)
        for group in self.groups:
            if group.engine.check() != _C.UNCHANGED:
                return False
        with span("ddp_mp::cast"):
            for group in self.groups:
                group.engine.cast()
                group.engine.remember()
        return True

    def _settle(self) -> None:
        """Casts that a failure left under way are over: nobody is to be told of them, and their memory may be given back."""
        for group in self.groups:
            with contextlib.suppress(Exception):
                group.engine.wait()

    def changed(self) -> None:
        """The masters were written: no promise about the copies holds any more."""
        self._current = False
        self.stale = self.stale or self.is_low

    def _resume(self) -> bool:
        """Switches to the copies of the last cast; False when something shows that the masters are not those."""
        for group in self.groups:
            if group.engine.resume() != _C.UNCHANGED:
                self.switch_back()
                return False
        self._lower_fallback()
        return True

    def leave(self, live: bool) -> None:
        """Parameters become masters; memory is given back unless ``live`` says that a graph still needs it.

        The engine lets the current stream wait for the casts before it gives masters back, so that an optimizer may write
        them and the allocator may reuse the memory in stream order.
        """
        self.switch_back()
        if not (live or (self._keep and self._current)):
            self.release()

    def switch_back(self) -> None:
        """``.data`` of every parameter becomes its master.  Goes on past errors and raises the first."""
        self.region.low = False
        first: BaseException | None = None
        for part in self._switched:
            try:
                part.restore()
            except BaseException as error:  # every group must come back, whatever happens to one
                first = first or error
        if first is not None:
            raise first

    def widen_gradients(self) -> None:
        """Gradients that were set by hand while the parameters were copies get the masters' type."""
        for row in self.rows:
            grad = row.param.grad
            if grad is not None and grad.dtype is not row.param.dtype:
                row.param.grad = grad.to(row.param.dtype)

    def release(self) -> None:
        """Gives the memory of the present copies back, or leaves it to the graphs that still refer to it."""
        if self.copies is None or not self.copies.allocated:
            return
        left = False
        for arenas in self.copies.arenas:
            left |= not arenas.release()
        if left:
            logger.debug("the copies are left to those who refer to them; the next forward allocates new ones")
            self.copies = None

    def drop_unused(self) -> None:
        """No graph needs the copies any more: gives their memory back, unless the next forward is to find them."""
        if not (self.is_low or self._current or self._prefetching):
            self.release()

    def wait(self) -> None:
        """The current stream waits for all casts."""
        with span("ddp_mp::wait"):
            for group in self.groups:
                group.engine.wait()

    def _begin(self, copies: Copies | None) -> None:
        self._make_ready(copies)
        moved = False
        with span("ddp_mp::cast"):
            for group in self.groups:
                moved |= group.begin()
        if moved:
            self.on_moved()
        self._lower_fallback()
        self.casts += bool(self.rows)

    def _make_ready(self, copies: Copies | None) -> None:
        """These copies (None: new ones) are bound, and have their memory."""
        if copies is None:
            if any(group.engine.check() == _C.REPLACED for group in self.groups):
                raise ReplacedError  # before anything is allocated: tensors may stand in for the parameters
            copies = Copies([group.new_arenas() for group in self.groups])
        for arenas in copies.arenas:
            if not arenas.allocated:
                arenas.allocate()
        if copies is not self.copies:
            self._bind(copies)  # reads addresses: the memory is there by now

    def _bind(self, copies: Copies) -> None:
        self.copies = None  # after an error some engines are bound to others: the next forward binds all anew
        for group, arenas in zip(self.groups, copies.arenas, strict=True):
            group.bind(arenas)
        self.copies = copies

    def _lower(self) -> None:
        for group in self.groups:
            group.engine.lower()
        self._lower_fallback()

    def _lower_fallback(self) -> None:
        if self.fallback is not None:
            self.fallback.lower()
        self.region.low = True
        self.epoch += 1

    def counters(self) -> dict[str, int]:
        """Sums of the engines' counters."""
        return summed_counters(group.engine for group in self.groups)
