"""``hooks="root"``: our root hook below PyTorch's own wait hook and communication hook.

Those need events of a device; on a CPU build they are replaced by ones that do nothing.  Their defects stay: the first
gradients are not checked, as PyTorch reduces memory that nobody filled there.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.modules import Two, mlp, vectors
from kit.oracle import BF16, F32, Trial, mean_square, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


class IdleEvent:
    """Stands in for ``torch.Event`` where a build has no device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


class IdleStream:
    """Stands in for the current stream."""

    def wait_stream(self, other: Any) -> None:
        pass


@contextlib.contextmanager
def idle_device() -> Iterator[None]:
    """Lets PyTorch's own hooks run on a CPU build."""
    if torch.accelerator.is_available():
        yield
        return
    event, stream = torch.Event, torch.accelerator.current_stream
    torch.Event, torch.accelerator.current_stream = IdleEvent, lambda *args: IdleStream()  # type: ignore[misc,assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's hooks keep gradients on an accumulator of another type
            yield
    finally:
        torch.Event, torch.accelerator.current_stream = event, stream  # type: ignore[misc]


def warm_up(trial: Trial) -> None:
    """The iteration whose gradients PyTorch does not get right."""
    square_step(trial.ddp, torch.zeros(4, 8))
    trial.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("how", ["patch", "install", "later"])
@pytest.mark.parametrize("mb", [1e-5, 25.0])
def test_root_training_equals_oracle_from_the_second_iteration_on(rank: Rank, how: str, mb: float) -> None:
    with idle_device():
        trial = Trial(rank, mlp(8, 4), how=how, options={"hooks": "root", "first_bucket_mb": mb, "bucket_mb": mb})
        assert ddp_mp.is_patched(trial.ddp)
        warm_up(trial)
        trial.train(vectors(), steps=4, optimizer=lambda ps: SGD(ps, lr=0.1))
        counters = ddp_mp.stats(trial.ddp)
        assert counters.casts == 5
        assert (counters.buckets > 1) == (mb < 1)


@on_ranks(2)
def test_root_patched_and_unpatched_in_inference_mode_trains(rank: Rank) -> None:
    with idle_device():
        ddp = DistributedDataParallel(mlp())
        for patching in (True, False):
            with torch.inference_mode():
                if patching:
                    ddp_mp.patch(ddp, mixed_precision=MIXED, options=ddp_mp.Options(hooks="root"))
                else:
                    ddp_mp.unpatch(ddp)
            for _ in range(2):
                output = ddp(torch.randn(4, 8))
                assert output.dtype is BF16  # unpatched it has PyTorch's own, which was set up for our hook
                output.float().sum().backward()
                ddp.zero_grad()


@on_ranks(2)
def test_root_low_precision_memory_is_that_of_each_parameter_and_is_given_back(rank: Rank) -> None:
    with idle_device():
        trial = Trial(rank, mlp(), options={"hooks": "root"})
        warm_up(trial)
        loss = mean_square(trial.ddp, torch.randn(4, 8))
        for param in trial.module.parameters():
            assert param.dtype is BF16
            assert param.data_ptr() == param._mp_param.data_ptr()
            assert param._fp_param.dtype is F32
            assert param._mp_param.untyped_storage().nbytes() == param.numel() * 2
        assert ddp_mp.stats(trial.ddp).low_bytes == sum(p.numel() * 2 for p in trial.module.parameters())
        loss.backward()
        assert all(p.dtype is F32 and p.grad.dtype is F32 for p in trial.module.parameters())
        assert ddp_mp.stats(trial.ddp).low_bytes == 0


@on_ranks(2)
def test_root_queues_hold_one_event_a_module_and_forward(rank: Rank) -> None:
    with idle_device():
        trial = Trial(rank, Two(), options={"hooks": "root"})
        warm_up(trial)
        seen: list[int] = []
        trial.module.a.register_forward_pre_hook(lambda m, _: seen.append(len(trial.ddp._submodule_to_event[m])), prepend=True)
        square_step(trial.ddp, torch.randn(4, 8))
        assert seen == [1]
        assert len(trial.ddp._submodule_to_event[trial.module.a]) == 0, "PyTorch's wait hook took it"
        trial.zero_grad()


@on_ranks(2)
def test_root_replaced_weights_and_loaded_state_are_used(rank: Rank) -> None:
    with idle_device():
        trial = Trial(rank, mlp(), options={"hooks": "root"})
        warm_up(trial)
        torch.manual_seed(1)
        state = {name: torch.randn_like(p) for name, p in trial.oracle.module.named_parameters()}
        trial.module.load_state_dict(state)
        trial.oracle.module.load_state_dict(state)
        trial.train(vectors())
        trial.module[0].weight.data = torch.ones(8, 8)
        trial.oracle.module[0].weight.data = torch.ones(8, 8)
        trial.train(vectors(), seed=10)


@on_ranks(2)
def test_root_saving_between_forward_and_backward_is_full_precision(rank: Rank) -> None:
    with idle_device():
        trial = Trial(rank, mlp(), options={"hooks": "root"})
        warm_up(trial)
        trial.ddp(torch.randn(4, 8))
        state = trial.module.state_dict()
        for name, want in trial.oracle.module.named_parameters():
            require_same(name, state[name], want)
        trial.ddp(torch.randn(4, 8))
        with ddp_mp.full_precision(trial.ddp):
            trial.check()
        for param in trial.module.parameters():
            param._ddp_mp_hook_state[1].remove()  # PyTorch's, which keep the wrapper until a backward comes


@on_ranks(2)
def test_root_unpatch_gives_pytorchs_root_hook_back_and_training_goes_on(rank: Rank) -> None:
    with idle_device():
        trial = Trial(rank, mlp(), options={"hooks": "root"})
        warm_up(trial)
        names = {getattr(hook, "__name__", type(hook).__name__) for hook in trial.module._forward_pre_hooks.values()}
        assert "_root_copy_hook" not in names
        assert "_module_wait_for_copy_hook" in names
        assert ddp_mp.unpatch(trial.ddp) is trial.ddp
        assert not ddp_mp.is_patched(trial.ddp)
        names = {getattr(hook, "__name__", type(hook).__name__) for hook in trial.module._forward_pre_hooks.values()}
        assert {"_root_copy_hook", "_module_wait_for_copy_hook"} <= names
        assert "_ddp_mp_root" not in trial.ddp.__dict__
        assert not any("__getstate__" in m.__dict__ for m in trial.module.modules())
        trial.train(vectors(), steps=2)
        ddp_mp.patch(trial.ddp)
        trial.train(vectors(), steps=2, seed=10)


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_root_unpatch_inside_a_forward_or_backward_is_refused(rank: Rank, where: str) -> None:
    with idle_device():
        trial = Trial(rank, Two(), options={"hooks": "root"})
        warm_up(trial)
        refused: list[str] = []

        def unpatch(*_: Any) -> None:
            with pytest.raises(RuntimeError, match="a forward or backward of this model is under way") as error:
                ddp_mp.unpatch(trial.ddp)
            refused.append(str(error.value))

        if where == "forward":
            handle = trial.module.b.register_forward_hook(unpatch)
        xs = rank.inputs(vectors())
        output = trial.ddp(xs[rank.index])
        if where == "backward":
            handle = output.register_hook(unpatch)
        output.float().square().mean().backward()
        handle.remove()
        assert len(refused) == 1
        assert ddp_mp.is_patched(trial.ddp)
        trial.oracle.backward(square_step, xs)
        trial.check()
        ddp_mp.unpatch(trial.ddp)
        assert not ddp_mp.is_patched(trial.ddp)


@on_ranks(2)
def test_root_same_arguments_are_idempotent_and_others_refused(rank: Rank) -> None:
    with idle_device():
        options = ddp_mp.Options(hooks="root")
        ddp = ddp_mp.patch(DistributedDataParallel(mlp(), mixed_precision=MIXED), options=options)
        assert ddp_mp.patch(ddp) is ddp
        assert ddp_mp.patch(ddp, options=options) is ddp
        with pytest.raises(ValueError, match="hooks='root'"):
            ddp_mp.patch(ddp, options=ddp_mp.Options())
        ddp_mp.masters_changed(ddp)


@on_ranks(2)
def test_root_what_pytorchs_hooks_cannot_do_is_refused(rank: Rank) -> None:
    with idle_device():
        for precision in (ddp_mp.MixedPrecision(BF16), ddp_mp.MixedPrecision(None, F32)):
            with pytest.raises(ValueError, match="hooks='root'"):
                ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=precision, options=ddp_mp.Options(hooks="root"))
        for more in ({"prefetch": True}, {"reuse_unchanged": True}, {"wait": "module"}):
            options = ddp_mp.Options(hooks="root", **more)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="hooks='all'"):
                ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED, options=options)
        model = nn.Linear(8, 8)
        model.weight.data = torch.randn(16, 16)[::2, ::2]
        with pytest.raises(RuntimeError, match="weight"):
            ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED, options=ddp_mp.Options(hooks="root"))


@on_ranks(2)
def test_root_copy_of_the_module_is_an_ordinary_one(rank: Rank) -> None:
    with idle_device():
        trial = Trial(rank, mlp(), how="later", options={"hooks": "root"})
        warm_up(trial)
        file = io.BytesIO()
        torch.save(trial.module.state_dict(), file)
        ddp_mp.unpatch(trial.ddp)
    plain = mlp()
    plain.load_state_dict(copy.deepcopy(trial.module.state_dict()))
    assert plain(torch.randn(2, 8)).dtype is F32


@on_ranks(1)
def test_root_copy_of_the_modules_events_is_empty(rank: Rank) -> None:
    # events belong to a stream, and the copy's modules have casts of their own
    with idle_device():
        trial = Trial(rank, mlp(), how="later", options={"hooks": "root"})
        trial.ddp(torch.randn(2, 8))
        queue = next(iter(trial.ddp._submodule_to_event.values()))
        queue.append(torch.Event())
        copied = copy.deepcopy(queue)
        assert type(copied) is type(queue)
        assert not copied
        ddp_mp.unpatch(trial.ddp)
