"""``patch`` and ``unpatch``: give a ``DistributedDataParallel`` model our hooks, and take them away again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from . import agreement
from . import ddp as native
from .autocast import LOW
from .guards import owners
from .hooks import is_called
from .log import logger
from .model import PatchedModel, log_plan, model_of
from .options import Options, kind_of, validate_precision
from .parameters import cast_buffers
from .root import RootModel, root_of

DDP = TypeVar("DDP", bound=DistributedDataParallel)


def patch(ddp: DDP, *more: NoReturn, mixed_precision: _MixedPrecision | None = None, options: Options | None = None) -> DDP:
    """Gives ``ddp`` correct mixed precision, in place.

    Args:
        ddp: a ``DistributedDataParallel`` model, at any time: new, between iterations, with or without ``mixed_precision=``.
            This function and all others also accept what ``torch.compile`` made of it.
        mixed_precision: the precisions, for a model that was built without them or should get others.
        options: see :class:`Options`.

    Returns:
        Its argument.  A model that is patched already, with the same arguments or none, is left as it is.

    A copy of a patched model, as ``copy.deepcopy(ddp)`` or ``AveragedModel(ddp)`` makes one, is an ordinary full-precision
    model: patch it if it is to be trained.

    No collective is run, so ranks need not call it together, but all ranks must patch before they train, each the wrappers of
    a process group in the same order.  Before the first reduction they compare what they were patched with.  Gradients,
    optimizer state and parameter objects stay as they are.  Two threads must not patch one model at the same time.

    Raises:
        TypeError: ``ddp`` is not a ``DistributedDataParallel`` model, or an argument is of another type.
        ValueError: the model has no mixed precision and none was given; nothing is asked for; options do not fit the model; or
            it is patched with other arguments.
        RuntimeError: the model uses something that does not work with ddp_mp; the message says what, and what to do.  Or a
            forward is under way.  The backward of a forward from before is reduced, in full precision.

    Example::

        ddp = DistributedDataParallel(module)
        ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32))
    """
    given, ddp = ddp, native.uncompiled(ddp)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp_mp.patch: expected a DistributedDataParallel model, found {kind_of(ddp)}; wrap the model first, and give "
            "what DistributedDataParallel(model) returns"
        )
    if more:
        raise TypeError(
            "ddp_mp.patch: only the model is given by position; write ddp_mp.patch(ddp, mixed_precision=..., options=...)"
        )
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"ddp_mp.patch: options: expected ddp_mp.Options, found {kind_of(options)}")
    present = _patched(ddp)
    if present is not None:
        _require_same(present, mixed_precision, options)
        return given
    precision = mixed_precision if mixed_precision is not None else ddp.mixed_precision
    if precision is None:
        raise ValueError(
            "ddp_mp.patch: this model has no mixed precision. Either build it with DistributedDataParallel(..., "
            "mixed_precision=ddp_mp.MixedPrecision(...)), or call ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(...))"
        )
    chosen = options or Options()
    _require_something(validate_precision(precision), chosen)
    _require_autocast_type(precision, chosen)
    native.refuse_unsupported(ddp)
    _require_idle("ddp_mp.patch", is_called(ddp.module))
    _warn_of_idle_options(precision, chosen)
    with _taking_over(ddp):
        if chosen.hooks == "root":
            with torch.inference_mode(False):  # as in _equip_again
                RootModel.install(ddp, precision, chosen)
            agreement.say(ddp, ddp.process_group, {"options": agreement.of_options(precision, chosen)}, by_pytorch=True)
            logger.info("patched the root hook of %s: %s, %s", type(ddp.module).__name__, precision, chosen)
        else:
            _patch_all(ddp, precision, chosen)
    return given


def _require_something(precision: _MixedPrecision, options: Options) -> None:
    if options.output_dtype is None and all(dtype is None for dtype in _fields(precision)):
        raise ValueError(
            "ddp_mp.patch: nothing is to be done: param_dtype, reduce_dtype and buffer_dtype of the mixed precision are all "
            "None; give at least one of them, for example ddp_mp.MixedPrecision(param_dtype=torch.bfloat16), or leave the "
            "model unpatched"
        )


def _require_autocast_type(precision: _MixedPrecision, options: Options) -> None:
    if options.autocast and precision.param_dtype not in (*LOW, None):
        raise ValueError(
            f"Options.autocast: torch.autocast computes in bfloat16 or float16, and param_dtype is {precision.param_dtype}; "
            "give one of the two, or leave autocast out"
        )


def _warn_of_idle_options(precision: _MixedPrecision, options: Options) -> None:
    """Options that say how to cast, where nothing is cast.  What is to stay in full precision does so then: that is kept."""
    idle = {
        "wait": options.wait != "root",
        "prefetch": options.prefetch,
        "reuse_unchanged": options.reuse_unchanged,
        "cast_forward_inputs": not options.cast_forward_inputs,
        "autocast": options.autocast,
    }
    names = [name for name, asked in idle.items() if asked]
    if names and precision.param_dtype is None and options.hooks == "all":  # hooks="root" refuses them
        warnings.warn(
            f"ddp_mp.patch: Options without effect: {', '.join(names)}; param_dtype is None, so that no parameter is cast",
            stacklevel=3,
        )


def _patch_all(ddp: DistributedDataParallel, precision: _MixedPrecision, options: Options) -> None:
    before = ddp.mixed_precision
    built_with = ddp.__dict__.get("_ddp_mp_built_with", before)
    hook = native.user_hook(ddp)
    marked = native.mark_accumulators(ddp)
    logged = native.strip(ddp)
    model = PatchedModel.__new__(PatchedModel)  # in two steps: what is built of it can be taken away again
    try:
        ddp.mixed_precision = None  # inputs are cast where the module is called, wrapped or not
        PatchedModel.__init__(model, ddp, precision, options)
        model.plan.full_modules.widen_buffers(None if before is None else before.buffer_dtype)
        # last, as what it rounds cannot be got back
        cast_buffers(ddp.module, ddp.parameters_to_ignore, precision.buffer_dtype, model.plan.full_modules.buffer_ids())
    except BaseException:
        model.detach()
        _equip_again(ddp, before, hook)
        raise
    model.comm.hook = hook
    model.built_with = built_with
    ddp.__dict__["_ddp_mp"] = model
    model.stand_in(ddp, logged)
    model.plan.training.before_patch = native.graph_is_alive(marked)
    _override(ddp, model)
    model.tell_ranks()
    log_plan(model, "patched")


@contextlib.contextmanager
def _taking_over(ddp: DistributedDataParallel) -> Iterator[None]:
    """The module may be patched through another wrapper: the newest wrapper owns it, once the block has patched it.

    An error in the block leaves the module to the earlier wrapper, with nothing of it lost.  RuntimeError while a forward or
    backward of that one is under way.
    """
    # models of another root only share a part
    others = [owner for owner in owners(ddp.module) if owner.is_of(ddp.module) and owner.wrapper() is not ddp]
    for owner in others:
        _require_idle("ddp_mp.patch", bool(owner.under_way))
    yield
    for owner in others:
        _retire(owner)


def _retire(owner: PatchedModel) -> None:
    """Another wrapper has taken the module over."""
    other = owner.wrapper()
    if other is None:  # only a graph keeps it
        owner.detach()
        return
    logger.info("%s is patched through another wrapper: the earlier one is unpatched", type(other.module).__name__)
    owner.built_with = None  # PyTorch's own hooks on the module would cast a second time
    unpatch(other)


def _override(ddp: DistributedDataParallel, model: PatchedModel) -> None:
    """Methods of the wrapper that would hand our reducer to PyTorch's C++ code."""
    model.overrides = native.Overrides(ddp)
    model.overrides.set("register_comm_hook", functools.partial(_register_comm_hook, model))
    model.overrides.set("_register_builtin_comm_hook", functools.partial(_register_builtin_comm_hook, model))
    model.overrides.set("_register_fused_optim", _register_fused_optim)
    model.overrides.set("__getstate__", functools.partial(_getstate, model))
    model.overrides.set("_run_ddp_forward", model.forward.run)


def _register_comm_hook(model: PatchedModel, state: object, hook: Any) -> None:
    """``register_comm_hook`` of a patched wrapper: the hook runs on the packed buckets, in ``reduce_dtype``."""
    ddp: Any = model.wrapper()
    ddp._check_comm_hook(hook)
    if model.comm.hook is not None:
        present = getattr(model.comm.hook[0], "__qualname__", model.comm.hook[0])
        raise RuntimeError(f"register_comm_hook: the communication hook {present} is registered already; only one can be")
    ddp.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__name__))
    ddp._comm_hooks.append((hook, state))
    model.comm.hook = (hook, state)
    model.tell_ranks()
    logger.info("buckets are reduced by the communication hook %s", getattr(hook, "__qualname__", hook))


def _register_builtin_comm_hook(model: PatchedModel, kind: Any) -> None:
    ddp: Any = model.wrapper()
    _register_comm_hook(model, ddp.process_group, native.builtin_hook(kind))


def _register_fused_optim(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "ddp_mp does not work with _register_fused_optim: an optimizer that runs inside backward would step gradients that "
        "are not reduced yet. Call optimizer.step() after backward, or ddp_mp.unpatch(ddp) first."
    )


def _getstate(model: PatchedModel) -> Any:
    """What ``copy.deepcopy`` and ``pickle`` take of a patched wrapper: a full-precision one, without us."""
    if sys._getframe(1).f_code is copy.copy.__code__:
        raise TypeError(
            "copy.copy: a shallow copy of a wrapper that ddp_mp has patched would share its module, and train it "
            "without reducing its gradients right; use copy.deepcopy, or ddp_mp.unpatch(ddp) first"
        )
    ddp: Any = model.wrapper()
    state = type(ddp).__getstate__(ddp)
    for name in ["_ddp_mp", "_ddp_mp_built_with", *model.overrides.names]:
        state.pop(name, None)
    state["mixed_precision"] = None
    state["_comm_hooks"] = []
    return state


def unpatch(ddp: DDP) -> DDP:
    """Takes ``patch`` back; a model that is not patched is left as it is.  ``ddp`` may be compiled.

    Parameters hold their full-precision values.  A model that was built with ``mixed_precision=`` has PyTorch's mixed precision
    afterwards; one that got it from :func:`patch` is an ordinary full-precision model again.
    Buffers keep the type they have.  A communication hook of the user stays registered.  No collective is run, and the host
    waits for no device but for casts that are under way on a CPU.

    Returns:
        Its argument.

    Raises:
        RuntimeError: a forward or backward of the model is under way.
        DeviceError: a device reports an error; the model stays patched.
    """
    given, ddp = ddp, native.uncompiled(ddp)
    root = root_of(ddp)
    if root is not None:
        _require_idle("ddp_mp.unpatch", bool(root.under_way))
        root.uninstall(ddp)
        agreement.withdraw(ddp)
        logger.info("unpatched %s", type(ddp.module).__name__)
        return given
    model = model_of(ddp)
    if model is None:
        return given
    _require_idle("ddp_mp.unpatch", bool(model.under_way))
    model.plan.pool.close()  # first: where a device reports an error, the model stays patched
    model.detach()
    model.overrides.remove()
    del ddp.__dict__["_ddp_mp"]
    agreement.withdraw(ddp)
    _equip_again(ddp, model.built_with, model.comm.hook)
    logger.info("unpatched %s; it has %s again", type(ddp.module).__name__, ddp.mixed_precision or "no mixed precision")
    return given


def _require_idle(what: str, busy: bool) -> None:
    if busy:
        raise RuntimeError(f"{what}: a forward or backward of this model is under way; call it between them")


def _equip_again(ddp: Any, precision: _MixedPrecision | None, hook: tuple[Any, Any] | None) -> None:
    """PyTorch's own reducer again, with the user's communication hook or else PyTorch's mixed precision."""
    ddp.mixed_precision = precision if hook is None else None
    ddp._comm_hooks = []
    with torch.inference_mode(False):  # tensors made in it could not be written in training
        native.equip(ddp)
        if hook is not None:
            ddp.register_comm_hook(hook[1], hook[0])
        elif precision is not None:
            native.equip_mixed_precision(ddp)


def is_patched(ddp: Any) -> bool:
    """Whether :func:`patch` is in force on ``ddp``, which may be any object: False for what is not a patched model.

    A model that ``torch.compile`` made of a patched one is patched too.
    """
    return _patched(ddp) is not None


def _patched(ddp: Any) -> PatchedModel | RootModel | None:
    return model_of(ddp) or root_of(ddp)


def _require_same(present: PatchedModel | RootModel, precision: _MixedPrecision | None, options: Options | None) -> None:
    differ = []
    if precision is not None:
        differ += _differing(present.precision, precision, ("param_dtype", "reduce_dtype", "buffer_dtype"))
    if options is not None:
        differ += _differing(present.options, options, [field.name for field in dataclasses.fields(Options)])
    if differ:
        raise ValueError(f"ddp_mp.patch: the model is patched with {', '.join(differ)}; call ddp_mp.unpatch(ddp) first")


def _differing(present: object, given: object, fields: Sequence[str]) -> list[str]:
    """Each field that is not as it was, with both values."""
    pairs = [(field, getattr(present, field), getattr(given, field)) for field in fields]
    return [f"{field}={was!r}, not {now!r}" for field, was, now in pairs if was != now]


def _fields(precision: _MixedPrecision) -> tuple[Any, Any, Any]:
    return precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype


# --- parameters in a state that is asked for -----------------------------------------------------------------------------


@contextlib.contextmanager
def full_precision(module: nn.Module) -> Iterator[None]:
    """Context manager: what is called inside computes in full precision, modules hold their masters, and autocast is off.

    Args:
        module: a patched wrapper, which may be compiled, or any module inside a patched model.

    Outside a forward, calls of the model inside the block compute with its masters, and inputs are not cast.  Inside a forward,
    the masters can be written in the block; at its end they are cast again, and the forward goes on with the new values.  A
    model that is not patched is left alone.  No other thread may drive the model meanwhile.

    Example::

        with torch.no_grad(), ddp_mp.full_precision(ddp):
            accurate = ddp(batch)
    """
    present = _patched(module)
    models = [present] if present is not None else owners(module) if isinstance(module, nn.Module) else ()
    with contextlib.ExitStack() as stack:
        for model in models:
            if isinstance(model, PatchedModel):
                stack.callback(model.full_precision())
                stack.enter_context(torch.autocast(model.plan.device_type, enabled=False))
            else:
                model.expose()
        yield


def masters_changed(ddp: DistributedDataParallel) -> None:
    """Tells ddp_mp that masters were written in a way that PyTorch cannot see: the next forward casts them again.

    It is needed only with ``Options.prefetch`` or ``Options.reuse_unchanged``, for writes that leave version
    counters as they are.  Nothing is cast before the next forward.  ``ddp`` may be compiled.

    Raises:
        ValueError: the model is not patched.
    """
    model = model_of(ddp)
    if model is not None:
        model.masters_changed()
    elif root_of(ddp) is None:
        raise ValueError("ddp_mp.masters_changed: the model is not patched")


__all__ = ["full_precision", "is_patched", "masters_changed", "patch", "unpatch"]
