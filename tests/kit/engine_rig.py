"""An engine over the parameters of a module, as the Python layer makes it."""

from __future__ import annotations

import torch
from torch import nn

from kit.inside import _C

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = {"bfloat16": BF16, "float16": FP16, "float32": torch.float32}


class Rig:
    """An engine over the parameters of a module, with arenas, lows and masters as the Python layer makes them."""

    def __init__(self, module: nn.Module, low: str = "bfloat16", limits: tuple[int, int] = (512, 2048), arenas: bool = True):
        self.module, self.dtype = module, DTYPES[low]
        self.names, self.params = map(list, zip(*module.named_parameters(), strict=True))
        rows = {id(p): i for i, p in enumerate(self.params)}
        self.sites = [
            (m._parameters, k, rows[id(p)]) for m in module.modules() for k, p in m._parameters.items() if p is not None
        ]
        self.engine = _C.Engine(self.params, self.names, self.sites, low, *limits)
        self.masters = [p.data for p in self.params]
        self.arenas = [torch.empty(n, dtype=torch.uint8) for _, _, n in self.engine.buckets] if arenas else None
        self.lows = [self._low(p, *place) for p, place in zip(self.params, self.engine.rows, strict=True)]
        self.bind()

    def _low(self, param: torch.Tensor, bucket: int, offset: int) -> torch.Tensor:
        if self.arenas is None:
            return torch.empty_like(param.data, dtype=self.dtype, memory_format=torch.preserve_format)
        size = param.numel() * self.dtype.itemsize
        flat = self.arenas[bucket][offset : offset + size].view(self.dtype)
        return flat.as_strided(param.shape, param.stride())

    def bind(self) -> None:
        self.engine.bind(self.masters, self.lows, self.arenas)

    def snapshot(self) -> list[torch.Tensor]:
        return [p.data.clone() for p in self.params]

    def assert_masters(self, expected: list[torch.Tensor]) -> None:
        assert not self.engine.is_low
        for name, p, e, m in zip(self.names, self.params, expected, self.masters, strict=True):
            assert p.dtype == e.dtype, name
            assert p.data_ptr() == m.data_ptr(), name
            assert torch.equal(p, e), name

    def assert_low(self, expected: list[torch.Tensor]) -> None:
        self.engine.wait()
        for name, p, e in zip(self.names, self.params, expected, strict=True):
            want = e.to(self.dtype)
            assert p.dtype == self.dtype, name
            assert p.stride() == e.stride(), name
            assert torch.equal(
                p.data.view(torch.int16 if p.element_size() == 2 else torch.int32),
                want.view(torch.int16 if p.element_size() == 2 else torch.int32),
            ), name


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(33, 17), nn.LayerNorm(17), nn.Linear(17, 5, bias=False))
