"""Does training give the right numbers on this machine?  ``python -m ddp_mp check``.

Three checks for the CPU, and for CUDA where PyTorch has a device: casts of every pair of types against PyTorch's own, the
order of casts and whatever runs before and after them, and the gradients of two processes against plain float32 arithmetic.
Everything that is written is in a temporary folder.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _C, patching
from .._version import __version__
from ..leaves import LeafPool, take_back
from ..options import FLOATING, MixedPrecision, Options
from ..parameters import managed_parameters
from ..stats import stats
from .command import Parser

SECONDS = 180  # for two processes, from their start to their end


class CheckError(Exception):
    """A check found something wrong; the text says what."""


def main(argv: list[str] | None = None) -> int:
    """Runs all checks and says what they found; returns 0 when every one passed, else 1."""
    parser = Parser("check", "Tests whether training gives the right numbers on this machine.")
    parser.parse_args(argv)
    print(f"ddp_mp {__version__} with PyTorch {torch.__version__}")
    places = [torch.device("cpu"), *(torch.device("cuda", k) for k in range(_cuda_devices()))]
    failed = sum(not _passes(*one) for place in places for one in _checks_of(place))
    if len(places) == 1:
        print("  -       CUDA: not checked, PyTorch sees no device here")
    where = "on the CPU and on CUDA" if len(places) > 1 else "on the CPU"
    if failed:
        print(f"Do not trust training with ddp_mp on this machine: checks that failed: {failed}.")
        return 1
    print(f"Training with ddp_mp can be trusted on this machine, {where}.")
    return 0


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _checks_of(place: torch.device) -> Iterator[tuple[str, Callable[[torch.device], str], torch.device]]:
    name = "CPU" if place.type == "cpu" else f"CUDA device {place.index} ({torch.cuda.get_device_name(place)})"
    yield f"{name}: casts", check_casts, place
    yield f"{name}: order", check_order, place
    if not place.index:  # the CPU, or the first device
        yield f"{name}: gradients", check_gradients, place


def _passes(name: str, check: Callable[[torch.device], str], place: torch.device) -> bool:
    try:
        print(f"  ok      {name}: {check(place)}")
    except CheckError as error:
        print(f"  FAILED  {name}: {error}")
    except Exception:
        print(f"  FAILED  {name}: an error\n{traceback.format_exc()}")
    else:
        return True
    return False


# --- casts ---------------------------------------------------------------------------------------------------------------


def check_casts(place: torch.device) -> str:
    """Every pair of types, with lengths and addresses that reach every path of the code: the bits of ``Tensor.to``."""
    for src in FLOATING:
        values = _values(src).to(place)
        for dst in FLOATING:
            _require_cast(values, dst)
            for start in range(4):
                for length in (0, 1, 7, 31, 33, 65, 257):
                    _require_cast(values[start : start + length], dst)
    return f"{len(FLOATING) ** 2} pairs of types as PyTorch casts them, bit for bit"


def _require_cast(values: torch.Tensor, dst: torch.dtype) -> None:
    out = torch.empty(values.shape, dtype=dst, device=values.device)
    _cast(values, out)
    due = values.to(dst)
    wrong = ~((_bits(out) == _bits(due)) | (out.isnan() & due.isnan()))
    if wrong.any():
        k = int(wrong.nonzero()[0, 0])
        raise CheckError(
            f"{values.dtype} to {dst}: {int(wrong.sum())} of {values.numel()} values are wrong; {values[k].item()!r} should be "
            f"{due[k].item()!r} and is {out[k].item()!r}"
        )


def _cast(values: torch.Tensor, out: torch.Tensor) -> None:
    """``out[...] = values``, as the engine casts a parameter; the caller's stream waits for it."""
    engine = _C.Engine([values], ["values"], [], str(out.dtype), 1 << 40, 1 << 40)
    engine.bind([values], [out], None)
    engine.cast()
    engine.wait()


def _values(dtype: torch.dtype) -> torch.Tensor:
    """All values of a narrow type; of a wide one all exponents, values between those of narrow types, and random bits."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    bits, exponents = torch.int32 if dtype.itemsize == 4 else torch.int64, 8 if dtype.itemsize == 4 else 11
    fraction = dtype.itemsize * 8 - 1 - exponents
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(bits)
    random = torch.randint(limits.min, limits.max, (2**16,), dtype=bits, generator=generator)
    near = torch.tensor([0, 1, -1], dtype=bits)
    halves = torch.tensor([(2 * k + 1) << (fraction - n) for n in (8, 11) for k in range(4)], dtype=bits)
    fractions = torch.cat([near, (halves[:, None] + near).flatten()])
    ladder = (torch.arange(2**exponents, dtype=bits) << fraction)[:, None] + fractions
    return torch.cat([ladder.flatten(), -ladder.flatten(), random]).view(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


# --- order ---------------------------------------------------------------------------------------------------------------


def check_order(place: torch.device) -> str:
    """Casts read what was written before them, are waited for, and are over before the masters are written again."""
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(place)
    options = Options(first_bucket_mb=0.1, bucket_mb=0.1)
    pool = LeafPool(managed_parameters(module, set()), torch.bfloat16, options)
    rounds = 20
    with torch.no_grad(), _streams(place) as on_streams:
        for number in range(rounds):
            with on_streams[number % len(on_streams)]():
                _require_order(module, pool, place, float(number + 1))
    return f"{rounds} rounds of writing, casting and reading kept their order"


def _require_order(module: nn.Module, pool: LeafPool, place: torch.device, value: float) -> None:
    with _held_up(place):
        for param in module.parameters():
            param.fill_(value)
        placement = pool.place_present()
        if place.type == "cpu" and pool.groups[0].engine.event(0).query():
            raise CheckError("a cast counts as done before it has run")
    pool.wait()
    seen = [leaf.clone() for leaf in placement.generation.leaves]
    take_back(placement)
    pool.free(placement.generation)
    for param in module.parameters():
        param.fill_(-1)
    for leaf in seen:
        if leaf.dtype is not torch.bfloat16 or not bool((leaf == value).all()):
            raise CheckError(f"leaves should hold {value} in bfloat16; found {leaf.flatten()[:4].tolist()} in {leaf.dtype}")


@contextlib.contextmanager
def _held_up(place: torch.device) -> Iterator[None]:
    """What runs the casts is busy until some time after the end of the block."""
    if place.type == "cuda":
        wide = torch.ones(2048, 2048, device=place)
        for _ in range(20):
            wide = wide @ wide
        yield
        return
    _C.host_hold(True)
    release = threading.Timer(0.01, _C.host_hold, (False,))
    try:
        yield
    finally:
        release.start()


@contextlib.contextmanager
def _streams(place: torch.device) -> Iterator[list[Callable[[], Any]]]:
    """Contexts to train in: the current stream, and another one on CUDA.  On a CPU every cast goes to the worker thread."""
    if place.type == "cuda":
        side = torch.cuda.Stream(place)
        yield [lambda: torch.cuda.device(place), lambda: torch.cuda.stream(side)]
        torch.cuda.synchronize(place)
        return
    inline, stream = _C.host_set_inline_bytes(0), _C.host_set_stream_bytes(0)
    try:
        yield [contextlib.nullcontext]
    finally:
        _C.host_hold(False)
        _C.host_set_inline_bytes(inline)
        _C.host_set_stream_bytes(stream)


# --- gradients -----------------------------------------------------------------------------------------------------------


def check_gradients(place: torch.device) -> str:
    """Two processes train in low precision with whole numbers, which are exact in every type: as plain float32 does."""
    problems = two_processes(train_exactly, place)
    if problems:
        raise CheckError("; ".join(problems))
    return "two processes agree with plain float32 arithmetic"


Train = Callable[[int, torch.device], list[str]]


def two_processes(train: Train, place: torch.device, seconds: float = SECONDS) -> list[str]:
    """Runs ``train`` on two ranks; returns what they found wrong, or why there is no answer."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ddp_mp-check-") as folder:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(train, rank, place, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = [_answer(rank, pipes[rank], seconds) for rank in range(2)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [problem for answer in answers for problem in answer]


def _answer(rank: int, pipe: Any, seconds: float) -> list[str]:
    try:
        if pipe.poll(seconds):
            return [f"rank {rank}: {problem}" for problem in pipe.recv()]
        return [f"rank {rank} gave no answer in {seconds:.0f} s"]
    except EOFError:
        return [f"rank {rank} ended without an answer"]


def _run_rank(train: Train, rank: int, place: torch.device, folder: str, pipe: Any) -> None:
    # gloo talks on the standard streams; the parent reports
    with open(os.path.join(folder, f"output-{rank}"), "wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # PyTorch's compiler makes itself a folder when it is imported
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(folder, "inductor"))
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        many = place.type == "cuda" and torch.cuda.device_count() > 1
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the two are on one machine, which may have no other network
        dist.init_process_group(
            "nccl" if many else "gloo",
            init_method=f"file://{os.path.join(folder, 'store')}",
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=SECONDS),
        )
        pipe.send(train(rank, torch.device("cuda", rank) if many else place))
    except BaseException:
        pipe.send([traceback.format_exc()])
    finally:
        pipe.close()
        os._exit(0)


class _Tied(nn.Module):
    """Two layers with one weight, called as often as a backward must add up right."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.a(x).relu())


def train_exactly(rank: int, place: torch.device) -> list[str]:
    """What is wrong with the gradients of some steps on this rank, of two."""
    problems = []
    for dtype, wait in ((torch.bfloat16, "root"), (torch.float16, "module")):
        options = Options(wait=wait, first_bucket_mb=1e-4, bucket_mb=1e-4)  # type: ignore[arg-type]
        ddp = DistributedDataParallel(_Tied().to(place), bucket_cap_mb=1e-4)
        patching.patch(ddp, mixed_precision=MixedPrecision(dtype, torch.float32), options=options)
        problems += _compare_steps(rank, place, ddp, dtype)
        if not problems and stats(ddp).casts == 0:
            problems.append(f"nothing was cast to {dtype}")
        patching.unpatch(ddp)
    return problems


def _compare_steps(rank: int, place: torch.device, ddp: DistributedDataParallel, dtype: torch.dtype) -> list[str]:
    generator = torch.Generator().manual_seed(7)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    for step in range(3):
        with torch.no_grad():
            for param in ddp.module.parameters():
                param.copy_(whole(*param.shape))
        plain = copy.deepcopy(ddp.module).cpu()
        ddp.zero_grad()
        for sync in (False, True):
            inputs, weights = whole(2, 4, 8), whole(4, 8)
            for x in inputs:
                (plain(x) * weights / 2).sum().backward()
            with contextlib.nullcontext() if sync else ddp.no_sync():
                output = ddp(inputs[rank].to(place))
                (output.float() * weights.to(place)).sum().backward()
            if output.dtype is not dtype:
                return [f"the forward computed in {output.dtype}, not in {dtype}"]
        found = _differences(ddp.module, plain)
        if found:
            return [f"step {step + 1} in {dtype}: {found}"]
    return []


def _differences(module: nn.Module, plain: nn.Module) -> str:
    for (name, param), want in zip(module.named_parameters(), plain.parameters(), strict=True):
        got, due = param.grad, want.grad
        assert due is not None  # all take part in the loss
        if param.dtype is not torch.float32 or got is None or got.dtype is not torch.float32:
            return f"{name} and its gradient should be float32 after backward"
        if not torch.equal(param.detach().cpu(), want.detach()):
            return f"{name} is not its full-precision value after backward"
        if not torch.equal(got.cpu(), due):
            gap = (got.cpu() - due).abs().max().item()
            return f"the gradient of {name} differs from that of plain float32 arithmetic by up to {gap}"
    return ""
