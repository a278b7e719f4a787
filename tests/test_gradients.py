"""_C.Gradients: readiness, packing, hand-over, accumulation.  The oracle is arithmetic on whole tensors."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ddp_mp import _C

BF16, FP16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Rig:
    """Gradients over parameters, with what the Python layer keeps: flat memory a bucket and a view of it a row."""

    def __init__(self, params: Sequence[nn.Parameter], buckets: Sequence[Sequence[int]] | None = None):
        self.params = list(params)
        self.names = [f"p{i}" for i in range(len(self.params))]
        self.buckets = [list(range(len(self.params)))] if buckets is None else [list(b) for b in buckets]
        self.first: list[int] = []
        self.ready: list[int] = []
        self.early = True
        self.on_first: Callable[[int], Any] = lambda row: self.g.begin(self.early, row)
        self.g = _C.Gradients(self.params, self.names, self.buckets, lambda r: self._first(r), lambda b: self.ready.append(b))
        self.flats = [torch.full((self.numel(b),), 77.0, dtype=self.params[r[0]].dtype) for b, r in enumerate(self.buckets)]
        self.views = [self.split(b, flat) for b, flat in enumerate(self.flats)]

    def _first(self, row: int) -> None:
        self.first.append(row)
        self.on_first(row)

    def numel(self, bucket: int) -> int:
        return sum(self.params[r].numel() for r in self.buckets[bucket])

    def split(self, bucket: int, flat: torch.Tensor) -> list[torch.Tensor]:
        views, offset = [], 0
        for row in self.buckets[bucket]:
            p = self.params[row]
            views.append(flat[offset : offset + p.numel()].as_strided(p.shape, p.stride()))
            offset += p.numel()
        return views

    def hooks(self) -> None:
        for row, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(self.g.hook(row))

    def pack(self, bucket: int = 0, dtype: torch.dtype = F32, divisor: float = 1.0) -> torch.Tensor:
        out = torch.full((self.numel(bucket),), float("nan"), dtype=dtype)
        assert self.g.pack(bucket, out, divisor) == []
        return out


def grad_of(p: nn.Parameter, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A random gradient with the parameter's strides."""
    return torch.empty_strided(p.shape, p.stride(), dtype=dtype or p.dtype).copy_(torch.randn(p.shape))


def low(p: nn.Parameter, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Gives the parameter a gradient of another type than its own, as a backward through low precision leaves it."""
    grad = grad_of(p, dtype)
    master = p.data
    p.data = torch.empty_strided(p.shape, p.stride(), dtype=dtype)
    p.grad = grad
    p.data = master
    return grad


def params(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]


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
    calls: list[Callable[[int], Any]] = [rig.g.hook, rig.g.fired, rig.g.stash, rig.g.base, rig.g.is_local]
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
    assert rig.g.fired(0) is True
    rig.g.reset()
    assert rig.g.fired(0) is False
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
    assert rig.g.fired(2) is False


def test_hook_on_ready_error_propagates() -> None:
    (p,) = params((3,))

    def fail(bucket: int) -> None:
        raise KeyError(bucket)

    g = _C.Gradients([p], ["p"], [[0]], lambda row: g.begin(True, row), fail)
    p.register_post_accumulate_grad_hook(g.hook(0))
    with pytest.raises(KeyError):
        p.sum().backward()
    assert g.fired(0)
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
    assert rig.g.with_base(0) == [0]
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


@pytest.mark.parametrize("change", ["another object", "none", "dropped"])
def test_base_goes_with_the_gradient_that_it_is_a_part_of(rig: Rig, change: str) -> None:
    rig.g.begin(False)
    rig.g.hand_over(0, rig.flats[0], rig.views[0], 1.0, None)
    rig.g.end()
    rig.g.begin(False)
    rig.g.set_base(0, torch.zeros(1))
    rig.g.abort()
    if change != "dropped":
        rig.params[0].grad = None if change == "none" else grad_of(rig.params[0])
    rig.g.begin(False)
    if change == "dropped":
        rig.g.set_base(0, None)
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


# --- pack ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [F32, BF16, FP16, F64], ids=str)
@pytest.mark.parametrize("grad", [F32, BF16, FP16, F64], ids=str)
@pytest.mark.parametrize("divisor", [1.0, 4.0, 3.0])
def test_pack_is_the_sum_divided(grad: torch.dtype, out: torch.dtype, divisor: float) -> None:
    rig = Rig(params((3, 5), (7,), (2, 2, 2)))
    aside = rig.params[1].grad = grad_of(rig.params[1])
    rig.g.begin(True)
    grads = [low(p, grad) for p in rig.params]
    packed = rig.pack(0, out, divisor)
    wide = F64 if F64 in (grad, out) else F32
    want = [g.to(wide) for g in grads]
    want[1] = want[1] + aside.to(wide)
    if divisor != 1:
        want = [w / torch.tensor(divisor, dtype=wide) for w in want]
    for view, w in zip(rig.split(0, packed), want, strict=True):
        assert torch.equal(view, w.to(out))
    assert all(p.grad is None for p in rig.params)
    assert rig.g.stash(1) is aside


def test_pack_missing_gradients_are_zeros(rig: Rig) -> None:
    rig.params[1].grad = torch.ones(7)
    rig.g.begin(True)
    packed = rig.pack(0)
    assert torch.equal(packed[:15], torch.zeros(15))
    assert torch.equal(packed[15:], torch.ones(7))
    assert torch.equal(rig.pack(1), torch.zeros(8))


def test_pack_tells_gradients_that_are_undefined(rig: Rig) -> None:
    """Autograd runs the hook of a parameter that a loss does not need, and leaves it without a gradient."""
    rig.hooks()

    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, used: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            return used.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad.expand(3, 5).clone(), None

    Undefined.apply(rig.params[0], rig.params[1]).backward()
    assert rig.g.contributes() == b"\1\1\0"
    rig.pack(0)
    assert rig.g.contributes() == b"\1\2\0"
    assert rig.g.fired(1) is True
    rig.g.reset()
    assert rig.g.contributes() == b"\0\0\0"


def test_pack_memory_order_is_the_parameters() -> None:
    shapes = [torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last), torch.randn(6, 4).t(), torch.randn(1, 5)]
    rig = Rig([nn.Parameter(t) for t in shapes])
    rig.g.begin(True)
    grads = [low(p) for p in rig.params]
    packed = rig.pack(0)
    for view, g in zip(rig.split(0, packed), grads, strict=True):
        assert torch.equal(view, g.float())


def test_pack_synced_stash_is_left_out(rig: Rig) -> None:
    hand_over_once(rig)
    assert rig.g.begin(True) == 3
    assert not rig.g.is_local(0)
    assert rig.g.contributes() == b"\0\0\0"
    for p in rig.params:
        low(p, F32)
    grads = [p.grad.clone() for p in rig.params]
    packed = rig.pack(0)
    assert torch.equal(packed, torch.cat([grads[0].flatten(), grads[1]]))


def test_pack_rows_of_other_strides_are_returned(rig: Rig) -> None:
    rig.g.begin(True)
    strange = rig.params[0].grad = torch.randn(5, 3).t()
    rig.params[1].grad = torch.ones(7)
    out = torch.full((22,), 5.0)
    assert rig.g.pack(0, out, 1.0) == [0]
    assert rig.params[0].grad is strange
    assert rig.params[1].grad is None
    assert torch.equal(out, torch.cat([torch.full((15,), 5.0), torch.ones(7)]))


@pytest.mark.parametrize("kind", ["sparse", "expanded", "stash", "param"])
def test_pack_rows_not_flat_are_returned(kind: str) -> None:
    rig = Rig(params((4, 3)))
    p = rig.params[0]
    if kind == "param":
        p.data = torch.randn(4, 6)[:, ::2]
    if kind == "stash":
        p.grad = torch.randn(3, 4).t()
    rig.g.begin(True)
    p.grad = torch.randn(4, 3)
    if kind == "sparse":
        p.grad = torch.randn(4, 3).to_sparse()
    if kind == "expanded":
        p.grad = torch.ones(1).expand(4, 3)
    kept = p.grad
    assert rig.g.pack(0, torch.empty(12), 1.0) == [0]
    assert p.grad is kept


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (torch.empty(21), ValueError, "out: expected a contiguous tensor of 1 dimension and 22 elements, got 21"),
        (torch.empty(2, 11), ValueError, "22 elements in 2 dimensions"),
        (torch.empty(44)[::2], ValueError, "not dense"),
        (torch.empty(22, dtype=torch.int32), TypeError, "out: expected float64"),
        (torch.empty(22, device="meta"), Exception, "out|device"),
    ],
)
def test_pack_out_wrong_is_refused(rig: Rig, out: torch.Tensor, error: type[Exception], text: str) -> None:
    grad = rig.params[0].grad = grad_of(rig.params[0])
    rig.g.begin(True)
    now = rig.params[1].grad = grad_of(rig.params[1])
    with pytest.raises(error, match=text):
        rig.g.pack(0, out, 1.0)
    assert rig.params[1].grad is now
    rig.g.abort()
    assert rig.params[0].grad is grad


@pytest.mark.parametrize("divisor", [0.0, float("inf"), float("nan")])
def test_divisor_wrong_is_refused(rig: Rig, divisor: float) -> None:
    with pytest.raises(ValueError, match="divisor"):
        rig.g.pack(0, torch.empty(22), divisor)
    with pytest.raises(ValueError, match="divisor"):
        rig.g.hand_over(0, torch.empty(22), None, divisor, None)


def test_pack_parameter_resized_is_named(rig: Rig) -> None:
    rig.g.begin(True)
    rig.params[1].data = torch.randn(8)
    rig.params[1].grad = torch.randn(8)
    with pytest.raises(ValueError, match="'p1': has 8 elements now: expected 7"):
        rig.g.pack(0, torch.empty(22), 1.0)
    assert rig.params[1].grad is not None


def test_pack_device_error_leaves_gradients(rig: Rig) -> None:
    rig.g.begin(True)
    grads = [low(p) for p in rig.params]
    _C.host_fail_at(1)
    try:
        with pytest.raises(_C.DeviceError):
            rig.g.pack(0, torch.empty(22), 1.0)
    finally:
        _C.host_fail_at(0)
    assert all(p.grad is g for p, g in zip(rig.params, grads, strict=True))
    assert torch.equal(rig.pack(0), torch.cat([g.flatten().float() for g in grads[:2]]))


# --- hand_over -------------------------------------------------------------------------------------------------------


def hand_over_once(rig: Rig, value: float = 1.0) -> None:
    """A whole backward with reduction: every gradient is `value` and synced."""
    rig.g.begin(True)
    for b in range(len(rig.buckets)):
        rig.pack(b)
        rig.flats[b].fill_(value)
        assert rig.g.hand_over(b, rig.flats[b], rig.views[b], 1.0, None) == []
    rig.g.end()
    rig.g.reset()


def test_hand_over_in_place_launches_nothing(rig: Rig) -> None:
    rig.g.begin(True)
    rig.flats[0].copy_(torch.arange(22.0))
    _C.host_fail_at(1)  # would fail any launch
    try:
        assert rig.g.hand_over(0, rig.flats[0], rig.views[0], 1.0, None) == []
    finally:
        assert _C.host_fail_at(0) == 0
    assert rig.params[0].grad is rig.views[0][0]
    assert rig.params[1].grad is rig.views[0][1]
    assert torch.equal(rig.flats[0], torch.arange(22.0))


@pytest.mark.parametrize("divisor", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [F32, BF16, FP16, F64], ids=str)
def test_hand_over_elsewhere_converts_and_divides(rig: Rig, dtype: torch.dtype, divisor: float) -> None:
    rig.g.begin(True)
    reduced = torch.randn(22).to(dtype)
    assert rig.g.hand_over(0, reduced, rig.views[0], divisor, None) == []
    assert torch.equal(rig.flats[0], (reduced.double() / divisor).to(F32))
    assert rig.params[0].grad is rig.views[0][0]


def test_hand_over_in_place_divides(rig: Rig) -> None:
    rig.g.begin(True)
    rig.flats[0].copy_(torch.arange(22.0))
    rig.g.hand_over(0, rig.flats[0], rig.views[0], 4.0, None)
    assert torch.equal(rig.flats[0], torch.arange(22.0) / 4)


@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("views", [True, False], ids=["views", "no-views"])
def test_hand_over_local_stash_is_overwritten(rig: Rig, divisor: float, views: bool) -> None:
    asides = [grad_of(p) for p in rig.params]
    for p, a in zip(rig.params, asides, strict=True):
        p.grad = a
    rig.g.begin(True)
    reduced = torch.randn(22)
    assert rig.g.hand_over(0, reduced.clone(), rig.views[0] if views else None, divisor, None) == []
    assert rig.params[0].grad is asides[0]
    assert rig.params[1].grad is asides[1]
    assert torch.equal(torch.cat([asides[0].flatten(), asides[1]]), reduced / divisor)
    assert rig.g.stash(0) is None
    rig.g.accumulate(1, None)
    rig.g.end()
    assert rig.g.begin(True) == 3
    assert not rig.g.is_local(0)


@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0])
def test_hand_over_synced_stash_is_increased(rig: Rig, divisor: float) -> None:
    hand_over_once(rig, 1.0)
    rig.g.begin(True)
    reduced = torch.randn(22)
    assert rig.g.hand_over(0, reduced.clone(), None, divisor, None) == []
    assert torch.equal(rig.flats[0], torch.ones(22) + reduced / divisor)
    assert rig.params[0].grad is rig.views[0][0]
    rig.g.end()
    rig.g.abort()
    assert rig.params[0].grad is rig.views[0][0]
    assert rig.params[2].grad is rig.views[1][0], "abort gives back what no bucket did"


@pytest.mark.parametrize("divisor", [1.0, 2.0])
def test_hand_over_mixed_bucket(divisor: float) -> None:
    """In one bucket: nothing aside, local, synced."""
    rig = Rig(params((4,), (5,), (6,)))
    rig.g.begin(True)
    rig.flats[0].fill_(1.0)
    rig.g.hand_over(0, rig.flats[0], rig.views[0], 1.0, None)
    rig.g.end()
    rig.params[0].grad = None
    local = rig.params[1].grad = torch.full((5,), 9.0)
    rig.g.begin(True)
    assert [rig.g.is_local(r) for r in range(3)] == [False, True, False]
    fresh = torch.empty(15)
    views = rig.split(0, fresh)
    reduced = torch.arange(15.0)
    assert rig.g.hand_over(0, reduced.clone(), views, divisor, None) == []
    assert rig.params[0].grad is views[0]
    assert rig.params[1].grad is local
    assert rig.params[2].grad is rig.views[0][2]
    assert torch.equal(torch.cat([p.grad for p in rig.params]), reduced / divisor + torch.tensor([0.0] * 9 + [1.0] * 6))


def test_hand_over_unused_row_gets_back_what_it_had(rig: Rig) -> None:
    hand_over_once(rig, 1.0)
    rig.params[1].grad = None
    before = rig.params[0].grad
    rig.g.begin(True)
    rig.pack(0)
    rig.g.hand_over(0, torch.full((22,), 5.0), rig.views[0], 1.0, bytes([0, 0, 1]))
    assert rig.params[0].grad is before
    assert torch.equal(before, torch.ones(3, 5))
    assert rig.params[1].grad is None
    rig.g.accumulate(1, None)
    rig.g.end()
    rig.g.begin(True)
    assert rig.g.stash(0) is before
    assert not rig.g.is_local(0), "still what an earlier hand_over left"


def test_hand_over_unused_outside_a_backward_touches_nothing(rig: Rig) -> None:
    grad = rig.params[0].grad = grad_of(rig.params[0])
    rig.g.hand_over(0, torch.zeros(22), rig.views[0], 1.0, bytearray(3))
    assert rig.params[0].grad is grad


def test_hand_over_used_wrong_is_refused(rig: Rig) -> None:
    rig.g.begin(True)
    with pytest.raises(ValueError, match="used: expected 3 bytes"):
        rig.g.hand_over(0, torch.zeros(22), rig.views[0], 1.0, b"\1\1")
    with pytest.raises(TypeError):
        rig.g.hand_over(0, torch.zeros(22), rig.views[0], 1.0, [1, 1, 1])
    with pytest.raises(ValueError, match="views: expected 2, one a row of the bucket, got 1"):
        rig.g.hand_over(0, torch.zeros(22), rig.views[0][:1], 1.0, None)


def test_hand_over_nowhere_to_go_is_named(rig: Rig) -> None:
    kept = rig.params[0].grad = grad_of(rig.params[0])
    rig.g.begin(True)
    with pytest.raises(ValueError, match="'p1': no gradient was set aside and no view"):
        rig.g.hand_over(0, torch.zeros(22), None, 1.0, None)
    rig.g.abort()
    assert rig.params[0].grad is kept


def test_hand_over_overlap_is_refused(rig: Rig) -> None:
    hand_over_once(rig, 1.0)
    rig.g.begin(True)
    with pytest.raises(ValueError, match="'p0': its gradient overlaps the reduced buffer"):
        rig.g.hand_over(0, rig.flats[0], rig.views[0], 1.0, None)
    rig.g.abort()
    memory = torch.zeros(40)
    rig.params[0].grad = rig.params[1].grad = None
    rig.g.begin(True)
    with pytest.raises(ValueError, match="'p0': its gradient overlaps"):
        rig.g.hand_over(0, memory[1:23], rig.split(0, memory), 1.0, None)


def test_hand_over_stash_not_flat_is_returned(rig: Rig) -> None:
    strange = rig.params[0].grad = torch.randn(5, 3).t()
    copy = strange.clone()
    rig.g.begin(True)
    assert rig.g.hand_over(0, torch.ones(22), rig.views[0], 1.0, None) == [0]
    assert rig.params[0].grad is None
    assert rig.g.stash(0) is strange
    assert torch.equal(strange, copy)
    assert torch.equal(rig.params[1].grad, torch.ones(7))
    strange.fill_(1.0)
    rig.g.settle(0, strange, True)
    assert rig.params[0].grad is strange
    assert rig.g.stash(0) is None
    rig.g.end()
    rig.g.begin(True)
    assert rig.g.stash(0) is strange
    assert not rig.g.is_local(0)


def test_hand_over_while_low_is_named_and_goes_on(rig: Rig) -> None:
    master = rig.params[0].data
    rig.g.begin(True)
    rig.params[0].data = master.bfloat16()
    with pytest.raises(RuntimeError, match="'p0': setting its gradient"):
        rig.g.hand_over(0, rig.flats[0], rig.views[0], 1.0, None)
    assert rig.params[1].grad is rig.views[0][1], "the other rows are done"
    rig.params[0].data = master
    rig.g.abort()
    assert rig.params[0].grad is None
    assert rig.params[1].grad is None


def test_hand_over_error_keeps_the_stash_for_abort(rig: Rig) -> None:
    master, aside = rig.params[0].data, grad_of(rig.params[0])
    rig.params[0].grad = aside
    rig.g.begin(True)
    rig.params[0].data = master.bfloat16()
    with pytest.raises(RuntimeError, match="'p0'"):
        rig.g.hand_over(0, torch.zeros(22), rig.views[0], 1.0, None)
    rig.params[0].data = master
    assert rig.g.stash(0) is aside
    rig.g.abort()
    assert rig.params[0].grad is aside


def test_hand_over_double_masters() -> None:
    rig = Rig(params((3,), (4,), dtype=F64))
    rig.g.begin(True)
    grads = [low(p, BF16) for p in rig.params]
    out = torch.empty(7, dtype=F64)
    rig.g.pack(0, out, 3.0)
    assert torch.equal(out, torch.cat([g.double() for g in grads]) / 3.0)
    rig.g.hand_over(0, out, rig.views[0], 1.0, None)
    assert rig.params[0].grad.dtype == F64


def test_bfloat16_masters_accumulate_in_float() -> None:
    rig = Rig(params((1,), dtype=BF16))
    rig.params[0].grad = torch.tensor([256.0], dtype=BF16)
    rig.g.begin(True)
    rig.params[0].grad = torch.tensor([1.0], dtype=BF16)
    assert rig.pack(0, F32).item() == 257.0


# --- accumulate ------------------------------------------------------------------------------------------------------


def test_accumulate_adds_in_full_precision(rig: Rig) -> None:
    aside = rig.params[0].grad = torch.full((3, 5), 256.0)
    rig.g.begin(False)
    low(rig.params[0]).fill_(1.0)
    assert rig.g.accumulate(0, rig.views[0]) == []
    assert rig.params[0].grad is aside
    assert torch.equal(aside, torch.full((3, 5), 257.0))
    assert rig.params[1].grad is None
    rig.g.end()
    rig.g.begin(False)
    assert rig.g.is_local(0)


def test_accumulate_nothing_aside_goes_to_the_view(rig: Rig) -> None:
    rig.g.begin(False)
    grads = [low(p) for p in rig.params]
    rig.g.accumulate(0, rig.views[0])
    rig.g.accumulate(1, rig.views[1])
    for p, g, view in zip(rig.params, grads, [*rig.views[0], *rig.views[1]], strict=True):
        assert p.grad is view
        assert torch.equal(view, g.float())
    rig.g.end()
    rig.g.begin(False)
    assert rig.g.is_local(0)


def test_accumulate_without_gradient_gives_the_stash_back(rig: Rig) -> None:
    hand_over_once(rig)
    local = rig.params[1].grad = grad_of(rig.params[1])
    before = rig.params[0].grad
    rig.g.begin(False)
    assert rig.g.accumulate(0, None) == []
    assert rig.params[0].grad is before
    assert rig.params[1].grad is local
    rig.g.end()
    rig.g.abort()
    rig.g.begin(False)
    assert not rig.g.is_local(0), "synced before, and nothing was added"
    assert rig.g.is_local(1)


def test_accumulate_on_synced_becomes_local(rig: Rig) -> None:
    hand_over_once(rig, 1.0)
    rig.g.begin(False)
    low(rig.params[0]).fill_(2.0)
    rig.g.accumulate(0, None)
    assert torch.equal(rig.params[0].grad, torch.full((3, 5), 3.0))
    rig.g.end()
    rig.g.accumulate(1, None)
    rig.g.begin(False)
    assert rig.g.is_local(0)
    assert not rig.g.is_local(1)


def test_accumulate_without_views_returns_low_and_keeps_full(rig: Rig) -> None:
    rig.g.begin(False)
    grad = low(rig.params[0])
    full = rig.params[1].grad = grad_of(rig.params[1])
    assert rig.g.accumulate(0, None) == [0]
    assert rig.params[0].grad is grad
    assert rig.params[1].grad is full


def test_accumulate_twice_changes_nothing_more(rig: Rig) -> None:
    rig.params[0].grad = torch.ones(3, 5)
    rig.g.begin(False)
    low(rig.params[0]).fill_(1.0)
    rig.g.accumulate(0, rig.views[0])
    rig.g.accumulate(0, rig.views[0])
    assert torch.equal(rig.params[0].grad, torch.full((3, 5), 2.0))


def test_accumulate_strange_gradient_is_returned(rig: Rig) -> None:
    aside = rig.params[0].grad = torch.ones(3, 5)
    rig.g.begin(False)
    strange = rig.params[0].grad = torch.randn(5, 3).t()
    assert rig.g.accumulate(0, rig.views[0]) == [0]
    assert rig.params[0].grad is strange
    rig.g.settle(0, aside.add_(strange), False)
    rig.g.end()
    rig.g.abort()
    assert rig.params[0].grad is aside
    rig.g.begin(False)
    assert rig.g.is_local(0)


def test_accumulate_device_error_leaves_all(rig: Rig) -> None:
    aside = rig.params[0].grad = torch.ones(3, 5)
    rig.g.begin(False)
    grad = low(rig.params[0])
    _C.host_fail_at(1)
    try:
        with pytest.raises(_C.DeviceError):
            rig.g.accumulate(0, rig.views[0])
    finally:
        _C.host_fail_at(0)
    assert rig.params[0].grad is grad
    rig.g.abort()
    assert rig.params[0].grad is aside
    assert torch.equal(aside, torch.ones(3, 5))


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


def test_set_names_changes_messages(rig: Rig) -> None:
    rig.g.set_names(["x", "y", "z"])
    with pytest.raises(ValueError, match="'x': no gradient"):
        rig.g.hand_over(0, torch.zeros(22), None, 1.0, None)


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
            rig.g.with_base(0),
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
