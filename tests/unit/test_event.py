"""Event and EventDeque on the host backend."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
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


@pytest.mark.parametrize("kind", [_C.Event, _C.EventDeque])
def test_types_are_immutable_and_final(kind: type) -> None:
    with pytest.raises(TypeError, match="immutable"):
        kind.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Derived", (kind,), {})


# --- EventDeque ----------------------------------------------------------------------------------------------------

EVENTS = [Caster().engine.event(0) for _ in range(8)]


class DequeMachine(RuleBasedStateMachine):
    """Every sequence of operations gives what collections.deque gives, errors and their texts included."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = _C.EventDeque()
        self.theirs: deque[_C.Event] = deque()

    def both(self, operation: Callable[[Any], Any]) -> None:
        results = []
        for one in (self.ours, self.theirs):
            try:
                results.append((operation(one), None))
            except Exception as error:
                results.append((type(error), str(error)))
        assert results[0] == results[1]

    @rule(event=st.sampled_from(EVENTS))
    def append(self, event: _C.Event) -> None:
        self.both(lambda one: one.append(event))

    @rule(event=st.sampled_from(EVENTS))
    def appendleft(self, event: _C.Event) -> None:
        self.both(lambda one: one.appendleft(event))

    @rule(events=st.lists(st.sampled_from(EVENTS), min_size=5, max_size=40), left=st.booleans())
    def append_many(self, events: list[_C.Event], left: bool) -> None:
        for event in events:
            self.both(lambda one, event=event: (one.appendleft if left else one.append)(event))

    @rule()
    def pop(self) -> None:
        self.both(lambda one: one.pop())

    @rule()
    def popleft(self) -> None:
        self.both(lambda one: one.popleft())

    @rule(count=st.integers(1, 40), left=st.booleans())
    def pop_many(self, count: int, left: bool) -> None:
        for _ in range(count):
            self.both(lambda one: one.popleft() if left else one.pop())

    @rule()
    def clear(self) -> None:
        self.both(lambda one: one.clear())

    @rule(index=st.integers(-50, 50) | st.sampled_from([sys.maxsize, -sys.maxsize - 1]))
    def getitem(self, index: int) -> None:
        self.both(lambda one: one[index])

    @rule(event=st.sampled_from(EVENTS))
    def contains(self, event: _C.Event) -> None:
        self.both(lambda one: event in one)

    @invariant()
    def same(self) -> None:
        self.both(len)
        self.both(bool)
        self.both(list)


TestDeque = DequeMachine.TestCase
TestDeque.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_deque_index_that_is_no_integer_raises_as_deque_does() -> None:
    for index in ("0", 1.0, slice(0, 1), None):
        texts = []
        for one in (_C.EventDeque(), deque()):
            with pytest.raises(TypeError) as caught:
                one[index]  # type: ignore[index]
            texts.append(str(caught.value).replace("ddp_mp._C.EventDeque", "deque"))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("end", ["append", "appendleft"])
@pytest.mark.parametrize("item", [None, 0, "event", torch.zeros(1), _C.EventDeque()], ids=lambda item: type(item).__name__)
def test_deque_takes_events_only(end: str, item: object) -> None:
    queue = _C.EventDeque()
    with pytest.raises(TypeError, match="expected an Event, got "):
        getattr(queue, end)(item)
    assert len(queue) == 0


def test_deque_takes_no_arguments() -> None:
    with pytest.raises(TypeError, match="takes no arguments"):
        _C.EventDeque([])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes no arguments"):
        _C.EventDeque(maxlen=3)  # type: ignore[call-arg]


def test_deque_iterator_goes_over_what_was_there() -> None:
    queue = _C.EventDeque()
    for event in EVENTS[:3]:
        queue.append(event)
    seen = []
    for event in queue:
        seen.append(event)
        queue.append(event)
        queue.popleft()
    assert seen == EVENTS[:3]


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(0, 30))
def test_deque_references_are_balanced(pushed: int, popped: int) -> None:
    event = Caster(1).engine.event(0)
    queue = _C.EventDeque()
    # Counts are taken outside of assertions, which hold what they evaluate.
    before = sys.getrefcount(event)
    for i in range(pushed):
        (queue.append if i % 2 else queue.appendleft)(event)
    for i in range(min(popped, pushed)):
        (queue.pop if i % 2 else queue.popleft)()
    full = sys.getrefcount(event)
    list(queue)
    if len(queue):
        queue[0]
    read = sys.getrefcount(event)
    queue.clear()
    cleared = sys.getrefcount(event)
    assert (full, read, cleared) == (before + pushed - min(popped, pushed),) * 2 + (before,)


def test_deque_dropped_drops_its_events(event: _C.Event) -> None:
    before = sys.getrefcount(event)
    queue = _C.EventDeque()
    for _ in range(9):
        queue.append(event)
    during = sys.getrefcount(event)
    del queue
    after = sys.getrefcount(event)
    assert (during, after) == (before + 9, before)


def test_deque_of_threads_loses_nothing() -> None:
    """Four threads push while four pop: every event comes out once."""
    queue = _C.EventDeque()
    rounds = 2000
    popped: list[int] = []

    def push(left: bool) -> None:
        for i in range(rounds):
            (queue.appendleft if left else queue.append)(EVENTS[i % len(EVENTS)])

    def pull(left: bool) -> None:
        count, end = 0, time.monotonic() + 60
        while count < rounds and time.monotonic() < end:
            try:
                (queue.popleft if left else queue.pop)()
                count += 1
            except IndexError:
                time.sleep(0)
        popped.append(count)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [in_thread(lambda work=work, i=i: work(i % 2 == 0)) for i in range(4) for work in (push, pull)]
        for thread in threads:
            thread.join(90)
    finally:
        sys.setswitchinterval(interval)
    assert popped == [rounds] * 4
    assert len(queue) == 0


def test_deque_copies_are_empty() -> None:
    queue = _C.EventDeque()
    queue.append(EVENTS[0])
    for made in (copy.deepcopy(queue), pickle.loads(pickle.dumps(queue))):
        assert type(made) is _C.EventDeque
        assert len(made) == 0
    assert len(queue) == 1


def test_deques_serve_upstreams_hook(caster: Caster) -> None:
    """The lines of PyTorch's _module_wait_for_copy_hook that touch it, with a stub for the device's stream."""
    table = defaultdict(_C.EventDeque)
    table[caster.module].append(caster.cast())
    for expected in (True, False):
        try:
            event = table[caster.module].popleft()
        except IndexError:
            assert not expected
            continue
        assert expected
        event.wait(stream=Stub())
        assert torch.equal(caster.low, caster.expected())
