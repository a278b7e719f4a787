"""Where every microsecond of a training step goes, and what of it nobody could save.

    python -m benchmarks.parts [--models bert_base,gpt2_xl] [--real-size] [--quick]

Rows are in the order of a step.  ``us a step`` and ``ns a parameter`` are ours: each call into C, and the Python around it.
The other two columns are the floor: a twin of the model trains beside ours without DDP and without any of our bookkeeping,
and does only what mixed precision with ``.data`` switches cannot do without, each as bare as it can be called:

* cast and switch: the engine's ``cast``, ``lower`` and ``restore`` alone, which check nothing;
* gradients: PyTorch's own ``.grad`` and ``data_ptr``, called by ``map`` in one C loop; the conversion as one flat row.

``floor`` is measured in training, where forward, backward and optimizer have pushed the objects out of the cache; ``hot`` is
the same call repeated at once.  Ours prefetches gradients and the twin's ``map`` does not, so that ours may be below the floor
there.  The all-reduce of one process is in no sum.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp
from benchmarks.harness import Report, model_names, one_process_group, settings
from ddp_mp import _C, backward, buckets, comm, forward, leaves, reducer
from ddp_mp.tools import shapes
from ddp_mp.tools.measure import HookClock, Spread, now, paired

#: (part, what the twin does for it), in the order of a step; together they are all of our hooks.
ROOT = [
    ("root hook: Python", ()),
    ("root hook: get the leaves' memory", ()),
    ("root hook: check and cast", ("cast",)),
    ("root hook: match and place leaves", ("place",)),
    ("root hook: wait for the casts", ()),
]
REST = [
    ("after the forward: Python", ()),
    ("after the forward: look for writes, take leaves back", ("take back",)),
    ("backward starts: Python", ()),
    ("hook of a parameter", ()),
    ("bucket complete: Python", ()),
    ("bucket complete: get the gradients' memory", ()),
    ("bucket complete: pack", ("read .grad", "read pointers", "convert", ".grad = None", "let gradients go")),
    ("backward ends: Python", ()),
    ("backward ends: give the leaves' memory back", ()),
    ("backward ends: give gradients", ("set .grad",)),
    ("flags of C objects", ()),
]
REDUCE = "all-reduce"

METHODS: list[tuple[Any, str, str]] = [
    (forward.Forward, "_enter", "root hook: Python"),
    (leaves.Generation, "allocate", "root hook: get the leaves' memory"),
    (forward.Forward, "_leave", "after the forward: Python"),
    (backward.Backward, "start", "backward starts: Python"),
    (reducer.Reducer, "_bucket_ready", "bucket complete: Python"),
    (buckets.PackedBucket, "_full_memory", "bucket complete: get the gradients' memory"),
    (backward.Backward, "_finish", "backward ends: Python"),
    (leaves.Generation, "release", "backward ends: give the leaves' memory back"),
    (dist.ProcessGroup, "allreduce", REDUCE),
    (comm.Communicator, "wait", REDUCE),
]
ENGINE = {"check_and_cast": "root hook: check and cast", "wait": "root hook: wait for the casts"}
#: A backward places leaves and takes them back too.
LEAVES = {
    "match": "root hook: match and place leaves",
    "place": "root hook: match and place leaves",
    "changed": "after the forward: look for writes, take leaves back",
    "take_back": "after the forward: look for writes, take leaves back",
}
GRADIENTS = {
    "pack": "bucket complete: pack",
    "give": "backward ends: give gradients",
    **dict.fromkeys(("begin", "end", "reset", "unfired", "contributes", "lacks"), "flags of C objects"),
}


class Timed:
    """An object of the C extension, with some of its methods timed."""

    def __init__(self, inner: Any, clock: HookClock, parts: dict[str, str]) -> None:
        self._inner = inner
        for name, part in parts.items():
            setattr(self, name, clock.watch(part, getattr(inner, name)))
        if hasattr(inner, "hook"):
            self.hook = lambda row: clock.watch("hook of a parameter", inner.hook(row))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextlib.contextmanager
def timed_parts(
    clock: HookClock,
    methods: Sequence[tuple[Any, str, str]] = METHODS,
    engine_calls: dict[str, str] = ENGINE,
    gradient_calls: dict[str, str] = GRADIENTS,
    leaf_calls: dict[str, str] = LEAVES,
) -> Iterator[None]:
    """Models that are patched inside are timed while they train inside."""
    saved: list[tuple[Any, str, Any]] = [(_C, name, getattr(_C, name)) for name in ("Engine", "Gradients", "Leaves")]
    saved += [(owner, name, getattr(owner, name)) for owner, name, _ in methods]
    engine, gradients, leaf_type = _C.Engine, _C.Gradients, _C.Leaves
    _C.Engine = lambda *a: Timed(engine(*a), clock, engine_calls)
    if gradient_calls:
        _C.Gradients = lambda *a: Timed(gradients(*a), clock, gradient_calls)
    if leaf_calls:
        _C.Leaves = lambda *a: Timed(leaf_type(*a), clock, leaf_calls)
    for owner, name, part in methods:
        setattr(owner, name, clock.watch(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in saved:
            setattr(owner, name, function)


def ours(module: nn.Module, clock: HookClock, device: torch.device) -> Callable[[], dict[str, float]]:
    """The training step of a patched model, and the nanoseconds in each part."""
    policy = ddp_mp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=policy)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)

    def step() -> dict[str, float]:
        clock.reset()
        shapes.loss_of(ddp, device).backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock.read()

    return step


class Twin:
    """A model that trains with nothing but the calls around it that nobody can avoid."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.params = list(module.parameters())
        self.masters = [p.data for p in self.params]
        self.engine = _C.Engine(self.params, [str(i) for i in range(len(self.params))], [], "bfloat16", 2**20, 25 * 2**20)
        arenas = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _, _, nbytes in self.engine.buckets]
        lows = [
            arenas[b][o : o + 2 * p.numel()].view(torch.bfloat16).view(p.shape)
            for p, (b, o) in zip(self.params, self.engine.rows, strict=True)
        ]
        self.engine.bind(self.masters, lows, arenas)
        self.flat = torch.empty(sum(p.numel() for p in self.params), device=device)
        self.flat_low = torch.zeros_like(self.flat, dtype=torch.bfloat16)
        self.full = [
            v.view(p.shape) for v, p in zip(self.flat.split([p.numel() for p in self.params]), self.params, strict=True)
        ]
        sites = [(vars(m), key) for m in module.modules() for key, p in m._parameters.items() if p is not None]
        self.homes, self.keys = [home for home, _ in sites], [key for _, key in sites]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4)

    def step(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        grad, pointer = torch._C.TensorBase.grad, torch._C.TensorBase.data_ptr

        def call(name: str, work: Callable[[], Any]) -> Any:
            begin = now()
            result = work()
            spent[name] = now() - begin
            return result

        def every(function: Callable[..., Any], *arguments: Any) -> list[Any]:
            return list(map(function, *arguments))

        def each(function: Callable[..., Any], *arguments: Any) -> None:
            deque(map(function, *arguments), maxlen=0)

        def forward_calls(hot: str = "") -> None:
            call("cast" + hot, self.engine.cast)
            call("place" + hot, lambda: each(dict.__setitem__, self.homes, self.keys, repeat(self.params[0])))
            call("take back" + hot, lambda: each(dict.__delitem__, self.homes, self.keys))

        def gradient_calls(hot: str = "") -> None:
            found = call("read .grad" + hot, lambda: every(grad.__get__, self.params))
            call("read pointers" + hot, lambda: each(pointer, found))
            call("convert" + hot, lambda: _C.fuse([self.flat_low], [None], [self.flat], 1.0))
            call(".grad = None" + hot, lambda: each(grad.__set__, self.params, repeat(None)))
            call("let gradients go" + hot, found.clear)
            call("set .grad" + hot, lambda: each(grad.__set__, self.params, self.full))

        forward_calls()
        self.engine.wait()
        loss = shapes.loss_of(self.module, self.device)
        loss.backward()
        gradient_calls()
        del loss
        for _ in range(2):  # the second time everything is in the cache
            self.optimizer.zero_grad()
            forward_calls(" hot")
            self.engine.wait()
            each(grad.__set__, self.params, [torch.empty_like(p) for p in self.params])
            gradient_calls(" hot")
        self.flat.fill_(1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return spent


def summed(values: dict[str, list[float]], names: Sequence[str]) -> list[float]:
    """Round by round, the sum over ``names``."""
    return [sum(parts) for parts in zip(*(values[name] for name in names if name in values), strict=True)]


def measure(name: str, make: Callable[[], nn.Module], device: torch.device, rounds: int, report: Report) -> None:
    clock = HookClock()
    with timed_parts(clock):
        step = ours(make().to(device), clock, device)
        twin = Twin(make().to(device), device)  # before its engine would be timed, too: it is called directly
        values = paired({"ours": step, "twin": twin.step}, rounds)
    count = len(twin.params)

    def row(part: str, names: Sequence[str], floor: Sequence[str]) -> None:
        spent = Spread.of(summed(values["ours"], names), 1e-3)
        cold = Spread.of(summed(values["twin"], floor), 1 / count) if floor else None
        hot = Spread.of(summed(values["twin"], [f"{f} hot" for f in floor]), 1 / count) if floor else None
        report.add(
            model=name,
            part=part,
            **{"us a step": spent, "ns a parameter": spent.scaled(1e3 / count), "floor ns": cold, "hot ns": hot},
        )

    for part, floor in (*ROOT, *REST):
        row(part, [part], floor)
    for title, parts in (("root hook", ROOT), ("all bookkeeping", [*ROOT, *REST])):
        row(title, [part for part, _ in parts], [f for _, floor in parts for f in floor])
    row(REDUCE + ", in no sum", [REDUCE], ())
    report.notes.append(f"{name}: {count} parameters")


def main(arguments: Sequence[str] | None = None) -> int:
    def extend(parser: Any) -> None:
        parser.add_argument("--models", type=model_names, help=f"some of {','.join(shapes.names())}")
        parser.add_argument("--real-size", action="store_true")
        parser.add_argument("--rounds", type=int, default=0)

    s = settings(__doc__, arguments, extend)
    chosen = s.extra.models or (["vit_base"] if s.quick else ["bert_base", "gpt2_xl"])
    rounds = s.extra.rounds or (3 if s.quick else 60)
    report = Report(
        "parts-real-size" if s.extra.real_size else "parts",
        f"the parts of a step, {'real' if s.extra.real_size else 'tiny'} sizes, bfloat16 with float32 reduction",
        s.device,
        {"rounds": rounds, "models": chosen},
    )
    with one_process_group(s.device):
        for name in chosen:
            measure(name, lambda name=name: shapes.build(name, real_size=s.extra.real_size), s.device, rounds, report)
    report.save(s.output, s.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
