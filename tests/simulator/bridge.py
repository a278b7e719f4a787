"""PyTorch on the simulated device: CPU tensors whose storage counts as device memory.

A `Bridge` is a dispatch mode.  While it is active every ATen op on CPU tensors is work of a simulated current stream: it
runs only after what that stream was ordered after, and its reads and writes are booked as that stream's.  So a forgotten
wait of the code under test gives stale values where a device could, and a report in any case::

    with Bridge(sim, stream) as bridge:
        loss = model(x).square().mean()
        with bridge.stream(other):
            y = x + 1

What it cannot see: work of other threads outside ATen (gloo's reductions; a collective is booked as a write at its call),
and access to memory behind PyTorch's back.  Storages that were seen are kept alive until the bridge is closed, so that
memory is never reused: what a caching allocator does is modelled for ``storage.resize_`` only, as a free on the
current stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .sim import Range, Simulator

# Ops that hand a value to the host, which on a device waits for the stream.
_HOST_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
}


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _is_device_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0 and tensor.data_ptr() != 0


class Bridge(TorchDispatchMode):
    """Books ATen ops as work of ``stream``, a handle of the simulated driver (None: the default stream)."""

    def __init__(self, sim: Simulator, stream: int | None = None) -> None:
        super().__init__()
        self._sim = sim
        self._streams = [stream]
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._resize: Any = None

    # The current stream

    @property
    def current(self) -> int | None:
        return self._streams[-1]

    @contextmanager
    def stream(self, stream: int | None) -> Iterator[None]:
        """Inside, ops are work of another stream."""
        self._streams.append(stream)
        self._sim.current_stream = stream
        try:
            yield
        finally:
            self._streams.pop()
            self._sim.current_stream = self.current

    def synchronize(self) -> None:
        """What ``torch.cuda.synchronize()`` would do."""
        self._sim.synchronize()

    # Booking

    def adopt(self, *tensors: torch.Tensor) -> None:
        """Makes the tensors' storage device memory now; without this it becomes so when an op first touches it."""
        for tensor in tensors:
            if _is_device_memory(tensor):
                self._register(tensor)

    def _register(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            self._storages[key] = storage
            self._sim.register(*key, f"tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")

    def _range(self, tensor: torch.Tensor, write: bool) -> Range:
        self._register(tensor)
        return Range(tensor.data_ptr(), _span(tensor), write)

    def _arguments(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Range]:
        """What the op reads, and what it writes in place."""
        ranges = []
        collective = func.namespace == "c10d"
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name) if i >= len(args) else args[i]
            write = collective or bool(argument.alias_info and argument.alias_info.is_write)
            for tensor in filter(_is_device_memory, _tensors(value)):
                ranges.append(self._range(tensor, False))
                if write:
                    ranges.append(self._range(tensor, True))
        return ranges

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        self._sim.enter(self.current)
        ranges = self._arguments(func, args, kwargs)
        out = func(*args, **kwargs)
        # An output that shares an input's storage was booked as that input, or is a view of it.
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        fresh = [t for t in filter(_is_device_memory, _tensors(out)) if t.untyped_storage().data_ptr() not in inputs]
        ranges += [self._range(tensor, True) for tensor in fresh]
        if ranges:
            self._sim.access(self.current, ranges, str(func))
        if func in _HOST_READS:
            self._sim.synchronize(self.current)
        return out

    # Storage that is given back and taken anew

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        key = (storage.data_ptr(), storage.nbytes())
        if key in self._storages and size != key[1]:
            # The caching allocator lets its own stream use the memory again, so others must be done with it by then.
            self._sim.access(self.current, [Range(*key, write=True)], "storage.resize_")
            self._sim.synchronize()  # here the bytes really go, and late work must not find them gone
            self._sim.unregister(key[0])
            del self._storages[key]
        self._resize(storage, size)
        key = (storage.data_ptr(), storage.nbytes())
        if size and key not in self._storages:  # at once: the next to touch it may be the code under test
            self._storages[key] = storage
            self._sim.register(*key, "resized storage")

    def __enter__(self) -> Bridge:
        super().__enter__()
        self._sim.current_stream = self.current
        if self._resize is None:
            self._resize = resize = torch.UntypedStorage.resize_
            bridge = self

            def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
                bridge._resized(storage, size)
                return storage

            resize_.__doc__ = resize.__doc__
            torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        if self._resize is not None:
            del torch.UntypedStorage.resize_  # the inherited one shows again
            self._resize = None
        self._sim.current_stream = None
        super().__exit__(*exception)

    def close(self) -> None:
        """Waits for everything and gives the memory back."""
        self._sim.synchronize()
        for base, _ in self._storages:
            self._sim.unregister(base)
        self._storages.clear()
