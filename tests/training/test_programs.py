"""Programs that people have, in small: what each needs to run as it is, and that its values are right then."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kit.modules import Two
from kit.oracle import BF16, F32, patched
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.functional import binary_cross_entropy, cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

PRECISION = ddp_mp.MixedPrecision(BF16, F32)


def patched_with(module: nn.Module, **options: Any) -> DistributedDataParallel:
    wrapper = DistributedDataParallel(module)
    return ddp_mp.patch(wrapper, mixed_precision=PRECISION, options=ddp_mp.Options(**options))


def require_close(ddp: DistributedDataParallel, plain: nn.Module, *inputs: Any) -> None:
    """Output and gradients are those of full precision, up to bfloat16's rounding."""
    found, due = ddp(*inputs), plain(*inputs)
    torch.testing.assert_close(found.float(), due, atol=0.05, rtol=0.05)
    found.float().square().mean().backward()
    due.square().mean().backward()
    for ours, theirs in zip(ddp.module.parameters(), plain.parameters(), strict=True):
        assert ours.grad.dtype is F32
        torch.testing.assert_close(ours.grad, theirs.grad, atol=0.05, rtol=0.05)


@on_ranks(1)
@pytest.mark.parametrize("autocast", [False, True])
def test_evaluation_calls_the_bare_module(rank: Rank, autocast: bool) -> None:
    ddp = patched_with(nn.Linear(8, 4), autocast=autocast)
    x = torch.randn(2, 8)
    ddp(x).float().sum().backward()
    with torch.no_grad():
        assert ddp.module(x).dtype is BF16
        assert torch.equal(ddp.module(x), ddp(x))
        with ddp_mp.full_precision(ddp):
            assert torch.equal(ddp.module(x), nn.functional.linear(x, ddp.module.weight, ddp.module.bias))


class Samples:
    """Inputs in a class of the user's own, as DETR's NestedTensor."""

    def __init__(self, tensors: torch.Tensor) -> None:
        self.tensors = tensors


@on_ranks(1)
@pytest.mark.parametrize("options", [{"autocast": True}, {"full_precision_modules": ("conv",)}], ids=str)
def test_inputs_come_in_a_class_of_their_own(rank: Rank, options: dict[str, Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rest = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, samples: Samples) -> torch.Tensor:
            return self.rest(self.conv(samples.tensors))

    plain = Net()
    require_close(patched_with(copy.deepcopy(plain), **options), plain, Samples(torch.randn(1, 3, 8, 8)))


class Dino(Two):
    """Concatenates a float32 tensor that it makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.cat((torch.empty(0), self.a(x))))


class Guided(Two):
    """Casts its own input to float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x.type(torch.float32)))


class Attention(nn.Module):
    """Has a float32 buffer as its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.register_buffer("mask", torch.full((3, 3), -2.0).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, attn_mask=self.mask[: x.size(0), : x.size(0)])[0]


@on_ranks(1)
@pytest.mark.parametrize("kind", [Dino, Guided, Attention])
def test_model_makes_or_keeps_float32_tensors(rank: Rank, kind: type[nn.Module]) -> None:
    plain = kind()
    require_close(patched_with(copy.deepcopy(plain), autocast=True), plain, torch.randn(3, 8))


@on_ranks(1)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_detached_and_zeroed_in_place(rank: Rank, autocast: bool) -> None:
    ddp = patched_with(nn.Linear(8, 4), autocast=autocast)
    for _ in range(2):
        ddp(torch.ones(2, 8)).float().sum().backward()
        assert ddp.module.weight.grad.unique().tolist() == [2.0]
        for p in ddp.parameters():
            p.grad.detach_()
            p.grad.zero_()


@on_ranks(1)
def test_loss_takes_no_bfloat16_beside_float32_targets(rank: Rank) -> None:
    plain = nn.Sequential(nn.Linear(8, 4), nn.Sigmoid())
    ddp = patched_with(copy.deepcopy(plain), output_dtype=F32)
    x, target = torch.randn(3, 8), torch.rand(3, 4)
    loss, due = binary_cross_entropy(ddp(x), target), binary_cross_entropy(plain(x), target)
    loss.backward()
    torch.testing.assert_close(loss, due, atol=0.02, rtol=0.02)


class Classifier(nn.Module):
    """Computes its loss itself, as the classifiers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(16, 64), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.classifier(self.body(x).tanh()), labels)


@on_ranks(1)
def test_loss_inside_the_model_is_float32_in_autocast_and_does_not_stop_at_zero(rank: Rank) -> None:
    torch.manual_seed(0)
    ddp, x = patched_with(Classifier(), autocast=True), torch.randn(64, 16)
    labels = (x[:, 0] > 0).long()
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-2)
    for _ in range(300):
        loss = ddp(x, labels)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    assert loss.dtype is F32
    assert 0 < loss.item() < 0.01
    assert norm.item() > 0
    with torch.no_grad(), ddp_mp.full_precision(ddp):
        true = ddp(x, labels).item()
    assert abs(true - loss.item()) < 0.1 * true


@on_ranks(1)
@pytest.mark.parametrize("options", [{"autocast": True}, {"cast_forward_inputs": False}], ids=str)
@pytest.mark.parametrize("bare", [False, True])
def test_inputs_that_are_no_activations_keep_their_bits(rank: Rank, options: dict[str, Any], bare: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1, bias=False)
            nn.init.constant_(self.linear.weight, 1.0)

        def forward(self, x: torch.Tensor, t: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> Any:
            out = self.linear(x.to(self.linear.weight.dtype)).float()
            return (out - target).square().sum(), t, torch.softmax(out + mask, -1)

    ddp = patched_with(Net(), **options)
    given = torch.ones(1, 1), torch.tensor([998.3897]), torch.full((1, 1), 257.0), torch.full((1, 2), torch.finfo(F32).min)
    loss, t, probabilities = (ddp.module if bare else ddp)(*given)
    assert (loss.item(), t.item(), probabilities.tolist()) == (65536.0, given[1].item(), [[0.5, 0.5]])


@on_ranks(1)
def test_copy_of_a_wrapper_is_an_ordinary_one(rank: Rank) -> None:
    ddp = patched(nn.Linear(8, 4))
    copied = copy.deepcopy(ddp)
    averaged = torch.optim.swa_utils.AveragedModel(ddp)
    assert not ddp_mp.is_patched(copied)
    assert not ddp_mp.is_patched(averaged.module)
    assert copied(torch.ones(1, 8)).dtype is F32
    ddp_mp.patch(copied, mixed_precision=PRECISION)
    assert copied(torch.ones(1, 8)).dtype is BF16
