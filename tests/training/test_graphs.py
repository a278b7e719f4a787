"""What forwards and backwards look like: several of one for one of the other, parts of them, several models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.modules import Saved, Two, column, mlp, scalar, vectors
from kit.oracle import BF16, F32, Trial, cast_inputs, mean_square, require_same, square_step, step_of
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_mp

# --- several forwards ----------------------------------------------------------------------------------------------------


def both_then_backward(call: Any, x: torch.Tensor) -> None:
    (mean_square(call, x) + mean_square(call, 2 * x)).backward()


def separate_backwards(call: Any, x: torch.Tensor) -> None:
    first, second = mean_square(call, x), mean_square(call, 2 * x)
    first.backward()
    second.backward()


def separate_backwards_reversed(call: Any, x: torch.Tensor) -> None:
    first, second = mean_square(call, x), mean_square(call, 2 * x)
    second.backward()
    first.backward()


def evaluation_between_two(call: Any, x: torch.Tensor) -> None:
    first = mean_square(call, x)
    with torch.no_grad():
        call(3 * x)
    second = mean_square(call, 2 * x)
    (first + second).backward()


def evaluation_before_backward(call: Any, x: torch.Tensor) -> None:
    loss = mean_square(call, x)
    with torch.no_grad():
        call(3 * x)
    loss.backward()


def chained(call: Any, x: torch.Tensor) -> None:
    call(call(x)).float().square().mean().backward()


def discarded_first(call: Any, x: torch.Tensor) -> None:
    call(3 * x)
    mean_square(call, x).backward()


def discarded_between(call: Any, x: torch.Tensor) -> None:
    loss = mean_square(call, x)
    call(3 * x)
    loss.backward()


def kept_but_not_used(call: Any, x: torch.Tensor) -> None:
    kept = call(3 * x)
    mean_square(call, x).backward()
    del kept


STEPS: dict[str, Callable[[Any, Any], None]] = {
    step.__name__: step
    for step in (
        both_then_backward,
        evaluation_between_two,
        evaluation_before_backward,
        chained,
        discarded_first,
        discarded_between,
        kept_but_not_used,
    )
}


@on_ranks(2)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("build", [mlp, Saved])
@pytest.mark.parametrize("name", STEPS)
def test_forwards_of_one_step_equal_oracle(rank: Rank, name: str, build: Callable[[], nn.Module], reuse: bool) -> None:
    # the casts of two forwards are two graphs here and one in the oracle, where low-precision gradients are summed first
    exact = name not in ("evaluation_between_two",)
    trial = Trial(rank, build(), options={"reuse_unchanged": reuse}, exact=exact)
    if not exact:
        trial.tolerance = 2**-7
    trial.train(vectors(), step=STEPS[name], steps=4, accumulate=2)


@on_ranks(2)
@pytest.mark.parametrize("build", [mlp, Saved])
@pytest.mark.parametrize("step", [separate_backwards, separate_backwards_reversed])
def test_forwards_two_with_a_backward_each_equal_oracle(
    rank: Rank, step: Callable[[Any, Any], None], build: Callable[[], nn.Module]
) -> None:
    # each backward is reduced: 2 ranks, so that the sum of the two means is the mean of the two sums up to rounding
    trial = Trial(rank, build())
    trial.tolerance = 1e-6
    trial.train(vectors(), step=step, steps=4)


@on_ranks(2)
@pytest.mark.parametrize("build", [mlp, Saved])
def test_forwards_two_with_a_backward_each_inputs_get_the_gradients_of_their_own_copies(
    rank: Rank, build: Callable[[], nn.Module]
) -> None:
    trial = Trial(rank, build())
    xs = [x.requires_grad_() for x in (torch.randn(4, 8), torch.randn(4, 8))]
    first = mean_square(trial.ddp, xs[0])
    with torch.no_grad():
        trial.ddp(torch.randn(4, 8))
        for param in trial.module.parameters():
            param.mul_(1.5)  # a step between the forwards: the first graph needs the leaves that it was computed with
    second = mean_square(trial.ddp, xs[1])
    second.backward()
    first.backward()
    got = [x.grad.clone() for x in xs]
    for x, grad, factor in zip(xs, got, (1.0, 1.5), strict=True):
        x.grad = None
        with torch.no_grad():
            for param in trial.oracle.module.parameters():
                param.mul_(factor)
        with trial.oracle.low_precision() as call:
            mean_square(call, x).backward()
        require_same("gradient of the input", x.grad, grad)


@on_ranks(2)
@pytest.mark.parametrize("build", [mlp, Saved])
def test_forward_before_an_optimizer_step_and_backward_after_it_equal_oracle(
    rank: Rank, build: Callable[[], nn.Module]
) -> None:
    model = build()
    trial = Trial(rank, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)  # writes that PyTorch does not see
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        late = mean_square(trial.ddp, xs[rank.index])
        trial.backward(square_step, rank.inputs(vectors(), 10 + seed))
        trial.check()
        before = {n: p.detach().clone() for n, p in trial.oracle.module.named_parameters()}
        optimizer.step()
        trial.oracle_step(torch.optim.SGD(trial.oracle.module.parameters(), lr=0.5))
        trial.zero_grad()
        late.backward()  # with the copies of the masters before the step
        after = {n: p.detach().clone() for n, p in trial.oracle.module.named_parameters()}
        for name, param in trial.oracle.module.named_parameters():
            param.data.copy_(before[name])
        trial.oracle.backward(square_step, xs)
        for name, param in trial.oracle.module.named_parameters():
            param.data.copy_(after[name])
        trial.check()
        trial.zero_grad()


@on_ranks(2)
def test_forward_before_a_write_of_the_parameters_and_backward_after_it_use_the_values_of_the_forward(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    for seed in range(2):
        xs = rank.inputs(vectors(), seed)
        loss = mean_square(trial.ddp, xs[rank.index])
        trial.oracle.backward(square_step, xs)
        for module in (trial.module, trial.oracle.module):
            with torch.no_grad():
                module[2].weight.mul_(-2.0)
        loss.backward()
        trial.check()
        trial.zero_grad()
    trial.train(vectors())


@on_ranks(2)
def test_forward_evaluation_between_backward_and_step_does_not_undo_the_step(rank: Rank) -> None:
    for grad in (True, False):
        model = scalar()
        ddp = Trial(rank, model).ddp
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        ddp(column(1)).sum().backward()
        ddp.eval()
        with torch.set_grad_enabled(grad):
            ddp(column(1))
        optimizer.step()
        assert model.weight.item() == 0.25
        ddp.train()
        optimizer.zero_grad()
        ddp(column(1)).sum().backward()
        assert model.weight.item() == 0.25
        assert model.weight.dtype is F32


@on_ranks(2)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_forward_without_grad_leaves_masters_and_later_training_equals_oracle(rank: Rank, mode: str) -> None:
    trial = Trial(rank, mlp())
    context = torch.no_grad if mode == "no_grad" else torch.inference_mode
    for seed in range(3):
        with context():
            output = trial.ddp(torch.randn(4, 8))
            assert output.dtype is BF16
            assert trial.module[0].weight.dtype is F32
        trial.check()
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        trial.zero_grad()
    assert ddp_mp.stats(trial.ddp).low_bytes == 0


@on_ranks(2)
def test_forward_first_in_inference_mode_then_training_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, mlp(), gradient_as_bucket_view=True)
    with torch.inference_mode():
        trial.ddp(torch.randn(4, 8))
        trial.module(torch.randn(4, 8).bfloat16())
    trial.train(vectors())


@on_ranks(2)
def test_forward_of_the_module_itself_is_low_precision_and_not_reduced(rank: Rank) -> None:
    trial = Trial(rank, scalar())
    for _ in range(2):
        trial.module(column(rank.index + 1).bfloat16()).sum().backward()
    assert trial.module.weight.grad.item() == 2 * (rank.index + 1)
    trial.ddp(column(0)).sum().backward()
    assert trial.module.weight.grad.item() == 3  # the mean of 2 and 4


@on_ranks(2)
def test_forward_under_functional_call_uses_what_it_is_given(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    given = {n: torch.full_like(p, 0.25, dtype=BF16, requires_grad=True) for n, p in trial.module.named_parameters()}
    x = torch.randn(4, 8).bfloat16()
    output = torch.func.functional_call(trial.module, given, (x,))
    output.float().sum().backward()
    assert all(t.grad is not None for t in given.values())
    assert all(p.grad is None and p.dtype is F32 for p in trial.module.parameters())
    trial.train(vectors())


@on_ranks(2)
def test_forward_module_that_calls_itself_equals_oracle(rank: Rank) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            x = self.layer(x).tanh()
            return self(x, depth - 1) if depth else x

    Trial(rank, Recursive()).train(vectors())


@on_ranks(2)
def test_forward_wrapper_inside_another_module_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, mlp())

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).float() * 2

    outer = Outer(trial.ddp)
    for seed in range(2):
        xs = rank.inputs(vectors(), seed)
        outer(xs[rank.index]).square().mean().backward()
        trial.oracle.backward(step_of(lambda call, x: (call(x).float() * 2).square().mean()), xs)
        trial.check()
        trial.zero_grad()


@on_ranks(2)
def test_inputs_of_every_nesting_are_cast(rank: Rank) -> None:
    class Nested(Two):
        def forward(self, batch: dict[str, Any], *, scale: torch.Tensor) -> torch.Tensor:
            x, (mask, more) = batch["x"], batch["rest"]
            return super().forward(x + more[0]) * scale * mask

    def make() -> dict[str, Any]:
        return {"x": torch.randn(4, 8), "rest": (torch.tensor([True]), [torch.randn(8)])}

    def loss(call: Any, batch: dict[str, Any]) -> torch.Tensor:
        return call(batch, scale=torch.tensor(0.5)).float().square().mean()

    assert cast_inputs(make(), BF16)["rest"][0].dtype is torch.bool
    Trial(rank, Nested()).train(make, step=step_of(loss))


# --- several models ------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("chained", [False, True])
def test_two_models_in_one_backward_equal_their_oracles(rank: Rank, chained: bool) -> None:
    first, second = Trial(rank, mlp(8, 1)), Trial(rank, mlp(8, 3))
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        x = xs[rank.index]
        if chained:
            second.ddp(first.ddp(x)).float().square().mean().backward()
            hidden = []
            for r in range(rank.size):
                with first.oracle.low_precision() as one, second.oracle.low_precision() as two:
                    two(one(xs[r])).float().square().mean().backward()
                grads = [[p.grad for p in o.module.parameters()] for o in (first.oracle, second.oracle)]
                for oracle in (first.oracle, second.oracle):
                    for param in oracle.module.parameters():
                        param.grad = None
                hidden.append(grads)
            for k, trial in enumerate((first, second)):
                for position, param in enumerate(trial.module.parameters()):
                    due = sum(hidden[r][k][position] for r in range(rank.size)) / rank.size
                    require_same(f"model {k}, parameter {position}", param.grad, due)
        else:
            (mean_square(first.ddp, x) + mean_square(second.ddp, x)).backward()
            for trial in (first, second):
                trial.oracle.backward(square_step, xs)
                trial.check()
        for trial in (first, second):
            trial.zero_grad()


@on_ranks(2)
def test_two_models_in_an_adversarial_loop_equal_their_oracles(rank: Rank) -> None:
    # each backward of one model goes through the other, which also gets gradients that are then thrown away
    maker, judge = Trial(rank, mlp()), Trial(rank, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    make_optimizer = [torch.optim.SGD(t.module.parameters(), lr=0.1) for t in (maker, judge)]
    oracle_optimizer = [torch.optim.SGD(t.oracle.module.parameters(), lr=0.1) for t in (maker, judge)]
    for seed in range(3):
        noise, real = rank.inputs(vectors(), seed), rank.inputs(vectors(), 100 + seed)
        r = rank.index
        fake = maker.ddp(noise[r])
        loss = judge.ddp(real[r]).float().square().mean() - judge.ddp(fake.detach()).float().mean()
        loss.backward()
        fakes = []
        for index in range(rank.size):
            with maker.oracle.low_precision() as call, torch.no_grad():
                fakes.append(call(noise[index]))

        def judged(call: Any, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return call(x[0]).float().square().mean() - call(x[1]).float().mean()

        judge.oracle.backward(step_of(judged), list(zip(real, fakes, strict=True)))
        judge.check()
        make_optimizer[1].step()
        judge.oracle_step(oracle_optimizer[1])
        judge.zero_grad()

        judge.ddp(fake).float().mean().backward()
        judge.zero_grad()

        def fooled(call: Any, x: torch.Tensor) -> torch.Tensor:
            frozen = copy.deepcopy(judge.oracle.module).bfloat16()
            return frozen(call(x)).float().mean()

        maker.oracle.backward(step_of(fooled), noise)
        maker.check()
        make_optimizer[0].step()
        maker.oracle_step(oracle_optimizer[0])
        maker.zero_grad()
        judge.oracle.zero_grad()


# --- several backwards, and parts of them --------------------------------------------------------------------------------


@on_ranks(2)
def test_backward_twice_over_one_graph_reduces_the_first_as_ddp_does(rank: Rank) -> None:
    model = scalar()
    ddp = Trial(rank, model).ddp
    for _ in range(2):
        loss = ddp(column(rank.index + 1)).sum()
        loss.backward(retain_graph=True)
        assert model.weight.grad.item() == 1.5
        loss.backward()
        assert model.weight.grad.item() == 1.5 + rank.index + 1
        assert model.weight.dtype is F32
        ddp.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("build", [mlp, Saved])
def test_backward_twice_over_one_graph_uses_the_same_copies(rank: Rank, build: Callable[[], nn.Module]) -> None:
    trial = Trial(rank, build())
    for seed in range(3):
        xs = [x.requires_grad_() for x in rank.inputs(vectors(), seed)]
        loss = mean_square(trial.ddp, xs[rank.index])
        for sync in (True, False):
            loss.backward(retain_graph=sync)
            got, xs[rank.index].grad = xs[rank.index].grad, None
            trial.oracle.backward(square_step, xs, sync=sync)
            trial.check()
            require_same("gradient of the input", got, xs[rank.index].grad)
            xs[rank.index].grad = None
        trial.zero_grad()


@on_ranks(2)
def test_backward_of_a_kept_graph_and_a_new_one_together_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, mlp(), bucket_cap_mb=0.0003)
    first, second = rank.inputs(vectors(), 0), rank.inputs(vectors(), 1)
    kept = mean_square(trial.ddp, first[rank.index])
    kept.backward(retain_graph=True)
    trial.oracle.backward(square_step, first)
    trial.zero_grad()
    (kept + mean_square(trial.ddp, second[rank.index])).backward()
    both = step_of(lambda call, x: mean_square(call, x[0]) + mean_square(call, x[1]))
    trial.oracle.backward(both, list(zip(first, second, strict=True)))
    trial.check()


@on_ranks(1)
def test_backward_that_keeps_its_graph_keeps_the_copies_as_long(rank: Rank) -> None:
    ddp = Trial(rank, mlp()).ddp
    loss = mean_square(ddp, torch.ones(2, 8))
    loss.backward(retain_graph=True)
    assert ddp_mp.stats(ddp).low_bytes > 0
    loss.backward()
    assert ddp_mp.stats(ddp).low_bytes == 0
    loss = mean_square(ddp, torch.ones(2, 8))
    loss.backward(retain_graph=True)
    del loss
    assert ddp_mp.stats(ddp).low_bytes == 0


@on_ranks(2)
def test_backward_twice_over_a_graph_whose_copies_were_given_back_equals_oracle(rank: Rank) -> None:
    model = scalar()
    ddp = Trial(rank, model).ddp
    first = ddp(column(1)).sum()
    model.state_dict()  # masters in place: the next forward has copies of its own
    second = ddp(column(2)).sum()
    for loss in (first, second, first):
        loss.backward(retain_graph=True)
    assert model.weight.grad.item() == 4


class Normalised(nn.Module):
    """Its graph refers to the norm's weight by the parameter, and with checkpoints to every parameter."""

    def __init__(self, checkpoints: bool | None) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints is None:
            return self.inner(x)
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.checkpoints)


@on_ranks(1)
@pytest.mark.parametrize("checkpoints", [None, False, True])
@pytest.mark.parametrize("forwards", [2, 3])
def test_backward_of_forwards_with_different_parameters_goes_through_the_parameters_of_each(
    rank: Rank, checkpoints: bool | None, forwards: int
) -> None:
    module = Normalised(checkpoints)
    ddp = Trial(rank, module).ddp
    expected, losses = {}, []
    for index in range(forwards):
        x = torch.randn(4, 8)
        twin = copy.deepcopy(module).to(BF16)
        mean_square(twin, x.to(BF16)).backward()
        for name, param in twin.named_parameters():
            expected[name] = expected.get(name, 0) + param.grad.float()
        losses.append(mean_square(ddp, x))
        with ddp_mp.full_precision(ddp):
            for param in module.parameters():
                param.data.mul_(-1.5 if index % 2 else 2.0)  # in a way that autograd does not see
    torch.stack(losses).sum().backward()
    for name, param in module.named_parameters():
        assert param.dtype is F32
        torch.testing.assert_close(param.grad, expected[name], rtol=0.02, atol=0.02 * expected[name].abs().max().item())
    assert ddp_mp.stats(ddp).low_bytes == 0


@on_ranks(2)
@pytest.mark.parametrize("end", ["backward", "no_grad"])
def test_copies_that_the_user_keeps_stay_readable(rank: Rank, end: str) -> None:
    trial = Trial(rank, mlp())
    kept: list[torch.Tensor] = []
    trial.module[0].register_forward_hook(lambda m, *_: kept.append(m.weight.detach()))
    want = []
    for seed in range(3):
        want.append(trial.module[0].weight.detach().bfloat16())
        with torch.set_grad_enabled(end == "backward"):
            output = trial.ddp(torch.randn(4, 8))
        if end == "backward":
            output.sum().backward()
        with torch.no_grad():
            trial.module[0].weight.add_(seed + 1.0)
    for got, due in zip(kept, want, strict=True):
        require_same("kept", got, due)


@on_ranks(2)
@pytest.mark.parametrize("unused", [False, True])
def test_backward_of_parts_of_the_outputs_one_after_the_other(rank: Rank, unused: bool) -> None:
    class Heads(Two):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    def step(call: Any, x: torch.Tensor) -> None:
        first, second = call(x)
        first.float().square().mean().backward(retain_graph=unused)  # one node joins the outputs then
        second.float().square().mean().backward()

    if unused:
        # as in DistributedDataParallel, the first backward ends the round: the second is local
        trial = Trial(rank, Heads(), find_unused_parameters=True)
        xs = rank.inputs(vectors())
        step(trial.ddp, xs[rank.index])
        trial.oracle.backward(step_of(lambda call, x: call(x)[0].float().square().mean()), xs)
        trial.oracle.backward(step_of(lambda call, x: call(x)[1].float().square().mean()), xs, sync=False)
        grads = trial.oracle.grads[rank.index]
        for name, param in trial.module.named_parameters():
            require_same(name, param.grad, grads[name])
        return
    Trial(rank, Heads()).train(vectors(), step=step, steps=4)


@on_ranks(2)
def test_backward_of_a_part_alone_is_an_error_at_the_next_forward(rank: Rank) -> None:
    class Heads(Two):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    trial = Trial(rank, Heads())
    trial.ddp(torch.randn(4, 8))[0].float().sum().backward()
    with pytest.raises(RuntimeError, match=r"b\.weight.*b\.bias.*find_unused_parameters"):
        trial.ddp(torch.randn(4, 8))
    trial.zero_grad()
    trial.train(vectors(), step=step_of(lambda call, x: sum(o.float().square().mean() for o in call(x))))


@on_ranks(2)
@pytest.mark.parametrize("inside", [False, True])
def test_autograd_grad_of_inputs_then_backward_equals_oracle(rank: Rank, inside: bool) -> None:
    def step(call: Any, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        output = call(x)
        (grad,) = torch.autograd.grad(output.float().sum(), x, retain_graph=True)
        assert grad.dtype is F32
        loss = (output.float() * grad).square().mean() if inside else output.float().square().mean()
        loss.backward()

    Trial(rank, mlp()).train(vectors(), step=step, accumulate=2)


@on_ranks(2)
def test_autograd_grad_of_parameters_leaves_gradients_alone(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    for _ in range(2):
        loss = mean_square(trial.ddp, torch.randn(4, 8))
        grads = torch.autograd.grad(loss, list(trial.module.parameters()))
        assert {g.dtype for g in grads} <= {BF16, F32}
        assert all(p.grad is None and p.dtype is F32 for p in trial.module.parameters())
    trial.train(vectors())


@on_ranks(2)
@pytest.mark.parametrize("separately", [False, True])
def test_autograd_gradient_penalty_equals_oracle(rank: Rank, separately: bool) -> None:
    def step(call: Any, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        output = call(x)
        (grad,) = torch.autograd.grad(output.float().sum(), x, create_graph=True)
        penalty = (grad.norm(dim=1) - 1).square().mean()
        if separately:
            penalty.backward(retain_graph=True)
            return
        (output.float().square().mean() + 10 * penalty).backward()

    # biases of the last layer do not take part in the penalty alone
    trial = Trial(rank, mlp(), exact=False, find_unused_parameters=separately)
    trial.tolerance = 2**-6  # the engine may sum low-precision gradients of two paths in another order
    trial.train(vectors(), step=step)


@on_ranks(2)
def test_backward_with_inputs_argument_accumulates_only_there(rank: Rank) -> None:
    trial = Trial(rank, Two(), find_unused_parameters=True)
    loss = mean_square(trial.ddp, torch.full((2, 8), rank.index + 1.0))
    loss.backward(inputs=[trial.module.a.weight, trial.module.a.bias])
    assert trial.module.b.weight.grad is None
    gathered = rank.gather(trial.module.a.weight.grad)
    require_same("reduced", gathered[0], gathered[1])
    assert gathered[0].dtype is F32
    trial.zero_grad()
    trial.train(vectors())


@on_ranks(2)
def test_backward_in_another_thread_equals_oracle(rank: Rank) -> None:
    import threading

    trial = Trial(rank, mlp())
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        loss = mean_square(trial.ddp, xs[rank.index])
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        trial.oracle.backward(square_step, xs)
        trial.check()
        trial.zero_grad()


@on_ranks(1)
@pytest.mark.parametrize("inside", [True, False], ids=["before ours", "after ours"])
def test_graphs_hooks_of_others_on_the_output_run_and_can_be_removed(rank: Rank, inside: bool) -> None:
    seen: list[str] = []
    handles: list[Any] = []

    class Hooked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            if inside and out.requires_grad:
                handles.extend(out.register_hook(lambda _, name=name: seen.append(name)) for name in "ab")
            return out

    trial = Trial(rank, Hooked(8, 8))
    out = trial.ddp(torch.ones(2, 8))
    if not inside:
        handles.extend(out.register_hook(lambda _, name=name: seen.append(name)) for name in "ab")
    handles[0].remove()
    out.float().sum().backward()
    assert seen == ["b"]
    assert trial.module.weight.dtype is torch.float32
    assert trial.module.weight.grad.dtype is torch.float32


@on_ranks(2)
def test_backward_hooks_of_modules_see_low_precision_and_those_of_parameters_full_precision(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    seen: list[torch.dtype] = []
    trial.module[0].weight.register_hook(lambda grad: seen.append(grad.dtype))
    trial.module[2].register_full_backward_hook(lambda m, i, o: seen.append(o[0].dtype))
    trial.train(vectors(), steps=2)
    assert seen == [BF16, F32] * 2


@on_ranks(2)
def test_backward_hook_of_the_user_that_changes_a_gradient_is_heeded(rank: Rank) -> None:
    trial = Trial(rank, scalar())
    trial.ddp(column(1)).sum().backward()
    trial.zero_grad()
    trial.module.weight.register_hook(lambda grad: grad * 4)
    trial.ddp(column(rank.index + 1)).sum().backward()
    assert trial.module.weight.grad.item() == 6.0


@on_ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_backward_of_a_forward_without_sync_is_not_reduced_because_another_forward_was_synchronised(
    rank: Rank, frozen: bool
) -> None:
    trial = Trial(rank, mlp())
    inputs = rank.inputs(vectors())
    with trial.ddp.no_sync():
        waiting = mean_square(trial.ddp, inputs[rank.index])
    trial.module.requires_grad_(not frozen)
    trial.ddp(inputs[rank.index])  # an evaluation, whose output nobody keeps
    trial.module.requires_grad_(True)
    waiting.backward()
    trial.oracle.backward(square_step, inputs, sync=False)
    trial.check()
