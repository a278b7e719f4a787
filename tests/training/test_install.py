"""ddp_mp.install(): models that are built later are patched."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from kit.modules import Luck, column, mlp, no_luck, scalar
from kit.oracle import BF16, F32, FP16
from kit.ranks import Rank, on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


@on_ranks(2)
def test_install_patches_models_built_later_until_uninstalled(rank: Rank) -> None:
    original = DistributedDataParallel.__init__
    ddp_mp.install()
    try:
        ddp = DistributedDataParallel(scalar(), mixed_precision=MIXED)
        positional = DistributedDataParallel(scalar(), mixed_precision=_MixedPrecision(FP16, F32, None))
        plain = DistributedDataParallel(scalar())
    finally:
        ddp_mp.uninstall()
    assert DistributedDataParallel.__init__ is original
    assert [ddp_mp.is_patched(d) for d in (ddp, positional, plain)] == [True, True, False]
    assert not ddp_mp.is_patched(DistributedDataParallel(scalar(), mixed_precision=MIXED))
    assert ddp.mixed_precision is None, "inputs are cast where the module is called"
    for model in (ddp, positional):
        model(column(3)).sum().backward()
        assert model.module.weight.grad.item() == 3


@on_ranks(2)
def test_install_twice_uses_the_later_options_and_one_uninstall_ends_it(rank: Rank) -> None:
    original = DistributedDataParallel.__init__
    for mb in (3, 7):
        ddp_mp.install(ddp_mp.Options(bucket_mb=mb))
    ddp = DistributedDataParallel(scalar(), mixed_precision=MIXED)
    ddp_mp.uninstall()
    assert DistributedDataParallel.__init__ is original
    ddp_mp.uninstall()
    assert DistributedDataParallel.__init__ is original
    assert bucket_mb(ddp) == 7


def bucket_mb(ddp: DistributedDataParallel) -> float | None:
    """What a model was patched with; None: it is not patched."""
    return ddp.__dict__["_ddp_mp"].options.bucket_mb if ddp_mp.is_patched(ddp) else None


def built() -> float | None:
    """What a model that is built now is patched with."""
    return bucket_mb(DistributedDataParallel(scalar(), mixed_precision=MIXED))


@on_ranks(2)
def test_install_nested_ends_with_what_was_in_force_before(rank: Rank) -> None:
    original = DistributedDataParallel.__init__
    with ddp_mp.install(ddp_mp.Options(bucket_mb=3)):
        with ddp_mp.install(ddp_mp.Options(bucket_mb=7)):
            assert built() == 7
        assert built() == 3
        ddp_mp.install(ddp_mp.Options(bucket_mb=5))  # replaces, and ends with the block
        assert built() == 5
    assert DistributedDataParallel.__init__ is original
    ddp_mp.install(ddp_mp.Options(bucket_mb=3))
    with pytest.raises(Luck), ddp_mp.install(ddp_mp.Options(bucket_mb=7), mixed_precision=MIXED):
        no_luck()
    assert built() == 3
    assert bucket_mb(DistributedDataParallel(scalar())) is None
    with ddp_mp.install(ddp_mp.Options(bucket_mb=7)):
        ddp_mp.uninstall()
        assert DistributedDataParallel.__init__ is original
    assert DistributedDataParallel.__init__ is original, "what was ended inside stays ended"


@on_ranks(2)
@pytest.mark.parametrize("named", [True, False])
def test_install_around_and_below_a_wrapper_of_another_library(rank: Rank, named: bool) -> None:
    original: Any = DistributedDataParallel.__init__
    calls: list[Any] = []

    def wrap(inner: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(kwargs.get("mixed_precision"))
            inner(self, *args, **kwargs)

        return functools.wraps(inner)(init) if named else init

    try:
        ddp_mp.install(ddp_mp.Options(bucket_mb=3))
        other = wrap(DistributedDataParallel.__init__)
        DistributedDataParallel.__init__ = other  # type: ignore[method-assign]
        assert built() == 3
        assert calls.pop() is MIXED
        ddp_mp.uninstall()
        assert DistributedDataParallel.__init__ is other
        assert built() is None
        assert calls.pop() is MIXED
        for _ in range(2):  # again: ours is below the other one, and around it
            ddp_mp.install(ddp_mp.Options(bucket_mb=5))
            ddp = DistributedDataParallel(scalar(), mixed_precision=MIXED)
            assert bucket_mb(ddp) == 5
            assert calls == [None]
            calls.clear()
            assert ddp_mp.unpatch(ddp).mixed_precision is MIXED
        ddp_mp.uninstall()
        assert DistributedDataParallel.__init__ is other
        assert built() is None
    finally:
        DistributedDataParallel.__init__ = original  # type: ignore[method-assign]
        ddp_mp.uninstall()
    assert DistributedDataParallel.__init__ is original


@on_ranks(2)
def test_install_unpatched_model_has_pytorchs_mixed_precision(rank: Rank) -> None:
    with ddp_mp.install():
        ddp = DistributedDataParallel(mlp(), mixed_precision=MIXED)
        assert ddp.mixed_precision is None, "inputs are cast where the module is called"
    ddp_mp.unpatch(ddp)
    assert ddp.mixed_precision is MIXED
    assert all(p._mp_param.dtype is BF16 for p in ddp.module.parameters())


@on_ranks(2)
@pytest.mark.parametrize("hooks", ["all", "root"])
def test_install_with_precision_patches_models_built_without(rank: Rank, hooks: str) -> None:
    fp16 = ddp_mp.MixedPrecision(FP16, F32)
    with ddp_mp.install(ddp_mp.Options(hooks=hooks), mixed_precision=MIXED):  # type: ignore[arg-type]
        plain = DistributedDataParallel(mlp())
        own = DistributedDataParallel(mlp(), mixed_precision=fp16)
    assert ddp_mp.is_patched(plain)
    if hooks == "all":
        assert own(torch.randn(2, 8)).dtype is FP16
        assert plain(torch.randn(2, 8)).dtype is BF16
    assert ddp_mp.is_patched(own)
    assert not ddp_mp.is_patched(DistributedDataParallel(mlp()))


@on_ranks(2)
def test_install_with_precision_unpatched_model_is_in_full_precision(rank: Rank) -> None:
    with ddp_mp.install(mixed_precision=MIXED):
        ddp = DistributedDataParallel(scalar())
    assert ddp(column(3)).dtype is BF16
    ddp_mp.unpatch(ddp)
    assert ddp.mixed_precision is None
    assert ddp(column(3)).dtype is F32


@on_ranks(2)
def test_install_validates_before_the_wrapper_is_built(rank: Rank) -> None:
    with pytest.raises(TypeError, match="mixed_precision"):
        ddp_mp.install(mixed_precision=BF16)  # type: ignore[arg-type]
    for options in ("all", {}, 0, False):
        with pytest.raises(TypeError, match="Options"):
            ddp_mp.install(options)  # type: ignore[arg-type]
    with ddp_mp.install(), pytest.raises(TypeError, match="mixed_precision"):
        DistributedDataParallel(scalar(), mixed_precision="bf16")
