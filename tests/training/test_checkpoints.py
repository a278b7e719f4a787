"""Activation checkpoints: of both modes, of blocks that are used several times, nested, around the whole wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.modules import Two, mlp, vectors
from kit.oracle import Trial
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(Two):
    """Both layers in checkpoints of one mode, or the second alone."""

    def __init__(self, reentrant: bool, first: bool = True) -> None:
        super().__init__()
        self.reentrant, self.first = reentrant, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._block(self.a, x) if self.first else self.a(x)
        return self._block(self.b, x.tanh())

    def _block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=self.reentrant)


@on_ranks(1, 2)
@pytest.mark.parametrize("wait", ["root", "module"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_blocks_equal_oracle(rank: Rank, reentrant: bool, first: bool, wait: str) -> None:
    # a reentrant block computes gradients only where its input requires them
    make = (lambda: torch.randn(4, 8).requires_grad_()) if reentrant and first else vectors()
    trial = Trial(rank, Checkpointed(reentrant, first), options={"wait": wait, "bucket_mb": 1e-4, "first_bucket_mb": 1e-4})
    trial.train(make, steps=4, accumulate=2)


class SharedBlocks(nn.Module):
    """One block in several checkpoints, as in weight-tied transformers."""

    def __init__(self, reentrant: bool, times: int = 3) -> None:
        super().__init__()
        self.entry, self.block = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant, self.times = reentrant, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for _ in range(self.times):
            x = checkpoint(lambda y: self.block(y).tanh(), x, use_reentrant=self.reentrant)
        return x


@on_ranks(2)
def test_checkpoint_shared_blocks_equal_oracle(rank: Rank) -> None:
    trial = Trial(rank, SharedBlocks(False))
    trial.train(vectors(), steps=4, accumulate=2)


@on_ranks(2)
@pytest.mark.parametrize("static", [False, True])
def test_checkpoint_reentrant_shared_blocks_equal_oracle(rank: Rank, static: bool) -> None:
    # one bucket: it is complete only when the first layer's gradient is there, after all uses of the block
    trial = Trial(rank, SharedBlocks(True), static_graph=static)
    trial.tolerance = 2**-6  # three low-precision gradients are summed in another order
    trial.train(vectors(), steps=4)


@on_ranks(2)
def test_checkpoint_reentrant_shared_blocks_in_buckets_of_their_own_equal_oracle(rank: Rank) -> None:
    """The first round shows that the block's gradients arrive more than once: no bucket is reduced before a backward ends."""
    trial = Trial(rank, SharedBlocks(True), bucket_cap_mb=0.0001)
    trial.tolerance = 2**-6  # three low-precision gradients are summed in another order
    trial.train(vectors(), steps=4)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_whole_wrapper_equals_oracle(rank: Rank, reentrant: bool) -> None:
    def step(call: Any, x: torch.Tensor) -> None:
        y = x.clone().requires_grad_()
        output = checkpoint(lambda t: call(t), y, use_reentrant=reentrant)
        output.float().square().mean().backward()

    trial = Trial(rank, mlp())
    trial.train(vectors(), step=step, steps=3)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_tied_weights_equals_oracle(rank: Rank, reentrant: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner = nn.Embedding(11, 8), nn.Linear(8, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.inner, self.embed(tokens), use_reentrant=reentrant)
            return F.linear(x, self.embed.weight)

    Trial(rank, Tied()).train(lambda: torch.randint(0, 11, (6,)), accumulate=2)


@on_ranks(2)
def test_checkpoint_nested_equals_oracle(rank: Rank) -> None:
    class Nested(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def outer(y: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.b, self.a(y).tanh(), use_reentrant=False)

            return checkpoint(outer, x, use_reentrant=False)

    Trial(rank, Nested()).train(vectors(), accumulate=2)
