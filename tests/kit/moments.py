"""Moments of training at which a user may save, copy or write a model; and what such a copy must be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kit.oracle import BF16, Trial, mean_square, square_step

#: Times at which parameters may be copies: name -> brings a trial there, and ends what it began.
MOMENTS = ("new", "after_forward", "after_backward", "after_evaluation", "after_error", "in_forward", "after_step")


def at(moment: str, trial: Trial, act: Callable[[], None]) -> None:
    """Calls ``act`` at a moment of training."""
    x = torch.randn(4, 8)
    if moment == "after_forward":
        loss = mean_square(trial.ddp, x)
        act()
        loss.backward()
    elif moment == "after_evaluation":
        trial.ddp(x)
        act()
    elif moment == "after_error":
        with pytest.raises(RuntimeError):
            trial.ddp(torch.randn(4, 9))
        act()
    elif moment == "in_forward":
        handle = trial.module.register_forward_hook(lambda *_: act())
        square_step(trial.ddp, x)
        handle.remove()
    else:
        if moment != "new":
            square_step(trial.ddp, x)
        if moment == "after_step":
            torch.optim.SGD(trial.module.parameters(), lr=0.0).step()
        act()
    trial.zero_grad()


def require_ordinary(module: nn.Module) -> None:
    """Nothing of ours is on the module, its parameters or its hooks."""
    for inner in module.modules():
        assert "__getstate__" not in inner.__dict__, f"{inner}: __getstate__"
        for name in inner.__dict__:
            assert "ddp_mp" not in name, f"{inner}: {name}"
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                assert not inner.__dict__[name], f"{inner}: {name}"
    for name, param in module.named_parameters():
        assert set(param.__dict__) <= {"_is_leaf"}, f"{name}: {param.__dict__}"
        assert param.dtype is not BF16, name
        assert not param._post_accumulate_grad_hooks, name
        assert not param._backward_hooks, name
