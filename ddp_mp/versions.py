"""Every private part of PyTorch that ddp_mp uses, and why; looked for when ddp_mp is imported.

A PyTorch that lacks one of them is refused, by name: an error here is clearer than one in training.  Nothing else in ddp_mp is
private to PyTorch; ``tests/shipping/test_versions.py`` compares this file with the sources.
"""

from __future__ import annotations

import importlib
import re
from types import CodeType
from typing import Any, NamedTuple

#: The oldest PyTorch that ddp_mp is meant for.
OLDEST = (2, 10)

try:
    import torch
    import torch.distributed
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        f"ddp_mp needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, and there is none in this environment: install torch, in "
        "the build for your machine"
    ) from None


class Part(NamedTuple):
    """One name of PyTorch's."""

    #: The module, class or function that has it.  A function has the names that its code uses, which is how attributes
    #: that are set on an object are found.
    home: str
    name: str
    #: The first release from 2.0 on that has it.
    since: str
    why: str


_DDP = "torch.nn.parallel.distributed.DistributedDataParallel"
_INIT = f"{_DDP}.__init__"
_MODULE_INIT = "torch.nn.modules.module.Module.__init__"
_SETUP = "torch.nn.parallel.distributed._setup_mixed_precision_params"

# Versions are told apart by what they have, never by their number.
NEEDED = (
    # --- public, and newer than the oldest PyTorch that pip might find
    Part("torch", "Stream", "2.0", "streams of PyTorch's own mixed precision"),
    Part("torch.Tensor", "__dlpack_c_exchange_api__", "2.10", "C reads tensors through it"),
    Part("torch.Tensor", "register_post_accumulate_grad_hook", "2.1", "says that a master's gradient is there"),
    Part("torch.distributed", "DistError", "2.2", "errors of stores, which the ranks' agreement meets"),
    Part("torch.nn.modules.module", "register_module_module_registration_hook", "2.0", "modules that are added later"),
    Part("torch.nn.modules.module", "register_module_parameter_registration_hook", "2.0", "parameters that are added later"),
    Part("torch.optim.optimizer", "register_optimizer_step_post_hook", "2.0", "casts after an optimizer's step"),
    Part("torch.optim.optimizer", "register_optimizer_step_pre_hook", "2.0", "masters in place for an optimizer's step"),
    # --- DistributedDataParallel
    Part("torch.nn.parallel.distributed", "_MixedPrecision", "2.1", "the class that MixedPrecision is"),
    Part("torch.nn.parallel.distributed", "_setup_mixed_precision_params", "2.1", "unpatch gives PyTorch's hooks again"),
    Part(_DDP, "_active_ddp_module", "2.0", "which wrapper calls a module"),
    Part(_DDP, "_build_debug_param_to_name_mapping", "2.0", "unpatch builds PyTorch's reducer again"),
    Part(_DDP, "_build_params_for_reducer", "2.0", "unpatch builds PyTorch's reducer again"),
    Part(_DDP, "_check_comm_hook", "2.0", "a communication hook is checked as PyTorch does"),
    Part(_DDP, "_ddp_init_helper", "2.0", "unpatch builds PyTorch's reducer again"),
    Part(_DDP, "_module_wait_for_copy_hook", "2.1", "PyTorch's hook, which is taken off"),
    Part(_DDP, "_remove_autograd_hooks", "2.1", "PyTorch's reducer is taken off the gradients"),
    Part(_DDP, "_root_copy_hook", "2.1", "PyTorch's hook, which is taken off"),
    Part(_DDP, "_run_ddp_forward", "2.0", "an interrupted forward leaves no leaf in place"),
    Part(_INIT, "_AllreduceUpcastHookState", "2.1", "the state of PyTorch's communication hook for mixed precision"),
    Part(_INIT, "_comm_hooks", "2.3", "communication hooks that the user registered"),
    Part(_INIT, "_delay_all_reduce_params", "2.1", "refused: parameters that are reduced late"),
    Part(_INIT, "_reducer_allreduce_and_upcast_hook", "2.1", "PyTorch's communication hook for mixed precision"),
    Part(f"{_DDP}._ddp_init_helper", "_idx", "2.1", "PyTorch's number of a parameter"),
    Part(_INIT, "_mp_stream", "2.1", "PyTorch's stream for casts"),
    Part(_INIT, "_submodule_to_event", "2.1", "PyTorch's events for casts"),
    Part(_INIT, "_use_python_reducer", "2.3", "refused: a reducer in Python"),
    Part(_INIT, "bucket_bytes_cap", "2.0", "sizes of gradient buckets"),
    Part(_INIT, "bucket_bytes_cap_default", "2.4", "whether a size was asked for"),
    Part(_SETUP, "_fp_param", "2.1", "PyTorch's note of a full-precision parameter"),
    Part(_SETUP, "_mp_param", "2.1", "PyTorch's low-precision copy of a parameter"),
    Part(_INIT, "_has_rebuilt_buckets", "2.0", "unpatch builds PyTorch's reducer again"),
    Part(f"{_DDP}._set_static_graph", "_static_graph_delay_allreduce_enqueued", "2.1", "the same, for a static graph"),
    Part("torch.distributed", "_DEFAULT_FIRST_BUCKET_BYTES", "2.0", "the size of the first gradient bucket"),
    Part("torch.distributed.Reducer", "_set_mixed_precision_param_dtype", "2.1", "unpatch gives PyTorch's hooks again"),
    Part("torch.distributed.Reducer", "_set_static_graph", "2.0", "unpatch builds PyTorch's reducer again"),
    Part("torch.distributed.Logger", "_get_ddp_logging_data", "2.0", "what PyTorch logged goes on being answered"),
    Part("torch.distributed.Logger", "_set_static_graph", "2.0", "unpatch builds PyTorch's reducer again"),
    Part("torch.distributed.distributed_c10d", "_world", "2.0", "the store of a process group"),
    # --- autograd
    Part("torch.Tensor", "_backward_hooks", "2.0", "a hook on an output, and the user's hooks on a master"),
    Part("torch.Tensor", "_cdata", "2.0", "whether torch.utils.swap_tensors exchanged a master"),
    Part("torch.Tensor", "_post_accumulate_grad_hooks", "2.1", "our hook on a master stays behind the user's"),
    Part("torch.autograd", "_engine_run_backward", "2.3", "gradients of masters that are asked for by name"),
    Part("torch.autograd", "_profiler_enabled", "2.0", "ranges in traces, only where somebody traces"),
    Part("torch.autograd.Variable", "_execution_engine", "2.0", "a call at the end of a backward"),
    Part("torch._C", "_current_graph_task_id", "2.0", "whether a backward runs, and which"),
    Part("torch._C._autograd", "_get_current_graph_task_keep_graph", "2.5", "whether the graph is kept"),
    # --- modules, optimizers, memory
    Part("torch.Tensor", "_version", "2.0", "whether a master was written to"),
    Part("torch.UntypedStorage", "_cdata", "2.0", "the address that _storage_Use_Count wants"),
    Part("torch._C", "_storage_Use_Count", "2.8", "whether the memory of a bucket is ours alone"),
    Part(_MODULE_INIT, "_buffers", "2.0", "buffers of full-precision modules"),
    Part(_MODULE_INIT, "_forward_hooks", "2.0", "whether modules of a model are hooked otherwise"),
    Part(_MODULE_INIT, "_forward_hooks_always_called", "2.1", "the same"),
    Part(_MODULE_INIT, "_forward_hooks_with_kwargs", "2.0", "the same"),
    Part(_MODULE_INIT, "_forward_pre_hooks", "2.0", "PyTorch's hooks are taken off"),
    Part(_MODULE_INIT, "_forward_pre_hooks_with_kwargs", "2.0", "PyTorch's hooks are taken off"),
    Part(_MODULE_INIT, "_load_state_dict_pre_hooks", "2.0", "copies of modules leave our hooks out"),
    Part(_MODULE_INIT, "_modules", "2.0", "children, without a call"),
    Part(_MODULE_INIT, "_parameters", "2.0", "parameters, where a leaf stands before them"),
    Part(_MODULE_INIT, "_state_dict_hooks", "2.0", "copies of modules leave our hooks out"),
    Part(_MODULE_INIT, "_state_dict_pre_hooks", "2.0", "copies of modules leave our hooks out"),
    Part("torch.nn.Module", "_call_impl", "2.0", "the frame of a module's call"),
    Part(
        "torch.nn.modules.rnn.RNNBase._init_flat_weights",
        "_flat_weights",
        "2.0",
        "the list of weights that recurrent layers keep",
    ),
    Part("torch.nn.modules.rnn.RNNBase.__init__", "_flat_weights_names", "2.0", "their names"),
    Part("torch.nn.modules.batchnorm", "_NormBase", "2.0", "normalisation layers with running statistics"),
    Part(
        "torch.nn.utils._named_member_accessor", "swap_tensor", "2.0", "torch.func.functional_call takes leaves out of its way"
    ),
    # --- compilers and transforms
    Part("torch", "_disable_dynamo", "2.1", "hooks that torch.compile leaves alone"),
    Part("torch._C", "_DisableFuncTorch", "2.0", "leaves that outlive a transform are not wrapped by it"),
    Part("torch._C._dynamo", "eval_frame", "2.0", "code that torch.compile leaves alone"),
    Part("torch._C._functorch", "peek_interpreter_stack", "2.0", "whether torch.func transforms the forward"),
    Part("torch._C", "TensorBase", "2.2", "getters of dtype and requires_grad"),
)

# Used where they are there; a PyTorch without them is right too.
OPTIONAL = (
    Part("torch._dynamo.eval_frame.OptimizedModule", "_orig_mod", "2.0", "the module that torch.compile was given"),
    Part(
        "torch.autograd.graph.Node", "_register_hook_dict", "2.0", "a hook on an output without a handle, 19 us less in a step"
    ),
    Part("torch._C._dynamo.eval_frame", "_FrameAction", "2.7", "code that torch.compile leaves alone"),
    Part("torch._C._dynamo.eval_frame", "_FrameExecStrategy", "2.7", "code that torch.compile leaves alone"),
    Part("torch.optim", "_in_backward_optimizers", "2.0", "refused: an optimizer that runs inside backward"),
    Part(_DDP, "_ddp_ignored", "2.0", "parameters that the wrapper does not synchronise"),
)


def require() -> None:
    """Raises ImportError, with what is there and what is needed, where PyTorch is too old or lacks something."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        raise ImportError(f"ddp_mp needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer; this is {torch.__version__}")
    if not torch.distributed.is_available():
        raise ImportError(f"ddp_mp needs a PyTorch with torch.distributed; this one, {torch.__version__}, was built without it")
    missing = [f"{part.home}.{part.name}" for part in NEEDED if not _has(part)]
    if missing:
        raise ImportError(f"ddp_mp does not know this PyTorch, {torch.__version__}: it has no {', '.join(missing)}")


def _has(part: Part) -> bool:
    try:
        home = _find(part.home)
    except (AttributeError, ImportError):
        return False
    code = getattr(home, "__code__", None)
    return hasattr(home, part.name) or (code is not None and part.name in _names(code))


def _find(path: str) -> Any:
    """What a dotted name means; its modules are imported."""
    names = path.split(".")
    found: Any = importlib.import_module(names[0])
    for count, name in enumerate(names[1:], start=2):
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(".".join(names[:count]))
    return found


def _names(code: CodeType) -> set[str]:
    """The attributes, globals and strings that a function's code has, and those of functions inside it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *code.co_varnames, *(text for text in code.co_consts if isinstance(text, str))}.union(*inner)


require()
