"""How gradients are grouped for reduction, and the memory that a group is reduced in.

A bucket holds parameters of one device and one master type.  The layout follows from the parameters' order alone, so that it
is the same on every rank from the first step on: nothing is rebuilt, and no step reduces memory that nobody filled.

The gradient of a parameter has up to three parts when a backward ends: what its leaf holds, in low precision; what user hooks
made of it, in full precision (``extra``); and what the master has in ``.grad``, from earlier backwards or because a loss used
the master itself.  Their sum is what is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount
from typing import Protocol

import torch

from . import _C
from .options import FLOATING
from .parameters import Managed, dense

#: By row: what user hooks on masters have made of gradients of the backward under way, in the masters' types.
Extra = dict[int, torch.Tensor]


class Bucket(Protocol):
    """Gradients that are reduced by one collective.

    Attributes:
        index: position in the order of reduction, the same on every rank.
        reduce_dtype: the type that is reduced in; None: the parameters' own.
        rows: indices into the reducer's list of parameters, in packing order.
        params: the masters, in that order.
        names: their names.
    """

    index: int
    reduce_dtype: torch.dtype | None
    rows: list[int]
    params: list[torch.nn.Parameter]
    names: list[str]
    gradients: _C.Gradients  # set by the reducer, as is ``extra``
    extra: Extra

    def contribution(self, divisor: float) -> torch.Tensor:
        """This rank's gradients, divided, in the reduced type: a tensor to reduce in place.  Leaves hold none afterwards."""

    def prepare(self, reduced: torch.Tensor | None) -> None:
        """Takes the memory that give() or, with None, keep_local() needs: before the first gradient changes."""

    def give(self, reduced: torch.Tensor, divisor: float, used: bytes | None) -> None:
        """The masters' ``.grad`` becomes reduced / divisor.  ``used``: a byte per row of the model; 0: it stays as it is."""

    def keep_local(self) -> None:
        """Without a reduction: what leaves hold is added to the masters' ``.grad``, in full precision."""

    def zeros(self) -> torch.Tensor:
        """What a rank without gradients contributes."""

    def check_reduced(self, reduced: torch.Tensor) -> None:
        """Raises where ``reduced`` cannot be given; nothing is changed."""

    def forget(self) -> None:
        """Gives up memory that would be used again: something may still write there."""

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a contribution with each parameter's shape, in packing order."""


class PackedBucket:
    """Dense parameters of one device and one master type, packed into one flat buffer by one launch."""

    def __init__(self, index: int, entries: Sequence[Managed], rows: Sequence[int], reduce_dtype: torch.dtype | None) -> None:
        self.index, self.reduce_dtype = index, reduce_dtype
        self.rows = list(rows)
        self.params = [entry.master for entry in entries]
        self.names = [entry.name for entry in entries]
        self.device = self.params[0].device
        self.master_dtype = self.params[0].dtype
        self.numel = sum(p.numel() for p in self.params)
        self._position = {row: k for k, row in enumerate(self.rows)}
        self.gradients: _C.Gradients  # set by the reducer
        self.extra: Extra = {}
        self._full: _Full | None = None
        self._views: tuple[torch.Tensor, ...] | None = None  # where gradients of masters that have none go

    def contribution(self, divisor: float) -> torch.Tensor:
        dtype = self.reduce_dtype or self.master_dtype
        if dtype is self.master_dtype:
            out = self._full_memory().flat  # reduced where the gradients will stay
        else:
            out = torch.empty(self.numel, dtype=dtype, device=self.device)
        left = self.gradients.pack(self.index, out, divisor)
        if left:
            self._pack_slowly(left, out, divisor)
        return out

    def prepare(self, reduced: torch.Tensor | None) -> None:
        if self._full is not None and reduced is self._full.flat:
            # reduced where the gradients will stay: contribution() made sure a moment ago that nobody else holds that memory
            self._views = self._full.views
        else:
            self._views = self._full_memory().views if self.gradients.lacks(self.index) else None

    def give(self, reduced: torch.Tensor, divisor: float, used: bytes | None) -> None:
        left = self.gradients.give(self.index, reduced, self._views, divisor, used)
        if left:
            parts = self.split(reduced)
            for row in left:
                part = parts[self._position[row]]
                value = part.to(self.master_dtype)
                self._give_slowly(row, value / divisor if divisor != 1 else value.clone() if value is part else value)

    def keep_local(self) -> None:
        for row in self.gradients.accumulate(self.index, self._views):
            value = self._of_backward(row)
            if value is not None:
                grad = self._master(row).grad
                self._give_slowly(row, value if grad is None else value + grad)

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.numel, dtype=self.reduce_dtype or self.master_dtype, device=self.device)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views, offset = [], 0
        for param in self.params:
            part = flat[offset : offset + param.numel()]
            views.append(part.as_strided(param.shape, param.stride()))
            offset += param.numel()
        return views

    def check_reduced(self, reduced: torch.Tensor) -> None:
        expected = f"{self.numel} elements of a floating-point type on {self.device}"
        if reduced.numel() != self.numel or reduced.dtype not in FLOATING or reduced.device != self.device or reduced.is_sparse:
            found = f"{reduced.numel()} of {reduced.dtype} on {reduced.device}"
            raise ValueError(f"communication hook: bucket {self.index}: expected {expected}, found {found}")

    def forget(self) -> None:
        self._full = None

    def _master(self, row: int) -> torch.nn.Parameter:
        return self.params[self._position[row]]

    def _full_memory(self) -> _Full:
        """Full-precision memory for the gradients: last step's when nobody refers to it any more, else new."""
        if self._full is None or self._full.in_use():
            with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():  # it outlives what is under way
                self._full = _Full(self)
        return self._full

    def _of_backward(self, row: int) -> torch.Tensor | None:
        """What the backward under way has brought for a row that the engine leaves to PyTorch; its leaf holds none then."""
        value = self.extra.pop(row, None)
        leaf = self.gradients.source(row)
        if leaf is not None and leaf.grad is not None:
            part, leaf.grad = leaf.grad.detach().to(self.master_dtype).to_dense(), None
            value = part if value is None else value + part
        return value

    def _pack_slowly(self, rows: list[int], out: torch.Tensor, divisor: float) -> None:
        """Gradients that cannot be copied flat (strides that differ from the parameter's, subclasses): by PyTorch."""
        parts = self.split(out)
        for row in rows:
            master, value = self._master(row), self._of_backward(row)
            if master.grad is not None:
                own = master.grad.to(self.master_dtype).to_dense()
                value = own if value is None else value + own
            part = parts[self._position[row]]
            if value is None:
                part.zero_()
                continue
            self.gradients.mark(row)
            part.copy_(value / divisor if divisor != 1 else value)

    def _give_slowly(self, row: int, value: torch.Tensor) -> None:
        master = self._master(row)
        if master.grad is None or master.grad.is_sparse or master.grad.dtype is not master.dtype:
            master.grad = None  # of another type or form: nothing may be assigned over it
            master.grad = value
        else:
            master.grad.data.copy_(value)  # .data: version counters say what others wrote


class _Full:
    """One flat buffer of the masters' type, and a tensor in it per parameter: what ``.grad`` becomes.

    The tensors share the buffer's memory and are no views for autograd, so that ``p.grad.detach_()`` works.
    """

    def __init__(self, bucket: PackedBucket) -> None:
        self.flat = torch.empty(bucket.numel, dtype=bucket.master_dtype, device=bucket.device)
        self._storage = self.flat.untyped_storage()
        self.views = tuple(self._part(view) for view in bucket.split(self.flat))
        self._address = self._storage._cdata  # looked up once: 1 to 2 us in training
        self._owners = torch._C._storage_Use_Count(self._address)
        self._references = getrefcount(self._storage)

    def _part(self, view: torch.Tensor) -> torch.Tensor:
        part = torch.empty(0, dtype=view.dtype, device=view.device)
        return part.set_(self._storage, view.storage_offset(), view.shape, view.stride())

    def in_use(self) -> bool:
        """Whether a gradient of an earlier step, or a view of one, is still held by somebody."""
        if torch._C._storage_Use_Count(self._address) != self._owners or getrefcount(self._storage) != self._references:
            return True  # the second: p.grad.untyped_storage() gives this very object, which counts as one owner
        return not _C.unshared(self.views)


class LooseBucket:
    """One parameter, reduced by itself and by PyTorch's operations: sparse gradients, memory that is not dense, complex types.

    All ranks must bring tensors of one form, or the process group aborts or hangs.  What form that is follows from the
    parameter alone: one that an embedding has said to be sparse is reduced as rows of an index, as ``nn.Embedding`` makes its
    gradients, and any other as a dense tensor.
    """

    def __init__(self, index: int, entry: Managed, row: int, reduce_dtype: torch.dtype | None) -> None:
        self.index = index
        self.rows, self.params, self.names = [row], [entry.master], [entry.name]
        self.sparse = entry.sparse
        self._dtype = entry.master.dtype
        self.reduce_dtype: torch.dtype | None = self._dtype if reduce_dtype is None or self._dtype.is_complex else reduce_dtype
        self._wire = self.reduce_dtype
        self.gradients: _C.Gradients  # set by the reducer
        self.extra: Extra = {}
        self._strided = False  # this rank's part of the reduction under way was a dense tensor

    def contribution(self, divisor: float) -> torch.Tensor:
        param, row = self.params[0], self.rows[0]
        wide = torch.promote_types(self._wire, self._dtype)  # of what is added up: it is rounded once, at the end
        total = None
        for part in (self._of_backward(), param.grad):
            if part is not None:
                part = _by_rows(part.to(wide))  # before equal indices are summed
                part = part.coalesce() if part.is_sparse else part
                total = part if total is None else _sum(total, part)
        self.gradients.launch(self.index)
        self._strided = total is not None and not total.is_sparse
        if total is None:
            return self.zeros()
        self.gradients.mark(row)
        if divisor != 1:
            total = total / divisor
        total = self._as_all_ranks(total)
        if total.is_sparse:
            return total.coalesce().to(self._wire)
        return total.to(self._wire, copy=True).contiguous().view(-1)

    def prepare(self, reduced: torch.Tensor | None) -> None:
        return

    def give(self, reduced: torch.Tensor, divisor: float, used: bytes | None) -> None:
        param = self.params[0]
        if not param.requires_grad or (used is not None and not used[self.rows[0]]):
            return
        value = self.split(reduced)[0].to(param.dtype)  # before the division: it is rounded once
        if self._strided:
            value = value.to_dense()  # as autograd would have left it: many optimizers take no other
        if divisor != 1:
            value = value / divisor
        self._assign(value)

    def keep_local(self) -> None:
        param = self.params[0]
        value = self._of_backward()
        if value is not None:
            value = _by_rows(value.to(self._dtype))
            self._assign(value if param.grad is None else _sum(_by_rows(param.grad), value))

    def zeros(self) -> torch.Tensor:
        param = self.params[0]
        if self.sparse:
            rows = torch.empty((1, 0), dtype=torch.int64, device=param.device)
            values = torch.empty((0, *param.shape[1:]), dtype=self._wire, device=param.device)
            return torch.sparse_coo_tensor(rows, values, param.shape, check_invariants=False)
        return torch.zeros(param.numel(), dtype=self._wire, device=param.device)

    def check_reduced(self, reduced: torch.Tensor) -> None:
        param = self.params[0]
        if reduced.numel() != param.numel() or reduced.device != param.device or reduced.dtype.is_complex != param.is_complex():
            raise ValueError(
                f"communication hook: bucket {self.index}, parameter {self.names[0]!r}: expected {param.numel()} elements on "
                f"{param.device}, found {reduced.numel()} of {reduced.dtype} on {reduced.device}"
            )

    def forget(self) -> None:
        return

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat if flat.is_sparse else flat.view(self.params[0].shape)]

    def _of_backward(self) -> torch.Tensor | None:
        """What the backward under way has brought; the leaf holds none afterwards."""
        value = self.extra.pop(self.rows[0], None)
        leaf = self.gradients.source(self.rows[0])
        if leaf is not None and leaf.grad is not None:
            part, leaf.grad = leaf.grad.detach(), None
            value = part if value is None else _sum(value, part.to(self._dtype))
        return value

    def _assign(self, value: torch.Tensor) -> None:
        self.params[0].grad = None  # a gradient of another form: nothing may be assigned over it
        self.params[0].grad = value

    def _as_all_ranks(self, total: torch.Tensor) -> torch.Tensor:
        """In the form that other ranks bring, which may have gradients of another one, or none."""
        if not self.sparse:
            return total.to_dense()
        if total.is_sparse or total.device.type != "cpu":
            return total  # on a GPU a dense one stays: NCCL reduces no sparse tensors, so that no rank brings one
        return total.to_sparse(1)


def _by_rows(grad: torch.Tensor) -> torch.Tensor:
    """A sparse tensor with an index of rows, as ``nn.Embedding`` makes them: only such are added up.  A dense one as it is."""
    if not grad.is_sparse or grad.sparse_dim() == 1:
        return grad
    return grad.to_dense().to_sparse(1)


def _sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b, each sparse or dense: PyTorch wants the dense one first."""
    return b + a if a.is_sparse and not b.is_sparse else a + b


# --- the layout --------------------------------------------------------------------------------------------------------------


def _packable(entry: Managed) -> bool:
    """Whether a flat copy of the parameter's gradient keeps the strides, in a type that the engine converts."""
    return not entry.sparse and entry.floating and dense(entry.master)


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
        reduced_in = _reduced_in(entry, reduce_dtype) or entry.master.dtype
        key = (entry.master.device, entry.master.dtype, reduced_in)
        rows_of.setdefault(key, []).append(row)
        bytes_of[key] = bytes_of.get(key, 0) + entry.master.numel() * reduced_in.itemsize
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
            buckets.append(LooseBucket(index, group[0], rows[0], reduced_in))
    return buckets


def _reduced_in(entry: Managed, reduce_dtype: torch.dtype | None) -> torch.dtype | None:
    return None if entry.own_reduction else reduce_dtype
