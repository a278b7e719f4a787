"""Event on the host backend."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit.inside import _C
from torch import nn
from torch.nn import Parameter


class Caster:
    """One parameter, its engine, and a way to have the engine cast it."""

    def __init__(self, numel: int = 64) -> None:
        self.module = nn.Module()
        self.parameter = self.module.weight = Parameter(torch.randn(numel))
        sites = [(self.module._parameters, "weight", 0)]
        self.engine = _C.Engine([self.parameter], ["weight"], sites, "bfloat16", 1 << 20, 1 << 20)
        arenas = [torch.empty(size, dtype=torch.uint8) for _, _, size in self.engine.buckets]
        self.low = arenas[0].view(torch.bfloat16)[:numel]
        self.engine.bind([self.parameter.detach()], [self.low], arenas)

    def cast(self) -> _C.Event:
        self.engine.cast()
        return self.engine.event(0)

    def expected(self) -> torch.Tensor:
        return self.parameter.detach().to(torch.bfloat16)


@pytest.fixture
def caster() -> Caster:
    return Caster()


@pytest.fixture
def event(caster: Caster) -> _C.Event:
    """One that nothing else refers to."""
    return caster.engine.event(0)


@pytest.fixture
def held() -> Iterator[Callable[[], None]]:
    """The host stream stands still; the value lets it go on."""

    def release() -> None:
        _C.host_hold(False)

    inline = _C.host_set_inline_bytes(0)
    _C.host_hold(True)
    yield release
    release()
    _C.host_set_inline_bytes(inline)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# --- Event ---------------------------------------------------------------------------------------------------------


def test_event_is_made_by_engines_only() -> None:
    with pytest.raises(TypeError, match="cannot create"):
        _C.Event()


def test_event_never_recorded_is_complete(caster: Caster) -> None:
    event = caster.engine.event(0)
    assert event.query() is True
    event.wait()
    event.synchronize()


@pytest.mark.parametrize("method", ["wait", "synchronize"])
def test_event_wait_returns_when_the_cast_is_done(caster: Caster, held: Callable[[], None], method: str) -> None:
    event = caster.cast()
    assert event.query() is False
    done: list[torch.Tensor] = []
    thread = in_thread(lambda: (getattr(event, method)(), done.append(caster.low.clone())))
    thread.join(0.1)
    assert not done
    # That this line runs at all says that the waiting thread has given up the GIL.
    held()
    thread.join(30)
    assert torch.equal(done[0], caster.expected())
    assert event.query() is True


class Stub:
    """Stands for any object that a framework calls a stream; asking it for anything is an error."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the host backend asked a stream for {name}")


@pytest.mark.parametrize("stream", [None, 0, 7, -1, 2**70, "stream", Stub()], ids=lambda value: type(value).__name__)
def test_event_wait_on_host_ignores_the_stream(caster: Caster, stream: Any) -> None:
    caster.cast().wait(stream)
    assert torch.equal(caster.low, caster.expected())
    caster.cast().wait(stream=stream)


def test_event_wait_arguments_are_checked(caster: Caster) -> None:
    event = caster.cast()
    with pytest.raises(TypeError, match="at most 1 argument"):
        event.wait(None, None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="at most 1 argument"):
        event.wait(None, stream=None)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        event.wait(device=None)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["wait", "query", "synchronize"])
def test_event_backend_failure_is_a_device_error(caster: Caster, method: str) -> None:
    event = caster.cast()
    event.synchronize()
    _C.host_fail_at(1)
    try:
        with pytest.raises(_C.DeviceError, match="event_"):
            getattr(event, method)()
    finally:
        _C.host_fail_at(0)
    getattr(event, method)()


def test_device_error_is_a_runtime_error_of_the_package() -> None:
    assert issubclass(_C.DeviceError, RuntimeError)
    assert f"{_C.DeviceError.__module__}.{_C.DeviceError.__name__}" == "ddp_mp.DeviceError"


def test_event_native_handles_differ_between_live_events(caster: Caster) -> None:
    events = [caster.cast() for _ in range(5)]
    assert len({event.native_handle for event in events}) == 5
    assert all(event.native_handle > 0 for event in events)


def test_event_dropped_goes_back_to_the_pool(caster: Caster) -> None:
    """Without that, a thousand events would need a thousand handles."""
    handles = set()
    for _ in range(1000):
        handles.add(caster.cast().native_handle)
    assert len(handles) < 10


def test_event_kept_is_not_reused(caster: Caster, held: Callable[[], None]) -> None:
    """Casts after it must not change what an event stands for."""
    kept = caster.engine.event(0)
    assert kept.query() is True
    caster.cast()
    assert kept.query() is True


def test_event_outlives_the_engine() -> None:
    caster = Caster()
    event, low, expected = caster.cast(), caster.low, caster.expected()
    del caster
    gc.collect()
    event.wait()
    assert event.query() is True
    assert torch.equal(low, expected)


def test_event_kept_by_its_parameter_is_collected() -> None:
    class Special(Parameter):
        pass

    module = nn.Module()
    module.weight = special = Special(torch.zeros(4))
    engine = _C.Engine([special], ["weight"], [(module._parameters, "weight", 0)], "bfloat16", 1 << 20, 1 << 20)
    special.event = engine.event(0)  # type: ignore[attr-defined]
    gone = weakref.ref(special)
    del engine, module, special
    gc.collect()
    assert gone() is None


def test_event_cannot_be_pickled_or_copied(caster: Caster) -> None:
    event = caster.cast()
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(event)
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(event)


def test_event_is_immutable_and_final() -> None:
    kind: Any = _C.Event
    with pytest.raises(TypeError, match="immutable"):
        kind.extra = 1
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Derived", (kind,), {})
