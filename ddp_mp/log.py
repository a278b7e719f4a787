"""What goes to the standard ``logging`` module, under the name ``ddp_mp``.

WARNING: casting ahead of a forward (``Options.prefetch``) failed.
INFO: a model is patched or unpatched, with a summary; a plan is built anew, and why; what the engine leaves to PyTorch.
DEBUG: rare events in training: masters that moved, copies that a graph keeps, a backward that failed.  Nothing is said in a
step that goes as the one before.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from . import _C
from .loose import LooseGradients

if TYPE_CHECKING:
    from .model import PatchedModel

logger = logging.getLogger("ddp_mp")
logger.addHandler(logging.NullHandler())  # without a configuration of the user nothing is printed

_SHOWN = 8  # names of parameters in one line


def log_plan(model: PatchedModel, what: str) -> None:
    """Says what was planned for a model, and what of it the engine leaves to PyTorch."""
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info("%s %s: %s", what, type(model.root).__name__, summary(model))
    fallback = model.low.fallback
    if fallback is not None:
        logger.info(
            "cast by PyTorch, one by one, as their memory cannot be read flat: %s", _listed([r.name for r in fallback.rows])
        )
    loose = [bucket.name for bucket in model.reducer.buckets if isinstance(bucket, LooseGradients)]
    if loose:
        logger.info("reduced one by one, as their gradients cannot be packed: %s", _listed(loose))


def summary(model: PatchedModel) -> str:
    """One line: what is cast, by what, and how gradients are reduced."""
    low, precision = model.low, model.precision
    groups = [f"{len(group.engine.buckets)} on {group.device} by {_backend(group.device.type)}" for group in low.groups]
    full = len(model.borders.outermost)
    parts = [
        f"{len(low.rows)} of {len(model.rows)} parameters cast to {precision.param_dtype}",
        f"cast buckets: {', '.join(groups) or 'none'}",
        f"gradients reduced in {precision.reduce_dtype or precision.param_dtype or 'their own types'} in "
        f"{len(model.reducer.buckets)} buckets over {model.comm.process_group.size()} ranks",
        *([f"{full} modules in full precision"] if full else []),
        str(model.options),
    ]
    return "; ".join(parts)


def _backend(device_type: str) -> str:
    if device_type == "cpu":
        return f"the host backend ({_C.host_isa()})"
    return f"the CUDA backend ({_C.build_info()['cuda']})"


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
