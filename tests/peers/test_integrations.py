"""The programs in examples/integrations, each on two ranks, against the oracle: parameters bit for bit after every step.

A program runs as torchrun would run it: a process a rank, told by the environment.  Its `main` returns the parameters.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.oracle import BF16, F32, FP16, Oracle, require_same
from kit.ranks import forkserver
from torch import nn
from torch.utils.data import DistributedSampler

import ddp_mp

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples/integrations"
RANKS, SECONDS = 2, 240.0
State = dict[str, torch.Tensor]
Loss = Callable[[Any, Any], torch.Tensor]


# --- running a program ---------------------------------------------------------------------------------------------------


def load(name: str) -> Any:
    """A program as a module."""
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_main(folder: str, environment: dict[str, str], name: str, arguments: list[str], before: Any) -> None:
    """What one rank's process does."""
    index = environment["RANK"]
    output = os.open(f"{folder}/output-{index}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [f"{name}.py", *arguments]
    torch.set_num_threads(1)
    try:
        program = load(name)
        notes = before(program) if before is not None else None
        torch.save((program.main(), notes), f"{folder}/result-{index}")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run(folder: Path, name: str, *arguments: str, before: Any = None) -> tuple[list[State], str, list[Any]]:
    """Each rank's parameters, what rank 0 printed, and what ``before(program)``, called on each rank, left in its result."""
    shared = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    shared |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    processes: list[multiprocessing.process.BaseProcess] = []
    for index in map(str, range(RANKS)):
        environment = {**shared, "RANK": index, "LOCAL_RANK": index}
        process = forkserver().Process(
            target=rank_main, args=(str(folder), environment, name, list(arguments), before), daemon=True
        )
        process.start()
        processes.append(process)
    for process in processes:
        process.join(SECONDS)
        process.kill()
    printed = [(folder / f"output-{index}").read_text() for index in range(RANKS)]
    codes = [process.exitcode for process in processes]
    assert codes == [0] * RANKS, f"exit codes {codes}\n" + "\n".join(printed)
    results = [torch.load(folder / f"result-{index}") for index in range(RANKS)]
    return [state for state, _ in results], printed[0], [notes for _, notes in results]


def test_programs_are_shown_as_they_can_be_run() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    for program in PROGRAMS.glob("*.py"):
        command = f"torchrun --standalone --nproc-per-node=2 examples/integrations/{program.name}\n"
        assert f"    {command}" in program.read_text().replace(" [BACKEND]", ""), program.name
        assert f"```sh\n{command}" in page, program.name


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the ranks: how many threads there are decides in which order some operations sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- what it should do ---------------------------------------------------------------------------------------------------


class Expected:
    """A training loop over the oracle."""

    def __init__(self, module: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = BF16) -> None:
        self.oracle = Oracle(module, RANKS, ddp_mp.MixedPrecision(dtype, F32))
        self.optimizer = optimizer(self.oracle.module.parameters())

    def backward(self, loss: Loss, inputs: list[Any], sync: bool = True) -> None:
        self.oracle.backward(lambda call, x: loss(call, x).backward(), inputs, sync)

    def give_gradients(self) -> None:
        for name, param in self.oracle.module.named_parameters():
            param.grad = self.oracle.grads[0][name]

    def step(self, clip: float | None = None) -> None:
        self.give_gradients()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.oracle.module.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.oracle.zero_grad()

    @property
    def state(self) -> State:
        return self.oracle.module.state_dict()


def loops(program: Any, optimizer: Callable[..., torch.optim.Optimizer], clip: float | None = None) -> Iterator[Expected]:
    """The loop that most programs run, step by step."""
    expected = Expected(program.build_model(), optimizer)
    for step in range(program.STEPS):
        expected.backward(program.loss_of, [program.batch(step, rank) for rank in range(RANKS)])
        expected.step(clip)
        yield expected


def sgd(lr: float = 0.1) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.SGD, lr=lr)


def last(states: Iterator[Expected]) -> State:
    *_, expected = states
    return expected.state


def require_states(got: list[State], want: State, prefix: str = "") -> None:
    """Every rank has these values, bit for bit, under names with this prefix."""
    for index, state in enumerate(got):
        for name, value in want.items():
            require_same(f"{prefix}{name} on rank {index}", state[prefix + name], value)


# --- plain PyTorch -------------------------------------------------------------------------------------------------------


def test_torchrun_loop_equals_oracle(tmp_path: Path) -> None:
    states, printed, _ = run(tmp_path, "torchrun_loop")
    require_states(states, last(loops(load("torchrun_loop"), sgd())))
    assert "the same on all: True" in printed


@pytest.mark.long
def test_compiled_by_a_backend_that_keeps_the_operations_equals_oracle(tmp_path: Path) -> None:
    states, printed, _ = run(tmp_path, "compiled", "aot_eager")
    require_states(states, last(loops(load("compiled"), sgd())))
    assert "does not compile: 0\n" in printed


@pytest.mark.long
def test_compiled_by_inductor_is_close(tmp_path: Path) -> None:
    states, _, _ = run(tmp_path, "compiled")
    want = last(loops(load("compiled"), sgd()))
    for name, value in want.items():
        torch.testing.assert_close(states[0][name], value, atol=0.02, rtol=0)
        require_same(f"{name} on the other rank", states[1][name], states[0][name])


@pytest.mark.long
def test_gradient_checkpointing_equals_oracle(tmp_path: Path) -> None:
    states, printed, _ = run(tmp_path, "gradient_checkpointing")
    require_states(states, last(loops(load("gradient_checkpointing"), sgd())))
    assert "False" not in printed


@pytest.mark.long
def test_scaler_equals_oracle_and_skips_overflows(tmp_path: Path) -> None:
    program = load("fp16_scaler")
    states, printed, _ = run(tmp_path, "fp16_scaler")
    expected = Expected(program.build_model(), sgd(), FP16)
    scale, taken = program.SCALE, []
    for step in range(program.STEPS):

        def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
            return program.loss_of(call, x) * scale  # noqa: B023 - used in this step only

        expected.backward(loss, [program.batch(step, rank) for rank in range(RANKS)])
        grads = [grad for grad in expected.oracle.grads[0].values() if grad is not None]
        taken.append(all(bool(grad.isfinite().all()) for grad in grads))
        if taken[-1]:
            for grad in grads:
                grad.div_(scale)
            expected.step(clip=1.0)
        else:
            expected.oracle.zero_grad()
            scale /= 2
    require_states(states, expected.state)
    assert [f"taken: {one}" in line for one, line in zip(taken, printed.splitlines(), strict=True)] == [True] * program.STEPS
    assert {True, False} == set(taken)


@pytest.mark.long
def test_weight_averages_equal_those_computed_by_hand(tmp_path: Path) -> None:
    program = load("weight_averages")
    states, _, _ = run(tmp_path, "weight_averages")
    history = [copy.deepcopy(expected.state) for expected in loops(program, sgd(1e-3))]
    require_states(states, history[-1])
    ema, swa = dict(history[0]), dict(history[program.SWA_FROM])
    for count, later in enumerate(history[1:], start=1):
        ema = {name: value.lerp(later[name], 1 - program.DECAY) for name, value in ema.items()}
        if count > program.SWA_FROM:
            weight = 1 / (count - program.SWA_FROM + 1)
            swa = {name: value.lerp(later[name], weight) for name, value in swa.items()}
    for prefix, want in (("ema.", ema), ("swa.", swa)):
        for name, value in want.items():
            torch.testing.assert_close(states[0][prefix + name], value, rtol=1e-6, atol=1e-7)
            require_same(f"{prefix}{name} on the other rank", states[1][prefix + name], states[0][prefix + name])


@pytest.mark.long
def test_resumed_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    states, printed, _ = run(tmp_path, "save_and_resume")
    want = last(loops(load("save_and_resume"), functools.partial(torch.optim.AdamW, lr=1e-2)))
    require_states(states, want)
    require_states(states, want, "resumed.")
    assert "the same bits: True" in printed


# --- frameworks ----------------------------------------------------------------------------------------------------------


def test_accelerate_equals_oracle(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    program = load("accelerate_loop")
    states, printed, _ = run(tmp_path, "accelerate_loop")
    expected = Expected(program.build_model(), sgd())
    batches = program.samples().split(program.BATCH)  # rank r gets every second one, from the r-th on
    count = len(batches) // RANKS
    for step in range(count):
        update = (step + 1) % program.ACCUMULATE == 0
        inputs = [batches[step * RANKS + rank] for rank in range(RANKS)]
        expected.backward(lambda call, x: program.loss_of(call, x) / program.ACCUMULATE, inputs, sync=update)
        if update:
            expected.step(clip=1.0)
    require_states(states, expected.state)
    assert count == 8
    assert "patched: True, saved in torch.float32" in printed


@pytest.mark.long
def test_lightning_equals_oracle(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    program = load("lightning_fit")
    states, printed, _ = run(tmp_path, "lightning_fit")
    expected = Expected(program.build_model(), sgd())
    samples = program.samples()  # which Lightning shuffles
    orders = [list(DistributedSampler(samples, RANKS, rank)) for rank in range(RANKS)]  # type: ignore[arg-type]
    shards = [samples[order].split(program.BATCH) for order in orders]
    for step, inputs in enumerate(zip(*shards, strict=True)):
        update = (step + 1) % program.ACCUMULATE == 0
        # What DistributedDataParallel is called with is the batch, and it casts all that floats.
        cast = [x.to(BF16) for x in inputs]
        expected.backward(lambda call, x: program.loss_of(call, x) / program.ACCUMULATE, cast, sync=update)
        if update:
            expected.step(clip=1.0)
    require_states(states, expected.state)
    assert printed.count("parameters in torch.float32") == len(shards[0])


def record_items(program: Any) -> list[float]:
    """The counts of items that the Trainer hands to the model, for the average over micro-batches and ranks."""
    counts: list[float] = []
    forward = program.GPT2LMHeadModel.forward

    @functools.wraps(forward)  # the Trainer reads the signature
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if "num_items_in_batch" in kwargs:
            counts.append(float(kwargs["num_items_in_batch"]))
        return forward(*args, **kwargs)

    program.GPT2LMHeadModel.forward = recorded
    return counts


@pytest.mark.long
def test_trainer_equals_oracle(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    program = load("hf_trainer")
    states, printed, counts = run(tmp_path, "hf_trainer", before=record_items)
    expected = Expected(program.build_model(), sgd())
    rows = program.Tokens().rows.split(program.BATCH)
    steps = len(rows) // RANKS
    assert counts[0] == counts[1]
    for step in range(steps):
        items = torch.tensor(counts[0][step])

        def loss(call: Any, tokens: torch.Tensor) -> torch.Tensor:
            return call(input_ids=tokens, labels=tokens, num_items_in_batch=items).loss * RANKS  # noqa: B023

        update = (step + 1) % program.ACCUMULATE == 0
        expected.backward(loss, [rows[step * RANKS + rank] for rank in range(RANKS)], sync=update)
        if update:
            expected.step(clip=1.0)
    require_states(states, expected.state)
    assert "patched: True" in printed
    assert "saved in {torch.float32}" in printed


# --- two hosts -----------------------------------------------------------------------------------------------------------

HOSTS = {"a": "10.213.7.1", "b": "10.213.7.2"}


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two network namespaces with a cable between them: name -> address."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) to make network namespaces with")
    names = {key: f"ddpmp-{os.getpid()}-{key}" for key in HOSTS}
    first, second = names.values()
    commands = [f"ip netns add {name}" for name in names.values()]
    commands += [f"ip -n {first} link add eth0 type veth peer name eth0 netns {second}"]
    for key, name in names.items():
        commands += [f"ip -n {name} address add {HOSTS[key]}/24 dev eth0"]
        commands += [f"ip -n {name} link set {link} up" for link in ("lo", "eth0")]
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True)
            if made.returncode != 0:
                pytest.skip(f"network namespaces cannot be made here: {command}: {made.stderr.strip()}")
        yield {names[key]: address for key, address in HOSTS.items()}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.long
def test_two_hosts_meet_and_train_as_one(hosts: dict[str, str], tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=7"]
    first = next(iter(hosts.values()))
    command += [f"--rdzv-endpoint={first}:29400", "--max-restarts=0"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    outputs = [tmp_path / f"output-{name}" for name in hosts]
    agents = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, *command, f"--local-addr={address}"),
                # The names of both hosts are this machine's, so that they do not say who is meant by the endpoint.
                f"--rdzv-conf=is_host={int(address == first)}",
                "torchrun_loop.py",
            ],
            cwd=PROGRAMS,
            env=environment,
            stdout=output.open("w"),
            stderr=subprocess.STDOUT,
        )
        for (name, address), output in zip(hosts.items(), outputs, strict=True)
    ]
    for agent in agents:
        with contextlib.suppress(subprocess.TimeoutExpired):  # an agent waits long for one that has failed
            agent.wait(SECONDS)
    codes = [agent.poll() for agent in agents]
    for agent in agents:
        agent.kill()
    together = "".join(output.read_text() for output in outputs)
    assert codes == [0, 0], f"exit codes {codes}\n{together}"
    assert "2 ranks, parameters in torch.float32, the same on all: True" in together, together
    program = load("torchrun_loop")
    expected = Expected(program.build_model(), sgd())
    for step in range(program.STEPS):
        inputs = [program.batch(step, rank) for rank in range(RANKS)]
        with expected.oracle.low_precision(0) as call, torch.no_grad():
            loss = program.loss_of(call, inputs[0]).item()
        assert f"step {step}  loss {loss:.4f}" in together
        expected.backward(program.loss_of, inputs)
        expected.step()
