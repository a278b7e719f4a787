"""Gradients that cannot be packed: sparse ones, and parameters whose memory is not dense or cannot be read.

Each is a bucket of its own and goes through PyTorch's operations.  The class has the face of a bucket (``ddp_mp.buckets``) and
that of ``_C.Gradients``, for its one row.

All ranks must bring tensors of one form, or the process group aborts or hangs.  What form that is follows from the parameter
alone: one that an embedding has said to be sparse is reduced as rows of an index, as ``nn.Embedding`` makes its gradients, and
any other as a dense tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from .parameters import Managed, holds_all


class LooseGradients:
    """One parameter, reduced by itself."""

    def __init__(self, index: int, entry: Managed, row: int, reduce_dtype: torch.dtype | None) -> None:
        self.index, self.reduce_dtype = index, reduce_dtype
        self.rows = [row]
        self.params = [entry.param]
        self.name = entry.name
        self.sparse = entry.sparse
        self._dtype = entry.param.dtype  # the master's
        self._whole = holds_all(self._wire(reduce_dtype), self._dtype)  # see _C.Gradients.reduce_whole()
        self.on_first: Callable[[int], None]  # set by the reducer
        self.on_ready: Callable[[int], None]
        self.on_error: Callable[[], None]
        self.active = False
        self.refired = False
        self.fires = 0
        self._early = False
        self._fired = False
        self._empty = False  # it fired, and there was no gradient
        self._strided = False  # this rank's part of the reduction under way was a dense tensor
        self._launched = False
        self._stash: torch.Tensor | None = None
        self._left: torch.Tensor | None = None  # what we left in ``.grad``
        self._base: torch.Tensor | None = None  # the part of it that all ranks have; None: they have nothing in common
        self._version = 0  # of what we left
        self._before: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int] | None = None  # for abort()

    # --- the face of _C.Gradients ------------------------------------------------------------------------------------

    def fire(self) -> None:
        """The gradient was accumulated."""
        if not self.active:
            self.on_first(0)
        if self._launched:
            self.on_error()
            raise RuntimeError(
                "Expected to mark a variable ready only once. The gradient of parameter "
                f"{self.name!r} arrived again after it had been reduced in this backward."
            )
        self.fires += 1
        self.refired = self.refired or self._fired
        if not self._fired:
            self._fired = True
            if self._early:
                self.on_ready(0)

    def begin(self, early: bool, fired_row: int = -1) -> int:
        self.active, self._early = True, early
        self.fires = 0 if fired_row != 0 else 1
        param = self.params[0]
        if fired_row == 0 or param.grad is None:
            self._before = (None, None, None, 0)
            self._left = self._base = None
            return 0
        self._before = (param.grad, self._left, self._base, self._version)
        self._stash, param.grad = param.grad, None
        if self._stash is not self._left or self._stash._version != self._version:
            self._base = None  # set or written by the user, and so maybe not equal on all ranks
        return 1

    def unfired(self, bucket: int = 0) -> list[int]:
        return [] if self._fired else [0]

    def fired_flags(self) -> bytes:
        return b"\2" if self._fired and self._empty else bytes([self._fired])

    def contributes(self) -> bytes:
        return b"\1" if self._has_own_part() else self.fired_flags()

    def end(self) -> None:
        self.active = self._early = False
        self._before = None

    def reset(self) -> None:
        self._fired = self._empty = self._launched = self.refired = False

    def set_launched(self, bucket: int = 0) -> None:
        self._launched = True

    def hook(self, row: int) -> Callable[[torch.Tensor], None]:
        """The post-accumulate-grad hook; refers to its owner weakly, as the parameter would keep it alive."""
        owner = weakref.ref(self)

        def fire(_param: torch.Tensor) -> None:
            gradients = owner()
            if gradients is not None:
                gradients.fire()

        return fire

    def abort(self) -> None:
        if self._before is not None:
            self.params[0].grad, self._left, self._base, self._version = self._before
            self._stash = None
        self.end()
        self.reset()

    # --- the face of a bucket ----------------------------------------------------------------------------------------

    def contribution(self, dtype: torch.dtype | None, divisor: float) -> torch.Tensor:
        param = self.params[0]
        grad, param.grad = param.grad, None
        self._empty = grad is None
        wire = self._wire(dtype)
        wide = torch.promote_types(wire, self._dtype)  # of what is added up: it is rounded once, at the end
        total = self._own_part()
        if grad is not None:
            grad = _by_rows(grad.to(wide))  # before equal indices are summed
            grad = grad.coalesce() if grad.is_sparse else grad
            total = grad if total is None else _sum(total, grad)
        self._strided = total is not None and not total.is_sparse
        if total is None:
            return self.zeros(dtype)
        if divisor != 1:
            total = total / divisor
        total = self._as_all_ranks(total)
        return total.coalesce().to(wire) if total.is_sparse else total.to(wire, copy=True).contiguous().view(-1)

    def _as_all_ranks(self, total: torch.Tensor) -> torch.Tensor:
        """In the form that other ranks bring, which may have gradients of another one, or none."""
        if not self.sparse:
            return total.to_dense()
        if total.is_sparse or total.device.type != "cpu":
            return total  # on a GPU a dense one stays: NCCL reduces no sparse tensors, so that no rank brings one
        return total.to_sparse(1)

    def _has_own_part(self) -> bool:
        """Whether more is set aside than all ranks have."""
        return self._stash is not None and self._stash is not self._base

    def _own_part(self) -> torch.Tensor | None:
        """What is set aside and takes part in the reduction."""
        if self._whole or self._stash is None:
            return self._stash
        if not self._has_own_part():
            return None
        return self._stash if self._base is None else _sum(self._stash, -self._base)

    def settle(self, reduced: torch.Tensor, divisor: float, used: bytes | None) -> None:
        param = self.params[0]
        stash, self._stash = self._stash, None
        if used is not None and not used[0]:
            param.grad = stash
            return
        value = self.split(reduced)[0].to(param.dtype)  # before the division: it is rounded once
        if self._strided:
            value = value.to_dense()  # as autograd would have left it: many optimizers take no other
        if divisor != 1:
            value = value / divisor
        param.grad = value if stash is None or self._base is None or self._whole else _sum(self._base, value)
        self._left = self._base = param.grad
        self._version = param.grad._version

    def keep_local(self) -> None:
        param = self.params[0]
        stash, self._stash = self._stash, None
        grad = param.grad
        if grad is None:
            param.grad = stash
            return
        value = _by_rows(grad.to(param.dtype))
        param.grad = None
        param.grad = value if stash is None else _sum(stash, value)  # the base stays: nothing is added in place
        self._left, self._version = param.grad, param.grad._version

    def zeros(self, dtype: torch.dtype | None) -> torch.Tensor:
        param = self.params[0]
        if self.sparse:
            rows = torch.empty((1, 0), dtype=torch.int64, device=param.device)
            values = torch.empty((0, *param.shape[1:]), dtype=self._wire(dtype), device=param.device)
            return torch.sparse_coo_tensor(rows, values, param.shape, check_invariants=False)
        return torch.zeros(param.numel(), dtype=self._wire(dtype), device=param.device)

    def _wire(self, dtype: torch.dtype | None) -> torch.dtype:
        """The type that is reduced: complex gradients keep theirs."""
        own = self.params[0].dtype
        return own if dtype is None or own.is_complex else dtype

    def check_stashes(self) -> None:
        if self._stash is not None:
            self._stash = _by_rows(self._stash.to(self._dtype))

    def check_reduced(self, reduced: torch.Tensor) -> None:
        param = self.params[0]
        if reduced.numel() != param.numel() or reduced.device != param.device or reduced.dtype.is_complex != param.is_complex():
            raise ValueError(
                f"communication hook: bucket {self.index}, parameter {self.name!r}: expected {param.numel()} elements on "
                f"{param.device}, found {reduced.numel()} of {reduced.dtype} on {reduced.device}"
            )

    def forget(self) -> None:
        return

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat if flat.is_sparse else flat.view(self.params[0].shape)]


def _by_rows(grad: torch.Tensor) -> torch.Tensor:
    """A sparse tensor with an index of rows, as ``nn.Embedding`` makes them: only such are added up.  A dense one as it is."""
    if not grad.is_sparse or grad.sparse_dim() == 1:
        return grad
    return grad.to_dense().to_sparse(1)


def _sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b, each sparse or dense: PyTorch wants the dense one first."""
    return b + a if a.is_sparse and not b.is_sparse else a + b
