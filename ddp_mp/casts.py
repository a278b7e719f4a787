"""Casts of masters: by the engine of their device into arenas, or by PyTorch, one by one, where no engine can read them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from . import _C
from .options import Options
from .parameters import Managed

DTYPE_NAME = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


class ReplacedError(Exception):
    """The module has other parameters than the plan knows: the plan must be built again.  The text says what they did."""

    def __init__(self, *, thawed: bool = False) -> None:
        super().__init__("require grad now" if thawed else "were replaced")


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


class Part(NamedTuple):
    """The leaves of one generation on one device: each is a view of an arena, of which there is one per bucket of casts."""

    leaves: list[nn.Parameter]
    arenas: list[torch.Tensor]
    places: list[tuple[torch.Tensor, int]]  # of each leaf: its arena, and bytes from the start of it


class Group:
    """The parameters of one device that the engine can read."""

    def __init__(self, rows: list[Managed], dtype: torch.dtype, options: Options) -> None:
        self.rows, self.dtype = rows, dtype
        self.device = rows[0].master.device
        self.seen = [_facts(row.master) for row in rows]
        self.engine = new_engine(rows, dtype, options)
        self.bound: Part | None = None  # what is cast into

    def new_part(self) -> Part:
        for row, (shape, *_) in zip(self.rows, self.seen, strict=True):
            require_shape(row.name, shape, row.master.shape)
        self._require_seen(range(len(self.rows)))
        arenas = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _, _, nbytes in self.engine.buckets]
        places = [(arenas[bucket], offset) for bucket, offset in self.engine.rows]
        masters = [row.master for row in self.rows]
        views = [_view_like(master, *place, self.dtype) for master, place in zip(masters, places, strict=True)]
        return Part([leaf_of(master, view) for master, view in zip(masters, views, strict=True)], arenas, places)

    def bind(self, part: Part) -> None:
        """Casts go there from now on.  ReplacedError where a master has another type or layout than the plan knows."""
        self.bound = None
        self._require_seen(range(len(self.rows)))
        self.engine.bind([row.master for row in self.rows], part.leaves, part.arenas)
        self.bound = part

    def cast_moved(self, status: int) -> None:
        """After ``check_and_cast()`` found that something changed: casts, where masters have only another address.

        Raises ReplacedError when the plan must be built anew, ValueError by name for a parameter of another shape.
        """
        if status != _C.MOVED:
            raise ReplacedError
        moved = self.engine.moved()
        for index in moved:
            require_shape(self.rows[index].name, self.seen[index][0], self.rows[index].master.shape)
        self._require_seen(moved)
        for index in moved:
            self.engine.rebind_master(index, self.rows[index].master)
        if self.engine.check_and_cast() != _C.UNCHANGED:
            raise ReplacedError

    def _require_seen(self, rows: Iterable[int]) -> None:
        if any(_facts(self.rows[index].master) != self.seen[index] for index in rows):
            raise ReplacedError  # converted since the plan was built: another type, layout or device


def _facts(master: torch.Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...], torch.device]:
    return master.shape, master.dtype, master.stride(), master.device


class Fallback:
    """Parameters that the engine cannot read (gapped memory, tensor subclasses): cast by PyTorch, one by one."""

    def __init__(self, rows: list[Managed], dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows, dtype
        self.shapes = [row.master.shape for row in rows]
        self.casts = 0

    def new_leaves(self) -> list[nn.Parameter]:
        return [leaf_of(row.master, row.master.data.to(self.dtype)) for row in self.rows]

    def cast(self, leaves: Sequence[nn.Parameter]) -> None:
        for row, leaf, shape in zip(self.rows, leaves, self.shapes, strict=True):
            require_shape(row.name, shape, row.master.shape)
            leaf.data.copy_(row.master.data)
            self.casts += 1


def _view_like(master: torch.Tensor, arena: torch.Tensor, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """The part of ``arena`` at ``offset`` bytes, with the type ``dtype`` and the shape and strides of ``master``."""
    nbytes = master.numel() * dtype.itemsize
    flat = arena[offset : offset + nbytes].view(dtype)
    return flat.as_strided(master.shape, master.stride())


def leaf_of(master: nn.Parameter, memory: torch.Tensor) -> nn.Parameter:
    """A new leaf over ``memory``: with a version counter of its own, and what the user has set on the master.

    A copy or a pickle of a leaf, as of a module inside its forward, is one of its master.
    """
    leaf = nn.Parameter(memory.data)
    leaf.__dict__.update(master.__dict__)
    leaf.__dict__["__deepcopy__"] = lambda memo: copy.deepcopy(master, memo)
    leaf.__dict__["__reduce_ex__"] = lambda protocol: master.__reduce_ex__(protocol)
    return leaf
