"""The program of ``make soak``, for a moment; and that it would notice."""

from __future__ import annotations

import os

import pytest
import soak
from kit.ranks import Rank, on_ranks
from kit.walk import Walk


@pytest.mark.long
def test_soak_on_four_ranks_for_a_moment_ends_well() -> None:
    soak.run(minutes=0.1, seed=3, ranks=4)


@pytest.mark.parametrize(
    ("sizes", "due"), [([100.0] * 5, 0.0), ([100, 101, 102, 103, 104], 4.0), ([100, 104, 100, 104, 100], 0.0)]
)
def test_soak_growth_is_that_of_a_fitted_line(sizes: list[float], due: float) -> None:
    assert soak.growth([0.0, 1.0, 2.0, 3.0, 4.0], sizes) == pytest.approx(due)


def test_soak_growth_of_one_measurement_is_none() -> None:
    assert soak.growth([1.0], [100.0]) == 0.0


@pytest.mark.skipif("DDP_MP_UNDER_SANITIZER" in os.environ, reason="a sanitizer keeps freed memory")
def test_soak_memory_is_what_the_process_holds() -> None:
    before = soak.resident()
    held = bytearray(b"\1" * (64 << 20))
    assert soak.resident() - before > 60
    del held
    assert soak.resident() - before < 4


def test_soak_walk_is_decided_by_its_seed() -> None:
    assert soak.actions_of(5) == soak.actions_of(5) != soak.actions_of(6)
    assert len(soak.actions_of(5)) == soak.ACTIONS_A_WALK


@on_ranks(2)
@pytest.mark.parametrize("what", ["value", "gradient", "buffer", "type"])
def test_walk_notices_what_differs_from_the_oracle(rank: Rank, what: str) -> None:
    walk = Walk(rank)
    build = {"precision": "bf16", "options": "default", "how": "later", "optimizer": "momentum", "small": True, "views": False}
    walk.do("build", {"model": 0, "name": "statistics", "seed": 0, **build})
    walk.do("forward", {"model": 0, "kind": "one", "sync": True, "seed": 1})
    walk.do("backward", {"model": 0, "which": "last", "retain": False})
    module = walk.subjects[0].module
    if what == "value":
        module.a.weight.data[0, 0] += 1e-3
    elif what == "gradient":
        module.a.weight.grad[0, 0] += 1e-3
    elif what == "buffer":
        module.mean[0] += 1e-3
    else:
        module.a.weight.data = module.a.weight.data.bfloat16()
    with pytest.raises(AssertionError, match=r"model 0 \(statistics\) after drop"):
        walk.do("drop", {"model": 0})
    walk.close()
