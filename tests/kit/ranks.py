"""Runs test functions on the ranks of a gloo process group, in processes that are started once and used again.

    @on_ranks(2)
    def test_something(rank: Rank) -> None:
        ...

A rank's exception fails the test with that rank's traceback.  A rank that does not answer in time is a hang, and fails the
test too.  After either, the ranks are replaced by fresh ones.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import gc
import importlib
import inspect
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

SECONDS = 90.0  # for one test function; two cores may be shared with other work
GRACE = 3.0  # for the other ranks, once one has failed

T = TypeVar("T")


def use_streams_that_are_there() -> None:
    """A build for CUDA has no stream to give on a machine without a GPU, where PyTorch's own constructor asks for one."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    real = torch.Stream

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

    class Stream(real, metaclass=Kind):
        def __new__(cls, device: Any = "cpu", **more: Any) -> Any:
            return real(device, **more)

    torch.Stream = Stream


use_streams_that_are_there()


class Rank:
    """What a test function gets: which rank it is, and what ranks do together."""

    def __init__(self, index: int, size: int, pipe: multiprocessing.connection.Connection | None = None) -> None:
        self.index, self.size = index, size
        self._pipe = pipe

    def heard(self) -> Iterator[Any]:
        """What a :class:`Conversation` says, until it ends.  Going on to the next message answers the last one."""
        assert self._pipe is not None
        while (message := self._pipe.recv()) is not None:
            yield message[0]
            self._pipe.send(_PASSED)

    def inputs(self, make: Callable[[], T], seed: int = 0) -> list[T]:
        """One input for each rank; the list is the same on every rank."""
        made = []
        for index in range(self.size):
            torch.manual_seed(7919 * seed + index + 1)
            made.append(make())
        return made

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def on_ranks(*sizes: int, seconds: float = SECONDS) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a module-level function that takes a :class:`Rank`: it runs on that many ranks at once.

    Other arguments are parameters and fixtures as usual; they are pickled.  With several sizes the test is parametrised.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            size = arguments.pop("ranks") if len(sizes) > 1 else sizes[0]
            _pool(size).run(function.__module__, function.__qualname__, arguments, seconds)

        parameters = list(inspect.signature(function).parameters.values())[1:]
        if len(sizes) > 1:
            parameters.append(inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", sizes)(test) if len(sizes) > 1 else test

    return decorate


# --- the side of the tests -----------------------------------------------------------------------------------------------


def forkserver() -> Any:
    """Where processes come from: a server that imported everything and has no threads is forked, not the process of the
    tests, which may have some."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch.distributed", "torch.utils.checkpoint", "ddp_mp"])
    return context


class _Pool:
    """The processes of one process group."""

    def __init__(self, size: int) -> None:
        context = forkserver()
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        self.pipes, self.processes = [], []
        for index in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, index, size, os.path.join(self.folder, "store"))
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {index} of {size}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, module: str, name: str, arguments: dict[str, Any], seconds: float) -> None:
        self.say((module, name, arguments))
        self.require_passed(seconds)

    def say(self, message: Any) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # its answers say that it ended
                pipe.send(message)

    def require_passed(self, seconds: float, same_point: bool = False) -> None:
        """Every rank answers, and that all is well; otherwise the test fails, and this pool is closed.

        ``same_point``: it is kept when every rank failed, as they did the same and none waits for another.
        """
        answers = self._answers(seconds)
        if any(answer != _PASSED for answer in answers) and not (same_point and all(a[0] == "failed" for a in answers)):
            self.close()
        reasons = [a[1] for a in answers if a[0] == "skipped"]
        if reasons and all(a[0] in ("passed", "skipped") for a in answers):
            pytest.skip(reasons[0])
        failed = [
            f"rank {index} of {len(answers)}: {text}"
            for index, (kind, text) in enumerate(answers)
            if kind in ("failed", "late")
        ]
        if failed:
            pytest.fail("\n".join(failed), pytrace=False)

    def _answers(self, seconds: float) -> list[tuple[str, str]]:
        answers: dict[int, tuple[str, str]] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(self.pipes) and time.monotonic() < deadline:
            waiting = [pipe for index, pipe in enumerate(self.pipes) if index not in answers]
            for ready in multiprocessing.connection.wait(waiting, deadline - time.monotonic()):
                index = self.pipes.index(ready)  # type: ignore[arg-type]
                try:
                    answers[index] = self.pipes[index].recv()
                except EOFError:
                    self.processes[index].join(GRACE)
                    answers[index] = ("late", f"the process ended with status {self.processes[index].exitcode}")
                if answers[index] != _PASSED:
                    deadline = min(deadline, time.monotonic() + GRACE)
        late = ("late", "no answer (it hangs, or waits for a rank that failed)")
        return [answers.get(index, late) for index in range(len(self.pipes))]

    def close(self) -> None:
        _POOLS.pop(len(self.pipes), None)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Conversation:
    """A function that runs on all ranks and is told what to do bit by bit: it goes through ``rank.heard()``.

    With an error on any rank it is over, and the next one has fresh ranks.
    """

    def __init__(self, size: int, function: Callable[[Rank], None], seconds: float = SECONDS) -> None:
        self._pool, self._seconds = _pool(size), seconds
        self._pool.say((function.__module__, function.__qualname__, {}))

    def say(self, message: Any) -> None:
        """Every rank acts on the message; a rank's error fails the test."""
        self._pool.say((message,))
        self._pool.require_passed(self._seconds, same_point=True)

    def end(self) -> None:
        """The function returns on every rank, and leaves nothing behind."""
        self._pool.say(None)
        self._pool.require_passed(self._seconds)


_PASSED = ("passed", "")
_POOLS: dict[int, _Pool] = {}


def _pool(size: int) -> _Pool:
    if size not in _POOLS:
        _POOLS[size] = _Pool(size)
    return _POOLS[size]


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS.values()):
        pool.close()


# --- the side of the ranks -----------------------------------------------------------------------------------------------


def _serve(pipe: multiprocessing.connection.Connection, index: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=size, timeout=timeout)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_answer(Rank(index, size, pipe), *pipe.recv()))
    os._exit(0)


def _answer(rank: Rank, module: str, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    try:
        function = inspect.unwrap(getattr(importlib.import_module(module), name))
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(rank, **arguments)
        _require_clean()
    except pytest.skip.Exception as reason:
        return "skipped", str(reason)
    except BaseException:
        return "failed", traceback.format_exc()
    return _PASSED


def let_go_of_failed_backward() -> None:
    """PyTorch keeps parts of a graph whose backward failed until the thread's next backward: this is one."""
    torch.ones((), requires_grad=True).mul(2).backward()


def _require_clean() -> None:
    """Nothing of ddp_mp outlives the models of a test."""
    from kit.inside import guards, installing

    installing.uninstall()
    let_go_of_failed_backward()
    gc.collect()
    left = guards.everywhere.models()
    kept = [type(other).__name__ for other in gc.get_referrers(*left)]
    assert not left, f"patched models outlive their wrappers: {left}, referred to by {kept}"
