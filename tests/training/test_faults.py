"""What a month of training meets: a rank that fails, Ctrl-C, an exit with work pending, forks, threads."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.inside import _C
from kit.modules import Luck, column, mlp, no_luck, scalar, vectors
from kit.oracle import BF16, F32, Trial, mean_square, square_step
from kit.ranks import Rank, on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


# --- a rank that fails ---------------------------------------------------------------------------------------------------


def fail_in(where: str, ddp: DistributedDataParallel) -> None:
    """From now on a step of this rank fails."""
    if where == "forward":
        ddp.module[2].register_forward_hook(no_luck)
    elif where == "first gradient":
        ddp.module[2].weight.register_hook(no_luck)
    elif where == "last gradient":
        ddp.module[0].weight.register_hook(no_luck)
    else:
        FAILS.append(True)


def reduced_until_it_fails(_, bucket):  # type: ignore[no-untyped-def] # PyTorch looks at annotations
    """The communication hook of every rank, which fails at the last bucket of one."""
    if bucket.is_last() and FAILS:
        raise Luck
    return dist.all_reduce(bucket.buffer(), group=GROUP[0], async_op=True).get_future().then(lambda done: done.value()[0])


GROUP: list[Any] = []  # of the test under way
FAILS: list[bool] = []  # not empty on the rank whose communication hook fails


@pytest.mark.long
@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "first gradient", "last gradient", "communication"])
def test_rank_that_fails_ends_the_others_with_an_error_and_no_numbers(rank: Rank, where: str) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    GROUP[:] = [group]
    FAILS.clear()
    ddp = DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.0001)
    ddp_mp.patch(ddp, mixed_precision=MIXED)
    if where == "communication":
        ddp.register_comm_hook(None, reduced_until_it_fails)
    mean_square(ddp, torch.randn(4, 8)).backward()
    before = [p.grad.clone() for p in ddp.parameters()]
    values = [p.detach().clone() for p in ddp.parameters()]
    if rank.index == 1:
        fail_in(where, ddp)
    for error in (Luck if rank.index == 1 else RuntimeError, (Luck, RuntimeError)):  # and who goes on gets no further
        with pytest.raises(error):
            mean_square(ddp, torch.randn(4, 8)).backward()
        with ddp_mp.full_precision(ddp):
            for param, grad, value in zip(ddp.parameters(), before, values, strict=True):
                assert torch.equal(param, value)
                assert torch.equal(param.grad, grad)
        dist.barrier()
    GROUP.clear()


@pytest.mark.long
@pytest.mark.parametrize("how", ["error", "exit", "kill"])
def test_rank_whose_process_ends_inside_a_hook_ends_the_others(tmp_path: Any, how: str) -> None:
    ending = {"error": "raise ValueError('no luck')", "exit": "os._exit(3)", "kill": "os.kill(os.getpid(), 9)"}[how]
    programs = [
        start(
            f"""
            dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank={index}, world_size=2, timeout=LONG)
            ddp = wrap(bucket_cap_mb=0.0001)
            def end(_):
                if {index} == 1:
                    {ending}
            for step in range(3):
                if step == 2:
                    ddp.module[0].weight.register_hook(end)
                loss = ddp(torch.randn(4, 8)).float().pow(2).mean()
                try:
                    loss.backward()
                except RuntimeError:
                    assert {index} == 0 and step == 2
                    assert all(p.dtype is torch.float32 for p in ddp.parameters())
                    print("an error")
                    os._exit(0)
                except ValueError:
                    os._exit(1)  # at once: PyTorch, with plain DDP too, may abort where Python ends beside a dead rank
            """
        )
        for index in range(2)
    ]
    out, _ = programs[0].communicate(timeout=150)
    assert (programs[0].returncode, out) == (0, "an error\n")
    programs[1].communicate(timeout=60)
    assert programs[1].returncode == {"error": 1, "exit": 3, "kill": -9}[how]


@pytest.mark.long
def test_rank_that_goes_on_after_its_error_never_gives_the_others_numbers(tmp_path: Any) -> None:
    programs = [
        start(
            f"""
            dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank={index}, world_size=2, timeout=SHORT)
            ddp = wrap(bucket_cap_mb=0.0001)
            ddp(torch.randn(4, 8)).float().pow(2).mean().backward()
            if {index} == 1:
                def end(_):
                    handle.remove()
                    raise ValueError("no luck")
                handle = ddp.module[2].weight.register_hook(end)
            for _ in range(2):
                try:
                    ddp(torch.randn(4, 8)).float().pow(2).mean().backward()
                    print("numbers")
                except (RuntimeError, ValueError):
                    pass
            os._exit(1)
            """
        )
        for index in range(2)
    ]
    for program in programs:
        out, _ = program.communicate(timeout=150)
        assert program.returncode != 0  # an error, or gloo ends the process when sizes do not fit
        assert out == ""


PRELUDE = """
import datetime, os, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ddp_mp
from ddp_mp import _C
torch.set_num_threads(1)
LONG, SHORT = datetime.timedelta(seconds=120), datetime.timedelta(seconds=10)
def wrap(options=None, **wrapping):
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ddp = DistributedDataParallel(module, **wrapping)
    return ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32), options=options)
"""


def start(program: str) -> subprocess.Popen[str]:
    """A Python process of its own."""
    lines = program.splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    text = PRELUDE + "\n".join(line[margin:] for line in lines)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# --- Ctrl-C --------------------------------------------------------------------------------------------------------------


def interrupted_wait(act: Callable[[], Any]) -> None:
    """SIGINT comes while ``act`` waits for casts that do not begin before it has come."""
    inline = _C.host_set_inline_bytes(0)
    _C.host_hold(True)

    def interrupt() -> None:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        _C.host_hold(False)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            act()
    finally:
        thread.join()
        _C.host_hold(False)
        _C.host_set_inline_bytes(inline)


@on_ranks(2)
@pytest.mark.parametrize("wait", ["root", "module"])
@pytest.mark.parametrize("where", ["forward", "no_grad", "state_dict"])
def test_interrupt_in_a_wait_leaves_masters_and_training_goes_on(rank: Rank, where: str, wait: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trial = Trial(rank, mlp(), options={"wait": wait, "first_bucket_mb": 1e-6, "bucket_mb": 1e-6})
    x = torch.randn(4, 8)

    def act() -> None:
        with torch.set_grad_enabled(where != "no_grad"):
            trial.ddp(x)
        trial.module.state_dict()

    for seed in range(3):
        interrupted_wait(act)
        with ddp_mp.full_precision(trial.ddp):
            trial.check()
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        trial.zero_grad()


# --- the end of the interpreter ------------------------------------------------------------------------------------------

ENDINGS = {
    "a forward without its backward": """
        loss = ddp(x).sum()
    """,
    "casts that have not begun": """
        _C.host_set_inline_bytes(0)
        _C.host_hold(True)
        threading.Timer(0.2, _C.host_hold, [False]).start()
        threading.Thread(target=ddp, args=(x,)).start()
    """,
    "casts of a step ahead": """
        _C.host_set_inline_bytes(0)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp(x).float().sum().backward()
        optimizer.step()
    """,
    "an exit inside a forward": """
        ddp.module[2].register_forward_hook(lambda *a: sys.exit(0))
        ddp(x)
    """,
    "an exit inside a backward": """
        ddp.module[0].weight.register_hook(lambda g: sys.exit(0))
        ddp(x).float().sum().backward()
    """,
    "everything in a cycle": """
        ddp.cycle = ddp.module.cycle = [ddp, ddp(x)]
    """,
}


@pytest.mark.long
@pytest.mark.parametrize("pending", ENDINGS)
def test_interpreter_ends_quietly_with_work_pending(tmp_path: Any, pending: str) -> None:
    program = start(
        f"""
        dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
        ddp = wrap(options=ddp_mp.Options(prefetch=True))
        x = torch.randn(4, 8)
        {ENDINGS[pending].strip()}
        """
    )
    out, errors = program.communicate(timeout=150)
    assert (program.returncode, out) == (0, "")
    assert "Error" not in errors
    assert "Traceback" not in errors


@pytest.mark.long
def test_no_thread_of_the_process_group_outlives_it(tmp_path: Any) -> None:
    """One that does may want Python when it has ended, to free what was reduced last; that aborts the process."""
    program = start(
        f"""
        def threads():
            return [open(f"/proc/self/task/{{task}}/comm").read().strip() for task in os.listdir("/proc/self/task")]
        def train():
            ddp = wrap()
            ddp(torch.randn(4, 8)).float().sum().backward()
            torch.optim.SGD(ddp.parameters(), lr=0.1).step()
            print(sum("gloo" in name for name in threads()) > 0)
        dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
        train()
        dist.destroy_process_group()
        print([name for name in threads() if "gloo" in name])
        """
    )
    out, errors = program.communicate(timeout=150)
    assert (program.returncode, out) == (0, "True\n[]\n"), errors


@pytest.mark.long
def test_interpreter_waits_until_the_process_group_lets_go_of_what_was_reduced() -> None:
    """With a model that outlives its group, and with threads of the group that get to run only while Python waits."""
    program = start(
        """
        import torch._dynamo
        def train():
            global ddp
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            ddp = wrap()
            x = torch.randn(4, 8)
            for task in map(int, os.listdir("/proc/self/task")):
                os.sched_setaffinity(task, {min(os.sched_getaffinity(0))})
                if "gloo_runloop" in open(f"/proc/self/task/{task}/comm").read():
                    os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
            sys.setswitchinterval(1000)
            ddp(x).float().sum().backward()
            dist.destroy_process_group()
        torch.set_num_threads(1)
        for _ in range(8):
            child = os.fork()
            if child == 0:
                train()
                sys.exit()
            print(os.waitpid(child, 0)[1])
        """
    )
    out, errors = program.communicate(timeout=150)
    assert (program.returncode, out) == (0, "0\n" * 8), errors


@pytest.mark.long
def test_interpreter_ends_beside_a_collective_that_never_does_and_a_child_knows_of_none() -> None:
    program = start(
        """
        from ddp_mp import comm
        held = comm.lend(torch.ones(1))  # as by a thread that waits for a rank that has died
        print(len(comm._lent), flush=True)
        child = os.fork()
        if child == 0:
            print(len(comm._lent), flush=True)
            sys.exit()
        print(os.waitpid(child, 0)[1])
        """
    )
    out, errors = program.communicate(timeout=150)
    assert (program.returncode, out) == (0, "1\n0\n0\n"), errors


# --- forks ---------------------------------------------------------------------------------------------------------------


class Rows(Dataset[torch.Tensor]):
    """Loaded in worker processes."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 16)


@pytest.mark.long
@on_ranks(2)
def test_fork_of_data_workers_after_training_began_disturbs_nothing(rank: Rank) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # who is may have no children
    trial = Trial(rank, mlp())
    inline = _C.host_set_inline_bytes(0)  # casts on the thread that a fork does not take along
    try:
        trial.train(vectors(), steps=2)
        loss = mean_square(trial.ddp, rank.inputs(vectors(), 50)[rank.index])
        for workers in (2, 2):  # forked between a forward and its backward, too
            for batch in DataLoader(Rows(), batch_size=4, num_workers=workers, multiprocessing_context="fork"):
                trial.backward(square_step, [batch] * rank.size)
                trial.check()
                trial.zero_grad()
        loss.backward()
        trial.oracle.backward(square_step, rank.inputs(vectors(), 50))
        trial.check()
    finally:
        _C.host_set_inline_bytes(inline)


@pytest.mark.long
@on_ranks(1)
def test_fork_child_computes_with_the_patched_model(rank: Rank) -> None:
    inline = _C.host_set_inline_bytes(0)
    trial = Trial(rank, mlp()).train(vectors())
    x = torch.randn(4, 8)
    with torch.no_grad():
        due = trial.ddp(x)
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            os._exit(0 if torch.equal(trial.ddp(x), due) and torch.equal(trial.module(x.bfloat16()), due) else 1)
    assert os.waitpid(child, 0)[1] == 0
    trial.train(vectors(), seed=20)
    _C.host_set_inline_bytes(inline)


# --- threads -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(1)
@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["worker", "inline"])
def test_threads_eight_models_each_are_trained_as_if_alone(rank: Rank, inline: int) -> None:
    previous = _C.host_set_inline_bytes(inline)
    trials = [Trial(rank, mlp(8, 1 + number % 3), options={"wait": ("root", "module")[number % 2]}) for number in range(8)]
    errors: list[BaseException] = []

    def train(number: int) -> None:
        inputs = torch.Generator().manual_seed(number)
        trial = trials[number]
        optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
        try:
            for _ in range(20):
                x = torch.randn(4, 8, generator=inputs)
                trial.backward(square_step, [x])
                trial.check()
                optimizer.step()
                trial.oracle_step(torch.optim.SGD(trial.oracle.module.parameters(), lr=0.1))
                trial.zero_grad()
        except BaseException as error:
            errors.append(error)

    in_threads([lambda number=number: train(number) for number in range(8)])  # type: ignore[misc]
    _C.host_set_inline_bytes(previous)
    assert errors == []


@pytest.mark.long
@on_ranks(1)
def test_threads_patch_and_unpatch_while_another_model_trains(rank: Rank) -> None:
    trained = DistributedDataParallel(scalar())
    others = [DistributedDataParallel(mlp()) for _ in range(3)]
    ddp_mp.patch(trained, mixed_precision=MIXED)
    wrong: list[Any] = []
    over = threading.Event()

    def train() -> None:
        for step in range(150):
            trained(column(step)).sum().backward()
            if trained.module.weight.grad.item() != torch.tensor(float(step)).bfloat16().item():
                wrong.append((step, trained.module.weight.grad))
            trained.zero_grad()
        over.set()

    def patch() -> None:
        while not over.is_set():
            for ddp in others:
                ddp_mp.patch(ddp, mixed_precision=MIXED)
            for ddp in others:
                ddp_mp.unpatch(ddp)

    in_threads([train, patch])
    assert wrong == []
    for ddp in others:
        ddp_mp.patch(ddp, mixed_precision=MIXED)
        mean_square(ddp, torch.randn(4, 8)).backward()
        assert all(p.grad.dtype is F32 for p in ddp.parameters())


def in_threads(works: list[Callable[[], None]]) -> None:
    """All at once, until all are done."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # PyTorch keeps the model of the present forward in a class attribute, which threads put back in each other's way
    DistributedDataParallel._active_ddp_module = None
