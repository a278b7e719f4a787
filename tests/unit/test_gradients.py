"""``_C.Gradients``: when gradients are there, and how they move between leaves, flat memory and masters."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.leaf_rig import Rig, grad_of, masters
from kit.oracle import BF16, F32, F64, require_same
from kit.oracle import FP16 as F16
from torch import nn

SHAPES = ((3, 4), (7,), (5, 2))


def rig(*buckets: list[int], **more: Any) -> Rig:
    return Rig(masters(*SHAPES), buckets or [[0, 1, 2]], **more)


# --- readiness -----------------------------------------------------------------------------------------------------------


def test_bucket_is_ready_once_when_its_last_row_fires() -> None:
    r = rig([2, 1], [0])
    r.g.begin(True)
    for row in (1, 0, 2):
        r.fire(row, grad_of(r.masters[row]))
    assert r.events == [("ready", 1), ("ready", 0)]
    assert (r.g.fires, r.g.refired, r.g.direct) == (3, False, False)
    assert r.g.fired_flags() == b"\1\1\1"


def test_bucket_waits_for_leaves_whatever_arrives_on_masters() -> None:
    r = rig()
    r.g.begin(True)
    for row in range(3):
        r.fire_master(row)
    assert (r.events, r.g.unfired(0)) == ([], [])
    for row in range(3):
        r.fire(row, grad_of(r.masters[row]))
    assert r.events == [("ready", 0)]


def test_bucket_is_not_told_of_in_a_backward_that_is_not_early() -> None:
    r = rig()
    r.g.begin(True)
    r.g.early = False
    for row in range(3):
        r.fire(row, grad_of(r.masters[row]))
    assert r.events == []
    assert r.g.unfired(0) == []
    r.g.reset()
    assert r.g.unfired(0) == [0, 1, 2]


def test_first_gradient_of_no_backward_is_told_with_where_it_is() -> None:
    r = rig()
    r.fire(1, grad_of(r.masters[1]))
    r.fire_master(2)
    assert r.events == [("first", 1, False), ("first", 2, True)]
    assert r.g.fires == 0
    r.on["first"] = lambda row, elsewhere: r.g.begin(False)
    r.fire(1, grad_of(r.masters[1]))
    assert (r.g.active, r.g.fires) == (True, 1)


def test_gradient_of_a_frozen_master_is_dropped() -> None:
    r = rig()
    r.g.begin(True)
    r.masters[0].requires_grad_(False)
    r.fire(0, grad_of(r.masters[0]))
    assert r.leaves[0].grad is None
    assert r.g.unfired(0) == [0, 1, 2]


def test_refired_and_direct_are_told() -> None:
    r = rig()
    r.g.begin(False)
    r.fire(0, grad_of(r.masters[0]))
    assert not r.g.refired
    r.hooks[0](r.leaves[0])
    assert r.g.refired
    assert not r.g.direct
    r.fire_master(1)
    assert r.g.direct


@pytest.mark.parametrize("master_first", [False, True])
def test_refired_is_told_of_a_leaf_and_its_master(master_first: bool) -> None:
    r = rig()
    r.g.begin(False)
    r.fire(2, grad_of(r.masters[2]))
    fires = [lambda: r.fire(0, grad_of(r.masters[0])), lambda: r.fire_master(0)]
    for fire in reversed(fires) if master_first else fires:
        assert not r.g.refired
        fire()
    assert r.g.refired


def test_gradient_after_its_bucket_was_packed_is_an_error_that_names_the_parameter() -> None:
    r = rig()
    r.g.begin(False)
    r.fire(0, grad_of(r.masters[0]))
    r.g.pack(0, torch.empty(r.numel(0)), 1.0)
    with pytest.raises(RuntimeError, match=r"ready only once\. Parameter 'p0'"):
        r.fire(0, grad_of(r.masters[0]))
    assert r.events == [("error",)]
    r.g.abort()
    assert r.leaves[0].grad is None
    r.g.begin(False)
    r.fire(0, grad_of(r.masters[0]))


def user_hook(master: nn.Parameter) -> None:
    master.register_hook(lambda grad: grad)


def user_hook_after(master: nn.Parameter) -> None:
    for _ in range(2):  # ours is one of them in a model
        master.register_post_accumulate_grad_hook(lambda param: None)


@pytest.mark.parametrize("register", [user_hook, user_hook_after])
def test_row_whose_master_has_hooks_is_special(register: Callable[[nn.Parameter], None]) -> None:
    r = rig()
    register(r.masters[1])
    r.g.begin(False)
    for row in range(3):
        r.fire(row, grad_of(r.masters[row]))
    assert r.events == [("special", 1, r.leaves[1])]
    assert r.g.pack(0, torch.empty(r.numel(0)), 1.0) == [1]
    r.g.end()
    r.g.reset()
    r.g.begin(False)
    assert r.g.accumulate(0, None) == []


def test_second_leaf_of_a_row_is_special_and_the_earlier_one_is_told() -> None:
    r = rig()
    other = nn.Parameter(torch.zeros_like(r.masters[0], dtype=BF16))
    seen: list[Any] = []
    r.on["special"] = lambda row, leaf: seen.append((r.g.source(row), leaf))
    r.g.begin(False)
    r.fire(0, grad_of(r.masters[0]))
    r.fire(0, grad_of(r.masters[0]), other)
    assert seen == [(r.leaves[0], other)]
    assert r.g.source(0) is other
    r.g.end()
    assert r.g.source(0) is None


@pytest.mark.parametrize("where", ["first", "ready", "special"])
def test_error_of_a_callback_is_reported_once_and_raised(where: str) -> None:
    r = rig()

    def fail(*args: Any) -> None:
        raise ValueError("no luck")

    r.on[where] = fail
    if where != "first":
        r.g.begin(True)
    if where == "special":
        user_hook(r.masters[2])
    for row in (0, 1) if where != "first" else ():
        r.fire(row, grad_of(r.masters[row]))
    with pytest.raises(ValueError, match="no luck"):
        r.fire(2, grad_of(r.masters[2]))
    assert [event for event in r.events if event == ("error",)] == [("error",)]


# --- moving --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("out", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("low", [BF16, F16, F32], ids=str)
def test_pack_is_the_sum_of_both_divided(low: torch.dtype, out: torch.dtype, own: bool) -> None:
    r = rig(dtype=low)
    grads = [grad_of(m, low) for m in r.masters]
    owns = [grad_of(m, F32) if own else None for m in r.masters]
    r.g.begin(False)
    for row, (grad, held) in enumerate(zip(grads, owns, strict=True)):
        r.masters[row].grad = held
        r.fire(row, grad)
    flat = torch.full((r.numel(0),), 7.0, dtype=out)
    assert r.g.pack(0, flat, 2.0) == []
    wide = F64 if out is F64 else F32
    due = [g.to(wide) if h is None else g.to(wide) + h.to(wide) for g, h in zip(grads, owns, strict=True)]
    require_same("packed", flat, torch.cat([(d / 2).to(out).flatten() for d in due]))
    assert all(leaf.grad is None for leaf in r.leaves)
    assert all(m.grad is held for m, held in zip(r.masters, owns, strict=True))
    assert r.g.contributes() == b"\1\1\1"


def test_pack_writes_zeros_where_nothing_is() -> None:
    r = rig()
    r.g.begin(False)
    r.fire(1, None)
    flat = torch.full((r.numel(0),), 7.0)
    assert r.g.pack(0, flat, 1.0) == []
    assert not flat.any()
    assert r.g.contributes() == b"\0\0\0"
    assert r.g.fired_flags() == b"\0\0\0", "one that fired without a gradient is not used"


def strange(master: torch.Tensor) -> list[torch.Tensor]:
    """Gradients that cannot be copied flat into the master's memory order."""
    values = torch.randn(master.shape, dtype=BF16)
    return [
        values.t().contiguous().t(),
        values.to_sparse(),
        values.expand(2, *values.shape).select(0, 0)[..., ::1].flip(0).flip(0),
    ]


@pytest.mark.parametrize("kind", [0, 1])
def test_gradients_of_another_layout_are_left_to_the_caller(kind: int) -> None:
    r = rig()
    r.g.begin(False)
    r.fire(0, strange(r.masters[0])[kind])
    r.fire(1, grad_of(r.masters[1]))
    assert r.g.pack(0, torch.empty(r.numel(0)), 1.0) == [0]
    assert r.leaves[0].grad is not None
    assert r.leaves[1].grad is None


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(4, 3).t(), lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
)
def test_masters_of_any_dense_layout_are_packed_in_their_own_order(make: Callable[[], torch.Tensor]) -> None:
    r = Rig([nn.Parameter(make())], [[0]])
    grad = grad_of(r.masters[0])
    r.g.begin(False)
    r.fire(0, grad)
    flat = torch.empty(r.numel(0))
    assert r.g.pack(0, flat, 1.0) == []
    require_same("packed", r.parts(0, flat)[0], grad.float())


@pytest.mark.parametrize("reduced", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("divisor", [1.0, 2.0])
def test_give_makes_gradients_of_views_or_writes_into_those_that_are_there(reduced: torch.dtype, divisor: float) -> None:
    r = rig()
    held = grad_of(r.masters[1], F32)
    r.masters[1].grad = held
    r.g.begin(False)
    flat = torch.randn(r.numel(0)).to(reduced)
    views = tuple(r.parts(0, torch.empty(r.numel(0))))
    assert r.g.lacks(0)
    assert r.g.give(0, flat, views, divisor, b"\1\1\0") == []
    due = [(part.float() / divisor) for part in r.parts(0, flat)]
    assert r.masters[0].grad is views[0]
    assert r.masters[1].grad is held
    assert r.masters[2].grad is None
    for row in range(2):
        require_same("given", r.masters[row].grad, due[row])


def test_give_leaves_a_gradient_where_it_was_reduced() -> None:
    r = rig()
    r.g.begin(False)
    flat = torch.randn(r.numel(0))
    values = flat.clone()
    views = tuple(r.parts(0, flat))
    assert r.g.give(0, flat, views, 1.0, None) == []
    assert all(m.grad is view for m, view in zip(r.masters, views, strict=True))
    require_same("reduced", flat, values)
    assert not r.g.lacks(0)


def test_give_of_rows_without_leaves_replaces_what_this_backward_made() -> None:
    r = rig(dtype=None)
    before = grad_of(r.masters[0], F32)
    r.masters[0].grad = before
    r.g.begin(False)
    r.masters[1].grad = grad_of(r.masters[1], F32)
    for row in range(2):
        r.fire_master(row)
    views = tuple(r.parts(0, torch.zeros(r.numel(0))))
    r.g.give(0, torch.ones(r.numel(0)), views, 1.0, None)
    assert r.masters[0].grad is before
    assert r.masters[1].grad is views[1]
    assert not r.g.direct


def test_accumulate_adds_in_full_precision() -> None:
    r = rig()
    held = torch.full_like(r.masters[0], 256.0)
    r.masters[0].grad = held
    r.g.begin(False)
    for row in range(2):
        r.fire(row, torch.ones_like(r.leaves[row]))
    views = tuple(r.parts(0, torch.zeros(r.numel(0))))
    assert r.g.accumulate(0, views) == []
    assert r.masters[0].grad is held
    require_same("sum", held, torch.full_like(held, 257.0))
    assert r.masters[1].grad is views[1]
    assert r.masters[2].grad is None
    assert all(leaf.grad is None for leaf in r.leaves)


def test_frozen_masters_are_given_nothing() -> None:
    r = rig()
    r.masters[0].requires_grad_(False)
    r.g.begin(False)
    r.g.give(0, torch.ones(r.numel(0)), tuple(r.parts(0, torch.zeros(r.numel(0)))), 1.0, None)
    assert r.masters[0].grad is None
    assert r.masters[1].grad is not None


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda r: r.g.pack(0, torch.empty(3), 1.0), "expected a contiguous"),
        (lambda r: r.g.pack(0, torch.empty(r.numel(0), dtype=torch.int64), 1.0), "floating-point"),
        (lambda r: r.g.give(0, torch.empty(r.numel(0)), (), 1.0, None), "views: expected 3"),
        (lambda r: r.g.give(0, torch.empty(r.numel(0)), None, 1.0, b"\1"), "used: expected one byte"),
        (lambda r: Rig(r.masters, [[0, 1]]), "each of 3 rows in one bucket, found 2"),
        (lambda r: Rig(r.masters, [[0, 1], [1, 2]]), "'p1': in more than one bucket"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call: Callable[[Rig], Any], match: str) -> None:
    r = rig()
    r.g.begin(False)
    with pytest.raises(ValueError, match=match):
        call(r)
    assert r.g.accumulate(0, None) == [], "nothing is in use any more"


# --- lifetime ------------------------------------------------------------------------------------------------------------


def test_hook_does_nothing_when_its_owner_is_gone() -> None:
    r = rig()
    hook, gone = r.hooks[0], weakref.ref(r.g)
    r.masters[0].register_post_accumulate_grad_hook(hook)
    leaf = r.leaves[0]
    del r
    gc.collect()
    assert gone() is None
    hook(leaf)


def test_steps_keep_no_reference() -> None:
    r = rig()
    objects: list[Any] = [*r.masters, *r.leaves]

    def step() -> None:
        r.g.begin(False)
        for row in range(3):
            r.fire(row, grad_of(r.masters[row]))
        flat = torch.empty(r.numel(0))
        r.g.pack(0, flat, 1.0)
        r.g.give(0, flat, tuple(r.parts(0, flat)), 1.0, None)
        r.g.end()
        r.g.reset()
        for master in r.masters:
            master.grad = None

    step()
    before = [sys.getrefcount(one) for one in objects]
    for _ in itertools.repeat(None, 300):
        step()
    assert [sys.getrefcount(one) for one in objects] == before
