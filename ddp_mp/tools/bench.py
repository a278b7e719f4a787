"""Host time of the hooks, PyTorch's and ours, on this machine: ``python -m ddp_mp bench``.

Without further options a small GPT is trained.  ``--shapes NAME`` takes the parameters of a well-known architecture, and
``--model package.module:callable`` the model that the callable returns: either with its own forward, on the arguments that
``--input package.module:callable`` returns (a tuple: positional, a dict: by name, anything else: the only one), or a stand-in
for it that has its modules and parameters and computes next to nothing.  ``--step`` compares whole training steps instead.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import ddp_mp

from ..tensors import tensors_in
from . import shapes, steps
from .command import Parser
from .gpt import GPT
from .measure import KINDS, Spread, Variant, paired, total
from .show import progress, show_table

Loss = Callable[[nn.Module], torch.Tensor]
LAYERS, WIDTH = 12, 32


class SpecError(Exception):
    """An option that does not lead to a model or to its arguments; the text says why."""


# --- what is timed ---------------------------------------------------------------------------------------------------


def resolve(option: str, spec: str) -> Callable[[], Any]:
    """What ``package.module:callable`` names; SpecError by name."""
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise SpecError(f"{option}: expected package.module:callable, found {spec!r}")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise SpecError(f"{option}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise SpecError(f"{option}: {module_name!r} has no {path!r}")
        found = getattr(found, name)
    if not callable(found):
        raise SpecError(f"{option}: {spec!r} is not callable, but of type {type(found).__name__}")

    def call() -> Any:
        try:
            return found()
        except Exception as error:
            raise SpecError(f"{option}: {spec} raised {type(error).__name__}: {error}") from error

    return call


def module_of(spec: str) -> Callable[[], nn.Module]:
    """What builds the user's model: the same weights at every call."""
    build = resolve("--model", spec)

    def make() -> nn.Module:
        torch.manual_seed(0)
        module = build()
        if not isinstance(module, nn.Module):
            raise SpecError(f"--model: expected {spec} to return a torch.nn.Module, found {type(module).__name__}")
        if not any(p.requires_grad for p in module.parameters()):
            raise SpecError(f"--model: {spec} returned a module without a parameter that is trained")
        return module

    return make


def loss_on(spec: str, device: str) -> Loss:
    """The mean square of everything that the model's own forward returns for the user's arguments."""
    given = on_device(resolve("--input", spec)(), device)
    args = given if isinstance(given, tuple) else () if isinstance(given, dict) else (given,)
    kwargs = given if isinstance(given, dict) else {}

    def loss(model: nn.Module) -> torch.Tensor:
        outputs = [t for t in tensors_in(model(*args, **kwargs)) if t.requires_grad]
        if not outputs:
            raise SpecError("--input: the forward returned no tensor with a gradient")
        return torch.stack([t.float().square().mean() for t in outputs]).sum()

    return loss


def on_device(value: Any, device: str) -> Any:
    """``value`` with the tensors of its tuples, lists and dicts on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(on_device(v, device) for v in value)
    return {k: on_device(v, device) for k, v in value.items()} if type(value) is dict else value


def chosen(args: argparse.Namespace) -> tuple[str, Callable[[], nn.Module], Loss]:
    """Name, model and loss that the options ask for."""
    device = torch.device(args.device)
    if args.shapes:
        name = f"{args.shapes}, {'real' if args.real_size else 'tiny'} sizes"
        return name, lambda: shapes.build(args.shapes, real_size=args.real_size), lambda m: shapes.loss_of(m, device)
    if not args.model:
        tokens = torch.randint(256, (1, 8), device=device)
        width, layers = args.width or WIDTH, args.layers or LAYERS
        name = f"a GPT of {layers} layers, {width} wide"
        return name, lambda: GPT(width, layers, heads=2, tied=False), lambda m: m(tokens).float().square().mean()
    make = module_of(args.model)
    if args.input:
        loss = loss_on(args.input, args.device)
        try:
            loss(make().to(device)).backward()
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(f"--input: {args.model} on {args.input}: {type(error).__name__}: {error}") from error
        return f"{args.model} on {args.input}", make, loss
    original = make()
    try:
        shapes.stand_in(original)
    except ValueError as error:
        raise SpecError(f"--model: {args.model}: {error}") from error
    name = f"a stand-in for {args.model}, {'real' if args.real_size else 'tiny'} sizes"
    return name, lambda: shapes.stand_in(original, real_size=args.real_size), lambda m: shapes.loss_of(m, device)


# --- timing it -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(device: str) -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def variants_of(make: Callable[[], nn.Module], loss: Loss, device: str) -> tuple[dict[str, Variant], str]:
    """The model on both kinds of hooks, and why PyTorch's are left out, if they are."""
    policy = ddp_mp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    variants, why = {}, ""
    try:
        native = Variant("pytorch", make().to(device), loss, policy)
        native.step()  # tied weights, for one, fail at the second gradient
        variants["pytorch"] = native
    except Exception as error:
        sentence = (str(error).strip().splitlines() or [""])[0].split(". ")[0]
        why = f"{type(error).__name__}: {sentence}"
    variants["ddp_mp"] = Variant("ddp_mp", make().to(device), loss, policy)
    return variants, why


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; exits with status 2 for ones that contradict each other."""
    text = "Host time of the hooks, PyTorch's and ours, on this machine: a small GPT's, an architecture's or your model's."
    parser = Parser("bench", text)
    parser.add_argument("--step", action="store_true", help="compare whole training steps: fp32, autocast, ddp_mp and both")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="MODULE:CALLABLE", help="a function or class that returns your model")
    what.add_argument(
        "--shapes", choices=shapes.names(), metavar="NAME", help=f"a known architecture: {', '.join(shapes.names())}"
    )
    parser.add_argument(
        "--input",
        metavar="MODULE:CALLABLE",
        help="a function that returns the arguments of your model's forward, which is run then; without it a stand-in is timed",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="make parameters small, so that only host time is left (the default)")
    size.add_argument("--real-size", action="store_true", help="give parameters their real sizes")
    parser.add_argument("--layers", type=int, help=f"number of layers of the GPT (default: {LAYERS})")
    parser.add_argument("--width", type=int, help=f"width of the GPT, a multiple of 2 (default: {WIDTH})")
    parser.add_argument("--rounds", type=int, default=50, help="how often each variant is timed (default: 50)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=["cpu", "cuda"], help=f"where to train (default here: {device})")
    args = parser.parse_args(list(arguments))
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device on this machine")
    if args.step and (args.shapes or (args.model and not args.input)):
        parser.error("--step trains a model as it is: it needs --model together with --input, or neither of them")
    if args.rounds < 1 or (args.layers or 1) < 1 or args.layers == 0:
        parser.error("--layers and --rounds must be at least 1")
    if args.width is not None and (args.width < 2 or args.width % 2):
        parser.error("--width must be a positive multiple of 2")
    if (args.model or args.shapes) and (args.layers or args.width):
        parser.error("--layers and --width are those of the GPT: not with --model or --shapes")
    if args.input and not args.model:
        parser.error("--input needs --model")
    if (args.tiny or args.real_size) and (args.input or not (args.model or args.shapes)):
        parser.error("--tiny and --real-size need --shapes, or --model without --input")
    return args


def main(arguments: Sequence[str] = ()) -> int:
    """``python -m ddp_mp bench``; returns the exit status."""
    args = parsed(arguments)
    if not args.step:
        torch.set_num_threads(1)
    logging.getLogger("torch.nn.parallel.distributed").setLevel(logging.ERROR)

    def shown(rounds: range) -> Any:
        return progress(rounds, visible=sys.stderr.isatty(), unit="round")

    try:
        name, make, loss = chosen(args)
        with process_group(args.device):
            if args.step:
                return steps.compare(name, make, loss, args.device, args.rounds, shown)
            variants, why = variants_of(make, loss, args.device)
            parameters = list(variants["ddp_mp"].ddp.parameters())
            values = paired({how: v.step for how, v in variants.items()}, args.rounds, progress=shown)
    except SpecError as error:
        print(f"python -m ddp_mp bench: error: {error}", file=sys.stderr)
        return 2

    rows = []
    for how, measured in values.items():
        kinds = [str(Spread.of(measured.get(kind, []), 1e-3)) for kind in KINDS]
        sums = Spread.of(total(measured), 1e-3)
        rows.append((how, *kinds, str(sums), str(sums.scaled(1 / len(parameters)))))
    title = f"{name}: host time in hooks, us a step; {len(parameters)} parameters, {args.device}, median (p10-p90)"
    show_table(title, ("", *KINDS, "sum", "a parameter"), rows)
    if why:
        print(f"PyTorch's own hooks cannot train this model: {why}")
        return 0
    ratio = Spread.of(a / b for a, b in zip(total(values["pytorch"]), total(values["ddp_mp"]), strict=True))
    print(f"PyTorch's hooks take {ratio} times as long as ddp_mp's.")
    if args.device == "cpu":
        print("On a CPU PyTorch's hooks run with device events that do nothing; on a GPU they pay for real ones.")
    return 0
