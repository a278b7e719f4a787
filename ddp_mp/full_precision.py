"""Modules that stay in full precision, and the casts at their borders (``Options.full_precision_modules``).

A module that an entry matches computes in the type that its parameters have, with everything inside it.  Its parameters are
left out of the plan of casts.  Hooks on the outermost matching modules cast what goes in and what comes out, so that the rest
of the model sees low precision everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .options import FLOATING, Options
from .parameters import Managed
from .step import Region
from .tensors import cast_tensors

Entry = type[nn.Module] | str

#: Their kernels take weights and statistics in float32 beside inputs in either type, and on a CPU no other mixture: in autocast
#: they compute with their masters, as they do without ddp_mp.
_NORMS = (nn.LayerNorm, nn.GroupNorm, _NormBase)

# What wrappers put into the names of the modules that they wrap.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class _Member:
    """One module on one side of the borders, held weakly; ``border``: the outermost full-precision module that it is part of,
    or is."""

    __slots__ = ("_module", "border", "name")

    def __init__(self, name: str, module: nn.Module, border: str | None) -> None:
        self.name, self._module, self.border = name, weakref.ref(module), border

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "asked of a module that is gone"
        return module

    @property
    def outermost(self) -> bool:
        """Whether the border is this module's own."""
        return self.border == self.name


class FullPrecisionModules:
    """The full-precision modules of one wrapped module; none when the option is not used.

    Args:
        module: the wrapped module.
        options: ``full_precision_modules`` and ``full_precision_outputs``.
        dtype: the type outside the borders; None: nothing is cast, there or at the borders.
        region: says whether the module computes in low precision now.

    Raises:
        ValueError: an entry matches nothing, or the wrapped module itself; a matching module cannot have a border; or it is
            used both inside another one and outside.
    """

    def __init__(self, module: nn.Module, options: Options, dtype: torch.dtype | None, region: Region) -> None:
        self._options, self._dtype, self._region = options, dtype, region
        self._inside: dict[int, _Member] = {}
        self._outside: dict[int, _Member] = {}
        self._handles: list[Any] = []
        self._silent: set[int] = set()  # modules whose outputs are not cast
        norms = (inner for inner in module.modules() if isinstance(inner, _NORMS)) if options.autocast else ()
        self._norms = {id(norm._parameters): weakref.ref(norm) for norm in norms}
        if not options.full_precision_modules:
            return
        names = _names(module)
        chosen: set[int] = set()
        for entry in options.full_precision_modules:
            chosen |= _matching(names, entry, "full_precision_modules")
        if id(module) in chosen:
            raise ValueError(
                "Options.full_precision_modules: the wrapped module itself matches, so that nothing would be cast; name parts "
                "of it, or leave the model unpatched"
            )
        self._walk(_Member("", module, None), chosen)
        self._require_apart()
        self._silent = self._keeping(names)

    @property
    def outermost(self) -> list[_Member]:
        """The modules that have a border."""
        return [member for member in self._inside.values() if member.outermost]

    def module_ids(self) -> list[int]:
        """``id`` of every module with a border."""
        return [id(member.module) for member in self.outermost]

    def buffer_ids(self) -> set[int]:
        """``id`` of every buffer that stays in full precision."""
        modules = [*(member.module for member in self._inside.values()), *self._norm_modules()]
        return {id(b) for module in modules for b in module._buffers.values() if b is not None}

    def _norm_modules(self) -> list[nn.Module]:
        return [norm for reference in self._norms.values() if (norm := reference()) is not None]

    def _norms_alone(self, rows: list[Managed]) -> set[int]:
        """Norms that share no parameter with a module of another kind: a kernel wants all of its weights in one type."""
        norms = set(self._norms)
        shared = [homes for row in rows if len(homes := {id(site.parameters) for site in row.sites}) > 1]
        while mixed := [homes for homes in shared if not norms.isdisjoint(homes) and not norms.issuperset(homes)]:
            norms.difference_update(*mixed)
        return norms

    def mark(self, rows: list[Managed]) -> list[Managed]:
        """Sets ``full`` of the parameters inside; ValueError for one that a module outside holds too.  Returns its argument."""
        inside = {id(member.module._parameters): member for member in self._inside.values()}
        outside = {id(member.module._parameters): member for member in self._outside.values()}
        norms = self._norms_alone(rows)
        for row in rows:
            homes = [id(site.parameters) for site in row.sites]
            full = next((inside[home] for home in homes if home in inside), None)
            low = next((outside[home] for home in homes if home in outside), None)
            row.full = full is not None or (bool(homes) and norms.issuperset(homes))
            if full is not None and low is not None:
                raise ValueError(
                    f"Options.full_precision_modules: parameter {row.name!r} is shared by {_part(full)}, which stays in full "
                    f"precision, and {_part(low)}, which does not; add {low.name!r} too, or leave {full.border!r} out"
                )
        return rows

    def attach(self) -> None:
        """Puts the casts at the borders.  Ours run first: hooks of others on these modules get full-precision inputs, and
        the outputs that the rest of the model gets."""
        if self._dtype is None:
            return
        for member in self.outermost:
            module, own = member.module, _own_type(member.module)
            self._handles.append(module.register_forward_pre_hook(_inward(own), prepend=True, with_kwargs=True))
            if id(module) not in self._silent:
                hook = _outward(own, self._dtype, self._region)
                self._handles.append(module.register_forward_hook(hook, prepend=True))

    def detach(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def widen_buffers(self, narrowed: torch.dtype | None) -> None:
        """Gives floating-point buffers inside their module's type again that DDP's constructor cast to ``narrowed``."""
        modules = [*(member.module for member in self.outermost), *self._norm_modules()]
        for module in modules if narrowed is not None else ():
            own = _own_type(module)
            for buffer in module.buffers():
                if buffer.dtype is narrowed and narrowed.itemsize < own.itemsize:
                    buffer.data = buffer.to(own)

    def _walk(self, member: _Member, chosen: set[int]) -> None:
        """Sorts the modules; each is visited at most once inside and once outside."""
        side = self._outside if member.border is None else self._inside
        known = side.get(id(member.module))
        if known is not None:
            if known.outermost is not member.outermost:
                raise ValueError(
                    f"Options.full_precision_modules: {_part(known)} is also {_part(member)}: it cannot cast what one caller "
                    "gives it and not what the other does; add the modules that call it"
                )
            return
        side[id(member.module)] = member
        for key, child in member.module._modules.items():
            if child is None:
                continue
            name = f"{member.name}.{key}" if member.name else key
            border = member.border
            if border is None and id(child) in chosen:
                border = name
                _require_called(member, name)
            self._walk(_Member(name, child, border), chosen)

    def _require_apart(self) -> None:
        for key, outside in self._outside.items():
            if key in self._inside:
                raise ValueError(
                    f"Options.full_precision_modules: {outside.name!r} is also {_part(self._inside[key])}, which stays in full "
                    f"precision; add {outside.name!r} too, or leave {self._inside[key].border!r} out"
                )

    def _keeping(self, names: list[tuple[str, nn.Module]]) -> set[int]:
        borders = {id(member.module) for member in self.outermost}
        kept: set[int] = set()
        for entry in self._options.full_precision_outputs:
            found = _matching(names, entry, "full_precision_outputs") & borders
            if not found:
                listed = ", ".join(repr(member.name) for member in self.outermost)
                raise ValueError(
                    f"Options.full_precision_outputs: {_shown(entry)} matches none of the outermost full-precision modules, "
                    f"which are {listed}"
                )
            kept |= found
        return kept


def _inward(own: torch.dtype) -> Any:
    """The hook that casts inputs.  torch.compile looks into it, so it is a plain function of plain values."""
    widest = own.itemsize

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            return (cast_tensors(args[0], own, widest),), kwargs
        return cast_tensors((args, kwargs), own, widest)

    return cast_inputs


def _outward(own: torch.dtype, dtype: torch.dtype, region: Region) -> Any:
    """The hook that casts outputs, while the rest of the module is in low precision."""
    widest = own.itemsize

    def cast_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_tensors(output, dtype, widest) if region.low else output

    return cast_outputs


def _own_type(module: nn.Module) -> torch.dtype:
    """The widest type of the module's parameters, float32 without any."""
    types = [p.dtype for p in module.parameters() if p.dtype in FLOATING]
    return max(types, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _names(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every name of every module, without what torch.compile and checkpoint wrappers put into names."""
    return [(plain_name(f"{name}.")[:-1], inner) for name, inner in module.named_modules(remove_duplicate=False)]


def plain_name(name: str) -> str:
    """The name of a parameter without what torch.compile and checkpoint wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _matching(names: Sequence[tuple[str, nn.Module]], entry: Entry, field: str) -> set[int]:
    if isinstance(entry, str):
        found = {id(module) for name, module in names if fnmatchcase(name, entry)}
    else:
        found = {id(module) for _, module in names if isinstance(module, entry)}
    if not found:
        listed = sorted({name for name, _ in names if name})
        some = ", ".join(listed[:12]) + (", ..." if len(listed) > 12 else "")
        raise ValueError(f"Options.{field}: {_shown(entry)} matches no module of this model; its modules are {some or 'none'}")
    return found


def _require_called(parent: _Member, name: str) -> None:
    """A border is a pair of hooks, which need the module to be called."""
    if isinstance(parent.module, nn.MultiheadAttention):
        holder = repr(parent.name) if parent.name else "the wrapped module"
        raise ValueError(
            f"Options.full_precision_modules: {name!r} matches, but {holder}, an nn.MultiheadAttention, reads its weights "
            f"without calling it; name {holder} itself"
        )


def _part(member: _Member) -> str:
    """What a member is, for an error."""
    if not member.name:
        return "the wrapped module"
    if member.border is None or member.outermost:
        return f"module {member.name!r}"
    return f"module {member.name!r} inside {member.border!r}"


def _shown(entry: Entry) -> str:
    return repr(entry) if isinstance(entry, str) else entry.__name__
