"""Ten thousand steps: as many objects, references and bytes at the end as once everything was used."""

from __future__ import annotations

import collections
import gc
import os
import sys

import pytest
import torch
from kit.modules import mlp
from kit.oracle import BF16, F32
from kit.ranks import Rank, on_ranks
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

STEPS, WARM = 10_000, 1_000
ALLOWED = 2 << 20  # of growth in 9,000 steps: 230 bytes a step


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def census() -> dict[str, int]:
    """Objects by type, as the collector sees them."""
    gc.collect()
    return collections.Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def references(ddp: DistributedDataParallel) -> list[int]:
    """To what every step touches, and to what C code counts most easily wrong."""
    params = list(ddp.parameters())
    return [sys.getrefcount(one) for p in params for one in (p, p.grad)] + [sys.getrefcount(one) for one in (False, F32)]


def step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
    """Of every kind in turn: plain, accumulated, evaluated, with and without old gradients."""
    if number % 4 == 1:
        with ddp.no_sync():
            ddp(x).float().square().mean().backward()
    elif number % 4 == 2:
        with torch.no_grad():
            ddp(x)
    ddp(x).float().square().mean().backward()
    optimizer.step()
    if number % 4 != 3:
        optimizer.zero_grad(set_to_none=number % 8 < 4)


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif("DDP_MP_UNDER_SANITIZER" in os.environ, reason="a sanitizer keeps freed memory")
@pytest.mark.timeout(900)  # under load
@on_ranks(1, seconds=800)
def test_steps_ten_thousand_leak_no_reference_and_no_memory(rank: Rank) -> None:
    ddp = DistributedDataParallel(mlp(4, 1), bucket_cap_mb=0.0001)
    ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
    optimizer, x = torch.optim.SGD(ddp.parameters(), lr=1e-3), torch.randn(2, 4)
    for number in range(WARM):
        step(ddp, optimizer, x, number)
    census()  # its own first use
    before, held, size = census(), references(ddp), resident()
    for number in range(WARM, STEPS):
        step(ddp, optimizer, x, number)
    grown = resident() - size
    after = census()
    assert references(ddp) == held
    more = {name: (before[name], count) for name, count in after.items() if count > before[name] + 8}
    assert not more
    assert grown < ALLOWED
