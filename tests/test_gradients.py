"""_C.Gradients: construction, readiness, setting aside and giving back, what it holds.  Moves: test_gradients_move.py."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gradient_rig import F32, Rig, grad_of, hand_over_once, low, params
from torch import nn

from ddp_mp import _C


@pytest.fixture
def rig() -> Rig:
    return Rig(params((3, 5), (7,), (2, 2, 2)), [[0, 1], [2]])


# --- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buckets", "error", "text"),
    [
        ([[0]], ValueError, "'b': in no bucket"),
        ([[0, 1], [1]], ValueError, "'b': in more than one bucket"),
        ([[0, 0], [1]], ValueError, "'a': in more than one bucket"),
        ([[0, 2], [1]], IndexError, "row 2: expected 0 to 1"),
        ([[0, -1]], IndexError, "row -1: expected 0 to 1"),
        ([0, 1], TypeError, "iterable"),
        (3, TypeError, "iterable"),
    ],
)
def test_gradients_buckets_wrong_are_refused(buckets: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _C.Gradients(params((2,), (3,)), ["a", "b"], buckets, print, print)


def test_gradients_names_wrong_are_refused() -> None:
    with pytest.raises(ValueError, match="names: expected 1"):
        _C.Gradients(params((2,)), [], [[0]], print, print)


def test_gradients_indices_out_of_range(rig: Rig) -> None:
    calls: list[Callable[[int], Any]] = [rig.g.hook, rig.g.stash, rig.g.base, rig.g.is_local]
    calls += [rig.g.position, lambda i: rig.g.settle(i, None, False), lambda i: rig.g.begin(True, i)]
    for call in calls:
        with pytest.raises(IndexError, match="3: expected 0 to 2"):
            call(3)
    for call in (
        rig.g.unfired,
        rig.g.stashed,
        rig.g.set_launched,
        lambda b: rig.g.pack(b, rig.flats[0], 1.0),
        lambda b: rig.g.hand_over(b, rig.flats[0], None, 1.0, None),
        lambda b: rig.g.accumulate(b, None),
    ):
        with pytest.raises(IndexError, match="bucket 2: expected 0 to 1"):
            call(2)


# --- readiness -------------------------------------------------------------------------------------------------------


def test_hook_first_calls_on_first_once(rig: Rig) -> None:
    rig.hooks()
    sum(p.sum() for p in rig.params).backward()
    assert len(rig.first) == 1
    assert rig.g.active is True
    assert sorted(rig.ready) == [0, 1]
    assert bytes(rig.g.fired_flags()) == b"\1\1\1"
    assert rig.g.fires == 3
    assert rig.g.refired is False
    assert rig.g.unfired(0) == rig.g.unfired(1) == []
    rig.g.end()
    assert rig.g.active is False
    assert rig.g.fired_flags()[0] == 1
    rig.g.reset()
    assert rig.g.fired_flags()[0] == 0
    assert rig.g.unfired(0) == [0, 1]


def test_hook_not_early_calls_no_on_ready(rig: Rig) -> None:
    rig.hooks()
    rig.early = False
    sum(p.sum() for p in rig.params).backward()
    assert rig.ready == []
    assert rig.g.unfired(0) == []


def test_hook_unused_parameter_leaves_its_bucket_open(rig: Rig) -> None:
    rig.hooks()
    (rig.params[0].sum() + rig.params[2].sum()).backward()
    assert rig.ready == [1]
    assert rig.g.unfired(0) == [1]
    assert rig.g.contributes() == b"\1\0\1"


def test_hook_tied_parameter_fires_once(rig: Rig) -> None:
    rig.hooks()
    w = rig.params[0]
    (w * 2 + w * 3).sum().backward()
    assert rig.g.fires == 1
    assert rig.g.refired is False
    assert torch.equal(w.grad, torch.full_like(w, 5.0))


def test_hook_again_before_launch_accumulates(rig: Rig) -> None:
    rig.hooks()
    rig.params[2].sum().backward()
    rig.params[2].sum().backward()
    assert rig.ready == [1]
    assert rig.g.refired is True
    assert rig.g.fires == 2
    rig.g.end()
    rig.g.reset()
    assert rig.g.refired is False


def test_hook_after_launch_raises_by_name(rig: Rig) -> None:
    rig.hooks()
    rig.params[2].sum().backward()
    rig.g.set_launched(1)
    rig.params[1].sum().backward()
    with pytest.raises(RuntimeError, match=r"^Expected to mark a variable ready only once\. Parameter 'p2'"):
        rig.params[2].sum().backward()
    rig.g.reset()
    rig.params[2].sum().backward()


def test_hook_on_first_error_propagates(rig: Rig) -> None:
    def fail(row: int) -> None:
        raise KeyError(row)

    rig.on_first = fail
    rig.hooks()
    with pytest.raises(KeyError):
        rig.params[2].sum().backward()
    assert rig.g.active is False
    assert rig.g.fired_flags()[2] == 0


def test_hook_on_ready_error_propagates() -> None:
    (p,) = params((3,))

    def fail(bucket: int) -> None:
        raise KeyError(bucket)

    g = _C.Gradients([p], ["p"], [[0]], lambda row: g.begin(True, row), fail)
    p.register_post_accumulate_grad_hook(g.hook(0))
    with pytest.raises(KeyError):
        p.sum().backward()
    assert g.fired_flags()[0] == 1
    g.abort()
    assert p.grad is None
    assert g.active is False


def test_hook_without_begin_still_counts(rig: Rig) -> None:
    rig.on_first = lambda row: None
    rig.hooks()
    rig.params[2].sum().backward()
    rig.params[0].sum().backward()
    assert rig.first == [2, 0]
    assert rig.g.unfired(1) == []
    assert rig.ready == []


# --- begin -----------------------------------------------------------------------------------------------------------


def test_begin_sets_gradients_aside(rig: Rig) -> None:
    first, third = grad_of(rig.params[0]), grad_of(rig.params[2])
    rig.params[0].grad, rig.params[2].grad = first, third
    assert rig.g.begin(True) == 2
    assert [p.grad for p in rig.params] == [None, None, None]
    assert rig.g.stash(0) is first
    assert rig.g.stash(1) is None
    assert rig.g.stash(2) is third
    assert (rig.g.stashed(0), rig.g.stashed(1)) == (1, 1)
    assert [rig.g.is_local(r) for r in range(3)] == [True, False, True]
    assert rig.g.contributes() == b"\1\0\1"
    rig.g.abort()
    assert rig.params[0].grad is first
    assert rig.params[2].grad is third
    assert rig.g.active is False


def test_base_keeps_what_all_ranks_have_apart(rig: Rig) -> None:
    rig.g.begin(False)
    assert rig.g.hand_over(0, rig.flats[0], rig.views[0], 1.0, None) == []
    rig.g.end()
    held = rig.params[0].grad
    rig.hooks()
    rig.g.reset()
    rig.g.begin(False)
    rig.params[0].sum().backward()
    assert rig.g.without_base(0) == [0]
    base = rig.g.stash(0).clone()
    rig.g.set_base(0, base)
    assert rig.g.without_base(0) == []
    assert rig.g.is_local(0)
    assert rig.g.accumulate(0, rig.views[0]) == []
    rig.g.end()
    assert rig.params[0].grad is held
    assert torch.equal(held, base + 1)
    rig.g.begin(False)
    assert rig.g.base(0) is base
    assert rig.g.contributes()[0] == 1
    assert rig.g.pack(0, torch.empty(rig.numel(0)), 1.0) == [0], "left to the caller"
    assert rig.g.hand_over(0, torch.empty(rig.numel(0)), rig.views[0], 1.0, None) == [0]
    rig.g.settle(0, held, True)
    assert rig.g.base(0) is None
    rig.g.end()
    rig.g.begin(False)
    assert not rig.g.is_local(0)
    rig.g.abort()


@pytest.mark.parametrize("change", ["another object", "none", "written"])
def test_base_goes_with_the_gradient_that_it_is_a_part_of(rig: Rig, change: str) -> None:
    rig.g.begin(False)
    rig.g.hand_over(0, rig.flats[0], rig.views[0], 1.0, None)
    rig.g.end()
    rig.g.begin(False)
    rig.g.set_base(0, torch.zeros(1))
    rig.g.abort()
    if change == "written":
        rig.params[0].grad.mul_(2)
    else:
        rig.params[0].grad = None if change == "none" else grad_of(rig.params[0])
    rig.g.begin(False)
    assert rig.g.base(0) is None
    assert rig.g.is_local(0) == (change != "none")
    rig.g.abort()


def test_base_of_a_local_stash_is_refused(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="'p0': nothing that is equal"):
        rig.g.set_base(0, torch.zeros(1))
    rig.params[0].grad = grad_of(rig.params[0])
    rig.g.begin(False)
    with pytest.raises(RuntimeError, match="'p0': nothing that is equal"):
        rig.g.set_base(0, torch.zeros(1))
    rig.g.abort()


def test_stash_of_another_type_is_told_and_replaced(rig: Rig) -> None:
    low(rig.params[0])
    rig.params[2].grad = grad_of(rig.params[2])
    rig.g.begin(False)
    assert (rig.g.of_other_type(0), rig.g.of_other_type(1)) == ([0], [])
    wide = rig.g.stash(0).to(F32)
    rig.g.set_stash(0, wide)
    assert rig.g.of_other_type(0) == []
    with pytest.raises(RuntimeError, match="'p1': nothing is set aside"):
        rig.g.set_stash(1, wide)
    rig.g.abort()
    assert rig.params[0].grad is wide


def test_begin_twice_is_refused(rig: Rig) -> None:
    rig.g.begin(True)
    with pytest.raises(RuntimeError, match="active already"):
        rig.g.begin(True)
    rig.g.end()
    rig.g.begin(False)


def test_begin_fired_row_keeps_its_gradient(rig: Rig) -> None:
    new, old = grad_of(rig.params[0]), grad_of(rig.params[1])
    rig.params[0].grad, rig.params[1].grad = new, old
    assert rig.g.begin(True, 0) == 1
    assert rig.params[0].grad is new
    assert rig.g.stash(0) is None
    rig.g.abort()
    assert rig.params[0].grad is None
    assert rig.params[1].grad is old


def test_begin_over_a_forgotten_stash_is_refused(rig: Rig) -> None:
    rig.params[1].grad = grad_of(rig.params[1])
    rig.g.begin(True)
    rig.g.end()
    with pytest.raises(RuntimeError, match=r"'p1': .*never given back"):
        rig.g.begin(True)
    mine = rig.params[1].grad = grad_of(rig.params[1])
    assert rig.g.begin(True) == 1
    assert rig.g.stash(1) is mine


# --- abort -----------------------------------------------------------------------------------------------------------


def test_abort_between_backwards_touches_nothing(rig: Rig) -> None:
    mine = rig.params[0].grad = grad_of(rig.params[0])
    rig.g.abort()
    assert rig.params[0].grad is mine
    hand_over_once(rig)
    kept = [p.grad for p in rig.params]
    rig.g.abort()
    assert all(p.grad is k for p, k in zip(rig.params, kept, strict=True))
    rig.g.begin(False)
    assert not rig.g.is_local(0)


def test_abort_after_an_empty_backward_touches_nothing_later(rig: Rig) -> None:
    rig.g.begin(True)
    rig.g.end()
    mine = rig.params[0].grad = grad_of(rig.params[0])
    rig.g.abort()
    assert rig.params[0].grad is mine


def test_abort_after_pack_gives_back(rig: Rig) -> None:
    aside = rig.params[0].grad = grad_of(rig.params[0])
    rig.g.begin(True)
    low(rig.params[0])
    low(rig.params[2])
    rig.pack(0)
    rig.g.set_launched(0)
    rig.g.abort()
    assert rig.params[0].grad is aside
    assert rig.params[1].grad is None
    assert rig.params[2].grad is None
    assert rig.g.active is False
    rig.g.hook(0)(rig.params[0])


def test_abort_error_goes_on_and_names_the_parameter(rig: Rig) -> None:
    asides = [grad_of(p) for p in rig.params]
    for p, a in zip(rig.params, asides, strict=True):
        p.grad = a
    rig.g.begin(True)
    master = rig.params[1].data
    rig.params[1].data = master.bfloat16()
    with pytest.raises(RuntimeError, match="'p1': setting its gradient"):
        rig.g.abort()
    assert rig.params[0].grad is asides[0]
    assert rig.params[2].grad is asides[2]
    assert rig.g.active is False
    rig.params[1].data = master
    rig.g.abort()
    assert rig.params[1].grad is asides[1]


class Stubborn(nn.Parameter):
    """Its gradient cannot be taken away while `refuse` is set."""

    refuse = False

    @property
    def grad(self) -> torch.Tensor | None:
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if Stubborn.refuse and value is None:
            raise RuntimeError("stubborn")
        torch.Tensor.grad.__set__(self, value)


@pytest.fixture
def refusing() -> Iterator[None]:
    Stubborn.refuse = True
    yield
    Stubborn.refuse = False


def test_begin_error_gives_everything_back(refusing: None) -> None:
    rig = Rig([*params((3,)), Stubborn(torch.ones(2)), *params((4,))])
    grads = [grad_of(p) for p in rig.params]
    for p, g in zip(rig.params, grads, strict=True):
        p.grad = g
    with pytest.raises(RuntimeError, match="'p1': taking its gradient away: stubborn"):
        rig.g.begin(True)
    assert all(p.grad is g for p, g in zip(rig.params, grads, strict=True))
    assert rig.g.active is False


def test_pack_error_after_the_launch_goes_on(refusing: None) -> None:
    rig = Rig([*params((3,)), Stubborn(torch.ones(2)), *params((4,))])
    rig.g.begin(True)
    for p in rig.params:
        p.grad = torch.ones_like(p)
    out = torch.empty(9)
    with pytest.raises(RuntimeError, match="'p1': taking its gradient away: stubborn"):
        rig.g.pack(0, out, 1.0)
    assert torch.equal(out, torch.ones(9))
    assert [p.grad is None for p in rig.params] == [True, False, True]
    Stubborn.refuse = False
    rig.g.abort()
    assert [p.grad is None for p in rig.params] == [True, True, True]


class Meddling(nn.Parameter):
    """Calls back from within its own gradient."""

    call: Callable[[], Any] | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        if Meddling.call is not None:
            Meddling.call()
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)


@pytest.mark.parametrize("method", ["begin", "pack", "hand_over", "accumulate", "abort", "settle"])
def test_reentrant_call_is_refused(method: str) -> None:
    rig = Rig([Meddling(torch.ones(3))])
    arguments: dict[str, tuple[Any, ...]] = {
        "begin": (True,),
        "pack": (0, torch.empty(3), 1.0),
        "hand_over": (0, torch.empty(3), None, 1.0, None),
        "accumulate": (0, None),
        "abort": (),
        "settle": (0, None, False),
    }
    rig.g.begin(True)
    if method == "begin":
        rig.g.end()
    Meddling.call = lambda: getattr(rig.g, method)(*arguments[method])
    try:
        with pytest.raises(RuntimeError, match=r"'p0': .*in use"):
            rig.g.begin(True) if method == "begin" else rig.g.pack(0, torch.empty(3), 1.0)
    finally:
        Meddling.call = None


# --- names, references -----------------------------------------------------------------------------------------------


def test_position_is_the_place_in_the_bucket() -> None:
    rig = Rig(params((1,), (2,), (3,)), [[2, 0], [1]])
    assert [rig.g.position(r) for r in range(3)] == [1, 0, 0]
    rig.g.begin(True)
    for p in rig.params:
        p.grad = torch.full_like(p, float(p.numel()))
    assert rig.pack(0).tolist() == [3.0, 3.0, 3.0, 1.0]


def test_empty_parameters_and_buckets() -> None:
    rig = Rig([*params((0,), (3,), (2, 0))], [[0, 2], [1]])
    g = _C.Gradients(rig.params[1:2], ["p"], [[], [0]], print, print)
    assert g.pack(0, torch.empty(0), 1.0) == []
    rig.g.begin(True)
    rig.params[0].grad = torch.empty(0)
    assert rig.pack(0).numel() == 0
    assert rig.params[0].grad is None
    assert rig.g.hand_over(0, rig.flats[0], rig.views[0], 1.0, None) == []
    assert rig.params[0].grad is rig.views[0][0]


def test_memory_handed_over_is_free_again_after_zero_grad(rig: Rig) -> None:
    """Who reuses the flat memory asks whether anybody else holds its views."""
    hand_over_once(rig)
    for p in rig.params:
        p.grad = None
    rig.g.begin(True)
    assert all(_C.unshared(views) for views in rig.views)
    rig.g.end()
    hand_over_once(rig)
    rig.g.begin(True)
    assert not any(_C.unshared(views) for views in rig.views)


def test_loops_leak_no_reference(rig: Rig) -> None:
    objects: list[Any] = [*rig.params, *rig.names, *rig.flats, *rig.views[0], *rig.views[1], rig.g, None, rig.on_first]
    hook = rig.g.hook(0)
    objects.append(hook)

    def work() -> None:
        hand_over_once(rig)
        rig.g.begin(True)
        low(rig.params[0])
        rig.pack(0)
        rig.g.hand_over(0, torch.ones(22), rig.views[0], 2.0, None)
        rig.g.accumulate(1, None)
        rig.g.end()
        rig.g.begin(False, 0)
        hook(rig.params[0])
        rig.g.abort()
        rig.g.hook(1)
        for p in rig.params:
            p.grad = None
        rig.g.begin(False)
        low(rig.params[0])
        rig.params[1].grad = grad_of(rig.params[1])
        rig.g.accumulate(0, None)
        rig.g.settle(0, None, False)
        _ = (
            rig.g.fired_flags(),
            rig.g.unfired(0),
            rig.g.contributes(),
            rig.g.stash(1),
            rig.g.without_base(0),
            rig.g.of_other_type(0),
        )
        with contextlib.suppress(ValueError):
            rig.g.hand_over(1, torch.zeros(8), None, 1.0, None)
        with contextlib.suppress(ValueError):
            rig.g.pack(0, torch.zeros(8), 1.0)
        rig.g.abort()
        for p in rig.params:
            p.grad = None

    work()
    gc.collect()
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(100):
        work()
    gc.collect()
    after = [sys.getrefcount(o) for o in objects]
    assert all(a - b < 50 for a, b in zip(after, before, strict=True)), list(zip(before, after, strict=True))


def test_gradients_release_what_they_owned() -> None:
    rig = Rig(params((3,)))
    grad = grad_of(rig.params[0])
    rig.params[0].grad = grad
    rig.g.begin(True)
    watched = weakref.ref(rig.g)
    del rig
    gc.collect()
    assert watched() is None
    assert sys.getrefcount(grad) == 2


def test_gradients_gone_give_back_what_was_aside() -> None:
    rig = Rig(params((3,), (4,), (5,)))
    kept, grads = rig.params, [grad_of(p) for p in rig.params[:2]]
    rig.params[0].grad, rig.params[1].grad = grads
    rig.g.begin(True)
    rig.g.end()
    mine = rig.params[1].grad = grad_of(rig.params[1])
    del rig
    gc.collect()
    assert kept[0].grad is grads[0]
    assert kept[1].grad is mine
    assert kept[2].grad is None


def test_gradients_with_hooks_on_parameters_are_collected() -> None:
    module = nn.Linear(3, 3)
    rig = Rig(list(module.parameters()))
    rig.hooks()
    module(torch.ones(1, 3)).sum().backward()
    watched = [weakref.ref(rig.g), weakref.ref(module), weakref.ref(module.weight)]
    del module, rig
    gc.collect()
    assert [w() for w in watched] == [None, None, None]


def test_hook_outlives_its_owner() -> None:
    p = params((2,))
    hook = Rig(p).g.hook(0)
    gc.collect()
    hook(p[0])
