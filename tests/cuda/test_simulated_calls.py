"""What a step asks of the driver, and what happens when the driver refuses: on the simulated device.

Budgets are counted calls, so that a call too many fails a test and not a benchmark.  Faults: every call of every entry point
fails once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.inside import _C
from kit.modules import mlp, vectors
from kit.oracle import mean_square, square_step
from kit.ranks import Rank, on_ranks
from kit.simulated import Device, DeviceTrial, require_simulator, simulated_device
from simulator.sim import Schedule

import ddp_mp

#: A cast bucket a layer, or nearly.
SMALL = {"first_bucket_mb": 2**-12, "bucket_mb": 2**-12}
#: What waits for the device, or may.
BLOCKING = {"cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemFree", "cuMemFreeHost"}
#: What takes memory or makes an object.
MAKING = {"cuMemAlloc", "cuMemAllocAsync", "cuMemHostAlloc", "cuEventCreate", "cuStreamCreateWithPriority", "cuModuleLoadData"}
#: What goes to a stream.
QUEUED = {"cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"}


@pytest.fixture(autouse=True, scope="module")
def _simulator() -> None:
    require_simulator()


@contextlib.contextmanager
def steady_memory() -> Iterator[None]:
    """Inside, storage that is released keeps its place, as a block does in a caching allocator between two equal steps."""
    resize = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda storage, size: storage  # type: ignore[method-assign,assignment,return-value]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


class Calls:
    """Counts driver calls between two looks, and requires that none blocked, made or freed anything."""

    def __init__(self, device: Device, but: frozenset[str] = frozenset()) -> None:
        self._sim = device.sim
        self._forbidden = (BLOCKING | MAKING) - but
        self._last = self._sim.call_log()
        self._blocking = self._sim.blocking_calls()

    def since(self) -> dict[str, int]:
        """Calls that go to a stream, since the last time."""
        log, last = self._sim.call_log(), self._last
        self._last = log
        new = {name: n - last.get(name, 0) for name, n in log.items() if n > last.get(name, 0)}
        assert self._sim.blocking_calls() == self._blocking
        assert not new.keys() & self._forbidden, new
        return {name: n for name, n in new.items() if name in QUEUED}


# --- budgets -------------------------------------------------------------------------------------------------------------


@on_ranks(1)
@pytest.mark.parametrize("schedule", [Schedule.EAGER, Schedule.LAZY])
@pytest.mark.parametrize("wait", ["root", "module"])
def test_budget_of_a_steady_step(rank: Rank, schedule: Schedule, wait: str) -> None:
    with simulated_device(schedule) as device, steady_memory():
        trial = DeviceTrial(rank, mlp(depth=4), device, options={**SMALL, "wait": wait}, bucket_cap_mb=2**-11)
        trial.train(vectors(), steps=3)
        casts = len(trial.ddp._ddp_mp.plan.pool.groups[0].engine.buckets)
        packs = len(trial.ddp._ddp_mp.plan.reducer.buckets)
        assert casts >= 3
        assert packs >= 2
        x = torch.randn(4, 8)
        for _ in range(2):
            trial.zero_grad()
            calls = Calls(device)
            loss = mean_square(trial.ddp, x)
            # One launch and one record a bucket.  Order: the user's stream is recorded once and waited for once; the user's
            # stream waits once at the root, or where modules ask for a later bucket.
            forward = calls.since()
            waits = forward.pop("cuStreamWaitEvent")
            assert forward == {"cuLaunchKernel": casts, "cuEventRecord": casts + 1}
            assert waits == 2 if wait == "root" else 2 <= waits <= casts + 1
            loss.backward()
            # One launch a bucket, though autograd's gradients have new addresses here in every step.  Nothing waits.
            backward = calls.since()
            assert backward.pop("cuStreamWaitEvent", 0) <= (wait == "module")  # for buckets that no module asked for
            assert backward == {"cuLaunchKernel": packs}


@on_ranks(1)
def test_budget_of_a_forward_without_grad(rank: Rank) -> None:
    with simulated_device() as device, steady_memory():
        trial = DeviceTrial(rank, mlp(), device)
        x = torch.randn(4, 8)
        with torch.no_grad():
            for _ in range(2):
                trial.ddp(x)
            calls = Calls(device)
            trial.ddp(x)
        assert calls.since() == {"cuLaunchKernel": 1, "cuEventRecord": 2, "cuStreamWaitEvent": 2}


@on_ranks(1)
def test_budget_of_copies_that_are_reused_is_nothing(rank: Rank) -> None:
    with simulated_device() as device, steady_memory():
        trial = DeviceTrial(rank, mlp(), device, options={"reuse_unchanged": True})
        x = torch.randn(4, 8)
        with torch.no_grad():
            for _ in range(2):
                trial.ddp(x)
            calls = Calls(device)
            trial.ddp(x)
        assert not calls.since()


@on_ranks(1)
def test_budget_of_prefetched_copies_is_one_wait_in_the_forward(rank: Rank) -> None:
    with simulated_device() as device, steady_memory():
        trial = DeviceTrial(rank, mlp(), device, options={"prefetch": True})
        optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
        x = torch.randn(4, 8)
        for _ in range(3):
            square_step(trial.ddp, x)
            optimizer.step()
            trial.zero_grad()
        calls = Calls(device)
        loss = mean_square(trial.ddp, x)
        assert calls.since() == {"cuStreamWaitEvent": 1}
        loss.backward()
        calls.since()
        optimizer.step()
        assert calls.since() == {"cuLaunchKernel": 1, "cuEventRecord": 2, "cuStreamWaitEvent": 1}


@on_ranks(1)
def test_budget_of_tables_that_move_is_an_upload_each_and_bounded_memory(rank: Rank) -> None:
    """Without a caching allocator every cast goes to new memory: one small copy a bucket, and no allocation for it."""
    with simulated_device(Schedule.EAGER) as device:
        trial = DeviceTrial(rank, mlp(depth=4), device, options=SMALL)
        x = torch.randn(4, 8)
        for _ in range(3):
            square_step(trial.ddp, x)
        made = {name: device.sim.calls(name) for name in MAKING}
        for _ in range(20):
            square_step(trial.ddp, x)
        assert {name: device.sim.calls(name) for name in MAKING} == made
        assert device.sim.blocking_calls() == 0


CPU_ONLY = """
import os, sys
from simulator.build import library
from simulator.sim import Simulator
sim = Simulator(library())
import torch, torch.distributed as dist, warnings
warnings.simplefilter("ignore")
import ddp_mp
dist.init_process_group("gloo", init_method="file://" + os.path.join(sys.argv[1], "store"), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
precision = ddp_mp.MixedPrecision(torch.bfloat16, torch.float32)
ddp = ddp_mp.patch(torch.nn.parallel.DistributedDataParallel(model), mixed_precision=precision)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    ddp(torch.randn(4, 8)).float().sum().backward()
    optimizer.step()
    with torch.no_grad():
        ddp(torch.randn(4, 8))
ddp_mp.build_info(), ddp_mp.stats(ddp)
ddp_mp.unpatch(ddp)
print(sim.call_log())
dist.destroy_process_group()
"""


def program(text: str, folder: Path) -> str:
    """Runs Python text in a process of its own, where no device was opened; returns what it printed."""
    paths = [str(Path(__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    paths.append(str(Path(_C.__file__).parent.parent))
    done = subprocess.run(
        [sys.executable, "-c", text, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_budget_of_import_patch_and_training_on_cpu_is_no_driver_call(tmp_path: Path) -> None:
    assert program(CPU_ONLY, tmp_path) == "{}"


# --- faults --------------------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = 2
TEXT = r"{name} failed: CUDA_ERROR_OUT_OF_MEMORY \(2\): .+, device 0"


State = list[Any]  # tensors and None


class Bench:
    """A patched model with gradients to add to, and what must survive a fault.

    ``settings`` choose the state: a fresh model for each fault, or one that goes on after it.
    """

    def __init__(self, rank: Rank, device: Device, **options: Any) -> None:
        self.device = device
        self.trial = DeviceTrial(rank, mlp(depth=3), device, options={**SMALL, **options}, bucket_cap_mb=2**-11)
        self.optimizer = torch.optim.SGD(self.trial.module.parameters(), lr=0.0)
        self.inputs = rank.inputs(vectors(), 5)
        self.x = self.inputs[0]
        self.warm_up()

    def warm_up(self) -> None:
        self.step()

    @property
    def ddp(self) -> Any:
        return self.trial.ddp

    def step(self) -> None:
        """A whole step; gradients are the oracle's afterwards."""
        self.trial.zero_grad()
        self.trial.backward(square_step, self.inputs)
        self.trial.check()

    def state(self) -> State:
        with self.device.host():
            params = list(self.trial.module.parameters())
            assert all(p.dtype is torch.float32 for p in params), "masters are not in place"
            return [t.detach().clone() if t is not None else None for p in params for t in (p, p.grad)]


def one_of(found: State, before: State, done: State) -> bool:
    """Whether each tensor is as it was, or as the action makes it: a sum that was enqueued, or a bucket that was finished,
    before the call that failed is not taken back.  Nothing lies in between.
    """
    return all(
        any((f is None) == (w is None) and (f is None or w is None or torch.equal(f, w)) for w in (b, d))
        for f, b, d in zip(found, before, done, strict=True)
    )


#: name: (what comes before the faulty call and returns what that needs, the faulty call)
Action = tuple[Callable[[Bench], Any], Callable[[Bench, Any], object]]
NOTHING: Callable[[Bench], Any] = lambda bench: None  # noqa: E731


def evaluate(bench: Bench, _: Any = None) -> None:
    with torch.no_grad():
        bench.ddp(bench.x)


def use_full_precision(bench: Bench, _: Any) -> None:
    with ddp_mp.full_precision(bench.ddp):
        pass


def forward(bench: Bench, _: Any) -> None:
    bench.ddp(bench.x)


ACTIONS: dict[str, Action] = {
    "forward": (NOTHING, forward),
    "forward without grad": (NOTHING, evaluate),
    "backward": (lambda bench: mean_square(bench.ddp, bench.x), lambda bench, loss: loss.backward()),
    "backward in no_sync": (lambda bench: _local_loss(bench), lambda bench, loss: loss.backward()),
    "full_precision": (lambda bench: bench.ddp(bench.x), use_full_precision),
    "state_dict": (lambda bench: bench.ddp(bench.x), lambda bench, _: bench.ddp.state_dict()),
    "optimizer step after a forward": (lambda bench: bench.ddp(bench.x), lambda bench, _: bench.optimizer.step()),
}


def _local_loss(bench: Bench) -> torch.Tensor:
    with bench.ddp.no_sync():
        return mean_square(bench.ddp, bench.x)


class AllCalls:
    """Counts driver calls between two looks."""

    def __init__(self, device: Device) -> None:
        self._sim, self._last = device.sim, device.sim.call_log()

    def since(self) -> dict[str, int]:
        return {n: c - self._last.get(n, 0) for n, c in self._sim.call_log().items() if c > self._last.get(n, 0)}


def sweep(
    device: Device, prepare: Callable[[], Any], act: Callable[[Any], object], verify: Callable[[], None], must: bool = False
) -> dict[str, list[int]]:
    """Fails each call that ``act`` makes once; returns the calls whose failure did not surface.  ``must``: there are some.

    Whoever swallows an error has to be argued for in the test that calls this.
    """
    swallowed: dict[str, list[int]] = {}
    given = prepare()
    calls = AllCalls(device)
    act(given)
    counted = calls.since()
    verify()
    assert counted or not must, "the action calls no driver: nothing is shown"
    for name, count in counted.items():
        for nth in range(1, count + 1):
            given = prepare()
            before = device.sim.calls(name)
            device.sim.fault(name, nth, OUT_OF_MEMORY)
            try:
                with pytest.raises(_C.DeviceError, match=TEXT.format(name=name)):
                    act(given)
            except pytest.fail.Exception:
                if device.sim.calls(name) - before >= nth:  # else it was not reached this time: pools were fuller
                    swallowed.setdefault(name, []).append(nth)
            del given
            assert device.sim.report() == []
            assert device.sim.gil_blocks() == 0, f"{name}, call {nth}: the GIL was held in a call that blocks"
            device.sim.begin(Schedule.LAZY)  # disarms the fault
            device.sim.probe_gil()
            try:
                verify()
            except AssertionError as error:
                raise AssertionError(f"{name} failed at its call {nth} of {count}: {error}") from error
    return swallowed


def sweep_of(bench: Bench, before: Callable[[Bench], Any], action: Callable[[Bench, Any], object], must: bool = False) -> None:
    """Fails each call of the action once: masters and gradients are as before or complete, and the next step is right."""
    for _ in range(2):
        bench.step()
    before_it: list[State] = []
    done: list[State] = []  # what the action makes of it, undisturbed
    failed = False

    def prepare() -> Any:
        before_it[:] = [bench.state()]
        return before(bench)

    def act(given: Any) -> None:
        nonlocal failed
        failed = True
        action(bench, given)
        failed = False

    def verify() -> None:
        bench.ddp.state_dict()  # puts masters back where a forward left copies in place, as one without a fault does
        if failed:
            assert one_of(bench.state(), before_it[0], done[0]), "masters or gradients are neither as before nor complete"
        elif not done:
            done.append(bench.state())
        bench.step()

    swallowed = sweep(bench.device, prepare, act, verify, must)
    assert not swallowed, f"errors that did not surface: {swallowed}"


@on_ranks(1)
@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("wait", ["root", "module"])
def test_fault_of_every_call_surfaces_and_leaves_masters_and_gradients(rank: Rank, name: str, wait: str) -> None:
    with simulated_device() as device:
        sweep_of(Bench(rank, device, wait=wait), *ACTIONS[name])


def _tensors(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    source, target = torch.randn(700), torch.zeros(700, dtype=torch.bfloat16)
    bench.device.bridge.adopt(source, target)
    return source, target


OPERATIONS: dict[str, Action] = {
    "cast": (_tensors, lambda bench, pair: _C.cast(*pair)),
    "fuse": (_tensors, lambda bench, pair: _C.fuse([pair[0]], [None], [pair[1]], 2.0)),
    "fuse on the private stream": (_tensors, lambda bench, pair: _C.fuse([pair[0]], [None], [pair[1]], 2.0, private=True)),
}


@on_ranks(1)
@pytest.mark.parametrize("name", OPERATIONS)
def test_fault_of_every_call_of_an_operation_surfaces(rank: Rank, name: str) -> None:
    before, action = OPERATIONS[name]
    with simulated_device() as device:
        bench = Bench(rank, device)
        bench.step()

        def verify() -> None:
            bench.ddp.state_dict()
            bench.step()

        swallowed = sweep(device, lambda: before(bench), lambda given: action(bench, given), verify)
        assert not swallowed, f"errors that did not surface: {swallowed}"
