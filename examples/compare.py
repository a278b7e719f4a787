"""Everyday training on PyTorch's own mixed-precision hooks and on ddp_mp, case by case: what each of them does.

    python examples/compare.py                      # every case that one process can show
    python examples/compare.py --list
    python examples/compare.py --only tied_weights
    torchrun --standalone --nproc-per-node=2 examples/compare.py --only large_float16_gradients
    python examples/compare.py --device cuda --json outcomes.json

On the CPU, unless another device is named.  PyTorch's hooks need an accelerator's events, so on a CPU build they get events
that do nothing; every other line that runs is PyTorch's own.  The first-iteration defect would hide most others, so most cases
run one training step beforehand, whose gradients are thrown away.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_mp
from ddp_mp.tools.show import show_table
from ddp_mp.tools.upstream import silent_device_events

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Precision = tuple[torch.dtype, torch.dtype, torch.dtype | None]  # of parameters, reduction, buffers
Wrap = Callable[..., DistributedDataParallel]


def one(value: float) -> nn.Linear:
    """A layer of a single weight, so that gradients can be told by heart."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def sees(what: str, got: object, due: object) -> str:
    return "right" if got == due else f"{what} {got}, due {due}"


def warmed_up(ddp: DistributedDataParallel, *inputs: torch.Tensor) -> DistributedDataParallel:
    ddp(*inputs).sum().backward()
    ddp.zero_grad()
    return ddp


def first_gradients(wrap: Wrap) -> str:
    """the gradients of the first step"""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    ddp = wrap(module)
    ddp(torch.ones(1, 64)).sum().backward()
    # The gradient of the last layer is the input of that layer, in every row.
    with torch.no_grad():
        x = torch.ones(1, 64, dtype=BF16)
        for layer in module[:3]:
            x = x @ layer.weight.to(BF16).T
    grad = module[3].weight.grad
    worst = (grad - x.float()).abs().max().item()
    return "right" if worst < 0.05 else f"gradient wrong by {worst:.3g}"


def tied_weights(wrap: Wrap) -> str:
    """one weight in two layers"""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = one(0.5), one(0.5)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    module = Tied()
    x = torch.ones(1, 1)
    warmed_up(wrap(module), x)(x).sum().backward()
    return sees("gradient", module.a.weight.grad.item(), 1.0)


def no_sync(wrap: Wrap) -> str:
    """gradient accumulation under no_sync"""
    module = one(0.5)
    ddp = warmed_up(wrap(module), torch.ones(1, 1))
    with ddp.no_sync():
        ddp(torch.full((1, 1), 256.0)).sum().backward()
    ddp(torch.ones(1, 1)).sum().backward()
    return sees("gradient", module.weight.grad.item(), 257.0)


def accumulation(wrap: Wrap) -> str:
    """gradient accumulation over ordinary backwards"""
    module = one(0.5)
    ddp = warmed_up(wrap(module), torch.ones(1, 1))
    ddp(torch.full((1, 1), 256.0)).sum().backward()
    ddp(torch.ones(1, 1)).sum().backward()
    return sees("gradient", module.weight.grad.item(), 257.0)


def attention(wrap: Wrap) -> str:
    """nn.MultiheadAttention"""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, x, x)[0]

    module = Attention()
    x = torch.randn(1, 3, 8)
    warmed_up(wrap(module), x)(x).sum().backward()
    return sees("parameters are", {p.dtype for p in module.parameters()}, {torch.float32})


def functional_use(wrap: Wrap) -> str:
    """a weight used outside its module"""

    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = one(0.5), one(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.a(x), self.b.weight)

    module = Elsewhere()
    x = torch.ones(1, 1)
    warmed_up(wrap(module), x)(x).sum().backward()
    return sees("gradient", module.b.weight.grad.item(), 0.5)


def two_forwards(wrap: Wrap) -> str:
    """two forwards, one backward"""
    module = one(0.5)
    x = torch.ones(1, 1)
    ddp = warmed_up(wrap(module), x)
    (ddp(x) + ddp(x)).sum().backward()
    return sees("gradient", module.weight.grad.item(), 2.0)


def unused_parameters(wrap: Wrap) -> str:
    """find_unused_parameters=True"""
    module = nn.ModuleDict({"used": one(0.5), "idle": one(0.5)})
    module.forward = lambda x: module["used"](x)
    ddp = wrap(module, find_unused_parameters=True)
    ddp(torch.ones(1, 1)).sum().backward()
    return sees("gradient of the unused parameter", module["idle"].weight.grad, None)


def evaluation(wrap: Wrap) -> str:
    """evaluation under no_grad"""
    ddp = warmed_up(wrap(one(0.5)), torch.ones(1, 1))
    with torch.no_grad():
        return sees("output", ddp(torch.ones(1, 1)).item(), 0.5)


def saved_state(wrap: Wrap) -> str:
    """state_dict after a forward without a backward"""
    module = one(1 + 2**-12)
    ddp = warmed_up(wrap(module), torch.ones(1, 1))
    ddp(torch.ones(1, 1))  # and no backward: a skipped batch, an evaluation
    return sees("saved weight", module.state_dict()["weight"].item(), 1 + 2**-12)


def integer_buffers(wrap: Wrap) -> str:
    """an integer buffer beside buffer_dtype"""
    module = one(0.5)
    module.register_buffer("position", torch.arange(512))
    wrap(module, (BF16, FP32, BF16))
    return sees("position[257] is", int(module.position[257]), 257)


def deep_copy(wrap: Wrap) -> str:
    """copy.deepcopy of the module"""
    module = one(0.5)
    warmed_up(wrap(module), torch.ones(1, 1))
    return sees("copied weight", copy.deepcopy(module).weight.item(), 0.5)


def on_a_cpu(wrap: Wrap) -> str:
    """training on a CPU, without the events that do nothing"""
    module = one(0.5)
    wrap(module)(torch.ones(1, 1)).sum().backward()
    return sees("gradient", module.weight.grad.item(), 1.0)


def large_float16_gradients(wrap: Wrap) -> str:
    """float16 reduction of gradients that are large on every rank"""
    module = one(0.5)
    ddp = warmed_up(wrap(module, (FP16, FP16, None)), torch.ones(1, 1))
    ddp(torch.full((1, 1), 40000.0)).sum().backward()  # float16 ends at 65504
    return sees("gradient", module.weight.grad.item(), 40000.0)


ONE_PROCESS = (
    first_gradients,
    tied_weights,
    two_forwards,
    no_sync,
    accumulation,
    attention,
    functional_use,
    unused_parameters,
    evaluation,
    saved_state,
    integer_buffers,
    deep_copy,
    on_a_cpu,
)
CASES = {case.__name__: case for case in (*ONE_PROCESS, large_float16_gradients)}


def native(module: nn.Module, precision: Precision = (BF16, FP32, None), **options: bool) -> DistributedDataParallel:
    return DistributedDataParallel(module, mixed_precision=_MixedPrecision(*precision), **options)


def patched(module: nn.Module, precision: Precision = (BF16, FP32, None), **options: bool) -> DistributedDataParallel:
    return ddp_mp.patch(DistributedDataParallel(module, **options), mixed_precision=ddp_mp.MixedPrecision(*precision))


def outcome(case: Callable[[Wrap], str], wrap: Wrap) -> str:
    torch.manual_seed(0)
    try:
        return case(wrap)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0].split('. ')[0]}"


def outcomes(case: Callable[[Wrap], str]) -> tuple[str, str]:
    """What PyTorch's hooks do, and what ddp_mp does."""
    with contextlib.nullcontext() if case is on_a_cpu else silent_device_events():
        theirs = outcome(case, native)
    return theirs, outcome(case, patched)


@contextlib.contextmanager
def process_group(device: str = "cpu") -> Iterator[None]:
    """Of one process, or of those that torchrun started; inside, tensors are made on the device.

    PyTorch's warnings are not what is compared.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    logging.disable(logging.WARNING)
    try:
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()


def write_json(file: Path, device: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """What is known so far, whole at any time."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    found = [{"case": case, "pytorch": theirs, "ddp_mp": ours} for case, theirs, ours in rows]
    new = file.with_name(f".{file.name}")
    new.write_text(json.dumps({"torch": torch.__version__, "device": name, "cases": found}, indent=1) + "\n")
    os.replace(new, file)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--only", choices=CASES, metavar="CASE", help="one case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there too, after every case")
    args = parser.parse_args(arguments)
    if args.only == large_float16_gradients.__name__ and "RANK" not in os.environ:
        parser.error("this case needs two processes: torchrun --standalone --nproc-per-node=2 examples/compare.py ...")
    return args


def compared(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Each case with what PyTorch's hooks do and what ddp_mp does."""
    cases = [CASES[args.only]] if args.only else [case for case in ONE_PROCESS if args.device == "cpu" or case is not on_a_cpu]
    rows: list[tuple[str, str, str]] = []
    for case in cases:
        rows.append((case.__doc__ or "", *outcomes(case)))
        if args.json and dist.get_rank() == 0:
            write_json(args.json, args.device, rows)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.list:
        for name, case in CASES.items():
            print(f"{name:<25}{case.__doc__}")
        return 0
    with process_group(args.device):
        rows = compared(args)
        show = dist.get_rank() == 0
    if show and args.only:
        print(f"PyTorch's hooks: {rows[0][1]}\nddp_mp: {rows[0][2]}")
    elif show:
        title = f"bfloat16 with float32 reduction, PyTorch {torch.__version__}, {args.device}"
        show_table(title, ("", "PyTorch's hooks", "ddp_mp"), rows, "left")
    return any(ours != "right" for *_, ours in rows)


if __name__ == "__main__":
    raise SystemExit(main())
