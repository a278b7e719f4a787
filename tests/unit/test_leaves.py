"""``_C.Leaves``: placing leaves in modules, and what leaves have of their masters."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from kit.inside import _C
from torch import nn


class Holder:
    """Modules with one weight each, and a ``_C.Leaves`` that fits."""

    def __init__(self, count: int = 3) -> None:
        self.modules = [nn.Linear(4, 2, bias=False) for _ in range(count)]
        self.masters = [module.weight for module in self.modules]
        self.arena = torch.zeros(16 * count, dtype=torch.uint8)
        whole = self.arena.view(torch.bfloat16)
        self.kept = [nn.Parameter(whole[8 * k : 8 * k + 8].view(2, 4).data) for k in range(count)]
        sites = [(module, "weight", index) for index, module in enumerate(self.modules)]
        memory = [(self.arena, 16 * k) for k in range(count)]
        self.leaves = _C.Leaves(self.masters, self.kept, memory, [f"m{k}" for k in range(count)], sites)
        self.leaves.remember()
        self.leaves.match()


def test_leaves_are_found_where_they_are_placed_and_masters_after_them() -> None:
    holder = Holder()
    assert holder.leaves.place()
    assert all(m.weight is leaf for m, leaf in zip(holder.modules, holder.kept, strict=True))
    assert [next(m.parameters()) for m in holder.modules] == holder.masters
    assert holder.leaves.take_back()
    assert all(m.weight is master for m, master in zip(holder.modules, holder.masters, strict=True))
    assert all("weight" not in vars(m) for m in holder.modules)


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_place_stores_nothing_where_a_site_is_taken(taken: int) -> None:
    holder = Holder()
    other = nn.Parameter(torch.zeros(1))
    vars(holder.modules[taken])["weight"] = other
    assert not holder.leaves.place()
    assert [k for k, m in enumerate(holder.modules) if "weight" in vars(m)] == [taken]
    assert holder.modules[taken].weight is other


def test_take_back_leaves_what_is_not_ours() -> None:
    holder = Holder()
    holder.leaves.place()
    vars(holder.modules[1])["weight"] = "another"
    del vars(holder.modules[2])["weight"]
    assert not holder.leaves.take_back()
    assert holder.modules[0].weight is holder.masters[0]
    assert holder.modules[1].weight == "another"


def test_one_leaf_of_a_tied_weight_is_in_every_site() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    leaf = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    sites = [(first, "weight", 0), (second, "weight", 0)]
    leaves = _C.Leaves([first.weight], [leaf], [(leaf.data, 0)], ["w"], sites)
    assert leaves.place()
    assert first.weight is leaf
    assert second.weight is leaf
    assert leaves.take_back()
    assert first.weight is second.weight is not leaf


def test_modules_are_not_kept_alive_and_one_that_is_gone_is_passed_over() -> None:
    holder = Holder()
    gone = weakref.ref(holder.modules[1])
    del holder.modules[1]
    gc.collect()
    assert gone() is None
    assert holder.leaves.place()
    assert [m.weight for m in holder.modules] == [holder.kept[0], holder.kept[2]]
    assert holder.leaves.take_back()


def test_match_gives_leaves_what_masters_have() -> None:
    holder = Holder()
    holder.masters[1].requires_grad_(False)
    holder.leaves.match()
    assert [leaf.requires_grad for leaf in holder.kept] == [True, False, True]
    holder.masters[1].requires_grad_(True)
    holder.leaves.match()
    assert all(leaf.requires_grad for leaf in holder.kept)


def test_changed_tells_what_was_written_and_what_was_toggled() -> None:
    holder = Holder()
    assert holder.leaves.changed() is None
    with torch.no_grad():
        holder.kept[2].add_(1)
    assert holder.leaves.changed() == ([2], [])
    holder.kept[0].data = torch.zeros(2, 4, dtype=torch.bfloat16)
    holder.kept[1].requires_grad_(False)
    assert holder.leaves.changed() == ([0, 2], [1])
    holder.leaves.match()
    holder.leaves.remember()
    holder.kept[1].requires_grad_(True)
    holder.kept[0].data = torch.zeros(0, dtype=torch.bfloat16)


def test_changed_knows_of_versions_that_the_caller_counted_and_of_memory_that_moved() -> None:
    holder = Holder()
    torch.autograd.graph.increment_version(holder.kept)
    holder.leaves.bumped()
    assert holder.leaves.changed() is None
    storage = holder.arena.untyped_storage()
    storage.resize_(0)
    assert holder.leaves.changed() is None
    blocks = [torch.empty(48, dtype=torch.uint8) for _ in range(3)]  # so that the memory is another
    storage.resize_(48)
    del blocks
    assert holder.leaves.changed() is None


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"leaves": []}, ValueError, "one per master"),
        ({"memory": [1, 2, 3]}, TypeError, "memory"),
        ({"sites": [1]}, TypeError, "sites"),
        ({"sites": [(nn.Identity(), "weight", 7)]}, IndexError, "sites: index"),
        ({"names": ["a"]}, ValueError, "names"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], error: type[Exception], match: str) -> None:
    holder = Holder()
    fitting = {
        "masters": holder.masters,
        "leaves": holder.kept,
        "memory": [(holder.arena, 0)] * 3,
        "names": ["a", "b", "c"],
        "sites": [],
    }
    with pytest.raises(error, match=match):
        _C.Leaves(**{**fitting, **change})


def test_leaves_keep_no_reference_beyond_their_life() -> None:
    holder = Holder()
    objects = [*holder.masters, *holder.kept, holder.arena]
    before = [sys.getrefcount(one) for one in objects]
    for _ in range(1000):
        holder.leaves.place()
        holder.leaves.match()
        holder.leaves.changed()
        holder.leaves.take_back()
    assert [sys.getrefcount(one) for one in objects] == before
    del holder.leaves
    after = [sys.getrefcount(one) for one in objects]
    assert all(now < then for now, then in zip(after, before, strict=True))
