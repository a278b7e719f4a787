"""What patch and its options refuse, and in which words."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from kit.modules import mlp, scalar, vectors
from kit.moments import require_ordinary
from kit.oracle import BF16, F32, FP16, Trial, mean_square
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


#: options -> those that are said to have no effect where nothing is cast
HOW_TO_CAST: list[tuple[dict[str, Any], str]] = [
    ({"wait": "module"}, "wait"),
    ({"prefetch": True}, "prefetch"),
    ({"reuse_unchanged": True, "prefetch": True}, "prefetch, reuse_unchanged"),
    ({"full_precision_modules": ("0",), "full_precision_outputs": ("0",)}, ""),
    ({"bucket_mb": 3, "output_dtype": F32}, ""),
]


@on_ranks(2)
@pytest.mark.parametrize(("options", "names"), HOW_TO_CAST)
def test_options_of_how_to_cast_are_warned_of_where_nothing_is_cast(rank: Rank, options: dict[str, Any], names: str) -> None:
    for param_dtype in (BF16, None):
        ddp = DistributedDataParallel(mlp())
        precision = ddp_mp.MixedPrecision(param_dtype, F32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp_mp.patch(ddp, mixed_precision=precision, options=ddp_mp.Options(**options))
            ddp_mp.patch(ddp)
        said = [str(w.message) for w in caught]
        if param_dtype is BF16 or not names:
            assert said == []
        else:
            assert said == [f"ddp_mp.patch: Options without effect: {names}; param_dtype is None, so that no parameter is cast"]
            assert caught[0].filename == __file__


@on_ranks(2)
def test_patch_with_nothing_to_do_is_an_error_that_says_so(rank: Rank) -> None:
    for precision in (ddp_mp.MixedPrecision(), _MixedPrecision()):
        ddp = DistributedDataParallel(scalar())
        with pytest.raises(ValueError, match=r"param_dtype, reduce_dtype and buffer_dtype .* are all None"):
            ddp_mp.patch(ddp, mixed_precision=precision)
        assert not ddp_mp.is_patched(ddp)
    with ddp_mp.install(), pytest.raises(ValueError, match="are all None"):
        DistributedDataParallel(scalar(), mixed_precision=_MixedPrecision())
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        precision = ddp_mp.MixedPrecision(**{field: BF16})
        assert ddp_mp.is_patched(ddp_mp.patch(DistributedDataParallel(scalar()), mixed_precision=precision))


@on_ranks(2)
def test_patch_by_position_says_how_to_write_it(rank: Rank) -> None:
    with pytest.raises(TypeError, match=r"write ddp_mp.patch\(ddp, mixed_precision="):
        ddp_mp.patch(DistributedDataParallel(scalar()), MIXED)


@on_ranks(1)
@pytest.mark.parametrize("part", [True, False])
def test_patch_of_a_wrapper_around_a_wrapper_is_refused_and_leaves_the_model(rank: Rank, part: bool) -> None:
    inner = DistributedDataParallel(mlp())
    ddp = DistributedDataParallel(nn.Sequential(inner) if part else inner)
    with pytest.raises(RuntimeError, match="module '0', which is" if part else "the wrapped module, which is"):
        ddp_mp.patch(ddp, mixed_precision=MIXED)
    assert not ddp_mp.is_patched(ddp)
    ddp_mp.patch(inner, mixed_precision=MIXED)  # a patched model wrapped once more would be reduced twice
    mean_square(inner, torch.ones(2, 8)).backward()


@on_ranks(2)
def test_patch_of_a_scripted_part_is_refused_and_leaves_the_model(rank: Rank) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated, and still used
        model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    ddp = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"module '1', which torch\.jit\.script made"):
        ddp_mp.patch(ddp, mixed_precision=MIXED)
    ddp(torch.randn(2, 8)).sum().backward()


@on_ranks(2)
def test_copy_shallow_of_a_patched_wrapper_is_an_error_that_says_what_to_do(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    with pytest.raises(TypeError, match=r"use copy\.deepcopy, or ddp_mp\.unpatch"):
        copy.copy(trial.ddp)
    trial.train(vectors())
    assert copy.deepcopy(trial.ddp) is not trial.ddp
    shallow = copy.copy(trial.module)
    assert "__getstate__" not in shallow.__dict__
    assert not shallow._forward_pre_hooks


@on_ranks(2)
def test_copies_of_containers_before_the_first_forward_are_ordinary_when_modules_wait(rank: Rank) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
    trial = Trial(rank, model, options={"wait": "module", "first_bucket_mb": 1e-5, "bucket_mb": 1e-5})
    for part in (model[0], model[0][1], model):
        require_ordinary(copy.deepcopy(part))
        require_ordinary(pickle.loads(pickle.dumps(part)))
    trial.train(vectors())


def test_mixed_precision_validates_its_fields() -> None:
    assert isinstance(ddp_mp.MixedPrecision(), _MixedPrecision)
    chosen = ddp_mp.MixedPrecision(BF16, F32, FP16)
    assert (chosen.param_dtype, chosen.reduce_dtype, chosen.buffer_dtype) == (BF16, F32, FP16)
    with pytest.raises(TypeError, match=r"param_dtype.*'bf16'"):
        ddp_mp.MixedPrecision("bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reduce_dtype.*int32"):
        ddp_mp.MixedPrecision(BF16, torch.int32)
    with pytest.raises(ValueError, match=r"buffer_dtype.*complex64"):
        ddp_mp.MixedPrecision(BF16, F32, torch.complex64)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("hooks", "none", ValueError),
        ("wait", "never", ValueError),
        ("bucket_mb", 0, ValueError),
        ("bucket_mb", -1.0, ValueError),
        ("bucket_mb", float("nan"), ValueError),
        ("first_bucket_mb", float("inf"), ValueError),
        ("first_bucket_mb", "1", TypeError),
        ("first_bucket_mb", True, TypeError),
        ("prefetch", 1, TypeError),
        ("reuse_unchanged", "yes", TypeError),
    ],
)
def test_options_validate_their_fields(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"Options\.{field}"):
        ddp_mp.Options(**{field: value})


def test_options_are_frozen_and_compare_by_value() -> None:
    options = ddp_mp.Options(bucket_mb=3)
    assert options == ddp_mp.Options(bucket_mb=3.0)
    with pytest.raises(AttributeError):
        options.bucket_mb = 4  # type: ignore[misc]
    assert (ddp_mp.Options(bucket_mb=1e-9).bucket_bytes, options.bucket_bytes) == (1, 3 * 2**20)
