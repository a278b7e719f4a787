"""What is needed of PyTorch, looked for when ddp_mp is imported: an error here is clearer than one in training."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed
from torch.nn.modules import module as nn_module
from torch.nn.parallel import distributed
from torch.nn.utils import _named_member_accessor
from torch.optim import optimizer

#: The oldest PyTorch that ddp_mp is meant for.
OLDEST = (2, 10)

# Newer versions are told apart by what they have, never by their number.  Most of this is private and may be renamed one day.
_NEEDED: list[tuple[Any, str]] = [
    (torch.Tensor, "register_post_accumulate_grad_hook"),
    (torch.Tensor, "_post_accumulate_grad_hooks"),
    (torch.Tensor, "__dlpack_c_exchange_api__"),
    (torch, "Stream"),
    (torch, "_disable_dynamo"),
    (torch._C, "_DisableFuncTorch"),
    (torch._C._functorch, "peek_interpreter_stack"),
    (torch._C._autograd, "_get_current_graph_task_keep_graph"),
    (torch.autograd, "_engine_run_backward"),
    (_named_member_accessor, "swap_tensor"),
    (distributed, "_MixedPrecision"),
    (distributed, "_setup_mixed_precision_params"),
    (distributed.DistributedDataParallel, "_build_params_for_reducer"),
    (distributed.DistributedDataParallel, "_build_debug_param_to_name_mapping"),
    (distributed.DistributedDataParallel, "_ddp_init_helper"),
    (distributed.DistributedDataParallel, "_remove_autograd_hooks"),
    (nn_module, "register_module_parameter_registration_hook"),
    (nn_module, "register_module_module_registration_hook"),
    (optimizer, "register_optimizer_step_pre_hook"),
    (optimizer, "register_optimizer_step_post_hook"),
]


def require() -> None:
    """Raises ImportError, with what is there and what is needed, where PyTorch is too old or lacks something."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        raise ImportError(f"ddp_mp needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer; this is {torch.__version__}")
    if not torch.distributed.is_available():
        raise ImportError(f"ddp_mp needs a PyTorch with torch.distributed; this one, {torch.__version__}, was built without it")
    missing = [f"{getattr(home, '__name__', home)}.{name}" for home, name in _NEEDED if not hasattr(home, name)]
    if missing:
        raise ImportError(f"ddp_mp does not know this PyTorch, {torch.__version__}: it has no {', '.join(missing)}")


require()
