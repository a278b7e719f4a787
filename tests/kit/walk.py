"""Walks over a training loop: any action of a user after any other, on patched models and on their oracles.

A walk is driven from outside, one action at a time (``fuzz`` lets Hypothesis choose them, ``soak.py`` a random generator), and
does the same on every rank.  After every action each model is compared with its oracle: parameters, copies, gradients, buffers.
An action that makes no sense in the present state does nothing.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp
from kit.modules import Luck, no_luck
from kit.oracle import BF16, F32, FP16, SYNC_BUFFERS, Call, Trial, mean_square, sum_of
from kit.ranks import Rank, let_go_of_failed_backward
from kit.walk_models import SPECS

MODELS = 2  # trained side by side
WAITING = 3  # forwards of one model that may wait for a backward

PRECISIONS = {
    "bf16": ddp_mp.MixedPrecision(BF16, F32),
    "bf16 all": ddp_mp.MixedPrecision(BF16),
    "fp16": ddp_mp.MixedPrecision(FP16, F32),
    "bf16 buffers": ddp_mp.MixedPrecision(BF16, F32, BF16),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "module": {"wait": "module", "first_bucket_mb": 0.0001, "bucket_mb": 0.0002},
    "prefetch": {"prefetch": True},
    "reuse": {"reuse_unchanged": True},
    "both": {"prefetch": True, "reuse_unchanged": True, "bucket_mb": 0.0002},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda ps: torch.optim.SGD(ps, lr=0.0625, fused=True),  # its writes do not show in version counters
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.0625, momentum=0.5),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


@dataclass(eq=False)
class Waiting:
    """A forward that waits for its backward, here and in the oracle."""

    loss: torch.Tensor
    due: list[torch.Tensor]  # the oracle's loss on every rank
    casts: dict[int, torch.Tensor]  # which that was computed with
    sync: bool
    epoch: int
    written: int  # how often masters had been written
    kind: str = "one"
    stale: bool = False  # parameters were written since: autograd may refuse its backward
    spent: bool = False  # a backward went through it, and kept the graph


@dataclass
class Subject:
    """One model, its oracle, their optimizers and what waits for a backward."""

    name: str
    trial: Trial
    optimizer: str
    how: str
    options: str
    waiting: list[Waiting] = field(default_factory=list)
    writes: int = 0  # of masters
    epoch: int = 0  # grows with everything but forwards: those of one epoch share their copies
    casts: dict[int, torch.Tensor] | None = None  # the oracle's copies of this epoch
    broadcasts: bool = True  # whether the next forward begins with rank 0's buffers
    slack: dict[str, float] = field(default_factory=dict)  # how far gradients may be off after this action
    halved: dict[str, Any] = field(default_factory=dict)  # by the name of a parameter: the handle of a user's hook on it
    second: Any = None  # another wrapper, patched too, around a layer of the module

    def __post_init__(self) -> None:
        self.new_optimizers()

    def new_optimizers(self) -> None:
        make = OPTIMIZERS[self.optimizer]
        self.ours, self.theirs = make(self.module.parameters()), make(self.oracle.module.parameters())

    @property
    def module(self) -> nn.Module:
        return self.trial.module

    @property
    def ddp(self) -> Any:
        return self.trial.ddp

    @property
    def oracle(self) -> Any:
        return self.trial.oracle

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.module.named_parameters()]

    @property
    def local(self) -> bool:
        """Whether ranks hold gradients of their own."""
        return not all(self.same_everywhere(name) for name in self.names)

    def same_everywhere(self, name: str) -> bool:
        """Whether every rank should have the same gradient."""
        first, *others = [grads[name] for grads in self.oracle.grads]
        if first is None:
            return all(grad is None for grad in others)
        return all(grad is not None and torch.equal(grad, first) for grad in others)

    @property
    def part(self) -> str | None:
        """The name of the layer that a second wrapper shares, in a model that has one."""
        return next((name for name, inner in self.module.named_modules() if type(inner) is nn.Linear), None)

    def both(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        return self.module.get_parameter(name), self.oracle.module.get_parameter(name)

    def masters(self) -> dict[int, torch.Tensor]:
        """What the oracle computes with where nothing is cast."""
        return {id(p): p for p in self.oracle.module.parameters()}

    def new_epoch(self) -> None:
        """The next forward need not have the copies of the last one."""
        self.epoch, self.casts = self.epoch + 1, None

    def drop(self) -> None:
        """Nobody will do a backward of what waits."""
        self.waiting.clear()

    def written(self, visible: bool) -> None:
        """Masters were written; ``visible``: in a way that autograd notices."""
        self.writes += 1
        if visible and SPECS[self.name].unused:
            self.waiting.clear()  # autograd would refuse on some ranks only, and the others would wait for them
        for waiting in self.waiting:
            waiting.stale = waiting.stale or visible


class Walk:
    """The models of one rank, and every action."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.subjects: dict[int, Subject] = {}
        self.actions = self.skipped = self.backwards = self.models = 0

    def do(self, action: str, arguments: dict[str, Any]) -> None:
        """One action, and all comparisons."""
        self.actions += 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s).*gradient layout contract")  # which set_grad does not keep
            if action == "build":
                self.build(**arguments)
            else:
                self._act(action, **arguments)
        for number, subject in self.subjects.items():
            with note(f"model {number} ({subject.name}) after {action} {arguments}"):
                self.check(subject)

    def _act(self, action: str, model: int, **arguments: Any) -> None:
        subject = self.subjects.get(model)
        if subject is None:
            self.skipped += 1
            return
        if action != "forward":
            subject.new_epoch()
        with note(f"model {model} ({subject.name}), {action} {arguments}"):
            done = getattr(self, action)(subject, **arguments)
        self.skipped += done is False

    def close(self) -> None:
        """The walk is over: nothing of it stays."""
        self.subjects.clear()

    # --- comparisons -------------------------------------------------------------------------------------------------

    def check(self, subject: Subject) -> None:
        """Masters, copies, gradients and buffers.  Nothing is touched: what is in place stays in place."""
        oracle, index = subject.oracle, self.rank.index
        for name in subject.names:
            ours, theirs = subject.both(name)
            assert subject.waiting or ours.dtype is F32, f"{name} is {ours.dtype}, and nothing waits for a backward"
            require(f"value of {name}", ours, theirs.to(ours.dtype))
            require(f"gradient of {name}", ours.grad, oracle.grads[index][name], subject.slack.get(name, 0.0))
        for name, buffer in subject.module.named_buffers():
            require(f"buffer {name}", buffer, oracle.buffers[index][name])
        if subject.slack:
            self._agree(subject)

    def _agree(self, subject: Subject) -> None:
        """Gradients that were allowed to be off are the oracle's from now on; reduced ones are the same on every rank."""
        oracle, params = subject.oracle, dict(subject.module.named_parameters())
        mine = {n: None if params[n].grad is None else params[n].grad.detach().clone() for n in subject.slack}
        everybody = self.rank.gather(mine)
        for name in mine:
            for theirs in everybody if subject.same_everywhere(name) else []:
                require(f"gradient of {name} on another rank", theirs[name], mine[name])
        for index, grads in enumerate(everybody):
            oracle.grads[index].update(grads)
        subject.slack = {}

    def _allow(self, subject: Subject, scale: float) -> None:
        """Gradients of this action may be off by so much of their size."""
        for name in subject.names:
            sizes = [float(g[name].abs().max()) for g in subject.oracle.grads if g[name] is not None and g[name].numel()]
            subject.slack[name] = subject.slack.get(name, 0.0) + scale * max([*sizes, 1e-3])

    # --- building ----------------------------------------------------------------------------------------------------

    def build(
        self, model: int, name: str, precision: str, options: str, how: str, optimizer: str, small: bool, views: bool, seed: int
    ) -> None:
        """A new model takes the place of the present one."""
        self.subjects.pop(model, None)
        torch.manual_seed(1000 + seed)
        spec = SPECS[name]
        wrapping: dict[str, Any] = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.0003 if small else 25}
        if spec.unused:
            wrapping["find_unused_parameters"] = True
        if name == "statistics" and views:
            wrapping[SYNC_BUFFERS] = False
        if name == "unusual" and optimizer == "fused":
            optimizer = "momentum"  # PyTorch's fused optimizers take a gapped parameter for a dense one
        if how == "patch" and PRECISIONS[precision].buffer_dtype is not None:
            how = "install"  # PyTorch's constructor casts integer buffers too
        trial = Trial(self.rank, spec.build(), PRECISIONS[precision], how, OPTIONS[options], **wrapping)
        self.subjects[model] = Subject(name, trial, optimizer, how, options)
        self.models += 1

    # --- forward and backward ----------------------------------------------------------------------------------------

    def _inputs(self, seed: int, chosen: int = 7) -> list[torch.Tensor]:
        """For each rank; ``chosen`` says which branches of a model with branches run, for another rank others."""
        inputs = self.rank.inputs(lambda: torch.randn(4, 8), seed)
        for index, x in enumerate(inputs):
            x[0, 0] = chosen if chosen in (0, 7) else (chosen + index) % 8
        return inputs

    @staticmethod
    def _loss(kind: str, call: Any, x: torch.Tensor) -> torch.Tensor:
        if kind == "two":
            return mean_square(call, x) + mean_square(call, x.flip(0) / 2)
        return mean_square(call, x)

    @staticmethod
    def _squares(module: nn.Module) -> torch.Tensor:
        """A penalty on the masters."""
        return torch.stack([p.square().sum() for p in module.parameters() if p.requires_grad]).sum() / 16

    def _oracle_forward(self, subject: Subject, kind: str, inputs: list[torch.Tensor]) -> list[Any]:
        """The oracle's losses; ``kind`` "output": what the module returns."""
        oracle = subject.oracle
        if subject.casts is None:
            subject.casts = oracle.casts()
        due = []
        for index, x in enumerate(inputs):
            with oracle.low_precision(index, subject.masters() if kind == "full" else subject.casts) as call:
                call = call.module if kind == "full" else call
                due.append(call(x) if kind == "output" else self._loss(kind, call, x))
        if kind == "penalty":
            due = [loss + self._squares(oracle.module) for loss in due]
        return due

    def _broadcast(self, subject: Subject) -> None:
        oracle = subject.oracle
        if subject.broadcasts and oracle.broadcast_buffers:
            oracle.buffers = [{n: b.clone() for n, b in oracle.buffers[0].items()} for _ in oracle.buffers]

    def forward(self, subject: Subject, kind: str, sync: bool, seed: int) -> bool:
        """A loss that waits for its backward.

        ``kind`` "local" goes round the wrapper, "two" goes through it twice, "penalty" adds one on the masters, "full" computes
        in full precision.
        """
        if len(subject.waiting) == WAITING:
            return False
        spec = SPECS[subject.name]
        chosen = seed if spec.unused else 7
        inputs = self._inputs(seed, chosen)
        call = Call(subject.module, subject.oracle.dtype) if kind == "local" else subject.ddp
        if kind == "two" and subject.name == "statistics":
            kind = "one"  # its second forward begins with other buffers
        if (kind == "full" and spec.recomputes) or (kind in ("full", "penalty") and spec.unused):
            kind = "one"  # one backward computes again what low- and full-precision forwards recorded; nothing is unused
        if kind != "local":
            self._broadcast(subject)
            subject.broadcasts = sync
        shown = ddp_mp.full_precision(subject.ddp) if kind == "full" else contextlib.nullcontext()
        with shown, contextlib.nullcontext() if sync else subject.ddp.no_sync():
            loss = self._loss(kind, call, inputs[self.rank.index])
        if kind == "penalty":
            loss = loss + self._squares(subject.module)
        due = self._oracle_forward(subject, kind, inputs)
        require("loss", loss, due[self.rank.index])
        casts = subject.masters() if kind == "full" else subject.casts or {}
        waiting = Waiting(loss, due, casts, sync and kind != "local", subject.epoch, subject.writes, kind)
        subject.waiting.append(waiting)
        return True

    def backward(self, subject: Subject, which: str, retain: bool) -> bool:
        """A backward of the first, the last, or all forwards that wait."""
        if not subject.waiting:
            return False
        done = {"first": subject.waiting[:1], "last": subject.waiting[-1:], "all": subject.waiting[:]}[which]
        ours = self._sum([w.loss for w in done])
        succeeded = _goes_through(ours, retain, any(w.stale for w in done))
        del ours
        if succeeded:
            self._oracle_backward(subject, done, retain)
        elif any(w.kind in ("full", "penalty") for w in done):
            self.zero_grad(subject, "wrapper", to_none=True)  # what has reached masters directly stays, as in plain DDP
        kept = done if retain and succeeded else []
        subject.waiting = [w for w in subject.waiting if w not in done or w in kept]
        return True

    def together(self, subject: Subject) -> bool:
        """One backward through the last forwards of all models."""
        subjects = [s for s in self.subjects.values() if s.waiting]
        if len(subjects) < 2 or any(s.waiting[-1].stale for s in subjects):
            return False
        self._sum([s.waiting[-1].loss for s in subjects]).backward()
        for each in subjects:
            each.new_epoch()
            self._oracle_backward(each, [each.waiting.pop()], retain=False)
        return True

    @staticmethod
    def _sum(losses: list[torch.Tensor]) -> torch.Tensor:
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _oracle_backward(
        self, subject: Subject, done: list[Waiting], retain: bool, more: list[dict[str, torch.Tensor | None]] | None = None
    ) -> None:
        """``more``: gradients of each rank that the same backward brings beside those of the forwards."""
        oracle = subject.oracle
        of = sorted({(w.epoch, w.kind == "full") for w in done})
        groups = [[w for w in done if (w.epoch, w.kind == "full") == one] for one in of]
        new = []
        for index in range(self.rank.size):
            for group in groups:  # checkpoints compute again with the copies of their forward
                with oracle.low_precision(index, group[0].casts):
                    self._sum([w.due[index] for w in group]).backward(retain_graph=retain)
            new.append(self._taken(subject))
        if more is not None:
            new = [
                {name: sum_of(grad, other[name]) for name, grad in grads.items()}
                for grads, other in zip(new, more, strict=True)
            ]
        sync = any(w.sync for w in done)
        oracle.add(new, sync)
        self.backwards += 1
        several = len(done) > 1 or any(w.kind == "two" for w in done)
        apart = subject.name == "unusual" and several  # a model with a gapped parameter is cast for every forward
        if len(groups) > 1 or apart:  # low-precision gradients are summed before they are cast, or after
            self._allow(subject, 8 * torch.finfo(oracle.dtype).eps)
            self._allow_more(subject, new, 8 * torch.finfo(oracle.dtype).eps)
        if any(w.kind in ("full", "penalty") for w in done):  # what arrives on masters is added to what they have
            self._allow(subject, 4 * torch.finfo(oracle.reduce_dtype).eps)
            self._allow_more(subject, new, 4 * torch.finfo(oracle.reduce_dtype).eps)
        if sync and self.rank.size > 2:  # the order of the sum over ranks is not ours
            self._allow(subject, 4 * torch.finfo(oracle.reduce_dtype).eps)
            self._allow_more(subject, new, 4 * torch.finfo(oracle.reduce_dtype).eps)
        for waiting in done:
            waiting.sync = waiting.sync and not sync
            waiting.spent = True

    def _allow_more(self, subject: Subject, new: list[dict[str, torch.Tensor | None]], scale: float) -> None:
        """What is summed may be larger than the sum."""
        for name in subject.names:
            subject.slack[name] += scale * sum(float(g[name].abs().max()) for g in new if _present(g[name]))

    @staticmethod
    def _taken(subject: Subject) -> dict[str, torch.Tensor | None]:
        """What a backward has left on the oracle's masters, after the user's hooks; they have none any more."""
        found = {}
        for name, param in subject.oracle.module.named_parameters():
            grad, param.grad = param.grad, None
            found[name] = grad / 2 if grad is not None and name in subject.halved else grad
        return found

    def hook(self, subject: Subject, index: int) -> bool:
        """A user's hook on a parameter, or none any more."""
        name = subject.names[index % len(subject.names)]
        ours, _ = subject.both(name)
        if not ours.requires_grad:
            return False
        if name in subject.halved:
            subject.halved.pop(name).remove()
        else:
            subject.halved[name] = ours.register_hook(halve)
        return True

    def _past(self, subject: Subject, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], seed: int) -> None:
        """A backward that goes past the wrapper: in full precision, and of each rank alone."""
        inputs, oracle = self._inputs(seed), subject.oracle
        loss(subject.module, inputs[self.rank.index]).backward()
        new = []
        for index, x in enumerate(inputs):
            with oracle.low_precision(index, subject.masters()):
                loss(oracle.module, x).backward()
            new.append(self._taken(subject))
        oracle.add(new, sync=False)
        self._allow(subject, 1e-6)
        self._allow_more(subject, new, 1e-6)

    def past(self, subject: Subject, kind: str, seed: int) -> bool:
        """A penalty by itself, a part of the module by itself, or a shallow clone."""
        if kind == "squares":
            self._past(subject, lambda module, _: self._squares(module), seed)
        elif kind == "part":
            if not any(type(m) is nn.Linear for m in subject.module.modules()):
                return False
            self._past(subject, lambda m, x: mean_square(next(p for p in m.modules() if type(p) is nn.Linear), x), seed)
        elif subject.trial.precision.buffer_dtype is not None:
            return False
        else:
            self._past(subject, lambda m, x: mean_square(copy.copy(m) if kind == "copy" else cloned(m), x), seed)
        return True

    def second(self, subject: Subject, kind: str, sync: bool, seed: int) -> bool:
        """A step of another wrapper that shares a layer, "alone" or in one backward with the last forward that waits."""
        name = subject.part
        if name is None or (subject.second is None and not self._share(subject, name)):
            return False
        inputs, oracle = self._inputs(seed), subject.oracle
        with contextlib.nullcontext() if sync else subject.second.no_sync():
            loss = mean_square(subject.second, inputs[self.rank.index])
        if not loss.requires_grad:
            return False
        joint = kind == "joint" and bool(subject.waiting) and subject.waiting[-1].sync == sync and not subject.waiting[-1].stale
        (loss + subject.waiting[-1].loss if joint else loss).backward()
        new, part = [], oracle.module.get_submodule(name)
        for index, x in enumerate(inputs):
            with oracle.low_precision(index):
                mean_square(Call(part, oracle.dtype), x).backward()
            new.append(self._taken(subject))
        if joint:
            self._oracle_backward(subject, [subject.waiting.pop()], False, new)
        else:
            self.backwards += 1
            oracle.add(new, sync, [n for n in subject.names if oracle.module.get_parameter(n) in set(part.parameters())])
        self._allow(subject, 4 * torch.finfo(oracle.reduce_dtype if sync else F32).eps)
        self._allow_more(subject, new, 4 * torch.finfo(oracle.reduce_dtype if sync else F32).eps)
        return True

    @staticmethod
    def _share(subject: Subject, name: str) -> bool:
        """Wraps a layer once more."""
        part = subject.module.get_submodule(name)
        if not all(p.requires_grad for p in part.parameters()):
            return False
        ddp = DistributedDataParallel(nn.Sequential(part))  # writes parameters: those of rank 0 are everybody's
        options = ddp_mp.Options(**OPTIONS[subject.options])
        subject.second = ddp_mp.patch(ddp, mixed_precision=subject.trial.precision, options=options)
        subject.written(visible=True)
        return True

    def alone(self, subject: Subject, unpatch: bool) -> bool:
        """The other wrapper is gone."""
        if subject.second is None:
            return False
        if unpatch:
            ddp_mp.unpatch(subject.second)
        subject.second = None
        return True

    def toggle(self, subject: Subject, index: int, mode: str, seed: int) -> None:
        """A parameter, or all, are frozen for an evaluation; forwards that wait are not concerned."""
        params = [p for p in subject.module.parameters() if p.requires_grad]
        chosen = params if index == 0 else [params[index % len(params)]]
        for param in chosen:
            param.requires_grad_(False)
        self.evaluate(subject, mode, seed)
        for param in chosen:
            param.requires_grad_(True)

    def drop(self, subject: Subject) -> bool:
        """Losses that nobody wants."""
        done = bool(subject.waiting)
        subject.drop()
        return done

    def autograd_grad(self, subject: Subject) -> bool:
        """``torch.autograd.grad`` leaves every ``.grad`` alone, and the graph waits on."""
        if not subject.waiting or subject.waiting[-1].stale:
            return False
        params = [p for p in subject.module.parameters() if p.requires_grad]
        torch.autograd.grad(subject.waiting[-1].loss, params, retain_graph=True, allow_unused=True)
        return True

    def evaluate(self, subject: Subject, mode: str, seed: int) -> None:
        """A forward without a backward."""
        inputs = self._inputs(seed)
        subject.ddp.eval()
        subject.oracle.module.eval()
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": contextlib.nullcontext}[mode]
        self._broadcast(subject)
        subject.broadcasts = mode == "grad"
        with context():
            output = subject.ddp(inputs[self.rank.index])
        due = self._oracle_forward(subject, "output", inputs)
        if subject.name != "attention":  # it takes another way without gradients
            require("output", output, due[self.rank.index])
        subject.ddp.train()
        subject.oracle.module.train()
        subject.casts = None

    def fail_forward(self, subject: Subject, where: str, grad: bool, seed: int) -> None:
        """A hook of the user raises in a forward."""
        module, inputs = subject.module, self._inputs(seed)
        handle = module.register_forward_pre_hook(no_luck) if where == "pre" else module.register_forward_hook(no_luck)
        self._broadcast(subject)
        try:
            with torch.set_grad_enabled(grad):
                subject.ddp(inputs[self.rank.index])
            raise AssertionError("no error")
        except Luck:
            pass
        finally:
            handle.remove()
        if where == "post":
            self._oracle_forward(subject, "output", inputs)  # for its buffers
        subject.casts = None

    def fail_backward(self, subject: Subject, index: int, seed: int) -> bool:
        """A hook of the user raises in a backward, on every rank; gradients are as before it."""
        params = [p for p in subject.module.parameters() if p.requires_grad and p.numel()]
        inputs = self._inputs(seed)
        self._broadcast(subject)
        subject.broadcasts = True
        handle = params[index % len(params)].register_hook(no_luck)
        loss = mean_square(subject.ddp, inputs[self.rank.index])
        try:
            loss.backward()
            raise AssertionError("no error")
        except Luck:
            pass
        finally:
            handle.remove()
        self._oracle_forward(subject, "output", inputs)
        subject.casts = None
        return True

    # --- gradients and optimizers ------------------------------------------------------------------------------------

    def zero_grad(self, subject: Subject, whose: str, to_none: bool) -> None:
        owner = {"wrapper": subject.ddp, "module": subject.module, "optimizer": subject.ours}[whose]
        owner.zero_grad(set_to_none=to_none)
        if to_none:
            subject.oracle.zero_grad()
        else:
            subject.oracle.zero_grad_in_place()

    def step(self, subject: Subject) -> bool:
        """An optimizer step, where all ranks have the same gradients."""
        if subject.local:
            return False
        subject.new_epoch()
        subject.trial.oracle_step(subject.theirs)  # first: after any step, forwards need not share leaves with earlier ones
        subject.ours.step()
        subject.written(visible=subject.optimizer != "fused")
        for other in self.subjects.values():
            if not OPTIONS[other.options].get("reuse_unchanged"):
                other.new_epoch()  # no promise that a step of any optimizer has left its weights alone
        return True

    def step_inside(self, subject: Subject, sync: bool, seed: int) -> bool:
        """A forward that begins with an optimizer step, and waits for its backward."""
        if subject.local:
            return False
        handle = subject.module.register_forward_pre_hook(lambda *_: self.step(subject) and None)
        try:
            return self.forward(subject, "one", sync, seed)
        finally:
            handle.remove()

    def clip(self, subject: Subject, norm: float) -> None:
        """``clip_grad_norm_`` of what each rank has."""
        torch.nn.utils.clip_grad_norm_(subject.module.parameters(), norm)
        self._allow(subject, 1e-5)
        for grads in subject.oracle.grads:
            present = [g for g in grads.values() if g is not None]
            if present:
                factor = norm / (torch.stack([g.norm() for g in present]).norm() + 1e-6)
                grads.update({n: None if g is None else g * factor.clamp(max=1.0) for n, g in grads.items()})

    def set_grad(self, subject: Subject, index: int, seed: int) -> bool:
        """A full-precision gradient put there by hand, another one on every rank."""
        name = subject.names[index % len(subject.names)]
        ours, theirs = subject.both(name)
        if not ours.requires_grad:
            return False  # whether it is reduced is nobody's promise
        values = self.rank.inputs(lambda: torch.randn(theirs.shape), seed)
        with ddp_mp.full_precision(subject.ddp):
            ours.grad = values[self.rank.index].clone()
        for grads, value in zip(subject.oracle.grads, values, strict=True):
            grads[name] = value
        return True

    def freeze(self, subject: Subject, index: int, frozen: bool) -> bool:
        """``requires_grad`` of one parameter changes; one stays trainable."""
        names = subject.names
        name = names[index % len(names)]
        if frozen and (name == names[0] or not subject.same_everywhere(name)):
            return False
        subject.drop()
        for param in subject.both(name):
            param.requires_grad_(not frozen)
        if frozen:  # whether what clipping makes of a gradient that stays is reduced is nobody's promise
            subject.module.get_parameter(name).grad = None
            for grads in subject.oracle.grads:
                grads[name] = None
        return True

    # --- parameters --------------------------------------------------------------------------------------------------

    def _new_values(self, subject: Subject, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return {n: torch.randn(p.shape) / 2 for n, p in subject.oracle.module.named_parameters()}

    def write(self, subject: Subject, index: int, way: str) -> None:
        """A parameter is written in place, in a way that PyTorch sees or not; or gets other memory."""
        names = subject.names
        ours, theirs = subject.both(names[index % len(names)])
        shown = contextlib.nullcontext() if way == "bare" else ddp_mp.full_precision(subject.ddp)
        visible = way in ("visible", "bare")
        with shown, torch.no_grad():
            if visible:
                ours.mul_(0.75)
            elif way == "unseen":
                ours.data.mul_(0.75)
            else:
                ours.data = ours.data * 0.75
        if way == "data":
            theirs.data = theirs.data * 0.75
        else:
            theirs.data.mul_(0.75)
        if not visible:
            for ddp in (subject.ddp, subject.second):
                if ddp is not None:
                    ddp_mp.masters_changed(ddp)
        subject.written(visible=visible)

    def replace(self, subject: Subject, index: int, seed: int) -> None:
        """Another parameter object, wherever the old one was; its layout is the oracle's too: sums have the same order."""
        subject.drop()
        names = subject.names
        name = names[index % len(names)]
        old, theirs = subject.both(name)
        new = nn.Parameter(self._new_values(subject, seed)[name], requires_grad=old.requires_grad)
        theirs.data = new.data.clone()
        for inner in subject.module.modules():
            for key in [k for k, p in inner._parameters.items() if p is old]:
                setattr(inner, key, new)
        for grads in subject.oracle.grads:
            grads[name] = None
        subject.halved.pop(name, None)
        subject.new_optimizers()

    def load(self, subject: Subject, way: str, seed: int) -> bool:
        """``load_state_dict``: into the memory, or with other objects."""
        if way == "assign" and SPECS[subject.name].tied:
            return False
        values = self._new_values(subject, seed)
        state = {k: v.clone() for k, v in subject.module.state_dict().items()}
        state.update({key: values[name].clone() for key, name in self._keys(subject).items()})
        if way == "assign":
            subject.drop()
            subject.ddp.zero_grad()
            subject.oracle.zero_grad()
        subject.module.load_state_dict(state, assign=way == "assign")
        for name, param in subject.oracle.module.named_parameters():
            if way == "assign":
                param.data = values[name].clone()
            else:
                param.data.copy_(values[name])
        subject.written(visible=True)
        if way == "assign":
            subject.halved.clear()
            subject.new_optimizers()
        return True

    @staticmethod
    def _keys(subject: Subject) -> dict[str, str]:
        """Keys of a state dict, and the parameter's name: a tied weight has several keys."""
        name_of = {id(p): name for name, p in subject.module.named_parameters()}
        return {key: name_of[id(p)] for key, p in subject.module.named_parameters(remove_duplicate=False)}

    def save(self, subject: Subject, how: str) -> None:
        """What is saved or copied holds masters, and training goes on."""
        if how == "state_dict":
            found = dict(subject.module.state_dict())
        elif how == "full_precision":
            with ddp_mp.full_precision(subject.ddp):
                found = {n: p.detach().clone() for n, p in subject.module.named_parameters()}
        else:
            made = copy.deepcopy(subject.ddp if how == "wrapper" else subject.module)
            assert not ddp_mp.is_patched(made)
            found = {n.removeprefix("module."): p for n, p in made.named_parameters()}
        for key, name in self._keys(subject).items():
            if key in found:
                require(f"saved {key}", found[key], subject.oracle.module.get_parameter(name))
        assert set(subject.names) <= set(found)

    # --- patching ----------------------------------------------------------------------------------------------------

    def unpatch(self, subject: Subject, options: str, seed: int) -> bool:
        """A step of plain full-precision DistributedDataParallel, then the model is patched again with other options."""
        precision = subject.trial.precision
        if subject.how != "later" or precision.buffer_dtype is not None:
            return False
        subject.drop()
        ddp_mp.unpatch(subject.ddp)
        if SPECS[subject.name].unused:  # PyTorch leaves what ranks hold of a weight that the step uses nowhere
            subject.ddp.zero_grad()
            subject.oracle.zero_grad()
        oracle, inputs = subject.oracle, self._inputs(seed)
        reduce, oracle.reduce_dtype = oracle.reduce_dtype, F32
        self._broadcast(subject)
        subject.broadcasts = True
        mean_square(subject.ddp, inputs[self.rank.index]).backward()
        due = self._oracle_forward(subject, "full", inputs)
        held = [dict(grads) for grads in oracle.grads]
        self._oracle_backward(subject, [Waiting(due[0], due, subject.masters(), True, 0, 0)], retain=False)
        self._allow(subject, 1e-5)
        self._allow_more(subject, held, 1e-5)
        oracle.reduce_dtype, subject.casts = reduce, None
        ddp_mp.patch(subject.ddp, mixed_precision=precision, options=ddp_mp.Options(**OPTIONS[options]))
        subject.options = options
        return True


#: Every action but "forward" needs no more than the model that it is done to, and these choices.
ACTIONS: dict[str, dict[str, list[Any]]] = {
    "forward": {"kind": ["one", "two", "local", "penalty", "full"], "sync": [True, False], "seed": list(range(8))},
    "backward": {"which": ["last", "first", "all"], "retain": [False, True]},
    "together": {},
    "drop": {},
    "zero_grad": {"whose": ["wrapper", "module", "optimizer"], "to_none": [True, False]},
    "step": {},
    "step_inside": {"sync": [True, False], "seed": list(range(8))},
    "clip": {"norm": [0.125, 100.0]},
    "set_grad": {"index": list(range(4)), "seed": list(range(8))},
    "evaluate": {"mode": ["no_grad", "inference", "grad"], "seed": list(range(8))},
    "past": {"kind": ["squares", "part", "copy", "clone"], "seed": list(range(8))},
    "second": {"kind": ["alone", "joint"], "sync": [True, False], "seed": list(range(8))},
    "alone": {"unpatch": [True, False]},
    "toggle": {"index": list(range(4)), "mode": ["no_grad", "grad"], "seed": list(range(8))},
    "hook": {"index": list(range(4))},
    "autograd_grad": {},
    "save": {"how": ["state_dict", "full_precision", "module", "wrapper"]},
    "load": {"way": ["copy", "assign"], "seed": list(range(8))},
    "write": {"index": list(range(4)), "way": ["visible", "bare", "unseen", "data"]},
    "replace": {"index": list(range(4)), "seed": list(range(8))},
    "freeze": {"index": list(range(6)), "frozen": [True, False]},
    "fail_forward": {"where": ["pre", "post"], "grad": [True, False], "seed": list(range(8))},
    "fail_backward": {"index": list(range(6)), "seed": list(range(8))},
    "unpatch": {"options": list(OPTIONS), "seed": list(range(8))},
}
#: How a model is built.
BUILDS: dict[str, list[Any]] = {
    "name": list(SPECS),
    "precision": list(PRECISIONS),
    "options": list(OPTIONS),
    "how": ["later", "patch", "install"],
    "optimizer": list(OPTIMIZERS),
    "small": [False, True],
    "views": [False, True],
    "seed": list(range(8)),
}


def halve(grad: torch.Tensor) -> torch.Tensor:
    """A hook of the user."""
    return grad / 2


def cloned(module: nn.Module) -> nn.Module:
    """A shallow clone, whose parameters are computed from the module's."""
    made = module.__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    made._parameters = {key: None if p is None else p.clone() for key, p in module._parameters.items()}
    made._modules = {key: None if m is None else cloned(m) for key, m in module._modules.items()}
    return made


def _present(grad: torch.Tensor | None) -> bool:
    return grad is not None and grad.numel() > 0


def _goes_through(loss: torch.Tensor, retain: bool, stale: bool) -> bool:
    """Does the backward; False where autograd refuses, as it may when parameters were written since the forward."""
    try:
        loss.backward(retain_graph=retain)
    except RuntimeError as error:
        if not stale or "modified by an inplace operation" not in str(error):
            raise
        let_go_of_failed_backward()  # whoever has no loss any more can expect masters from here on
        return False
    return True


def require(what: str, got: torch.Tensor | None, due: torch.Tensor | None, slack: float = 0.0) -> None:
    assert (got is None) == (due is None), f"{what}: {'missing' if got is None else 'present'}; the opposite was due"
    if got is None or due is None:
        return
    got, due = got.detach(), due.detach()
    assert got.dtype is due.dtype, f"{what}: {got.dtype}, due {due.dtype}"
    assert got.shape == due.shape, f"{what}: shape {tuple(got.shape)}, due {tuple(due.shape)}"
    if torch.equal(got, due):
        return
    off = float((got.double() - due.double()).abs().max())
    assert off <= slack, f"{what}: off by {off:.4g}, allowed {slack:.4g}; got {got.flatten()[:4]}, due {due.flatten()[:4]}"


@contextlib.contextmanager
def note(text: str) -> Iterator[None]:
    """Errors inside say where."""
    try:
        yield
    except Exception as error:
        error.args = (f"{text}: {error}", *error.args[1:])
        raise
