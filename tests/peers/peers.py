"""PyTorch's own tests of ``DistributedDataParallel``, run on two gloo ranks against patched models.

    python tests/peers/peers.py            # runs them all, and writes docs/peer-tests.md

The tests are those of the installed torch (``torch.testing._internal.distributed.distributed_test``); nothing of them is here
but their names.  Nearly all of them are written for GPUs and are skipped without, by decorators that are taken off here; what
they ask of ``cuda`` is done on the CPU.  Every wrapper that they build is patched: one with ``mixed_precision=`` by
``ddp_mp.install()``, any other with the precision that the verdict is about, ``full`` (computing in full precision, so that
every number must be PyTorch's) or ``bfloat16``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests, where the kit is

import torch
import torch.distributed as dist
from kit.peer_verdicts import DIFFER, FULL_ONLY, NOT_HERE, PASS
from kit.ranks import Conversation, Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import ddp_mp

RANKS = 2
PRECISIONS = {
    "none": None,
    "full": ddp_mp.MixedPrecision(None, torch.float32),
    "bfloat16": ddp_mp.MixedPrecision(torch.bfloat16, torch.float32),
}


def load() -> type:
    """The class that holds PyTorch's tests; its module wants to be told about the run when it is imported."""
    told = {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "TEMP_DIR": tempfile.gettempdir()}
    for name, value in told.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed import distributed_test

    return distributed_test.DistributedTest._DistTestBase


def names() -> list[str]:
    """Tests that wrap a model, themselves or in a helper, or are called after DistributedDataParallel."""
    base = load()
    return [name for name in dir(base) if name.startswith("test") and _wraps(base, name, set())]


def _wraps(base: type, name: str, seen: set[str]) -> bool:
    if name in seen or not hasattr(base, name):
        return False
    seen.add(name)
    source = inspect.getsource(inspect.unwrap(getattr(base, name)))
    if "DistributedDataParallel" in source or "_ddp" in name.lower():
        return True
    return any(_wraps(base, helper, seen) for helper in re.findall(r"self\.(_\w+)\(", source))


# --- the CPU in the place of a GPU ---------------------------------------------------------------------------------------


def _cpu(value: Any) -> Any:
    """The CPU for whatever names a GPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return value


class OnCPU(TorchFunctionMode):
    """Operations that are asked for a GPU, by name or number."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            device = kwargs["device"]
            kwargs["device"] = torch.device("cpu") if isinstance(device, int) else _cpu(device)
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "to":
            args = (args[0], *("cpu" if type(a) is int else _cpu(a) for a in args[1:]))
        return function(*args, **kwargs)


def _module_to(original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    args = tuple("cpu" if type(a) is int else _cpu(a) for a in args)
    return original(self, *args, **{k: _cpu(v) for k, v in kwargs.items()})


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        for name in ("set_device", "synchronize", "manual_seed"):
            enter(replaced.object(torch.cuda, name, lambda *a, **k: None))
        enter(replaced.object(torch.cuda, "current_device", lambda: torch.device("cpu")))
        enter(replaced.object(nn.Module, "cuda", lambda self, *a, **k: self))
        to = nn.Module.to
        enter(replaced.object(nn.Module, "to", lambda self, *a, **k: _module_to(to, self, *a, **k)))
        enter(OnCPU())
        yield


# --- patched wrappers ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _patched(precision: ddp_mp.MixedPrecision) -> Iterator[None]:
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        mixed = kwargs.pop("mixed_precision", None)
        if precision is None:
            original(self, *args, **kwargs, mixed_precision=mixed)
            return
        original(self, *args, **kwargs)
        ddp_mp.patch(self, mixed_precision=mixed or precision)
        if mixed is not None:
            for param in (p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore):
                # fields of PyTorch's own hooks, whose types its tests look at
                param._mp_param, param._fp_param = torch.empty(0, dtype=mixed.param_dtype), param.data

    with replaced.object(DistributedDataParallel, "__init__", init):
        yield


def _case(rank: Rank) -> Any:
    """A test case with PyTorch's tests, for a rank of the group that is there."""
    base = load()
    from torch.testing._internal.common_utils import TestCase

    class Case(TestCase, base):  # type: ignore[misc, valid-type]
        world_size = rank.size

        def runTest(self) -> None:  # noqa: N802 - unittest's name
            """A test case needs one."""

        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            dist.barrier()

    case = Case()
    case.rank = rank.index
    return case


def conduct(rank: Rank, name: str, precision: str) -> str:
    """Runs one test on this rank, and says how it ended: "passes", or the error."""
    case = _case(rank)
    test = inspect.unwrap(getattr(type(case), name))
    torch.manual_seed(0)
    with warnings.catch_warnings(), _without_gpu(), _patched(PRECISIONS[precision]):
        warnings.simplefilter("ignore")
        try:
            test(case)
        except BaseException as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "passes"


# --- all of them ---------------------------------------------------------------------------------------------------------


def due(name: str, precision: str) -> str:
    """How the test should end: what its text begins with."""
    if name in DIFFER:
        return DIFFER[name][0 if precision == "full" else 1]
    return FULL_ONLY[name][0] if name in FULL_ONLY and precision == "bfloat16" else "passes"


def reason(name: str) -> str:
    """Why a test does not pass everywhere."""
    for table in (FULL_ONLY, DIFFER):
        if name in table:
            return table[name][-1]
    return NOT_HERE.get(name, "")


def serve(rank: Rank) -> None:
    """Runs what it hears of, and writes how it ended into the file that it is told."""
    for name, precision, path in rank.heard():
        text = conduct(rank, name, precision)
        if rank.index == 0:
            Path(path).write_text(text)


def ending(name: str, precision: str, path: Path) -> str:
    """How a test ends on fresh models, by the first rank."""
    talk = Conversation(RANKS, serve)
    talk.say((name, precision, str(path)))
    talk.end()
    return path.read_text()


def table(endings: dict[tuple[str, str], str]) -> str:
    """The file in docs."""
    lines = [
        "# PyTorch's own tests of DistributedDataParallel",
        "",
        f"Written by `make peers` with PyTorch {torch.__version__.split('+')[0]}: those tests of",
        "`torch.testing._internal.distributed` that wrap a model, on two gloo ranks, every wrapper patched.",
        '"full" computes in full precision: numbers must be those of PyTorch. Not run is what cannot be without GPUs, patched',
        "or not.",
        "",
        f"{len(PASS)} pass in both precisions, {len(FULL_ONLY)} in full precision, {len(DIFFER)} differ,",
        f"{len(NOT_HERE)} are not run.",
        "",
        "| test | full | bfloat16 | why |",
        "|---|---|---|---|",
    ]
    for name in sorted([*PASS, *FULL_ONLY, *DIFFER, *NOT_HERE]):
        said = [_short(endings.get((name, p), "not run")) for p in ("full", "bfloat16")]
        lines.append(f"| `{name.removeprefix('test_')}` | {said[0]} | {said[1]} | {reason(name)} |")
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    return text if text in ("passes", "not run") else text.split(":")[0]


def main() -> int:
    """Runs all, writes the table, and returns how many ended otherwise than expected."""
    endings, wrong = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted([*PASS, *FULL_ONLY, *DIFFER]):
            for precision in ("full", "bfloat16"):
                text = endings[name, precision] = ending(name, precision, Path(folder) / "ending")
                right = text.startswith(due(name, precision))
                wrong += not right
                print(f"{'' if right else 'NOT AS EXPECTED: '}{name}, {precision}: {text[:200]}", flush=True)
    written = Path(__file__).parents[2] / "docs" / "peer-tests.md"
    written.write_text(table(endings))
    print(f"{len(endings)} endings, {wrong} not as expected; {written.name} is written")
    return wrong


if __name__ == "__main__":
    import peers  # ranks import what they run by the name of its module

    sys.exit(bool(peers.main()))
