"""Everything that touches private parts of PyTorch's ``DistributedDataParallel``, for every version that is supported."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as dist

# Not used here.  Its functions keep the default group there is when it is imported as the default of an argument, and the
# wrapper's constructor imports it.  Imported before there is one, it keeps none: otherwise the group outlives
# destroy_process_group with its threads, and one that still frees the last collective's tensors aborts the ending process.
import torch.distributed.nn
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as upstream

# Attributes that PyTorch's mixed precision leaves on a parameter and on the wrapper.
_PARAM_ATTRIBUTES = ("_mp_param", "_fp_param", "_ddp_mp_hook_state", "_idx")
_DDP_ATTRIBUTES = ("_mp_stream", "_submodule_to_event")

_MARK = "ddp_mp"  # in the metadata of an accumulator of gradients


def uncompiled(ddp: Any) -> Any:
    """What ``torch.compile`` was given, of the module that it returned; any other object as it is."""
    while isinstance(ddp, nn.Module) and "_orig_mod" in ddp.__dict__.get("_modules", {}):
        ddp = ddp._modules["_orig_mod"]
    return ddp


def refuse_unsupported(ddp: DistributedDataParallel) -> None:
    """Raises RuntimeError, with what clashes and what to do, for a model that we would not train right."""
    if getattr(ddp, "_use_python_reducer", False):
        _refuse("torch._dynamo.config.optimize_ddp='python_reducer'", "set optimize_ddp to True or 'ddp_optimizer'")
    if getattr(ddp, "_delay_all_reduce_params", None):
        _refuse("delay_all_reduce_named_params", "build DistributedDataParallel without it")
    scripted = [name for name, inner in ddp.module.named_modules() if isinstance(inner, torch.jit.ScriptModule)]
    if scripted:
        where = f"module {scripted[0]!r}" if scripted[0] else "the wrapped module"
        _refuse(f"{where}, which torch.jit.script made,", "give it to DistributedDataParallel unscripted (torch.compile works)")
    inside = [name for name, inner in ddp.module.named_modules() if isinstance(inner, DistributedDataParallel)]
    if inside:
        where = f"module {inside[0]!r}" if inside[0] else "the wrapped module"
        _refuse(f"{where}, which is a DistributedDataParallel itself,", "wrap the model once")
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp.module.parameters()):
        _refuse(
            "an optimizer that runs inside backward (_apply_optimizer_in_backward)",
            "call optimizer.step() after backward: masters are not in place before its end",
        )


def _refuse(what: str, instead: str) -> None:
    raise RuntimeError(f"ddp_mp.patch: {what} does not work together with ddp_mp; {instead}, or leave the model unpatched")


def bucket_caps(ddp: DistributedDataParallel) -> list[int]:
    """Byte limits of the gradient buckets as the wrapper was asked for them; the last one holds for all that follow."""
    listed = list(getattr(ddp, "bucket_bytes_cap_list", []) or [])
    if listed:
        return listed
    cap = int(ddp.bucket_bytes_cap)
    first = int(dist._DEFAULT_FIRST_BUCKET_BYTES) if getattr(ddp, "bucket_bytes_cap_default", False) else cap
    return [min(first, cap), cap]


def group_store(group: Any) -> dist.Store | None:
    """The store through which the ranks of a process group found each other, under a prefix of the group's own.

    None where there is none: PyTorch does not know the group, MPI started it, or it is one of PyTorch's fakes, whose other
    ranks do not exist.
    """
    backend, store = distributed_c10d._world.pg_map.get(group, ("", None))
    return None if "fake" in backend else store


def require_own_call(caller: DistributedDataParallel, module: nn.Module) -> None:
    """RuntimeError where another wrapper than the patched one calls the module: gradients arrive on leaves, which its reducer
    does not know."""
    if caller.__dict__["_modules"]["module"] is not module or not torch.is_grad_enabled():
        return
    raise RuntimeError(
        "ddp_mp: this module is patched through another DistributedDataParallel than the one that was called, which would "
        "reduce nothing: call the patched wrapper, or call ddp_mp.unpatch on it first"
    )


def user_hook(ddp: DistributedDataParallel) -> tuple[Any, Any] | None:
    """(hook, state) of the communication hook that the user registered, if any; PyTorch's own is not one."""
    for hook, state in getattr(ddp, "_comm_hooks", []):
        if getattr(hook, "__name__", "") != "_reducer_allreduce_and_upcast_hook":
            return hook, state
    return None


def builtin_hook(kind: Any) -> Any:
    """The Python hook that does what one of the reducer's built-in hooks does."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {
        dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    return hooks[kind]


def strip(ddp: Any) -> tuple[dict[str, str], dict[str, int]]:
    """Takes PyTorch's mixed precision and its reducer off the wrapper, masters in place.

    Returns what the wrapper's logger last said; the caller puts a reducer and a logger in place.
    """
    restore_masters(ddp)
    remove_hooks(ddp, upstream.DistributedDataParallel._root_copy_hook)
    remove_hooks(ddp, upstream.DistributedDataParallel._module_wait_for_copy_hook)
    for param in ddp.module.parameters():
        for name in _PARAM_ATTRIBUTES:
            param.__dict__.pop(name, None)
    for name in _DDP_ATTRIBUTES:
        ddp.__dict__.pop(name, None)
    ddp._remove_autograd_hooks()
    data = ddp.logger._get_ddp_logging_data() if ddp.logger is not None else None
    return (dict(data.strs_map), dict(data.ints_map)) if data is not None else ({}, {})


def mark_accumulators(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Marks what accumulates gradients of the parameters; returns the parameters.  See :func:`graph_is_alive`."""
    parameters = [param for param in ddp.module.parameters() if param.requires_grad]
    with torch.inference_mode(False), torch.enable_grad():
        for param in parameters:
            _notes(param)[_MARK] = True
    return parameters


def graph_is_alive(parameters: list[nn.Parameter]) -> bool:
    """Whether a graph from before the mark leads to one of the parameters, once the wrapper's reducer is gone.

    An accumulator lives as long as a graph leads to it, or a reducer holds it; later there is a new one, without the mark.
    """
    with torch.inference_mode(False), torch.enable_grad():
        marks = [_notes(param).pop(_MARK, None) for param in parameters]
    return any(marks)


def _notes(param: nn.Parameter) -> dict[str, Any]:
    """What can be noted at the accumulator of a parameter's gradients."""
    accumulator: Any = get_gradient_edge(param).node
    notes: dict[str, Any] = accumulator.metadata
    return notes


def restore_masters(ddp: DistributedDataParallel) -> None:
    """Masters in place after PyTorch's own hooks, and what they hold on the gradient accumulators gone."""
    for param in ddp.module.parameters():
        state = getattr(param, "_ddp_mp_hook_state", None)
        if state is not None:
            state[1].remove()
        low = getattr(param, "_mp_param", None)
        if low is not None and param.dtype is low.dtype and param.dtype is not param._fp_param.dtype:
            param.data = param._fp_param
            if param.grad is not None:
                param.grad.data = param.grad.to(param.dtype)


def remove_hooks(ddp: DistributedDataParallel, function: Any) -> list[nn.Module]:
    """Removes forward pre-hooks that are this method of this wrapper; returns the modules that had one."""
    found = []
    for module in ddp.module.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "__func__", None) is function and getattr(hook, "__self__", None) is ddp:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                found.append(module)
    return found


def equip(ddp: Any) -> None:
    """Gives the wrapper PyTorch's own reducer again.  Local: no collective.  As ``DDP.__setstate__`` does."""
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()


def equip_mixed_precision(ddp: Any) -> None:
    """Gives the wrapper PyTorch's own mixed precision, as its constructor does.

    RuntimeError where PyTorch has no stream for it, as in a build for CUDA without a GPU; the wrapper has none then.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks as hooks

    precision = ddp.mixed_precision
    try:
        copying, upcasting = torch.Stream(), torch.Stream()
    except RuntimeError as error:
        ddp.mixed_precision = None
        raise RuntimeError(
            f"PyTorch's own mixed precision cannot be set up on this machine ({error}); the model is an ordinary "
            "full-precision one now: train it so, or patch it with mixed_precision="
        ) from error
    for index, param in enumerate(ddp._build_params_for_reducer()[0]):
        param._idx = index
    upstream._setup_mixed_precision_params(precision, ddp.module)
    ddp._mp_stream = copying
    ddp._submodule_to_event = defaultdict(deque)
    ddp.module.register_forward_pre_hook(ddp._root_copy_hook, prepend=False, with_kwargs=True)
    for module in ddp.module.modules():
        module.register_forward_pre_hook(ddp._module_wait_for_copy_hook, prepend=False, with_kwargs=True)
    state = hooks._AllreduceUpcastHookState(ddp_weakref=weakref.ref(ddp), upcast_stream=upcasting)
    type(ddp).register_comm_hook(ddp, state, hooks._reducer_allreduce_and_upcast_hook)
    ddp.reducer._set_mixed_precision_param_dtype(precision.param_dtype)


class Overrides:
    """Methods of the wrapper that are replaced on the instance while it is patched."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._names: list[str] = []

    def set(self, name: str, function: Any) -> None:
        """Replaces one method."""
        ddp = self._ddp()
        assert ddp is not None
        ddp.__dict__[name] = function
        self._names.append(name)

    def remove(self) -> None:
        """The class's methods again."""
        ddp = self._ddp()
        names, self._names = self._names, []
        for name in names if ddp is not None else ():
            ddp.__dict__.pop(name, None)

    @property
    def names(self) -> list[str]:
        return list(self._names)
