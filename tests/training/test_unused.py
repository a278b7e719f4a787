"""Parameters that have no gradient in some step or on some rank: unused, frozen, thawed; static graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.modules import Choice, Luck, Two, mlp, no_luck, vectors
from kit.oracle import BF16, F32, Trial, mean_square, require_same, square_step, step_of
from kit.ranks import Rank, on_ranks

import ddp_mp


def inputs_that_choose(rank: Rank, chosen: list[int], seed: int) -> list[torch.Tensor]:
    xs = rank.inputs(vectors(), seed)
    for x, bits in zip(xs, chosen, strict=True):
        x[0, 0] = bits
    return xs


@on_ranks(2, 3)
@pytest.mark.parametrize("cap", [25, 0.0001])
@pytest.mark.parametrize("reduce", [F32, BF16], ids=str)
def test_unused_changing_by_rank_and_step_equals_oracle(rank: Rank, cap: float, reduce: torch.dtype) -> None:
    precision = ddp_mp.MixedPrecision(BF16, reduce)
    trial = Trial(rank, Choice(), precision, find_unused_parameters=True, bucket_cap_mb=cap)
    plan = [(7, 7, 7), (1, 1, 1), (1, 2, 4), (0, 7, 1), (0, 0, 0), (3, 5, 6), (7, 7, 7)]
    for seed, chosen in enumerate(plan):
        trial.backward(square_step, inputs_that_choose(rank, list(chosen[: rank.size]), seed))
        trial.check()
        if seed % 2:
            trial.zero_grad()


@on_ranks(2)
def test_unused_with_local_steps_between_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, Choice(), find_unused_parameters=True)
    plan = [((1, 2), False), ((4, 4), True), ((0, 0), False), ((0, 1), False), ((0, 0), True), ((7, 0), True)]
    for repeat in range(2):
        for seed, (chosen, sync) in enumerate(plan):
            trial.backward(square_step, inputs_that_choose(rank, list(chosen), 10 * repeat + seed), sync=sync)
            trial.check()
        trial.zero_grad()


@on_ranks(2)
def test_unused_on_all_ranks_keeps_what_the_gradient_was(rank: Rank) -> None:
    trial = Trial(rank, Choice(2), find_unused_parameters=True)
    trial.train(lambda: torch.cat([torch.ones(1, 8), torch.randn(3, 8)]))
    assert trial.module.branches[1].weight.grad is None
    mine = torch.full((8, 8), float(rank.index + 1))
    trial.module.branches[1].weight.grad = mine
    trial.module.branches[0].weight.grad = None
    trial.ddp(torch.ones(2, 8)).float().sum().backward()
    # a gradient that a user put there is averaged, as by DistributedDataParallel with a local gradient
    assert torch.equal(trial.module.branches[1].weight.grad, torch.full((8, 8), 1.5))
    kept = trial.module.branches[1].weight.grad.clone()
    trial.ddp(torch.ones(2, 8)).float().sum().backward()
    assert torch.equal(trial.module.branches[1].weight.grad, kept)


@on_ranks(2)
def test_unused_without_the_flag_is_an_error_at_the_next_forward_that_names_the_parameters(rank: Rank) -> None:
    trial = Trial(rank, Choice(2))
    for chosen in ((3, 3), (1, 1)):
        square_step(trial.ddp, inputs_that_choose(rank, list(chosen), 0)[rank.index])
    with pytest.raises(RuntimeError, match=r"branches\.1\.weight, branches\.1\.bias.*find_unused_parameters=True") as error:
        trial.ddp(torch.ones(4, 8))
    assert "branches.0" not in str(error.value)
    trial.zero_grad()
    trial.backward(square_step, inputs_that_choose(rank, [3, 3], 1))
    trial.check()


@on_ranks(2)
def test_unused_without_the_flag_may_come_in_a_second_backward(rank: Rank) -> None:
    trial = Trial(rank, Choice(2))
    xs, ys = inputs_that_choose(rank, [1, 1], 0), inputs_that_choose(rank, [2, 2], 1)
    first = trial.ddp(xs[rank.index]).float().square().mean()
    with trial.ddp.no_sync():
        second = trial.ddp(ys[rank.index]).float().square().mean()
    (first + second).backward()
    trial.oracle.backward(square_step, ys, sync=False)
    trial.oracle.backward(square_step, xs)
    trial.tolerance = 2**-6
    trial.check()


@on_ranks(1)
def test_unused_on_one_rank_alone_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, Choice(), find_unused_parameters=True)
    for seed, chosen in enumerate((1, 0, 7)):
        trial.backward(square_step, inputs_that_choose(rank, [chosen], seed))
        trial.check()
        trial.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("unused", [(True, False), (True, True), (False, True)], ids=str)
def test_unused_on_some_ranks_in_a_backward_through_two_models_equals_oracle(
    rank: Rank, unused: tuple[bool, bool], failed: bool
) -> None:
    """One rank uses everything, and has buckets of its second model complete early; another does not."""
    trials = [
        Trial(rank, Choice() if chooses else mlp(), find_unused_parameters=chooses, bucket_cap_mb=0.0001) for chooses in unused
    ]
    for seed, chosen in enumerate(([7, 2], [1, 7])):
        inputs = [inputs_that_choose(rank, chosen, 2 * seed + k) for k in range(2)]
        if failed:  # the next round begins with a look at whether all ranks failed
            for trial, xs in zip(trials, inputs, strict=True):
                output = trial.ddp(xs[rank.index])
                output.register_hook(no_luck)
                with pytest.raises(Luck):
                    output.sum().backward()
        losses = [mean_square(trial.ddp, xs[rank.index]) for trial, xs in zip(trials, inputs, strict=True)]
        (losses[0] + losses[1]).backward()
        for trial, xs in zip(trials, inputs, strict=True):
            trial.oracle.backward(square_step, xs)
            trial.check()
            trial.zero_grad()


@on_ranks(2)
def test_unused_with_checkpoints_equals_oracle(rank: Rank) -> None:
    class Skips(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False)
            return self.b(y) if x[0, 0] > 0 else y

    trial = Trial(rank, Skips(), find_unused_parameters=True)
    for seed, signs in enumerate([(1, 1), (1, -1), (-1, -1)]):
        trial.backward(square_step, inputs_that_choose(rank, list(signs), seed))
        trial.check()
        trial.zero_grad()


# --- static graphs -------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("cap", [25, 0.0001])
def test_static_graph_equals_oracle(rank: Rank, cap: float) -> None:
    Trial(rank, mlp(), static_graph=True, bucket_cap_mb=cap).train(vectors(), steps=5, accumulate=2)


@on_ranks(2)
def test_static_graph_set_after_patching_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    trial.ddp._set_static_graph()
    trial.train(vectors(), steps=4)
    assert trial.ddp._get_ddp_logging_data()["static_graph"] == 1


@on_ranks(2)
def test_static_graph_with_unused_parameters_equals_oracle(rank: Rank) -> None:
    class Half(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x)

    trial = Trial(rank, Half(), static_graph=True).train(vectors(), steps=4)
    assert trial.module.b.weight.grad is None


@on_ranks(2)
@pytest.mark.parametrize(("first", "then", "said"), [(0, 1, "now used: b"), (1, 0, "not used any more: b")])
def test_static_graph_that_changes_is_an_error(rank: Rank, first: int, then: int, said: str) -> None:
    class Changing(Two):
        way = first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) if self.way else self.a(x)

    model = Changing()
    ddp = Trial(rank, model, static_graph=True).ddp
    for _ in range(2):
        mean_square(ddp, torch.ones(2, 8)).backward()
    before = model.a.weight.grad.clone()
    model.way = then
    with pytest.raises(RuntimeError, match=f"graph has changed.*{said}.weight, b.bias"):
        mean_square(ddp, torch.ones(2, 8)).backward()
    assert torch.equal(model.a.weight.grad, before)
    assert model.a.weight.dtype is torch.float32


@on_ranks(2)
def test_static_graph_with_repeated_layers_in_reentrant_checkpoints_equals_oracle(rank: Rank) -> None:
    class Shares(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.b, x, use_reentrant=True).tanh()
            return x

    trial = Trial(rank, Shares(), static_graph=True, bucket_cap_mb=0.0001)
    trial.tolerance = 2**-6
    trial.train(vectors(), steps=5)


# --- frozen and thawed ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_frozen_parameters_are_cast_and_have_no_gradient(rank: Rank) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda m, *_: seen.append(m.weight.dtype))
    trial = Trial(rank, model).train(vectors(), accumulate=2)
    assert set(seen) == {BF16}
    assert ddp_mp.stats(trial.ddp).parameters == 4
    assert all(p.grad is None and p.dtype is F32 for p in model[0].parameters())


@on_ranks(2)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("keep_gradients", [False, True])
def test_frozen_later_keeps_its_value_and_gradient(rank: Rank, unused: bool, keep_gradients: bool) -> None:
    trial = Trial(rank, mlp(), find_unused_parameters=unused)
    trial.train(vectors())
    trial.backward(square_step, rank.inputs(vectors(), 20))
    if not keep_gradients:
        trial.zero_grad()
    for model in (trial.module, trial.oracle.module):
        model[0].requires_grad_(False)
    for seed in range(3):
        trial.backward(square_step, rank.inputs(vectors(), 30 + seed))
        trial.check()


@on_ranks(2)
def test_frozen_then_thawed_is_trained_again(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    for seed, grad in enumerate([True, False, True, False, True]):
        for model in (trial.module, trial.oracle.module):
            model[0].requires_grad_(grad)
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        trial.zero_grad()


@on_ranks(2)
def test_thawed_after_wrapping_is_reduced(rank: Rank) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    trial = Trial(rank, model)
    trial.train(vectors(), steps=2)
    for part in (model, trial.oracle.module):
        part[0].requires_grad_(True)
    trial.train(vectors(), steps=3, seed=10)
    assert model[0].weight.grad is None  # zeroed by train(), and the last step had one
    trial.backward(square_step, rank.inputs(vectors(), 50))
    require_same("thawed", model[0].weight.grad, trial.oracle.grads[rank.index]["0.weight"])


@on_ranks(2)
def test_frozen_everything_but_the_input_computes_in_low_precision(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    trial.module.requires_grad_(False)
    trial.oracle.module.requires_grad_(False)
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        square_step(trial.ddp, x)
        got, x.grad = x.grad, None
        with trial.oracle.low_precision() as call:
            square_step(call, x)
        require_same("gradient of the input", got, x.grad)
        trial.check()
    for model in (trial.module, trial.oracle.module):
        model.requires_grad_(True)
    trial.train(vectors())


@on_ranks(2)
def test_frozen_layer_in_eval_mode_while_others_train_equals_oracle(rank: Rank) -> None:
    def step(call: Any, x: torch.Tensor) -> None:
        call.module[0].eval()
        with torch.no_grad():
            hidden = call.module[0](x.to(call.module[0].weight.dtype))
        call(hidden.float()).float().square().mean().backward()

    trial = Trial(rank, mlp())
    xs = rank.inputs(vectors())
    step(trial.ddp, xs[rank.index])
    with torch.no_grad():
        hidden = [trial.oracle.module[0](x) for x in xs]
    trial.oracle.backward(step_of(lambda call, x: call(x).float().square().mean()), hidden)
    trial.check()
