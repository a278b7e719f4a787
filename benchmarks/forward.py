"""What a forward takes beyond that of a bfloat16 model, part by part.

    python -m benchmarks.forward [--sizes host,compute] [--quick]

The models and variants of ``benchmarks.step``, with the optimizer's step and the backward between the forwards.  The parts are

module             the wrapped module's own forward, which is the same arithmetic in all variants
casts, leaves      masters cast, leaves placed and taken back; in ``floor`` masters cast and ``.data`` switched, with no check
hooks              the rest of our hooks before and after the forward
wrapper            what is left: DistributedDataParallel's own forward around the module

``x bf16`` is the whole forward in forwards of plain bf16 DDP, round by round; ``extra`` is what casts, leaves and hooks alone
add to it.  The floor's extra is what nobody who casts masters in the forward gets below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.harness import Report, one_process_group, settings, synchronize
from benchmarks.parts import timed_parts
from benchmarks.step import SIZES, variants
from ddp_mp.model import model_of
from ddp_mp.tools.measure import HookClock, Spread, now, paired

PARTS = ("module", "casts, leaves", "hooks")
CASTS = dict.fromkeys(("begin", "cast", "check_and_cast", "wait", "lower"), "casts, leaves")
LEAVES = dict.fromkeys(("match", "place", "take_back", "changed"), "casts, leaves")
SHOWN = ("bf16", "alone", "floor", "ddp_mp")


def watched(make: Callable[[], nn.Module], clock: HookClock) -> nn.Module:
    """A model whose forward is timed part by part."""
    with timed_parts(clock, (), CASTS, {}, LEAVES):
        model = make()  # what is made of the C types now stays timed
    patched = model_of(model)
    for name in ("_enter", "_leave") if patched is not None else ():
        setattr(patched.forward, name, clock.watch("hooks", getattr(patched.forward, name)))
    inner = getattr(model, "module", model)
    inner.forward = clock.watch("module", inner.forward)
    return model


def stepper(model: nn.Module, clock: HookClock, tokens: torch.Tensor) -> Callable[[], dict[str, float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> dict[str, float]:
        synchronize(tokens.device)
        clock.reset()
        begin = now()
        output = model(tokens)
        whole = now() - begin
        spent = {part: clock.read().get(part, 0.0) for part in PARTS}
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        extra = spent["casts, leaves"] + spent["hooks"]
        return {"forward": whole, **spent, "wrapper": whole - spent["module"] - extra, "extra": extra}

    return step


def measure(size: str, device: torch.device, rounds: int, report: Report) -> None:
    config = SIZES[size]
    tokens = torch.randint(256, (config["batch"], config["length"]), device=device)
    steps = {}
    for name, (make, _) in variants(config, device).items():
        if name in SHOWN:
            clock = HookClock()
            steps[name] = stepper(watched(make, clock), clock, tokens)
    values = paired(steps, rounds, repeat=1)
    plain = values["bf16"]["forward"]
    for name in SHOWN:
        measured = values[name]
        cells = {f"{part} ms": Spread.of(measured[part], 1e-6) for part in ("forward", *PARTS, "wrapper")}
        for title, part in (("x bf16", "forward"), ("extra x bf16", "extra")):
            cells[title] = Spread.of(a / b for a, b in zip(measured[part], plain, strict=True))
        report.add(size=size, variant=name, **cells)


def main(arguments: Sequence[str] | None = None) -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--sizes", default="", help=f"some of {','.join(SIZES)}")
        parser.add_argument("--rounds", type=int, default=0)

    s = settings(__doc__, arguments, extend)
    report = Report("forward", "the parts of a forward", s.device, {"sizes": SIZES})
    with one_process_group(s.device):
        for size in (s.extra.sizes or ("host" if s.quick else "host,compute")).split(","):
            measure(size, s.device, s.extra.rounds or (3 if s.quick else SIZES[size]["rounds"]), report)
    report.save(s.output, s.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
