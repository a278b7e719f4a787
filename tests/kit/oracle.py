"""What mixed precision under DistributedDataParallel means, computed without it.

The oracle holds full-precision masters.  A rank's gradient is that of a plain module whose parameters are
``master.to(param_dtype)``, with the cast inside autograd, so that it arrives in full precision.  The contributions of all
ranks are computed on every rank and averaged in ``reduce_dtype``.  With up to two ranks this is exact, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import ddp_mp
from kit.ranks import Rank

BF16, FP16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

#: The argument of DistributedDataParallel that leaves buffers to each rank.
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)

#: Does a forward and a backward with the model that it is given (the wrapper, or the oracle's stand-in for it).
Step = Callable[[Any, Any], None]


def patched(module: nn.Module, **more: Any) -> DistributedDataParallel:
    """The module wrapped, and patched to compute in bfloat16 and reduce in float32; ``more`` is for the wrapper."""
    return ddp_mp.patch(DistributedDataParallel(module, **more), mixed_precision=ddp_mp.MixedPrecision(BF16, F32))


def mean_square(call: Any, inputs: Any) -> torch.Tensor:
    """A loss that every output takes part in."""
    output = call(*inputs) if isinstance(inputs, tuple) else call(inputs)
    return output.float().pow(2).mean()


def square_step(call: Any, inputs: Any) -> None:
    """The step that most tests do."""
    mean_square(call, inputs).backward()


def step_of(loss: Callable[[Any, Any], torch.Tensor]) -> Step:
    """One backward of a loss."""
    return lambda call, inputs: loss(call, inputs).backward()


def cast_inputs(value: Any, dtype: torch.dtype | None, known: dict[int, torch.Tensor] | None = None) -> Any:
    """Floating-point tensors of nested inputs in another type, as DistributedDataParallel hands them on.

    With ``known`` a tensor that occurs twice is cast once.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value
        return value.to(dtype) if known is None else known.setdefault(id(value), value.to(dtype))
    if isinstance(value, dict):
        return {key: cast_inputs(item, dtype, known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(cast_inputs(item, dtype, known) for item in value)
    return value


def require_same(what: str, got: torch.Tensor | None, want: torch.Tensor | None, tolerance: float = 0.0) -> None:
    """Raises AssertionError that says what differs: presence, type, shape or values (bit for bit without a tolerance).

    ``tolerance`` is relative to the largest value.
    """
    assert (got is None) == (want is None), f"{what}: {'missing' if got is None else 'present'}; the opposite was due"
    if got is None or want is None:
        return
    assert got.dtype is want.dtype, f"{what}: {got.dtype}, due {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, due {tuple(want.shape)}"
    got, want = got.detach(), want.detach()
    if got.is_sparse:
        got = got.to_dense()
    same = torch.equal(got, want)
    if tolerance and not same:
        same = bool((got - want).abs().max() <= tolerance * want.abs().max())
    assert same, f"{what}: differs by {(got - want).abs().max().item():.4g}, got {got.flatten()[:4]}, due {want.flatten()[:4]}"


class Call:
    """What stands in for the wrapper where the oracle computes: a callable with the wrapped module."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype | None,
        output_dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.module, self._dtype, self._output_dtype, self._autocast = module, dtype, output_dtype, autocast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._dtype is not None:
            args, kwargs = cast_inputs(args, self._dtype), cast_inputs(kwargs, self._dtype)
        around = contextlib.nullcontext() if self._autocast is None else torch.autocast("cpu", self._autocast)
        with around:
            output = self.module(*args, **kwargs)
        return output if self._output_dtype is None else cast_inputs(output, self._output_dtype)


class Oracle:
    """Masters and expected gradients of all ranks.

    Args:
        module: copied; its parameters are the masters.
        ranks: how many ranks there are.
        precision: param_dtype and reduce_dtype as in DistributedDataParallel.
        broadcast_buffers: whether every forward begins with rank 0's buffers.
        full: names of modules that compute in float32, with casts around them.
        silent: those of ``full`` without a cast of their outputs.
        output_dtype: what outputs are cast to.
        autocast: whether the module runs in autocast of param_dtype.
        cast_inputs: whether inputs are cast.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: int,
        precision: ddp_mp.MixedPrecision,
        broadcast_buffers: bool = True,
        full: Sequence[str] = (),
        silent: Sequence[str] = (),
        output_dtype: torch.dtype | None = None,
        autocast: bool = False,
        cast_inputs: bool = True,
    ) -> None:
        self.module = copy.deepcopy(module)
        self.autocast = precision.param_dtype if autocast else None
        self.input_dtype = precision.param_dtype if cast_inputs and not autocast else None
        self.ranks, self.dtype = ranks, precision.param_dtype
        self.reduce_dtype = precision.reduce_dtype or precision.param_dtype
        self.output_dtype = output_dtype
        self._full: set[int] = set()  # parameters that are not cast
        self._reduce_dtype_of: dict[str, torch.dtype] = {}
        for name in full:
            self._keep(name, cast_outputs=name not in silent, reduce_dtype=precision.reduce_dtype)
        for part in self.module.modules() if autocast else ():
            if isinstance(part, (nn.LayerNorm, nn.GroupNorm, _BatchNorm)):
                self._full |= {id(param) for param in part.parameters()}
        self.broadcast_buffers = broadcast_buffers
        names = [name for name, _ in self.module.named_parameters()]
        self.grads: list[dict[str, torch.Tensor | None]] = [dict.fromkeys(names) for _ in range(ranks)]
        if precision.buffer_dtype is not None:
            for name, buffer in self.module.named_buffers():
                if buffer.is_floating_point() and not any(name.startswith(f"{part}.") for part in full):
                    buffer.data = buffer.to(precision.buffer_dtype)
        self.buffers = [{n: b.clone() for n, b in self.module.named_buffers()} for _ in range(ranks)]

    def _keep(self, name: str, cast_outputs: bool, reduce_dtype: torch.dtype | None) -> None:
        """One part computes in float32, whatever it is given; what it returns is cast."""
        part = self.module.get_submodule(name)
        forward = part.forward

        def in_float32(*args: Any, **kwargs: Any) -> Any:
            known: dict[int, torch.Tensor] = {}
            with torch.autocast("cpu", enabled=False) if self.autocast is not None else contextlib.nullcontext():
                output = forward(*cast_inputs(args, F32, known), **cast_inputs(kwargs, F32, known))
            return cast_inputs(output, self.dtype) if cast_outputs and self.dtype is not None else output

        part.forward = in_float32  # type: ignore[method-assign]
        self._full |= {id(param) for param in part.parameters()}
        for inner, param in part.named_parameters(name):
            self._reduce_dtype_of[inner] = reduce_dtype or param.dtype

    def backward(self, step: Step, inputs: Sequence[Any], sync: bool = True) -> None:
        """Every rank does ``step`` with its input; ``sync`` says whether its gradients are averaged afterwards."""
        if self.broadcast_buffers:
            self.buffers[1:] = [{n: b.clone() for n, b in self.buffers[0].items()} for _ in range(1, self.ranks)]
        self.add([self.gradients(step, inputs[rank], rank) for rank in range(self.ranks)], sync)

    def add(self, new: list[dict[str, torch.Tensor | None]], sync: bool, names: Sequence[str] | None = None) -> None:
        """What a backward leaves: its gradients of every rank are averaged with ``sync``, and otherwise accumulated.

        ``names``: of the parameters that it is about; None: of all.
        """
        for name in self.grads[0] if names is None else names:
            if sync:
                self._reduce(name, [grads[name] for grads in new])
            else:
                for rank, grads in enumerate(new):
                    self.accumulate(rank, name, grads[name])

    def gradients(self, step: Step, inputs: Any, rank: int) -> dict[str, torch.Tensor | None]:
        """One rank's gradients in full precision."""
        for param in self.module.parameters():
            param.grad = None
        with self.low_precision(rank) as call:
            step(call, inputs)
        found = {}
        for name, param in self.module.named_parameters():
            found[name], param.grad = param.grad, None
        return found

    def casts(self) -> dict[int, torch.Tensor]:
        """What the module computes with, by the id of the master; gradients go through to the masters."""
        low = {}
        for param in self.module.parameters():
            with torch.enable_grad():
                cast = self.dtype is not None and param.is_floating_point() and param.dtype is not self.dtype
                cast = cast and id(param) not in self._full
                low[id(param)] = param.to(self.dtype) if cast else param
        return low

    @contextlib.contextmanager
    def low_precision(self, rank: int = 0, low: dict[int, torch.Tensor] | None = None) -> Iterator[Call]:
        """Inside, the module computes with casts of the masters and a rank's buffers, in a backward too.

        ``low``: casts that an earlier forward used; its gradients and those of this one are summed before they are cast.
        """
        low = low or self.casts()
        sites = [(m, key, p) for m in self.module.modules() for key, p in m._parameters.items() if p is not None]
        named = dict(self.module.named_buffers())
        for name, buffer in named.items():
            buffer.data = self.buffers[rank][name]
        try:
            for module, key, param in sites:
                module._parameters[key] = low[id(param)]  # type: ignore[assignment]
            self._refer_again()
            yield Call(self.module, self.input_dtype, self.output_dtype, self.autocast)
        finally:
            for module, key, param in sites:
                module._parameters[key] = param
            self._refer_again()
            for name, buffer in self.module.named_buffers():
                self.buffers[rank][name] = buffer.data

    def _refer_again(self) -> None:
        for module in self.module.modules():
            if isinstance(module, nn.RNNBase):  # keeps a list of its parameters beside them
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]

    def _reduce(self, name: str, new: list[torch.Tensor | None]) -> None:
        parts = [sum_of(grad, self.grads[rank][name]) for rank, grad in enumerate(new)]  # all of it, as in plain DDP
        if all(part is None for part in parts):
            return
        total: torch.Tensor | None = None
        for part in parts:
            if part is not None:
                reduce_dtype = self._reduce_dtype_of.get(name, self.reduce_dtype) or part.dtype
                part = (part / self.ranks).to(part.dtype if part.is_complex() else reduce_dtype)
                total = part if total is None else total + part
        assert total is not None
        master = self.module.get_parameter(name).dtype
        for grads in self.grads:
            grads[name] = total.to(master)

    def accumulate(self, rank: int, name: str, grad: torch.Tensor | None) -> None:
        """A gradient of one rank, without a reduction."""
        if grad is None:
            return
        self.grads[rank][name] = sum_of(self.grads[rank][name], grad)

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for of_rank in self.grads:
            of_rank.update(dict.fromkeys(of_rank))

    def zero_grad_in_place(self) -> None:
        """Keeps gradients that are there, as zeros."""
        for grads in self.grads:
            grads.update({name: None if g is None else torch.zeros_like(g) for name, g in grads.items()})


def sum_of(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Of two gradients, either of which may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


class Trial:
    """A patched model and its oracle, trained side by side.

    Args:
        rank: the rank that this is.
        module: what is wrapped.
        precision: bfloat16 with a float32 reduction unless given.
        how: ``"patch"`` patches the wrapper, ``"install"`` builds it under ``ddp_mp.install()``, ``"later"`` builds it without
            mixed precision and gives it that with ``patch``.
        options: fields of ``ddp_mp.Options``.
        exact: False where low-precision gradients may be summed in another order than the oracle's.
        full: names of the outermost modules that ``options`` keeps in full precision.
        silent: those of them whose outputs are not cast.
        wrapping: arguments of ``DistributedDataParallel``.
    """

    def __init__(
        self,
        rank: Rank,
        module: nn.Module,
        precision: ddp_mp.MixedPrecision | None = None,
        how: str = "patch",
        options: dict[str, Any] | None = None,
        exact: bool = True,
        full: Sequence[str] = (),
        silent: Sequence[str] = (),
        **wrapping: Any,
    ) -> None:
        self.rank, self.module = rank, module
        self.precision = precision or ddp_mp.MixedPrecision(BF16, F32)
        reduced = self.precision.reduce_dtype or self.precision.param_dtype or F32
        self.tolerance = 0.0 if exact and rank.size <= 2 else 4 * max(torch.finfo(reduced).eps, torch.finfo(F32).eps)
        chosen = ddp_mp.Options(**(options or {}))
        self.oracle = Oracle(
            module,
            rank.size,
            self.precision,
            SYNC_BUFFERS not in wrapping,
            full,
            silent,
            chosen.output_dtype,
            chosen.autocast,
            chosen.cast_forward_inputs,
        )
        self.ddp = self._wrap(how, chosen, wrapping)

    def _wrap(self, how: str, options: ddp_mp.Options, wrapping: dict[str, Any]) -> DistributedDataParallel:
        if how == "install":
            with ddp_mp.install(options):
                return DistributedDataParallel(self.module, mixed_precision=self.precision, **wrapping)
        if how == "later":
            ddp = DistributedDataParallel(self.module, **wrapping)
            return ddp_mp.patch(ddp, mixed_precision=self.precision, options=options)
        assert how == "patch", how
        ddp = DistributedDataParallel(self.module, mixed_precision=self.precision, **wrapping)
        return ddp_mp.patch(ddp, options=options)

    def backward(self, step: Step, inputs: Sequence[Any], sync: bool = True) -> None:
        """The same step on both sides; without ``sync`` inside ``no_sync()``."""
        with contextlib.nullcontext() if sync else self.ddp.no_sync():
            step(self.ddp, inputs[self.rank.index])
        self.oracle.backward(step, inputs, sync)

    def check(self) -> None:
        """Parameters are masters with the oracle's values, and gradients are those of this rank.

        What is allowed to differ is made equal afterwards, so that differences do not grow.
        """
        expected = dict(self.oracle.module.named_parameters())
        grads = self.oracle.grads[self.rank.index]
        for name, param in self.module.named_parameters():
            require_same(f"master {name}", param, expected[name], self.tolerance)
            require_same(f"gradient of {name}", param.grad, grads[name], self.tolerance)
            expected[name].data.copy_(param.data)

    def zero_grad(self) -> None:
        """Clears gradients on both sides."""
        self.ddp.zero_grad()
        self.oracle.zero_grad()

    def train(
        self,
        make_input: Callable[[], Any],
        steps: int = 3,
        step: Step = square_step,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        accumulate: int = 1,
        set_to_none: bool = True,
        seed: int = 0,
    ) -> Trial:
        """Trains both sides, and compares after every backward and every optimizer step."""
        make = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1))
        ours = make([p for p in self.module.parameters() if p.requires_grad])
        theirs = make([p for p in self.oracle.module.parameters() if p.requires_grad])
        for number in range(steps):
            for micro in range(accumulate):
                inputs = self.rank.inputs(make_input, seed + number * accumulate + micro)
                self.backward(step, inputs, sync=micro == accumulate - 1)
                self.check()
            ours.step()
            self.oracle_step(theirs)
            ours.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                self.oracle.zero_grad()
            else:
                self.oracle.zero_grad_in_place()
            self.check()
        return self

    def oracle_step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of the oracle's optimizer with the expected gradients."""
        params = dict(self.oracle.module.named_parameters())
        for name, param in params.items():
            grad = self.oracle.grads[self.rank.index][name]
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
        for param in params.values():
            param.grad = None
