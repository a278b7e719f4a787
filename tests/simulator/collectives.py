"""Collectives as PyTorch's process group for NCCL runs them: on a stream of the group's, seen from the caller's by events.

The group's stream waits for the caller's at the call.  ``wait()`` makes the caller's current stream wait for the end of that
collective, and does not block the host.  Until then the group keeps the tensors, so that their memory is not used again.
The values come from the process group of the test (gloo), which works on copies; they land when the group's stream gets
there.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from .sim import Range

if TYPE_CHECKING:
    from .bridge import Bridge


class StreamFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future whose value is there once a stream gets to an event: whoever asks for it makes its own stream wait."""

    def __init__(self, bridge: Bridge, record: int) -> None:
        super().__init__()
        self._bridge, self._record = bridge, record

    def wait(self) -> Any:
        self._bridge.wait(self._record)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> StreamFuture:  # type: ignore[override]
        """The callback runs now, on a stream of its own that waits for this future's event."""
        bridge = self._bridge
        with bridge.stream(bridge.callbacks):
            bridge.wait(self._record)
            value = callback(self)
            if isinstance(value, torch.futures.Future):
                value = value.wait()
            after = StreamFuture(bridge, bridge.record())
        after.set_result(value)
        return after


class StreamWork(dist.Work):
    """A collective under way."""

    def __init__(self, bridge: Bridge, record: int, outputs: list[torch.Tensor], stash: list[torch.Tensor]) -> None:
        super().__init__()
        self._bridge, self._record, self._outputs, self._stash = bridge, record, outputs, stash

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """The current stream waits, and the group lets go of the tensors."""
        self._bridge.wait(self._record)
        self._stash, self._outputs = [], []
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> StreamFuture:
        future = StreamFuture(self._bridge, self._record)
        future.set_result(self._outputs)
        return future


def _bytes(tensor: torch.Tensor) -> bytes:
    return C.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def run(bridge: Bridge, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    """Runs a collective of contiguous tensors; returns what ``func`` does, with a `StreamWork`."""
    sim, stream = bridge.sim, bridge.communication
    sim.order(stream, bridge.current)
    sim.enter(stream)
    copies = {id(tensor): tensor.detach().clone() for tensor in tensors}
    args, kwargs = tree_map_only(torch.Tensor, lambda t: copies.get(id(t), t), (args, kwargs))
    result = func(*args, **kwargs)
    work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
    work.wait()
    for tensor in tensors:
        data = _bytes(copies[id(tensor)])
        ranges = [Range(tensor.data_ptr(), len(data)), Range(tensor.data_ptr(), len(data), write=True)]
        sim.work(stream, ranges, str(func), tensor.data_ptr(), data)
    originals = {id(copies[id(tensor)]): tensor for tensor in tensors}
    returned = tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result[:-1]) if isinstance(result, tuple) else ()
    outputs = [t for t in tensors if any(t is r for r in _flat(returned))]
    record = sim.record(stream)
    bridge.landing.update((tensor.data_ptr(), record) for tensor in tensors)
    pending = StreamWork(bridge, record, outputs, tensors)
    bridge.works.append(pending)  # PyTorch gives the caller this very object as long as it is alive
    return (*returned, pending.boxed()) if isinstance(result, tuple) else pending.boxed()


def _flat(tree: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
