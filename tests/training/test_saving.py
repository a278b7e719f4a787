"""Models and optimizers are saved and copied in full precision at any time."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from kit.modules import mlp, vectors
from kit.moments import MOMENTS, at, require_ordinary
from kit.oracle import BF16, F32, Trial, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


@on_ranks(2)
@pytest.mark.parametrize("moment", MOMENTS)
def test_state_dict_at_any_time_is_full_precision(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp())
    want = {name: p.detach().clone() for name, p in trial.oracle.module.named_parameters()}
    seen: list[int] = []

    def act() -> None:
        for prefix, state in (("module.", trial.ddp.state_dict()), ("", trial.module.state_dict())):
            for name, value in want.items():
                require_same(name, state[prefix + name], value)
        require_same("part", trial.module[2].state_dict()["weight"], want["2.weight"])
        seen.append(1)

    at(moment, trial, act)
    assert seen
    trial.train(vectors())


@on_ranks(2)
@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "in_forward"])
def test_deepcopy_at_any_time_is_an_ordinary_module(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp())
    copies: list[nn.Module] = []
    at(moment, trial, lambda: copies.extend([copy.deepcopy(trial.module), copy.deepcopy(trial.module[2])]))
    whole, part = copies
    for copied, original in ((whole, trial.oracle.module), (part, trial.oracle.module[2])):
        for (name, got), want in zip(copied.named_parameters(), original.parameters(), strict=True):
            require_same(name, got, want)
    require_ordinary(whole)
    require_ordinary(part)
    assert whole(torch.randn(2, 8)).dtype is F32
    with torch.no_grad():
        whole[0].weight.zero_()
    trial.check()
    Trial(rank, part).train(vectors())
    trial.train(vectors())


@on_ranks(2)
def test_deepcopy_as_an_average_model_follows_training(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    average = torch.optim.swa_utils.AveragedModel(trial.module)
    expected = copy.deepcopy(trial.oracle.module)
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    for seed in range(3):
        trial.backward(square_step, rank.inputs(vectors(), seed))
        optimizer.step()
        trial.oracle_step(torch.optim.SGD(trial.oracle.module.parameters(), lr=0.1))
        trial.zero_grad()
        with torch.no_grad():
            trial.ddp(torch.randn(4, 8))
        average.update_parameters(trial.module)
        for mean, new in zip(expected.parameters(), trial.oracle.module.parameters(), strict=True):
            mean.data = new.data.clone() if seed == 0 else mean.data + (new.data - mean.data) / (seed + 1)
    for got, want in zip(average.module.parameters(), expected.parameters(), strict=True):
        require_same("average", got, want, 1e-6)


@on_ranks(2)
@pytest.mark.parametrize("moment", ["new", "after_forward", "after_backward"])
def test_pickle_and_save_of_module_and_wrapper_are_full_precision(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp())
    loaded: list[nn.Module] = []

    def act() -> None:
        file = io.BytesIO()
        torch.save(trial.module, file)
        file.seek(0)
        loaded.append(torch.load(file, weights_only=False))
        loaded.append(pickle.loads(pickle.dumps(trial.module)))

    at(moment, trial, act)
    for module in loaded:
        require_ordinary(module)
        for (name, got), want in zip(module.named_parameters(), trial.oracle.module.parameters(), strict=True):
            require_same(name, got, want)
    trial.train(vectors())


@on_ranks(2)
@pytest.mark.parametrize("moment", ["new", "after_forward", "after_backward"])
def test_deepcopy_of_the_wrapper_is_an_unpatched_full_precision_wrapper(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp())
    copies: list[DistributedDataParallel] = []
    # process groups are not copied: DistributedDataParallel pickles without its own, and unpickles with the default
    at(moment, trial, lambda: copies.append(pickle.loads(pickle.dumps(trial.ddp))))
    (twin,) = copies
    assert not ddp_mp.is_patched(twin)
    for (name, got), want in zip(twin.module.named_parameters(), trial.oracle.module.parameters(), strict=True):
        require_same(name, got, want)
    twin(torch.randn(4, 8)).sum().backward()
    assert all(p.grad.dtype is F32 for p in twin.module.parameters())
    twin.zero_grad()
    twin_trial = Trial(rank, mlp())
    twin_trial.ddp, twin_trial.module = ddp_mp.patch(twin, mixed_precision=MIXED), twin.module
    for mine, theirs in zip(twin_trial.oracle.module.parameters(), twin.module.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    twin_trial.train(vectors())
    trial.train(vectors())


@on_ranks(1)
def test_output_saved_with_its_graph_is_saved_without_a_warning(rank: Rank) -> None:
    ddp = ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED)
    output = ddp(torch.randn(4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.BytesIO()
        torch.save({"output": output}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["output"], output)
