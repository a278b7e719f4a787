"""Leaves: low-precision parameters that stand in the modules' places while a module computes.

A master is never touched.  What the modules compute with are *leaves*, parameters of ours whose memory is a view of an arena.
A leaf is *placed* by an entry in its module's ``__dict__``, where ``module.weight`` is found before ``_parameters``, and *taken
back* by removing that entry.  So ``parameters()``, ``state_dict()``, optimizers and averages see masters at any time.

All leaves of one cast are a :class:`Generation`.  One generation serves step after step; there are several only while graphs of
forwards with different weights wait for their backwards.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from . import _C
from .hooks import span
from .log import logger
from .options import Options
from .parameters import Managed, dense

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


# --- memory ------------------------------------------------------------------------------------------------------------------


class _Arenas:
    """The memory of one generation on one device: an arena per bucket of casts, and a view of it per parameter.

    Users may keep aliases of a leaf (``module.weight.data``), so that memory is only given back while nobody but this object
    refers to it, and is otherwise left to those who do.
    """

    def __init__(self, rows: Sequence[Managed], engine: _C.Engine, dtype: torch.dtype, device: torch.device) -> None:
        self.bytes = [nbytes for _, _, nbytes in engine.buckets]
        self.arenas = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in self.bytes]
        self.leaves = [
            _leaf_of(row.master, _view_like(row.master, self.arenas[bucket], offset, dtype))
            for row, (bucket, offset) in zip(rows, engine.rows, strict=True)
        ]
        self.places = [(self.arenas[bucket], offset) for bucket, offset in engine.rows]
        storages = [arena.untyped_storage() for arena in self.arenas]
        # bound and looked up once: both are used in every step
        self._storages = storages
        self._resize = [(storage.resize_, nbytes) for storage, nbytes in zip(storages, self.bytes, strict=True)]
        self._owners = [(storage._cdata, torch._C._storage_Use_Count(storage._cdata)) for storage in storages]
        self._references = list(map(getrefcount, storages))
        self._on_host = device.type == "cpu"
        self.allocated = True

    def allocate(self) -> None:
        if not self.allocated:
            for resize, nbytes in self._resize:
                resize(nbytes)
            self.allocated = True

    def release(self) -> bool:
        """Frees the memory and returns True, or returns False when somebody else still refers to some of it."""
        if list(map(getrefcount, self._storages)) != self._references:
            return False  # untyped_storage() of a leaf gives this very object, which counts as one owner
        for storage, (address, owners) in zip(self._storages, self._owners, strict=True):
            if torch._C._storage_Use_Count(address) != owners or not storage.resizable():
                return False  # resizable: numpy, for one, marks memory that it looked at
            if self._on_host and storage.is_shared():
                return False  # another process may map it
        self.allocated = False  # first: an interrupt may leave some of it freed, and the next use then allocates all
        for resize, _ in self._resize:
            resize(0)
        return True


def _view_like(master: torch.Tensor, arena: torch.Tensor, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """The part of ``arena`` at ``offset`` bytes, with the type ``dtype`` and the shape and strides of ``master``."""
    nbytes = master.numel() * dtype.itemsize
    flat = arena[offset : offset + nbytes].view(dtype)
    return flat.as_strided(master.shape, master.stride())


def _leaf_of(master: nn.Parameter, memory: torch.Tensor) -> nn.Parameter:
    """A new leaf over ``memory``: with a version counter of its own, and what the user has set on the master.

    A copy or a pickle of a leaf, as of a module inside its forward, is one of its master.
    """
    leaf = nn.Parameter(memory.data)
    leaf.__dict__.update(master.__dict__)
    leaf.__dict__["__deepcopy__"] = lambda memo: copy.deepcopy(master, memo)
    leaf.__dict__["__reduce_ex__"] = lambda protocol: master.__reduce_ex__(protocol)
    return leaf


# --- casts -------------------------------------------------------------------------------------------------------------------


def new_engine(rows: Sequence[Managed], dtype: torch.dtype, options: Options) -> _C.Engine:
    """The engine of one device's parameters, in the order of ``rows``; not bound to masters and leaves yet."""
    return _C.Engine(
        [row.master for row in rows],
        [row.name for row in rows],
        [(site.parameters, site.key, index) for index, row in enumerate(rows) for site in row.sites],
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


def require_shape(name: str, expected: torch.Size, found: torch.Size) -> None:
    """Raises ValueError where a parameter has another shape than DistributedDataParallel was built with."""
    if found != expected:
        raise ValueError(
            f"parameter {name!r}: expected shape {tuple(expected)}, found {tuple(found)}; "
            "DistributedDataParallel cannot take another shape: wrap the module again"
        )


class Group:
    """The parameters of one device that the engine can read."""

    def __init__(self, rows: list[Managed], dtype: torch.dtype, options: Options) -> None:
        self.rows, self.dtype = rows, dtype
        self.device = rows[0].master.device
        self.seen = [_facts(row.master) for row in rows]
        self.engine = new_engine(rows, dtype, options)
        self.bound: _Arenas | None = None

    def new_arenas(self) -> _Arenas:
        for row, (shape, *_) in zip(self.rows, self.seen, strict=True):
            require_shape(row.name, shape, row.master.shape)
        if [_facts(row.master) for row in self.rows] != self.seen:
            raise ReplacedError  # converted since the plan was built: another type, layout or device
        return _Arenas(self.rows, self.engine, self.dtype, self.device)

    def cast(self, arenas: _Arenas) -> bool:
        """Casts the masters into these arenas; returns whether masters were found at another address.

        Raises ReplacedError when the plan must be built anew, ValueError by name for a parameter of another shape.
        """
        arenas.allocate()
        if self.bound is not arenas:
            self.bound = None
            if [_facts(row.master) for row in self.rows] != self.seen:
                raise ReplacedError  # another type or layout since the plan was built
            self.engine.bind([row.master for row in self.rows], arenas.leaves, arenas.arenas)
            self.bound = arenas
        status = self.engine.check_and_cast()
        moved = status == _C.MOVED
        if moved:
            self._take_up(self.engine.moved())
            status = self.engine.check_and_cast()
        if status != _C.UNCHANGED:
            raise ReplacedError
        return moved

    def _take_up(self, moved: list[int]) -> None:
        for index in moved:
            require_shape(self.rows[index].name, self.seen[index][0], self.rows[index].master.shape)
        if any(_facts(self.rows[index].master) != self.seen[index] for index in moved):
            raise ReplacedError  # another type, layout or device
        for index in moved:
            self.engine.rebind_master(index, self.rows[index].master)


def _facts(master: torch.Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...], torch.device]:
    return master.shape, master.dtype, master.stride(), master.device


class _Fallback:
    """Parameters that the engine cannot read (gapped memory, tensor subclasses): cast by PyTorch, one by one."""

    def __init__(self, rows: list[Managed], dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows, dtype
        self.shapes = [row.master.shape for row in rows]
        self.casts = 0

    def new_leaves(self) -> list[nn.Parameter]:
        return [_leaf_of(row.master, row.master.data.to(self.dtype)) for row in self.rows]

    def check(self) -> None:
        if any(site.parameters.get(site.key) is not row.master for row in self.rows for site in row.sites):
            raise ReplacedError
        for row, shape in zip(self.rows, self.shapes, strict=True):
            require_shape(row.name, shape, row.master.shape)

    def cast(self, leaves: Sequence[nn.Parameter]) -> None:
        for row, leaf in zip(self.rows, leaves, strict=True):
            leaf.data.copy_(row.master.data)
            self.casts += 1


def _second_lists(rows: Sequence[Managed]) -> list[weakref.ref[nn.Module]]:
    """Each ``nn.RNNBase``, which keeps a second list of its weights."""
    return list({site.reference: None for row in rows for site in row.sites if isinstance(site.module, nn.RNNBase)})


class Generation:
    """The leaves of one cast, over all devices.

    Attributes:
        leaves: one per parameter that is cast, in the order of ``LeafPool.rows``.
        passes: forwards whose graphs hold these leaves.
        placed: how many placements hold these leaves in the modules' sites now, or have left them for a while.
        rematched: whether a later forward than one of ``passes`` has set ``requires_grad``.
    """

    def __init__(self, pool: LeafPool) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.arenas = [group.new_arenas() for group in pool.groups]
            self.others = [] if pool.fallback is None else pool.fallback.new_leaves()
        self.leaves = [leaf for arenas in self.arenas for leaf in arenas.leaves] + self.others
        self.rows = pool.rows
        self.sites = _C.Leaves(
            [row.master for row in pool.rows],
            self.leaves,
            [place for arenas in self.arenas for place in arenas.places] + [(leaf.data, 0) for leaf in self.others],
            [row.name for row in pool.rows],
            [(site.module, site.key, index) for index, row in enumerate(pool.rows) for site in row.sites],
        )
        self.rnns = _second_lists(pool.rows)
        self.passes: list[Any] = []
        self.placed = 0
        self.rematched = False
        for row, leaf in zip(pool.rows, self.leaves, strict=True):
            pool.on_new_leaf(row, leaf)
        self.sites.remember()

    def pending(self) -> bool:
        """Whether a backward may still come for a graph that holds these leaves."""
        if self.passes:
            self.passes = [p for p in self.passes if p.pending]
        return bool(self.passes)

    def match(self) -> None:
        """A forward begins: ``requires_grad`` of every leaf becomes its master's."""
        self.rematched = self.pending()
        self.sites.match()

    def match_again(self) -> None:
        """A backward begins: the master's ``requires_grad`` counts, and not what it was in a forward that came later."""
        if self.rematched:
            self.sites.match()

    def train_again(self, trained: Sequence[bool]) -> None:
        """Leaves that are named here require grad, whatever their masters do now."""
        frozen = [leaf for leaf, was in zip(self.leaves, trained, strict=True) if was and not leaf.requires_grad]
        for leaf in frozen:
            leaf.requires_grad_(True)
        if frozen:
            self.rematched = True  # a backward asks the masters again
            self.sites.changed()  # so that this is not taken for the module's own doing

    @property
    def allocated(self) -> bool:
        return all(arenas.allocated for arenas in self.arenas)

    @property
    def nbytes(self) -> int:
        """Bytes of low-precision memory held now."""
        return sum(sum(arenas.bytes) for arenas in self.arenas if arenas.allocated)


class LeafPool:
    """All leaves of one plan: casts masters into a generation that no graph needs, and frees what none needs any more.

    Args:
        rows: the parameters of the plan; those that are not cast are left out.
        dtype: the type of leaves; None: nothing is cast.
        on_new_leaf: called with each new leaf and its parameter.
    """

    def __init__(
        self,
        rows: Sequence[Managed],
        dtype: torch.dtype | None,
        options: Options,
        on_new_leaf: Callable[[Managed, nn.Parameter], None],
    ) -> None:
        cast = [r for r in rows if dtype is not None and not r.full and r.floating and r.master.dtype is not dtype]
        readable = [r for r in cast if dense(r.master)]
        by_device: dict[torch.device, list[Managed]] = {}
        for row in readable:
            by_device.setdefault(row.master.device, []).append(row)
        self.dtype = dtype
        self.groups = [Group(g, dtype, options) for g in by_device.values()] if dtype is not None else []
        taken = {id(r) for r in readable}
        left = [r for r in cast if id(r) not in taken]
        self.fallback = _Fallback(left, dtype) if left and dtype is not None else None
        self.rows = [row for group in self.groups for row in group.rows] + left
        self.on_new_leaf = on_new_leaf
        self.generations: list[Generation] = []
        self._keep = options.reuse_unchanged
        self._ready: Generation | None = None  # promised to hold the masters' values: prefetched, or kept
        self._latest: Generation | None = None  # what was cast last
        # whether it is asked if masters changed since the last cast: not before two forwards wait for their backwards
        self._remembers = options.reuse_unchanged or options.prefetch
        self._busy = False  # leaves are being cast: the collector may find dead graphs meanwhile
        self.moved = False  # masters were found at another address by the last cast
        self.casts = 0  # forwards that cast the masters
        self.reused = 0  # forwards that found the leaves ready

    @property
    def nbytes(self) -> int:
        """Bytes of low-precision memory held now."""
        return sum(generation.nbytes for generation in self.generations)

    def place_present(self) -> Placement:
        """Places leaves that hold the masters' present values.

        Raises ReplacedError when the plan must be built anew, ValueError by name for a parameter of another shape.
        """
        self._busy = True
        try:
            return place(self._present())
        finally:
            self._busy = False

    def _present(self) -> Generation:
        if self.fallback is not None:
            self.fallback.check()
        ready, self._ready = self._ready, None
        if ready is not None and ready.allocated and self._unwritten() and not _written(ready):
            self.reused += 1
            generation = self._latest = ready
        else:
            generation = self._chosen()
            self._cast(generation)
            self.casts += 1
        if self._keep:
            self._ready = generation
        generation.match()
        return generation

    def changed(self) -> None:
        """The masters were written: no promise about leaves holds any more, nor that a cast would find the same values."""
        self._ready, self._latest = None, None

    def maybe_written(self) -> None:
        """The masters may have been written in a way that nothing can see: graphs that wait keep the leaves they have."""
        self._latest = None

    def prefetch(self) -> None:
        """After an optimizer step: casts for the next forward.

        Never an error of its own: what fails here is logged and left to the next forward, which casts anew or raises it.
        """
        if not self.groups:
            return
        self._busy = True
        try:
            generation = self._chosen()
            self._cast(generation)
            self._ready = generation
            self.casts += 1
        except ReplacedError:
            return  # the next forward builds the plan anew
        except Exception as error:
            logger.warning("casting ahead failed and is left to the next forward: %s: %s", type(error).__name__, error)
            self._settle()
        finally:
            self._busy = False

    def wait(self) -> None:
        """The current stream waits for all casts."""
        for group in self.groups:
            group.engine.wait()

    def free(self, generation: Generation) -> None:
        """Gives the memory of leaves back that nobody needs, or leaves it to those who still refer to it."""
        if generation.placed or generation is self._ready or self._busy or generation.pending():
            return
        if generation in self.generations[1:]:
            self.generations.remove(generation)
        if not generation.allocated:
            return
        for group in self.groups:
            group.engine.wait()  # the casts may be under way on their own stream, as after prefetch()
        _bump(generation)
        for arenas in generation.arenas:
            if arenas.allocated and not arenas.release():
                logger.debug("leaves are left to those who refer to them; the next forward allocates new ones")
                if generation in self.generations:
                    self.generations.remove(generation)
                return

    def free_unused(self) -> None:
        """Frees all that no graph needs."""
        for generation in list(self.generations):
            self.free(generation)

    def close(self) -> None:
        """The plan ends: leaves go with the graphs that hold them, and no cast is under way any more."""
        self._ready = self._latest = None
        self.wait()

    def leaves_of(self, master: torch.Tensor) -> list[nn.Parameter]:
        """Every leaf that stands for the master in a graph that may still have a backward."""
        for index, row in enumerate(self.rows):
            if row.master is master:
                for generation in self.generations:
                    generation.match_again()
                return [g.leaves[index] for g in self.generations if g.allocated and g.leaves[index].requires_grad]
        return []

    def counters(self) -> dict[str, int]:
        """Sums of the engines' counters."""
        return summed_counters(group.engine for group in self.groups)

    def _unwritten(self) -> bool:
        """Whether nothing that can be seen has changed the masters since the last cast."""
        if not self._remembers:
            return False
        for group in self.groups:
            if group.engine.check_unwritten() != _C.UNCHANGED:
                return False
        return self.fallback is None

    def _chosen(self) -> Generation:
        """Leaves to cast into: the latest while the cast does not change their values, or of no graph, or new ones."""
        latest = self._latest
        free = next((g for g in self.generations if not g.placed and not g.pending()), None)
        if latest is not None and latest is not free and self._unwritten() and not _written(latest):
            return latest
        if free is not None:
            return free
        self._remembers = True
        if any(group.engine.check() == _C.REPLACED for group in self.groups):
            raise ReplacedError  # before anything is allocated: tensors may stand in for the parameters
        generation = Generation(self)
        self.generations.append(generation)
        return generation

    def _cast(self, generation: Generation) -> None:
        self.moved = False
        self._latest = None
        if generation.allocated and not (generation.placed or generation.pending()):
            _bump(generation)
        with span("ddp_mp::cast"):
            for group, arenas in zip(self.groups, generation.arenas, strict=True):
                self.moved |= group.cast(arenas)
                if self._remembers:
                    group.engine.remember()
            if self.fallback is not None:
                self.fallback.cast(generation.others)
        self._latest = generation

    def _settle(self) -> None:
        """Casts that a failure left under way are over: nobody is to be told of them, and their memory may be given back."""
        for group in self.groups:
            with contextlib.suppress(Exception):
                group.engine.wait()


def _bump(generation: Generation) -> None:
    """The leaves lose their values: a graph that nobody knows of and that needs them is an error of autograd's from now on."""
    increment_version(generation.leaves)
    generation.sites.bumped()


def _written(generation: Generation) -> bool:
    changed = generation.sites.changed()
    return changed is not None and bool(changed[0])


# --- placements --------------------------------------------------------------------------------------------------------------


class Placement:
    """Leaves in the modules' sites, for the time of one forward or backward."""

    __slots__ = ("crossed", "generation")

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.crossed = False  # another placement has held some of the same sites meanwhile


#: Those that hold sites now, oldest first, over all models.  They end in any order.
_active: list[Placement] = []


def place(generation: Generation) -> Placement:
    """Puts the leaves into their sites, over what other placements hold there."""
    placement = Placement(generation)
    _put(placement)
    return placement


def _put(placement: Placement) -> None:
    generation = placement.generation
    generation.placed += 1
    if not generation.sites.place():
        placement.crossed = True
        for other in _active:
            other.crossed = True
        _store(generation, None)
    _active.append(placement)
    _keep_in_step(generation)


def take_back(placement: Placement) -> None:
    """Ends a placement: what lies below it comes up again; without one, the module shows its masters."""
    generation = placement.generation
    if placement not in _active:
        return
    _active.remove(placement)
    generation.placed -= 1
    if generation.placed and placement.crossed:
        return  # the same leaves are placed by another, which may have begun before or after
    generation.sites.take_back()
    if placement.crossed:
        own = {(id(site.parameters), site.key) for row in generation.rows for site in row.sites}
        for other in _active:
            if other.crossed:
                _store(other.generation, own)
    _keep_in_step(generation)


def uncover(placements: Sequence[Placement]) -> Callable[[], None]:
    """Sites hold what lies below these placements, until the function that is returned is called."""
    for placement in placements:
        take_back(placement)
    for placement in placements:
        placement.generation.placed += 1  # its memory stays

    def cover() -> None:
        for placement in placements:
            placement.generation.placed -= 1
            _put(placement)

    return cover


def _store(generation: Generation, among: set[tuple[int, str]] | None) -> None:
    for row, leaf in zip(generation.rows, generation.leaves, strict=True):
        for site in row.sites:
            module = site.reference()
            if module is not None and (among is None or (id(site.parameters), site.key) in among):
                module.__dict__[site.key] = leaf


def _keep_in_step(generation: Generation) -> None:
    """``nn.RNNBase`` keeps a second list of its weights."""
    for reference in generation.rnns:
        module: Any = reference()
        if module is not None:
            module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in module._flat_weights_names]
