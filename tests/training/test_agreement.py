"""Ranks compare what they were patched with before they reduce: an error names the rank and the field, on every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.inside import agreement, model_of
from kit.modules import Two, column, mlp, scalar, vectors
from kit.oracle import BF16, F32, FP16, Trial, patched, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

SOON = 1.5  # seconds: where no answer comes at all
LATER = 20.0

Build = Callable[[bool], tuple[DistributedDataParallel, dict[str, Any]]]


def two(**wrapper: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Two(), **wrapper)


def precision(param: Any = BF16, reduce: Any = F32, buffers: Any = None) -> dict[str, Any]:
    return {"mixed_precision": ddp_mp.MixedPrecision(param, reduce, buffers)}


def options(**fields: Any) -> dict[str, Any]:
    return precision() | {"options": ddp_mp.Options(agree_seconds=LATER, **fields)}


def frozen(odd: bool) -> tuple[DistributedDataParallel, dict[str, Any]]:
    ddp = two()
    ddp.module.b.bias.requires_grad_(not odd)
    return ddp, precision()


def hooked(odd: bool) -> tuple[DistributedDataParallel, dict[str, Any]]:
    ddp = two()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook if odd else default_hooks.allreduce_hook)
    return ddp, precision()


#: By field: what a rank patches, when it is the odd one and when not, and the two values in the error.
FIELDS: dict[str, tuple[Build, str, str]] = {
    "param_dtype": (lambda odd: (two(), precision(FP16 if odd else BF16)), "torch.float16", "torch.bfloat16"),
    "reduce_dtype": (lambda odd: (two(), precision(reduce=F32 if odd else BF16)), "torch.float32", "torch.bfloat16"),
    "buffer_dtype": (lambda odd: (two(), precision(buffers=BF16 if odd else None)), "torch.bfloat16", "None"),
    "output_dtype": (lambda odd: (two(), options(output_dtype=F32 if odd else None)), "torch.float32", "None"),
    "autocast": (lambda odd: (two(), options(autocast=odd)), "True", "False"),
    "cast_forward_inputs": (lambda odd: (two(), options(cast_forward_inputs=odd, autocast=True)), "True", "False"),
    "full_precision_modules": (
        lambda odd: (two(), options(full_precision_modules=("b",) if odd else ("a",))),
        "['b']",
        "['a']",
    ),
    "full_precision_outputs": (
        lambda odd: (two(), options(full_precision_modules=("b",), full_precision_outputs=("b",) if odd else ())),
        "['b']",
        "[]",
    ),
    "find_unused_parameters": (lambda odd: (two(find_unused_parameters=odd), precision()), "True", "False"),
    "static_graph": (lambda odd: (two(static_graph=odd), precision()), "True", "False"),
    "communication hook": (hooked, "fp16_compress_hook", "allreduce_hook"),
    "requires_grad": (frozen, "False", "True"),
    "number of gradient buckets": (lambda odd: (two(bucket_cap_mb=0.0001 if odd else 25), precision()), "2", "1"),
}


def is_cast(ddp: DistributedDataParallel, name: str) -> bool:
    """Whether a leaf stands for the parameter."""
    model = model_of(ddp)
    assert model is not None
    return any(row.name == name for row in model.plan.pool.rows)


def error_of(ddp: DistributedDataParallel) -> str:
    """The error of a step of a rank whose others have something else; masters and their gradients are as they were."""
    before = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
    for param in ddp.module.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    with pytest.raises(RuntimeError, match=r"ranks do not agree|has not said|was unpatched") as error:
        ddp(torch.ones(4, 8)).float().pow(2).mean().backward()
    for name, param in ddp.module.named_parameters():
        require_same(name, param, before[name])
        if is_cast(ddp, name):  # autograd itself has added to the others'
            require_same(f"gradient of {name}", param.grad, torch.ones_like(param) if param.requires_grad else None)
    ddp.zero_grad()
    return str(error.value)


def require_trains(rank: Rank, module: nn.Module) -> None:
    """Wrapped and patched alike on every rank now."""
    module.requires_grad_(True)
    ddp = ddp_mp.patch(DistributedDataParallel(module), **precision())
    for _ in range(2):
        ddp.zero_grad()
        square_step(ddp, torch.full((4, 8), float(rank.index)))
    for name, param in module.named_parameters():
        for other in rank.gather(param.grad):
            require_same(name, param.grad, other)


@on_ranks(2, 3)
@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize("field", FIELDS)
def test_field_that_differs_is_an_error_on_every_rank_with_both_values(rank: Rank, field: str, odd: str) -> None:
    build, value, usual = FIELDS[field]
    number = 0 if odd == "first" else rank.size - 1
    ddp, arguments = build(rank.index == number)
    ddp_mp.patch(ddp, **arguments)
    text = error_of(ddp)
    other = r"this rank \d" if rank.index == number else rf"this rank {rank.index}"
    who, here, there = (r"rank \d", value, usual) if rank.index == number else (f"rank {number}", usual, value)
    of = " for parameter 'b.bias'" if field == "requires_grad" else ""
    assert re.search(rf"{who} has {field}={re.escape(there)}{of}, {other} has {re.escape(here)}", text), text
    assert "within" not in text, "found only when the time was over"
    require_trains(rank, ddp.module)


@on_ranks(2)
def test_version_that_differs_is_an_error(rank: Rank) -> None:
    with pytest.MonkeyPatch.context() as patching:
        if rank.index:
            patching.setattr(agreement, "__version__", "0.0.9")
        ddp = ddp_mp.patch(two(), **options())
        assert "0.0.9" in error_of(ddp)


@on_ranks(2)
def test_layers_of_one_shape_in_another_order_are_an_error(rank: Rank) -> None:
    module = Two()
    if rank.index:
        module._modules["a"] = module._modules.pop("a")
    ddp = ddp_mp.patch(DistributedDataParallel(module), **options())
    text = error_of(ddp)
    assert f"as parameter number 0, this rank {rank.index} has '{'ab'[rank.index]}.weight'" in text


@on_ranks(2)
def test_parameter_of_another_name_is_an_error(rank: Rank) -> None:
    module = mlp(depth=1)
    ddp = ddp_mp.patch(DistributedDataParallel(module if rank.index else nn.Sequential(module)), **options())
    assert f"rank {rank.index} has parameter '{'0.weight' if rank.index else '0.0.weight'}', which rank" in error_of(ddp)


@on_ranks(2)
def test_hooks_of_pytorch_on_one_rank_are_an_error_on_the_other(rank: Rank) -> None:
    ddp = ddp_mp.patch(two(), **options(hooks="root" if rank.index else "all"))
    if rank.index == 0:
        text = error_of(ddp)
        assert "rank 1 has hooks='root', this rank 0 has 'all'" in text
        assert "within" not in text, "found only when the time was over"
    dist.barrier()


# --- ranks that do not answer --------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("odd", ["first", "last"])
def test_rank_that_is_not_patched_is_an_error_on_the_others_that_says_so(rank: Rank, odd: str) -> None:
    number = 0 if odd == "first" else rank.size - 1
    ddp = two()
    if rank.index != number:
        ddp_mp.patch(ddp, **precision(), options=ddp_mp.Options(agree_seconds=SOON))
        text = error_of(ddp)
        assert f"ddp_mp: rank {number} has not said within 1.5 s (Options.agree_seconds) what it was patched with" in text
    dist.barrier()
    ddp_mp.patch(ddp_mp.unpatch(ddp), **precision())
    square_step(ddp, torch.full((4, 8), float(rank.index)))
    for grad in rank.gather(ddp.module.a.weight.grad):
        require_same("gradient", ddp.module.a.weight.grad, grad)


@on_ranks(2)
def test_rank_that_was_unpatched_is_an_error_on_one_that_was_patched_anew(rank: Rank) -> None:
    ddp = ddp_mp.patch(two(), **precision())
    square_step(ddp, torch.ones(4, 8))
    ddp_mp.unpatch(ddp)
    dist.barrier()
    if rank.index == 0:
        ddp_mp.patch(ddp, **precision(FP16), options=ddp_mp.Options(agree_seconds=SOON))
        assert "rank 1 was unpatched, and has not been patched again within 1.5 s" in error_of(ddp)
        ddp_mp.unpatch(ddp)
    dist.barrier()
    ddp_mp.patch(ddp, **precision())
    square_step(ddp, torch.ones(4, 8))


@on_ranks(2)
def test_parameter_that_requires_grad_later_on_one_rank_is_an_error_there_that_names_it(rank: Rank) -> None:
    ddp = two()
    ddp.module.b.bias.requires_grad_(False)
    ddp_mp.patch(ddp, **precision(), options=ddp_mp.Options(agree_seconds=SOON))
    dist.barrier()
    square_step(ddp, torch.ones(4, 8))
    ddp.zero_grad()
    if rank.index:
        ddp.module.b.bias.requires_grad_(True)
        text = error_of(ddp)
        assert "rank 0 has made no plan like this one within 1.5 s (Options.agree_seconds)" in text
        assert "rank 0 has requires_grad=False for parameter 'b.bias', this rank 1 has True" in text
        assert "buckets" not in text  # they differ because of it
    dist.barrier()
    require_trains(rank, ddp_mp.unpatch(ddp).module)


@on_ranks(2)
def test_after_an_error_of_one_rank_alone_later_plans_are_agreed_on(rank: Rank) -> None:
    module = mlp(depth=3)
    module.requires_grad_(False)
    module[0].requires_grad_(True)
    ddp = ddp_mp.patch(DistributedDataParallel(module), **precision(), options=ddp_mp.Options(agree_seconds=SOON))
    dist.barrier()
    square_step(ddp, torch.ones(4, 8))
    ddp.zero_grad()
    if rank.index:
        module[2].requires_grad_(True)
        error_of(ddp)
    dist.barrier()
    for number in range(3):  # more comparisons, each of which the late rank comes to second
        time.sleep(0.3 * rank.index)
        ddp_mp.patch(
            ddp_mp.unpatch(ddp), **precision(FP16 if number % 2 else BF16), options=ddp_mp.Options(agree_seconds=LATER)
        )
        module[2].requires_grad_(True)
        module[4].requires_grad_(number > 0)
        square_step(ddp, torch.ones(4, 8))


# --- ranks that agree ----------------------------------------------------------------------------------------------------


class Counted:
    """A store, and how often it is asked."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self._store, name)


def count(ddp: DistributedDataParallel) -> list[str]:
    """What the wrapper asks of the store from now on."""
    ranks: Any = agreement._known[ddp]
    ranks._store = Counted(ranks._store)
    return ranks._store.asked  # type: ignore[no-any-return]


@on_ranks(2, 3)
def test_steps_after_the_first_do_not_come_to_the_store(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    trial.tolerance = 1e-6
    asked = count(trial.ddp)
    dist.barrier()
    trial.train(vectors(), steps=1)
    assert asked == ["add", "set"]  # the count of those that said the same, and that it was complete
    asked.clear()
    trial.train(vectors(), steps=3, accumulate=2)
    assert asked == []


@on_ranks(2)
def test_plan_that_is_new_on_one_rank_only_and_the_same_is_not_compared(rank: Rank) -> None:
    ddp = patched(scalar())
    ddp(column(1)).sum().backward()
    asked = count(ddp)
    if rank.index:
        ddp.module.weight = nn.Parameter(ddp.module.weight.detach().clone())
    ddp.zero_grad()
    ddp(column(2.0 + rank.index)).sum().backward()
    assert ddp.module.weight.grad.item() == 2.5
    assert asked == []


@on_ranks(2, 3)
def test_plan_that_is_new_on_all_ranks_at_different_times_is_agreed_on(rank: Rank) -> None:
    ddp = two()
    ddp.module.b.requires_grad_(False)
    ddp_mp.patch(ddp, **options())
    square_step(ddp, torch.ones(4, 8))
    for thawed in (ddp.module.b.weight, ddp.module.b.bias):
        time.sleep(0.3 * rank.index)
        thawed.requires_grad_(True)
        ddp.zero_grad()
        square_step(ddp, torch.full((4, 8), float(rank.index)))
        for grad in rank.gather(thawed.grad):
            require_same("gradient", thawed.grad, grad)


@on_ranks(2, 3)
def test_patched_anew_at_different_times_is_agreed_on(rank: Rank) -> None:
    ddp = ddp_mp.patch(two(), **precision())
    for dtype in (FP16, BF16, FP16):
        square_step(ddp, torch.ones(4, 8))
        time.sleep(0.2 * rank.index)
        ddp_mp.patch(ddp_mp.unpatch(ddp), **precision(dtype))
    square_step(ddp, torch.full((4, 8), float(rank.index)))
    for grad in rank.gather(ddp.module.a.weight.grad):
        require_same("gradient", ddp.module.a.weight.grad, grad)


@on_ranks(2)
def test_two_wrappers_are_compared_each_with_its_own(rank: Rank) -> None:
    first = ddp_mp.patch(two(), **precision())
    second = ddp_mp.patch(DistributedDataParallel(mlp()), **precision(FP16))
    for ddp in (second, first):
        square_step(ddp, torch.ones(4, 8))


@on_ranks(2)
def test_without_a_reduction_nothing_is_compared(rank: Rank) -> None:
    ddp = ddp_mp.patch(two(), **(precision(reduce=F32 if rank.index else BF16)))
    asked = count(ddp)
    with ddp.no_sync():
        square_step(ddp, torch.ones(4, 8))
    with torch.no_grad():
        ddp(torch.ones(4, 8))
    assert asked == []
    ddp.zero_grad()
    assert "reduce_dtype" in error_of(ddp)


@on_ranks(2)
@pytest.mark.parametrize("alike", [True, False])
def test_rank_without_inputs_compares_too(rank: Rank, alike: bool) -> None:
    ddp = ddp_mp.patch(two(), **precision(reduce=BF16 if alike or rank.index else F32))
    steps = 0 if rank.index else 2

    def train() -> None:
        with ddp.join():
            for _ in range(steps):
                square_step(ddp, torch.ones(4, 8))

    if alike:
        train()
        return
    with pytest.raises(RuntimeError, match="has reduce_dtype="):
        train()


@on_ranks(3)
def test_ranks_of_a_group_are_named_as_in_the_whole_job(rank: Rank) -> None:
    group = dist.new_group([1, 2])
    if rank.index:
        ddp = DistributedDataParallel(Two(), process_group=group)
        ddp_mp.patch(ddp, **precision(reduce=F32 if rank.index == 1 else BF16))
        assert f"rank {3 - rank.index} has reduce_dtype=" in error_of(ddp)
    dist.barrier()


@on_ranks(2)
def test_communication_hook_registered_in_training_is_compared(rank: Rank) -> None:
    ddp = ddp_mp.patch(two(), **precision())
    square_step(ddp, torch.ones(4, 8))
    ddp.zero_grad()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook if rank.index else default_hooks.allreduce_hook)
    assert "communication hook=" in error_of(ddp)


# --- where there is nobody to ask ----------------------------------------------------------------------------------------


def no_store(group: Any) -> None:
    raise AssertionError("the store was asked for")


@on_ranks(1)
def test_single_rank_asks_for_no_store(rank: Rank) -> None:
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(agreement.native, "group_store", no_store)
        square_step(ddp_mp.patch(two(), **precision()), torch.ones(4, 8))


@on_ranks(2)
def test_group_without_a_store_trains_and_says_so_in_the_log(rank: Rank) -> None:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(agreement.native, "group_store", lambda group: None)
        patching.setattr(agreement.logger, "debug", lambda text, *more: said.append(text))
        ddp = ddp_mp.patch(two(), **precision())
        square_step(ddp, torch.ones(4, 8))
        ddp_mp.unpatch(ddp)
    assert any("has no store" in text for text in said)


class Gone:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("connection reset")


@on_ranks(2)
def test_store_that_fails_keeps_nobody_from_training_and_unpatching(rank: Rank) -> None:
    ddp = ddp_mp.patch(two(), **precision())
    agreement._known[ddp]._store = Gone()  # type: ignore[assignment]
    square_step(ddp, torch.ones(4, 8))
    square_step(ddp_mp.patch(ddp_mp.unpatch(ddp), **precision(FP16)), torch.ones(4, 8))
    ddp_mp.unpatch(ddp)


def test_fake_group_has_no_store() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        square_step(ddp_mp.patch(two(), **precision()), torch.ones(4, 8))
    finally:
        dist.destroy_process_group()


# --- many ranks ----------------------------------------------------------------------------------------------------------


class Group:
    """A rank of a large process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def many(size: int, silent: set[int]) -> tuple[list[Any], Counted]:
    store = Counted(dist.HashStore())
    shared: Any = store
    ranks: list[Any] = []
    for index in range(size):
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(dist, "PrefixStore", lambda prefix, store: store)
            ranks.append(agreement._Ranks(Group(index, size), shared))
    for index in set(range(size)) - silent:
        assert ranks[index].say({"options": {"a": "1"}})
    return ranks, store


def test_many_ranks_ask_the_store_a_few_times_each() -> None:
    ranks, store = many(500, set())
    assert len(store.asked) <= 4 * 500  # what they said
    store.asked.clear()
    for each in ranks:
        each.compare(SOON)
    assert len(store.asked) == 2 * 500


@pytest.mark.parametrize("silent", [0, 1, 250, 317, 499])
def test_silent_rank_among_many_is_found_in_few_questions(silent: int) -> None:
    ranks, store = many(500, {silent})
    store.asked.clear()
    assert ranks[7]._first_silent() == silent
    assert len(store.asked) <= 11
