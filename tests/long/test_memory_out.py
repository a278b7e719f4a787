"""Every allocation fails once: CPython's inside calls of the extension, PyTorch's of copies and gradients in training.

PyTorch itself does not survive a failing CPython allocator everywhere: the window in which one fails is one call of the
extension.  What the C core takes from malloc fails in the programs of tests/c.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit.engine_rig import Rig as Lowered
from kit.engine_rig import small
from kit.inside import _C, leaves
from kit.leaf_rig import Rig as Gradients
from kit.leaf_rig import grad_of, masters
from kit.modules import mlp, vectors
from kit.oracle import Trial, square_step
from kit.ranks import Rank, on_ranks

_testcapi = pytest.importorskip("_testcapi", reason="this Python was built without its test modules")

#: So many positions in a row without a failure: the call allocates no more often.
ENOUGH = 25


def failing_once(make: Callable[[], Any], act: Callable[[Any], Any]) -> Iterator[tuple[Any, BaseException]]:
    """Of every position at which an allocation of ``act(rig)`` fails so that it raises: the rig, and the error."""
    position = calm = failures = 0
    while calm < ENOUGH:
        rig, error = make(), None
        _testcapi.set_nomemory(position, position + 1)
        try:
            act(rig)
        except BaseException as caught:
            _testcapi.remove_mem_hooks()
            error = caught
        finally:
            _testcapi.remove_mem_hooks()
        position, calm = position + 1, calm + 1
        if error is not None:
            calm, failures = 0, failures + 1
            yield rig, error
    assert failures > 0, "nothing failed"


# --- CPython's allocator: the engine --------------------------------------------------------------------------------------


def engine() -> Lowered:
    return Lowered(small(), limits=(1, 2048))


def require_memory_error(error: BaseException) -> None:
    """It says that memory was out, itself or by what caused it."""
    assert isinstance(error, MemoryError), repr(error)


def require_a_right_step(rig: Lowered, values: list[torch.Tensor]) -> None:
    rig.assert_masters(values)
    assert rig.engine.begin() == _C.UNCHANGED
    rig.assert_low(values)
    rig.engine.restore()
    rig.assert_masters(values)


ENGINE_CALLS: dict[str, Callable[[Lowered], Any]] = {
    "bind": lambda rig: rig.engine.bind(rig.masters, rig.lows, rig.arenas),
    "bind without arenas": lambda rig: rig.engine.bind(rig.masters, rig.lows, None),
    "remember": lambda rig: rig.engine.remember(),
    "counters": lambda rig: rig.engine.counters(),
    "event": lambda rig: rig.engine.event(0),
    "wait_hook": lambda rig: rig.engine.wait_hook(0),
    "buckets": lambda rig: rig.engine.buckets,
    "rows": lambda rig: rig.engine.rows,
}


@pytest.mark.parametrize("call", ENGINE_CALLS)
def test_memory_out_in_an_engine_leaves_masters_and_the_next_step_right(call: str) -> None:
    for rig, error in failing_once(engine, ENGINE_CALLS[call]):
        require_memory_error(error)
        require_a_right_step(rig, rig.snapshot())


def test_memory_out_while_an_engine_is_made_keeps_nothing() -> None:
    rig = engine()
    arguments = rig.params, rig.names, rig.sites, "bfloat16", 1, 2048
    owned = [*rig.params, rig.params, *rig.names, rig.sites, *(home for home, _, _ in rig.sites)]
    before = [sys.getrefcount(one) for one in owned]
    for _, error in failing_once(lambda: None, lambda _: _C.Engine(*arguments)):
        require_memory_error(error)
    del error
    gc.collect()
    assert [sys.getrefcount(one) for one in owned] == before
    require_a_right_step(rig, rig.snapshot())


def test_memory_out_for_good_a_step_needs_none_of_cpython() -> None:
    """A second cast, both switches and a wait: nothing of it allocates, so that nothing of it can fail."""
    rig = engine()
    values = rig.snapshot()
    require_a_right_step(rig, values)
    begin, wait, restore, seen = rig.engine.begin, rig.engine.wait, rig.engine.restore, 0
    _testcapi.set_nomemory(0)
    try:
        begin()
        wait()
        seen += rig.params[0].dtype is rig.dtype
        restore()
    finally:
        _testcapi.remove_mem_hooks()
    assert seen == 1
    require_a_right_step(rig, values)


# --- CPython's allocator: gradients ---------------------------------------------------------------------------------------


class Backward(Gradients):
    """A backward whose gradients are there: the first row's cannot be read flat, so that lists of rows are allocated."""

    def __init__(self, packed: bool = False) -> None:
        super().__init__(masters((3, 4), (10,), (5,)), [[0, 1], [2]])
        self.values = [master.detach().clone() for master in self.masters]
        self.old = [grad_of(master, torch.float32) for master in self.masters]
        self.held = [old.clone() for old in self.old]
        self.out = torch.empty(22)
        self.views = tuple(self.parts(0, torch.empty(22)))
        for master, old in zip(self.masters, self.old, strict=True):
            master.grad = old
        self.arrive(strange=not packed)
        if packed:
            self.g.pack(0, self.out, 1.0)
            self.masters[0].grad = self.old[0] = self.old[0].t().contiguous().t()

    def arrive(self, strange: bool = False) -> None:
        self.g.begin(True)
        for row, master in enumerate(self.masters[:2]):
            grad = grad_of(master)
            self.fire(row, grad.t().contiguous().t() if strange and row == 0 else grad)

    def require_as_before(self) -> None:
        """Each gradient is the object that it was, with its values, and leaves have none."""
        for master, old, held, value in zip(self.masters, self.old, self.held, self.values, strict=True):
            assert torch.equal(master, value)
            assert master.grad is old
            assert torch.equal(old, held)
        assert all(leaf.grad is None for leaf in self.leaves)

    def require_a_right_backward(self) -> None:
        for master, held in zip(self.masters, self.held, strict=True):
            master.grad = held.clone(memory_format=torch.contiguous_format)
        self.arrive()
        due = [leaf.grad.float() + master.grad for leaf, master in zip(self.leaves[:2], self.masters[:2], strict=True)]
        assert self.g.pack(0, self.out, 1.0) == []
        assert torch.equal(self.out, torch.cat([d.flatten() for d in due]))
        assert self.g.give(0, torch.full((22,), 3.0), self.views, 1.0, None) == []
        assert all(torch.equal(master.grad, torch.full_like(master, 3.0)) for master in self.masters[:2])
        self.g.abort()


GRADIENT_CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "hook": (Backward, lambda rig: rig.g.hook(0)),
    "fired_flags": (Backward, lambda rig: rig.g.fired_flags()),
    "contributes": (Backward, lambda rig: rig.g.contributes()),
    "unfired": (Backward, lambda rig: rig.g.unfired(1)),
    "pack": (Backward, lambda rig: rig.g.pack(0, rig.out, 1.0)),
    "give": (lambda: Backward(packed=True), lambda rig: rig.g.give(0, rig.out, rig.views, 1.0, None)),
    "accumulate": (Backward, lambda rig: rig.g.accumulate(0, rig.views)),
}


@pytest.mark.parametrize("call", GRADIENT_CALLS)
def test_memory_out_among_gradients_keeps_them_and_the_next_backward_is_right(call: str) -> None:
    for rig, error in failing_once(*GRADIENT_CALLS[call]):
        require_memory_error(error)
        rig.g.abort()
        rig.require_as_before()
        rig.require_a_right_backward()


# --- CPython's allocator: functions and queues ----------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[], Any]] = {
    "describe": lambda: _C.describe(ONE),
    "fuse": lambda: _C.fuse([ONE], [None], [OTHER], 1.0),
    "plan": lambda: _C.plan([100, 5000, 0], "bfloat16", 512, 4096),
    "build_info": _C.build_info,
}
ONE, OTHER = torch.ones(4), torch.zeros(4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_out_in_a_function_is_a_memory_error_and_keeps_nothing(function: str) -> None:
    FUNCTIONS[function]()
    before = [sys.getrefcount(one) for one in (ONE, OTHER)]
    for _, error in failing_once(lambda: None, lambda _: FUNCTIONS[function]()):
        require_memory_error(error)
    del error
    gc.collect()
    assert [sys.getrefcount(one) for one in (ONE, OTHER)] == before
    FUNCTIONS[function]()


# --- PyTorch's allocator, above the extension -----------------------------------------------------------------------------

TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


class Shortage:
    """The nth time from now that ddp_mp asks PyTorch for memory there is none; counts how often it asks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked, self.fails_at = 0, 0
        for name in ("empty", "empty_like", "zeros"):
            patch.setattr(torch, name, self._checked(getattr(torch, name)))
        patch.setattr(leaves.Generation, "allocate", lambda generation: self._allocate(generation))

    def next(self) -> None:
        self.asked += 1
        if self.asked == self.fails_at:
            raise RuntimeError(TEXT)

    def _checked(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def checked(*args: Any, **kwargs: Any) -> torch.Tensor:
            if sys._getframe(1).f_globals["__name__"].startswith("ddp_mp."):
                self.next()
            return make(*args, **kwargs)

        return checked

    def _allocate(self, generation: Any) -> None:
        """As the method does, one arena after the other."""
        for resize, nbytes in generation._resize:
            self.next()
            resize(nbytes)
        generation.allocated = True


SCENES = ["first step", "later step", "accumulation", "kept graph", "evaluation"]
SMALL = {"first_bucket_mb": 1e-6, "bucket_mb": 1e-6}


def act_out(scene: str, trial: Trial, inputs: list[torch.Tensor]) -> None:
    """The part of the training in which memory is out; the oracle knows nothing of it."""
    if scene == "accumulation":
        with trial.ddp.no_sync():
            square_step(trial.ddp, inputs[0])
    elif scene == "evaluation":
        with torch.no_grad():
            trial.ddp(inputs[0])
    elif scene == "kept graph":
        loss = trial.ddp(inputs[0]).float().square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        square_step(trial.ddp, inputs[0])


def require_before_or_after(trial: Trial, before: list[torch.Tensor | None]) -> None:
    """Masters have their values; gradients are those of before the step, or none of them is."""
    expected = dict(trial.oracle.module.named_parameters())
    for name, param in trial.module.named_parameters():
        assert param.dtype is torch.float32
        assert torch.equal(param, expected[name])
    for param, old in zip(trial.module.parameters(), before, strict=True):
        assert (param.grad is None) == (old is None)
        assert old is None or torch.equal(param.grad, old)


@pytest.mark.long
@on_ranks(1)
@pytest.mark.parametrize("wait", ["root", "module"])
@pytest.mark.parametrize("scene", SCENES)
def test_memory_out_in_training_leaves_masters_and_gradients_and_the_next_step_right(rank: Rank, scene: str, wait: str) -> None:
    failures = 0
    for nth in itertools.count(1):
        trial = Trial(rank, mlp(), options={"wait": wait, **SMALL}, bucket_cap_mb=0.0001)
        if scene != "first step":
            trial.train(vectors(), steps=2)
            trial.backward(square_step, rank.inputs(vectors(), 40), sync=scene != "accumulation")
        before = [None if p.grad is None else p.grad.clone() for p in trial.module.parameters()]
        with pytest.MonkeyPatch.context() as patch:
            shortage = Shortage(patch)
            shortage.fails_at = nth
            try:
                act_out(scene, trial, rank.inputs(vectors(), 41))
            except RuntimeError as error:
                if TEXT not in str(error):
                    raise
            else:
                assert shortage.asked < nth, "the error was lost"
                break
        failures += 1
        if scene != "kept graph":
            require_before_or_after(trial, before)
        trial.zero_grad()
        trial.train(vectors(), steps=2, seed=50)
    assert failures >= (1 if scene != "first step" else 4)
