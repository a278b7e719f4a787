"""Host time of mixed-precision bookkeeping, per parameter: PyTorch's own hooks, a clean Python rewrite, and ddp_mp.

    python -m benchmarks.hooks [--models gpt2,resnet50] [--real-size] [--quick]

One process; the three variants alternate.  Each iteration is a training step (forward, backward, AdamW, zero_grad), and
every hook is timed where it runs in it:

root        the hooks of the model: cast every parameter, switch every ``.data``, watch for the backward
wait        the pre-hooks of all other modules
backward    the hooks of gradients and outputs, the communication hook, what runs after the last gradient: pack,
            hand full-precision gradients over, put the masters back
reduce      the all-reduce of one process, which is in no sum: its length is the process group's

``python`` is what the same design costs without C: one resident arena, one flat loop, hooks registered once.  It does
less than ddp_mp (no accumulation, no unused parameters, no checks), so it is a lower bound for Python.  Models are cut
to tiny sizes unless ``--real-size`` is given: parameters and modules are as many as in reality, and bandwidth is out of
the way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from benchmarks.harness import Report, Settings, bars, model_names, one_process_group, settings
from ddp_mp.tools import shapes
from ddp_mp.tools.measure import KINDS, REDUCE, Spread, Variant, paired, total

PARAM_DTYPE = torch.bfloat16
REDUCE_DTYPE = torch.float32


class PythonRewrite:
    """Mixed precision for a DDP model as short as Python allows: every parameter used once, nothing accumulated."""

    def __init__(self, module: nn.Module, watch: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self.ddp = DistributedDataParallel(module)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.masters = {p: p.data for p in self.parameters}
        arena = torch.empty(sum(p.numel() for p in self.parameters), dtype=PARAM_DTYPE, device=self.parameters[0].device)
        lows = arena.split([p.numel() for p in self.parameters])
        self.rows = [(p, p.data, low.view_as(p)) for p, low in zip(self.parameters, lows, strict=True)]
        self.ddp.reducer._remove_autograd_hooks()
        self.ddp.register_comm_hook(None, _annotated(watch("backward", self.reduce)))
        self.ddp.reducer._set_mixed_precision_param_dtype(PARAM_DTYPE)
        module.register_forward_pre_hook(watch("root", self.cast))
        index = {p: i for i, p in enumerate(self.ddp._build_params_for_reducer()[0])}
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(watch("backward", self.ready(index[p])))

    def cast(self, *_: object) -> None:
        with torch.no_grad():
            for parameter, master, low in self.rows:
                low.copy_(master)
                parameter.data = low

    def ready(self, index: int) -> Callable[[torch.Tensor], None]:
        reducer = self.ddp.reducer
        return lambda _: reducer._autograd_hook(index)

    def reduce(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters = bucket.parameters()
        flat = torch.empty(sum(p.numel() for p in parameters), dtype=REDUCE_DTYPE, device=parameters[0].device)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            part.copy_(p.grad.view(-1))
            p.grad = None
            p.data = self.masters[p]
            p.grad = part.view_as(p)
        flat.div_(dist.get_world_size())
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda _: flat)


def _annotated(hook: Callable[..., Any]) -> Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    # DDP reads the signature of a communication hook, and a timed hook takes anything.
    def annotated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    annotated.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return annotated


class PythonVariant(Variant):
    """The rewrite, trained and timed as the others are."""

    def _wrap(self, module: nn.Module, policy: _MixedPrecision) -> DistributedDataParallel:
        return PythonRewrite(module, self.clock.watch).ddp


VARIANTS = ("pytorch", "python", "ddp_mp")


def measure(name: str, make: Callable[[], nn.Module], device: torch.device, rounds: int, report: Report) -> None:
    policy = _MixedPrecision(param_dtype=PARAM_DTYPE, reduce_dtype=REDUCE_DTYPE)

    def variant(how: str) -> Variant:
        kind = PythonVariant if how == "python" else Variant
        return kind(how, make().to(device), lambda ddp: shapes.loss_of(ddp, device), policy)

    variants = {how: variant(how) for how in VARIANTS}
    values = paired({how: v.step for how, v in variants.items()}, rounds)
    sample = make()
    count = len(list(sample.parameters()))
    for how in VARIANTS:
        kinds = values[how]
        spreads = {kind: Spread.of(kinds.get(kind, []), 1e-3) for kind in (*KINDS, REDUCE)}
        everything = Spread.of(total(kinds), 1e-3)
        ours = values["ddp_mp"]
        times = {  # round by round: a slow moment of the machine is in both
            "root": Spread.of(a / b for a, b in zip(kinds["root"], ours["root"], strict=True)),
            "sum": Spread.of(a / b for a, b in zip(total(kinds), total(ours), strict=True)),
        }
        report.add(
            model=name,
            parameters=count,
            modules=len(list(sample.modules())),
            variant=how,
            **{f"{kind} us": spread for kind, spread in spreads.items()},
            **{
                "sum us": everything,
                "root us/param": spreads["root"].scaled(1 / count),
                "sum us/param": everything.scaled(1 / count),
                **{f"{kind} x ddp_mp": spread for kind, spread in times.items() if how != "ddp_mp"},
            },
        )


def plot(report: Report, where: Settings) -> None:
    for column, picture in (("root us/param", "hooks-root"), ("sum us/param", "hooks-sum")):
        wide = Report(report.name, f"{report.title}: {column}", report.device, {})
        for row in report.rows:
            if not wide.rows or wide.rows[-1]["model"] != row["model"]:
                wide.add(model=row["model"])
            wide.rows[-1][row["variant"]] = row[column]
        bars(wide, where.picture(picture), "model", VARIANTS, "us a parameter", log=True)


def main(arguments: Sequence[str] | None = None) -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", type=model_names, help=f"some of {','.join(shapes.names())}")
        parser.add_argument("--real-size", action="store_true")
        parser.add_argument("--rounds", type=int, default=0)

    s = settings(__doc__, arguments, extend)
    everyday = ["resnet50", "bert_base", "gpt2", "gpt2_xl", "llama32_1b", "vit_base", "t5_base"]
    chosen = s.extra.models or (["vit_base"] if s.quick else everyday)
    rounds = s.extra.rounds or (3 if s.quick else 40)
    report = Report(
        "hooks-real-size" if s.extra.real_size else "hooks",
        f"host time of mixed-precision hooks in training, {'real' if s.extra.real_size else 'tiny'} sizes, "
        f"{str(PARAM_DTYPE)[6:]} with {str(REDUCE_DTYPE)[6:]} reduction",
        s.device,
        {"rounds": rounds, "models": chosen},
        [
            "pytorch: its own hooks, untied weights" + ("" if s.device.type == "cuda" else ", device events that do nothing"),
            "pytorch's all-reduce runs inside its reducer and cannot be taken out of its backward",
        ],
    )
    with one_process_group(s.device):
        for name in chosen:
            measure(name, lambda name=name: shapes.build(name, real_size=s.extra.real_size), s.device, rounds, report)
    report.save(s.output, s.tag)
    plot(report, s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
