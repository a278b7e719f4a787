"""What a user chooses: the precisions and the options, validated where they are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

#: Element types that parameters, gradients and buffers can be cast to.
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class MixedPrecision(_MixedPrecision):
    """The three precisions of a model, accepted wherever PyTorch's own ``_MixedPrecision`` is.

    Args:
        param_dtype: floating type that forward and backward compute in; ``None``: parameters are not cast.
        reduce_dtype: floating type that gradients are reduced in; ``None``: ``param_dtype``, or each parameter's own type
            when that is ``None`` too (as in FSDP2's policy).
        buffer_dtype: floating type of floating-point buffers; ``None``: buffers are left alone.  Integer, boolean and
            complex buffers are always left alone.

    Raises:
        TypeError: a field is neither a ``torch.dtype`` nor ``None``.
        ValueError: a field is not one of float64, float32, bfloat16, float16.
    """

    def __init__(
        self,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype)
        validate_precision(self)


def validate_precision(precision: _MixedPrecision) -> _MixedPrecision:
    """Returns its argument when every field names a type that can be cast to; raises as :class:`MixedPrecision` does."""
    if not isinstance(precision, _MixedPrecision):
        raise TypeError(
            f"mixed_precision: expected ddp_mp.MixedPrecision or PyTorch's _MixedPrecision, found {kind_of(precision)}; write "
            "ddp_mp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        _check_dtype(field, getattr(precision, field))
    return precision


@dataclass(frozen=True)
class Options:
    """How the casts are done.

    The defaults are right for every model that can compute in ``param_dtype`` throughout.  Where an option needs a promise of
    yours, it says so.

    Attributes:
        hooks: ``"all"`` replaces PyTorch's three mixed-precision hooks; ``"root"`` replaces only the root hook that casts
            the parameters, and leaves PyTorch's wait hook and communication hook at work on top of it, with their defects.
        wait: ``"root"`` lets the current stream wait for all casts where the root module's forward starts: right for every
            model.  ``"module"`` is a promise that no parameter is used before its module is called, and that a module
            called in the first forward is called in every later one that uses its parameters.  It waits for the first
            bucket at the root and for later buckets where the modules that own their parameters are called, so that
            casts overlap the first layers; parameters of modules not called in the first forward (attention's output
            projection, weights of functional calls) are waited for at the root.
        first_bucket_mb: size of the first cast bucket in MiB of low-precision memory, small so that the first layers start
            early.
        bucket_mb: size of the later cast buckets in MiB.
        prefetch: masters are cast right after an optimizer step that covers the model, so that the next forward finds its
            leaves ready.  The leaves' memory is held between steps.  After a write between step and forward that PyTorch can
            see (another address, a version counter, loading a state dict, another step) the forward casts again; after one
            that it cannot see (``.data``, raw memory) call :func:`ddp_mp.masters_changed`.
        reuse_unchanged: a promise that masters change in no other way than optimizer steps, loading, and writes that
            PyTorch can see or :func:`ddp_mp.masters_changed` announces.  Leaves then stay in memory between forwards, and
            gradient accumulation and evaluation cast only once.
        full_precision_modules: modules that compute in full precision, with everything inside them: module types, or patterns
            of ``fnmatch`` for names as ``named_modules()`` gives them for the wrapped module (``"lm_head"``, ``"*.norm*"``).
            Their parameters are not cast, ``buffer_dtype`` does not touch their buffers, and with ``reduce_dtype=None`` their
            gradients are reduced in their own type.  At the border of the outermost of them floating-point inputs are cast
            to the module's own type (the widest of its parameters, float32 without any), outputs to ``param_dtype``; wider
            tensors and all others pass as they are.  Inputs of the whole model are cast to ``param_dtype`` before that,
            unless ``cast_forward_inputs`` or ``autocast`` says otherwise.  An entry that matches nothing is an error, as is a
            weight that is shared with a module outside.  A functional use of such a weight outside its module meets two
            types.
        full_precision_outputs: those of ``full_precision_modules``, as types or patterns, whose outputs are not cast: a head
            whose logits, or a router whose scores, are to stay in full precision.
        output_dtype: floating-point tensors in what the wrapped module returns are cast to this type, inside tuples, lists,
            mappings, sets and dataclasses too; ``None``: outputs are left alone (as in FSDP2's policy).
        cast_forward_inputs: whether floating-point inputs of the wrapped module are cast to ``param_dtype``, inside the same
            containers.  False leaves them alone: time steps, targets and masks then arrive as they are given, and the module
            casts what it computes with.
        autocast: whether forward, and what a checkpoint computes again, runs in ``torch.autocast`` of ``param_dtype``,
            whether the wrapper or the bare module is called.  Inputs are not cast then, operations that need it compute in
            float32 (norms, softmax, losses), and mixed types promote.  Weights are low precision already, so that autocast
            casts none; those of normalisations stay in full precision, as autocast leaves them.  It is the way to run a model
            that was not written to compute in ``param_dtype`` throughout.  It is off inside ``full_precision_modules``.
        agree_seconds: how long a rank waits, before the first reduction after a patch or of a new plan, for ranks that have not
            said the same as it has; then it raises an error that names one and what differs.  Ranks that have are not waited
            for.

    Raises:
        TypeError: a field is of another type.
        ValueError: a field has a value that is none of its choices; or ``full_precision_outputs`` without
            ``full_precision_modules``.  What does not fit the model or its precisions is said by :func:`patch`.
    """

    hooks: Literal["all", "root"] = "all"
    wait: Literal["root", "module"] = "root"
    first_bucket_mb: float = 1.0
    bucket_mb: float = 25.0
    prefetch: bool = False
    reuse_unchanged: bool = False
    full_precision_modules: tuple[type[nn.Module] | str, ...] = ()
    full_precision_outputs: tuple[type[nn.Module] | str, ...] = ()
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    autocast: bool = False
    agree_seconds: float = 60.0

    def __post_init__(self) -> None:
        _check_choice("hooks", self.hooks, ("all", "root"))
        _check_choice("wait", self.wait, ("root", "module"))
        _check_flag("prefetch", self.prefetch)
        _check_flag("reuse_unchanged", self.reuse_unchanged)
        _check_flag("cast_forward_inputs", self.cast_forward_inputs)
        _check_flag("autocast", self.autocast)
        _check_positive("first_bucket_mb", self.first_bucket_mb, "MiB")
        _check_positive("bucket_mb", self.bucket_mb, "MiB")
        _check_positive("agree_seconds", self.agree_seconds, "seconds")
        for field in ("full_precision_modules", "full_precision_outputs"):
            object.__setattr__(self, field, _modules(field, getattr(self, field)))
        if self.full_precision_outputs and not self.full_precision_modules:
            raise ValueError("Options.full_precision_outputs: names some of full_precision_modules, which is empty")
        _check_dtype("Options.output_dtype", self.output_dtype)

    @property
    def first_bucket_bytes(self) -> int:
        """``first_bucket_mb`` in bytes, at least 1."""
        return max(1, int(self.first_bucket_mb * 2**20))

    @property
    def bucket_bytes(self) -> int:
        """``bucket_mb`` in bytes, at least 1."""
        return max(1, int(self.bucket_mb * 2**20))


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Options.{field}: expected one of {', '.join(map(repr, choices))}, found {value!r}")


def _check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"Options.{field}: expected True or False, found {value!r}")


def _check_positive(field: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Options.{field}: expected a number of {unit}, found {value!r}")
    if not 0 < value < 2**40:
        raise ValueError(f"Options.{field}: expected a positive finite number of {unit}, found {value!r}")


def _check_dtype(field: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{field}: expected a torch.dtype or None, found {value!r}")
    if value not in FLOATING:
        raise ValueError(f"{field}: expected float64, float32, bfloat16, float16 or None, found {value}")


def _modules(field: str, value: object) -> tuple[type[nn.Module] | str, ...]:
    if not isinstance(value, (tuple, list)):
        shown = value.__name__ if isinstance(value, type) else repr(value)
        found = f"found {shown}" + (f"; write ({shown},)" if isinstance(value, (str, type)) else "")
        raise TypeError(f"Options.{field}: expected a tuple of module types and name patterns, {found}")
    entries = tuple(value)
    for entry in entries:
        if isinstance(entry, nn.Module):
            raise TypeError(
                f"Options.{field}: expected a module type or a name pattern, found a module of type {kind_of(entry)}; give its "
                "type, or its name as named_modules() gives it"
            )
        if not (isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module))):
            raise TypeError(f"Options.{field}: expected a module type or a name pattern, found {entry!r}")
    return entries


def kind_of(value: object) -> str:
    """What an error says was found: the type with its module, as several libraries have classes of the same name."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
