"""What people reported of mixed precision elsewhere: each with its right value.

Unless a test says otherwise a model is one weight of 0.5, whose gradient is its input, in bfloat16 throughout.

Reports whose subject is what goes on around and inside forwards, and where their right values are tested:

=================================================== =====================================================================
report                                              test (of this file where none is named)
=================================================== =====================================================================
a backward past the wrapper, then a forward         test_backward_past_the_wrapper_between_step_and_forward
(hpcaitech/ColossalAI#3674)
two wrappers share an encoder (ray#32460)           test_shared_part_of_two_wrappers_in_one_loss_gathers_in_full_precision
a patched wrapper beside a plain one                test_shared_part_of_a_patched_and_a_plain_wrapper
a forward that records no graph; all is frozen      test_weights_after_a_forward_without_a_graph
(pytorch/pytorch#106858)
weights written between forwards                    test_weight_written_between_two_forwards_of_one_backward
(pytorch/pytorch#104504)
gradients of gradients (pytorch/pytorch#63929)      test_autograd_grad.py: the whole file; test_graphs.py:
                                                    test_autograd_gradient_penalty_equals_oracle
an update by hand in a hook (OpenLMLab/LOMO#14)     test_update_by_hand_in_a_gradient_hook
inputs that are no activations                      test_inputs_that_are_no_activations_keep_their_values
(pytorch/pytorch#90620)
shallow clones (learnables/learn2learn#170)         test_loops.py: test_shallow_clones_compute_with_their_own_weights_...
compiled autograd (pytorch/pytorch#110662)          test_compiled_autograd_is_refused_by_name
ties made after the wrap (torchtune#616)            test_weights_tied_after_the_wrap_and_cut_again
gradients kept without a copy                       test_user_gradients.py: test_gradients_memory_that_the_user_holds_...
(pytorch/pytorch#41954)
the critic is frozen for a while                    test_critic_frozen_while_the_generator_is_trained_through_it; test_loops.py:
(pytorch/pytorch#22436)                             test_frozen_for_a_forward_in_between_and_thawed_again_is_trained
a momentum encoder inside the forward (moco-v3)     test_momentum_encoder_follows_in_full_precision; test_loops.py:
                                                    test_masters_asked_for_in_the_middle_of_a_forward_leave_its_graph_whole
p.grad.detach_() (guided-diffusion)                 test_gradients_are_detached_and_zeroed
float32 tensors, losses and inputs of own classes   test_model_that_was_not_written_for_low_precision_trains_in_autocast
inside the model (dino, nanoGPT, detr)
ddp.module(x) (pytorch-image-models)                test_module_called_without_its_wrapper_evaluates
masters of 16 bits                                  test_model_converted_to_half_before_its_first_forward_...
=================================================== =====================================================================
"""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.modules import column, scalar
from kit.oracle import BF16, F32, F64, FP16
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddp_mp

ALL_LOW = ddp_mp.MixedPrecision(BF16, BF16, BF16)


def wrap(module: nn.Module, precision: ddp_mp.MixedPrecision = ALL_LOW, **wrapping: Any) -> DistributedDataParallel:
    """The module in a patched wrapper; PyTorch's own mixed precision is never set up."""
    with ddp_mp.install():
        return DistributedDataParallel(module, mixed_precision=precision, **wrapping)


def square(value: float = 0.5) -> nn.Linear:
    """A 2 x 2 layer without bias, filled with one value."""
    layer = nn.Linear(2, 2, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


# --- mixed precision in DistributedDataParallel --------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("static", [False, True])
def test_first_gradients_are_those_of_the_input(rank: Rank, static: bool) -> None:
    # pytorch/pytorch#92882
    ddp = wrap(scalar(), static_graph=static)
    for _ in range(3):
        ddp(column(3)).sum().backward()
        assert ddp.module.weight.grad.item() == 3.0
        assert ddp.module.weight.grad.dtype is F32
        ddp.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("static", [False, True])
def test_first_gradients_of_a_module_called_twice(rank: Rank, static: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = square()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.e(self.e(x))

    ddp = wrap(Twice(), static_graph=static)
    for _ in range(3):
        ddp(torch.ones(1, 2)).sum().backward()
        assert torch.equal(ddp.module.e.weight.grad, torch.full((2, 2), 2.0))
        ddp.zero_grad()


@on_ranks(2)
def test_first_steps_of_a_small_network_stay_finite(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    ddp = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = ddp(torch.ones(4, 64)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@on_ranks(2)
def test_patched_between_iterations_the_next_forward_is_low_precision(rank: Rank) -> None:
    # pytorch/pytorch#173505: hooks that missed the forward they were registered in
    model = scalar()
    ddp = DistributedDataParallel(model)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda m, *_: seen.append(m.weight.dtype))
    ddp(column(1)).sum().backward()
    ddp.zero_grad()
    ddp.register_forward_pre_hook(lambda *_: ddp_mp.patch(ddp, mixed_precision=ALL_LOW) and None)
    ddp(column(3)).sum().backward()
    assert seen == [F32, BF16]
    assert model.weight.grad.item() == 3.0


@on_ranks(2)
def test_counters_tell_a_call_that_went_round_the_wrapper(rank: Rank) -> None:
    # fla-org/flame#29, pytorch/torchtitan#591: asked for, and silently not done
    ddp = wrap(scalar())
    ddp.module(column(1).bfloat16()).sum().backward()
    assert (ddp_mp.stats(ddp).casts, ddp_mp.stats(ddp).reductions) == (1, 0)
    ddp(column(1)).sum().backward()
    assert (ddp_mp.stats(ddp).casts, ddp_mp.stats(ddp).reductions) == (2, 1)


@on_ranks(2)
def test_all_parameters_ignored_is_a_warning_and_no_cast(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, dtype=BF16))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    ddp = wrap(model)
    model[0].bfloat16()
    with pytest.warns(UserWarning, match="without any cast"):
        ddp(column(1)).sum().backward()
    ddp(column(1)).sum().backward()
    assert ddp_mp.stats(ddp).casts == 0


@on_ranks(2)
def test_buffers_that_are_not_floating_keep_type_and_value(rank: Rank) -> None:
    # pytorch/pytorch#77439, pytorch/pytorch#96380
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(300, 2), nn.BatchNorm1d(2)
            self.register_buffer("pos", torch.arange(300))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("phase", torch.tensor([1 + 2j]))
            self.norm.num_batches_tracked.fill_(256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(F.embedding(self.pos[250:260], self.table.weight)) + x

    ddp = wrap(Buffers())
    for _ in range(4):
        ddp(torch.zeros(1, 2)).float().square().sum().backward()
    model = ddp.module
    assert model.pos.dtype is torch.int64
    assert model.pos[257].item() == 257
    assert (model.mask.dtype, model.phase.dtype) == (torch.bool, torch.complex64)
    assert model.norm.num_batches_tracked.item() == 260
    assert model.norm.running_mean.dtype is BF16


@on_ranks(2)
@pytest.mark.parametrize("before", [True, False])
def test_compression_hook_of_the_user_works_together(rank: Rank, before: bool) -> None:
    # huggingface/accelerate#2841, pytorch/pytorch#75031
    model = scalar()
    ddp = DistributedDataParallel(model)
    if before:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ddp_mp.patch(ddp, mixed_precision=ALL_LOW)
    if not before:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for _ in range(2):
        ddp(column(2 * rank.index + 1)).sum().backward()
        assert model.weight.grad.item() == 2.0
        assert model.weight.grad.dtype is F32
        ddp.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["all_low", "all_full", "mixed"])
def test_parameters_that_have_the_type_already(rank: Rank, kind: str) -> None:
    # huggingface/accelerate#389
    dtypes, precision = {
        "all_low": ([BF16, BF16], ALL_LOW),
        "all_full": ([F32, F32], ddp_mp.MixedPrecision(F32, F32, F32)),
        "mixed": ([BF16, F32, F64], ALL_LOW),
    }[kind]
    model = nn.Sequential(*[scalar(1.0).to(dtype) for dtype in dtypes])
    ddp = wrap(model, precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is cast
        for _ in range(3):
            ddp(column(3)).sum().backward()
            for layer, dtype in zip(model, dtypes, strict=True):
                assert layer.weight.grad.item() == 3.0
                assert layer.weight.grad.dtype is dtype
            ddp.zero_grad()


# --- what DistributedDataParallel means ----------------------------------------------------------------------------------


@on_ranks(2)
def test_no_sync_belongs_to_the_forward(rank: Rank) -> None:
    # huggingface/accelerate#1726, pytorch/pytorch#21736
    ddp = wrap(scalar())
    with ddp.no_sync():
        first = ddp(column(1)).sum()
    second = ddp(column(2)).sum()
    first.backward()
    second.backward()
    assert ddp.module.weight.grad.item() == 3.0


@on_ranks(2)
def test_no_sync_step_then_synchronised_step(rank: Rank) -> None:
    ddp = wrap(scalar())
    with ddp.no_sync():
        ddp(column(rank.index + 1)).sum().backward()
    ddp(column(rank.index + 1)).sum().backward()
    assert ddp.module.weight.grad.item() == 3.0


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoint_of_tied_weights(rank: Rank, reentrant: bool, inside: bool) -> None:
    # pytorch/pytorch#24005
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.b, self.a(x), use_reentrant=reentrant) if inside else self.b(self.a(x))

    ddp = wrap(Tied())
    for _ in range(3):
        ddp(torch.ones(1, 2)).sum().backward()
        assert torch.equal(ddp.module.a.weight.grad, torch.full((2, 2), 2.0))
        ddp.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("evaluate", [True, False])
def test_two_forwards_then_one_backward(rank: Rank, evaluate: bool) -> None:
    # pytorch/pytorch#62474, pytorch/pytorch#175024
    ddp = wrap(scalar())
    first = ddp(column(1))
    if evaluate:
        with torch.no_grad():
            ddp(column(7))
    (first + ddp(column(2))).sum().backward()
    assert ddp.module.weight.grad.item() == 3.0


@on_ranks(2)
@pytest.mark.parametrize("evaluate", [True, False])
def test_two_forwards_whose_inputs_need_gradients(rank: Rank, evaluate: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    reference = copy.deepcopy(model).bfloat16()
    ddp = wrap(model)
    xs = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    outputs = [ddp(xs[0])]
    if evaluate:
        with torch.no_grad():
            ddp(torch.randn(2, 4))
    outputs.append(ddp(xs[1]))
    sum(o.sum() for o in outputs).backward()
    got = [x.grad.clone() for x in xs]
    for x, grad in zip(xs, got, strict=True):
        x.grad = None
        reference(x.bfloat16()).sum().backward()
        assert torch.equal(x.grad, grad)


@on_ranks(2)
def test_loss_scaling_with_an_overflow_on_one_rank(rank: Rank) -> None:
    # facebookresearch/fairscale#834, pytorch/pytorch#116054
    model = scalar()
    ddp = wrap(model, ddp_mp.MixedPrecision(FP16, FP16, FP16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(ddp(column(1)).sum()).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.item() == 1.0
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(ddp(column(6e4 if rank.index else 1)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    optimizer.zero_grad()
    with ddp.no_sync():
        scaler.scale(ddp(column(1)).sum()).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.item() == 1.0
    assert model.weight.grad.dtype is F32


@on_ranks(2)
def test_evaluation_between_backward_and_step_keeps_the_step(rank: Rank) -> None:
    # pytorch/pytorch#104504
    model = scalar()
    ddp = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    ddp(column(1)).sum().backward()
    ddp.eval()
    ddp(column(1))
    optimizer.step()
    assert model.weight.item() == 0.25
    ddp.train()
    optimizer.zero_grad()
    ddp(column(1)).sum().backward()
    assert model.weight.item() == 0.25


@on_ranks(2)
def test_loading_after_a_forward_without_backward_keeps_every_bit(rank: Rank) -> None:
    model = scalar()
    ddp = wrap(model)
    ddp(column(1))
    model.load_state_dict({"weight": torch.full((1, 1), 3.1415927)})
    ddp(column(1)).sum().backward()
    assert model.weight.item() == torch.tensor(3.1415927).item()
    assert model.weight.dtype is F32


@on_ranks(2)
def test_a_discarded_loss_and_a_failed_forward_do_not_disturb(rank: Rank) -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = scalar()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool(x.isnan().any()):
                raise ValueError("not a number")
            return self.inner(x)

    ddp = wrap(Guarded())
    loss = ddp(column(5)).sum()
    assert bool(loss.isfinite())
    with pytest.raises(ValueError, match="not a number"):
        ddp(column(float("nan")))
    ddp(column(2)).sum().backward()
    assert ddp.module.inner.weight.grad.item() == 2.0


@on_ranks(2)
@pytest.mark.parametrize("how", ["assign", "swap", "data", "double"])
def test_weights_replaced_after_wrapping_are_used(rank: Rank, how: str) -> None:
    # NVIDIA/Megatron-LM#5790, pytorch/pytorch#117913
    model = scalar()
    ddp = wrap(model)
    ddp(column(1)).sum().backward()
    ddp.zero_grad()
    if how == "data":
        model.weight.data = torch.full((1, 1), 7.0)
    elif how == "double":
        model.to(F64)
        with torch.no_grad():
            model.weight.fill_(7.0)
    else:
        torch.__future__.set_swap_module_params_on_conversion(how == "swap")
        try:
            model.load_state_dict({"weight": torch.full((1, 1), 7.0)}, assign=how == "assign")
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.no_grad():
        assert ddp(column(1)).item() == 7.0
    ddp(column(rank.index + 1)).sum().backward()
    assert model.weight.grad.item() == 1.5
    assert model.weight.grad.dtype is model.weight.dtype


@on_ranks(2)
def test_parameter_added_after_wrapping_is_one_clear_error(rank: Rank) -> None:
    ddp = wrap(scalar())
    ddp.module.late = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="late"):
        ddp(column(1))


@on_ranks(2)
def test_accumulated_gradients_are_not_rounded(rank: Rank) -> None:
    # pytorch/pytorch#125191, pytorch/pytorch#106395
    ddp = wrap(scalar(), ddp_mp.MixedPrecision(BF16, F32))
    ddp(column(256)).sum().backward()
    ddp(column(1)).sum().backward()
    assert ddp.module.weight.grad.item() == 257.0


@on_ranks(2)
@pytest.mark.parametrize("synchronised", [False, True])
def test_accumulation_is_rounded_to_the_reduction_type_where_it_is_reduced(rank: Rank, synchronised: bool) -> None:
    """Everything in ``.grad`` is reduced again, as in plain DDP, and so is rounded once per reduction."""
    ddp = wrap(scalar(), ddp_mp.MixedPrecision(BF16, BF16))
    with contextlib.nullcontext() if synchronised else ddp.no_sync():
        ddp(column(256)).sum().backward()
        ddp(column(1)).sum().backward()
    assert ddp.module.weight.grad.item() == (256.0 if synchronised else 257.0)
    ddp(column(2)).sum().backward()
    assert ddp.module.weight.grad.item() == (258.0 if synchronised else 260.0)


@on_ranks(2)
@pytest.mark.parametrize(("reduce", "mean"), [(F32, 128.5), (BF16, 128.0)], ids=str)
def test_mean_over_ranks_is_rounded_to_the_reduction_type(rank: Rank, reduce: torch.dtype, mean: float) -> None:
    ddp = wrap(scalar(), ddp_mp.MixedPrecision(BF16, reduce))
    ddp(column(1 if rank.index else 256)).sum().backward()
    assert ddp.module.weight.grad.item() == mean


# --- streams, and gradients of several types -----------------------------------------------------------------------------


@on_ranks(2)
def test_hooks_never_touch_the_callers_current_stream(rank: Rank) -> None:
    # NVIDIA/Megatron-LM#3670, pytorch/pytorch#166136: accumulators made under a side stream
    changed: list[Any] = []
    originals = torch.accelerator.set_stream, torch.cuda.set_stream
    torch.accelerator.set_stream = torch.cuda.set_stream = lambda *args: changed.append(args)
    try:
        ddp = wrap(scalar())
        ddp(column(1)).sum().backward()
        ddp.module.weight.data = torch.zeros(1, 2)
        with pytest.raises(ValueError, match="weight"):
            ddp(column(1))
    finally:
        torch.accelerator.set_stream, torch.cuda.set_stream = originals
    assert changed == []


@on_ranks(2)
def test_neighbours_of_which_one_was_used_before(rank: Rank) -> None:
    # pytorch/pytorch#196996: gradients of two types in one bucket
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.both = scalar(1.0), scalar(1.0), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x) if self.both else self.a(x)

    ddp = wrap(Pair(), ddp_mp.MixedPrecision(BF16, F32))
    x = column(2 * rank.index + 1)
    with ddp.no_sync():
        ddp(x).sum().backward()
    ddp.module.both = True
    ddp(x).sum().backward()
    assert ddp.module.a.weight.grad.item() == 4.0
    assert ddp.module.b.weight.grad.item() == 2.0
    assert ddp.module.a.weight.grad.dtype is ddp.module.b.weight.grad.dtype is F32


# --- tensors -------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("unused", [True, False])
@pytest.mark.parametrize("place", ["first", "last", "many"])
def test_empty_parameters_anywhere(rank: Rank, unused: bool, place: str) -> None:
    # pytorch/pytorch#100811, pytorch/pytorch#94865
    class Empties(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            count = 50 if place == "many" else 1
            empties = nn.ParameterList([nn.Parameter(torch.empty(0)) for _ in range(count)])
            if place == "last":
                self.inner = scalar()
            self.empties = empties
            if place != "last":
                self.inner = scalar()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + sum(e.sum() for e in self.empties)

    ddp = wrap(Empties(), find_unused_parameters=unused)
    for _ in range(3):
        ddp(column(3)).sum().backward()
        assert ddp.module.inner.weight.grad.item() == 3.0
        ddp.zero_grad()


@on_ranks(2)
def test_channels_last_convolution_gives_no_stride_warning(rank: Rank) -> None:
    # pytorch/pytorch#47163, pytorch/pytorch#70222; warnings are errors in these tests
    conv = nn.Conv2d(3, 2, 1).to(memory_format=torch.channels_last)
    assert conv.weight.shape[2:] == (1, 1)
    ddp = wrap(conv)
    for _ in range(3):
        ddp(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)).sum().backward()
        assert torch.equal(conv.weight.grad, torch.full_like(conv.weight, 32.0))
        assert conv.weight.grad.stride() == conv.weight.stride()
        ddp.zero_grad()


@on_ranks(2)
def test_rounding_of_masters_is_to_nearest_even_with_nan_and_infinity_kept(rank: Rank) -> None:
    # dotnet/runtime#130583, pytorch/pytorch#179282
    bits = [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7FFF8C22, 0x7F7FFFFF, 0x3F808000, 0x3F818000]
    values = torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(F32)
    model = nn.Linear(1, 7)
    model.bias.data = values
    nn.init.zeros_(model.weight)
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda m, *_: seen.append(m.bias.detach().clone()))
    wrap(model)(column(0))
    (low,) = seen
    assert low[:4].isnan().all()
    assert [v & 0xFFFF for v in low[4:].view(torch.int16).tolist()] == [0x7F80, 0x3F80, 0x3F82]
    model.bias.data = torch.tensor([65519.99, 65520.0, 2.9e-8, 2.0**-24, 0, 0, 0])
    wrap(model, ddp_mp.MixedPrecision(FP16, FP16))(column(0))
    assert seen[1].tolist() == [65504.0, float("inf"), 0.0, 2.0**-24, 0, 0, 0]


# --- frameworks ----------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_eight_threads_train_a_model_each(rank: Rank) -> None:
    wrong: list[Any] = []

    def train(number: int) -> None:
        model = scalar(0.0)
        ddp = wrapped[number]
        model = ddp.module
        for step in range(50):
            ddp(column(number + step)).sum().backward()
            if model.weight.grad.item() != number + step:
                wrong.append((number, step, model.weight.grad.item()))
            ddp.zero_grad()

    wrapped = [wrap(scalar()) for _ in range(8)]
    threads = [threading.Thread(target=train, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # PyTorch keeps the model of the present forward in a class attribute, which threads put back in each other's way
    DistributedDataParallel._active_ddp_module = None
    assert wrong == []


@on_ranks(2)
def test_compiled_with_the_eager_backend_trains(rank: Rank) -> None:
    # pytorch/pytorch#161153
    ddp = wrap(scalar())
    compiled = torch.compile(ddp, backend="eager")
    for step in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler's own
            output = compiled(column(step + rank.index))
        output.sum().backward()
        assert ddp.module.weight.grad.item() == step + 0.5
        ddp.zero_grad()
    torch._dynamo.reset()


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_deepcopy_of_the_module_at_any_time_is_independent_and_full_precision(rank: Rank, when: str) -> None:
    # pytorch/pytorch#82070, pytorch/pytorch#76927
    model = scalar(0.1)
    ddp = wrap(model)
    twin = copy.deepcopy(model) if when == "before" else None
    loss = ddp(column(1)).sum()
    twin = copy.deepcopy(model) if when == "during" else twin
    loss.backward()
    twin = copy.deepcopy(model) if when == "after" else twin
    assert twin is not None
    assert twin.weight.dtype is F32
    assert twin.weight.item() == torch.tensor(0.1).item()
    twin.zero_grad()
    with torch.no_grad():
        model.weight.fill_(9.0)
    assert twin.weight.item() == torch.tensor(0.1).item()
    second = wrap(twin)
    second(column(rank.index + 1)).sum().backward()
    assert twin.weight.grad.item() == 1.5


@on_ranks(2)
def test_two_models_in_one_backward(rank: Rank) -> None:
    first, second = wrap(scalar()), wrap(scalar())
    (first(column(1)).sum() + second(column(1)).sum()).backward()
    assert first.module.weight.grad.item() == 1.0
    assert second.module.weight.grad.item() == 1.0


@on_ranks(2)
def test_the_same_module_wrapped_twice_belongs_to_the_second_wrapper(rank: Rank) -> None:
    model = scalar()
    first = wrap(model)
    first(column(1)).sum().backward()
    first.zero_grad()
    second = wrap(model)
    for _ in range(3):
        second(column(rank.index + 1)).sum().backward()
        assert model.weight.grad.item() == 1.5
        second.zero_grad()
    assert not ddp_mp.is_patched(first)


# --- weights, gradients and graphs that go other ways than through the wrapper -------------------------------------------


def total(*outputs: torch.Tensor) -> torch.Tensor:
    return torch.stack([output.float().sum() for output in outputs]).sum()


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"prefetch": True}, {"reuse_unchanged": True}], ids=str)
def test_backward_past_the_wrapper_between_step_and_forward(rank: Rank, options: dict[str, Any]) -> None:
    # hpcaitech/ColossalAI#3674, pytorch/pytorch#183702
    ddp = ddp_mp.patch(
        DistributedDataParallel(scalar(1.0)),
        mixed_precision=ddp_mp.MixedPrecision(BF16, F32),
        options=ddp_mp.Options(**options),
    )
    weight, optimizer = ddp.module.weight, torch.optim.SGD(ddp.parameters(), lr=0.125)
    for _ in range(2):
        nn.init.ones_(weight)
        ddp_mp.masters_changed(ddp)
        ddp(column(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weight.square().sum().backward()
        assert weight.grad.item() == 1.5
        optimizer.zero_grad()
        assert ddp(column(2)).item() == 1.5


@on_ranks(2)
def test_shared_part_of_two_wrappers_in_one_loss_gathers_in_full_precision(rank: Rank) -> None:
    # ray-project/ray#32460, pytorch/pytorch#51929
    part = scalar(1.0)
    first, second = (wrap(nn.Sequential(part, scalar(1.0)), ddp_mp.MixedPrecision(BF16, F32)) for _ in range(2))
    for value in [256] + [1] * 8:
        total(first(column(value)), 0 * second(column(1))).backward()
    assert part.weight.grad.item() == 264


@on_ranks(2)
@pytest.mark.parametrize("joint", [False, True])
def test_shared_part_of_a_patched_and_a_plain_wrapper(rank: Rank, joint: bool) -> None:
    # pytorch/pytorch#22436
    part = scalar(2.0)
    ours = wrap(nn.Sequential(part, scalar(0.5)), ddp_mp.MixedPrecision(BF16, F32))
    plain = DistributedDataParallel(nn.Sequential(part, scalar(0.25)))
    for _ in range(3):
        ours.zero_grad()
        plain.zero_grad()
        x = column(1 + 2 * rank.index)
        if joint:
            total(ours(x), plain(x)).backward()
        else:
            ours(x).sum().backward()
            plain(x).sum().backward()
        assert part.weight.grad.item() == 1.5  # (0.5 + 0.25) times the mean of 1 and 3


class Acts(nn.Module):
    """Acts without a graph, though gradients are recorded around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = scalar(0.49975586)

    def forward(self, x: torch.Tensor, act: bool = False) -> torch.Tensor:
        with torch.set_grad_enabled(not act):
            return self.inner(x)


@on_ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_after_a_forward_without_a_graph(rank: Rank, frozen: bool) -> None:
    # pytorch/pytorch#106858
    ddp = wrap(Acts(), ddp_mp.MixedPrecision(BF16, F32))
    weight, target = ddp.module.inner.weight, torch.zeros(1, 1)
    ddp.requires_grad_(not frozen)
    assert not ddp(column(1), act=not frozen).requires_grad
    with torch.no_grad():
        target.add_(weight)
        weight.clamp_(max=0.25)
    assert abs(target.item() - 0.49975586) < 1e-8
    ddp.requires_grad_(True)
    output = ddp(column(1))
    output.sum().backward()
    assert (output.item(), weight.item(), weight.grad.item()) == (0.25, 0.25, 1.0)


@on_ranks(2)
@pytest.mark.parametrize("how", ["fill", "data", "load"])
def test_weight_written_between_two_forwards_of_one_backward(rank: Rank, how: str) -> None:
    # pytorch/pytorch#104504
    ddp = wrap(scalar(2.0))
    weight = ddp.module.weight
    first = ddp(column(1))
    with torch.no_grad():
        if how == "load":
            ddp.module.load_state_dict({"weight": torch.full((1, 1), 4.0)})
        else:
            (weight if how == "fill" else weight.data).fill_(4.0)
    second = ddp(column(1))
    total(first, second).backward()
    assert (first.item(), second.item(), weight.item(), weight.grad.item()) == (2, 4, 4, 2)


@on_ranks(1)
def test_update_by_hand_in_a_gradient_hook(rank: Rank) -> None:
    # OpenLMLab/LOMO#14
    ddp = wrap(scalar(), ddp_mp.MixedPrecision(BF16, F32))

    def update(param: torch.Tensor) -> None:
        with torch.no_grad():
            param -= 0.125 * param.grad
        param.grad = None

    ddp.module.weight.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        ddp(column(1)).sum().backward()
    assert ddp.module.weight.item() == 0.125


@on_ranks(1)
def test_gradients_are_detached_and_zeroed(rank: Rank) -> None:
    # as PyTorch's zero_grad did until 1.x, and openai/guided-diffusion does
    ddp = wrap(scalar(), gradient_as_bucket_view=False)
    for value in (3, 5):
        ddp(column(value)).sum().backward()
        assert ddp.module.weight.grad.item() == value
        ddp.module.weight.grad.detach_()
        ddp.module.weight.grad.zero_()


@on_ranks(1)
def test_compiled_autograd_is_refused_by_name(rank: Rank) -> None:
    # pytorch/pytorch#110662
    from torch._dynamo import compiled_autograd

    ddp = wrap(scalar())
    loss = ddp(column(1)).sum()
    with (
        pytest.raises(Exception, match="ddp_mp does not work under compiled autograd"),
        compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")),
    ):
        loss.backward()
    assert ddp.module.weight.grad is None
    ddp(column(3)).sum().backward()
    assert ddp.module.weight.grad.item() == 3


class Momentum(nn.Module):
    """An encoder that follows another one inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.slow = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.slow.load_state_dict(self.base.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.base(x)
        with torch.no_grad(), ddp_mp.full_precision(self):
            for base, slow in zip(self.base.parameters(), self.slow.parameters(), strict=True):
                slow.data = 0.9 * slow.data + 0.1 * base.data
        return (query - self.slow(x) - 1).square().mean()


@on_ranks(2)
def test_momentum_encoder_follows_in_full_precision(rank: Rank) -> None:
    # facebookresearch/moco-v3
    ddp = wrap(Momentum(), ddp_mp.MixedPrecision(BF16, F32))
    base, slow = ddp.module.base, ddp.module.slow
    due, optimizer = slow.weight.detach().clone(), torch.optim.SGD(base.parameters(), lr=1e-3)
    for seed in range(5):
        before = base.weight.detach().clone()
        due = 0.9 * due + 0.1 * before
        ddp(rank.inputs(lambda: torch.randn(4, 8), seed)[rank.index]).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(slow.weight, due)
        assert not torch.equal(base.weight, before)


class Mixed(nn.Module):
    """Inputs that are no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = scalar(1.0)

    def forward(self, x: torch.Tensor, time: Any, target: Any, mask: Any) -> tuple[torch.Tensor, ...]:
        out = self.inner(x.to(self.inner.weight.dtype)).float()
        return (out - target).square().sum(), time, torch.softmax(out + mask, -1)


@on_ranks(1)
@pytest.mark.parametrize("options", [{"cast_forward_inputs": False}, {"autocast": True}], ids=str)
def test_inputs_that_are_no_activations_keep_their_values(rank: Rank, options: dict[str, Any]) -> None:
    # pytorch/pytorch#90620, modelscope/DiffSynth-Studio#1025, espnet/espnet#4584
    precision = ddp_mp.MixedPrecision(BF16, F32)
    ddp = ddp_mp.patch(DistributedDataParallel(Mixed()), mixed_precision=precision, options=ddp_mp.Options(**options))
    mask = torch.full((1, 2), torch.finfo(F32).min)
    loss, time, chances = ddp(column(1), torch.tensor([998.3897]), column(257), mask)
    assert (loss.item(), chances.tolist()) == (65536, [[0.5, 0.5]])
    assert abs(time.item() - 998.3897) < 1e-3


class Samples:
    """An input of the user's own class."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class NotWrittenForIt(nn.Module):
    """Makes float32 tensors, and computes a loss inside that takes no bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, samples: Samples, target: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat((torch.zeros(1, 8), self.body(samples.x)))
        return F.binary_cross_entropy_with_logits(self.head(hidden)[1:], target)


@on_ranks(2)
def test_model_that_was_not_written_for_low_precision_trains_in_autocast(rank: Rank) -> None:
    # facebookresearch/dino, facebookresearch/detr, karpathy/nanoGPT
    precision, options = ddp_mp.MixedPrecision(BF16, F32), ddp_mp.Options(autocast=True)
    plain, model = (DistributedDataParallel(copy.deepcopy(NotWrittenForIt())) for _ in range(2))
    model.module.load_state_dict(plain.module.state_dict())
    ddp_mp.patch(model, mixed_precision=precision, options=options)
    x, target = rank.inputs(lambda: (torch.randn(4, 8), torch.rand(4, 1)))[rank.index]
    with torch.autocast("cpu", BF16):
        due = plain(Samples(x), target)
    loss = model(Samples(x), target)
    assert loss.dtype is due.dtype is F32
    assert loss.item() == due.item()
    due.backward()
    loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=2**-6, atol=1e-5)


@on_ranks(2)
def test_module_called_without_its_wrapper_evaluates(rank: Rank) -> None:
    # huggingface/pytorch-image-models and huggingface/diffusers evaluate so
    ddp = wrap(scalar())
    ddp(column(1)).sum().backward()
    with torch.no_grad():
        assert ddp.module(column(3)).item() == 1.5
        with ddp_mp.full_precision(ddp):
            assert ddp.module(column(3)).dtype is F32


@on_ranks(2)
def test_critic_frozen_while_the_generator_is_trained_through_it(rank: Rank) -> None:
    # pytorch/pytorch#22436
    generator = wrap(scalar(2.0), ddp_mp.MixedPrecision(BF16, F32))
    critic = wrap(nn.Sequential(scalar(1.0), scalar(1.0)), ddp_mp.MixedPrecision(BF16, F32))
    x = column(1 + rank.index)
    for _ in range(2):
        critic.zero_grad()
        generator.zero_grad()
        critic(generator(x).detach()).sum().backward()
        kept = [p.grad.item() for p in critic.parameters()]
        critic.requires_grad_(False)
        with torch.no_grad():
            critic.module[0].weight.clamp_(max=1.0)
        critic(generator(x)).sum().backward()
        critic.requires_grad_(True)
        assert generator.module.weight.grad.item() == 1.5
        assert [p.grad.item() for p in critic.parameters()] == kept == [3.0, 3.0]
        assert {p.dtype for p in critic.parameters()} == {F32}


@on_ranks(2)
def test_weights_tied_after_the_wrap_and_cut_again(rank: Rank) -> None:
    # meta-pytorch/torchtune#616, huggingface/accelerate#3154
    model = nn.Sequential(scalar(2.0), scalar(2.0))
    ddp = wrap(model, ddp_mp.MixedPrecision(BF16, F32))
    ddp(column(1)).sum().backward()
    own = model[1].weight
    model[1].weight = model[0].weight
    for _ in range(2):
        ddp.zero_grad()
        ddp(column(1 + rank.index)).sum().backward()
        assert model[0].weight.grad.item() == 6.0
    model[1].weight = own
    with pytest.raises(RuntimeError, match=r"'1\.weight' was added after DistributedDataParallel was built"):
        ddp(column(1))
    model[1].weight = model[0].weight
    assert ddp(column(1)).item() == 4.0


@on_ranks(2)
def test_model_converted_to_half_before_its_first_forward_is_reduced_in_that_type(rank: Rank) -> None:
    ddp = wrap(nn.Linear(2, 2), ddp_mp.MixedPrecision(BF16, F32))
    ddp.half()
    for first in (True, False):
        ddp.zero_grad()
        told = pytest.warns(UserWarning, match="low precision themselves") if first else contextlib.nullcontext()
        with told:
            loss = ddp(torch.full((1, 2), 1.0 + 2 * rank.index)).sum()
        loss.backward()
        assert ddp.module.weight.grad.dtype is FP16
        assert ddp.module.weight.grad.tolist() == [[2.0, 2.0]] * 2
