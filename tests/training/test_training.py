"""Training loops: precisions, optimizers, accumulation, buckets.  Gradients and masters equal the oracle's after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.modules import column, mlp, scalar, vectors
from kit.oracle import BF16, F32, F64, FP16, SYNC_BUFFERS, Trial, mean_square, step_of
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

# --- precisions ----------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("how", ["patch", "install", "later"])
def test_training_plain_model_equals_oracle(rank: Rank, how: str) -> None:
    Trial(rank, mlp(), how=how).train(vectors(), steps=4)


@on_ranks(2, 3)
@pytest.mark.parametrize("reduce", [F32, BF16, FP16, F64, None], ids=str)
@pytest.mark.parametrize("param", [BF16, FP16], ids=str)
def test_training_every_reduce_dtype_equals_oracle(rank: Rank, param: torch.dtype, reduce: torch.dtype | None) -> None:
    Trial(rank, mlp(), ddp_mp.MixedPrecision(param, reduce)).train(vectors(), accumulate=2)


@on_ranks(2)
@pytest.mark.parametrize("reduce", [None, F32, BF16], ids=str)
def test_training_without_param_dtype_computes_in_full_precision(rank: Rank, reduce: torch.dtype | None) -> None:
    trial = Trial(rank, mlp(), ddp_mp.MixedPrecision(None, reduce, F32)).train(vectors())
    assert trial.ddp(torch.randn(4, 8)).dtype is F32
    assert ddp_mp.stats(trial.ddp).launches == 0


@on_ranks(2)
@pytest.mark.parametrize("same", [F32, BF16], ids=str)
def test_training_masters_in_param_dtype_are_not_cast(rank: Rank, same: torch.dtype) -> None:
    trial = Trial(rank, mlp().to(same), ddp_mp.MixedPrecision(same, same))
    with pytest.warns(UserWarning, match="without any cast"):
        trial.train(vectors(), steps=3)
    assert ddp_mp.stats(trial.ddp).parameters == 0


@on_ranks(2)
def test_training_float64_masters_equals_oracle(rank: Rank) -> None:
    Trial(rank, mlp().double(), ddp_mp.MixedPrecision(F32, F64)).train(vectors())


@on_ranks(2)
@pytest.mark.parametrize("reduce", [F32, F64, None], ids=str)
def test_training_masters_of_several_dtypes_keep_theirs(rank: Rank, reduce: torch.dtype | None) -> None:
    model = nn.Sequential(nn.Linear(8, 8).double(), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8))
    trial = Trial(rank, model, ddp_mp.MixedPrecision(BF16, reduce))
    trial.train(vectors(), accumulate=1)
    assert [p.dtype for p in model.parameters()] == [F64, F64, BF16, BF16, F32, F32]


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("param", "reduce", "value"), [(FP16, FP16, 40000.0), (BF16, BF16, 2.0**127), (BF16, F32, 2.0**127)], ids=str
)
def test_training_gradients_whose_sum_overflows_average_right(
    rank: Rank, param: torch.dtype, reduce: torch.dtype, value: float
) -> None:
    trial = Trial(rank, scalar(0.0), ddp_mp.MixedPrecision(param, reduce))
    trial.backward(step_of(lambda call, x: call(x).sum()), [column(value)] * rank.size)
    trial.check()
    assert trial.module.weight.grad.item() == pytest.approx(value, rel=4 * torch.finfo(reduce).eps if rank.size > 2 else 0)


@on_ranks(2)
def test_training_input_is_cast_and_output_is_low_precision(rank: Rank) -> None:
    seen: list[torch.dtype] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> torch.Tensor:
            seen.extend([x.dtype, more["a"][0].dtype, more["index"].dtype, self.inner.weight.dtype])
            return self.inner(x + more["a"][0])

    trial = Trial(rank, Looks())
    more = {"a": [torch.randn(4)], "index": torch.arange(3)}
    output = trial.ddp(torch.randn(2, 4), more=more)
    assert seen == [BF16, BF16, torch.int64, BF16]
    assert output.dtype is BF16


# --- optimizers and what users do to gradients ---------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, foreach=False),
    "sgd_foreach": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, foreach=True),
    "sgd_fused": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
}


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_every_optimizer_equals_oracle(rank: Rank, name: str, set_to_none: bool) -> None:
    Trial(rank, mlp()).train(vectors(), steps=5, optimizer=OPTIMIZERS[name], set_to_none=set_to_none)


@on_ranks(2)
def test_training_lbfgs_with_a_closure_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, mlp(4), ddp_mp.MixedPrecision(BF16, F32))
    xs = rank.inputs(vectors(width=4))
    ours = torch.optim.LBFGS(trial.module.parameters(), max_iter=3)
    theirs = torch.optim.LBFGS(trial.oracle.module.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        ours.zero_grad()
        loss = mean_square(trial.ddp, xs[rank.index])
        loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return total

    def closure_of_oracle() -> torch.Tensor:
        trial.oracle.zero_grad()
        losses = []

        def step(call: Any, x: torch.Tensor) -> None:
            losses.append(mean_square(call, x))
            losses[-1].backward()

        trial.oracle.backward(step, xs)
        for name, param in trial.oracle.module.named_parameters():
            param.grad = trial.oracle.grads[0][name]
        return losses[0].detach() + losses[1].detach()

    ours.step(closure)
    theirs.step(closure_of_oracle)
    trial.check()


@on_ranks(2)
def test_training_gradients_changed_in_place_between_backward_and_step_are_used(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        trial.backward(step_of(mean_square), xs)
        norm = nn.utils.clip_grad_norm_(trial.module.parameters(), 0.01)
        assert torch.isfinite(norm)
        total = torch.cat([p.grad.flatten() for p in trial.module.parameters()]).norm()
        assert torch.allclose(total, torch.tensor(0.01), rtol=1e-3)
        before = [p.detach().clone() for p in trial.module.parameters()]
        grads = [p.grad.clone() for p in trial.module.parameters()]
        optimizer.step()
        for param, old, grad in zip(trial.module.parameters(), before, grads, strict=True):
            assert torch.equal(param, torch.add(old, grad, alpha=-0.1))
        trial.zero_grad()


@on_ranks(2)
def test_training_gradients_kept_by_the_user_are_not_overwritten_by_the_next_step(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    kept, values = [], []
    for seed in range(3):
        trial.backward(step_of(mean_square), rank.inputs(vectors(), seed))
        kept.append([p.grad for p in trial.module.parameters()])
        values.append([p.grad.clone() for p in trial.module.parameters()])
        trial.zero_grad()
    for grads, copies in zip(kept, values, strict=True):
        assert all(torch.equal(g, c) for g, c in zip(grads, copies, strict=True))


@on_ranks(2)
def test_training_one_gradient_view_kept_by_the_user_is_not_overwritten(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    trial.backward(step_of(mean_square), rank.inputs(vectors(), 0))
    kept = trial.module[0].weight.grad[1:3]
    value = kept.clone()
    trial.zero_grad()
    trial.backward(step_of(mean_square), rank.inputs(vectors(), 1))
    assert torch.equal(kept, value)
    trial.check()


@on_ranks(2)
def test_training_gradients_set_by_the_user_are_added_to(rank: Rank) -> None:
    trial = Trial(rank, scalar())
    trial.module.weight.grad = torch.full((1, 1), 10.0 * (rank.index + 1))
    trial.ddp(column(2.0)).sum().backward()
    # as in DistributedDataParallel, the whole .grad is averaged: (10 + 20) / 2 + 2
    assert trial.module.weight.grad.item() == 17.0


@on_ranks(2)
@pytest.mark.parametrize("when", ["forward", "no_sync", "between"])
def test_training_zero_grad_at_unusual_times_equals_oracle(rank: Rank, when: str) -> None:
    trial = Trial(rank, mlp())
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        if when == "no_sync":
            trial.backward(step_of(mean_square), xs, sync=False)
        loss = mean_square(trial.ddp, xs[rank.index])
        if when == "between":
            trial.zero_grad()
        loss.backward()
        trial.oracle.backward(step_of(mean_square), xs)
        trial.check()
        if when == "forward":
            trial.zero_grad()


# --- accumulation --------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("reduce", [F32, BF16], ids=str)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_in_no_sync_equals_oracle(rank: Rank, reduce: torch.dtype, set_to_none: bool) -> None:
    Trial(rank, mlp(), ddp_mp.MixedPrecision(BF16, reduce)).train(vectors(), accumulate=3, set_to_none=set_to_none)


@on_ranks(2)
@pytest.mark.parametrize("order", ["sync_sync", "sync_local_sync", "local_sync_sync", "local_local", "sync_local_local_sync"])
def test_accumulation_orders_of_synchronised_and_local_steps_equal_oracle(rank: Rank, order: str) -> None:
    trial = Trial(rank, mlp())
    for repeat in range(2):
        for number, kind in enumerate(order.split("_")):
            xs = rank.inputs(vectors(), 10 * repeat + number)
            trial.backward(step_of(mean_square), xs, sync=kind == "sync")
            trial.check()
        trial.zero_grad()


@on_ranks(2)
def test_accumulation_forward_decides_whether_its_backward_is_synchronised(rank: Rank) -> None:
    model = scalar()
    ddp = Trial(rank, model).ddp
    with ddp.no_sync():
        local = ddp(column(rank.index + 1)).sum()
    synced = ddp(column(10)).sum()
    with ddp.no_sync():
        synced.backward()
    assert model.weight.grad.item() == 10.0
    local.backward()
    assert model.weight.grad.item() == 11.0 + rank.index


@on_ranks(2)
def test_accumulation_is_in_full_precision(rank: Rank) -> None:
    model = scalar()
    ddp = Trial(rank, model).ddp
    for value in (2.0**12, 1.0, 2.0**-8):
        with ddp.no_sync():
            ddp(column(value)).sum().backward()
    assert model.weight.grad.item() == 2.0**12 + 1 + 2.0**-8
    ddp(column(0.5)).sum().backward()
    assert model.weight.grad.item() == 2.0**12 + 1.5 + 2.0**-8


@on_ranks(2)
def test_accumulation_parameters_used_in_some_micro_steps_equal_oracle(rank: Rank) -> None:
    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.both = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) if self.both else self.a(x)

    trial = Trial(rank, Alternating())
    for seed in range(3):
        for both in (False, True):
            trial.module.both = trial.oracle.module.both = both
            trial.backward(step_of(mean_square), rank.inputs(vectors(), seed), sync=both)
            trial.check()
        trial.zero_grad()


@on_ranks(2)
def test_accumulation_with_a_gradient_scaler_leaves_full_precision_gradients(rank: Rank) -> None:
    trial = Trial(rank, mlp(), ddp_mp.MixedPrecision(FP16, F32))
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(3):
        for micro in range(2):
            xs = rank.inputs(vectors(), 2 * seed + micro)
            with trial.ddp.no_sync() if micro == 0 else torch.enable_grad():
                scaler.scale(mean_square(trial.ddp, xs[rank.index])).backward()
            trial.oracle.backward(step_of(lambda call, x: mean_square(call, x) * 2.0**10), xs, sync=micro == 1)
            trial.check()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        for name, param in trial.oracle.module.named_parameters():
            grad = trial.oracle.grads[rank.index][name]
            param.data.add_(grad / 2.0**10, alpha=-0.1)
        optimizer.zero_grad()
        trial.oracle.zero_grad()
        trial.check()


# --- buckets and options -------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("reduce", [F32, BF16], ids=str)
def test_buckets_many_small_ones_equal_oracle(rank: Rank, reduce: torch.dtype) -> None:
    trial = Trial(rank, mlp(32, 10), ddp_mp.MixedPrecision(BF16, reduce), bucket_cap_mb=0.002)
    trial.train(vectors(width=32), accumulate=2)
    assert ddp_mp.stats(trial.ddp).reductions >= 3 * 10


@on_ranks(2)
def test_buckets_are_reduced_during_backward(rank: Rank) -> None:
    trial = Trial(rank, mlp(32, 4), bucket_cap_mb=0.001)
    counts: list[int] = []
    trial.module[0].register_full_backward_hook(lambda *_: counts.append(ddp_mp.stats(trial.ddp).reductions))
    xs = rank.inputs(vectors(width=32))
    for _ in range(2):  # the first round shows that every gradient arrives once
        mean_square(trial.ddp, xs[rank.index].requires_grad_()).backward()
    first, second = counts
    assert second - first > 3, "the first round is reduced when it ends"
    assert first == 0
    assert second - ddp_mp.stats(trial.ddp).reductions // 2 >= 3, (
        "the last layers' gradients are reduced while the first layers' are computed"
    )


@on_ranks(2)
@pytest.mark.parametrize(
    "wrapping", [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 100}, {SYNC_BUFFERS: False}], ids=str
)
def test_buckets_wrapping_arguments_change_no_number(rank: Rank, wrapping: dict[str, Any]) -> None:
    Trial(rank, mlp(), **wrapping).train(vectors(), accumulate=2)


@on_ranks(2)
@pytest.mark.parametrize("wait", ["root", "module"])
@pytest.mark.parametrize("mb", [1e-6, 1e-3, 25.0])
def test_options_of_casting_change_no_number(rank: Rank, wait: str, mb: float) -> None:
    trial = Trial(rank, mlp(16, 4), options={"wait": wait, "first_bucket_mb": mb, "bucket_mb": 2 * mb})
    trial.train(vectors(width=16), steps=4)
    assert (ddp_mp.stats(trial.ddp).buckets > 1) == (mb < 1)


@on_ranks(2)
def test_training_several_models_side_by_side_do_not_disturb_each_other(rank: Rank) -> None:
    trials = [Trial(rank, mlp(8, 1 + k), ddp_mp.MixedPrecision((BF16, FP16)[k % 2], F32)) for k in range(3)]
    for seed in range(3):
        for trial in trials:
            trial.backward(step_of(mean_square), rank.inputs(vectors(), seed))
        for trial in trials:
            trial.check()
            trial.zero_grad()


@on_ranks(2)
def test_training_under_install_subclasses_are_patched_too(rank: Rank) -> None:
    class Own(DistributedDataParallel):
        def __init__(self, module: nn.Module, **arguments: Any) -> None:
            super().__init__(module, **arguments)
            self.extra = 1

    with ddp_mp.install():
        ddp = Own(scalar(), mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
    assert ddp_mp.is_patched(ddp)
    ddp(column(3)).sum().backward()
    assert ddp.module.weight.grad.item() == 3


def gapped() -> nn.Linear:
    """As :func:`scalar`, twice, in memory that is not dense: its gradients cannot be packed."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.full((1, 4), 0.5)[:, ::2]
    return model


@on_ranks(2)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("model", [scalar, gapped])
def test_accumulation_of_a_local_step_on_one_rank_only_equals_ddp(rank: Rank, model: Callable[[], Any], times: int) -> None:
    module = model()
    ddp = Trial(rank, module).ddp

    def backward(call: Callable[..., Any], x: torch.Tensor) -> float:
        call(x.expand(1, module.in_features)).sum().backward()
        return float(module.weight.grad[0, -1])

    for _ in range(2):
        assert backward(ddp, column(8)) == 8
        for k in range(times if rank.index == 0 else 0):
            assert backward(ddp.module, column(2).bfloat16()) == 10 + 2 * k
        # the mean of 8 + 2 + 4 and 8 + 4, as DistributedDataParallel averages all that is in .grad
        assert backward(ddp, column(4)) == 12 + times
        assert backward(ddp, column(1)) == 13 + times
        ddp.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("model", [scalar, gapped])
def test_accumulation_of_a_local_step_on_one_rank_only_zeroed_in_place_is_forgotten(
    rank: Rank, model: Callable[[], Any]
) -> None:
    module = model()
    ddp = Trial(rank, module).ddp
    ddp(column(8).expand(1, module.in_features)).sum().backward()
    if rank.index == 0:
        ddp.module(column(4).bfloat16().expand(1, module.in_features)).sum().backward()
    ddp.zero_grad(set_to_none=False)
    ddp(column(2).expand(1, module.in_features)).sum().backward()
    assert module.weight.grad[0, -1] == 2


@on_ranks(2)
@pytest.mark.parametrize("model", [scalar, gapped])
def test_accumulation_of_local_steps_that_are_scaled_equals_ddp(rank: Rank, model: Callable[[], Any]) -> None:
    module = model()
    ddp = Trial(rank, module).ddp
    ddp(column(8).expand(1, module.in_features)).sum().backward()
    ddp.module(column(4 * rank.index).bfloat16().expand(1, module.in_features)).sum().backward()
    module.weight.grad.mul_(0.5)  # as clipping does
    ddp(column(2).expand(1, module.in_features)).sum().backward()
    assert module.weight.grad[0, -1] == (8 / 2 + (8 + 4) / 2) / 2 + 2


@on_ranks(2)
def test_accumulation_of_local_steps_on_synchronised_gradients_follows_the_oracle(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    step = step_of(mean_square)
    for seed, sync in enumerate((True, False, False, True, False, True)):
        trial.backward(step, rank.inputs(vectors(), seed), sync)
        trial.check()


@on_ranks(2)
@pytest.mark.parametrize("sync", [True, False])
def test_gradients_set_by_hand_between_forward_and_backward_count_in_full_precision(rank: Rank, sync: bool) -> None:
    model = scalar()
    ddp = Trial(rank, model).ddp
    for _ in range(2):
        loss = ddp(column(1)).sum() if sync else ddp.module(column(1)).sum()
        model.weight.grad = torch.full_like(model.weight, 256)
        assert model.weight.grad.dtype is torch.float32, "a parameter is always its master"
        loss.backward()
        assert model.weight.grad.dtype is torch.float32
        assert model.weight.grad.item() == 257
        model.weight.grad = None
