"""PyTorch on the simulated device: CPU tensors whose storage counts as device memory.

A `Bridge` is a dispatch mode.  While it is active every ATen op on such tensors is work of a simulated current stream: it
runs only after what that stream was ordered after, and its reads and writes are booked as that stream's.  So a forgotten
wait of the code under test gives stale values where a device could, and a report in any case::

    with Bridge(sim, stream) as bridge:
        loss = model(x).square().mean()
        with bridge.stream(other):
            y = x + 1

What is made inside is device memory, of a caching allocator with PyTorch's rule of streams; `adopt` makes it of what was
there before.  Other tensors are host memory: PyTorch computes with them as ever, and mixing both is reported, except for
copies and numbers.  What the mode cannot see: work of other threads outside ATen, and access to memory behind PyTorch's
back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from . import collectives
from .sim import Range, Simulator
from .torch_memory import DeviceMemory

_aten = torch.ops.aten

#: Ops that hand a value, or a size, to the host, which on a device waits for the stream.
_HOST_READS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.is_nonzero.default,
    _aten.masked_select.default,
}

#: Ops that copy between devices.
_COPIES = {_aten._to_copy.default, _aten.copy_.default}

#: Ops that touch no element.
_UNTOUCHED = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}

#: Methods of a tensor that read its elements on the host, past the dispatcher where they are there already.
_TO_HOST = ("cpu", "tolist", "numpy", "to")


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0 and tensor.data_ptr() != 0


class Bridge(TorchDispatchMode):
    """Books ATen ops as work of ``stream``, a handle of the simulated driver (None: the default stream).

    With ``communication``, a stream too, collectives run there as with NCCL; without, they are work of the current stream at
    their call.  ``callbacks`` is the stream of callbacks on their futures.

    Attributes:
        syncs: every operation of PyTorch's that made the host wait for the device, by name.
    """

    def __init__(
        self, sim: Simulator, stream: int | None = None, communication: int | None = None, callbacks: int | None = None
    ) -> None:
        super().__init__()
        self.sim = sim
        self.communication, self.callbacks = communication, callbacks
        self.works: list[collectives.StreamWork] = []
        self.landing: dict[int, int] = {}  # by address of a tensor, the event of the last collective on it
        self.syncs: list[str] = []
        self._first = stream
        self._local = threading.local()
        self._memory = DeviceMemory(sim)
        self._adopted: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._patches = ExitStack()
        self._entered = 0
        self._no_syncs = False

    # The current stream, of the calling thread

    @property
    def _streams(self) -> list[int | None]:
        if not hasattr(self._local, "streams"):
            self._local.streams = [self._first]
            self._local.changes = [(0, self._first)]
        return self._local.streams

    def _changed(self, stream: int | None) -> None:
        self.sim.current_stream = stream
        self._local.changes.append((torch._C._autograd._get_sequence_nr(), stream))

    def stream_changes(self) -> list[tuple[int, int | None]]:
        """Where the calling thread's current stream changed, by number of the node of autograd's that it makes next."""
        return list(self._local.changes)

    @property
    def current(self) -> int | None:
        return self._streams[-1]

    def set_stream(self, stream: int | None) -> None:
        """``torch.cuda.set_stream``."""
        self._streams[-1] = stream
        self._changed(stream)

    @contextmanager
    def stream(self, stream: int | None) -> Iterator[None]:
        """Inside, ops are work of another stream."""
        self._streams.append(stream)
        self._changed(stream)
        try:
            yield
        finally:
            self._streams.pop()
            self._changed(self.current)

    def record(self) -> int:
        """An event on the current stream."""
        return self.sim.record(self.current)

    def wait(self, record: int) -> None:
        """The current stream waits for an event."""
        self.sim.wait(self.current, record)

    def record_stream(self, tensor: torch.Tensor, stream: int | None) -> None:
        """``tensor.record_stream(stream)``: its memory, once freed, is held back until what the stream has then is done."""
        self.sim.cache_record_stream(tensor.untyped_storage().data_ptr(), stream)

    def stream_object(self, stream: int) -> torch.Stream:
        """The stream as ``tensor.record_stream`` takes it."""
        return torch.Stream(stream_id=stream, device_index=0, device_type=1)

    def synchronize(self) -> None:
        """What ``torch.cuda.synchronize()`` would do."""
        self.sim.synchronize()

    @contextmanager
    def no_syncs(self) -> Iterator[None]:
        """Inside, whatever makes the host wait for the device is reported: ``torch.cuda.set_sync_debug_mode``."""
        before, self._no_syncs = self._no_syncs, True
        try:
            yield
        finally:
            self._no_syncs = before

    def _synchronise(self, what: str) -> None:
        self.sim.refuse_capturing(self.current)
        self.syncs.append(what)
        if self._no_syncs:
            self.sim.finding("SYNCHRONISES", f"{what} makes the host wait for the device")
        self.sim.synchronize(self.current)

    # Memory

    def adopt(self, *tensors: torch.Tensor) -> None:
        """Makes the storage of tensors that were there before device memory; it is kept until `close`."""
        for tensor in filter(_has_memory, tensors):
            storage = tensor.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes())
            if key not in self._adopted and not self._on_device(tensor):
                self._adopted[key] = storage
                self.sim.register(*key, f"tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return self.sim.is_device_memory(tensor.data_ptr())

    # Booking

    def _arguments(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Range], list[torch.Tensor]]:
        """What the op reads and writes in place of device memory, and its tensors in host memory."""
        ranges, on_host = [], []
        collective = func.namespace == "c10d"
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name) if i >= len(args) else args[i]
            write = collective or bool(argument.alias_info and argument.alias_info.is_write)
            for tensor in filter(_has_memory, _tensors(value)):
                if not self._on_device(tensor):
                    on_host.append(tensor)
                    continue
                ranges.append(Range(tensor.data_ptr(), _span(tensor), False))
                if write:
                    ranges.append(Range(tensor.data_ptr(), _span(tensor), True))
        return ranges, on_host

    def _check_host(self, func: Any, on_host: list[torch.Tensor]) -> None:
        """Host memory among device memory: a copy, or a number, or an error of the caller's."""
        for tensor in on_host:
            if func in _COPIES:
                self._synchronise(f"{func} of pageable memory")
            elif tensor.dim() > 0:
                shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                self.sim.finding("HOST-MEMORY", f"{func} was given host memory among device memory: {shape}")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.overloadpacket is _aten.set_:
            return func(*args, **kwargs)
        if func is _aten.record_stream.default:
            return self.record_stream(args[0], args[1].stream_id)
        ranges, on_host = self._arguments(func, args, kwargs)
        if func.overloadpacket.__name__.endswith("_like") or func.overloadpacket.__name__.startswith("new_"):
            ranges = []  # their shapes are asked for, and not their values
            on_device = not on_host
        else:
            on_device = bool(ranges) or not on_host or func in _COPIES
        if not on_device:
            return func(*args, **kwargs)  # PyTorch's work on the host
        self._check_host(func, on_host)
        if func.namespace == "c10d" and self.communication is not None and self._fits_collective(args, kwargs):
            return collectives.run(self, func, args, kwargs, list(filter(_has_memory, _tensors((args, kwargs)))))
        return self._run(func, args, kwargs, ranges)

    def _fits_collective(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        tensors = _tensors((args, kwargs))
        return all(t.layout == torch.strided and t.is_contiguous() for t in tensors) and not self.sim.is_capturing(self.current)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], ranges: list[Range]) -> Any:
        if func in _HOST_READS:
            self.sim.refuse_capturing(self.current)
        self.sim.enter(self.current)
        with self._memory.on_device():
            out = func(*args, **kwargs)
        # An output that shares an input's storage was booked as that input, or is a view of it.
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        fresh = [t for t in filter(_has_memory, _tensors(out)) if t.untyped_storage().data_ptr() not in inputs]
        if func not in _UNTOUCHED:
            ranges += [Range(t.data_ptr(), _span(t), True) for t in fresh if self._on_device(t)]
        if ranges:
            self.sim.access(self.current, ranges, str(func))
        if func in _HOST_READS:
            self._synchronise(str(func))
        return out

    # Methods that the dispatcher does not see

    def is_active(self) -> bool:
        """Whether PyTorch's operations in the calling thread are the device's."""
        return _get_current_dispatch_mode() is self

    def _patch(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Overlays an inherited method until the bridge is left."""
        setattr(owner, name, make(getattr(owner, name)))
        self._patches.callback(delattr, owner, name)

    def _resizing(self, resize: Any) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if not self.is_active():
                return resize(storage, size)
            with self._memory.on_device():
                return resize(storage, size)

        return resize_

    def _waiting(self, wait: Any) -> Any:
        """A future that went through C++ is PyTorch's own there: what it brings tells the collective that it is of."""

        def wait_on_stream(future: Any) -> Any:
            value = wait(future)
            for tensor in _tensors(value) if self.is_active() else ():
                if tensor.data_ptr() in self.landing:
                    self.wait(self.landing[tensor.data_ptr()])
            return value

        return wait_on_stream

    def _reading(self, name: str) -> Callable[[Any], Any]:
        """A method that copies to the host: what it returns is host memory, and the host has waited for it."""

        def make(method: Any) -> Any:
            def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                # a device is named by an object where the code under test means the tensor's own
                to_host = name != "to" or "cpu" in (*(a for a in args if isinstance(a, str)), kwargs.get("device"))
                if not (to_host and self.is_active() and _has_memory(tensor) and self._on_device(tensor)):
                    return method(tensor, *args, **kwargs)
                self.sim.refuse_capturing(self.current)
                self.sim.access(self.current, [Range(tensor.data_ptr(), _span(tensor))], f"Tensor.{name}")
                self._synchronise(f"Tensor.{name}")
                if tensor.requires_grad:  # the copy is an operation of autograd's
                    return method(tensor, *args, **kwargs)
                with _disable_current_modes():
                    copied = tensor.clone() if name in ("cpu", "to") else tensor
                    return method(copied, *args, **kwargs)

            return read

        return make

    def __enter__(self) -> Bridge:
        super().__enter__()
        self._changed(self.current)
        self._entered += 1
        if self._entered == 1:
            self._patch(torch.UntypedStorage, "resize_", self._resizing)
            for name in _TO_HOST:
                self._patch(torch.Tensor, name, self._reading(name))
            wait = torch._C.Future.wait
            torch._C.Future.wait = self._waiting(wait)  # type: ignore[method-assign]
            self._patches.callback(setattr, torch._C.Future, "wait", wait)
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered -= 1
        if self._entered == 0:
            self._patches.close()
        self.sim.current_stream = None
        super().__exit__(*exception)

    def close(self) -> None:
        """Waits for everything and gives the memory back."""
        self.sim.synchronize()
        self.works.clear()
        self.landing.clear()
        self.sim.cache_abandon()
        for base, _ in self._adopted:
            self.sim.unregister(base)
        self._adopted.clear()
