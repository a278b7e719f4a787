"""``torch.cuda.graph`` on the simulated device: what PyTorch does in it becomes nodes, booked at every replay.

Values are computed at the capture and not at a replay; who reads and writes what, and in which order, is checked at each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .bridge import Bridge
from .driver import Driver, DriverError

#: ``capture_error_mode`` of PyTorch's.
MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


class Graph:
    """What was captured; `close` gives it back."""

    def __init__(self, cu: Driver, bridge: Bridge) -> None:
        self._cu, self._bridge = cu, bridge
        self._graph = self._exec = 0

    @contextmanager
    def capture(self, mode: str = "global") -> Iterator[None]:
        """Inside, work on the current stream, and on those that wait for it, is captured."""
        stream = self._bridge.current
        self._cu.cuStreamBeginCapture(stream, MODES[mode])
        try:
            yield
        except BaseException:
            with suppress(DriverError):  # it may be spoiled
                self._cu.cuGraphDestroy(self._cu.cuStreamEndCapture(stream))
            raise
        self._graph = self._cu.cuStreamEndCapture(stream)
        self._exec = self._cu.cuGraphInstantiate(self._graph, 0)

    def replay(self) -> None:
        """Runs it on the current stream."""
        self._cu.cuGraphLaunch(self._exec, self._bridge.current)

    def close(self) -> None:
        if self._exec:
            self._cu.cuGraphExecDestroy(self._exec)
            self._cu.cuGraphDestroy(self._graph)
            self._graph = self._exec = 0
