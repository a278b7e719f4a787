"""Everyday training on PyTorch's own mixed-precision hooks and on ddp_mp, case by case: what each of them does.

    python examples/compare.py

One process, on the CPU.  PyTorch's hooks need an accelerator's events, so on a CPU build they get events that do
nothing; every other line that runs is PyTorch's own.  The first-iteration defect would hide most others, so most cases
run one training step beforehand, whose gradients are thrown away.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_mp
from ddp_mp.demo import show_table, silent_device_events

BF16 = torch.bfloat16
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


def first_gradient(wrap: Wrap) -> str:
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


def accumulation(wrap: Wrap) -> str:
    module = one(0.5)
    ddp = warmed_up(wrap(module), torch.ones(1, 1))
    with ddp.no_sync():
        ddp(torch.full((1, 1), 256.0)).sum().backward()
    ddp(torch.ones(1, 1)).sum().backward()
    return sees("gradient", module.weight.grad.item(), 257.0)


def accumulation_of_synchronised(wrap: Wrap) -> str:
    module = one(0.5)
    ddp = warmed_up(wrap(module), torch.ones(1, 1))
    ddp(torch.full((1, 1), 256.0)).sum().backward()
    ddp(torch.ones(1, 1)).sum().backward()
    return sees("gradient", module.weight.grad.item(), 257.0)


def attention(wrap: Wrap) -> str:
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


def used_elsewhere(wrap: Wrap) -> str:
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
    module = one(0.5)
    x = torch.ones(1, 1)
    ddp = warmed_up(wrap(module), x)
    (ddp(x) + ddp(x)).sum().backward()
    return sees("gradient", module.weight.grad.item(), 2.0)


def unused(wrap: Wrap) -> str:
    module = nn.ModuleDict({"used": one(0.5), "idle": one(0.5)})
    module.forward = lambda x: module["used"](x)
    ddp = wrap(module, find_unused_parameters=True)
    ddp(torch.ones(1, 1)).sum().backward()
    return sees("gradient of the unused parameter", module["idle"].weight.grad, None)


def evaluation(wrap: Wrap) -> str:
    ddp = warmed_up(wrap(one(0.5)), torch.ones(1, 1))
    with torch.no_grad():
        return sees("output", ddp(torch.ones(1, 1)).item(), 0.5)


def saved_state(wrap: Wrap) -> str:
    module = one(1 + 2**-12)
    ddp = warmed_up(wrap(module), torch.ones(1, 1))
    ddp(torch.ones(1, 1))  # no backward follows: a skipped batch, an evaluation with gradients enabled
    return sees("saved weight", module.state_dict()["weight"].item(), 1 + 2**-12)


def integer_buffer(wrap: Wrap) -> str:
    module = one(0.5)
    module.register_buffer("position", torch.arange(512))
    wrap(module, buffer_dtype=BF16)
    return sees("position[257] is", int(module.position[257]), 257)


def deep_copy(wrap: Wrap) -> str:
    module = one(0.5)
    warmed_up(wrap(module), torch.ones(1, 1))
    return sees("copied weight", copy.deepcopy(module).weight.item(), 0.5)


CASES: dict[str, Callable[[Wrap], str]] = {
    "gradients of the first step": first_gradient,
    "tied weights": tied_weights,
    "accumulation under no_sync": accumulation,
    "accumulation over backwards": accumulation_of_synchronised,
    "nn.MultiheadAttention": attention,
    "a weight used outside its module": used_elsewhere,
    "two forwards, one backward": two_forwards,
    "find_unused_parameters": unused,
    "evaluation under no_grad": evaluation,
    "state_dict after a forward alone": saved_state,
    "integer buffers": integer_buffer,
    "deepcopy of the module": deep_copy,
}


def native(module: nn.Module, buffer_dtype: torch.dtype | None = None, **options: bool) -> DistributedDataParallel:
    return DistributedDataParallel(module, mixed_precision=_MixedPrecision(BF16, torch.float32, buffer_dtype), **options)


def patched(module: nn.Module, buffer_dtype: torch.dtype | None = None, **options: bool) -> DistributedDataParallel:
    policy = ddp_mp.MixedPrecision(BF16, torch.float32, buffer_dtype)
    return ddp_mp.patch(DistributedDataParallel(module, **options), mixed_precision=policy)


def outcome(case: Callable[[Wrap], str], wrap: Wrap) -> str:
    torch.manual_seed(0)
    try:
        return case(wrap)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0].split('. ')[0]}"


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def main() -> int:
    rows = []
    with one_process():
        for name, case in CASES.items():
            ours = outcome(case, patched)
            with silent_device_events():
                theirs = outcome(case, native)
            rows.append((name, theirs, ours))
    show_table(f"bfloat16 with float32 reduction, PyTorch {torch.__version__}", ("", "PyTorch's hooks", "ddp_mp"), rows, "left")
    return any(ours != "right" for *_, ours in rows)


if __name__ == "__main__":
    raise SystemExit(main())
