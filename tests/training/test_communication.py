"""What goes between ranks: communication hooks of the user, Join with uneven inputs, and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit.modules import Luck, Statistics, column, mlp, no_luck, scalar, vectors
from kit.oracle import BF16, F32, FP16, SYNC_BUFFERS, Trial, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

# --- communication hooks -------------------------------------------------------------------------------------------------


def identity_of(hook: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    """The hook, and a note of what it was given."""

    def noted(state, bucket):  # no annotations: register_comm_hook compares them
        seen.append((bucket.index(), bucket.buffer().dtype, bucket.buffer().dim(), bucket.is_last(), len(bucket.parameters())))
        return hook(state, bucket)

    return noted


STOCK = {
    "allreduce": (default_hooks.allreduce_hook, 0.0),
    "fp16_compress": (default_hooks.fp16_compress_hook, 2**-9),
    "bf16_compress": (default_hooks.bf16_compress_hook, 2**-6),
}


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", STOCK)
def test_hook_of_pytorch_registered_at_any_time_equals_oracle(rank: Rank, name: str, when: str) -> None:
    hook, tolerance = STOCK[name]
    seen: list[Any] = []
    trial = Trial(rank, mlp(), bucket_cap_mb=0.0001)
    if when == "before":
        ddp = DistributedDataParallel(trial.module, bucket_cap_mb=0.0001)
        ddp.register_comm_hook(None, identity_of(hook, seen))
        trial.ddp = ddp_mp.patch(ddp, mixed_precision=trial.precision)
    else:
        trial.ddp.register_comm_hook(None, identity_of(hook, seen))
    trial.tolerance = tolerance
    trial.train(vectors(), steps=3, accumulate=2)
    buckets = [entry[0] for entry in seen]
    assert buckets == list(range(max(buckets) + 1)) * 3
    assert {entry[1:3] for entry in seen} == {(F32, 1)}
    assert [entry[3] for entry in seen] == [b == max(buckets) for b in buckets]
    assert sum(entry[4] for entry in seen) == 3 * 4


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hook_power_sgd_registered_at_any_time_equals_oracle(rank: Rank, when: str) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=32, start_powerSGD_iter=2, min_compression_rate=0.1)
    trial = Trial(rank, mlp(32, 2), how="later")
    if when == "before":
        ddp_mp.unpatch(trial.ddp)
    trial.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    ddp_mp.patch(trial.ddp, mixed_precision=trial.precision)
    trial.tolerance = 2e-2  # full rank: what is left is the error of orthogonalisation
    trial.train(vectors(width=32), steps=4)


class LowForward(nn.Module):
    """What mixed precision computes, in a module that plain DistributedDataParallel trains."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.inner, {n: p.to(BF16) for n, p in self.inner.named_parameters()}, (x.to(BF16),))


def compressing(rank: int) -> powerSGD_hook.PowerSGDState:
    """A state whose compression loses much, so that its error feedback and its warm start show."""
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=3, min_compression_rate=1)


#: Hooks that keep something between steps, or change the type; and what makes their state.
COMPRESSION: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "power_sgd": (powerSGD_hook.powerSGD_hook, lambda: compressing(1)),
    "power_sgd_rank_4": (powerSGD_hook.powerSGD_hook, lambda: compressing(4)),
    "power_sgd_in_fp16": (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), lambda: compressing(2)),
    "fp16_compress": (default_hooks.fp16_compress_hook, lambda: None),
    # under another name: DistributedDataParallel refuses it by name where there is no CUDA
    "bf16_compress": (identity_of(default_hooks.bf16_compress_hook, []), lambda: None),
}


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", COMPRESSION)
def test_hook_that_compresses_gives_over_many_steps_what_it_gives_in_plain_ddp(rank: Rank, name: str, when: str) -> None:
    hook, state = COMPRESSION[name]
    ours, theirs = mlp(16, 2), LowForward(mlp(16, 2))
    theirs.inner.load_state_dict(ours.state_dict())
    plain, patched = DistributedDataParallel(theirs), DistributedDataParallel(ours)
    plain.register_comm_hook(state(), hook)
    if when == "before":
        patched.register_comm_hook(state(), hook)
    ddp_mp.patch(patched, mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
    if when == "after":
        patched.register_comm_hook(state(), hook)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    for step in range(8):
        x = rank.inputs(vectors(width=16), step)[rank.index]
        for ddp, optimizer in zip((patched, plain), optimizers, strict=True):
            square_step(ddp, x)
            optimizer.step()
        for (param, got), want in zip(ours.named_parameters(), theirs.inner.parameters(), strict=True):
            require_same(f"step {step}: gradient of {param}", got.grad, want.grad)
            require_same(f"step {step}: {param}", got, want)
        for optimizer in optimizers:
            optimizer.zero_grad()


@on_ranks(2)
def test_hook_builtin_of_the_reducer_equals_oracle(rank: Rank) -> None:
    for kind, tolerance in ((dist.BuiltinCommHookType.ALLREDUCE, 0.0), (dist.BuiltinCommHookType.FP16_COMPRESS, 2**-9)):
        trial = Trial(rank, mlp())
        trial.ddp._register_builtin_comm_hook(kind)
        trial.tolerance = tolerance
        trial.train(vectors())


@on_ranks(2)
def test_hook_second_one_is_refused_and_names_the_first(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    trial.ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="allreduce_hook"):
        trial.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    trial.train(vectors())
    assert trial.ddp._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"


@on_ranks(2)
def test_hook_survives_unpatching(rank: Rank) -> None:
    seen: list[Any] = []
    trial = Trial(rank, mlp(), how="later")
    trial.ddp.register_comm_hook(None, identity_of(default_hooks.allreduce_hook, seen))
    trial.train(vectors(), steps=1)
    before = len(seen)
    ddp_mp.unpatch(trial.ddp)
    trial.ddp(torch.randn(4, 8)).sum().backward()
    assert len(seen) > before > 0
    ddp_mp.patch(trial.ddp, mixed_precision=trial.precision)
    trial.zero_grad()
    trial.train(vectors(), steps=2, seed=5)


@on_ranks(2)
def test_hook_that_fails_leaves_masters_and_gradients(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    fail = [True]

    def hook(state, bucket):  # no annotations: register_comm_hook compares them
        if fail:
            raise ValueError("no luck")
        return default_hooks.allreduce_hook(state, bucket)

    trial.ddp.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="no luck"):
        square_step(trial.ddp, torch.randn(4, 8))
    trial.check()
    fail.clear()
    trial.train(vectors())


@on_ranks(2)
def test_hook_that_returns_something_else_than_a_tensor_is_named(rank: Rank) -> None:
    trial = Trial(rank, mlp())

    def hook(state, bucket):  # no annotations: register_comm_hook compares them
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result("nothing")
        return future

    trial.ddp.register_comm_hook(None, hook)
    with pytest.raises(TypeError, match=r"communication hook.*str"):
        square_step(trial.ddp, torch.randn(4, 8))
    trial.check()


@on_ranks(2)
def test_hook_gets_gradients_with_the_shapes_of_parameters(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    shapes: list[Any] = []

    def hook(state, bucket):  # no annotations: register_comm_hook compares them
        for grad, param in zip(bucket.gradients(), bucket.parameters(), strict=True):
            shapes.append((grad.shape, param.shape))
            assert grad.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
        bucket.set_buffer(bucket.buffer() * 2)
        return default_hooks.allreduce_hook(state, bucket)

    trial.ddp.register_comm_hook(None, hook)
    xs = rank.inputs(vectors())
    square_step(trial.ddp, xs[rank.index])
    trial.oracle.backward(square_step, xs)
    assert len(shapes) == 4
    assert all(grad == param for grad, param in shapes)
    for name, param in trial.module.named_parameters():
        require_same(name, param.grad, trial.oracle.grads[0][name] * 2)


@on_ranks(2)
def test_hook_gets_a_flat_buffer_of_a_parameter_that_is_not_packed(rank: Rank) -> None:
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(8, 16)[:, ::2])
    trial = Trial(rank, model)
    seen: list[Any] = []
    trial.ddp.register_comm_hook(None, identity_of(default_hooks.allreduce_hook, seen))
    trial.tolerance = 2**-20
    trial.train(vectors(), steps=3, accumulate=2)
    assert {entry[2] for entry in seen} == {1}


# --- when buckets are reduced --------------------------------------------------------------------------------------------


class Watched:
    """A model of three layers and many buckets that counts how many are reduced when its first layer has its gradient."""

    def __init__(self, find_unused: bool = False, static_graph: bool = False) -> None:
        self.model = mlp(8, 3)
        self.at_first_layer: list[int] = []
        self._seen: list[Any] = []
        ddp = DistributedDataParallel(
            self.model, find_unused_parameters=find_unused, static_graph=static_graph, bucket_cap_mb=0.0001
        )
        ddp.register_comm_hook(None, identity_of(default_hooks.allreduce_hook, self._seen))
        self.ddp = ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(BF16))
        self.model.register_forward_pre_hook(lambda *_: self._seen.clear())
        self.model[0].weight.register_hook(lambda _: self.at_first_layer.append(len(self._seen)))

    def loss(self) -> torch.Tensor:
        return self.ddp(torch.randn(4, 8)).float().square().mean()


def whole(loss: torch.Tensor, model: nn.Module) -> None:
    loss.backward()


def asks_only(loss: torch.Tensor, model: nn.Module) -> None:
    torch.autograd.grad(loss, list(model.parameters()))


def fails(loss: torch.Tensor, model: nn.Module) -> None:
    handle = model[0].weight.register_hook(no_luck)
    with pytest.raises(Luck):
        loss.backward()
    handle.remove()


@on_ranks(2)
@pytest.mark.parametrize("before", [None, whole, asks_only, fails])
def test_reduction_begins_while_the_backward_goes_on_whatever_another_model_did(rank: Rank, before: Any) -> None:
    watched = Watched()
    if before is not None:
        other = Watched(find_unused=True)
        before(other.loss(), other.model)
    for _ in range(3):
        watched.loss().backward()
    assert len(watched.at_first_layer) == 3
    assert min(watched.at_first_layer[1:]) > 0


@on_ranks(2)
@pytest.mark.parametrize("unused", [False, True])
def test_reduction_waits_for_that_of_another_model_in_the_same_backward(rank: Rank, unused: bool) -> None:
    """Where weights may be unused, a rank may reduce the other's last bucket when the backward ends."""
    later, first = Watched(), Watched(find_unused=unused)
    for _ in range(2):  # the first round of each is reduced when it ends
        (later.loss() + first.loss()).backward()  # autograd runs what was computed last first
    assert first.at_first_layer[1] > 0
    assert (later.at_first_layer[1] > 0) is not unused


@on_ranks(2)
def test_reduction_of_a_model_used_within_another_comes_after_all_of_the_other(rank: Rank) -> None:
    """Where it is used, and so how many buckets of the outer one are complete when it is reached, depends on the rank."""
    inner = Watched()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, layer in enumerate(self.layers):
                x = layer(x).tanh()
                if k == rank.index:
                    x = inner.ddp(x).to(x.dtype)
            return x

    trial = Trial(rank, Outer(), bucket_cap_mb=0.0001)
    for seed in range(2):
        square_step(trial.ddp, rank.inputs(vectors(), seed)[rank.index])
    assert inner.at_first_layer == [0, 0]
    for model in (trial.module, inner.model):
        for name, param in model.named_parameters():
            total = param.grad.clone()
            dist.all_reduce(total)
            require_same(name, param.grad * 2, total)


@on_ranks(2)
def test_reduction_with_a_static_graph_begins_early_from_the_second_round_on(rank: Rank) -> None:
    watched = Watched(static_graph=True)
    for _ in range(3):
        watched.loss().backward()
    assert watched.at_first_layer[0] == 0
    assert min(watched.at_first_layer[1:]) > 0


@on_ranks(2)
def test_reduction_waits_for_the_end_while_a_local_forward_may_add_gradients(rank: Rank) -> None:
    watched = Watched()
    with watched.ddp.no_sync():
        local = watched.loss()
    (watched.loss() + local).backward()
    assert watched.at_first_layer == [0]
    watched.loss().backward()
    assert watched.at_first_layer[1] > 0


# --- Join ----------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("cap", [25, 0.0001])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("reduce", [F32, FP16], ids=str)
def test_join_uneven_inputs_equal_oracle(rank: Rank, initial: bool, cap: float, reduce: torch.dtype) -> None:
    trial = Trial(rank, mlp(), ddp_mp.MixedPrecision(BF16, reduce), bucket_cap_mb=cap)
    trial.tolerance = trial.tolerance or (0.0 if reduce is F32 else 2**-8)
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    theirs = torch.optim.SGD(trial.oracle.module.parameters(), lr=0.1)
    steps = [2 + index for index in range(rank.size)]
    with trial.ddp.join(divide_by_initial_world_size=initial):
        for number in range(steps[rank.index]):
            xs = rank.inputs(vectors(), number)
            square_step(trial.ddp, xs[rank.index])
            active = [index for index in range(rank.size) if steps[index] > number]
            grads = [trial.oracle.gradients(square_step, xs[index], index) for index in active]
            divisor = rank.size if initial else len(active)
            for name, param in trial.oracle.module.named_parameters():
                param.grad = sum(g[name] for g in grads) / divisor
                require_same(
                    f"gradient of {name}", dict(trial.module.named_parameters())[name].grad, param.grad, trial.tolerance
                )
            optimizer.step()
            theirs.step()
            optimizer.zero_grad()
            for ours, due in zip(trial.module.parameters(), trial.oracle.module.parameters(), strict=True):
                require_same("master", ours, due, trial.tolerance)
                due.data.copy_(ours.data)
    gathered = rank.gather([p.detach().clone() for p in trial.module.parameters()])
    for values in gathered[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values, gathered[0], strict=True)), "ranks agree at the end"


@on_ranks(2)
def test_join_with_unused_parameters_and_buffers_ends_with_equal_ranks(rank: Rank) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.a(x) if self.seen % 2 else self.b(x)

    trial = Trial(rank, Model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    with trial.ddp.join():
        for _ in range(2 + 2 * rank.index):
            square_step(trial.ddp, torch.randn(4, 8))
            optimizer.step()
            optimizer.zero_grad()
    gathered = rank.gather([p.detach().clone() for p in trial.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gathered, strict=True))


@on_ranks(2)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_join_with_a_sparse_gradient_counts_ranks_without_input_as_zeros(rank: Rank, unused: bool, dense: bool) -> None:
    model = nn.Embedding(3, 2, sparse=True)
    trial = Trial(rank, model, how="later", find_unused_parameters=unused)
    seen = []
    with trial.ddp.join():
        for _ in range(1 + 2 * rank.index):
            words = torch.tensor([0, 2, 2]) if rank.index else torch.tensor([0, 1])
            (trial.ddp(words).sum() + (model.weight[words].sum() if dense else 0)).backward()
            seen.append((model.weight.grad.to_dense() / (1 + dense)).mean(1).tolist())
            trial.zero_grad()
    assert rank.gather(seen) == [[[1.0, 0.5, 1.0]], [[1.0, 0.5, 1.0], [0.5, 0.0, 1.0], [0.5, 0.0, 1.0]]]


@on_ranks(2)
def test_join_with_a_hook_of_the_user_equals_it_without(rank: Rank) -> None:
    trial = Trial(rank, scalar())
    trial.ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with Join([trial.ddp]):
        for _ in range(1 + rank.index):
            trial.ddp(column(4)).sum().backward()
            value = trial.module.weight.grad.item()
            trial.zero_grad()
    assert rank.gather(value) == [4.0, 2.0]  # the hook divides by the size of the group


@on_ranks(2)
def test_join_after_it_training_goes_on(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    with trial.ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank.index):
            square_step(trial.ddp, torch.zeros(4, 8))
            trial.zero_grad()
    trial.train(vectors())


@on_ranks(2)
def test_join_divides_as_the_present_one_says(rank: Rank) -> None:
    trial = Trial(rank, scalar())
    last = []
    for initial in (False, True, False):
        with trial.ddp.join(divide_by_initial_world_size=initial):
            for _ in range(1 + rank.index):
                trial.ddp(column(4)).sum().backward()
                value = trial.module.weight.grad.item()
                trial.zero_grad()
        last.append(value)
    assert rank.gather(last) == [[4.0, 4.0, 4.0], [4.0, 2.0, 4.0]]


# --- buffers -------------------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("position", torch.arange(300))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.full((2,), 1 + 2j, dtype=torch.complex64))
        self.register_buffer("scale", torch.full((1,), 1.0009765625))
        self.register_buffer("narrow", torch.ones(1, dtype=FP16))
        self.register_buffer("temporary", torch.ones(1), persistent=False)
        self.register_buffer("count", torch.tensor(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.a(x) * self.scale * self.temporary


@on_ranks(2)
@pytest.mark.parametrize("how", ["install", "later"])
@pytest.mark.parametrize("dtype", [None, BF16, F32], ids=str)
def test_buffers_only_floating_ones_follow_buffer_dtype(rank: Rank, how: str, dtype: torch.dtype | None) -> None:
    model = Buffers()
    precision = ddp_mp.MixedPrecision(BF16, F32, dtype)
    trial = Trial(rank, model, precision, how=how)
    for _ in range(4):
        square_step(trial.ddp, torch.randn(4, 8))
    assert model.position.dtype is torch.int64
    assert model.position[257].item() == 257
    assert model.mask.dtype is torch.bool
    assert model.mask.tolist() == [True, False]
    assert model.phase.dtype is torch.complex64
    assert model.phase[0].item() == 1 + 2j
    assert model.count.item() == 260
    assert model.scale.dtype is (dtype or F32)
    assert model.temporary.dtype is (dtype or F32)
    assert model.narrow.dtype is (dtype or FP16)
    assert model.scale.item() == (1.0 if dtype is BF16 else 1.0009765625)


@on_ranks(2)
def test_buffers_ignored_by_ddp_are_left_alone(rank: Rank) -> None:
    model = Buffers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["scale"])
    Trial(rank, model, ddp_mp.MixedPrecision(BF16, F32, BF16), how="install")
    assert model.scale.dtype is F32
    assert model.temporary.dtype is BF16


@on_ranks(2)
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_buffers_with_running_statistics_equal_oracle(rank: Rank, dtype: torch.dtype | None, sync: bool) -> None:
    wrapping = {} if sync else {SYNC_BUFFERS: False}
    trial = Trial(rank, Statistics(), ddp_mp.MixedPrecision(BF16, F32, dtype), how="install", **wrapping)
    trial.train(vectors(), steps=4)
    for name, buffer in trial.module.named_buffers():
        require_same(f"buffer {name}", buffer, trial.oracle.buffers[rank.index][name])
    assert trial.module.batches.item() == 4
    trial.ddp.eval()
    with torch.no_grad():
        trial.ddp(torch.randn(4, 8))
    assert trial.module.batches.item() == 4


@on_ranks(2)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_buffers_of_batch_norm_that_stays_in_full_precision_equal_oracle(rank: Rank, dtype: torch.dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.a(x))

    precision = ddp_mp.MixedPrecision(dtype, F32, dtype)
    trial = Trial(rank, Model(), precision, how="install")
    with contextlib.nullcontext() if dtype is BF16 else pytest.warns(UserWarning, match="without any cast"):
        trial.train(vectors(), steps=4)
    assert trial.module.norm.num_batches_tracked.item() == 4
    for name, buffer in trial.module.named_buffers():
        require_same(f"buffer {name}", buffer, trial.oracle.buffers[rank.index][name])


@on_ranks(2)
@pytest.mark.parametrize("where", ["pre", "post"])
def test_buffers_communication_hook_of_the_user_runs(rank: Rank, where: str) -> None:
    location = {"pre": "PRE_FORWARD", "post": "POST_FORWARD"}[where]
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    trial = Trial(rank, Statistics())
    calls: list[int] = []

    def hook(state: Any, buffers: dict[str, torch.Tensor]) -> list[Any]:
        calls.append(len(buffers))
        works = [dist.all_reduce(b, async_op=True).get_future() for b in buffers.values() if b.is_floating_point()]
        return works if where == "post" else [w.wait() for w in works][:0] or None

    trial.ddp._register_buffer_comm_hook(None, hook, comm_hook_location=_BufferCommHookLocation[location])
    for seed in range(2):
        square_step(trial.ddp, rank.inputs(vectors(), seed)[rank.index])
    assert calls == [2, 2]
    gathered = rank.gather(trial.module.mean.clone())
    if where == "post":
        require_same("buffer", gathered[0], gathered[1])


@on_ranks(2)
def test_buffers_embedding_positions_are_found(rank: Rank) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(300, 4)
            self.register_buffer("position_ids", torch.arange(300))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.embedding(self.position_ids[250:], self.table.weight) * x

    Trial(rank, Positions(), ddp_mp.MixedPrecision(BF16, F32, BF16), how="install").train(lambda: torch.randn(1, 4))
