"""``install``: models are patched as they are built."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from .options import Options, kind_of, validate_precision
from .patching import patch


@dataclass(frozen=True)
class _Defaults:
    """What models are patched with as they are built."""

    options: Options
    precision: _MixedPrecision | None


class _Constructor:
    """``DistributedDataParallel.__init__`` while :func:`install` is in force.

    Others may wrap it too, before and after us, and only the outermost wrapper can be taken off: below another one ours stays,
    and passes everything through.
    """

    def __init__(self) -> None:
        self.defaults: _Defaults | None = None
        self.ends = 0  # how often uninstall() was called
        self._wrapped: list[tuple[Any, Any]] = []  # our wrappers in the class, and what each of them calls
        self._building: set[int] = set()  # id of wrappers of models under construction

    def put(self) -> None:
        """Our wrapper is the outermost one."""
        original: Any = DistributedDataParallel.__init__
        if not (self._wrapped and original is self._wrapped[-1][0]):
            self._wrapped.append((self._wrapper(original), original))
            DistributedDataParallel.__init__ = self._wrapped[-1][0]  # type: ignore[method-assign]

    def take_off(self) -> None:
        """Our wrappers are gone, but for those below another one."""
        self.defaults = None
        while self._wrapped and DistributedDataParallel.__init__ is self._wrapped[-1][0]:
            DistributedDataParallel.__init__ = self._wrapped.pop()[1]  # type: ignore[method-assign]

    def _wrapper(self, original: Any) -> Any:
        signature = inspect.signature(original)
        named = "mixed_precision" in signature.parameters  # else it is another's wrapper, which takes *args, **kwargs

        @functools.wraps(original)
        def init(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            defaults = self.defaults
            if defaults is None or id(ddp) in self._building:  # a wrapper of ours around this one does it
                original(ddp, *args, **kwargs)
                return
            bound = signature.bind(ddp, *args, **kwargs) if named else None
            arguments = kwargs if bound is None else bound.arguments
            given = arguments.get("mixed_precision")
            precision = defaults.precision if given is None else given
            if precision is None:
                original(ddp, *args, **kwargs)
                return
            validate_precision(precision)
            if defaults.options.hooks == "all":
                arguments["mixed_precision"] = None
            self._building.add(id(ddp))
            try:
                if bound is None:
                    original(ddp, *args, **kwargs)
                else:
                    original(*bound.args, **bound.kwargs)
            finally:
                self._building.discard(id(ddp))
            ddp.__dict__["_ddp_mp_built_with"] = given
            patch(ddp, mixed_precision=precision, options=defaults.options)

        return init


_constructor = _Constructor()


class _Installation:
    """What :func:`install` returns: a context manager at whose end is in force what was before."""

    def __init__(self, before: _Defaults | None) -> None:
        self._before, self._ends = before, _constructor.ends

    def __enter__(self) -> _Installation:
        return self

    def __exit__(self, *error: object) -> None:
        if self._ends != _constructor.ends:
            return  # uninstall() inside the block has ended it
        if self._before is None:
            _constructor.take_off()
        else:
            _constructor.defaults = self._before


def install(options: Options | None = None, *, mixed_precision: _MixedPrecision | None = None) -> _Installation:
    """From now on every ``DistributedDataParallel`` that is built with ``mixed_precision=`` is patched as it is built.

    Args:
        options: see :class:`Options`.
        mixed_precision: the precisions of models that are built without ``mixed_precision=``, for frameworks that build the
            wrapper themselves and do not pass it on.  ``None``: such models are left alone.

    With ``hooks="all"`` PyTorch's own mixed precision is not set up on such a model; buffers are cast by ``patch``.  A second
    call replaces options and precisions.  The result works as a context manager, whose end restores what was in force before.
    The effect is process-wide, and no other thread may be building a model during the call.

    Raises:
        TypeError: ``options`` is not :class:`Options`, or ``mixed_precision`` not :class:`MixedPrecision`.
    """
    chosen = Options() if options is None else options
    if not isinstance(chosen, Options):
        hint = "; write mixed_precision=..." if isinstance(options, _MixedPrecision) else ""
        raise TypeError(f"ddp_mp.install: options: expected ddp_mp.Options, found {kind_of(options)}{hint}")
    if mixed_precision is not None:
        validate_precision(mixed_precision)
    installation = _Installation(_constructor.defaults)
    _constructor.defaults = _Defaults(chosen, mixed_precision)
    _constructor.put()
    return installation


def uninstall() -> None:
    """Ends :func:`install`, however often it was called; without it nothing happens.  Patched models stay patched.

    A wrapper of ``DistributedDataParallel.__init__`` that another library has put around ours stays in place.
    """
    _constructor.ends += 1
    _constructor.take_off()
