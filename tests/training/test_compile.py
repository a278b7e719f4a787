"""torch.compile with the eager backend, and other contexts around a model: autocast, hooks of saved tensors, torch.func."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.modules import column, mlp, scalar, vectors
from kit.oracle import BF16, F32, Trial, mean_square, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.parallel import DistributedDataParallel

import ddp_mp


@on_ranks(2)
@pytest.mark.parametrize("order", ["compiled_wrapper", "compiled_module", "compile_method", "compiled_layer"])
def test_compile_with_the_eager_backend_equals_oracle(rank: Rank, order: str) -> None:
    model = mlp()
    trial = Trial(rank, copy.deepcopy(model))
    if order == "compiled_module":
        wrapped = DistributedDataParallel(torch.compile(model, backend="eager"), mixed_precision=trial.precision)
        call: Any = ddp_mp.patch(wrapped)
    elif order == "compile_method":
        call = ddp_mp.patch(DistributedDataParallel(model, mixed_precision=trial.precision))
        call.compile(backend="eager")
    elif order == "compiled_layer":
        model[0].compile(backend="eager")
        call = ddp_mp.patch(DistributedDataParallel(model, mixed_precision=trial.precision))
    else:
        call = torch.compile(ddp_mp.patch(DistributedDataParallel(model, mixed_precision=trial.precision)), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(trial.oracle.module.parameters(), lr=0.1)
    for seed in range(4):
        xs = rank.inputs(vectors(), seed)
        # Were a hook traced, Dynamo would read `.grad` of the output, and that warning would be an error here.
        with torch.no_grad():
            assert call(xs[rank.index]).dtype is BF16
        loss = mean_square(call, xs[rank.index])
        loss.backward()
        trial.oracle.backward(square_step, xs)
        for (name, got), want in zip(model.named_parameters(), trial.oracle.module.parameters(), strict=True):
            require_same(f"master {name}", got, want)
            require_same(f"gradient of {name}", got.grad, trial.oracle.grads[rank.index][name])
        optimizer.step()
        trial.oracle_step(theirs)
        optimizer.zero_grad()
        trial.oracle.zero_grad()
    torch._dynamo.reset()


@on_ranks(2)
def test_compiled_wrapper_is_taken_for_the_wrapper_by_every_function(rank: Rank) -> None:
    ddp = DistributedDataParallel(scalar())
    compiled: Any = torch.compile(ddp, backend="eager")
    precision = ddp_mp.MixedPrecision(BF16, F32)
    assert not any(map(ddp_mp.is_patched, (compiled, nn.Module.__new__(nn.Module), None)))
    assert ddp_mp.patch(compiled, mixed_precision=precision) is compiled
    assert ddp_mp.patch(compiled, mixed_precision=precision) is compiled  # it is patched already
    assert ddp_mp.is_patched(compiled)
    assert ddp_mp.is_patched(ddp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        output = compiled(column(rank.index + 1))
    assert output.dtype is BF16
    with ddp_mp.full_precision(compiled):
        assert ddp.module.weight.dtype is F32
    output.sum().backward()
    assert ddp.module.weight.grad.item() == 1.5
    ddp_mp.masters_changed(compiled)
    assert ddp_mp.stats(compiled) == ddp_mp.stats(ddp)
    assert ddp_mp.unpatch(compiled) is compiled
    assert ddp_mp.unpatch(compiled) is compiled
    assert not ddp_mp.is_patched(ddp)
    for function in (ddp_mp.stats, ddp_mp.masters_changed):
        with pytest.raises(ValueError, match="not patched"):
            function(compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compiled(column(1)).dtype is F32
    with pytest.raises(TypeError, match=r"expected a DistributedDataParallel model, found torch\.nn\.modules\.linear\.Linear"):
        ddp_mp.patch(torch.compile(scalar(), backend="eager"), mixed_precision=precision)  # type: ignore[type-var]
    torch._dynamo.reset()


@on_ranks(2)
def test_compile_of_the_whole_training_step_with_the_eager_backend_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, mlp())

    def loss(x: torch.Tensor) -> torch.Tensor:
        return trial.ddp(x).float().square().mean()

    compiled = torch.compile(loss, backend="eager")
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler's own
            output = compiled(xs[rank.index])
        output.backward()
        trial.oracle.backward(square_step, xs)
        trial.check()
        trial.zero_grad()
    del compiled
    torch._dynamo.reset()


@on_ranks(2)
def test_autocast_around_the_model_equals_oracle(rank: Rank) -> None:
    def step(call: Any, x: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=BF16):
            loss = mean_square(call, x)
        loss.backward()

    trial = Trial(rank, mlp())
    trial.train(vectors(), step=step, accumulate=2)


@on_ranks(2)
def test_saved_tensor_hooks_around_the_model_equal_oracle(rank: Rank) -> None:
    def step(call: Any, x: torch.Tensor) -> None:
        with torch.autograd.graph.save_on_cpu():
            loss = mean_square(call, x)
        loss.backward()

    Trial(rank, mlp()).train(vectors(), step=step, accumulate=2)


Transform = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]

TRANSFORMS: dict[str, Transform] = {
    "jacrev": lambda call, x: jacrev(call)(x),
    "jacfwd": lambda call, x: jacfwd(call)(x),
    "hessian": lambda call, x: hessian(lambda t: call(t).square().sum())(x[0]),
    "jvp": lambda call, x: jvp(call, (x,), (x,))[1],
    "gradient of each sample": lambda call, x: vmap(grad(lambda t: call(t).square().sum()))(x),
}


def gapped_mlp() -> nn.Sequential:
    """A weight of it is cast by PyTorch."""
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(8, 16)[:, ::2])
    return model


@on_ranks(2)
@pytest.mark.parametrize("model", [mlp, gapped_mlp])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("whole", [True, False])
def test_transforms_of_torch_func_over_the_model_equal_the_low_copy(rank: Rank, model: Any, name: str, whole: bool) -> None:
    trial = Trial(rank, model())
    for seed in range(3):  # the first allocates what is used later; another graph needs the copies in the third
        x = rank.inputs(vectors(), seed)[rank.index].to(BF16)
        kept = trial.ddp.module(x) if seed == 2 else None
        low = copy.deepcopy(trial.oracle.module).to(BF16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own, of the first dual tensor
            require_same(name, TRANSFORMS[name](trial.ddp if whole else trial.module, x), TRANSFORMS[name](low, x))
        del kept
        trial.train(vectors(), steps=1, seed=10 * seed)
