"""Backwards as PyTorch runs them for a device: in a thread of autograd's, each node on the stream of its forward.

Inside `device_thread` a backward that the test's thread starts goes on in another thread, with the bridge active there.  As in
PyTorch's engine, a node runs on the stream that was current when the forward made it, the accumulation of a gradient on that
of the leaf's first use.  A stream waits for the streams that its node's gradients come from, and is recorded on these
gradients.  At the end the caller's stream waits for those of all leaves, and the callbacks run with it as the current one.

Differs from the engine: hooks on tensors (not those after accumulation) run on the stream of the node before.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from .bridge import Bridge

Node = torch.autograd.graph.Node
Stream = int | None


class _Graph:
    """The nodes that a backward may run, and the streams they run on."""

    def __init__(self, roots: list[Node], changes: list[tuple[int, Stream]]) -> None:
        self._numbers, self._streams = [number for number, _ in changes], [stream for _, stream in changes]
        self.roots = set(roots)
        self.producers: dict[Node, list[Node]] = {root: [] for root in roots}
        waiting = list(self.producers)
        while waiting:
            node = waiting.pop()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if following not in self.producers:
                    self.producers[following] = []
                    waiting.append(following)
                self.producers[following].append(node)
        self.stream = {node: self._stream_of(node) for node in self.producers}

    def _stream_of(self, node: Node) -> Stream:
        number = node._sequence_nr()
        if node.name().endswith("AccumulateGrad"):  # it has no number: of its first user in the forward
            number = min((user._sequence_nr() for user in self.producers[node]), default=0)
        return self._streams[max(0, bisect_right(self._numbers, number) - 1)]

    def leaf_streams(self) -> list[Stream]:
        return list(dict.fromkeys(self.stream[node] for node in self.producers if not node.next_functions))


class _Task:
    """One backward in autograd's thread."""

    def __init__(self, bridge: Bridge, graph: _Graph, caller: Stream) -> None:
        self._bridge, self._graph, self.caller = bridge, graph, caller
        self._start = bridge.record()
        self._crossed: set[Node] = set()  # nodes that another stream comes after
        self._done: dict[Node, int] = {}  # their events
        self._last: Node | None = None
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Lets nodes change the current stream, where they have several."""
        graph = self._graph
        streams = set(graph.stream.values())
        if len(streams) == 1:
            self._set_stream(next(iter(streams)))
            return
        for node, producers in graph.producers.items():
            self._crossed.update(p for p in producers if graph.stream[p] != graph.stream[node])
            self._handles.append(node.register_prehook(functools.partial(self._enter, node)))

    def _set_stream(self, stream: Stream) -> None:
        self._bridge.set_stream(stream)
        if stream != self.caller:
            self._bridge.wait(self._start)

    def _enter(self, node: Node, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """The node is about to run; what the one before has left for others, their sums too, is there by now."""
        if self._last in self._crossed:
            self._done[self._last] = self._bridge.record()
        self._last = node
        stream, producers = self._graph.stream[node], self._graph.producers[node]
        if node in self._graph.roots:
            self._set_stream(stream)
        self._bridge.set_stream(stream)
        others = [p for p in producers if self._graph.stream[p] != stream and p in self._done]
        for producer in others:
            self._bridge.wait(self._done[producer])
        for gradient in gradients if others else ():
            if gradient is not None:
                self._bridge.record_stream(gradient, stream)

    def settle(self) -> None:
        """The caller's stream, which is current, waits for those of the leaves."""
        for stream in self._graph.leaf_streams():
            if stream != self.caller:
                self._bridge.wait(self._bridge.sim.record(stream))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Callback:
    """A final callback: with the caller's stream, which comes after the leaves'."""

    def __init__(self, bridge: Bridge, task: _Task, callback: Callable[[], None]) -> None:
        self._bridge, self._task, self._callback = bridge, task, callback

    def __call__(self) -> None:
        with self._bridge.stream(self._task.caller):
            self._task.settle()
            self._callback()


class _Engine:
    """PyTorch's engine, whose backwards go to the bridge's thread."""

    def __init__(self, real: Any, bridge: Bridge, pool: ThreadPoolExecutor) -> None:
        self._real, self._bridge, self._pool = real, bridge, pool
        self._task: _Task | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        bridge = self._bridge
        if self._task is not None or not bridge.is_active():  # within a backward: in the same thread, as with PyTorch
            return self._real.run_backward(tensors, *args, **kwargs)
        roots = [t.grad_fn if t.grad_fn is not None else torch.autograd.graph.get_gradient_edge(t).node for t in tensors]
        task = self._task = _Task(bridge, _Graph(roots, bridge.stream_changes()), bridge.current)
        grad_mode = torch.is_grad_enabled()

        def run() -> Any:
            with bridge, torch.set_grad_enabled(grad_mode), bridge.stream(task.caller):
                task.watch()
                result = self._real.run_backward(tensors, *args, **kwargs)
                bridge.set_stream(task.caller)
                task.settle()
                return result

        try:
            return self._pool.submit(run).result()
        finally:
            task.close()
            self._task = None

    def queue_callback(self, callback: Callable[[], None]) -> None:
        task = self._task
        self._real.queue_callback(callback if task is None else _Callback(self._bridge, task, callback))


@contextmanager
def device_thread(bridge: Bridge) -> Iterator[None]:
    """Inside, backwards run as a device's do."""
    real = Variable._execution_engine
    with ThreadPoolExecutor(1, thread_name_prefix="autograd") as pool:
        Variable._execution_engine = _Engine(real, bridge, pool)
        try:
            yield
        finally:
            Variable._execution_engine = real
