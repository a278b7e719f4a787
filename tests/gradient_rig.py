"""What the tests of _C.Gradients share: parameters with gradients, and the flat memory that the Python layer keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ddp_mp import _C

BF16, FP16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Rig:
    """Gradients over parameters, with what the Python layer keeps: flat memory a bucket and a view of it a row."""

    def __init__(self, params: Sequence[nn.Parameter], buckets: Sequence[Sequence[int]] | None = None):
        self.params = list(params)
        self.names = [f"p{i}" for i in range(len(self.params))]
        self.buckets = [list(range(len(self.params)))] if buckets is None else [list(b) for b in buckets]
        self.first: list[int] = []
        self.ready: list[int] = []
        self.early = True
        self.on_first: Callable[[int], Any] = lambda row: self.g.begin(self.early, row)
        self.g = _C.Gradients(self.params, self.names, self.buckets, lambda r: self._first(r), lambda b: self.ready.append(b))
        self.flats = [torch.full((self.numel(b),), 77.0, dtype=self.params[r[0]].dtype) for b, r in enumerate(self.buckets)]
        self.views = [self.split(b, flat) for b, flat in enumerate(self.flats)]

    def _first(self, row: int) -> None:
        self.first.append(row)
        self.on_first(row)

    def numel(self, bucket: int) -> int:
        return sum(self.params[r].numel() for r in self.buckets[bucket])

    def split(self, bucket: int, flat: torch.Tensor) -> list[torch.Tensor]:
        views, offset = [], 0
        for row in self.buckets[bucket]:
            p = self.params[row]
            views.append(flat[offset : offset + p.numel()].as_strided(p.shape, p.stride()))
            offset += p.numel()
        return views

    def hooks(self) -> None:
        for row, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(self.g.hook(row))

    def pack(self, bucket: int = 0, dtype: torch.dtype = F32, divisor: float = 1.0) -> torch.Tensor:
        out = torch.full((self.numel(bucket),), float("nan"), dtype=dtype)
        assert self.g.pack(bucket, out, divisor) == []
        return out


def grad_of(p: nn.Parameter, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A random gradient with the parameter's strides."""
    return torch.empty_strided(p.shape, p.stride(), dtype=dtype or p.dtype).copy_(torch.randn(p.shape))


def low(p: nn.Parameter, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Gives the parameter a gradient of another type than its own, as a backward through low precision leaves it."""
    grad = grad_of(p, dtype)
    master = p.data
    p.data = torch.empty_strided(p.shape, p.stride(), dtype=dtype)
    p.grad = grad
    p.data = master
    return grad


def params(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]


def hand_over_once(rig: Rig, value: float = 1.0) -> None:
    """A whole backward with reduction: every gradient is `value` and synced."""
    rig.g.begin(True)
    for b in range(len(rig.buckets)):
        rig.pack(b)
        rig.flats[b].fill_(value)
        assert rig.g.hand_over(b, rig.flats[b], rig.views[b], 1.0, None) == []
    rig.g.end()
    rig.g.reset()
