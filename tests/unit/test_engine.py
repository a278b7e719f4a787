"""_C.Engine: checking, casting, switching `.data`, waiting.  The oracle is Tensor.to."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from kit.engine_rig import BF16, FP16, Rig, small
from kit.inside import _C
from torch import nn


@pytest.fixture(params=[True, False], ids=["arenas", "no-arenas"])
def arenas(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@contextlib.contextmanager
def worker_held() -> Iterator[None]:
    """Casts go to the worker, which runs nothing meanwhile."""
    inline = _C.host_set_inline_bytes(0)
    _C.host_hold(True)
    try:
        yield
    finally:
        _C.host_hold(False)
        _C.host_set_inline_bytes(inline)


# --- construction ----------------------------------------------------------------------------------------------------


def test_engine_describes_its_plan() -> None:
    engine = Rig(small()).engine
    assert sum(rows for _, rows, _ in engine.buckets) == 5
    assert [first for first, _, _ in engine.buckets] == sorted(first for first, _, _ in engine.buckets)
    assert len(engine.rows) == 5
    assert all(offset % 256 == 0 for _, offset in engine.rows)
    assert engine.native_stream is None
    assert engine.is_low is False


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"params": []}, ValueError, "no parameters"),
        ({"names": ["a"]}, ValueError, "names: expected 2"),
        ({"names": ["a", 3]}, TypeError, r"names\[1\]: expected str, got int"),
        ({"low_dtype": "int8"}, TypeError, "low_dtype 'int8': expected float64, float32, bfloat16 or float16"),
        ({"bucket_bytes": 0}, ValueError, "at least 1 byte"),
        ({"sites": [({}, "x", 2)]}, IndexError, r"sites\[0\]: row 2: expected 0 to 1"),
        ({"sites": [3]}, TypeError, r"sites\[0\]"),
        ({"sites": [(3, "x", 0)]}, TypeError, "dict"),
        ({"params": [torch.ones(2), torch.ones(2, dtype=torch.int64)]}, TypeError, "'b': is int64, which is not cast"),
        ({"params": [torch.ones(2), torch.ones(2, dtype=torch.complex64)]}, TypeError, "'b': is complex64, which"),
        ({"params": [torch.ones(2), 7]}, Exception, "'b'"),
        ({"params": [torch.ones(2), torch.ones(2, device="meta")]}, Exception, "'b'"),
    ],
)
def test_engine_arguments_wrong_are_named(change: dict, error: type[Exception], text: str) -> None:
    arguments = {
        "params": [torch.ones(2), torch.ones(3)],
        "names": ["a", "b"],
        "sites": [],
        "low_dtype": "bfloat16",
        "first_bucket_bytes": 1024,
        "bucket_bytes": 1024,
    }
    with pytest.raises(error, match=text):
        _C.Engine(**{**arguments, **change})


def test_engine_without_bind_refuses() -> None:
    p = nn.Parameter(torch.ones(3))
    engine = _C.Engine([p], ["p"], [], "bfloat16", 1024, 1024)
    assert engine.check() == _C.UNCHANGED
    for call in (engine.begin, engine.cast, engine.lower, lambda: engine.rebind_master(0, p.data)):
        with pytest.raises(RuntimeError, match="bind"):
            call()
    engine.restore()
    engine.wait()
    engine.wait_hook(0)()


# --- the round trip --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("limits", [(1, 1), (512, 2048), (1 << 20, 1 << 25)])
def test_begin_restore_round_trip_is_exact(low: str, limits: tuple[int, int], arenas: bool) -> None:
    rig = Rig(small(), low, limits, arenas)
    before = rig.snapshot()
    for _ in range(3):
        assert rig.engine.begin() == _C.UNCHANGED
        assert rig.engine.is_low is True
        rig.assert_low(before)
        rig.engine.restore()
        rig.assert_masters(before)


def test_begin_keeps_strides_of_any_dense_layout(arenas: bool) -> None:
    module = nn.ParameterDict(
        {
            "last": nn.Parameter(torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last)),
            "transposed": nn.Parameter(torch.randn(6, 9).t()),
            "permuted": nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1)),
            "ones": nn.Parameter(torch.randn(1, 5, 1)),
            "scalar": nn.Parameter(torch.tensor(1.5)),
            "empty": nn.Parameter(torch.empty(0, 4)),
        }
    )
    rig = Rig(module, arenas=arenas)
    before = rig.snapshot()
    assert rig.engine.begin() == _C.UNCHANGED
    rig.assert_low(before)
    rig.engine.restore()
    rig.assert_masters(before)


def test_begin_casts_every_kind_of_master(arenas: bool) -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(70).to(d)) for d in (torch.float64, torch.float32, FP16, BF16)])
    rig = Rig(module, "bfloat16", arenas=arenas)
    before = rig.snapshot()
    rig.engine.begin()
    rig.assert_low(before)
    rig.engine.restore()
    rig.assert_masters(before)


def test_begin_special_values_are_those_of_to() -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    values = torch.cat([values[~values.isnan()], torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-45, 3.4e38])])
    rig = Rig(nn.ParameterList([nn.Parameter(values)]))
    rig.engine.begin()
    rig.assert_low([values])


def test_begin_only_empty_parameters_launches_nothing() -> None:
    rig = Rig(nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0))]))
    assert rig.engine.begin() == _C.UNCHANGED
    assert rig.params[0].dtype == BF16
    rig.engine.wait_hook(0)()
    rig.engine.event(0).wait()
    assert rig.engine.event(0).query()
    rig.engine.restore()
    assert rig.params[0].dtype == torch.float32
    counters = rig.engine.counters()
    assert (counters["casts"], counters["launches"], counters["events"]) == (1, 0, 0)


def test_begin_sees_masters_that_changed() -> None:
    rig = Rig(small())
    for _ in range(3):
        with torch.no_grad():
            for p in rig.params:
                p.add_(torch.randn_like(p))
        now = rig.snapshot()
        rig.engine.begin()
        rig.assert_low(now)
        rig.engine.restore()


def test_begin_while_low_casts_again() -> None:
    rig = Rig(small())
    rig.engine.begin()
    rig.masters[0].fill_(3.0)
    assert rig.engine.begin() == _C.UNCHANGED
    rig.engine.wait()
    assert torch.equal(rig.params[0].data, torch.full_like(rig.params[0].data, 3.0))
    rig.engine.restore()
    rig.assert_masters(rig.masters)


def test_cast_without_lower_leaves_masters() -> None:
    rig = Rig(small())
    before = rig.snapshot()
    rig.engine.cast()
    rig.engine.wait()
    rig.assert_masters(before)
    rig.engine.lower()
    rig.assert_low(before)
    rig.engine.restore()


def test_backward_through_low_parameters_gives_low_gradients() -> None:
    rig = Rig(small())
    rig.engine.begin()
    rig.module(torch.randn(4, 33, dtype=BF16)).sum().backward()
    assert all(p.grad.dtype == BF16 for p in rig.params)


def test_restore_bucket_touches_only_its_rows() -> None:
    rig = Rig(small(), limits=(1, 1))
    before = rig.snapshot()
    rig.engine.begin()
    rig.engine.restore(2)
    assert [p.dtype == BF16 for p in rig.params] == [True, True, False, True, True]
    assert rig.engine.is_low is True
    rig.engine.restore(2)
    rig.engine.restore(bucket=0)
    rig.engine.restore(-1)
    rig.assert_masters(before)


# --- checking --------------------------------------------------------------------------------------------------------


def test_check_data_assigned_moves_that_row() -> None:
    rig = Rig(small())
    rig.params[3].data = torch.randn_like(rig.params[3].data)
    rig.params[1].data = rig.params[1].data.double()
    assert rig.engine.check() == _C.MOVED
    assert rig.engine.moved() == [1, 3]
    assert rig.engine.begin() == _C.MOVED
    assert rig.engine.is_low is False
    for row in rig.engine.moved():
        rig.masters[row] = rig.params[row].data
        rig.engine.rebind_master(row, rig.masters[row])
    assert rig.engine.moved() == []
    now = rig.snapshot()
    assert rig.engine.begin() == _C.UNCHANGED
    rig.assert_low(now)
    rig.engine.restore()
    rig.assert_masters(now)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data.t(),
        lambda p: p.data.view(-1),
        lambda p: p.data.view(33, 17),
        lambda p: p.data.unsqueeze(0),
        lambda p: p.data.view(torch.float16).view(torch.int16).view(BF16),
    ],
    ids=["transposed", "flat", "view", "dimension", "type"],
)
def test_check_same_memory_seen_otherwise_is_moved(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rig = Rig(small())
    rig.params[0].data = change(rig.params[0])
    assert rig.params[0].data_ptr() == rig.masters[0].data_ptr()
    assert rig.engine.begin() == _C.MOVED
    assert rig.engine.moved() == [0]


def test_check_storage_freed_moves_the_row() -> None:
    rig = Rig(small())
    rig.params[2].data.untyped_storage().resize_(0)
    assert rig.engine.check() == _C.MOVED
    assert rig.engine.moved() == [2]


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: setattr(linear, "weight", nn.Parameter(torch.randn(17, 33))),
        lambda linear: linear._parameters.__setitem__("weight", torch.randn(17, 33)),
        lambda linear: linear._parameters.__setitem__("weight", None),
        lambda linear: delattr(linear, "weight"),
    ],
    ids=["parameter", "tensor", "none", "missing"],
)
def test_check_parameter_exchanged_is_replaced(change: object) -> None:
    rig = Rig(small())
    before = rig.snapshot()
    change(rig.module[0])  # type: ignore[operator]
    assert rig.engine.check() == _C.REPLACED
    assert rig.engine.begin() == _C.REPLACED
    rig.assert_masters(before)


def test_check_low_rows_are_not_compared() -> None:
    rig = Rig(small())
    rig.engine.begin()
    assert rig.engine.check() == _C.UNCHANGED
    rig.module[0].weight = nn.Parameter(torch.zeros(17, 33))
    assert rig.engine.check() == _C.REPLACED
    rig.engine.restore()


def test_check_tied_parameter_has_two_sites() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight = module[0].weight
    rig = Rig(module)
    assert len(rig.params) == 3
    assert len(rig.sites) == 4
    assert rig.engine.check() == _C.UNCHANGED
    module[1].weight = nn.Parameter(torch.zeros(8, 8))
    assert rig.engine.check() == _C.REPLACED


def test_cast_master_storage_moved_is_followed() -> None:
    """A master whose storage got new memory (resize_) is read where it is now, not where it was."""
    rig = Rig(nn.ParameterList([nn.Parameter(torch.randn(1000))]))
    rig.engine.begin()
    storage = rig.masters[0].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    blocker = torch.empty(1000)
    storage.resize_(size)
    rig.masters[0].fill_(2.0)
    rig.engine.cast()
    rig.engine.wait()
    assert rig.params[0].data.eq(2.0).all()
    del blocker


# --- copies that outlive a pass ----------------------------------------------------------------------------------------


def test_check_and_cast_casts_and_switches_nothing() -> None:
    rig = Rig(small())
    before = rig.snapshot()
    assert rig.engine.check_and_cast() == _C.UNCHANGED
    rig.engine.wait()
    rig.assert_masters(before)
    for low, master in zip(rig.lows, rig.masters, strict=True):
        assert torch.equal(low, master.to(low.dtype))
    rig.params[2].data = rig.params[2].data.clone()
    casts = rig.engine.counters()["casts"]
    assert rig.engine.check_and_cast() == _C.MOVED
    assert rig.engine.counters()["casts"] == casts


def test_check_unwritten_after_a_write_says_so() -> None:
    rig = Rig(small())
    assert rig.engine.check_unwritten() == _C.WRITTEN, "nothing was remembered"
    rig.engine.remember()
    assert rig.engine.check_unwritten() == _C.UNCHANGED
    with torch.no_grad():
        rig.params[3].add_(1)
    assert rig.engine.check_unwritten() == _C.WRITTEN
    assert not rig.engine.is_low
    rig.params[2].data = rig.params[2].data.clone()
    assert rig.engine.check_unwritten() == _C.MOVED
    rig.module[0].bias = nn.Parameter(torch.zeros(17))
    assert rig.engine.check_unwritten() == _C.REPLACED


def test_reclaim_takes_what_others_switched_for_masters() -> None:
    rig = Rig(small(), arenas=False)
    rig.engine.begin()
    rig.params[0].data = rig.masters[0]
    rig.params[1].data = rig.masters[1]
    rig.lows[4].untyped_storage().resize_(0)
    rig.engine.reclaim()
    assert not rig.engine.is_low
    assert all(p.data_ptr() == m.data_ptr() for p, m in zip(rig.params, rig.masters, strict=True))


# --- binding ---------------------------------------------------------------------------------------------------------


def _rebound(rig: Rig, **change: object) -> None:
    arguments = {"masters": rig.masters, "lows": rig.lows, "arenas": rig.arenas, **change}
    rig.engine.bind(**arguments)


@pytest.mark.parametrize(
    ("what", "row", "value", "error", "text"),
    [
        ("masters", 0, lambda t: t[:3], ValueError, "'0.weight': the master has 99 elements: expected 561"),
        ("masters", 0, lambda t: t.t(), ValueError, "'0.weight': .*shape or strides"),
        ("masters", 0, lambda t: torch.empty(17, 66)[:, ::2], ValueError, "'0.weight': the master has gaps"),
        ("masters", 0, lambda t: t.long(), TypeError, "'0.weight': the master is int64, which is not cast"),
        ("masters", 1, lambda t: t.to("meta"), BufferError, "'0.bias': the master cannot be read"),
        ("lows", 4, lambda t: t.float(), TypeError, "'2.weight': the low-precision copy is float32: expected bfloat16"),
        ("lows", 4, lambda t: t.to(torch.uint8), TypeError, "'2.weight': the low-precision copy is uint8: expected bfloat16"),
        ("lows", 1, lambda t: t.clone(), ValueError, "'0.bias': the low-precision copy is not at byte .* of the arena"),
        ("lows", 0, lambda t: t.t().contiguous().t(), ValueError, "'0.weight': .*shape or strides"),
        ("arenas", 0, lambda t: t[:8], ValueError, r"arenas\[0\]: expected a contiguous uint8 tensor of"),
        (
            "arenas",
            0,
            lambda t: torch.empty(4096, dtype=torch.uint8)[::2],
            ValueError,
            r"arenas\[0\]: .* 1 dimensions with gaps",
        ),
        ("arenas", 0, lambda t: t.view(BF16), TypeError, r"arenas\[0\]: expected uint8, got bfloat16"),
        ("arenas", 0, lambda t: t.float(), TypeError, r"arenas\[0\]: expected uint8, got float32"),
        ("arenas", 0, lambda t: t.long(), TypeError, r"arenas\[0\]: expected uint8, got int64"),
        ("arenas", 0, lambda t: t.to(torch.int8), TypeError, r"arenas\[0\]: expected uint8, got int8"),
        ("arenas", 0, lambda t: t.bool(), TypeError, r"arenas\[0\]: expected uint8, got bool"),
        ("arenas", 0, lambda t: t.to(torch.float8_e4m3fn), TypeError, r"arenas\[0\]: expected uint8, got DLPack type 10"),
    ],
)
def test_bind_wrong_tensor_is_named_and_changes_nothing(
    what: str, row: int, value: object, error: type[Exception], text: str
) -> None:
    rig = Rig(small())
    before = rig.snapshot()
    tensors = list(getattr(rig, what))
    tensors[row] = value(tensors[row])  # type: ignore[operator]
    with pytest.raises(error, match=text):
        _rebound(rig, **{what: tensors})
    assert rig.engine.begin() == _C.UNCHANGED
    rig.assert_low(before)
    rig.engine.restore()
    rig.assert_masters(before)


def test_bind_copy_at_another_place_of_its_arena_is_told_where_it_is() -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64))])
    rig = Rig(module, limits=(4096, 4096))
    with pytest.raises(ValueError, match=r"'1': .* is not at byte 256 of the arena of bucket 0, but 0 bytes from its start"):
        _rebound(rig, lows=[rig.lows[0], rig.lows[0]])


def test_bind_wrong_counts_are_refused() -> None:
    rig = Rig(small())
    with pytest.raises(ValueError, match="masters: expected 5, one a parameter, got 4"):
        _rebound(rig, masters=rig.masters[1:])
    with pytest.raises(ValueError, match="lows: expected 5"):
        _rebound(rig, lows=rig.lows[1:])
    with pytest.raises(ValueError, match="arenas: expected"):
        _rebound(rig, arenas=[])


def test_bind_while_low_is_refused() -> None:
    rig = Rig(small())
    rig.engine.begin()
    with pytest.raises(RuntimeError, match="low precision"):
        rig.bind()
    rig.engine.restore()
    rig.bind()


def test_bind_other_arenas_casts_there() -> None:
    rig = Rig(small())
    old = rig.lows
    rig.engine.begin()
    rig.engine.restore()
    kept = [low.clone() for low in old]
    rig.arenas = [torch.empty_like(a) for a in rig.arenas]
    rig.lows = [rig._low(p, *place) for p, place in zip(rig.params, rig.engine.rows, strict=True)]
    rig.bind()
    with torch.no_grad():
        rig.params[0].fill_(9.0)
    now = rig.snapshot()
    rig.engine.begin()
    rig.assert_low(now)
    rig.engine.restore()
    assert all(torch.equal(a, b) for a, b in zip(old, kept, strict=True))


def test_bind_waits_for_casts_in_flight() -> None:
    """The old tensors must outlive the casts that were enqueued on them."""
    rig = Rig(nn.ParameterList([nn.Parameter(torch.randn(100_000))]))
    done = threading.Event()
    with worker_held():
        rig.engine.cast()
        rig.arenas = [torch.empty_like(a) for a in rig.arenas]
        rig.lows = [rig._low(p, *place) for p, place in zip(rig.params, rig.engine.rows, strict=True)]
        thread = threading.Thread(target=lambda: (rig.bind(), done.set()))
        thread.start()
        assert not done.wait(0.1)
        with pytest.raises(RuntimeError, match="in use"):
            rig.engine.cast()
    assert done.wait(20)
    thread.join()


def test_rebind_master_wrong_is_named() -> None:
    rig = Rig(small())
    with pytest.raises(ValueError, match=r"'0.weight': the new master differs .* in shape or strides"):
        rig.engine.rebind_master(0, torch.randn(33, 17).t())
    with pytest.raises(ValueError, match=r"'0.bias': the master has 3 elements: expected 17"):
        rig.engine.rebind_master(1, torch.randn(3))
    with pytest.raises(IndexError, match="row 5: expected 0 to 4"):
        rig.engine.rebind_master(5, torch.randn(3))


def test_rebind_master_with_released_arena() -> None:
    rig = Rig(small())
    for arena in rig.arenas:
        arena.untyped_storage().resize_(0)
    rig.params[0].data = torch.randn(17, 33)
    rig.masters[0] = rig.params[0].data
    rig.engine.rebind_master(0, rig.masters[0])
    with pytest.raises(ValueError, match=r"'0.weight'"):
        rig.engine.rebind_master(0, torch.randn(33, 17).t())


def test_rebind_master_without_a_readable_copy_says_so() -> None:
    rig = Rig(small(), arenas=False)
    rig.lows[0].untyped_storage().resize_(0)
    new = rig.masters[0].clone()
    rig.masters[0].untyped_storage().resize_(0)
    with pytest.raises(BufferError, match=r"'0.weight': neither .* can be read: it has no memory.*: bind\(\) both"):
        rig.engine.rebind_master(0, new)


def test_arena_resized_between_passes() -> None:
    rig = Rig(small())
    sizes = [a.untyped_storage().nbytes() for a in rig.arenas]
    before = rig.snapshot()
    blockers = []
    for _ in range(4):
        rig.engine.begin()
        rig.assert_low(before)
        rig.engine.restore()
        for a in rig.arenas:
            a.untyped_storage().resize_(0)
        blockers += [torch.empty(n, dtype=torch.uint8) for n in sizes]
        with pytest.raises(BufferError, match=r"'0.weight': the arena of its bucket cannot be read"):
            rig.engine.begin()
        rig.assert_masters(before)
        for a, n in zip(rig.arenas, sizes, strict=True):
            a.untyped_storage().resize_(n)


def test_low_freed_without_arenas_is_named() -> None:
    rig = Rig(small(), arenas=False)
    before = rig.snapshot()
    rig.lows[3].untyped_storage().resize_(0)
    with pytest.raises(BufferError, match=r"'1.bias': the low-precision copy cannot be read"):
        rig.engine.begin()
    rig.assert_masters(before)


# --- errors in the middle --------------------------------------------------------------------------------------------


class Stubborn(nn.Parameter):
    """Refuses to be switched while `refuse` names its side."""

    refuse: str | None = None

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if Stubborn.refuse == str(value.dtype):
            raise RefusalError(f"no {value.dtype}")
        torch.Tensor.data.__set__(self, value)


class RefusalError(Exception):
    pass


@pytest.fixture
def stubborn() -> Iterator[Rig]:
    module = small()
    module[1].weight = Stubborn(torch.randn(17))
    yield Rig(module)
    Stubborn.refuse = None


def test_lower_error_puts_masters_back_and_names_the_parameter(stubborn: Rig) -> None:
    before = stubborn.snapshot()
    Stubborn.refuse = "torch.bfloat16"
    with pytest.raises(RuntimeError, match=r"parameter '1.weight': .*no torch.bfloat16") as caught:
        stubborn.engine.begin()
    assert isinstance(caught.value.__cause__, RefusalError)
    stubborn.assert_masters(before)
    Stubborn.refuse = None
    assert stubborn.engine.begin() == _C.UNCHANGED
    stubborn.assert_low(before)
    stubborn.engine.restore()


def test_restore_error_goes_on_and_raises_at_the_end(stubborn: Rig) -> None:
    before = stubborn.snapshot()
    stubborn.engine.begin()
    Stubborn.refuse = "torch.float32"
    with pytest.raises(RuntimeError, match=r"parameter '1.weight': putting its master back"):
        stubborn.engine.restore()
    assert [p.dtype == BF16 for p in stubborn.params] == [False, False, True, False, False]
    assert stubborn.engine.is_low is True
    Stubborn.refuse = None
    stubborn.engine.restore()
    stubborn.assert_masters(before)


def device_error(nth: int, call: Callable[[], object]) -> tuple[str | None, int]:
    """The error of ``call`` when its nth call of the backend fails (None: there was none), and how many it made."""
    _C.host_fail_at(nth)
    error, made = None, 0
    try:
        call()
    except _C.DeviceError as found:
        error = str(found)
    finally:
        made = _C.host_fail_at(0)
    return error, made


def test_begin_device_error_is_raised_and_leaves_masters() -> None:
    buckets = len(Rig(small(), limits=(1, 2048)).engine.buckets)
    _, calls = device_error(0, Rig(small(), limits=(1, 2048)).engine.begin)
    assert calls >= 2 * buckets + 1  # the order of streams, then a launch and an event a bucket
    for nth in range(1, calls + 1):
        rig = Rig(small(), limits=(1, 2048))
        before = rig.snapshot()
        error, made = device_error(nth, rig.engine.begin)
        assert error is not None
        assert made <= nth + 1  # nothing is tried after it, but to wait for what is under way
        assert rig.engine.counters()["launches"] == max(0, nth - 1 - (calls - 2 * buckets)) // 2
        rig.assert_masters(before)
        assert rig.engine.begin() == _C.UNCHANGED
        rig.assert_low(before)
        rig.engine.restore()


@pytest.mark.parametrize("nth", [1, 2])
def test_wait_device_error_is_raised(nth: int) -> None:
    rig = Rig(small())
    with worker_held():
        rig.engine.begin()
        release = threading.Thread(target=lambda: (time.sleep(0.05), _C.host_hold(False)))
        release.start()
        error, made = device_error(nth, rig.engine.wait)
        release.join()
    assert error is not None
    assert made == nth
    rig.engine.wait()
    rig.engine.restore()


class Meddling(nn.Parameter):
    """Calls the engine from within its own switch."""

    call: object = None

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if Meddling.call is not None:
            Meddling.call()  # type: ignore[operator]
        torch.Tensor.data.__set__(self, value)


@pytest.mark.parametrize("method", ["bind", "begin", "cast", "lower", "restore", "check", "rebind_master"])
def test_reentrant_call_is_refused(method: str) -> None:
    module = small()
    module[1].weight = Meddling(torch.randn(17))
    rig = Rig(module)
    before = rig.snapshot()
    arguments = {"bind": (rig.masters, rig.lows, rig.arenas), "rebind_master": (0, rig.masters[0])}.get(method, ())
    Meddling.call = lambda: getattr(rig.engine, method)(*arguments)
    try:
        with pytest.raises(RuntimeError, match=r"'1.weight': .*in use"):
            rig.engine.begin()
    finally:
        Meddling.call = None
    rig.assert_masters(before)


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_wait_hook_takes_anything_and_returns_none() -> None:
    rig = Rig(small())
    hook = rig.engine.wait_hook(0)
    assert hook() is None
    rig.engine.begin()
    assert hook(rig.module, (1, 2), key=3) is None
    assert hook(rig.module) is None
    rig.engine.restore()


def test_wait_hook_as_forward_pre_hook() -> None:
    rig = Rig(small())
    handle = rig.module[0].register_forward_pre_hook(rig.engine.wait_hook(0))
    rig.engine.begin()
    rig.module[0](torch.randn(2, 33, dtype=BF16))
    handle.remove()
    rig.engine.restore()


@pytest.mark.parametrize("wait", ["hook", "wait", "wait-all", "event", "restore"])
def test_wait_blocks_until_the_cast_ran(wait: str) -> None:
    rig = Rig(small(), limits=(1, 1))
    waits = {
        "hook": lambda: rig.engine.wait_hook(4)(),
        "wait": lambda: rig.engine.wait(4),
        "wait-all": rig.engine.wait,
        "event": lambda: rig.engine.event(4).wait(),
        "restore": rig.engine.restore,
    }
    done = threading.Event()
    with worker_held():
        rig.engine.begin()
        thread = threading.Thread(target=lambda: (waits[wait](), done.set()))
        thread.start()
        assert not done.wait(0.1)
    assert done.wait(20)
    thread.join()
    rig.engine.restore()


def test_wait_once_covers_earlier_buckets() -> None:
    rig = Rig(small(), limits=(1, 1))
    with worker_held():
        rig.engine.begin()
        release = threading.Thread(target=lambda: (time.sleep(0.05), _C.host_hold(False)))
        release.start()
        rig.engine.wait(3)
        release.join()
        _C.host_hold(True)
    waits = rig.engine.counters()["waits"]
    for bucket in range(4):
        rig.engine.wait_hook(bucket)()
    assert rig.engine.counters()["waits"] == waits
    rig.engine.restore()


def test_wait_without_cast_returns_at_once() -> None:
    rig = Rig(small())
    with worker_held():
        rig.engine.wait()
        rig.engine.wait_hook(0)()
        rig.engine.event(0).wait()


def test_wait_bucket_out_of_range() -> None:
    rig = Rig(small(), limits=(1, 1))
    for call in (rig.engine.wait, rig.engine.restore, rig.engine.wait_hook, rig.engine.event):
        with pytest.raises(IndexError, match=r"bucket 5: expected .*0 to 4"):
            call(5)
        with pytest.raises(TypeError):
            call(1, 2)
        with pytest.raises(TypeError):
            call(row=1)
        with pytest.raises(TypeError):
            call("1")
    with pytest.raises(IndexError):
        rig.engine.wait_hook(-1)


def test_event_keeps_meaning_after_the_next_cast() -> None:
    rig = Rig(small())
    rig.engine.begin()
    event = rig.engine.event(0)
    rig.engine.restore()
    event.synchronize()
    with worker_held():
        rig.engine.begin()
        assert event.query()
        assert not rig.engine.event(0).query()
    rig.engine.restore()


def test_counters_count_this_engine_only() -> None:
    one, two = Rig(small(), limits=(1, 1)), Rig(small())
    one.engine.begin()
    one.engine.restore()
    first, second = one.engine.counters(), two.engine.counters()
    elements = sum(p.numel() for p in one.params)
    assert first["casts"] == 1
    assert first["launches"] == first["events"] == first["buckets"] == 5
    assert (first["bytes_read"], first["bytes_written"], first["rows"]) == (4 * elements, 2 * elements, 5)
    assert first["host_ns"] > 0
    assert second["casts"] == second["launches"] == second["events"] == second["bytes_read"] == second["host_ns"] == 0


def test_begin_from_many_threads_is_serialised_or_refused() -> None:
    rig = Rig(nn.ParameterList([nn.Parameter(torch.randn(200_000)) for _ in range(4)]))
    before = rig.snapshot()
    errors: list[BaseException] = []

    def work() -> None:
        for _ in range(50):
            try:
                rig.engine.begin()
                rig.engine.wait_hook(0)()
                rig.engine.restore()
            except RuntimeError as error:
                if "in use" not in str(error):
                    errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    rig.engine.restore()
    rig.assert_masters(before)


# --- references -----------------------------------------------------------------------------------------------------


def test_loops_leak_no_reference() -> None:
    rig = Rig(small(), limits=(1, 1))
    hook = rig.engine.wait_hook(0)
    objects = [*rig.params, *rig.masters, *rig.lows, *rig.arenas, *rig.names, hook, rig.engine, None, _C.Engine]

    def work() -> None:
        rig.engine.begin()
        hook(rig.module, ())
        rig.engine.wait()
        rig.engine.event(1).wait()
        rig.engine.restore(1)
        rig.engine.restore()
        rig.bind()
        rig.engine.rebind_master(0, rig.masters[0])
        rig.engine.check()
        rig.engine.moved()
        _ = rig.engine.buckets, rig.engine.rows, rig.engine.counters()
        with contextlib.suppress(ValueError):
            rig.engine.rebind_master(1, torch.randn(3))
        with contextlib.suppress(ValueError):
            rig.engine.bind(rig.masters, rig.masters[:1], None)

    work()
    gc.collect()
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(100):
        work()
    gc.collect()
    after = [sys.getrefcount(o) for o in objects]
    assert all(a - b < 50 for a, b in zip(after, before, strict=True)), list(zip(before, after, strict=True))


def test_engine_releases_what_it_owned() -> None:
    rig = Rig(small())
    rig.engine.begin()
    rig.engine.restore()
    watched = [weakref.ref(t) for t in rig.masters + rig.lows + rig.arenas]
    engine = weakref.ref(rig.engine)
    del rig
    gc.collect()
    assert engine() is None
    assert all(w() is None for w in watched)


def test_engine_in_a_cycle_is_collected() -> None:
    module = small()
    rig = Rig(module)
    module[0].register_forward_pre_hook(rig.engine.wait_hook(0))
    module.rig = rig.engine
    rig.engine.begin()
    engine, watched = weakref.ref(rig.engine), weakref.ref(module)
    del module, rig
    gc.collect()
    assert engine() is None
    assert watched() is None


@pytest.mark.parametrize("cycle", [False, True], ids=["dropped", "collected"])
def test_engine_gone_while_low_puts_masters_back(cycle: bool) -> None:
    rig = Rig(small())
    before, kept = rig.snapshot(), rig.params
    rig.engine.begin()
    if cycle:
        rig.sites[0][0]["itself"] = rig  # type: ignore[assignment]
        rig.module = rig  # type: ignore[assignment]
    del rig
    gc.collect()
    assert all(torch.equal(p, b) and p.dtype == b.dtype for p, b in zip(kept, before, strict=True))


def test_engine_gone_while_low_leaves_what_others_switched() -> None:
    rig = Rig(small())
    kept = rig.params
    rig.engine.begin()
    mine = kept[0].data = torch.zeros(17, 33)
    del rig
    gc.collect()
    assert kept[0].data_ptr() == mine.data_ptr()
    assert all(p.dtype == torch.float32 for p in kept)


def test_engine_gone_while_low_says_what_it_could_not_do(stubborn: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: said.append(str(unraisable.exc_value)))
    rig = Rig(stubborn.module)
    rig.engine.begin()
    Stubborn.refuse = "torch.float32"
    del rig
    gc.collect()
    assert len(said) == 1
    assert said[0].startswith("parameter '1.weight': putting its master back")
    assert [p.dtype == BF16 for p in stubborn.params] == [False, False, True, False, False]


def test_engine_dropped_with_casts_in_flight() -> None:
    for _ in range(20):
        inline = _C.host_set_inline_bytes(0)
        try:
            rig = Rig(nn.ParameterList([nn.Parameter(torch.randn(50_000))]))
            rig.engine.cast()
            del rig
        finally:
            _C.host_set_inline_bytes(inline)
    gc.collect()


def test_hook_outlives_module_and_names() -> None:
    hook = Rig(small()).engine.wait_hook(0)
    gc.collect()
    assert hook() is None
