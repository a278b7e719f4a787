"""Training on the simulated CUDA device: every kind of step, in every schedule, on one and two ranks.

Gradients are the oracle's and the host backend's, bit for bit; the driver has no race, no use of freed memory and no misuse to
report; nothing leaks.  The user's stream is not the default one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit.modules import Two, mlp, vectors
from kit.oracle import BF16, FP16, Trial, mean_square, require_same, square_step
from kit.ranks import Rank, on_ranks
from kit.simulated import SCHEDULES, Device, DeviceTrial, require_simulator, simulated_device
from simulator.sim import Schedule
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_mp

#: Buckets of 256 bytes: a layer of the small models here fills one or two.
SMALL = {"first_bucket_mb": 2**-12, "bucket_mb": 2**-12}


@pytest.fixture(autouse=True, scope="module")
def _simulator() -> None:
    """Built here and not by a rank, whose time is limited."""
    require_simulator()


class World:
    """Where a scenario runs: on the simulated device, or on the host; what it computed is kept in ``seen``."""

    def __init__(self, rank: Rank, device: Device | None) -> None:
        self.rank, self.device = rank, device
        self.seen: list[tuple[str, torch.Tensor]] = []

    def trial(self, module: nn.Module, *arguments: Any, **named: Any) -> Trial:
        """A patched model beside its oracle."""
        if self.device is None:
            trial: Trial = Trial(self.rank, module, *arguments, **named)
        else:
            trial = DeviceTrial(self.rank, module, self.device, *arguments, **named)
        check = trial.check

        def check_and_keep() -> None:
            check()
            self.keep_all(trial)

        trial.check = check_and_keep  # type: ignore[method-assign]
        return trial

    def keep_all(self, trial: Trial) -> None:
        """Keeps masters and gradients as they are now."""
        with self.on_host():
            for name, param in trial.module.named_parameters():
                self.seen.append((f"master {name}", param.detach().clone()))
                if param.grad is not None:
                    self.seen.append((f"gradient of {name}", param.grad.clone()))

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """What a test does for itself."""
        return contextlib.nullcontext() if self.device is None else self.device.host()

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """The user works on another stream."""
        return contextlib.nullcontext() if self.device is None else self.device.beside()


Scenario = Callable[[World], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


# --- scenarios -----------------------------------------------------------------------------------------------------------


@scenario
def first_step(world: World) -> None:
    world.trial(mlp()).train(vectors(), steps=1)


@scenario
def adamw(world: World) -> None:
    world.trial(mlp()).train(vectors(), steps=3, optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01))


@scenario
def accumulation(world: World) -> None:
    world.trial(mlp()).train(vectors(), steps=2, accumulate=3)


@scenario
def accumulation_into_kept_gradients(world: World) -> None:
    world.trial(mlp()).train(vectors(), steps=3, accumulate=2, set_to_none=False)


@scenario
def tied(world: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    world.trial(Tied()).train(lambda: torch.randint(0, 11, (6,)))


@scenario
def two_forwards(world: World) -> None:
    def step(call: Any, x: Any) -> None:
        (mean_square(call, x) + mean_square(call, 2 * x)).backward()

    world.trial(mlp()).train(vectors(), step=step)


@scenario
def two_forwards_then_their_backwards(world: World) -> None:
    """The second forward finds the copies of the first in place, and both graphs read them."""

    def step(call: Any, x: Any) -> None:
        losses = [mean_square(call, x), mean_square(call, 3 * x)]
        for loss in losses:
            loss.backward()

    world.trial(Two()).train(vectors(), step=step)


@scenario
def backward_after_the_next_forward(world: World) -> None:
    """An optimizer step lies between two forwards, so that the second casts to other memory than the first graph reads."""
    trial = world.trial(Two())
    xs = [world.rank.inputs(vectors(), seed)[world.rank.index] for seed in range(3)]
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    square_step(trial.ddp, xs[0])
    late = trial.ddp(xs[1])
    optimizer.step()
    trial.zero_grad()
    square_step(trial.ddp, xs[2])
    del late
    world.keep_all(trial)


@scenario
def unused_on_one_rank(world: World) -> None:
    class Branch(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) if x[0, 0] > 0 else self.a(x)

    def make() -> torch.Tensor:
        x = torch.randn(4, 8)
        x[0, 0] = abs(x[0, 0]) if torch.initial_seed() % 2 else -abs(x[0, 0])
        return x

    world.trial(Branch(), find_unused_parameters=True).train(make)


class Checkpointed(Two):
    """Both layers are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(8, 8), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=self.reentrant), use_reentrant=self.reentrant)


@scenario
def checkpoint_reentrant(world: World) -> None:
    world.trial(Checkpointed(True)).train(vectors())


@scenario
def checkpoint_non_reentrant(world: World) -> None:
    world.trial(Checkpointed(False)).train(vectors())


@scenario
def evaluation_in_between(world: World) -> None:
    trial = world.trial(mlp())
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    theirs = torch.optim.SGD(trial.oracle.module.parameters(), lr=0.1)
    for seed in range(2):
        xs = world.rank.inputs(vectors(), seed)
        with torch.no_grad():
            trial.ddp(xs[0])
        trial.backward(square_step, xs)
        trial.ddp(xs[0])  # with grad and without backward: masters are put back by the optimizer
        optimizer.step()
        trial.oracle_step(theirs)
        with torch.no_grad():
            trial.ddp(xs[0])
        trial.check()
        trial.zero_grad()


@scenario
def full_precision_inside(world: World) -> None:
    trial = world.trial(mlp())
    for seed in range(2):
        xs = world.rank.inputs(vectors(), seed)
        trial.ddp(xs[0])
        with ddp_mp.full_precision(trial.ddp), torch.no_grad():
            for param, master in zip(trial.module.parameters(), trial.oracle.module.parameters(), strict=True):
                param.mul_(0.5)
                with world.on_host():
                    master.data.mul_(0.5)
        trial.backward(square_step, xs)
        trial.check()
        trial.zero_grad()


@scenario
def fp16_reduced_in_fp16(world: World) -> None:
    world.trial(mlp(), ddp_mp.MixedPrecision(FP16, FP16)).train(vectors())


@scenario
def fp16_accumulated(world: World) -> None:
    """Division on both sides of the sum, and something to add to: hand-over in two launches."""
    world.trial(mlp(), ddp_mp.MixedPrecision(BF16, FP16)).train(vectors(), steps=2, accumulate=2, set_to_none=False)


@scenario
def channels_last(world: World) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4 * 4, 6)).to(memory_format=torch.channels_last)
    model[2].weight.data = torch.randn(8 * 4 * 4, 6).t()
    world.trial(model, exact=False).train(lambda: torch.randn(2, 3, 6, 6), steps=2)


@scenario
def many_buckets(world: World) -> None:
    options = SMALL
    world.trial(mlp(depth=6), options=options, bucket_cap_mb=0.0005).train(vectors())


@scenario
def waits_by_module(world: World) -> None:
    options = {**SMALL, "wait": "module"}
    world.trial(mlp(depth=5), options=options).train(vectors(), steps=4)


@scenario
def attention_waits_by_module(world: World) -> None:
    options = {**SMALL, "wait": "module"}
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    world.trial(layer, options=options, exact=False).train(lambda: torch.randn(2, 3, 8), steps=2)


@scenario
def prefetch(world: World) -> None:
    world.trial(mlp(), options={"prefetch": True}).train(vectors(), steps=4)


@scenario
def prefetch_of_adamw_by_module(world: World) -> None:
    options = {**SMALL, "prefetch": True, "wait": "module"}
    trial = world.trial(mlp(depth=4), options=options)
    trial.train(vectors(), steps=4, optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01))


@scenario
def reuse_unchanged(world: World) -> None:
    world.trial(mlp(), options={"reuse_unchanged": True}).train(vectors(), steps=3, accumulate=3)


@scenario
def masters_of_other_types(world: World) -> None:
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8), nn.Linear(8, 8).double())
    world.trial(model, exact=False).train(vectors(), steps=2)


@scenario
def error_in_forward_then_retry(world: World) -> None:
    class Flaky(Two):
        fail = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            if self.fail:
                raise ValueError("no luck")
            return self.b(x)

    model = Flaky()
    trial = world.trial(model)
    xs = world.rank.inputs(vectors(), 0)
    with pytest.raises(ValueError, match="no luck"):
        trial.ddp(xs[world.rank.index])
    model.fail = trial.oracle.module.fail = False
    trial.backward(square_step, xs)
    trial.check()


@scenario
def weights_replaced(world: World) -> None:
    """Pointers move between steps: tables are sent again."""
    trial = world.trial(mlp())
    for seed in range(3):
        torch.manual_seed(seed)
        for param, master in zip(trial.module.parameters(), trial.oracle.module.parameters(), strict=True):
            param.data = torch.randn_like(param)
            with world.on_host():
                master.data = param.data.clone()
        trial.backward(square_step, world.rank.inputs(vectors(), seed))
        trial.check()
        trial.zero_grad()


@scenario
def step_on_another_stream(world: World) -> None:
    """The optimizer works beside the forward's stream; the user orders both, and nothing more."""
    trial = world.trial(mlp())
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (trial.module, trial.oracle.module))
    for seed in range(3):
        trial.backward(square_step, world.rank.inputs(vectors(), seed))
        trial.check()
        with world.beside():
            ours.step()
            ours.zero_grad()
        trial.oracle_step(theirs)
        trial.oracle.zero_grad()


@scenario
def streams_taken_in_turn(world: World) -> None:
    """Whole steps on one stream, then on the other, then forward and backward on different ones."""
    trial = world.trial(mlp(depth=3), options=SMALL)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (trial.module, trial.oracle.module))
    for seed in range(4):
        xs = world.rank.inputs(vectors(), seed)
        with world.beside() if seed & 1 else contextlib.nullcontext():
            loss = mean_square(trial.ddp, xs[world.rank.index])
        with world.beside() if seed & 2 else contextlib.nullcontext():
            loss.backward()
        trial.oracle.backward(square_step, xs)
        trial.check()
        with world.beside() if seed & 1 else contextlib.nullcontext():
            ours.step()
        trial.oracle_step(theirs)
        trial.zero_grad()


@scenario
def streams_within_one_forward(world: World) -> None:
    """A layer that computes on another stream finds its copies cast: each stream that asks waits by itself."""

    class Beside(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            with world.beside():
                y = self.b(x)
            if world.device is not None:  # each is used on the stream that it was not made on
                world.device.record_stream(x, world.device.other)
                world.device.record_stream(y, world.device.stream)
            return y

    if world.device is not None:
        # A bucket is packed on the stream of its last gradient, and a gradient that was made on another is given back to
        # that one without having been recorded on this; so does PyTorch's own reducer.
        world.device.know("read by <mp_cast on user>", "free by <free on other>")
    options = {**SMALL, "wait": "module"}
    world.trial(Beside(), options=options).train(vectors(), steps=3)


class _Current:
    """What PyTorch's own hooks see as the current stream."""

    def __init__(self, device: Device | None) -> None:
        self.cuda_stream = 0 if device is None else device.bridge.current

    def wait_stream(self, other: Any) -> None:
        """The bridge has one stream for what PyTorch does."""


class _Idle:
    """An event that PyTorch's own hooks record on the stream that they wait with."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def record(self, *arguments: Any) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


@contextlib.contextmanager
def device_of_pytorch(device: Device | None) -> Iterator[None]:
    """Lets PyTorch's own wait hook and communication hook run on a build without a device."""
    event, stream = torch.Event, torch.accelerator.current_stream
    torch.Event, torch.accelerator.current_stream = _Idle, lambda *_: _Current(device)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.Event, torch.accelerator.current_stream = event, stream  # type: ignore[misc]


@scenario
def root_hook_alone(world: World) -> None:
    options = {**SMALL, "hooks": "root"}
    with device_of_pytorch(world.device):
        trial = world.trial(mlp(), options=options)
        square_step(trial.ddp, torch.zeros(4, 8))  # PyTorch does not get the first gradients right
        trial.zero_grad()
        trial.train(vectors(), steps=3)


# --- in every schedule ---------------------------------------------------------------------------------------------------


def run(name: str, rank: Rank, schedule: str | None, seen: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Runs the scenario and compares what it computed with ``seen``, unless that is empty."""
    torch.manual_seed(0)
    if schedule is None:
        world = World(rank, None)
        SCENARIOS[name](world)
        return world.seen
    with simulated_device(*SCHEDULES[schedule]) as device:
        world = World(rank, device)
        SCENARIOS[name](world)
    for (what, got), (_, want) in zip(world.seen, seen, strict=True):
        require_same(f"{what} ({schedule}, against the host)", got, want)
    return world.seen


@on_ranks(1)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.filterwarnings("ignore")
def test_simulated_training_equals_oracle_and_host(rank: Rank, name: str) -> None:
    assert run(name, rank, "lazy", run(name, rank, None, []))


@pytest.mark.long
@on_ranks(1, 2)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.filterwarnings("ignore")
def test_simulated_training_equals_oracle_and_host_in_every_schedule(rank: Rank, name: str) -> None:
    seen = run(name, rank, None, [])
    for schedule in SCHEDULES:
        run(name, rank, schedule, seen)
    assert seen


@on_ranks(1)
@pytest.mark.parametrize("name", ["accumulation", "many_buckets", "weights_replaced", "reuse_unchanged"])
def test_simulated_training_again_and_again_uses_what_the_pools_hold(rank: Rank, name: str) -> None:
    def train() -> dict[str, int]:
        with simulated_device(Schedule.EAGER) as device:
            torch.manual_seed(0)
            SCENARIOS[name](World(rank, device))
        return device.sim.leaks()

    first = [train() for _ in range(2)][-1]
    assert [train() for _ in range(2)][-1] == first
