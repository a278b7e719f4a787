"""Plain tensors that stand in for parameters inside a forward, as ``torch.func.functional_call`` of a part puts them there.

PyTorch writes such a tensor into ``module._parameters``, where the leaf in ``module.__dict__`` would hide it.  While models are
patched, its function for that takes the leaf away first, and puts it back when the parameter itself comes back.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn
from torch.nn.utils import _named_member_accessor as accessor


class _StandIns:
    """PyTorch's ``swap_tensor`` while models are patched."""

    def __init__(self) -> None:
        self._owners: weakref.WeakSet[object] = weakref.WeakSet()
        self._hidden: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()
        self._ours: Any = None
        self._original: Any = None

    def watch(self, owner: object) -> None:
        """A model is patched."""
        self._owners.add(owner)
        home: Any = accessor
        if self._ours is None:
            self._original = home.swap_tensor
            self._ours = home.swap_tensor = self._wrapper(self._original)

    def forget(self, owner: object) -> None:
        """The model is patched no more."""
        self._owners.discard(owner)
        home: Any = accessor
        if not self._owners and home.swap_tensor is self._ours:
            home.swap_tensor = self._original
            self._ours = self._original = None

    def _wrapper(self, original: Any) -> Any:
        @functools.wraps(original)
        def swap_tensor(module: nn.Module, name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            master = module._parameters.get(name)
            found = original(module, name, tensor, *args, **kwargs)
            if master is not None and name in module.__dict__:
                self._hidden.setdefault(module, {})[name] = master, module.__dict__.pop(name)
            elif module in self._hidden and self._hidden[module].get(name, (None,))[0] is tensor:
                _, module.__dict__[name] = self._hidden[module].pop(name)
            return found

        return swap_tensor


stand_ins = _StandIns()
