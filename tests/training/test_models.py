"""What models look like: layers that keep or share parameters in their own way, layouts, and kinds of outputs."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.modules import Two, mlp, vectors
from kit.oracle import BF16, F32, FP16, Trial, require_same, square_step, step_of
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

# --- parameters used in other ways than by their module's call -----------------------------------------------------------


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(tokens)))


class Functional(Two):
    """``b`` is never called, its parameters are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.a(x), self.b.weight, self.b.bias)


class Containers(nn.Module):
    """Parameters in a list, a dictionary, and on the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.rand(8)), "shift": nn.Parameter(torch.rand(8))})
        self.own = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.many:
            x = (x @ weight).tanh()
        return x * self.named["scale"] + self.named["shift"] + self.own


class Repeated(nn.Module):
    """One layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(self.layer(x).tanh()).tanh())


class SharedModule(nn.Module):
    """One module object under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class TransposedTie(nn.Module):
    """A decoder that uses the transposed weight of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).tanh() @ self.encoder.weight


class WithNorm(nn.Module):
    """Normalisation layers without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.GroupNorm(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    """A recurrent network; PyTorch's keep a second list of their flattened weights."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner, self.head = kind(8, 8, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)[0])


class Normed(nn.Module):
    """Weight normalisation by parametrisation: the weight is computed from two parameters in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def tokens() -> torch.Tensor:
    return torch.randint(0, 11, (6,))


def sequences() -> torch.Tensor:
    return torch.randn(2, 5, 8)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "tied": (Tied, tokens),
    "functional": (Functional, vectors()),
    "containers": (Containers, vectors()),
    "repeated_layer": (Repeated, vectors()),
    "shared_module": (SharedModule, vectors()),
    "transposed_tie": (TransposedTie, vectors()),
    "norms": (WithNorm, vectors()),
    "lstm": (lambda: Recurrent(nn.LSTM), sequences),
    "gru": (lambda: Recurrent(nn.GRU), sequences),
    "rnn": (lambda: Recurrent(nn.RNN), sequences),
    "weight_norm": (Normed, vectors()),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), sequences),
    "bilinear": (lambda: _Pairs(nn.Bilinear(8, 8, 4)), vectors()),
    "one_linear": (lambda: nn.Linear(8, 8), vectors()),
}


class _Pairs(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x.flip(0))


@on_ranks(2)
@pytest.mark.parametrize("wait", ["root", "module"])
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_oracle(rank: Rank, name: str, wait: str) -> None:
    build, make_input = MODELS[name]
    trial = Trial(rank, build(), options={"wait": wait, "first_bucket_mb": 1e-4, "bucket_mb": 1e-4}, bucket_cap_mb=0.001)
    trial.train(make_input, accumulate=2)


@on_ranks(1, 3)
@pytest.mark.parametrize("name", ["tied", "encoder"])
def test_model_on_one_and_three_ranks_equals_oracle(rank: Rank, name: str) -> None:
    build, make_input = MODELS[name]
    Trial(rank, build()).train(make_input)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["mha", "mha_separate"])
def test_model_multihead_attention_equals_oracle(rank: Rank, kind: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"kdim": 6, "vdim": 4} if kind == "mha_separate" else {}
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            k, v = (x[..., :6], x[..., :4]) if kind == "mha_separate" else (x, x)
            return self.inner(x, k, v, need_weights=False)[0]

    Trial(rank, Attention()).train(sequences)


@on_ranks(2)
def test_model_that_holds_one_parameter_under_two_names_keeps_one_object(rank: Rank) -> None:
    trial = Trial(rank, Tied()).train(tokens)
    assert trial.module.head.weight is trial.module.embed.weight
    assert ddp_mp.stats(trial.ddp).parameters == 3


# --- memory layouts ------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("reduce", [F32, BF16], ids=str)
def test_layout_channels_last_convolution_keeps_strides(rank: Rank, reduce: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 16, 6))
    model = model.to(memory_format=torch.channels_last)
    trial = Trial(rank, model, ddp_mp.MixedPrecision(BF16, reduce))
    strides = [p.stride() for p in model.parameters()]
    seen: list[tuple[int, ...]] = []
    model[0].register_forward_hook(lambda m, *_: seen.append(m.weight.stride()))
    trial.train(lambda: torch.randn(2, 3, 6, 6), accumulate=2)
    assert seen[0] == strides[0]
    assert [p.stride() for p in model.parameters()] == strides
    trial.backward(step_of(lambda call, x: call(x).float().square().mean()), rank.inputs(lambda: torch.randn(2, 3, 6, 6)))
    assert all(p.grad.stride() == p.stride() for p in model.parameters())


@on_ranks(2)
def test_layout_converted_after_patching_equals_oracle(rank: Rank) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 6))
    trial = Trial(rank, model).train(lambda: torch.randn(2, 3, 6, 6))
    model.to(memory_format=torch.channels_last)
    trial.train(lambda: torch.randn(2, 3, 6, 6), seed=10)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


@on_ranks(2)
@pytest.mark.parametrize("reduce", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "gapped", "sliced_rows", "offset", "strange_size_one"])
def test_layout_unusual_parameters_equal_oracle(rank: Rank, layout: str, reduce: torch.dtype) -> None:
    model = mlp(6)
    with torch.no_grad():
        values = torch.randn(6, 6)
        memory = torch.randn(40, 12)
        view = {
            "transposed": memory[:6, :6].t().contiguous().t(),
            "gapped": memory[:12:2, :12:2],
            "sliced_rows": memory[3:9, 2:8],
            "offset": memory.view(-1)[7 : 7 + 36].view(6, 6),
            "strange_size_one": memory.view(-1).as_strided((6, 6), (6, 1), 1),
        }[layout]
        view.copy_(values)
        model[0].weight.data = view
        if layout == "strange_size_one":
            model[2].bias.data = memory.view(-1)[:6]
            model[0] = nn.Linear(6, 6)
            model[0].weight.data = memory.view(-1).as_strided((6, 6), (6, 1), 100)
    trial = Trial(rank, model, ddp_mp.MixedPrecision(BF16, reduce))
    trial.train(vectors(width=6), accumulate=2)
    assert model[0].weight.data_ptr() == view.data_ptr() or layout == "strange_size_one"


@on_ranks(2)
def test_layout_gapped_parameter_with_local_gradients_is_rounded_once(rank: Rank) -> None:
    class Gapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16)[:, ::2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    trial = Trial(rank, Gapped(), ddp_mp.MixedPrecision(BF16))
    for seed in range(9):
        trial.backward(square_step, rank.inputs(vectors(), seed), sync=seed % 3 == 2)
        trial.check()
        if seed % 3 == 2:
            trial.zero_grad()


@on_ranks(2)
def test_layout_empty_parameters_are_left_alone(rank: Rank) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.a, self.rows = nn.Parameter(torch.empty(0)), nn.Linear(8, 8), nn.Parameter(torch.empty(0, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + torch.cat([self.rows, x]) + self.none.sum()

    Trial(rank, Empty()).train(vectors())
    Trial(rank, Empty(), find_unused_parameters=True).train(vectors())


@on_ranks(2)
@pytest.mark.parametrize("unused", [True, False])
def test_layout_unused_empty_parameter_follows_find_unused_parameters(rank: Rank, unused: bool) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.a = nn.Parameter(torch.empty(0)), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x)

    trial = Trial(rank, Empty(), find_unused_parameters=unused)
    if unused:
        trial.train(vectors())
        assert trial.module.none.grad is None
        return
    trial.ddp(torch.randn(4, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="none"):
        trial.ddp(torch.randn(4, 8))


@on_ranks(2)
def test_layout_scalars_and_many_dimensions_equal_oracle(rank: Rank) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.cube = nn.Parameter(torch.randn(2, 1, 3, 1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum() * self.scale * self.cube

    Trial(rank, Odd()).train(vectors(), step=step_of(lambda call, x: call(x).float().square().mean() * 1e-3))


@on_ranks(2)
def test_layout_integer_and_complex_parameters_are_left_alone(rank: Rank) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.index = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.index.dtype is torch.int64
            assert self.phase.dtype is torch.complex64
            return self.a(x)[:, self.index].float() * self.phase.real + self.phase.imag

    Trial(rank, Odd(), ddp_mp.MixedPrecision(BF16, None), exact=False).train(vectors())


@on_ranks(2)
def test_layout_ignored_parameters_are_neither_cast_nor_reduced(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=BF16))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
    ddp = DistributedDataParallel(model, mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
    ddp_mp.patch(ddp)
    model[1].weight.data = model[1].weight.data.clone()
    before = model[1].weight.data_ptr()
    x = torch.full((1, 8), float(rank.index + 1))
    ddp(x).float().sum().backward()
    assert model[1].weight.data_ptr() == before
    gathered = rank.gather((model[0].weight.grad.clone(), model[1].weight.grad.clone()))
    require_same("reduced", gathered[0][0], gathered[1][0])
    assert not torch.equal(gathered[0][1], gathered[1][1])
    assert ddp_mp.stats(ddp).parameters == 2


# --- sparse gradients ----------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("kind", ["embedding", "bag"])
@pytest.mark.parametrize("reduce", [F32, None], ids=str)
def test_sparse_embedding_equals_dense_oracle(rank: Rank, kind: str, reduce: torch.dtype | None) -> None:
    class Words(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.embed = (
                nn.Embedding(12, 8, sparse=sparse) if kind == "embedding" else nn.EmbeddingBag(12, 8, sparse=sparse, mode="sum")
            )
            self.head = nn.Linear(8, 4)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(words))

    def distinct() -> torch.Tensor:
        return torch.randperm(12)[:6].view(2, 3)  # a repeated row would be summed in another order

    model = Words(sparse=True)
    trial = Trial(rank, model, ddp_mp.MixedPrecision(BF16, reduce), how="install", exact=reduce is F32)
    trial.oracle.module.embed.sparse = False
    trial.train(distinct, accumulate=2)
    trial.backward(step_of(lambda call, x: call(x).float().square().mean()), rank.inputs(distinct))
    assert model.embed.weight.grad.is_sparse
    assert model.embed.weight.grad.dtype is F32


@on_ranks(1)
def test_sparse_gradient_sums_equal_indices_in_full_precision(rank: Rank) -> None:
    model = nn.Embedding(2, 1, sparse=True)
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
    ddp(torch.zeros(257, dtype=torch.long)).float().sum().backward()
    assert model.weight.grad.to_dense().tolist() == [[257.0], [0.0]]  # bfloat16 ends at 256


@on_ranks(2)
def test_sparse_embedding_with_sparse_adam_trains_the_same_on_all_ranks(rank: Rank) -> None:
    model = nn.Embedding(12, 8, sparse=True)
    ddp = Trial(rank, model, how="install").ddp
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    start = model.weight.detach().clone()
    for step in range(3):
        torch.manual_seed(rank.size * step + rank.index)
        ddp(torch.randint(0, 12, (5,))).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = rank.gather(model.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(start, weights[0])


class ByElements(torch.autograd.Function):
    """Hands the parameter on; its gradient is a sparse tensor whose index is of elements, not of rows."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.to_sparse()


class Looked(nn.Module):
    """Words are looked up in one of several ways, each with another form of gradient, or not at all."""

    WAYS = ("rows", "elements", "dense", "unused")

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(12, 8, sparse=True), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor, way: str) -> torch.Tensor:
        weight = self.embed.weight
        if way == "unused":
            found = self.inner.weight
        elif way == "rows":
            found = self.embed(words)
        else:
            found = (ByElements.apply(weight) if way == "elements" and self.embed.sparse else weight)[words]
        return self.head(self.inner(found)) if way == "dense" else self.inner(found)


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_sparse_gradients_of_other_forms_on_other_ranks_equal_dense_oracle(rank: Rank, tied: bool) -> None:
    trial = Trial(rank, Looked(tied), how="later", find_unused_parameters=True)
    trial.oracle.module.embed.sparse = False
    for seed, ways in enumerate(itertools.product(Looked.WAYS, repeat=2)):
        for sync in (False, True, True):
            inputs = rank.inputs(lambda: torch.randperm(12)[:6].view(2, 3), seed)
            trial.backward(square_step, list(zip(inputs, ways, strict=True)), sync)
            trial.check()
        trial.zero_grad()
        trial.backward(square_step, list(zip(inputs, ways, strict=True)))
        trial.check()
        grad, way = trial.module.embed.weight.grad, ways[rank.index]
        if grad is not None and not tied and way != "unused":
            assert grad.is_sparse == (way != "dense"), "as autograd left it on this rank"
        if seed % 3:
            trial.zero_grad()


# --- outputs -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """An output class of a user."""

    value: torch.Tensor
    extra: list[torch.Tensor]
    label: str = "x"


class Plain:
    """An output without any structure that PyTorch knows."""

    def __init__(self, value: torch.Tensor) -> None:
        self.inner = {"value": value}


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face's: a dictionary whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda y: y, lambda out: out),
    "tuple": (lambda y: (y, y * 2, None, 3), lambda out: out[0] + out[1]),
    "dict": (lambda y: {"y": y, "n": 3}, lambda out: out["y"]),
    "nested": (lambda y: {"y": [(y, {"z": y * 2})]}, lambda out: out["y"][0][1]["z"]),
    "dataclass": (lambda y: Result(y, [y * 2]), lambda out: out.value + out.extra[0]),
    "custom_object": (Plain, lambda out: out.inner["value"]),
    "model_output": (lambda y: ModelOutput(loss=y.mean(), logits=y), lambda out: out.loss + out.logits),
    "generator_free_iterator": (lambda y: itertools.chain([y]), lambda out: next(out)),
    "closure": (lambda y: lambda: y, lambda out: out()),
}


#: Outputs in which PyTorch finds the tensors; find_unused_parameters needs that.
KNOWN = ("tensor", "tuple", "dict", "nested", "dataclass", "model_output")


@on_ranks(2)
@pytest.mark.parametrize(("name", "unused"), [(name, False) for name in OUTPUTS] + [(name, True) for name in KNOWN])
def test_output_of_any_class_equals_oracle(rank: Rank, name: str, unused: bool) -> None:
    pack, unpack = OUTPUTS[name]

    class Returns(Two):
        def forward(self, x: torch.Tensor) -> Any:
            return pack(super().forward(x))

    trial = Trial(rank, Returns(), find_unused_parameters=unused)
    trial.train(vectors(), step=step_of(lambda call, x: unpack(call(x)).float().square().mean()), accumulate=2)


@on_ranks(2)
@pytest.mark.parametrize("unused", [False, True])
def test_output_without_any_tensor_and_a_loss_kept_on_the_module_equals_oracle(rank: Rank, unused: bool) -> None:
    class Keeps(Two):
        def forward(self, x: torch.Tensor) -> None:
            self.loss = super().forward(x).float().square().mean()

    def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
        call(x)
        found, call.module.loss = call.module.loss, None
        return found

    Trial(rank, Keeps(), find_unused_parameters=unused).train(vectors(), step=step_of(loss), steps=4)


@on_ranks(2)
@pytest.mark.parametrize("unused", [False, True])
def test_output_with_an_auxiliary_loss_kept_on_the_module_equals_oracle(rank: Rank, unused: bool) -> None:
    class Keeps(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.a(x)
            self.auxiliary = hidden.float().square().mean()
            return self.b(hidden)

    def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
        output = call(x)
        found, call.module.auxiliary = call.module.auxiliary, None
        return output.float().square().mean() + 0.5 * found

    Trial(rank, Keeps(), find_unused_parameters=unused).train(vectors(), step=step_of(loss), steps=4)


@on_ranks(2)
@pytest.mark.parametrize("static", [False, True])
def test_output_whose_parts_are_not_all_used_equals_oracle(rank: Rank, static: bool) -> None:
    class Heads(Two):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    step = step_of(lambda call, x: call(x)[0].float().square().mean())
    wrapping = {"static_graph": True} if static else {"find_unused_parameters": True}
    trial = Trial(rank, Heads(), **wrapping).train(vectors(), step=step, steps=4)
    assert trial.module.b.weight.grad is None


@on_ranks(2)
@pytest.mark.parametrize("changed", ["view", "in_place", "detached"])
def test_output_changed_before_the_loss_equals_oracle(rank: Rank, changed: str) -> None:
    def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
        output = call(x)
        if changed == "view":
            return output.view(-1)[:5].float().square().sum()
        if changed == "in_place":
            output.mul_(2)
            return output.float().square().mean()
        return (output.float() - output.detach().float().mean()).square().mean()

    Trial(rank, Two()).train(vectors(), step=step_of(loss))


@on_ranks(2)
def test_output_that_is_an_input_does_not_matter(rank: Rank) -> None:
    class Passes(Two):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, super().forward(x)

    Trial(rank, Passes()).train(vectors(), step=step_of(lambda call, x: call(x)[1].float().square().mean()))


@on_ranks(2)
def test_output_of_transformers_model_equals_oracle(rank: Rank) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=16)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = transformers.GPT2LMHeadModel(config)

    def loss(call: Any, words: torch.Tensor) -> torch.Tensor:
        return call(input_ids=words, labels=words).loss

    Trial(rank, model).train(lambda: torch.randint(0, 31, (2, 8)), step=step_of(loss))


@on_ranks(2)
def test_model_in_fp16_with_fp16_reduction_equals_oracle(rank: Rank) -> None:
    build, make_input = MODELS["encoder"]
    Trial(rank, build(), ddp_mp.MixedPrecision(FP16, FP16)).train(make_input, accumulate=2)
