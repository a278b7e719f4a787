"""Modules that stay in full precision, the casts at their borders, and the type of outputs."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.inside import cast_tensors
from kit.modules import mlp, vectors
from kit.oracle import BF16, F32, F64, FP16, Trial, cast_inputs, mean_square, require_same, square_step, step_of
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


def keep(*entries: Any, **more: Any) -> dict[str, Any]:
    """Fields of Options."""
    return {"full_precision_modules": entries, **more}


class Residual(nn.Module):
    """A small ResNet: its normalisation has weights, statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)) + x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A pre-norm transformer block with a router in front of its two experts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.router = nn.Sequential(nn.Linear(width, 2), nn.Softmax(-1))
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = self.norm2(x)
        weights = self.router(y)
        return x + sum(weights[..., k : k + 1] * expert(y) for k, expert in enumerate(self.experts))


class Model(nn.Module):
    """Embedding, block and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, 8), Block(), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


def images() -> torch.Tensor:
    return torch.randn(4, 3, 6, 6)


def tokens() -> torch.Tensor:
    return torch.randint(11, (2, 3))


class Normalised(nn.Sequential):
    """Linear, LayerNorm, linear: the middle one has a border."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def spied(module: nn.Module) -> list[Any]:
    """Notes (types of inputs, type of the weight, type of the output) of every forward of a module, seen from inside it."""
    forward, seen = module.forward, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        given = [a.dtype for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        weight = module.weight.dtype if isinstance(getattr(module, "weight", None), torch.Tensor) else None
        seen.append((given, weight, output.dtype if isinstance(output, torch.Tensor) else None))
        return output

    module.forward = noted  # type: ignore[method-assign]
    return seen


# --- training ------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["patch", "install", "later"])
@pytest.mark.parametrize("buffer", [None, BF16], ids=str)
def test_full_batch_norm_of_a_residual_network_equals_oracle(rank: Rank, how: str, buffer: torch.dtype | None) -> None:
    model = Residual()
    # a constructor with PyTorch's own hooks casts every buffer, counters too
    model.bn1.num_batches_tracked = None
    model.bn2.num_batches_tracked = None
    precision = ddp_mp.MixedPrecision(BF16, F32, buffer)
    trial = Trial(rank, model, precision, how=how, options=keep(_BatchNorm), full=["bn1", "bn2"])
    seen = spied(model.bn1)
    trial.train(images, steps=4)
    assert seen == [([F32], F32, F32)] * 4
    for name, tensor in model.named_buffers():
        assert tensor.dtype is F32
        require_same(f"buffer {name}", tensor, trial.oracle.buffers[rank.index][name])
    trial.ddp.eval()
    trial.oracle.module.eval()
    x = images()
    with torch.no_grad(), trial.oracle.low_precision(0) as call:  # buffers are those of rank 0
        require_same("evaluation", trial.ddp(x), call(x))


@on_ranks(2)
def test_full_batch_norm_counts_its_batches(rank: Rank) -> None:
    trial = Trial(rank, Residual(), ddp_mp.MixedPrecision(BF16, F32, BF16), "install", keep("bn*"), full=["bn1", "bn2"])
    trial.train(images, steps=3, accumulate=2)
    assert trial.module.bn1.num_batches_tracked.item() == 6


@on_ranks(2)
@pytest.mark.parametrize("reduce", [None, F32, BF16], ids=str)
@pytest.mark.parametrize("wait", ["root", "module"])
def test_full_parts_of_a_transformer_equal_oracle(rank: Rank, wait: str, reduce: torch.dtype | None) -> None:
    options = keep(nn.LayerNorm, "block.norm2", "*.router", "head", wait=wait, first_bucket_mb=1e-4, bucket_mb=1e-4)
    full = ["block.norm1", "block.norm2", "block.router", "head"]
    trial = Trial(rank, Model(), ddp_mp.MixedPrecision(BF16, reduce), options=options, full=full, bucket_cap_mb=1e-4)
    trial.train(tokens, steps=4, accumulate=2)
    assert ddp_mp.stats(trial.ddp).parameters == len(list(trial.module.parameters())) - 3 - 2 - 2


@on_ranks(2)
def test_full_gradients_are_reduced_in_their_own_type_unless_told(rank: Rank) -> None:
    numel = {"low": 2 * 72, "full": 16}
    for reduce, due in ((None, 2 * numel["low"] + 4 * numel["full"]), (BF16, 2 * (numel["low"] + numel["full"]))):
        precision = ddp_mp.MixedPrecision(BF16, reduce)
        trial = Trial(rank, Normalised(), precision, options=keep(nn.LayerNorm), full=["1"])
        trial.train(vectors(), steps=1)
        assert ddp_mp.stats(trial.ddp).bytes_reduced == due


@on_ranks(2)
@pytest.mark.parametrize("entry", [nn.LayerNorm, "1"], ids=str)
def test_full_parameters_are_masters_inside_and_others_copies(rank: Rank, entry: Any) -> None:
    model = Normalised()
    trial = Trial(rank, model, options=keep(entry), full=["1"])
    addresses = [p.data_ptr() for p in model[1].parameters()]
    before, inside, after = spied(model[0]), spied(model[1]), spied(model[2])
    model[1].register_forward_pre_hook(lambda m, _: addresses.extend(p.data_ptr() for p in m.parameters()))
    assert trial.ddp(torch.randn(4, 8)).dtype is BF16
    assert before == [([BF16], BF16, BF16)]
    assert inside == [([F32], F32, F32)]
    assert after == [([BF16], BF16, BF16)]
    assert addresses[:2] == addresses[2:]


@on_ranks(2)
def test_full_matches_inside_a_match_do_not_cast_again(rank: Rank) -> None:
    model = Model()
    trial = Trial(rank, model, options=keep("block", nn.LayerNorm, "*.router*"), full=["block"])
    inner = [spied(m) for m in (model.block.norm1, model.block.router[0], model.block.router[1])]
    trial.train(tokens, steps=2)
    assert all(given == [F32] and output is F32 for seen in inner for given, _, output in seen)
    assert [len(seen) for seen in inner] == [2, 2, 2]


@on_ranks(2)
def test_full_embedding_gets_indices_and_its_output_is_cast(rank: Rank) -> None:
    trial = Trial(rank, Model(), options=keep(nn.Embedding), full=["embedding"])
    seen = spied(trial.module.embedding)
    head = spied(trial.module.head)
    trial.train(tokens, steps=2)
    assert seen == [([torch.int64], F32, F32)] * 2
    assert head == [([BF16], BF16, BF16)] * 2


@on_ranks(2)
def test_full_module_without_parameters_computes_in_float32(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8))
    trial = Trial(rank, model, options=keep(nn.Softmax), full=["1"])
    seen = spied(model[1])
    trial.train(vectors(), steps=2)
    assert seen == [([F32], None, F32)] * 2


@on_ranks(2)
def test_full_layer_with_a_spectral_parametrization_equals_oracle(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    trial = Trial(rank, model, options=keep("1"), full=["1"])
    trial.train(vectors(), steps=3)
    for name, tensor in model.named_buffers():
        require_same(f"buffer {name}", tensor, trial.oracle.buffers[rank.index][name])


@on_ranks(2)
def test_full_outputs_that_are_named_stay_in_full_precision(rank: Rank) -> None:
    options = keep(nn.LayerNorm, "head", full_precision_outputs=["head"])
    trial = Trial(rank, Model(), options=options, full=["block.norm1", "head"], silent=["head"])
    assert trial.ddp(tokens()).dtype is F32
    trial.train(tokens, steps=3)


@on_ranks(2)
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
def test_full_module_of_another_type_keeps_its_own(rank: Rank, low: torch.dtype) -> None:
    model = Normalised()
    model[1].double()
    trial = Trial(rank, model, ddp_mp.MixedPrecision(low, F32), options=keep(nn.LayerNorm))
    seen = spied(model[1])
    square_step(trial.ddp, torch.randn(4, 8))
    assert seen == [([F64], F64, F64)]
    assert model[1].weight.grad.dtype is F64
    assert model[0].weight.grad.dtype is F32


@on_ranks(2)
def test_full_attention_sees_one_object_as_query_key_and_value(rank: Rank) -> None:
    model = Model()
    seen = []
    model.block.attention.register_forward_pre_hook(lambda m, args: seen.append(args[0] is args[1] is args[2]))
    trial = Trial(rank, model, options=keep(nn.MultiheadAttention), full=["block.attention"])
    trial.train(tokens, steps=2)
    assert len(seen) == 6, "twice here, and for both ranks in the oracle"
    assert all(seen)


@on_ranks(2)
def test_full_recurrent_layer_takes_packed_sequences(rank: Rank) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.lstm, self.b = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.a(x), torch.tensor([3, 2]), batch_first=True)
            output, (hidden, _) = self.lstm(packed)
            assert type(output) is nn.utils.rnn.PackedSequence
            assert output.data.dtype is hidden.dtype
            return self.b(nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0] + hidden[0].unsqueeze(1))

    model = Recurrent()
    trial = Trial(rank, model, options=keep("lstm"))
    expected = copy.deepcopy(model)
    for p in (*expected.a.parameters(), *expected.b.parameters()):
        p.data = p.to(BF16)
    lstm = expected.lstm.forward

    def in_float32(packed: Any) -> Any:
        output, state = lstm(packed._replace(data=packed.data.float()))
        return output._replace(data=output.data.bfloat16()), tuple(s.bfloat16() for s in state)

    expected.lstm.forward = in_float32
    x = torch.randn(2, 3, 8)
    require_same("output", trial.ddp(x), expected(x.bfloat16()))
    square_step(trial.ddp, x)
    assert model.lstm.weight_ih_l0.grad.dtype is F32


@on_ranks(1, 2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["norm", "around"])
def test_full_module_in_a_checkpoint_equals_oracle(rank: Rank, reentrant: bool, part: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            if part == "norm":
                return self.b(checkpoint(self.norm, x, use_reentrant=reentrant))
            return checkpoint(lambda y: self.b(self.norm(y)), x, use_reentrant=reentrant)

    Trial(rank, Checkpointed(), options=keep("norm"), full=["norm"]).train(vectors(), steps=3, accumulate=2)


@on_ranks(2)
@pytest.mark.parametrize("order", ["wrapper", "module", "layer", "wrapped layer"])
def test_full_modules_with_a_compiler_equal_oracle(rank: Rank, order: str) -> None:
    model = Normalised()
    trial = Trial(rank, copy.deepcopy(model), options=keep(nn.LayerNorm), full=["1"])
    options = ddp_mp.Options(**keep("1"))
    parameters = list(model.named_parameters())
    if order == "wrapped layer":
        model[1] = torch.compile(model[1], backend="eager")
    if order == "module":
        wrapped = DistributedDataParallel(torch.compile(model, backend="eager"), mixed_precision=trial.precision)
        call: Any = ddp_mp.patch(wrapped, options=options)
    else:
        if order == "layer":
            model[1].compile(backend="eager")
        call = ddp_mp.patch(DistributedDataParallel(model, mixed_precision=trial.precision), options=options)
        call = torch.compile(call, backend="eager") if order == "wrapper" else call
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler's own
            loss = mean_square(call, xs[rank.index])
        loss.backward()
        trial.oracle.backward(square_step, xs)
        for (name, got), want in zip(parameters, trial.oracle.grads[rank.index].values(), strict=True):
            require_same(f"gradient of {name}", got.grad, want)
        model.zero_grad()
        trial.oracle.zero_grad()
    torch._dynamo.reset()


@on_ranks(2)
def test_full_layer_norm_in_pytorchs_encoder_equals_oracle_in_evaluation_too(rank: Rank) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    trial = Trial(rank, model, options=keep(nn.LayerNorm), full=["norm1", "norm2"])
    trial.train(lambda: torch.randn(2, 3, 8), steps=3)
    trial.ddp.eval()  # PyTorch's fast path would read the weights without calling the modules
    trial.oracle.module.eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), trial.oracle.low_precision(rank.index) as call:
        require_same("evaluation", trial.ddp(x), call(x))


@on_ranks(2)
def test_full_modules_with_unused_parameters_and_hooks_of_the_user_equal_oracle(rank: Rank) -> None:
    class Sometimes(Normalised):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[2](self[1](self[0](x))) if x.sum() > 0 else self[2](self[0](x))

    trial = Trial(rank, Sometimes(), options=keep(nn.LayerNorm), full=["1"], find_unused_parameters=True)
    for sign in (1, -1, 1):
        trial.train(lambda sign=sign: sign * torch.rand(4, 8), steps=2, seed=sign + 1)


# --- state ---------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_full_modules_called_on_their_own_stay_in_full_precision(rank: Rank) -> None:
    trial = Trial(rank, Normalised(), options=keep(nn.LayerNorm), full=["1"])
    trial.train(vectors(), steps=1)
    x = torch.randn(4, 8)
    require_same("alone", trial.module[1](x), trial.oracle.module[1].__class__.forward(trial.oracle.module[1], x))
    for layer in trial.module:
        x = layer(x)
    assert x.dtype is F32
    trial.train(vectors(), seed=5)


@on_ranks(2)
def test_full_modules_leave_nothing_behind(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.LayerNorm(8))
    trial = Trial(rank, model, how="later", options=keep(nn.Softmax, nn.LayerNorm), full=["1", "2"])
    trial.train(vectors(), steps=1)
    whole, part = copy.deepcopy(model), pickle.loads(pickle.dumps(model[1]))
    assert model[1]._forward_pre_hooks
    for ordinary in (whole, part, ddp_mp.unpatch(trial.ddp).module):
        for module in ordinary.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_pre_hooks_with_kwargs
            assert not module._forward_hooks
            assert "__getstate__" not in module.__dict__
    ddp_mp.patch(trial.ddp, mixed_precision=MIXED, options=ddp_mp.Options(**keep(nn.Softmax, nn.LayerNorm)))
    trial.train(vectors(), seed=5)


@on_ranks(2)
def test_full_module_that_is_replaced_gets_its_border(rank: Rank) -> None:
    trial = Trial(rank, Normalised(), options=keep("1"))
    square_step(trial.ddp, torch.randn(4, 8))
    old = trial.module[1]
    trial.module[1] = nn.Softmax(-1)
    seen = spied(trial.module[1])
    assert trial.ddp(torch.randn(4, 8)).dtype is BF16
    assert seen == [([F32], None, F32)]
    assert not old._forward_pre_hooks
    assert not old._forward_hooks


@on_ranks(2)
def test_full_module_converted_to_another_type_is_followed(rank: Rank) -> None:
    ddp = DistributedDataParallel(Normalised())
    ddp_mp.patch(ddp, mixed_precision=MIXED, options=ddp_mp.Options(**keep("1")))
    square_step(ddp, torch.randn(4, 8))
    ddp.zero_grad()
    ddp.module[1].double()
    seen = spied(ddp.module[1])
    square_step(ddp, torch.randn(4, 8) + rank.index)
    assert seen == [([F64], F64, F64)]
    require_same("gradient", *rank.gather(ddp.module[1].weight.grad))
    assert ddp.module[1].weight.grad.dtype is F64


@on_ranks(2)
def test_full_modules_under_functional_call_between_forward_and_backward_use_what_they_are_given(rank: Rank) -> None:
    trial = Trial(rank, Normalised(), options=keep("1", output_dtype=F32), full=["1"])
    given = {name: param.detach().clone() for name, param in trial.module.named_parameters()}
    x = torch.randn(4, 8)
    due = torch.func.functional_call(trial.module, given, (x,))

    def step(call: Any, batch: torch.Tensor) -> None:
        loss = mean_square(call, batch)
        if call is trial.ddp:
            require_same("output", torch.func.functional_call(trial.module, given, (x,)), due)
        loss.backward()

    trial.backward(step, rank.inputs(vectors()))
    trial.check()


@on_ranks(2)
def test_full_weight_that_is_replaced_is_reduced_in_a_module_that_came_later_too(rank: Rank) -> None:
    trial = Trial(rank, Normalised(), options=keep("1"), full=["1"])
    trial.train(vectors(), steps=1)
    for model in (trial.module, trial.oracle.module):
        with torch.no_grad():
            weight = torch.linspace(0.5, 2.0, 8)
        model[1].weight = nn.Parameter(weight)
    trial.module[1] = copy.deepcopy(trial.module[1])
    trial.ddp(torch.randn(4, 8))
    trial.module[1].weight = nn.Parameter(trial.module[1].weight.detach().clone())
    trial.oracle._full |= {id(p) for p in trial.oracle.module[1].parameters()}
    trial.train(vectors(), steps=3, seed=5)


@on_ranks(2)
@pytest.mark.parametrize("option", ["prefetch", "reuse_unchanged"])
def test_full_modules_with_copies_that_are_kept_equal_oracle(rank: Rank, option: str) -> None:
    trial = Trial(rank, Normalised(), options=keep(nn.LayerNorm, **{option: True}), full=["1"])
    trial.train(vectors(), steps=4, accumulate=2)
    assert ddp_mp.stats(trial.ddp).skipped > 0


@on_ranks(2)
def test_full_module_that_is_gone_is_an_error_that_names_the_entry(rank: Rank) -> None:
    trial = Trial(rank, Normalised(), options=keep(nn.LayerNorm))
    trial.module[1] = nn.Identity()
    with pytest.raises(ValueError, match="LayerNorm matches no module"):
        trial.ddp(torch.randn(4, 8))


@on_ranks(2)
def test_full_modules_without_any_low_precision_are_only_checked(rank: Rank) -> None:
    precision = ddp_mp.MixedPrecision(None, BF16)
    trial = Trial(rank, Normalised(), precision, options=keep(nn.LayerNorm))
    assert not trial.module[1]._forward_pre_hooks
    trial.train(vectors(), steps=2)


# --- what is refused -----------------------------------------------------------------------------------------------------


def refused(model: nn.Module, match: str, *entries: Any, **more: Any) -> None:
    """Patching raises, and the model trains on as it did."""
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with pytest.raises(ValueError, match=match):
        ddp_mp.patch(ddp, mixed_precision=MIXED, options=ddp_mp.Options(**keep(*entries, **more)))
    assert not ddp_mp.is_patched(ddp)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@on_ranks(2)
def test_full_entry_that_matches_nothing_is_named(rank: Rank) -> None:
    refused(Normalised(), r"BatchNorm2d matches no module of this model; its modules are 0, 1, 2", nn.BatchNorm2d)
    refused(Normalised(), r"'head\*' matches no module", nn.LayerNorm, "head*")
    refused(Normalised(), "full_precision_outputs: Softmax matches no module", "1", full_precision_outputs=[nn.Softmax])
    refused(Normalised(), "'2' matches none of the outermost.*'1'", "1", full_precision_outputs=["2"])


@on_ranks(2)
def test_full_entry_that_matches_the_whole_model_is_refused(rank: Rank) -> None:
    for entry in ("*", nn.Module, nn.Sequential):
        refused(Normalised(), "the wrapped module itself matches", entry)


@on_ranks(2)
def test_full_weight_tied_to_a_module_outside_names_both_and_with_both_equals_oracle(rank: Rank) -> None:
    def tied() -> Model:
        model = Model()
        model.head = nn.Linear(8, 11, bias=False)
        model.head.weight = model.embedding.weight
        return model

    refused(tied(), "parameter 'embedding.weight' is shared by module 'head', .* and module 'embedding'", "head")
    trial = Trial(rank, tied(), options=keep("head", "embedding"), full=["head", "embedding"])
    trial.train(tokens, steps=3)


@on_ranks(2)
def test_full_module_used_inside_and_outside_is_refused(rank: Rank) -> None:
    shared = nn.LayerNorm(8)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), shared), shared)
    refused(model, "'1' is also module '0.1' inside '0'", "0")
    refused(model, "module '0.1' inside '0' is also module '1'", "0", nn.LayerNorm)
    refused(nn.Sequential(*reversed(model)), "module '0' is also module '1.1' inside '1'", "1", nn.LayerNorm)


@on_ranks(2)
def test_full_module_that_is_not_called_is_refused(rank: Rank) -> None:
    refused(Model(), "'block.attention.out_proj' matches, but 'block.attention'.*without calling it", "*.out_proj")


@on_ranks(2)
def test_full_patch_that_is_refused_leaves_pytorchs_mixed_precision(rank: Rank) -> None:
    ddp = DistributedDataParallel(Normalised(), mixed_precision=MIXED)
    with pytest.raises(ValueError, match="matches no module"):
        ddp_mp.patch(ddp, options=ddp_mp.Options(**keep("nothing")))
    assert ddp.mixed_precision is MIXED
    assert len(ddp.module._forward_pre_hooks) == 2
    assert ddp.module[0].weight._mp_param.dtype is BF16
    ddp_mp.patch(ddp)
    square_step(ddp, torch.randn(4, 8))


@on_ranks(2)
def test_full_and_output_type_need_all_hooks(rank: Rank) -> None:
    for more in (keep(nn.LayerNorm), {"output_dtype": F32}, {"autocast": True}):
        options = ddp_mp.Options(hooks="root", **more)
        with pytest.raises(ValueError, match=r"full_precision_modules, output_dtype and autocast need hooks='all'"):
            ddp_mp.patch(DistributedDataParallel(Normalised()), mixed_precision=MIXED, options=options)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"full_precision_modules": "head"}, TypeError, "expected a tuple of module types and name patterns, found 'head'"),
        ({"full_precision_modules": nn.Linear}, TypeError, "expected a tuple"),
        ({"full_precision_modules": (3,)}, TypeError, "expected a module type or a name pattern, found 3"),
        ({"full_precision_modules": (nn.Linear(1, 1),)}, TypeError, "expected a module type"),
        ({"full_precision_outputs": ("head",)}, ValueError, "full_precision_modules, which is empty"),
        ({"output_dtype": "float32"}, TypeError, "Options.output_dtype: expected a torch.dtype"),
        ({"output_dtype": torch.int8}, ValueError, "Options.output_dtype: expected float64"),
    ],
)
def test_full_options_of_another_kind_are_named(fields: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ddp_mp.Options(**fields)


def test_full_options_from_a_list_are_those_from_a_tuple() -> None:
    options = ddp_mp.Options(full_precision_modules=[nn.LayerNorm, "head"])  # type: ignore[arg-type]
    assert options == ddp_mp.Options(full_precision_modules=(nn.LayerNorm, "head"))
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options) == hash(copy.deepcopy(options))


# --- outputs -------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("dtype", [F32, FP16, F64], ids=str)
def test_output_type_equals_oracle(rank: Rank, dtype: torch.dtype, unused: bool) -> None:
    trial = Trial(rank, mlp(), options={"output_dtype": dtype}, find_unused_parameters=unused)

    def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
        output = call(x)
        assert output.dtype is dtype
        return output.double().square().sum()

    trial.train(vectors(), steps=3, step=step_of(loss), accumulate=2)
    with torch.no_grad():
        assert trial.ddp(torch.randn(4, 8)).dtype is dtype
    assert all(p.dtype is F32 for p in trial.module.parameters())


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_output_type_of_a_checkpointed_module_equals_oracle(rank: Rank, reentrant: bool) -> None:
    trial = Trial(rank, mlp(), options={"output_dtype": F32})

    def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(call, x, use_reentrant=reentrant).square().sum()

    trial.train(lambda: torch.randn(4, 8).requires_grad_(), steps=3, step=step_of(loss))


@on_ranks(2)
def test_output_type_alone_is_enough_to_patch(rank: Rank) -> None:
    ddp = DistributedDataParallel(mlp())
    ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(), options=ddp_mp.Options(output_dtype=BF16))
    output = ddp(torch.randn(4, 8))
    assert output.dtype is BF16
    output.sum().backward()
    assert all(p.grad.dtype is F32 for p in ddp.module.parameters())


@on_ranks(2)
def test_output_type_of_a_module_that_calls_itself_is_cast_once(rank: Rank) -> None:
    seen = []

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            if depth == 0:
                return self.a(x)
            inner = self(x, depth - 1)
            seen.append(inner.dtype)
            return self.a(inner)

    trial = Trial(rank, Recursive(), options={"output_dtype": F32})
    assert trial.ddp(torch.randn(4, 8)).dtype is F32
    assert seen == [BF16, BF16]
    trial.train(vectors(), steps=2)


@on_ranks(2)
def test_output_type_reaches_into_an_output_class_of_transformers(rank: Rank) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.a(x)
            return outputs.CausalLMOutput(loss=y.square().sum(), logits=y, hidden_states=(x, y))

    trial = Trial(rank, Output(), options={"output_dtype": F32})
    output = trial.ddp(torch.randn(4, 8))
    assert type(output) is outputs.CausalLMOutput
    assert output.loss.dtype is output["logits"].dtype is output.logits.dtype is output.hidden_states[1].dtype is F32
    assert output.hidden_states[1] is output.logits
    assert output.attentions is None
    output.loss.backward()
    assert all(p.dtype is p.grad.dtype is F32 for p in trial.module.parameters())


# --- casts inside containers ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    other: Any = 7


class Tensors(list):  # type: ignore[type-arg]
    """A list with something of its own."""

    name = "mine"


Pair = collections.namedtuple("Pair", "first second")


class Ordered(tuple):  # type: ignore[type-arg]
    """A tuple whose constructor takes its items apart."""

    def __new__(cls, first: Any, second: Any) -> Ordered:
        return super().__new__(cls, (first, second))


class Labelled(Pair):
    """A named tuple with an attribute beside its fields."""


class Bag(set):  # type: ignore[type-arg]
    """A set whose constructor takes its items apart."""

    def __init__(self, *items: Any) -> None:
        super().__init__(items)


class Read(collections.abc.Mapping):  # type: ignore[type-arg]
    """A mapping that nobody can write."""

    def __init__(self, **items: Any) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def __repr__(self) -> str:
        return repr(self.items_)


class Written(Read, collections.abc.MutableMapping):  # type: ignore[type-arg]
    """One that can be written."""

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]


class Unbuildable(Read):
    """A mapping that only its own code can make."""

    def __init__(self, *, secret: int, **items: Any) -> None:
        super().__init__(**items)


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda x: (x, 1),
    "list": lambda x: [x, None],
    "list of its own class": lambda x: Tensors([x]),
    "tuple with its own __new__": lambda x: Ordered(x, 1),
    "named tuple": lambda x: Pair(x, "text"),
    "named tuple of its own class": lambda x: Labelled(x, "text"),
    "result of torch.max": lambda x: torch.return_types.max((x, torch.ones(3, dtype=torch.long))),
    "dict": lambda x: {"x": x},
    "ordered dict": lambda x: collections.OrderedDict(x=x),
    "default dict": lambda x: collections.defaultdict(list, x=x),
    "mapping proxy": lambda x: types.MappingProxyType({"x": x}),
    "user dict": lambda x: collections.UserDict(x=x),
    "mapping from keywords": lambda x: Read(x=x),
    "mutable mapping": lambda x: Written(x=x),
    "set": lambda x: {x},
    "set with its own __init__": lambda x: Bag(x),
    "frozen set": lambda x: frozenset([x]),
    "frozen dataclass": lambda x: Frozen(x),
    "nested": lambda x: {"a": [(Frozen(Pair(x, x)),)]},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_cast_reaches_into_containers_and_keeps_their_class(kind: str) -> None:
    x = torch.randn(3, dtype=BF16)
    before = CONTAINERS[kind](x)
    after = cast_tensors(before, F32)
    assert type(after) is type(before)
    assert str(after).replace(", dtype=torch.bfloat16", "") == str(CONTAINERS[kind](x.float()))
    assert "bfloat16" in str(before), "what the caller holds is not changed"
    assert cast_tensors(before, BF16) is before
    assert cast_tensors(after, F32) is after


#: Those that take an attribute.
WITH_ATTRIBUTES = (
    "list of its own class",
    "tuple with its own __new__",
    "named tuple of its own class",
    "set with its own __init__",
    "ordered dict",
    "user dict",
    "mutable mapping",
)


@pytest.mark.parametrize("kind", WITH_ATTRIBUTES)
def test_cast_keeps_attributes_of_a_container(kind: str) -> None:
    before = CONTAINERS[kind](torch.ones(1))
    before.label = "mine"
    assert cast_tensors(before, BF16).label == "mine"


@pytest.mark.parametrize(
    "value",
    [
        Unbuildable(secret=1, x=torch.ones(1)),
        collections.deque([torch.ones(1)]),
        collections.UserList([torch.ones(1)]),
        types.SimpleNamespace(x=torch.ones(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_cast_hands_on_what_it_cannot_copy(value: Any) -> None:
    assert cast_tensors(value, BF16) is value
    assert cast_tensors((value, torch.ones(1)), BF16)[0] is value


def test_cast_of_one_tensor_twice_is_one_tensor() -> None:
    x = torch.randn(3)
    a, (b,), c = cast_tensors((x, [x], x + 0), BF16)
    assert a is b
    assert a is not c


def test_cast_leaves_other_types_and_wider_ones() -> None:
    kept = [torch.arange(3), torch.ones(2, dtype=torch.bool), torch.ones(1, dtype=torch.complex64), torch.ones(1, dtype=F64)]
    value = (*kept, torch.ones(1, dtype=FP16), 1.5, "text", None, nn.Linear(1, 1))
    after = cast_tensors(value, F32, F32.itemsize)
    assert all(a is b for a, b in zip(after[:4], kept, strict=True))
    assert after[4].dtype is F32
    assert after[5:] == value[5:]
    assert cast_inputs(value[4], F32).dtype is F32


def test_cast_ends_in_a_cyclic_value() -> None:
    cycle: list[Any] = [torch.ones(1)]
    cycle.append(cycle)
    assert cast_tensors(cycle, BF16)[0].dtype is BF16
