"""``Options.autocast``: what autocast leaves in full precision, and forwards that others replace."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from kit.oracle import BF16, F32, mean_square, require_same
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)
NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "batch": lambda: nn.BatchNorm1d(8),
    "batch in evaluation": lambda: nn.BatchNorm1d(8).eval(),
}


class Normal(nn.Module):
    """A norm of bfloat16 activations, or of float32 ones: those of a layer and a float32 tensor that the model keeps."""

    def __init__(self, norm: nn.Module, wide: bool) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), norm, nn.Linear(8, 8)
        self.register_buffer("places", torch.randn(8, dtype=F32 if wide else BF16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x) + self.places))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@on_ranks(2)
def test_norm_under_autocast_computes_what_autocast_does(rank: Rank, norm: str, wide: bool) -> None:
    module = Normal(NORMS[norm](), wide)
    plain = DistributedDataParallel(copy.deepcopy(module))
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=MIXED, options=ddp_mp.Options(autocast=True))
    x = torch.randn(4, 8)
    mean_square(ddp, x).backward()
    with torch.autocast("cpu", BF16):
        mean_square(plain, x).backward()
    for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        require_same(f"gradient of {name}", ours.grad, theirs.grad)
    for ours, theirs in zip(module.buffers(), plain.module.buffers(), strict=True):
        require_same("buffer", ours, theirs)


@on_ranks(1)
def test_statistics_under_autocast_keep_their_type(rank: Rank) -> None:
    mixed = ddp_mp.MixedPrecision(BF16, F32, BF16)
    for how in ("patch", "install"):
        module = Normal(nn.BatchNorm1d(8), wide=True)
        with ddp_mp.install(ddp_mp.Options(autocast=True)) if how == "install" else contextlib.nullcontext():
            ddp = DistributedDataParallel(module, mixed_precision=mixed)
        ddp_mp.patch(ddp, options=ddp_mp.Options(autocast=True))
        assert (module.norm.running_mean.dtype, module.places.dtype) == (F32, BF16), how
        mean_square(ddp, torch.randn(4, 8)).backward()


@on_ranks(1)
def test_norm_that_shares_a_weight_under_autocast_is_cast(rank: Rank) -> None:
    module = Normal(nn.LayerNorm(8), wide=False)
    module.a.bias = module.norm.bias
    seen = []
    module.norm.register_forward_pre_hook(lambda norm, args: seen.append((norm.weight.dtype, norm.bias.dtype)))
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=MIXED, options=ddp_mp.Options(autocast=True))
    mean_square(ddp, torch.randn(4, 8)).backward()
    assert seen == [(BF16, BF16)]


class Wide(nn.Linear):
    """Adds a float32 tensor of its own, which only autocast lets meet the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.ones(8))


@on_ranks(1)
def test_autocast_holds_in_a_function_put_in_place_of_the_forward(rank: Rank) -> None:
    module = Wide(8, 8)
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=MIXED, options=ddp_mp.Options(autocast=True))
    own = module.forward

    def step(x: torch.Tensor) -> torch.Tensor:
        module.forward = own  # what calls the module inside finds the forward that was there
        return Wide.forward(module, x)

    module.forward = step
    assert ddp(torch.ones(4, 8)).dtype is BF16
    module.forward = step
    with ddp_mp.full_precision(ddp):
        assert ddp(torch.ones(4, 8)).dtype is F32
    module.forward = step
    with pytest.raises(RuntimeError):
        ddp(torch.ones(4, 7))
    assert not torch.is_autocast_enabled("cpu")
