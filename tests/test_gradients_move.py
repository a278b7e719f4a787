"""_C.Gradients: packing, hand-over, accumulation.  The oracle is arithmetic on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradient_rig import BF16, F32, F64, FP16, Rig, grad_of, hand_over_once, low, params
from torch import nn

from ddp_mp import _C


@pytest.fixture
def rig() -> Rig:
    return Rig(params((3, 5), (7,), (2, 2, 2)), [[0, 1], [2]])


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
    assert rig.g.fired_flags()[1]
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
