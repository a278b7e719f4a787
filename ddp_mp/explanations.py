"""What is added to PyTorch's errors about types inside a forward: that ddp_mp has cast the model, where, and the cure."""

from __future__ import annotations

import re
import traceback

from torch import nn

#: What PyTorch's messages have in common when two types meet, or when an operation has no kernel for one.
_ABOUT_TYPES = re.compile(r"dtype|scalar ?type|c10::|\b(BFloat16|Half|Float|Double)\b")


def explain(error: BaseException, root: nn.Module | None, autocast: bool) -> None:
    """Adds a note to an error about types that left the forward of a patched model; leaves any other error alone.

    Args:
        error: what left the forward.
        root: the wrapped module.
        autocast: whether the model is patched with ``Options(autocast=True)``.
    """
    said = getattr(error, "__notes__", None) or []
    if root is None or any("ddp_mp" in note for note in said) or not _ABOUT_TYPES.search(str(error)):
        return
    name, inner = _where(error, root)
    where = f"module {name!r}, {type(inner).__name__}," if name else f"the wrapped module, {type(inner).__name__},"
    cures = [] if autocast else ["patch it with options=ddp_mp.Options(autocast=True), which changes no code"]
    if name:
        cures.append(f"keep the module in full precision with ddp_mp.Options(full_precision_modules=({name!r},))")
    cures.append("make the other tensor in the type of the module's weights")
    cause = f"ddp_mp has cast the parameters of this model: {where} met a tensor of another type"
    note = f"{cause}. To cure it, {', or '.join(cures)}."
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1:  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)


def _where(error: BaseException, root: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of the innermost part of ``root`` that was computing where the error was raised."""
    names = {id(inner): name for name, inner in root.named_modules()}
    found = root
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name in ("_call_impl", "forward") and isinstance(module, nn.Module) and id(module) in names:
            found = module
    return names[id(found)], found
