"""How a bucket is reduced: an all-reduce of the process group, or the communication hook that the user registered."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from os import register_at_fork
from typing import Any

import torch
import torch.distributed as dist

from .buckets import Bucket

UserHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class GradBucket:
    """What a communication hook gets: the face of ``torch.distributed.GradBucket`` over one of our buckets."""

    def __init__(self, bucket: Bucket, buffer: torch.Tensor, last: bool) -> None:
        self.of, self._buffer, self._last = bucket, buffer, last

    def index(self) -> int:
        """Position of the bucket in the order of reduction."""
        return self.of.index

    def buffer(self) -> torch.Tensor:
        """The flat gradients of this rank, in ``reduce_dtype``, not divided by the world size."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the flat buffer."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer with the parameters' shapes."""
        return self.of.split(self._buffer)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in packing order."""
        return self.of.params

    def is_last(self) -> bool:
        """Whether no bucket follows in this backward."""
        return self._last


class Communicator:
    """Reduces buckets over one process group.  Collectives are issued in the caller's order, on its current stream."""

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.hook: tuple[UserHook, Any] | None = None  # (hook, state)
        self.unsettled: Callable[[], None] | None = None  # compares ranks; see :mod:`ddp_mp.agreement`
        self.ranks_with_input: Callable[[], int] | None = None  # under Join: the divisor, when it is not the world size

    def require_agreement(self) -> None:
        """Before a round's first collective: raises where other ranks would not reduce the same."""
        if self.unsettled is not None:
            self.unsettled()
            self.unsettled = None

    def division(self, dtype: torch.dtype) -> tuple[float, float]:
        """(divisor before, divisor after) the sum over ranks; their product is the number of ranks.

        A user's communication hook divides by itself.  Wide exponents take the whole division before the sum.  float16
        splits it near the square root, as FSDP does: dividing first by everything would underflow, last would overflow.
        """
        if self.hook is not None:
            return 1.0, 1.0
        ranks = self.process_group.size() if self.ranks_with_input is None else self.ranks_with_input()
        if dtype is not torch.float16:
            return float(ranks), 1.0
        before = 1
        while ranks % before == 0 and ranks / before > before:
            before *= 2
        return float(before), ranks / before

    def reduce(self, bucket: Bucket, buffer: torch.Tensor, last: bool) -> Any:
        """Starts the reduction of ``buffer`` and returns what wait() takes.  The buffer may be changed in place."""
        if self.hook is not None:
            hook, state = self.hook
            return hook(state, GradBucket(bucket, buffer, last))
        flat = lend(torch.view_as_real(buffer) if buffer.is_complex() else buffer)
        return _Reduction(self.process_group.allreduce([flat]), flat if flat.is_sparse else buffer)

    def shadow(self, bucket: GradBucket) -> torch.Tensor:
        """Takes part in the reduction of a bucket that this rank has no gradients for (``Join``); returns the result."""
        return self.wait(self.reduce(bucket.of, bucket.buffer(), bucket.is_last()))

    def wait(self, pending: Any) -> torch.Tensor:
        """The result, flat; the current stream waits for it."""
        if isinstance(pending, _Reduction):
            pending.work.wait()
            return pending.buffer.detach() if pending.buffer.is_sparse else pending.buffer
        value = pending.wait()
        if isinstance(value, (list, tuple)):
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"communication hook: expected a future of a tensor, found one of {type(value).__name__}")
        return value if value.is_sparse else value.reshape(-1) if value.is_contiguous() else value.contiguous().view(-1)

    def require_same_round(self, number: int, buckets: Sequence[Bucket]) -> None:
        """After a failed round: makes sure that all ranks failed alike, or none goes on.

        A rank that had not failed waits in a bucket's collective; the size of this one is no bucket's, so that the two
        cannot pair silently: the process group reports an error, or a time-out.
        """
        sizes = {sum(p.numel() * p.element_size() for p in bucket.params) for bucket in buckets}
        length = 8191
        while length * 8 in sizes or length * 4 in sizes or length * 2 in sizes:
            length += 2
        total = torch.full((length,), number, dtype=torch.int64, device=buckets[0].params[0].device)
        self.process_group.allreduce([lend(total)]).wait()
        if int(total[0]) != number * self.process_group.size():
            raise RuntimeError(
                "an earlier backward failed on this rank but not on every other, so that their reductions are out of step; "
                "start the job again from its last checkpoint"
            )

    def reduce_flags(self, flags: bytes, device: torch.device) -> Callable[[], bytes]:
        """For each flag, whether it is set on any rank: what is returned says so when it is called, and waits then."""
        total = torch.frombuffer(bytearray(flags), dtype=torch.uint8).to(device=device, dtype=torch.int32)
        self.process_group.allreduce([lend(total)]).wait()

        def read() -> bytes:
            return bytes((total > 0).to(device="cpu", dtype=torch.uint8).tolist())

        return read


class _Reduction:
    """An all-reduce under way, and the memory it works in; a sparse sum has new memory, which only the lent tensor knows."""

    __slots__ = ("buffer", "work")

    def __init__(self, work: dist.Work, buffer: torch.Tensor) -> None:
        self.work, self.buffer = work, buffer


# --- tensors that the process group's threads still hold ---------------------------------------------------------------------

# A collective is over for its caller before the thread that ran it has let go of its tensors and of the context of the backward
# that it was started in.  Letting go of them takes Python: a thread that comes to it when Python has ended aborts the process.
# So the interpreter's end waits for what is still lent.
_LONGEST = 1.0  # seconds; where another rank has died, a collective may never be over
_lent: set[weakref.ref[torch.Tensor]] = set()


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a collective should be given it: another tensor of the same memory, which goes with the collective."""
    alias = tensor.detach()
    _lent.add(weakref.ref(alias, _lent.discard))
    return alias


@atexit.register
def _await_return() -> None:
    deadline = time.monotonic() + _LONGEST
    while _lent and time.monotonic() < deadline:
        time.sleep(0.001)  # which also lets those threads have Python


register_at_fork(after_in_child=_lent.clear)  # a child has none of the threads
