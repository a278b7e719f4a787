"""Types of the C extension.  Internal: the public names are those of ``ddp_mp``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

class DeviceError(RuntimeError):
    """A device or its driver reported an error; the text names the call, the code and the device."""

class Event:
    """Work recorded on a private cast stream.  Thread-safe."""

    @property
    def native_handle(self) -> int: ...
    def wait(self, stream: Any = None) -> None:
        """Makes ``stream`` (its ``cuda_stream`` or ``stream_id`` attribute when it has one; None: the current stream) wait."""
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...

class EventDeque:
    """A queue of events that behaves as ``collections.deque`` does where hooks use it.  Thread-safe at method level."""

    def append(self, event: Event) -> None: ...
    def appendleft(self, event: Event) -> None: ...
    def pop(self) -> Event: ...
    def popleft(self) -> Event: ...  # IndexError when empty
    def clear(self) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Event: ...
    def __iter__(self) -> Iterator[Event]: ...

class EventTable:
    """Module -> EventDeque by identity; a missing key is created, as ``defaultdict(deque)`` does."""

    def __getitem__(self, module: object) -> EventDeque: ...
    def __contains__(self, module: object) -> bool: ...
    def __len__(self) -> int: ...
    def clear(self) -> None: ...

# What Engine.check() and Engine.begin() say.
UNCHANGED: int  # 0
MOVED: int  # 1: data of some rows moved or changed type or size: see Engine.moved()
REPLACED: int  # 2: a module no longer holds the parameter object of the plan

WRITTEN: int  # 3: resume() only: a version counter moved since remember()

class Engine:
    """Casts the masters of one device into low-precision copies, and switches ``.data`` between the two.

    ``params[i]`` is row i, in forward order.  ``sites`` are ``(module._parameters, key, row)`` for every place that holds a
    parameter.  The engine owns references to everything it is given.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        sites: Sequence[tuple[dict[str, Any], str, int]],
        low_dtype: str,
        first_bucket_bytes: int,
        bucket_bytes: int,
    ) -> None: ...
    @property
    def buckets(self) -> list[tuple[int, int, int]]:
        """(first row, rows, arena bytes) of every bucket."""
    @property
    def rows(self) -> list[tuple[int, int]]:
        """(bucket, offset in bytes) of every row."""
    @property
    def is_low(self) -> bool:
        """Whether any row's ``.data`` is its low-precision copy now."""
    @property
    def native_stream(self) -> int | None: ...
    def bind(self, masters: Sequence[Tensor], lows: Sequence[Tensor], arenas: Sequence[Tensor] | None) -> None:
        """Tensors to switch between.  ``masters[i]``/``lows[i]`` are detached aliases with row i's shape and strides.
        ``arenas``: one 1-D uint8 tensor a bucket, which the lows are views of (their storage may be resized between
        passes); None: every low owns its storage.  Not while ``is_low``."""
    def rebind_master(self, row: int, master: Tensor) -> None: ...
    def check(self) -> int: ...
    def moved(self) -> list[int]:
        """Rows that the last check() found moved."""
    def begin(self) -> int:
        """check(); when unchanged: cast() and lower().  Otherwise nothing is done.  Order: everything on the caller's
        current stream happens before the casts."""
    def cast(self) -> None:
        """Enqueues the casts of every bucket and records its event."""
    def lower(self) -> None:
        """``param.data = low`` for every row.  On an error all rows are masters again."""
    def restore(self, bucket: int = -1) -> None:
        """``param.data = master`` for the bucket's rows (-1: all).  Goes on past an error and raises the first at the end.
        The caller's current stream waits for the casts first: who has the masters back may write them."""
    def remember(self) -> None:
        """Keeps the version counter of every parameter, for resume()."""
    def resume(self) -> int:
        """check(), and when no version counter moved since remember(): lower().  Otherwise nothing is done.  Nothing is
        cast: the copies are those of the last cast().  Writes that count no version are not seen."""
    def reclaim(self) -> None:
        """Where somebody else may have switched ``.data``: rows that still are their copies become masters, and rows that
        are something else are taken to be masters."""
    def wait(self, bucket: int = -1) -> None:
        """The caller's current stream waits for the casts of buckets 0..bucket (-1: all) of the last cast()."""
    def wait_hook(self, bucket: int) -> Callable[..., None]:
        """A forward pre-hook that calls wait(bucket); cheap when there is nothing to wait for."""
    def event(self, bucket: int) -> Event:
        """A new Event for what the last cast() recorded for the bucket."""
    def counters(self) -> dict[str, int]: ...

class Gradients:
    """Readiness, packing and hand-over of the gradients of a list of parameters of one device.

    ``buckets[b]`` lists rows in packing order; each row is in exactly one bucket.  ``on_first(row)`` is called when a hook
    fires outside begin()/end(); ``on_ready(bucket)`` when the last row of a bucket fired and ``early`` was set.
    Exceptions of both propagate out of the backward.  ``on_error()`` is called before a hook raises an error of its own.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        buckets: Sequence[Sequence[int]],
        on_first: Callable[[int], None],
        on_ready: Callable[[int], None],
        on_error: Callable[[], None] | None = None,
    ) -> None: ...
    def hook(self, row: int) -> Callable[[Tensor], None]:
        """Callable for ``register_post_accumulate_grad_hook``; holds a weak or plain reference to self, no cycle through the
        parameter is left uncollectable."""
    def begin(self, early: bool, fired_row: int = -1) -> int:
        """A backward starts: every defined ``.grad`` is set aside (stashed) and ``.grad`` becomes None.  A stash is `synced`
        when it is the very object that hand_over() left and its version counter has not moved, otherwise `local`: only this
        rank may have it, or what it has beyond its `base`.  Returns how many were set aside.  ``fired_row`` is a row whose hook fired already in this
        backward (the caller is on_first): its ``.grad`` holds the new gradient and stays."""
    @property
    def fires(self) -> int:
        """Hooks that fired since begin()."""
    @property
    def refired(self) -> bool:
        """Whether some row fired more than once between two reset()s."""
    @property
    def active(self) -> bool: ...
    def fired_flags(self) -> bytearray:
        """One byte a row: not 0 when its hook fired since reset()."""
    def unfired(self, bucket: int) -> list[int]: ...
    def pack(self, bucket: int, out: Tensor, divisor: float) -> list[int]:
        """out[...] = (grad + stash) / divisor, the stash where it takes part in the reduction, row after row without gaps, on
        the caller's current stream; then ``.grad`` is None.  ``out``: 1-D, contiguous, as many elements as the bucket.  Missing
        gradients are zeros.  Rows whose gradient cannot be read flat (other strides, no DLPack), or that have a base, are left
        untouched and returned: the caller copies them."""
    def stashed(self, bucket: int) -> int:
        """How many rows of the bucket have something set aside."""
    def stash(self, row: int) -> Tensor | None: ...
    def is_local(self, row: int) -> bool:
        """Whether what is set aside for the row is local."""
    def reduces_stash(self, row: int) -> bool:
        """Whether what is set aside takes part in the reduction: it is local, or reduce_whole() was called."""
    def reduce_whole(self, bucket: int) -> None:
        """From now on all that is set aside takes part in the bucket's reduction, as in plain DDP, so that ranks agree whatever
        one of them did to its gradient.  For reductions in a type that holds every value of the masters' type."""
    def of_other_type(self, bucket: int) -> list[int]:
        """Rows whose stash was set by the user and has another element type than the parameter had at construction."""
    def set_stash(self, row: int, tensor: Tensor) -> None:
        """``tensor`` takes the place of what was set aside."""
    def without_base(self, bucket: int) -> list[int]:
        """Rows that fired, whose stash is synced and takes no part in the reduction.  Before accumulate() adds to such a stash it
        needs a base."""
    def base(self, row: int) -> Tensor | None:
        """What set_base() gave, until the next hand_over() or until ``.grad`` is found to be another object."""
    def set_base(self, row: int, tensor: Tensor) -> None:
        """A copy of a synced stash, equal on all ranks: the stash is local from now on.  What this rank adds, the stash less
        its base, is what it contributes to the next reduction: pack() and hand_over() leave such rows to the caller.
        A version counter that moved takes it away."""
    def contributes(self) -> bytes:
        """One byte a row: 1 when it fired since reset() or something local is set aside for it, 2 when it fired and pack()
        found no gradient: autograd hands undefined ones to what a loss does not need."""
    def position(self, row: int) -> int:
        """The row's place in its bucket."""
    def hand_over(
        self, bucket: int, reduced: Tensor, views: Sequence[Tensor] | None, divisor: float, used: bytes | None
    ) -> list[int]:
        """After a reduction: ``.grad`` of every row becomes its stash (overwritten by reduced / divisor where it took part in the
        reduction, else increased by it) or, where nothing was set aside, ``views[k]`` (k: position in the bucket), which is
        filled unless it already is that part of ``reduced``.  Views are of one tensor, so that they share its version counter; a
        tuple is not copied.  used[row] == 0: ``.grad`` becomes what it was before begin().  Parameters must be
        masters.  What is handed over is `synced` from now on."""
    def accumulate(self, bucket: int, views: Sequence[Tensor] | None) -> list[int]:
        """Without a reduction: stash += grad, or views[k] = grad where nothing was set aside; ``.grad`` becomes that.  Rows
        that did not fire get their stash back.  Result is `local`.  Returns rows to be copied by the caller, as pack() does."""
    def settle(self, row: int, grad: Tensor | None, synced: bool) -> None:
        """Finishes a row that hand_over() or accumulate() returned: ``.grad = grad``, and what was set aside is dropped.
        ``synced``: the gradient is equal on all ranks, as after hand_over()."""
    def end(self) -> None:
        """The backward is over: hooks that fire from now on call on_first."""
    def reset(self) -> None:
        """Forgets what fired: the next round of readiness starts."""
    def abort(self) -> None:
        """``.grad`` of every row becomes what was set aside in begin() (None where nothing was) and end()s and reset()s.
        Parameters must be masters."""
    def set_launched(self, bucket: int) -> None:
        """A row of this bucket that fires again before reset() raises RuntimeError by name."""

def describe(tensor: Tensor) -> dict[str, Any]:
    """data, numel, dtype (name), dense (bool), device_type, device_index, shape, strides; BufferError with the reason when
    the tensor cannot be read."""

def cast(src: Tensor, dst: Tensor) -> None:
    """dst[...] = src on the caller's stream; both dense with equal numel.  For tests and benchmarks."""

def fuse(
    src: Sequence[Tensor | None], add: Sequence[Tensor | None], dst: Sequence[Tensor], divisor: float, private: bool = False
) -> None:
    """The multi-tensor operation of csrc/core/row.h over lists of tensors of one device; ``private``: on the private stream,
    then waited for."""

def unshared(tensors: Sequence[Tensor], references: int = 1) -> bool:
    """Whether nothing but ``references`` owners (the list itself) holds each of these Python objects."""

def current_stream(tensor: Tensor) -> int: ...
def build_info() -> dict[str, Any]: ...

# Knobs for tests and benchmarks, see csrc/host/backend.h.
def host_set_inline_bytes(n: int) -> int: ...
def host_set_stream_bytes(n: int) -> int: ...
def host_set_isa(name: str | None) -> None: ...
def host_isa() -> str: ...
def host_fail_at(nth: int) -> int: ...
def host_hold(held: bool) -> None:
    """While held, the host stream's worker runs nothing."""

def simulate_cuda(on: bool) -> None:
    """For tests: CPU tensors count as memory of CUDA device 0.  RuntimeError unless the driver is the simulated one."""

def plan(numels: Sequence[int], low_dtype: str, first_bucket_bytes: int, bucket_bytes: int) -> dict[str, Any]:
    """The planner alone: {"buckets": [...], "rows": [...]}, no memory touched."""
