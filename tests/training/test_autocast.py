"""``Options(autocast=True)``: the forward of a patched model runs in autocast, and nothing of it is left behind."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.modules import Two, mlp, vectors
from kit.oracle import BF16, F32, F64, FP16, Trial, patched, require_same, step_of
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddp_mp

AUTOCAST = {"autocast": True}


def with_autocast(module: nn.Module, low: torch.dtype = BF16, **more: Any) -> DistributedDataParallel:
    """The module wrapped, and patched to compute in autocast."""
    options = ddp_mp.Options(autocast=True, **more)
    return ddp_mp.patch(DistributedDataParallel(module), mixed_precision=ddp_mp.MixedPrecision(low, F32), options=options)


def present() -> torch.dtype | None:
    """The type of the CPU's autocast around the caller; None where it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class Unready(nn.Module):
    """Was not written for bfloat16: it makes a float32 tensor, has a float32 buffer, and computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, batch: Batch) -> torch.Tensor:
        x = torch.cat((torch.zeros(1, 8), self.body(batch.x)))
        logits = self.head(self.norm(x + self.shift).tanh())
        return F.cross_entropy(logits[1:], batch.y)


class Batch:
    """Inputs in a class of the user's own."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(4, 8), torch.randint(3, (4,))


class Noting(nn.Module):
    """Notes the autocast that every forward meets, and does in it what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[torch.dtype | None] = []
        self.act: Any = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(present())
        self.act()
        return self.linear(x)


# --- training ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("how", ["patch", "install", "later"])
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
def test_autocast_trains_a_model_that_was_not_written_for_it_as_the_oracle_does(rank: Rank, how: str, low: torch.dtype) -> None:
    trial = Trial(rank, Unready(), ddp_mp.MixedPrecision(low, F32), how=how, options=AUTOCAST)
    trial.train(Batch, step=step_of(lambda call, batch: call(batch)), accumulate=2)
    with torch.no_grad():
        assert trial.ddp(Batch()).dtype is trial.ddp.module(Batch()).dtype is F32  # a loss, which autocast computes in float32
    assert present() is None


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_autocast_is_around_what_a_checkpoint_computes_again(rank: Rank, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.noting = nn.Linear(8, 8), Noting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.noting, self.first(x) + torch.ones(1), use_reentrant=reentrant)

    trial = Trial(rank, Checkpointed(), options=AUTOCAST)
    trial.train(vectors(), accumulate=2)
    trial.module.noting.seen.clear()
    trial.ddp(torch.ones(2, 8)).float().sum().backward()
    assert trial.module.noting.seen == [BF16, BF16]


@on_ranks(2)
def test_autocast_is_around_a_model_that_is_checkpointed_as_a_whole(rank: Rank) -> None:
    model = Noting()
    ddp = with_autocast(model)
    checkpoint(ddp.module, torch.ones(2, 8, requires_grad=True), use_reentrant=False).float().sum().backward()
    assert model.seen == [BF16, BF16]
    assert present() is None


@on_ranks(2)
def test_autocast_is_off_inside_full_precision_modules(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Noting(), nn.Linear(8, 8))
    trial = Trial(rank, model, options={**AUTOCAST, "full_precision_modules": ("1",)}, full=("1",))
    trial.train(vectors(), accumulate=2)
    assert set(model[1].seen) == {None}


class Norms(nn.Module):
    """Normalisations that meet both types, one of them with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.batch = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.layer, self.group = nn.LayerNorm(8), nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.batch(self.a(x)) + self.batch(x)
        return self.b(self.group(self.layer(x) + self.layer(self.a(x))))


@on_ranks(2)
@pytest.mark.parametrize("reduce", [F32, BF16], ids=str)
def test_normalisations_compute_with_their_masters_in_autocast(rank: Rank, reduce: torch.dtype) -> None:
    trial = Trial(rank, Norms(), ddp_mp.MixedPrecision(BF16, reduce), options=AUTOCAST)
    trial.train(vectors(), accumulate=2)
    assert trial.module.batch.running_mean.dtype is F32
    own = with_autocast(copy.deepcopy(trial.module))  # in autocast of PyTorch alone the same numbers
    plain = DistributedDataParallel(copy.deepcopy(trial.module))
    x = rank.inputs(vectors())[rank.index]
    with torch.autocast("cpu", BF16):
        theirs = plain(x)
    assert torch.equal(own(x), theirs)


@on_ranks(2)
def test_autocast_with_a_gradient_scaler_skips_the_same_step_on_every_rank(rank: Rank) -> None:
    ddp = with_autocast(nn.Linear(1, 1, bias=False), low=FP16)
    nn.init.constant_(ddp.module.weight, 0.5)
    optimizer, scaler = torch.optim.SGD(ddp.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, scale, weight in ((1.0, 1024.0, -0.5), (6e4 if rank.index else 1.0, 512.0, -0.5)):
        optimizer.zero_grad()
        scaler.scale(ddp(torch.full((1, 1), x)).float().sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), ddp.module.weight.item()) == (scale, weight)


@on_ranks(2)
@pytest.mark.parametrize("order", ["wrapper", "module", "compile_method", "layer"])
def test_autocast_with_a_compiler_equals_oracle(rank: Rank, order: str) -> None:
    torch._dynamo.reset()
    compilations: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    class Layer(nn.Linear):  # of PyTorch's own ones alone nothing is compiled
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.ones(8))

    class Made(Two):
        def __init__(self) -> None:
            super().__init__()
            self.b = Layer(8, 8)

    model = Made()
    trial = Trial(rank, copy.deepcopy(model), options=AUTOCAST)
    if order == "layer":
        model.b.compile(backend=backend)
    inner = torch.compile(model, backend=backend) if order == "module" else model
    call: Any = with_autocast(inner)
    if order == "wrapper":
        call = torch.compile(call, backend=backend)
    elif order == "compile_method":
        call.compile(backend=backend)
    for seed in range(4):
        xs = rank.inputs(vectors(), seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler's own
            call(xs[rank.index]).float().square().mean().backward()
        trial.oracle.backward(step_of(lambda call, x: call(x).float().square().mean()), xs)
        if seed == 1:
            before = len(compilations)
        for (name, got), grad in zip(model.named_parameters(), trial.oracle.grads[rank.index].values(), strict=True):
            require_same(f"gradient of {name}", got.grad, grad)
        model.zero_grad()
        trial.oracle.zero_grad()
    assert 0 < before == len(compilations), "it is compiled again"
    torch._dynamo.reset()


@on_ranks(2)
def test_autocast_is_around_the_first_forward_after_parameters_are_thawed_or_replaced(rank: Rank) -> None:
    model = Noting()
    model.linear.bias.requires_grad_(False)
    ddp = with_autocast(model)
    ddp(torch.ones(2, 8)).float().sum().backward()
    model.linear.bias.requires_grad_(True)
    ddp(torch.ones(2, 8)).float().sum().backward()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    ddp(torch.ones(2, 8)).float().sum().backward()
    assert model.seen == [BF16] * 3


# --- calls ---------------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_autocast_leaves_inputs_alone_for_the_wrapper_and_the_bare_module(rank: Rank) -> None:
    class Timed(nn.Linear):
        def forward(self, x: torch.Tensor, t: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().forward(x), t, torch.softmax(super().forward(x) + mask, -1)

    ddp = with_autocast(Timed(2, 2))
    given = torch.ones(1, 2), torch.tensor([998.3897]), torch.full((2,), torch.finfo(F32).min)
    for call in (ddp, ddp.module):
        out, t, probabilities = call(*given)
        assert (out.dtype, t.item()) == (BF16, given[1].item())
        assert probabilities.tolist() == [[0.5, 0.5]]


@on_ranks(1)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_autocast_evaluates_and_goes_on_to_train(rank: Rank, grad: bool, bare: bool) -> None:
    model = Noting()
    ddp = with_autocast(model)
    call = ddp.module if bare else ddp
    with torch.set_grad_enabled(grad):
        assert call.eval()(torch.ones(2, 8)).dtype is BF16
    with torch.no_grad(), ddp_mp.full_precision(ddp):
        assert call(torch.ones(2, 8)).dtype is F32
    with torch.autocast("cpu", BF16), ddp_mp.full_precision(ddp):
        assert call(torch.ones(2, 8)).dtype is F32
    call.train()(torch.ones(2, 8)).float().sum().backward()
    assert model.seen == [BF16, None, None, BF16]
    assert present() is None


@on_ranks(1)
def test_full_precision_inside_a_forward_turns_autocast_off_and_on_again(rank: Rank) -> None:
    class Part(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ddp_mp.full_precision(self.a):
                y = self.a(x)
                self.seen = y.dtype, present()
            return self.b(y)

    model = Part()
    ddp = with_autocast(model)
    assert ddp(torch.ones(2, 8)).dtype is BF16
    assert model.seen == (F32, None)


@on_ranks(1)
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_autocast_is_gone_after_an_error_in_the_forward(rank: Rank, error: type[BaseException], bare: bool) -> None:
    def fail() -> None:
        raise error

    model = Noting()
    ddp = with_autocast(model)
    call = ddp.module if bare else ddp
    model.act = fail
    for around in (None, FP16, BF16):
        with torch.autocast("cpu", around or BF16, enabled=around is not None), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another autocast around the model
            with pytest.raises(error):
                call(torch.ones(2, 8))
            assert present() is around
    model.act = lambda: None
    call(torch.ones(2, 8)).float().sum().backward()
    assert model.linear.weight.grad is not None
    assert present() is None


@on_ranks(1)
def test_autocast_is_gone_after_an_error_in_what_a_checkpoint_computes_again(rank: Rank) -> None:
    def fail() -> None:
        if len(model.seen) == 2:
            raise KeyboardInterrupt

    model = Noting()
    model.act = fail
    ddp = with_autocast(model)
    with pytest.raises(KeyboardInterrupt):
        checkpoint(ddp.module, torch.ones(2, 8, requires_grad=True), use_reentrant=False).float().sum().backward()
    assert present() is None
    ddp(torch.ones(2, 8)).float().sum().backward()
    assert model.seen == [BF16, BF16, BF16]


# --- another autocast ----------------------------------------------------------------------------------------------------


@on_ranks(1)
@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_another_autocast_around_a_model_is_told_once(rank: Rank, option: bool, bare: bool) -> None:
    ddp = with_autocast(nn.Linear(8, 8)) if option else patched(nn.Linear(8, 8))
    call = ddp.module if bare else ddp
    with torch.autocast("cpu", BF16):
        assert call(torch.ones(2, 8)).dtype is BF16  # silent
    with torch.autocast("cpu", enabled=False):
        assert call(torch.ones(2, 8)).dtype is BF16
    said = r"computes in torch.bfloat16, and it is called inside torch.autocast of torch.float16"
    with torch.autocast("cpu", FP16):
        with pytest.warns(UserWarning, match=said):
            call(torch.ones(2, 8))
        out = call(torch.ones(2, 8))  # a second warning would be an error
    assert out.dtype is (BF16 if option else FP16)


@on_ranks(1)
def test_autocasts_of_the_models_own_are_obeyed(rank: Rank) -> None:
    class Own(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                first = F.linear(x, self.a.weight.float())
            with torch.autocast("cpu", BF16):
                second = self.a(x)
            with torch.autocast("cpu", FP16):
                third = self.b(x)
            self.seen = first.dtype, second.dtype, third.dtype
            return first + second + third

    model = Own()
    ddp = with_autocast(model)
    ddp(torch.ones(2, 8)).sum().backward()
    assert model.seen == (F32, BF16, FP16)
    assert all(p.grad is not None and p.grad.dtype is F32 for name, p in model.named_parameters())


# --- what is put on the module -------------------------------------------------------------------------------------------


@on_ranks(1)
def test_autocast_keeps_the_signature_and_leaves_nothing_on_the_module_nor_in_copies(rank: Rank) -> None:
    model = Unready()
    signature, forward = inspect.signature(model.forward), model.forward
    ddp = with_autocast(model, full_precision_modules=("norm",))
    assert inspect.signature(model.forward) == signature
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert "forward" not in vars(other)
        assert "forward" not in vars(other.norm) or other.norm is model.norm
        assert other(Batch()).dtype is F32
    assert ddp_mp.unpatch(ddp) is ddp
    assert model.forward == forward
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.norm)


@on_ranks(1)
def test_autocast_gives_back_a_forward_that_was_on_the_instance_and_passes_below_a_later_one(rank: Rank) -> None:
    model = Noting()
    theirs = model.forward = model.forward  # as libraries put one there
    ddp = with_autocast(model)
    assert ddp(torch.ones(1, 8)).dtype is BF16
    ours = model.forward
    model.forward = later = lambda x: ours(x)
    assert ddp(torch.ones(1, 8)).dtype is BF16
    ddp_mp.unpatch(ddp)
    assert model.forward is later
    assert ddp(torch.ones(1, 8)).dtype is F32
    model.forward = theirs
    ddp_mp.unpatch(with_autocast(model))
    assert vars(model)["forward"] is theirs


@on_ranks(1)
def test_autocast_of_a_newer_wrapper_takes_the_place_of_the_earlier_ones(rank: Rank) -> None:
    model = Noting()
    earlier = with_autocast(model)
    newer = with_autocast(model)
    assert (ddp_mp.is_patched(earlier), ddp_mp.is_patched(newer)) == (False, True)
    newer(torch.ones(1, 8)).float().sum().backward()
    assert model.seen == [BF16]
    ddp_mp.unpatch(newer)
    assert "forward" not in vars(model)


# --- what does not fit ---------------------------------------------------------------------------------------------------


@on_ranks(1)
@pytest.mark.parametrize("low", [F32, F64], ids=str)
def test_autocast_of_a_type_that_there_is_none_for_is_refused(rank: Rank, low: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"Options.autocast: .* computes in bfloat16 or float16, and param_dtype is"):
        with_autocast(mlp(), low=low)


@on_ranks(1)
def test_autocast_without_a_param_type_is_told_to_have_no_effect(rank: Rank) -> None:
    precision, options = ddp_mp.MixedPrecision(None, F32), ddp_mp.Options(autocast=True, cast_forward_inputs=False)
    with pytest.warns(UserWarning, match="Options without effect: cast_forward_inputs, autocast; param_dtype is None"):
        ddp = ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=precision, options=options)
    assert ddp(torch.ones(2, 8)).dtype is F32
