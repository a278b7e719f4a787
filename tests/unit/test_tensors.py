"""Tensors inside what a module is given or returns: found once each, in time linear in the links between containers."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kit.inside import cast_tensors, tensors_in
from kit.modules import Two, vectors
from kit.oracle import BF16, F32, Trial
from kit.ranks import Rank, on_ranks
from torch import nn

NODES = 12


class Links(list):  # type: ignore[type-arg]
    """A list that counts how often it is gone through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


class Node:
    """A plain object that knows others."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.links = value, Links()


@dataclass(eq=False, repr=False)
class Record:
    """The same as a dataclass."""

    value: torch.Tensor
    links: Links = field(default_factory=Links)


def linked(kind: type, values: list[torch.Tensor]) -> list[Any]:
    """Objects of which each knows all, by a list of its own."""
    nodes = [kind(value) for value in values]
    for node in nodes:
        node.links.extend(nodes)
    return nodes


def walks(nodes: list[Any]) -> int:
    return sum(node.links.walks for node in nodes)


@pytest.mark.parametrize("kind", [Node, Record])
def test_tensors_of_objects_that_all_know_each_other_are_found_once(kind: type) -> None:
    values = [torch.ones(1) for _ in range(NODES)]
    nodes = linked(kind, values)
    found = tensors_in(nodes[0])
    assert [id(t) for t in found] == [id(t) for t in values]
    walked = walks(nodes)
    assert walked <= 4 * NODES


def test_tensors_that_occur_twice_are_listed_once_in_order() -> None:
    a, b = torch.ones(1), torch.ones(1)
    found = tensors_in({"x": (b, a), "y": [[b], {"z": a}]})
    assert [id(t) for t in found] == [id(b), id(a)]


def test_tensors_near_the_end_of_the_search_are_found_by_a_shorter_way() -> None:
    x = torch.ones(1)
    near: list[Any] = [[x]]
    far: Any = near
    for _ in range(7):
        far = [far]
    assert tensors_in(far) == []
    assert len(tensors_in([far[0], [[[near]]]])) == 1, "what was cut off by the longer way is not taken for searched"


class Made(collections.abc.Mapping):  # type: ignore[type-arg]
    """Its values are made when they are asked for, and gone afterwards."""

    def __init__(self, tensors: list[torch.Tensor], depth: int = 0) -> None:
        self.tensors, self.depth = tensors, depth

    def __getitem__(self, key: int) -> Any:
        return [self.tensors[key]] if self.depth == 0 else Made(self.tensors, self.depth - 1)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.tensors)))

    def __len__(self) -> int:
        return len(self.tensors)


def test_tensors_in_containers_that_are_made_on_the_way_are_all_found() -> None:
    tensors = [torch.ones(1) for _ in range(3)]
    assert len(tensors_in([[[[Made(tensors)]]]])) == 3, "no id of one that is gone is taken for the next one's"


def test_cast_of_objects_that_all_know_each_other_is_linear() -> None:
    nodes = linked(Record, [torch.ones(1) for _ in range(NODES)])
    after = cast_tensors(nodes[0], BF16)
    assert type(after) is Record
    assert after.value.dtype is after.links[1].value.dtype is after.links[1].links[2].value.dtype is BF16
    assert nodes[1].value.dtype is F32, "what the caller holds is not changed"
    walked = walks(nodes)
    assert walked <= 8 * NODES


def test_cast_leaves_out_the_same_levels_by_every_way() -> None:
    deep: Any = [torch.ones(1)]
    for _ in range(4):
        deep = [deep]
    short, longer = cast_tensors([[[deep]], [[[[[deep]]]]]], BF16)
    assert [t.dtype for t in tensors_in(short)] == [BF16]
    assert [t.dtype for t in _leaves(longer)] == [F32]


def _leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for item in value for t in _leaves(item)]


class Linked(nn.Module):
    """Returns an object that knows many others."""

    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, x: torch.Tensor) -> Any:
        return linked(Node, list(self.two(x)))[0]


@on_ranks(2)
def test_output_of_objects_that_all_know_each_other_trains(rank: Rank) -> None:
    def step(call: Any, x: torch.Tensor) -> None:
        node = call(x)
        torch.stack([n.value for n in node.links]).float().square().mean().backward()
        walked = walks(node.links)
        assert walked <= 5 * NODES

    trial = Trial(rank, Linked())
    for seed in range(2):
        trial.backward(step, rank.inputs(vectors(NODES), seed))
        trial.check()
