"""Measuring host time in hooks: the clock that counts it, the pairing of variants and the summary of what they gave.

``benchmarks/harness.py`` in the sources says why it is done this way.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_mp

from ..model import model_of
from ..step import OutputHook
from .upstream import silent_device_events

now = time.perf_counter_ns
#: Where hooks run: around the root module's forward, before other modules', and from the outputs' gradients on.
KINDS = ("root", "wait", "backward")
#: Time in hooks that is no bookkeeping: in collectives, whose length is the process group's.
REDUCE = "reduce"


# --- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Median and 10th to 90th percentile of some measurements, in whatever unit they had."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float], scale: float = 1.0) -> Spread:
        """Of the values, each times ``scale``."""
        ordered = sorted(v * scale for v in values)
        if not ordered:
            return cls(math.nan, math.nan, math.nan, 0)

        def at(fraction: float) -> float:
            return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

        return cls(statistics.median(ordered), at(0.1), at(0.9), len(ordered))

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        ends = sorted((self.p10 * factor, self.p90 * factor))
        return Spread(self.median * factor, ends[0], ends[1], self.count)

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.p10)}-{number(self.p90)})" if self.count else "-"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if not math.isfinite(value):
        return "-"
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}"


def paired(
    variants: Mapping[str, Callable[[], Mapping[str, float]]],
    rounds: int,
    warmup: int = 2,
    repeat: int = 2,
    progress: Callable[[range], Iterable[int]] = iter,
) -> dict[str, dict[str, list[float]]]:
    """Runs every variant in every round and keeps the last of ``repeat`` calls in a row: {variant: {measure: values}}.

    The calls before the last bring this variant's own objects to the state that they have in a training loop, after the
    others have used the cache.  The order rotates, and the garbage collector runs between rounds and not within one.
    ``progress`` goes through the rounds, and may show how far they are.
    """
    names = list(variants)
    for name in names:
        for _ in range(warmup):
            variants[name]()
    values: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    with collector_paused():
        for round_ in progress(range(rounds)):
            shift = round_ % len(names) if names else 0
            for name in names[shift:] + names[:shift]:
                for _ in range(repeat):
                    measured = variants[name]()
                for measure, value in measured.items():
                    values[name].setdefault(measure, []).append(value)
            gc.collect(0)
    return values


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside, whose length depends on everything else that is alive."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --- hooks -----------------------------------------------------------------------------------------------------------


class HookClock:
    """Host time spent inside the hooks of one model, by kind; time in a nested hook counts once, for the inner one.

    ``watch`` makes a timed hook of a hook.  What the timing itself costs is measured once and taken off: the part inside
    from the hook's own time, the part around it from that of the hook which called it.
    """

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self._inner: list[int] = []
        self._around = 0
        self.overhead = self._calibrate()

    def watch(self, kind: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook``, timed."""
        spent, calls, inner = self.spent, self.calls, self._inner
        spent.setdefault(kind, 0)
        calls.setdefault(kind, 0)

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0)
            begin = now()
            try:
                return hook(*args, **kwargs)
            finally:
                taken = now() - begin
                spent[kind] += taken - inner.pop()
                calls[kind] += 1
                if inner:
                    inner[-1] += taken + self._around

        return timed

    def _calibrate(self) -> float:
        timed = self.watch("calibration", lambda *_: None)
        inside, around = math.inf, math.inf
        for _ in range(10):  # the least of them: others may have had the core in between
            self.reset()
            begin = now()
            for _ in range(200):
                timed(None)
            everything = now() - begin
            inside = min(inside, self.spent["calibration"] / 200)
            around = min(around, (everything - self.spent["calibration"]) / 200)
        del self.spent["calibration"], self.calls["calibration"]
        self._around = int(around)
        return inside

    def reset(self) -> None:
        """Starts from zero."""
        for kind in self.spent:
            self.spent[kind] = self.calls[kind] = 0

    def read(self) -> dict[str, float]:
        """Nanoseconds by kind since reset()."""
        return {kind: max(0.0, spent - self.overhead * self.calls[kind]) for kind, spent in self.spent.items()}


@contextlib.contextmanager
def watched_registration(clock: HookClock) -> Iterator[None]:
    """Communication hooks that are registered inside are timed."""
    register = dist._register_comm_hook

    def watching(reducer: Any, state: object, hook: Callable[..., Any]) -> None:
        register(reducer, state, clock.watch("backward", hook))

    dist._register_comm_hook = watching  # type: ignore[assignment]
    try:
        yield
    finally:
        dist._register_comm_hook = register


@contextlib.contextmanager
def watched_step(clock: HookClock) -> Iterator[None]:
    """Hooks put on a tensor inside, as on outputs, callbacks queued for the end of a backward, and collectives are timed."""
    variable: Any = torch.autograd.Variable
    tensor: Any = torch.Tensor
    group: Any = dist.ProcessGroup
    output_hook: Any = OutputHook
    engine, register_hook = variable._execution_engine, tensor.register_hook
    allreduce, on_output = group.allreduce, output_hook.__call__

    def registering(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return register_hook(self, clock.watch("backward", hook))

    class Watching:
        def queue_callback(self, callback: Callable[[], None]) -> None:
            engine.queue_callback(clock.watch("backward", callback))

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    variable._execution_engine, tensor.register_hook = Watching(), registering
    group.allreduce, output_hook.__call__ = clock.watch(REDUCE, allreduce), clock.watch("backward", on_output)
    try:
        yield
    finally:
        variable._execution_engine, tensor.register_hook = engine, register_hook
        group.allreduce, output_hook.__call__ = allreduce, on_output


def watch_hooks(ddp: nn.Module, clock: HookClock) -> None:
    """Replaces the hooks that now sit on a wrapped model and its parameters by timed ones."""

    def replace(hooks: Any, kind: str) -> None:
        for key, hook in list((hooks or {}).items()):
            waits = getattr(hook, "__name__", "") == "_module_wait_for_copy_hook"
            hooks[key] = clock.watch("wait" if waits else kind, hook)

    for module in ddp.modules():
        kind = "root" if module in (ddp, ddp.module) else "wait"
        replace(module._forward_pre_hooks, kind)
        replace(module._forward_hooks, kind)
    model = model_of(ddp)
    leaves = [] if model is None else [leaf for generation in model.plan.pool.generations for leaf in generation.leaves]
    for parameter in (*ddp.parameters(), *leaves):
        replace(parameter._backward_hooks, "backward")
        replace(getattr(parameter, "_post_accumulate_grad_hooks", None), "backward")


class Variant:
    """A model on one kind of hooks, and its training step.

    Args:
        how: ``"pytorch"`` or ``"ddp_mp"``.
        module: what is trained; ``"pytorch"`` cannot train tied weights.
        loss: the loss of the wrapped model.
        policy: the precisions.
    """

    def __init__(self, how: str, module: nn.Module, loss: Callable[[nn.Module], torch.Tensor], policy: _MixedPrecision) -> None:
        self.how, self.loss, self.clock = how, loss, HookClock()
        self.ddp = self._wrap(module, policy)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4)
        # PyTorch's first gradients are uninitialised memory: they never reach the optimizer.
        self.step(optimize=False)

    def _wrap(self, module: nn.Module, policy: _MixedPrecision) -> DistributedDataParallel:
        if self.how == "ddp_mp":
            with watched_registration(self.clock):
                ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=policy)
        else:
            with self._events(), watched_registration(self.clock):
                ddp = DistributedDataParallel(module, mixed_precision=policy)
            fire: Any = ddp._fire_reducer_autograd_hook
            ddp._fire_reducer_autograd_hook = self.clock.watch("backward", fire)  # type: ignore[method-assign]
        watch_hooks(ddp, self.clock)
        return ddp

    def _events(self) -> contextlib.AbstractContextManager[None]:
        return silent_device_events() if self.how == "pytorch" else contextlib.nullcontext()

    def step(self, optimize: bool = True) -> dict[str, float]:
        """One training step; nanoseconds in hooks by kind."""
        self.clock.reset()
        with self._events(), watched_step(self.clock):
            self.loss(self.ddp).backward()
        if optimize:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self.clock.read()


def total(measured: Mapping[str, Sequence[float]]) -> list[float]:
    """The sum over all kinds of hooks, without collectives, round by round."""
    return [sum(parts) for parts in zip(*(measured[kind] for kind in KINDS if kind in measured), strict=True)]
