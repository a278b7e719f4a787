"""Cast bandwidth: one tensor, and all parameters of a model at once, against ``copy_`` and ``torch._foreach_copy_``.

    python -m benchmarks.cast [--device cuda] [--quick]

GB/s of bytes read and written, 1 GB = 1e9 bytes.  The fp32 side's size is given: figures of sizes that fit a cache are
the cache's.  ``plain copy`` is ``copy_`` between two fp32 tensors, which moves bytes and converts nothing; ``foreach`` is
``torch._foreach_copy_``.  Variants alternate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness import Report, Settings, bars, device_time, model_names, settings, synchronize
from ddp_mp import _C
from ddp_mp.tools import shapes
from ddp_mp.tools.measure import Spread, paired

PAIRS = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)]
KIB, MIB = 2**10, 2**20


def timed(work: Callable[[], None], moved: int, device: torch.device) -> Callable[[], dict[str, float]]:
    # Small sizes are repeated until the clock can see them.
    repeat = max(1, min(200, (16 * MIB if device.type == "cpu" else 64 * MIB) // moved))

    def once() -> dict[str, float]:
        taken = device_time(work, device, repeat)
        return {"GB/s": moved / taken}

    return once


def single(s: Settings, sizes: Sequence[int], rounds: int) -> Report:
    report = Report("cast", "cast bandwidth of one tensor, GB/s", s.device, {"rounds": rounds})
    for source, target in PAIRS:
        for size in sizes:
            numel = size // 4
            src = torch.randn(numel, device=s.device).to(source)
            dst = torch.empty(numel, device=s.device, dtype=target)
            full = torch.empty(numel, device=s.device)
            also = torch.ones(numel, device=s.device)
            moved = numel * (source.itemsize + target.itemsize)
            work: dict[str, tuple[Callable[[], object], int]] = {
                "plain copy": (lambda full=full, also=also: full.copy_(also), numel * 8),
                "copy_": (lambda dst=dst, src=src: dst.copy_(src), moved),
                "foreach": (lambda dst=dst, src=src: torch._foreach_copy_([dst], [src]), moved),
                "ddp_mp": (lambda dst=dst, src=src: _C.cast(src, dst), moved),
            }
            values = paired({k: timed(f, n, s.device) for k, (f, n) in work.items()}, rounds, repeat=1)
            report.add(
                cast=f"{str(source)[6:]} to {str(target)[6:]}",
                size=f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB",
                **{k: Spread.of(v["GB/s"]) for k, v in values.items()},
                **{"x copy_": times(values)},
            )
            check(src, dst)
    return report


def times(values: dict[str, dict[str, list[float]]], peer: str = "copy_") -> Spread:
    """How many times as fast as a peer ours is, round by round."""
    return Spread.of(a / b for a, b in zip(values["ddp_mp"]["GB/s"], values[peer]["GB/s"], strict=True))


def check(src: torch.Tensor, dst: torch.Tensor) -> None:
    dst.zero_()
    _C.cast(src, dst)
    synchronize(src.device)
    if not torch.equal(dst, src.to(dst.dtype)):
        raise AssertionError(f"cast of {src.numel()} {src.dtype} to {dst.dtype} differs from Tensor.to")


def whole(s: Settings, names: Sequence[str], rounds: int) -> Report:
    report = Report("cast-model", "cast of all parameters of a model, float32 to bfloat16, GB/s", s.device, {"rounds": rounds})
    for name in names:
        model = shapes.build(name, real_size=not s.quick)
        sources = [p.detach().to(s.device) for p in model.parameters()]
        targets = [torch.empty_like(p, dtype=torch.bfloat16) for p in sources]
        moved = sum(p.numel() for p in sources) * 6
        nothing: list[torch.Tensor | None] = [None] * len(sources)

        def loop(sources: list[torch.Tensor] = sources, targets: list[torch.Tensor] = targets) -> None:
            for src, dst in zip(sources, targets, strict=True):
                dst.copy_(src)

        work: dict[str, Callable[[], object]] = {
            "copy_ in a loop": loop,
            "foreach": lambda a=targets, b=sources: torch._foreach_copy_(a, b),
            "ddp_mp": lambda a=targets, b=sources, n=nothing: _C.fuse(b, n, a, 1.0),
        }
        values = paired({k: timed(f, moved, s.device) for k, f in work.items()}, rounds, repeat=1)
        for dst in targets:
            dst.zero_()
        _C.fuse(sources, nothing, targets, 1.0)
        synchronize(s.device)
        if not all(torch.equal(d, p.to(d.dtype)) for d, p in zip(targets, sources, strict=True)):
            raise AssertionError(f"{name}: the cast differs from Tensor.to")
        report.add(
            model=name,
            parameters=len(sources),
            elements=sum(p.numel() for p in sources),
            **{k: Spread.of(v["GB/s"]) for k, v in values.items()},
            **{"x foreach": times(values, "foreach")},
        )
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", type=model_names, help=f"some of {','.join(shapes.names())}")
        parser.add_argument("--rounds", type=int, default=0)

    s = settings(__doc__, arguments, extend)
    cuda = s.device.type == "cuda"
    sizes = [
        4 * KIB,
        16 * KIB,
        64 * KIB,
        256 * KIB,
        MIB,
        4 * MIB,
        16 * MIB,
        64 * MIB,
        512 * MIB,
        *([2048 * MIB] if cuda else []),
    ]
    rounds = s.extra.rounds or (3 if s.quick else 15)
    everyday = ["resnet50", "vit_base", "gpt2", *(["gpt2_xl", "llama3_8b"] if cuda else [])]
    chosen = s.extra.models or (["resnet50"] if s.quick else everyday)
    with torch.no_grad():
        report = single(s, [4 * KIB, MIB] if s.quick else sizes, rounds)
        report.save(s.output, s.tag)
        for source, target in PAIRS:
            name = f"{str(source)[6:]} to {str(target)[6:]}"
            part = Report("cast", f"{name}, GB/s", s.device, {}, rows=[r for r in report.rows if r["cast"] == name])
            picture = s.picture(f"cast-{name.replace(' ', '-')}")
            bars(part, picture, "size", ["plain copy", "copy_", "foreach", "ddp_mp"], "GB/s")
        whole(s, chosen, rounds).save(s.output, s.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
