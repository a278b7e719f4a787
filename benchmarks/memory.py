"""Memory of a training step: what each kind of mixed precision holds at its high points.

    python -m benchmarks.memory [--model gpt2] [--quick]

Each variant trains in a process of its own, because an allocator's memory outlives what asked for it.  On a CPU the
figures are the growth of the process: resident memory, read between the phases of a step and as its peak, the highest
seen over the steps; the allocator keeps some of what it was given back.  On a GPU they are what PyTorch's allocator has
given out.  Everything is counted in bytes of the fp32 parameters: 1.0 is one full-precision copy of the model.
``copies`` are the low-precision copies that are left after a backward.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_mp
from benchmarks.harness import Report, one_process_group, quiet, settings
from ddp_mp.tools import shapes
from ddp_mp.tools.upstream import silent_device_events

VARIANTS = ("fp32", "bf16", "pytorch", "ddp_mp")
PHASES = ("built", "forward", "backward", "optimizer", "peak", "copies")


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reader(device: torch.device) -> Callable[[], int]:
    return resident if device.type == "cpu" else lambda: torch.cuda.memory_allocated(device)


def copies_held(variant: str, ddp: DistributedDataParallel) -> int:
    """Bytes of low-precision copies of parameters, beside the masters."""
    if variant == "ddp_mp":
        return ddp_mp.stats(ddp).low_bytes
    lows = [getattr(p, "_mp_param", None) for p in ddp.parameters()]
    return sum(low.untyped_storage().size() for low in lows if low is not None)


def train(variant: str, name: str, real_size: bool, device_name: str, steps: int, answer: Any) -> None:
    """In a child process: puts {phase: bytes} of one variant into ``answer``."""
    quiet()
    torch.set_num_threads(1)
    device = torch.device(device_name)
    read = reader(device)
    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    events = silent_device_events() if variant == "pytorch" else contextlib.nullcontext()
    with one_process_group(device), events:
        # One small round first: what libraries keep for themselves is not this variant's.
        small = DistributedDataParallel(shapes.build("vit_base").to(device))
        shapes.loss_of(small, device).backward()
        del small
        start = read()
        module = shapes.build(name, real_size=real_size).to(device)
        parameters = sum(p.numel() for p in module.parameters()) * 4
        if variant == "bf16":
            module = module.to(torch.bfloat16)
        if variant == "pytorch":
            ddp = DistributedDataParallel(module, mixed_precision=policy)
        elif variant == "ddp_mp":
            ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=policy)
        else:
            ddp = DistributedDataParallel(module)
        # No state of its own, so that what is seen is DDP's.
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, foreach=False)
        seen: dict[str, int] = {"built": read() - start}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for step in range(steps):
            loss = shapes.loss_of(ddp, device)
            after_forward = read() - start
            loss.backward()
            after_backward = read() - start
            seen["copies"] = copies_held(variant, ddp)
            if step:
                optimizer.step()
            optimizer.zero_grad()
            after_optimizer = read() - start
            if step:  # the first one builds buckets and maps memory in
                for phase, value in (
                    ("forward", after_forward), ("backward", after_backward), ("optimizer", after_optimizer)
                ):  # fmt: skip
                    seen[phase] = max(seen.get(phase, 0), value)
        if device.type == "cuda":
            seen["peak"] = torch.cuda.max_memory_allocated(device) - start
        else:
            seen["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - start
        answer.put({"parameters": parameters, **seen})


def main(arguments: Sequence[str] | None = None) -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", default="gpt2", choices=shapes.names())

    s = settings(__doc__, arguments, extend)
    if s.device.type == "cpu" and not os.path.exists("/proc/self/statm"):
        print("memory: this system has no /proc/self/statm to read resident memory from", file=sys.stderr)
        return 1
    report = Report("memory", f"memory in copies of the fp32 parameters, {s.extra.model}", s.device, {"model": s.extra.model})
    context = multiprocessing.get_context("spawn")
    for variant in VARIANTS:
        answer = context.Queue()
        work = (variant, s.extra.model, not s.quick, s.device.type, 2 if s.quick else 4, answer)
        child = context.Process(target=train, args=work)
        child.start()
        try:
            seen = answer.get(timeout=600)
        except Exception:
            child.kill()
            raise RuntimeError(f"memory: the process of {variant} gave no answer (exit status {child.exitcode})") from None
        child.join()
        size = seen["parameters"]
        cells = {phase: round(seen[phase] / size, 3) for phase in PHASES if phase in seen}
        report.add(variant=variant, **{"parameters MiB": round(size / 2**20, 1)}, **cells)
    if s.quick:
        report.notes.append("tiny sizes: the figures mean nothing")
    report.save(s.output, s.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
