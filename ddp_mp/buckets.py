"""How gradients are grouped for reduction, and the memory that a group is reduced in.

A bucket holds parameters of one device and one master type.  The layout follows from the parameters' order alone, so that it
is the same on every rank from the first step on: nothing is rebuilt, and no step reduces memory that nobody filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount
from typing import Any, Protocol

import torch

from . import _C
from .loose import LooseGradients
from .options import FLOATING
from .parameters import Managed, dense, holds_all


class Bucket(Protocol):
    """Gradients that are reduced by one collective.

    Attributes:
        index: position in the order of reduction, the same on every rank.
        reduce_dtype: the type that is reduced in; None: the parameters' own.
        rows: indices into the reducer's list of parameters, in packing order.
        params: the parameters, in that order.
    """

    index: int
    reduce_dtype: torch.dtype | None
    rows: list[int]
    params: list[torch.nn.Parameter]

    def contribution(self, dtype: torch.dtype | None, divisor: float) -> torch.Tensor:
        """This rank's gradients (and what was accumulated locally before), divided: a fresh tensor to reduce in place."""

    def settle(self, reduced: torch.Tensor, divisor: float, used: bytes | None) -> None:
        """``.grad`` becomes reduced / divisor (added to what earlier reductions left).  Parameters must be masters."""

    def keep_local(self) -> None:
        """Without a reduction: ``.grad`` becomes full precision, added to what was there.  Parameters must be masters."""

    def zeros(self, dtype: torch.dtype | None) -> torch.Tensor:
        """What a rank without gradients contributes."""

    def check_stashes(self) -> None:
        """After gradients were set aside: sees to those that the user set since the last backward."""

    def check_reduced(self, reduced: torch.Tensor) -> None:
        """Raises where ``reduced`` cannot be handed over; nothing is changed."""

    def forget(self) -> None:
        """Gives up memory that would be used again: something may still write there."""

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a contribution with each parameter's shape, in packing order."""


class PackedBucket:
    """Dense parameters of one device and one master type, packed into one flat buffer by one launch."""

    def __init__(self, index: int, entries: Sequence[Managed], rows: Sequence[int], reduce_dtype: torch.dtype | None) -> None:
        self.index, self.reduce_dtype = index, reduce_dtype
        self.rows = list(rows)
        self.params = [entry.param for entry in entries]
        self.device = self.params[0].device
        self.master_dtype = self.params[0].dtype
        self.numel = sum(p.numel() for p in self.params)
        self.gradients: _C.Gradients  # see watched_by()
        self.local = 0  # this bucket's number there
        self._full: _Full | None = None

    def watched_by(self, gradients: _C.Gradients, local: int) -> None:
        """What follows this bucket's gradients, and its number there."""
        self.gradients, self.local = gradients, local
        if holds_all(self.reduce_dtype or self.master_dtype, self.master_dtype):
            gradients.reduce_whole(local)

    def contribution(self, dtype: torch.dtype | None, divisor: float) -> torch.Tensor:
        dtype = dtype or self.master_dtype
        if dtype is self.master_dtype and not self.gradients.stashed(self.local):
            out = self._full_memory().flat  # reduced where the gradients will stay
        else:
            out = torch.empty(self.numel, dtype=dtype, device=self.device)
        slow = self.gradients.pack(self.local, out, divisor)
        if slow:
            self._pack_slowly(slow, out, divisor)
        return out

    def settle(self, reduced: torch.Tensor, divisor: float, used: bytes | None) -> None:
        # reduced where the gradients will stay: contribution() made sure a moment ago that nobody else holds that memory
        in_place = self._full is not None and reduced is self._full.flat
        if divisor != 1 and reduced.dtype is not self.master_dtype and self.gradients.stashed(self.local):
            reduced, divisor = reduced.to(self.master_dtype).div_(divisor), 1  # to be added: rounded once, in the wide type
        views = self._full.views if self._full is not None and in_place else self._views()
        slow = self.gradients.hand_over(self.local, reduced, views, divisor, used)
        if slow:
            parts = self.split(reduced)
            for row in slow:
                part = parts[self.gradients.position(row)]
                self._settle_slowly(row, part if divisor == 1 else part.to(self.master_dtype) / divisor, synced=True)

    def keep_local(self) -> None:
        # other ranks may not add to this gradient: what all have is remembered, so that the rest can be told apart
        for row in self.gradients.without_base(self.local):
            self.gradients.set_base(row, self._stash(row).clone())
        for row in self.gradients.accumulate(self.local, self._views()):
            grad = self.params[self.gradients.position(row)].grad
            assert grad is not None
            self._settle_slowly(row, grad.to(self.master_dtype).to_dense(), synced=False)

    def zeros(self, dtype: torch.dtype | None) -> torch.Tensor:
        return torch.zeros(self.numel, dtype=dtype or self.master_dtype, device=self.device)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views, offset = [], 0
        for param in self.params:
            part = flat[offset : offset + param.numel()]
            views.append(part.as_strided(param.shape, param.stride()))
            offset += param.numel()
        return views

    def check_stashes(self) -> None:
        for row in self.gradients.of_other_type(self.local):  # set while the parameter was a copy
            self.gradients.set_stash(row, self._stash(row).to(self.master_dtype))

    def check_reduced(self, reduced: torch.Tensor) -> None:
        expected = f"{self.numel} elements of a floating-point type on {self.device}"
        if reduced.numel() != self.numel or reduced.dtype not in FLOATING or reduced.device != self.device or reduced.is_sparse:
            found = f"{reduced.numel()} of {reduced.dtype} on {reduced.device}"
            raise ValueError(f"communication hook: bucket {self.index}: expected {expected}, found {found}")

    def forget(self) -> None:
        self._full = None

    def _views(self) -> tuple[torch.Tensor, ...] | None:
        """Where gradients that were not set aside go; None when every one was."""
        if self.gradients.stashed(self.local) == len(self.params):
            return None
        return self._full_memory().views

    def _full_memory(self) -> _Full:
        """Full-precision memory for the gradients: last step's when nobody refers to it any more, else new."""
        if self._full is None or self._full.in_use():
            with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():  # it outlives what is under way
                self._full = _Full(self)
        return self._full

    def _pack_slowly(self, rows: list[int], out: torch.Tensor, divisor: float) -> None:
        """Gradients that cannot be copied flat (strides that differ from the parameter's, subclasses): by PyTorch."""
        parts = self.split(out)
        for row in rows:
            position = self.gradients.position(row)
            param = self.params[position]
            wide = torch.float64 if self.master_dtype is torch.float64 else torch.float32
            value = torch.zeros_like(param, dtype=wide) if param.grad is None else param.grad.to(wide).to_dense()
            own = self._own_part(row)
            if own is not None:
                value = value + own
            parts[position].copy_(value / divisor if divisor != 1 else value)
            param.grad = None

    def _settle_slowly(self, row: int, value: torch.Tensor, synced: bool) -> None:
        """``.grad`` becomes what was set aside, overwritten by or increased by ``value``, or a copy of ``value``."""
        grad, base = self.gradients.stash(row), self.gradients.base(row)
        if grad is None:
            grad = value.to(self.master_dtype, copy=True)
        elif synced and base is not None:
            torch.add(base, value, out=grad.data)  # .data: version counters say what others wrote, and may be shared
        elif synced and self.gradients.reduces_stash(row):
            grad.data.copy_(value)
        else:
            grad.data.add_(value)
        self.gradients.settle(row, grad, synced)

    def _stash(self, row: int) -> torch.Tensor:
        stash = self.gradients.stash(row)
        assert stash is not None
        return stash

    def _own_part(self, row: int) -> torch.Tensor | None:
        """What is set aside for the row on this rank and takes part in the reduction."""
        stash, base = self.gradients.stash(row), self.gradients.base(row)
        if stash is None or not self.gradients.reduces_stash(row):
            return None
        return stash if base is None else stash - base


class _Full:
    """One flat buffer of the masters' type, and a view of it a parameter: what ``.grad`` becomes."""

    def __init__(self, bucket: PackedBucket) -> None:
        self.flat = torch.empty(bucket.numel, dtype=bucket.master_dtype, device=bucket.device)
        self.views = tuple(bucket.split(self.flat))
        self._storage = self.flat.untyped_storage()
        self._address = self._storage._cdata  # looked up once: 1 to 2 us in training
        self._owners = torch._C._storage_Use_Count(self._address)
        self._references = getrefcount(self._storage)

    def in_use(self) -> bool:
        """Whether a gradient of an earlier step, or a view of one, is still held by somebody."""
        if torch._C._storage_Use_Count(self._address) != self._owners or getrefcount(self._storage) != self._references:
            return True  # the second: p.grad.untyped_storage() gives this very object, which counts as one owner
        return not _C.unshared(self.views) or (_HELD_UNSEEN and any(map(_held_by_more_than_python, self.views)))


def _held_by_more_than_python(tensor: Any) -> bool:
    return bool(tensor._use_count() > 1)


def _holds_unseen() -> bool:
    """Whether this version of PyTorch holds a tensor, as ``.grad`` or in a graph, without a reference to its Python object."""
    holder, held = torch.nn.Parameter(torch.zeros(1, device="cpu")), torch.zeros(1, device="cpu")
    holder.grad = held
    return _C.unshared((held,), references=2)


_HELD_UNSEEN = _holds_unseen()


def _packable(entry: Managed) -> bool:
    """Whether a flat copy of the parameter's gradient keeps the strides, in a type that the engine converts."""
    return not entry.sparse and entry.floating and dense(entry.param)


def assign(entries: Sequence[Managed], caps: Sequence[int], reduce_dtype: torch.dtype | None) -> list[list[int]]:
    """Assigns parameters to buckets, last parameters first, as their gradients arrive.

    Args:
        entries: trainable parameters in registration order.
        caps: byte limits of the first, second, ... bucket; the last one holds for all that follow.
        reduce_dtype: the type that is reduced in; None: each parameter's own, as with ``Managed.own_reduction``.

    Returns:
        The rows of each bucket in packing order; buckets are ordered by when their last gradient is due.  A parameter that
        cannot be packed has a bucket of its own.
    """
    rows_of: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
    bytes_of: dict[tuple[torch.device, torch.dtype, torch.dtype], int] = {}
    closed: list[list[int]] = []
    for row in reversed(range(len(entries))):
        entry = entries[row]
        if not _packable(entry):
            closed.append([row])
            continue
        reduced_in = _reduced_in(entry, reduce_dtype) or entry.param.dtype
        key = (entry.param.device, entry.param.dtype, reduced_in)
        rows_of.setdefault(key, []).append(row)
        bytes_of[key] = bytes_of.get(key, 0) + entry.param.numel() * reduced_in.itemsize
        if bytes_of[key] >= caps[min(len(closed), len(caps) - 1)]:
            closed.append(rows_of.pop(key))
            del bytes_of[key]
    closed += rows_of.values()
    return sorted(closed, key=lambda rows: -rows[-1])


def build(entries: Sequence[Managed], caps: Sequence[int], reduce_dtype: torch.dtype | None) -> list[Bucket]:
    """The buckets of :func:`assign`, not yet bound to what watches their gradients."""
    buckets: list[Bucket] = []
    for index, rows in enumerate(assign(entries, caps, reduce_dtype)):
        group = [entries[row] for row in rows]
        reduced_in = _reduced_in(group[0], reduce_dtype)
        if _packable(group[0]):
            buckets.append(PackedBucket(index, group, rows, reduced_in))
        else:
            buckets.append(LooseGradients(index, group[0], rows[0], reduced_in))
    return buckets


def _reduced_in(entry: Managed, reduce_dtype: torch.dtype | None) -> torch.dtype | None:
    return None if entry.own_reduction else reduce_dtype
