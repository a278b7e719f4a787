"""Time of a training step: ddp_mp against everything else that gives low-precision compute.

    python -m benchmarks.step [--sizes host,compute] [--quick]

One process, one rank; the variants alternate.  ``host`` is a deep and narrow model, in which the time goes into calls;
``compute`` is wide enough for arithmetic to count.  The variants are

fp32             plain DDP
bf16             plain DDP of a model converted to bfloat16: no masters, the floor for low-precision compute
autocast         plain DDP under ``torch.autocast``: casts weights in every forward, again in checkpointed parts
pytorch          DDP's own mixed precision (on a CPU with device events that do nothing)
replicate        FSDP's replicate, with its mixed-precision policy
ddp_mp           DDP patched by ddp_mp
alone            the bfloat16 model without DDP
floor            no DDP: only casts, switches of ``.data`` and gradients handed over, in a few calls that check nothing
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_mp
from benchmarks.harness import Report, bars, one_process_group, settings, synchronize
from ddp_mp import _C
from ddp_mp.tools.gpt import GPT
from ddp_mp.tools.measure import Spread, now, paired
from ddp_mp.tools.upstream import silent_device_events

LOW = torch.bfloat16
SIZES = {
    "host": {"width": 32, "layers": 12, "heads": 2, "batch": 1, "length": 8, "rounds": 240},
    "compute": {"width": 256, "layers": 6, "heads": 4, "batch": 4, "length": 64, "rounds": 80},
    "device": {"width": 1024, "layers": 12, "heads": 16, "batch": 16, "length": 128, "rounds": 60},
}


def replicated(module: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    for block in module.blocks:
        replicate(block, mesh=mesh, mp_policy=policy)
    return replicate(module, mesh=mesh, mp_policy=policy)


class Bare(nn.Module):
    """Mixed precision by ``.data`` switches with nothing around them: no wrapper, no checks, no memory given back."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.params = list(module.parameters())
        numels = [p.numel() for p in self.params]
        self.engine = _C.Engine(self.params, [str(i) for i in range(len(numels))], [], "bfloat16", 2**20, 25 * 2**20)
        device = self.params[0].device
        arenas = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _, _, nbytes in self.engine.buckets]
        lows = [
            arenas[b][o : o + 2 * p.numel()].view(LOW).view(p.shape)
            for p, (b, o) in zip(self.params, self.engine.rows, strict=True)
        ]
        self.engine.bind([p.data for p in self.params], lows, arenas)
        self.full = [torch.empty_like(p) for p in self.params]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.engine.cast()
        self.engine.wait()
        self.engine.lower()
        out: torch.Tensor = self.module(x)
        out.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self.hand_over))
        return out

    def hand_over(self) -> None:
        grad = torch._C.TensorBase.grad
        torch._foreach_copy_(self.full, list(map(grad.__get__, self.params)))
        deque(map(grad.__set__, self.params, repeat(None)), maxlen=0)
        self.engine.restore()
        deque(map(grad.__set__, self.params, self.full), maxlen=0)


def variants(size: dict[str, int], device: torch.device) -> dict[str, tuple[Callable[[], nn.Module], Callable]]:
    def module() -> nn.Module:
        torch.manual_seed(0)
        return GPT(size["width"], size["layers"], size["heads"], tied=False).to(device)

    policy = _MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32)
    nothing = contextlib.nullcontext

    def native() -> nn.Module:
        with silent_device_events():
            return DistributedDataParallel(module(), mixed_precision=policy)

    return {
        "fp32": (lambda: DistributedDataParallel(module()), nothing),
        "bf16": (lambda: DistributedDataParallel(module().to(LOW)), nothing),
        "autocast": (lambda: DistributedDataParallel(module()), lambda: torch.autocast(device.type, LOW)),
        "pytorch": (native, silent_device_events),
        "replicate": (lambda: replicated(module(), device), nothing),
        "ddp_mp": (lambda: ddp_mp.patch(DistributedDataParallel(module()), mixed_precision=policy), nothing),
        "alone": (lambda: module().to(LOW), nothing),
        "floor": (lambda: Bare(module()), nothing),
    }


def stepper(model: nn.Module, around: Callable, tokens: torch.Tensor) -> Callable[..., dict[str, float]]:
    # Fused, so that the optimizer's own host time does not hide what is compared.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(optimize: bool = True) -> dict[str, float]:
        with around():
            synchronize(tokens.device)
            t0 = now()
            loss = model(tokens).float().square().mean()
            t1 = now()
            loss.backward()
            t2 = now()
        if optimize:
            optimizer.step()
        optimizer.zero_grad()
        t3 = now()
        synchronize(tokens.device)
        t4 = now()
        return {"forward": t1 - t0, "backward": t2 - t1, "optimizer": t3 - t2, "step": t4 - t0}

    return step


def main(arguments: Sequence[str] | None = None) -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--sizes", default="", help=f"some of {','.join(SIZES)}")
        parser.add_argument("--rounds", type=int, default=0)

    s = settings(__doc__, arguments, extend)
    cuda = s.device.type == "cuda"
    usual = "host" if s.quick else "host,compute,device" if cuda else "host,compute"
    report = Report("step", "time of a training step", s.device, {"sizes": SIZES})
    with one_process_group(s.device):
        for size in (s.extra.sizes or usual).split(","):
            config = SIZES[size]
            tokens = torch.randint(256, (config["batch"], config["length"]), device=s.device)
            steps: dict[str, Callable[..., dict[str, float]]] = {}
            for name, (make, around) in variants(config, s.device).items():
                try:
                    step = stepper(make(), around, tokens)
                    step(optimize=False)  # PyTorch's first gradients are uninitialised memory
                    step()
                except Exception as error:  # a peer that this PyTorch or this device does not have
                    report.notes.append(f"{size}, {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
                    continue
                steps[name] = step
            values = paired(steps, s.extra.rounds or (3 if s.quick else config["rounds"]), repeat=1)
            plain = values.get("bf16", {})
            for name, measured in values.items():
                cells: dict[str, Spread | None] = {}
                for part in ("forward", "backward", "optimizer", "step"):
                    cells[f"{part} ms"] = Spread.of(measured[part], 1e-6)
                    if plain and part != "optimizer":  # round by round: a slow moment of the machine is in both
                        cells[f"{part} x bf16"] = Spread.of(a / b for a, b in zip(measured[part], plain[part], strict=True))
                report.add(size=size, variant=name, **cells)
    report.save(s.output, s.tag)
    wide = Report("step", f"{report.title}, in steps of plain bf16 DDP", s.device, {})
    for row in report.rows:
        if not wide.rows or wide.rows[-1]["size"] != row["size"]:
            wide.add(size=row["size"])
        wide.rows[-1][row["variant"]] = row.get("step x bf16")
    bars(wide, s.picture("step"), "size", ["fp32", "bf16", "autocast", "pytorch", "replicate", "ddp_mp"], "times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
