"""Leaves: low-precision parameters that stand in the modules' places while a module computes.

A master is never touched.  What the modules compute with are *leaves*, parameters of ours whose memory is a view of an arena.
A leaf is *placed* by an entry in its module's ``__dict__``, where ``module.weight`` is found before ``_parameters``, and *taken
back* by removing that entry.  So ``parameters()``, ``state_dict()``, optimizers and averages see masters at any time.

All leaves of one cast are a :class:`Generation`.  One generation serves step after step; there are several only while graphs of
forwards with different weights wait for their backwards.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from . import _C
from .casts import Fallback, Group, ReplacedError, summed_counters
from .hooks import in_range, profiling
from .log import logger
from .options import Options
from .parameters import Managed, dense

# The properties themselves: a loop over many parameters then runs in C.
_dtype: Callable[[torch.Tensor], torch.dtype] = vars(torch._C.TensorBase)["dtype"].__get__
_requires_grad: Callable[[torch.Tensor], bool] = vars(torch._C.TensorBase)["requires_grad"].__get__


def _second_lists(rows: Sequence[Managed]) -> list[weakref.ref[nn.Module]]:
    """Each ``nn.RNNBase``, which keeps a second list of its weights."""
    return list({site.reference: None for row in rows for site in row.sites if isinstance(site.module, nn.RNNBase)})


class Generation:
    """The leaves of one cast, over all devices.

    Attributes:
        leaves: one per parameter that is cast, in the order of ``LeafPool.rows``.
        passes: forwards whose graphs hold these leaves.
        allocated: whether the leaves have memory.
        placed: how many placements hold these leaves in the modules' sites now, or have left them for a while.
        rematched: whether a later forward than one of ``passes`` has set ``requires_grad``.
    """

    def __init__(self, pool: LeafPool) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.parts = [group.new_part() for group in pool.groups]
            self.others = [] if pool.fallback is None else pool.fallback.new_leaves()
        self.leaves = [leaf for part in self.parts for leaf in part.leaves] + self.others
        self.rows = pool.rows
        storages = [arena.untyped_storage() for part in self.parts for arena in part.arenas]
        sizes = [storage.nbytes() for storage in storages]
        # bound and looked up once: both are used in every step
        self._storages = storages
        self._resize = [(storage.resize_, nbytes) for storage, nbytes in zip(storages, sizes, strict=True)]
        self._owners = [(storage._cdata, torch._C._storage_Use_Count(storage._cdata)) for storage in storages]
        self._references = list(map(getrefcount, storages))
        self.allocated = True
        self.sites = _C.Leaves(
            [row.master for row in pool.rows],
            self.leaves,
            [place for part in self.parts for place in part.places] + [(leaf.data, 0) for leaf in self.others],
            [row.name for row in pool.rows],
            [(site.module, site.key, index) for index, row in enumerate(pool.rows) for site in row.sites],
        )
        self.rnns = _second_lists(pool.rows)
        self.passes: list[Any] = []
        self.placed = 0
        self.rematched = False
        for row, leaf in zip(pool.rows, self.leaves, strict=True):
            if row.leaf_hook is not None:
                leaf.register_post_accumulate_grad_hook(row.leaf_hook)
        self.sites.remember()

    def pending(self) -> bool:
        """Whether a backward may still come for a graph that holds these leaves."""
        if self.passes:
            self.passes = [p for p in self.passes if p.pending]
        return bool(self.passes)

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

    def allocate(self) -> None:
        """The leaves have memory."""
        for resize, nbytes in self._resize:
            resize(nbytes)
        self.allocated = True

    def release(self) -> bool:
        """Frees the memory and returns True, or returns False when somebody else still refers to some of it.

        Users may keep aliases of a leaf (``module.weight.data``), so that memory is only given back while nobody but this
        object refers to it, and is otherwise left to those who do.
        """
        if list(map(getrefcount, self._storages)) != self._references:
            return False  # untyped_storage() of a leaf gives this very object, which counts as one owner
        for storage, (address, owners) in zip(self._storages, self._owners, strict=True):
            if torch._C._storage_Use_Count(address) != owners or not storage.resizable():
                return False  # resizable: numpy, for one, marks memory that it looked at
            if storage.device.type == "cpu" and storage.is_shared():
                return False  # another process may map it
        self.allocated = False  # first: an interrupt may leave some of it freed, and the next use then allocates all
        for resize, _ in self._resize:
            resize(0)
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of low-precision memory held now."""
        return sum(nbytes for _, nbytes in self._resize) if self.allocated else 0


class LeafPool:
    """All leaves of one plan: casts masters into a generation that no graph needs, and frees what none needs any more.

    Args:
        rows: the parameters of the plan; those that are not cast have no leaves.
        dtype: the type of leaves; None: nothing is cast.
    """

    def __init__(self, rows: Sequence[Managed], dtype: torch.dtype | None, options: Options) -> None:
        cast = [r for r in rows if dtype is not None and not r.full and r.floating and r.master.dtype is not dtype]
        readable = [r for r in cast if dense(r.master)]
        by_device: dict[torch.device, list[Managed]] = {}
        for row in readable:
            by_device.setdefault(row.master.device, []).append(row)
        self.dtype = dtype
        self.groups = [Group(g, dtype, options) for g in by_device.values()] if dtype is not None else []
        taken = {id(r) for r in readable}
        left = [r for r in cast if id(r) not in taken]
        self.fallback = Fallback(left, dtype) if left and dtype is not None else None
        self.rows = [row for group in self.groups for row in group.rows] + left
        # parameters of which no engine notices what becomes of them, and those that no gradient is expected for
        unwatched = [row for row in rows if id(row) not in taken]
        self._homes = [site.parameters for row in unwatched for site in row.sites]
        self._keys = [site.key for row in unwatched for site in row.sites]
        self._held = [row.master for row in unwatched for _ in row.sites]
        self._dtypes = list(map(_dtype, self._held))
        self._frozen = [row.master for row in rows if not row.master.requires_grad]
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

    def require_plan(self) -> None:
        """Raises ReplacedError when the plan must be built anew, as far as no engine sees it: a parameter that was frozen
        requires grad now, or a module holds another object in the place of one that is not cast, or one of another type."""
        if any(map(_requires_grad, self._frozen)):
            raise ReplacedError(thawed=True)
        same = all(map(operator.is_, map(dict.get, self._homes, self._keys), self._held))
        if not same or list(map(_dtype, self._held)) != self._dtypes:
            raise ReplacedError

    def place_present(self) -> Placement:
        """Places leaves that hold the masters' present values.

        Raises ReplacedError when an engine sees that the plan must be built anew, ValueError by name for a parameter of another
        shape.
        """
        self._busy = True
        try:
            ready, self._ready = self._ready, None
            if ready is not None and ready.allocated and self._unwritten() and not _written(ready):
                self.reused += 1
                generation = self._latest = ready
            else:
                generation = self._cast()
            if self._keep:
                self._ready = generation
            generation.rematched = bool(generation.passes) and generation.pending()
            generation.sites.match()
            return place(generation)
        finally:
            self._busy = False

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
            self._ready = self._cast()
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
        if not generation.release():
            logger.debug("leaves are left to those who refer to them; the next forward allocates new ones")
            if generation in self.generations:
                self.generations.remove(generation)

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
        latest, free = self._latest, None
        for generation in self.generations:
            if not generation.placed and not (generation.passes and generation.pending()):
                free = generation
                break
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

    def _cast(self) -> Generation:
        """Casts the masters into leaves, which are returned."""
        generation = self._chosen()
        self.moved = False
        self._latest = None
        if not generation.allocated:
            generation.allocate()
        elif not (generation.placed or generation.pending()):
            _bump(generation)
        if profiling():
            in_range("ddp_mp::cast", self._launch)(generation)
        else:
            self._launch(generation)
        self._latest = generation
        self.casts += 1
        return generation

    def _launch(self, generation: Generation) -> None:
        for group, part in zip(self.groups, generation.parts, strict=True):
            if group.bound is not part:
                group.bind(part)
            status = group.engine.check_and_cast()
            if status != _C.UNCHANGED:
                group.cast_moved(status)
                self.moved = True
            if self._remembers:
                group.engine.remember()
        if self.fallback is not None:
            self.fallback.cast(generation.others)

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
    if generation.rnns:
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
    if generation.rnns:
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
