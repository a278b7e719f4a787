"""Counters of one patched model, and what this build is and what it found on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from . import _C
from .casts import summed_counters
from .model import model_of
from .root import root_of


@dataclass(frozen=True)
class Stats:
    """What a patched model has done since it was patched.

    When the plan is built anew (see ``rebuilds``), all counters begin again at 0 but ``forwards`` and ``rebuilds``; with
    ``hooks="root"``, ``casts`` goes on too.

    Attributes:
        forwards: forwards of the wrapped module, evaluation included.
        casts: how often the masters were cast, by a forward or ahead of it (``Options.prefetch``).
        skipped: forwards that skipped the casts, as the leaves held the masters' values already.
        launches: launches that cast a bucket; one per bucket and cast.
        buckets: cast buckets.
        parameters: parameters that are cast.
        fallbacks: single-parameter casts done by PyTorch, for parameters that the engine cannot read.
        bytes_read: bytes of masters that casts have read.
        bytes_written: bytes of leaves that casts have written.
        low_bytes: bytes of low-precision memory held now.
        waits: how often a stream was told to wait for a cast; on a CPU, how often the calling thread had to block.
        reductions: gradient buckets reduced.
        bytes_reduced: bytes that this rank put into reductions.
        rebuilds: times the plan was built anew because parameters were replaced.
        host_us: host time in microseconds of checking the masters and starting their casts, or running small ones on a CPU;
            with ``hooks="root"`` of switching ``.data`` too.
        backend: ``"host"``, ``"cuda"``, both joined by ``+``, or ``"none"`` when nothing is cast.
    """

    forwards: int
    casts: int
    skipped: int
    launches: int
    buckets: int
    parameters: int
    fallbacks: int
    bytes_read: int
    bytes_written: int
    low_bytes: int
    waits: int
    reductions: int
    bytes_reduced: int
    rebuilds: int
    host_us: float
    backend: str

    def __str__(self) -> str:
        width = max(len(field.name) for field in fields(self))
        return "\n".join(f"{name:<{width}}  {_shown(value):>16}" for name, value in asdict(self).items())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def stats(ddp: Any) -> Stats:
    """The counters of a patched model, which may be compiled, of this rank.

    It only reads counters: it runs no collective, waits for no device, and may be called at any time.

    Returns:
        A snapshot.  The difference between two of them says what a step did; ``print`` shows one as a table.

    Raises:
        ValueError: the model is not patched.
    """
    model, root = model_of(ddp), root_of(ddp)
    if model is not None:
        pool, reducer = model.plan.pool, model.plan.reducer
        return _filled(
            pool.counters(),
            {group.device.type for group in pool.groups},
            forwards=model.forward.forwards,
            casts=pool.casts,
            skipped=pool.reused,
            parameters=len(pool.rows),
            fallbacks=0 if pool.fallback is None else pool.fallback.casts,
            low_bytes=pool.nbytes,
            reductions=reducer.reductions,
            bytes_reduced=reducer.bytes_reduced,
            rebuilds=model.rebuilds,
        )
    if root is not None:
        return _filled(
            summed_counters(group.engine for group in root.groups),
            {group.rows[0].master.device.type for group in root.groups},
            forwards=root.casts,
            casts=root.casts,
            skipped=0,
            parameters=len(root.rows),
            fallbacks=0,
            low_bytes=sum(group.low_bytes() for group in root.groups),
            reductions=0,
            bytes_reduced=0,
            rebuilds=root.rebuilds,
        )
    raise ValueError("ddp_mp.stats: the model is not patched; call ddp_mp.patch(ddp) first")


def _filled(counters: dict[str, int], devices: set[str], **others: int) -> Stats:
    """Statistics from the engines' counters, the device types that they run on, and what else is known."""
    engines = {name: counters.get(name, 0) for name in ("launches", "buckets", "bytes_read", "bytes_written", "waits")}
    backend = "+".join("host" if device == "cpu" else device for device in sorted(devices)) or "none"
    return Stats(**others, **engines, host_us=counters.get("host_ns", 0) / 1000, backend=backend)


def build_info() -> dict[str, Any]:
    """What this build is, and what it found on this machine.

    No driver is called: before the first CUDA tensor, ``cuda`` says that CUDA is not used yet.  Any thread may call it.

    The result is a new dictionary in each call.  Of the build it holds ``version``, ``python``, ``compiler``, ``debug``, and
    ``cuda_image``: the size in bytes of the compiled kernels inside it and of their source, and a note that says how they
    were compiled or why they were not.  Of the machine it holds ``simd``, the instruction set that casts on the CPU, and
    ``simd_available``; ``cuda``, which kernels are used or why none are; ``cuda_driver``, the driver's version as CUDA writes
    it (0: not loaded); and ``torch``, PyTorch's version.
    """
    return {**_C.build_info(), "torch": torch.__version__}
