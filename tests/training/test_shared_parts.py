"""Two patched models with a part in common: its gradients, and what is saved and copied of it while either is under way."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from kit.modules import column, scalar, vectors
from kit.oracle import BF16, F32, patched, require_same
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp


def two_with_a_common_part(wait: str) -> tuple[nn.Linear, Any, Any]:
    part = nn.Linear(8, 8)
    options = ddp_mp.Options(wait=wait, first_bucket_mb=2**-12, bucket_mb=2**-12)
    models = [nn.Sequential(part, nn.Linear(8, 4)) for _ in range(2)]
    first, second = (
        ddp_mp.patch(DistributedDataParallel(model), mixed_precision=ddp_mp.MixedPrecision(BF16, F32), options=options)
        for model in models
    )
    for ddp in (first, second):
        ddp(vectors()()).float().square().mean().backward()
        ddp.zero_grad()
    return part, first, second


def require_ordinary(copied: nn.Module, original: nn.Module) -> None:
    for (name, param), value in zip(copied.named_parameters(), original.parameters(), strict=True):
        require_same(name, param, value)
    for module in copied.modules():
        hooks = [key for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict) and value]
        assert hooks == []
        assert "__getstate__" not in vars(module)


@on_ranks(1)
@pytest.mark.parametrize("wait", ["root", "module"])
@pytest.mark.parametrize("gone", [None, "first", "second"])
def test_copies_of_a_common_part_are_ordinary_and_in_full_precision(rank: Rank, wait: str, gone: str | None) -> None:
    part, *wrappers = two_with_a_common_part(wait)
    masters = copy.deepcopy(part)
    if gone is not None:
        ddp_mp.unpatch(wrappers.pop(("first", "second").index(gone)))
    for ddp in wrappers:
        output = ddp(vectors()())
        assert part.weight.dtype is F32
        for made in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            require_ordinary(made, masters)
        output.float().square().mean().backward()
        for made in (copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))):
            require_ordinary(made, ddp.module)
        ddp.zero_grad()
    for ddp in wrappers:
        ddp_mp.unpatch(ddp)
    assert "__getstate__" not in vars(part)
    assert torch.equal(part.weight, masters.weight)


@on_ranks(2)
@pytest.mark.parametrize("order", list(itertools.permutations(range(2))))
@pytest.mark.parametrize("depth", [1, 2])
def test_gradients_of_a_common_part_are_those_of_both_models(rank: Rank, order: tuple[int, ...], depth: int) -> None:
    part = scalar(1.0)
    wrappers = [patched(nn.Sequential(*[part] * count)) for count in (depth, 1)]
    for _ in range(3):
        losses = [wrappers[index](column(rank.index + 1)).float().sum() for index in order]
        torch.stack(losses).sum().backward()
        assert part.weight.grad.item() == 1.5 * (depth + 1)
        wrappers[0].zero_grad()
