"""What is said to a user who is about to go wrong: errors and warnings that name what was found and what to write instead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from kit.modules import mlp, scalar
from kit.oracle import BF16, F32, F64, FP16, patched
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision as OfFSDP
from torch.nn.parallel import DistributedDataParallel

import ddp_mp
from ddp_mp.options import kind_of

PRECISION = ddp_mp.MixedPrecision(BF16, F32)


# --- arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ddp_mp.patch(nn.Sequential()), r"found torch\.nn\.modules\.container\.Sequential; wrap the model first"),
        (lambda: ddp_mp.patch(DistributedDataParallel), r"found the class DistributedDataParallel; wrap the model first"),
        (
            lambda: ddp_mp.install(PRECISION),
            r"expected ddp_mp\.Options, found ddp_mp\.options\.MixedPrecision; write mixed_pre",
        ),
        (lambda: ddp_mp.install("all"), r"expected ddp_mp\.Options, found str$"),
        (
            lambda: ddp_mp.install(mixed_precision=OfFSDP()),
            r"found torch\.distributed\.fsdp\.api\.MixedPrecision; write ddp_mp",
        ),
        (lambda: ddp_mp.install(mixed_precision=BF16), r"found torch\.dtype; write ddp_mp\.MixedPrecision\(param_dtype="),
        (lambda: ddp_mp.Options(full_precision_modules="head"), r"found 'head'; write \('head',\)$"),
        (lambda: ddp_mp.Options(full_precision_modules=nn.LayerNorm), r"found LayerNorm; write \(LayerNorm,\)$"),
        (lambda: ddp_mp.Options(full_precision_outputs={"head"}), r"found \{'head'\}$"),
        (
            lambda: ddp_mp.Options(full_precision_modules=(nn.ReLU(),)),
            r"found a module of type torch\.nn\..*; give its type, or",
        ),
    ],
)
def test_argument_of_another_kind_names_what_was_found_and_what_to_write(call: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call()


def test_kind_of_a_builtin_is_its_name_alone() -> None:
    assert [kind_of(v) for v in (3, None, int, PRECISION)] == [
        "int",
        "NoneType",
        "the class int",
        "ddp_mp.options.MixedPrecision",
    ]


@on_ranks(1)
def test_patch_with_other_arguments_names_the_fields_that_differ_and_no_others(rank: Rank) -> None:
    ddp = patched(mlp())
    with pytest.raises(
        ValueError, match=r"patched with wait='root', not 'module', autocast=False, not True; call ddp_mp.unpatch"
    ):
        ddp_mp.patch(ddp, options=ddp_mp.Options(wait="module", autocast=True))
    other = ddp_mp.MixedPrecision(FP16, F32)
    with pytest.raises(ValueError, match=r"is patched with param_dtype=torch.bfloat16, not torch.float16; call ddp_mp.unpatch"):
        ddp_mp.patch(ddp, mixed_precision=other, options=ddp_mp.Options())


# --- masters -------------------------------------------------------------------------------------------------------------


@on_ranks(1)
@pytest.mark.parametrize("when", ["before", "after", "trained"])
def test_masters_that_are_low_precision_are_told_once(rank: Rank, when: str) -> None:
    module = mlp()
    if when == "before":
        with pytest.warns(UserWarning, match=r"torch.float16 in 0.weight, 0.bias, .* so that small updates are lost"):
            ddp = patched(module.half())
    else:
        ddp = patched(module)
        if when == "trained":
            ddp(torch.ones(2, 8)).float().sum().backward()
        ddp.half()
        with pytest.warns(UserWarning, match="masters of this model are low precision themselves, torch.float16 in"):
            ddp(torch.ones(2, 8))
    for _ in range(2):  # a second warning would be an error
        ddp(torch.ones(2, 8)).float().sum().backward()
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {FP16}


@on_ranks(2)
def test_model_that_is_converted_between_patch_and_first_forward_is_followed(rank: Rank) -> None:
    ddp = patched(scalar())
    ddp.double()
    ddp(torch.full((1, 1), rank.index + 1.0)).sum().backward()
    assert (ddp.module.weight.grad.item(), ddp.module.weight.grad.dtype) == (1.5, F64)


# --- PyTorch's errors about types ----------------------------------------------------------------------------------------


class Makes(nn.Module):
    """Makes a float32 tensor for its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.ModuleDict({"last": nn.Linear(8, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head["last"](torch.cat((torch.zeros(1, 8), self.body(x))))


def noted(call: Any, *inputs: Any) -> str:
    """The error that a call ends with, with its notes."""
    with pytest.raises((RuntimeError, TypeError)) as caught:
        call(*inputs)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert text.count("ddp_mp has cast") <= 1
    return text


@on_ranks(1)
@pytest.mark.parametrize("bare", [False, True])
def test_error_of_types_names_the_module_and_the_cure(rank: Rank, bare: bool) -> None:
    ddp = patched(Makes())
    text = noted(ddp.module if bare else ddp, torch.ones(2, 8))
    assert "must have the same dtype" in text
    assert "module 'head.last', Linear, met a tensor of another type" in text
    assert "options=ddp_mp.Options(autocast=True)" in text
    assert "full_precision_modules=('head.last',)" in text
    ddp_mp.unpatch(ddp)
    options = ddp_mp.Options(full_precision_modules=("head.last",))  # what the note says
    assert ddp_mp.patch(ddp, mixed_precision=PRECISION, options=options)(torch.ones(2, 8)).dtype is BF16
    ddp_mp.unpatch(ddp)
    options = ddp_mp.Options(autocast=True)
    assert ddp_mp.patch(ddp, mixed_precision=PRECISION, options=options)(torch.ones(2, 8)).dtype is BF16


@on_ranks(1)
def test_error_of_types_in_autocast_does_not_recommend_autocast(rank: Rank) -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    options = ddp_mp.Options(autocast=True)
    ddp = ddp_mp.patch(DistributedDataParallel(Own(8, 8)), mixed_precision=PRECISION, options=options)
    text = noted(ddp, torch.ones(2, 8))
    assert "the wrapped module, Own, met a tensor of another type" in text
    assert "Options(" not in text


@on_ranks(1)
def test_other_errors_and_those_of_models_in_full_precision_are_left_alone(rank: Rank) -> None:
    ddp = patched(Makes())
    assert "ddp_mp" not in noted(ddp, torch.ones(2, 7))
    with ddp_mp.full_precision(ddp):
        assert "ddp_mp" not in noted(ddp, torch.ones(2, 8, dtype=F64))


@on_ranks(1)
def test_error_of_types_is_explained_in_its_text_where_python_has_no_notes(rank: Rank) -> None:
    class OldError(RuntimeError):
        def __getattribute__(self, name: str) -> Any:
            if name in ("add_note", "__notes__"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise OldError("expected scalar type Float")

    with pytest.raises(OldError) as caught:
        patched(Fails(2, 2))(torch.ones(1, 2))
    assert str(caught.value).startswith("expected scalar type Float\nddp_mp has cast the parameters of this model: the wrapped")


@on_ranks(1)
def test_note_is_silent_about_errors_that_a_forward_has_caught(rank: Rank) -> None:
    class Catches(Makes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(x)
            except RuntimeError as error:
                self.caught = error
                return self.body(x)

    model = Catches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert patched(model)(torch.ones(2, 8)).dtype is BF16
    assert not getattr(model.caught, "__notes__", [])
    del model.caught
