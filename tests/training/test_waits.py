"""Nothing computes before its copies are there: the stream that casts is held for a moment in every forward."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.inside import _C
from kit.modules import Choice, Two, mlp, vectors
from kit.oracle import Trial, mean_square, require_same, square_step
from kit.ranks import Rank, on_ranks
from test_models import MODELS
from test_unused import inputs_that_choose
from torch import nn
from torch.utils.checkpoint import checkpoint

SECONDS = 0.03
#: Every parameter is a bucket of its own.
SMALL = {"first_bucket_mb": 1e-6, "bucket_mb": 1e-6}


@contextlib.contextmanager
def late_casts() -> Iterator[None]:
    """Casts that are asked for inside begin only after a while."""
    inline = _C.host_set_inline_bytes(0)
    _C.host_hold(True)
    release = threading.Timer(SECONDS, _C.host_hold, [False])
    release.start()
    try:
        yield
    finally:
        release.join()
        _C.host_hold(False)
        _C.host_set_inline_bytes(inline)


def late(step: Any) -> Any:
    """A step whose casts are late."""

    def late_step(call: Any, inputs: Any) -> None:
        with late_casts():
            step(call, inputs)

    return late_step


@on_ranks(2)
@pytest.mark.parametrize("wait", ["root", "module"])
@pytest.mark.parametrize("name", MODELS)
def test_wait_covers_every_use_of_a_parameter(rank: Rank, name: str, wait: str) -> None:
    build, make_input = MODELS[name]
    trial = Trial(rank, build(), options={"wait": wait, **SMALL})
    trial.train(make_input, step=late(square_step), steps=3)


@on_ranks(1)
@pytest.mark.parametrize("wait", ["root", "module"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_wait_covers_recomputation(rank: Rank, reentrant: bool, wait: str) -> None:
    class Checkpointed(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.b, self.a(x), use_reentrant=reentrant)

    Trial(rank, Checkpointed(), options={"wait": wait, **SMALL}).train(vectors(), step=late(square_step))


@on_ranks(1)
@pytest.mark.parametrize("wait", ["root", "module"])
def test_wait_covers_evaluation_and_hooks_of_the_user(rank: Rank, wait: str) -> None:
    trial = Trial(rank, mlp(8, 3), options={"wait": wait, **SMALL})
    seen: list[torch.Tensor] = []
    trial.module[4].register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().clone()))
    for _ in range(3):
        with torch.no_grad():
            for param in trial.module.parameters():
                param.add_(1.0)
            with late_casts():
                trial.ddp(torch.randn(4, 8))
        require_same("copy", seen[-1], trial.module[4].weight.detach().bfloat16())


@on_ranks(1)
@pytest.mark.parametrize("wait", ["root", "module"])
def test_wait_ends_with_the_forward_where_a_module_is_skipped(rank: Rank, wait: str) -> None:
    # memory is given back and masters may be written when the forward returns, whether anybody waited or not
    trial = Trial(rank, Choice(), options={"wait": wait, **SMALL}, find_unused_parameters=True)
    for seed in range(3):
        trial.backward(square_step, inputs_that_choose(rank, [7], seed))
        trial.zero_grad()
        with late_casts(), torch.no_grad():
            start = time.perf_counter()
            trial.ddp(inputs_that_choose(rank, [0], seed)[0])
            assert time.perf_counter() - start > 0.5 * SECONDS
            for param in trial.module.parameters():
                param.add_(0.5)
        for param in trial.oracle.module.parameters():
            param.data.add_(0.5)
    trial.backward(square_step, inputs_that_choose(rank, [7], 9))
    trial.check()


@on_ranks(1)
@pytest.mark.parametrize("options", [{"prefetch": True}, {"reuse_unchanged": True}], ids=str)
def test_wait_covers_casts_that_an_optimizer_step_started(rank: Rank, options: dict[str, Any]) -> None:
    trial = Trial(rank, mlp(), options={**options, **SMALL})
    ours = torch.optim.SGD(trial.module.parameters(), lr=0.5)
    theirs = torch.optim.SGD(trial.oracle.module.parameters(), lr=0.5)
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        with late_casts():
            ours.step()
            loss = mean_square(trial.ddp, xs[0])
        loss.backward()
        trial.oracle_step(theirs)
        trial.zero_grad()
        trial.oracle.backward(square_step, xs)
        trial.ddp.zero_grad()
        square_step(trial.ddp, xs[0])
        trial.check()


@on_ranks(1)
def test_wait_covers_a_second_optimizer_step_after_a_prefetch(rank: Rank) -> None:
    # the casts of the first step read masters that the second step is about to write
    trial = Trial(rank, mlp(), options={"prefetch": True, **SMALL})
    ours = torch.optim.SGD(trial.module.parameters(), lr=0.5)
    theirs = torch.optim.SGD(trial.oracle.module.parameters(), lr=0.5)
    for seed in range(3):
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        with late_casts():
            ours.step()
            ours.step()
        trial.oracle_step(theirs)
        trial.oracle_step(theirs)
        trial.zero_grad()


class Table(nn.Module):
    """A small layer, and a table so large that casting it takes much longer than the layer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.table = nn.Linear(8, 8), nn.Embedding(2**20, 16)
        self.way, self.first = way, True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        last = torch.tensor([2**20 - 1])  # the row that is cast last
        x = self.a(x)
        first, self.first = self.first, False
        if self.way == "called" or (self.way == "called_only_once" and first):
            return x, self.table(last)
        used = F.embedding(last, self.table.weight)
        return (x, used, self.table(last)) if self.way == "used_before_it_is_called" else (x, used)


@on_ranks(1)
@pytest.mark.parametrize(
    ("way", "wait"),
    [
        ("called", "root"),
        ("called", "module"),
        ("never_called", "root"),
        ("never_called", "module"),
        ("used_before_it_is_called", "root"),
        ("called_only_once", "root"),
    ],  # the last two break the promise that wait="module" is
)
def test_wait_covers_a_large_parameter(rank: Rank, way: str, wait: str) -> None:
    trial = Trial(rank, Table(way), options={"wait": wait, "first_bucket_mb": 1e-6})
    x = torch.randn(2, 8)
    for value in range(1, 5):
        with torch.no_grad():
            trial.module.table.weight.fill_(value)
            outputs = trial.ddp(x)
        assert [o.unique().tolist() for o in outputs[1:]] == [[float(value)]] * (len(outputs) - 1)


@on_ranks(1)
@pytest.mark.parametrize("wait", ["root", "module"])
def test_wait_covers_a_large_parameter_of_the_root_itself(rank: Rank, wait: str) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.table = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(2**24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.small.sum() + self.table[-1]

    trial = Trial(rank, Root(), options={"wait": wait, "first_bucket_mb": 1e-6})
    for value in range(1, 5):
        with torch.no_grad():
            trial.module.table.fill_(value)
            assert trial.ddp(torch.zeros(1)).item() == value


@on_ranks(1)
def test_wait_at_modules_lets_earlier_layers_run_during_casts(rank: Rank) -> None:
    trial = Trial(rank, Table("called"), options={"wait": "module", "first_bucket_mb": 1e-6})
    x = torch.randn(2, 8)
    seen: list[float] = []
    trial.module.a.register_forward_hook(lambda *_: seen.append(trial.module.table.weight.data.view(-1)[-1].item()))
    for value in range(1, 5):
        with torch.no_grad():
            trial.module.table.weight.fill_(value)
            trial.ddp(x)
    assert seen[1:] != [2.0, 3.0, 4.0], "the layer ran before the table was there, at least once"
