"""Types of the C extension.  Internal: the public names are those of ``ddp_mp``."""

from collections.abc import Callable, Sequence
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

# What Engine.check() and Engine.begin() say.
UNCHANGED: int  # 0
MOVED: int  # 1: data of some rows moved or changed type or size: see Engine.moved()
REPLACED: int  # 2: a module no longer holds the parameter object of the plan

WRITTEN: int  # 3: check_unwritten() only: a version counter moved since remember()

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
        """Keeps the version counter of every parameter, for check_unwritten()."""
    def check_and_cast(self) -> int:
        """check(); when unchanged: cast().  Otherwise nothing is done."""
    def check_unwritten(self) -> int:
        """check(); when unchanged: WRITTEN where a version counter moved since remember().  Writes that count no version are
        not seen."""
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

class Leaves:
    """The leaves of one generation, and the sites that they are placed in: entries of ``module.__dict__``.

    ``memory`` says where each leaf lies: a tensor, and bytes from its start.
    ``sites`` are ``(module, name of the parameter, index into leaves)``; modules are referred to weakly.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        leaves: Sequence[Tensor],
        memory: Sequence[tuple[Tensor, int]],
        names: Sequence[str],
        sites: Sequence[tuple[object, str, int]],
    ) -> None: ...
    def place(self) -> bool:
        """Puts every leaf into its sites.  False, and nothing is stored, where a site has an entry already."""
    def take_back(self) -> bool:
        """Deletes the entries that are our leaves; others stay.  Returns whether every site held its leaf."""
    def match(self) -> None:
        """``requires_grad`` of every leaf becomes its master's."""
    def remember(self) -> None:
        """Notes the version counter of every leaf, for changed()."""
    def bumped(self) -> None:
        """The version of every leaf was counted up by one since remember(), by the caller."""
    def changed(self) -> tuple[list[int], list[int]] | None:
        """None, or (leaves written since remember() or moved out of their memory, leaves whose ``requires_grad`` was set since match())."""

class GradientHook:
    """What Gradients.hook() returns; refers to its owner weakly."""

    def __call__(self, tensor: Tensor) -> None: ...

class Gradients:
    """Readiness and movement of the gradients of one wrapped module's trainable parameters, which are its rows.

    A backward is begin(), hooks that fire, then for every bucket either pack() and give() around a reduction or accumulate()
    without one, and end().  A gradient arrives on a leaf, or on the master.  ``buckets`` are lists of rows, each row in one;
    ``cast`` says of each row whether a leaf stands for it.

    ``on_first(row, elsewhere)`` is called when a gradient arrives and no backward has begun; ``elsewhere``: on the master of a
    row that is cast.  ``on_ready(bucket)`` in an early backward, when its last row has fired, by a leaf where the row is cast.
    ``on_special(row, leaf)`` when a leaf has a gradient that is not simply packed: the master has hooks of the user, or another
    leaf of it has a gradient.  ``on_error()`` before an error of a callback leaves a hook.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        names: Sequence[str],
        buckets: Sequence[Sequence[int]],
        cast: Sequence[bool],
        on_first: Callable[[int, bool], None],
        on_ready: Callable[[int], None],
        on_special: Callable[[int, Any], None],
        on_error: Callable[[], None],
    ) -> None: ...
    early: bool
    @property
    def active(self) -> bool: ...
    @property
    def fires(self) -> int:
        """Hooks that fired since begin()."""
    @property
    def refired(self) -> bool:
        """Whether in one backward a tensor's hook fired twice, or a leaf's and its master's, since reset()."""
    @property
    def direct(self) -> bool:
        """Whether a gradient arrived on a master that has a leaf, since begin()."""
    def hook(self, row: int) -> GradientHook:
        """The post-accumulate-grad hook for the row's master and for each leaf of it."""
    def begin(self, early: bool) -> None: ...
    def end(self) -> None: ...
    def abort(self) -> None:
        """After an error: leaves that fired lose their gradients; end() and reset()."""
    def reset(self) -> None:
        """The next round of readiness starts."""
    def unfired(self, bucket: int) -> list[int]:
        """Rows that have not fired since reset()."""
    def fired_flags(self) -> bytes:
        """A byte per row: 1 when it fired since reset(), with a gradient."""
    def contributes(self) -> bytes:
        """A byte per row: 1 when something was packed for it since reset()."""
    def mark(self, row: int) -> None:
        """The caller has packed something for the row."""
    def launch(self, bucket: int) -> None:
        """A row of the bucket that fires again raises RuntimeError, as after pack()."""
    def source(self, row: int) -> Any | None:
        """The leaf that fired last in this backward."""
    def lacks(self, bucket: int) -> bool:
        """Whether give() or accumulate() needs a view for some row of the bucket."""
    def pack(self, bucket: int, out: Tensor, divisor: float) -> list[int]:
        """out = (leaf.grad + master.grad) / divisor, in one launch on the current stream; then leaf.grad is None.

        Returns rows left to the caller, whose part of ``out`` is not written.
        """
    def give(
        self, bucket: int, reduced: Tensor, views: tuple[Tensor, ...] | None, divisor: float, used: bytes | None
    ) -> list[int]:
        """master.grad = reduced / divisor: into the gradient that it had before this backward, else it becomes the row's view.

        ``used``: a byte per row; 0 leaves the row as it is.  Returns rows left to the caller.
        """
    def accumulate(self, bucket: int, views: tuple[Tensor, ...] | None) -> list[int]:
        """master.grad += leaf.grad, in the master's type; then leaf.grad is None.  Returns rows left to the caller."""

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
