"""Patching and unpatching at any time, and models that are wrapped twice: nothing of ours stays behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.modules import Luck, Two, column, mlp, no_luck, scalar, vectors
from kit.moments import MOMENTS, at, require_ordinary
from kit.oracle import BF16, F32, FP16, Trial, mean_square, patched, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules import module as of_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as of_optimizer

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


@on_ranks(2)
@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "in_forward"])
def test_unpatch_at_any_time_leaves_an_ordinary_model_that_trains(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp(), how="later")

    def act() -> None:
        assert ddp_mp.unpatch(trial.ddp) is trial.ddp
        assert not ddp_mp.is_patched(trial.ddp)
        for got, want in zip(trial.module.parameters(), trial.oracle.module.parameters(), strict=True):
            require_same("master", got, want)

    if moment == "after_forward":
        mean_square(trial.ddp, torch.randn(4, 8))
        act()
    else:
        at(moment, trial, act)
    trial.zero_grad()
    assert {"_ddp_mp", "register_comm_hook", "_register_fused_optim", "__getstate__"}.isdisjoint(trial.ddp.__dict__)
    assert trial.ddp.mixed_precision is None
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        output = trial.ddp(xs[rank.index])
        assert output.dtype is F32
        output.square().mean().backward()
        reference = copy.deepcopy(trial.oracle.module)
        sum(reference(x).square().mean() for x in xs).div(rank.size).backward()
        for got, want in zip(trial.module.parameters(), reference.parameters(), strict=True):
            require_same("gradient", got.grad, want.grad, 1e-5)
        trial.zero_grad()
    ddp_mp.patch(trial.ddp, mixed_precision=MIXED)
    trial.train(vectors())
    ddp_mp.unpatch(trial.ddp)
    require_ordinary(trial.module)


@on_ranks(2)
@pytest.mark.parametrize("what", ["unpatch", "patch that fails"])
def test_unpatch_in_inference_mode_leaves_an_ordinary_model_that_trains(rank: Rank, what: str) -> None:
    ddp = DistributedDataParallel(scalar())
    with torch.inference_mode():
        if what == "unpatch":
            ddp_mp.patch(ddp, mixed_precision=MIXED)
            assert ddp(column(3)).dtype is BF16
            ddp_mp.unpatch(ddp)
        else:
            with pytest.raises(ValueError, match="matches no module"):
                ddp_mp.patch(ddp, mixed_precision=MIXED, options=ddp_mp.Options(full_precision_modules=("none",)))
    assert not ddp_mp.is_patched(ddp)
    for _ in range(3):
        ddp(column(rank.index + 1)).sum().backward()
        assert ddp.module.weight.grad.item() == 1.5
        ddp.zero_grad()
    ddp_mp.patch(ddp, mixed_precision=MIXED)
    ddp(column(rank.index + 1)).sum().backward()
    assert ddp.module.weight.grad.item() == 1.5


@on_ranks(2)
def test_unpatch_after_forward_makes_its_backward_an_error(rank: Rank) -> None:
    trial = Trial(rank, scalar(), how="later")
    weight = trial.module.weight
    loss = trial.ddp(column(rank.index + 1)).sum()
    ddp_mp.unpatch(trial.ddp)
    with pytest.raises(RuntimeError, match="run the forward again"):
        loss.backward()
    assert weight.dtype is F32
    assert weight.grad is None


@on_ranks(2)
def test_wrapper_that_is_a_temporary_lives_until_its_backward(rank: Rank) -> None:
    module = scalar()
    for _ in range(3):
        module.weight.grad = None
        ddp_mp.patch(DistributedDataParallel(module), mixed_precision=MIXED)(column(rank.index + 1)).sum().backward()
        assert module.weight.grad.item() == 1.5
        gc.collect()
        require_ordinary(module)


@on_ranks(2)
def test_unpatch_of_a_model_built_with_mixed_precision_gives_pytorchs_own_back(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    ddp_mp.unpatch(trial.ddp)
    assert trial.ddp.mixed_precision is trial.precision
    names = {getattr(hook, "__name__", "") for hook in trial.module._forward_pre_hooks.values()}
    assert {"_root_copy_hook", "_module_wait_for_copy_hook"} <= names
    assert all(p._mp_param.dtype is BF16 for p in trial.module.parameters())
    ddp_mp.patch(trial.ddp)
    names = {getattr(hook, "__name__", "") for hook in trial.module._forward_pre_hooks.values()}
    assert names.isdisjoint({"_root_copy_hook", "_module_wait_for_copy_hook"})
    assert not any(hasattr(p, "_mp_param") for p in trial.module.parameters())
    trial.train(vectors())


@on_ranks(2)
def test_unpatch_of_an_unpatched_model_does_nothing(rank: Rank) -> None:
    ddp = DistributedDataParallel(scalar())
    before = dict(ddp.__dict__)
    assert ddp_mp.unpatch(ddp) is ddp
    assert ddp.__dict__ == before


@on_ranks(2)
def test_patch_is_idempotent_and_says_what_differs(rank: Rank) -> None:
    ddp = DistributedDataParallel(mlp(), mixed_precision=MIXED)
    assert not ddp_mp.is_patched(ddp)
    options = ddp_mp.Options(bucket_mb=3)
    assert ddp_mp.patch(ddp, options=options) is ddp
    inside = ddp.__dict__["_ddp_mp"]
    for arguments in ({}, {"mixed_precision": MIXED}, {"options": ddp_mp.Options(bucket_mb=3)}):
        assert ddp_mp.patch(ddp, **arguments) is ddp
    assert ddp.__dict__["_ddp_mp"] is inside
    with pytest.raises(ValueError, match="bfloat16"):
        ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(FP16, F32))
    with pytest.raises(ValueError, match="bucket_mb=3"):
        ddp_mp.patch(ddp, options=ddp_mp.Options())
    assert ddp_mp.is_patched(ddp)


@on_ranks(2)
def test_patch_refuses_what_it_cannot_train_right(rank: Rank) -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        ddp_mp.patch(scalar())  # type: ignore[type-var]
    with pytest.raises(TypeError, match="Options"):
        ddp_mp.patch(DistributedDataParallel(scalar(), mixed_precision=MIXED), options="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mixed_precision=.*ddp_mp\.patch\(ddp, mixed_precision="):
        ddp_mp.patch(DistributedDataParallel(scalar()))
    with pytest.raises(TypeError, match="mixed_precision"):
        ddp_mp.patch(DistributedDataParallel(scalar()), mixed_precision=BF16)  # type: ignore[arg-type]


@on_ranks(1)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("full", [False, True])
def test_weight_that_is_renormalised_in_the_forward_reaches_the_master(rank: Rank, kind: Any, full: bool) -> None:
    model = nn.Sequential(kind(4, 8, max_norm=1.0), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    options = ddp_mp.Options(full_precision_modules=("0",) if full else ())
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED, options=options)
    untouched = model[0].weight[2:].detach().clone()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            ddp(torch.tensor([[0, 1]])).float().sum().backward()
    messages = [str(warning.message) for warning in told if "written inside the forward" in str(warning.message)]
    assert len(messages) == (0 if full else 1)
    assert all("'0.weight'" in message for message in messages)
    assert model[0].weight[0].norm().item() == pytest.approx(1.0, rel=1e-3 if full else 1e-2)
    require_same("rows that the forward did not use", model[0].weight[2:], untouched)


@on_ranks(2)
def test_patch_refuses_an_optimizer_inside_backward(rank: Rank) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward

    module = scalar()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(module)
    with pytest.raises(RuntimeError, match=r"optimizer.*inside backward"):
        ddp_mp.patch(ddp, mixed_precision=MIXED)
    assert not ddp_mp.is_patched(ddp)
    patched = ddp_mp.patch(DistributedDataParallel(scalar()), mixed_precision=MIXED)
    with pytest.raises(RuntimeError, match="inside backward"):
        patched._register_fused_optim(torch.optim.SGD, lr=0.1)


@on_ranks(2)
def test_patch_refuses_delayed_all_reduce(rank: Rank) -> None:
    module = Two()
    delayed = [("a.weight", module.a.weight)]
    ddp = DistributedDataParallel(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.b.weight)
    with pytest.raises(RuntimeError, match="delay_all_reduce_named_params"):
        ddp_mp.patch(ddp, mixed_precision=MIXED)
    assert not ddp_mp.is_patched(ddp)


@on_ranks(2)
def test_patch_refuses_the_python_reducer(rank: Rank) -> None:
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        ddp = DistributedDataParallel(scalar())
        if not ddp._use_python_reducer:
            pytest.skip("this PyTorch decides later")
        with pytest.raises(RuntimeError, match="python_reducer"):
            ddp_mp.patch(ddp, mixed_precision=MIXED)
    finally:
        torch._dynamo.config.optimize_ddp = before


@on_ranks(2)
def test_patch_that_fails_leaves_a_plain_wrapper_that_trains(rank: Rank) -> None:
    ddp = DistributedDataParallel(scalar())
    with pytest.raises(Luck):
        ddp_mp.patch(ddp, mixed_precision=MIXED, options=Odd())
    assert not ddp_mp.is_patched(ddp)
    require_ordinary(ddp.module)
    ddp(column(rank.index + 1)).sum().backward()
    assert ddp.module.weight.grad.item() == 1.5


@on_ranks(2)
@pytest.mark.parametrize("where", ["between", "wrapper_pre_hook"])
def test_patch_between_iterations_or_in_a_hook_takes_effect(rank: Rank, where: str) -> None:
    model = scalar()
    ddp = DistributedDataParallel(model)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda m, *_: seen.append(m.weight.dtype))
    ddp(column(2)).sum().backward()
    assert model.weight.grad.item() == 2
    ddp.zero_grad()

    def patch(*_: Any) -> None:
        ddp_mp.patch(ddp, mixed_precision=MIXED)

    if where == "between":
        patch()
    else:
        ddp.register_forward_pre_hook(patch)
    for _ in range(2):
        ddp(column(rank.index + 1)).sum().backward()
        assert model.weight.grad.item() == 1.5
        ddp.zero_grad()
    assert seen == [F32, BF16, BF16]


@on_ranks(2)
@pytest.mark.parametrize("state", ["new", "trained", "static"])
def test_backward_of_a_forward_from_before_patch_is_reduced(rank: Rank, state: str) -> None:
    ddp = DistributedDataParallel(mlp(), static_graph=state == "static")
    x = rank.inputs(vectors())[rank.index]
    if state == "trained":
        ddp(x).sum().backward()
        ddp.zero_grad()
    expected = copy.deepcopy(ddp.module)
    for each in rank.inputs(vectors()):
        (expected(each).sum() / rank.size).backward()
    loss = ddp(x).sum()
    ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
    loss.backward()
    for ours, theirs in zip(ddp.module.parameters(), expected.parameters(), strict=True):
        require_same("gradient", ours.grad, theirs.grad, 1e-6)
    ddp.zero_grad()
    ddp(x).float().sum().backward()
    assert len(set(rank.gather(tuple(ddp.module[0].bias.grad.tolist())))) == 1


@on_ranks(2)
@pytest.mark.parametrize("before", ["nothing", "backward", "dropped"])
def test_gradients_outside_of_the_wrapper_are_not_reduced_after_patch(rank: Rank, before: str) -> None:
    ddp = DistributedDataParallel(scalar())
    if before != "nothing":
        loss = ddp(column(1)).sum()
        if before == "backward":
            loss.backward()
        del loss
    ddp.zero_grad()
    ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
    (ddp.module.weight * (rank.index + 1)).sum().backward()
    assert ddp.module.weight.grad.item() == rank.index + 1


@on_ranks(2)
def test_patch_keeps_gradients_and_optimizer_state(rank: Rank) -> None:
    model = scalar()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    ddp(column(2)).sum().backward()
    optimizer.step()
    ddp_mp.patch(ddp, mixed_precision=MIXED)
    assert model.weight.grad.item() == 2
    ddp(column(4)).sum().backward()
    assert model.weight.grad.item() == 6
    optimizer.step()
    assert model.weight.item() == 0.5 - 0.25 - 0.125 * 7


@on_ranks(2)
@pytest.mark.parametrize("first_patched", [True, False])
def test_wrapping_the_same_module_twice_gives_it_to_the_second(rank: Rank, first_patched: bool) -> None:
    model = mlp()
    first = Trial(rank, model, how="patch" if first_patched else "later")
    square_step(first.ddp, torch.randn(4, 8))
    first.ddp.zero_grad()
    second = Trial(rank, model, how="later")
    assert not ddp_mp.is_patched(first.ddp)
    second.train(vectors(), accumulate=2)
    assert ddp_mp.stats(second.ddp).casts == 6
    ddp_mp.unpatch(second.ddp)
    require_ordinary(model)


@on_ranks(2)
def test_wrapping_the_same_module_in_a_plain_wrapper_is_refused_where_it_would_train(rank: Rank) -> None:
    module = scalar()
    first, plain = patched(module), DistributedDataParallel(module)
    with pytest.raises(RuntimeError, match="reduce nothing: call the patched wrapper"):
        plain(column(1))
    with torch.no_grad():
        plain(column(1))
    first(column(rank.index)).sum().backward()
    assert module.weight.grad.item() == 0.5
    module.weight.grad = None
    ddp_mp.unpatch(first)
    plain(column(rank.index)).sum().backward()
    assert module.weight.grad.item() == 0.5


class Odd(ddp_mp.Options):
    """Options with which a plan cannot be made."""

    @property
    def bucket_bytes(self) -> int:
        raise Luck


@contextlib.contextmanager
def failing(where: str) -> Iterator[dict[str, Any]]:
    """Something that a patch does raises Luck; yields arguments of patch."""
    patched = {"guards": (ddp_mp.model.everywhere, "add"), "buffers": (ddp_mp.patching, "cast_buffers")}
    with pytest.MonkeyPatch.context() as monkeypatch:
        if where in patched:
            monkeypatch.setattr(*patched[where], no_luck)
        yield {"mixed_precision": MIXED, "options": Odd() if where == "plan" else ddp_mp.Options()}


@on_ranks(2)
@pytest.mark.parametrize("where", ["options", "plan", "guards", "buffers", "root"])
def test_wrapping_the_same_module_twice_and_failing_loses_nothing(rank: Rank, where: str) -> None:
    first = Trial(rank, mlp())
    calls: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch checks annotations
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    first.ddp.register_comm_hook(None, hook)
    first.train(vectors(), accumulate=2)
    counts, inside = ddp_mp.stats(first.ddp), first.ddp.__dict__["_ddp_mp"]
    xs = rank.inputs(vectors(), 50)
    second = DistributedDataParallel(first.module)  # before the forward: it broadcasts, into what the parameters are
    loss = mean_square(first.ddp, xs[rank.index])
    if where == "options":
        with pytest.raises(ValueError, match="nothing"):
            ddp_mp.patch(second, mixed_precision=MIXED, options=ddp_mp.Options(full_precision_modules=("nothing",)))
    elif where == "root":
        with pytest.raises(ValueError, match="need both"):
            ddp_mp.patch(second, mixed_precision=ddp_mp.MixedPrecision(BF16), options=ddp_mp.Options(hooks="root"))
    else:
        with failing(where) as arguments, pytest.raises(Luck) as error:
            ddp_mp.patch(second, **arguments)
        assert error.traceback, "what was built is still referred to"
    assert not ddp_mp.is_patched(second)
    assert first.ddp.__dict__["_ddp_mp"] is inside
    del second
    loss.backward()
    first.oracle.backward(square_step, xs)
    first.check()
    assert ddp_mp.stats(first.ddp).casts == counts.casts + 1
    first.zero_grad()
    first.train(vectors(), seed=60, accumulate=2)
    assert len(calls) == ddp_mp.stats(first.ddp).reductions
    kept = first.ddp(torch.randn(4, 8))
    assert all(p.dtype is F32 for p in copy.deepcopy(first.module).parameters())
    del kept
    ddp_mp.unpatch(first.ddp)
    require_ordinary(first.module)


@on_ranks(2)
def test_patch_that_fails_to_cast_a_buffer_leaves_all_as_they_were(rank: Rank) -> None:
    class Refusing(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise Luck

    model = scalar()
    model.register_buffer("first", torch.ones(2))
    ddp = DistributedDataParallel(model)
    model.register_buffer("second", torch.ones(2).as_subclass(Refusing))
    with pytest.raises(Luck):
        ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(BF16, F32, BF16))
    assert model.first.dtype is F32
    require_ordinary(model)


@on_ranks(2)
def test_wrapping_the_same_module_twice_inside_a_forward_is_refused(rank: Rank) -> None:
    module = mlp()
    first = Trial(rank, module)
    second = DistributedDataParallel(module)

    def patch(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="a forward or backward of this model is under way"):
            ddp_mp.patch(second, mixed_precision=MIXED)

    handle = module[0].register_forward_hook(patch)
    square_step(first.ddp, torch.randn(4, 8))
    handle.remove()
    assert not ddp_mp.is_patched(second)
    ddp_mp.unpatch(first.ddp)
    assert first.ddp.mixed_precision is first.precision, "what the wrapper was built with is not forgotten"


@on_ranks(2)
@pytest.mark.parametrize("dropped", [False, True])
def test_wrapping_the_same_module_twice_outlives_graphs_of_the_first(rank: Rank, dropped: bool) -> None:
    model = mlp()
    first = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED)
    graph = first(torch.randn(4, 8))  # keeps the first patch
    if dropped:
        del first
    second = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED)
    del graph
    gc.collect()
    kept = second(torch.randn(4, 8))
    assert all(p.dtype is F32 for p in copy.deepcopy(model).parameters())
    del kept


@on_ranks(2)
def test_wrapping_again_after_the_first_wrapper_is_gone_works(rank: Rank) -> None:
    model = mlp()
    for repeat in range(3):
        trial = Trial(rank, model, how="later")
        trial.train(vectors(), seed=10 * repeat)
        reference = weakref.ref(trial.ddp)
        del trial
        gc.collect()
        assert reference() is None
        require_ordinary(model)


@on_ranks(2)
@pytest.mark.parametrize("moment", MOMENTS[:5])
@pytest.mark.parametrize("collect", [True, False])
def test_dropping_the_wrapper_frees_everything_and_leaves_an_ordinary_module(rank: Rank, moment: str, collect: bool) -> None:
    trial = Trial(rank, mlp(), how="later")
    if moment == "after_forward":
        mean_square(trial.ddp, torch.randn(4, 8))
    else:
        at(moment, trial, lambda: None)
    inside = trial.ddp.__dict__["_ddp_mp"]
    parts = [
        weakref.ref(part)
        for part in (
            trial.ddp,
            inside,
            inside.plan,
            inside.plan.pool,
            inside.plan.reducer,
            inside.plan.backward,
            inside.forward,
        )
    ]
    engines = [weakref.ref(group) for group in inside.plan.pool.groups]
    module, oracle = trial.module, trial.oracle
    gc.collect()
    if not collect:
        gc.disable()
    try:
        del trial, inside
        if collect:
            gc.collect()
            assert [ref() for ref in parts + engines] == [None] * (len(parts) + len(engines))
    finally:
        gc.enable()
    gc.collect()
    for got, want in zip(module.parameters(), oracle.module.parameters(), strict=True):
        require_same("master", got, want)
    require_ordinary(module)


@on_ranks(1)
@pytest.mark.parametrize("backward", ["none", "once", "kept"])
@pytest.mark.parametrize("full", [(), (nn.Tanh, "2")], ids=["low", "full"])
def test_module_that_keeps_its_output_goes_with_its_wrapper(rank: Rank, backward: str, full: tuple[Any, ...]) -> None:
    """The output's graph keeps what its backward needs of us: were the module part of that, nothing would ever free it."""
    model = mlp(8, 3)
    model.register_forward_hook(lambda module, _, output: module.__dict__.__setitem__("output", output))
    options = ddp_mp.Options(full_precision_modules=full, wait="module", first_bucket_mb=2**-12, bucket_mb=2**-12)
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED, options=options)
    for _ in range(2):
        loss = ddp(torch.randn(4, 8)).float().square().mean()
        if backward != "none":
            loss.backward(retain_graph=backward == "kept")
    gone = weakref.ref(model)
    del model, ddp, loss
    gc.collect()
    assert gone() is None


def process_wide_hooks() -> list[int]:
    """How many hooks for all modules and optimizers there are."""
    return [
        len(of_module._global_parameter_registration_hooks),
        len(of_module._global_module_registration_hooks),
        len(of_optimizer._global_optimizer_pre_hooks),
        len(of_optimizer._global_optimizer_post_hooks),
    ]


@on_ranks(2)
def test_hooks_of_the_process_go_with_the_last_model(rank: Rank) -> None:
    gc.collect()
    before = process_wide_hooks()
    kept = ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED)
    present = process_wide_hooks()
    for unpatched in (False, True):
        ddp = ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED)
        square_step(ddp, torch.randn(4, 8))
        if unpatched:
            ddp_mp.unpatch(ddp)
        del ddp
        gc.collect()
        assert process_wide_hooks() == present, "another model is patched"
    del kept
    gc.collect()
    assert process_wide_hooks() == before == [0, 0, 0, 0]


@on_ranks(2)
def test_hooks_of_the_process_stay_while_pytorch_goes_through_them(rank: Rank) -> None:
    models = [ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED)]
    hooks = (lambda *_: models.clear(), lambda *_: None)  # as if the collector ran in the first
    handles = [of_module.register_module_parameter_registration_hook(hook) for hook in hooks]
    try:
        nn.Linear(1, 1)
        assert not models
    finally:
        for handle in handles:
            handle.remove()
    ddp_mp.unpatch(ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED))
    assert process_wide_hooks() == [0, 0, 0, 0]
