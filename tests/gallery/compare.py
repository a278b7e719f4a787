"""Trains one program in three ways on the ranks of a process group, and says what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from kit.ranks import Rank, on_ranks

from . import program
from .training import HALF, Autocast, Patched, Program, Way, read, written


def started(kind: type[Program], way: Way, seed: int = 0) -> Program:
    """The program at its beginning: with the same weights in every way, unless the seed is another."""
    torch.manual_seed(seed)
    return kind(way)


def compare(rank: Rank, kind: type[Program]) -> dict[str, list[float]]:
    """Losses of the three ways, by name; raises AssertionError where something does not hold."""
    losses: dict[str, list[float]] = {}
    plain, patched = started(kind, Way()), started(kind, Patched(kind.options))
    for one in (plain, started(kind, Autocast()), patched):
        losses[one.way.name] = one.train()
    require_losses(kind, losses)
    require_full_precision(plain, patched)
    require_equal_ranks(rank, patched)
    require_resumed(kind, patched, losses["ddp_mp"])
    return losses


def require_losses(kind: type[Program], losses: dict[str, list[float]]) -> None:
    """All within the bound of fp32's, not the same as those, which would mean that nothing was cast, and falling."""
    full = losses["fp32"]
    for name, other in losses.items():
        apart = max(abs(a - b) for a, b in zip(full, other, strict=True))
        assert apart <= kind.bound, f"{name}: {apart:.3g} from fp32, bound {kind.bound}: {other}, fp32 {full}"
    assert losses["ddp_mp"] != full, "the losses are those of fp32, bit for bit"
    assert not kind.falls or full[-1] < full[0], f"nothing is learnt: {full}"


def require_full_precision(plain: Program, patched: Program) -> None:
    """Names, shapes and types in what is saved are those of plain DDP, and so is what the plain program can load."""
    for ours, theirs in ((described(patched.state()), described(plain.state())),):
        assert ours == theirs, f"only with ddp_mp: {set(ours) - set(theirs)}, only without: {set(theirs) - set(ours)}"
    assert torch.float32 in {kind for _, kind, _ in described(patched.state())}
    plain.load(patched.checkpoint)


def require_equal_ranks(rank: Rank, patched: Program) -> None:
    """Every trained parameter, and what is averaged from it, has the same bits on all ranks."""
    for name, model in patched.wrapped().items():
        for key, param in model.named_parameters():
            first, *others = rank.gather(param.detach().clone())
            assert all(torch.equal(first, other) for other in others), f"{name}.{key} differs between ranks"


def require_resumed(kind: type[Program], whole: Program, losses: Sequence[float]) -> None:
    """A program that begins with other weights and loads the checkpoint ends with the same bits."""
    resumed = started(kind, Patched(kind.options), seed=1)
    resumed.load(whole.checkpoint)
    again = resumed.train(HALF)
    assert again == list(losses[HALF:]), f"losses after the checkpoint: {again}, without an interruption {losses[HALF:]}"
    # Through a file, so that optimizers whose states were loaded and others hold the same kinds of numbers.
    require_same("state", read(written(resumed.state())), read(written(whole.state())))


def require_same(what: str, got: Any, want: Any) -> None:
    """Raises AssertionError that names the first difference of two nested states."""
    if isinstance(want, torch.Tensor):
        assert got.dtype is want.dtype, f"{what}: {got.dtype}, due {want.dtype}"
        assert torch.equal(got, want), f"{what}: differs by {(got - want).abs().max().item():.3g}"
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), f"{what}: keys {got.keys()}, due {want.keys()}"
        for key in want:
            require_same(f"{what}[{key!r}]", got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{what}: length {len(got)}, due {len(want)}"
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            require_same(f"{what}[{index}]", a, b)
    else:
        assert got == want, f"{what}: {got}, due {want}"


def described(state: Any, name: str = "") -> set[tuple[str, Any, Any]]:
    """Name, type and shape of every tensor in a nested state."""
    if isinstance(state, torch.Tensor):
        return {(name, state.dtype, tuple(state.shape))}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    return {one for key, value in items for one in described(value, f"{name}/{key}")}


@on_ranks(2)
def train(rank: Rank, name: str, result: str = "") -> None:
    """Compares the program of that name; the first rank writes the losses to the file ``result``, if one is named."""
    losses = compare(rank, program(name))
    if result and rank.index == 0:
        torch.save(losses, result)
