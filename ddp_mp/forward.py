"""What happens around a forward of the root module: parameters become copies before it, and what ends it decides the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from .backward import Backward
from .low import LowPrecision, ReplacedError
from .ranges import span
from .tensors import cast_tensors, tensors_in
from .untraced import untraced
from .waits import Waits
from .weak import weakly

#: The transform of torch.func that is under way in this thread, or None.
_transform = torch._C._functorch.peek_interpreter_stack


class Forward:
    """The root module's hooks, registered with ``prepend`` so that hooks of others see cast parameters.

    Args:
        module: the wrapped module.
        prepare: called before each forward, and with True when a parameter was replaced; says whether to cast.
        output_dtype: what floating-point outputs are cast to; None: they are left alone.
    """

    def __init__(
        self,
        module: nn.Module,
        low: LowPrecision,
        backward: Backward,
        waits: Waits,
        prepare: Callable[[bool], bool],
        output_dtype: torch.dtype | None,
    ) -> None:
        self.low, self.backward, self.waits = low, backward, waits
        self._prepare = prepare
        self._output_dtype = output_dtype
        self._calls: list[_Call] = []
        self.forwards = 0
        backward.is_forwarding = weakly(self._is_under_way, False)
        enter, leave = weakly(self._enter, None), weakly(self._leave, None)

        def before(root: nn.Module, args: Any) -> None:
            enter(_module_call(sys._getframe(1)))

        def after(root: nn.Module, args: Any, output: Any) -> Any:
            return leave(output)

        self._handles = [
            module.register_forward_pre_hook(untraced(before), prepend=True),
            module.register_forward_hook(untraced(after), always_call=True),
        ]

    def detach(self) -> None:
        """Removes the hooks from the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.waits.detach()

    @property
    def hook_ids(self) -> set[int]:
        """Keys of our hooks in the module's hook dictionaries."""
        return {handle.id for handle in self._handles} | self.waits.hook_ids

    def _enter(self, frame: FrameType) -> None:
        if self._calls:
            self._calls = [call for call in self._calls if call.on_stack(frame)]
        self.backward.drop_dead()
        call = _Call(frame, sys.exc_info()[1])
        self._calls.append(call)
        try:
            if _transform() is None:
                call.ours = self._cast()
            else:
                with torch._C._DisableFuncTorch():  # which would wrap copies that are made now, and they outlive it
                    call.ours = self._cast()
            if not call.ours:
                call.low, self.low.region.low = self.low.region.low, False
        except BaseException:
            self._calls.remove(call)
            raise
        self.forwards += 1

    def _is_under_way(self) -> bool:
        """Whether a call of the root module is under way, in whatever thread."""
        if self._calls:
            self._calls = [call for call in self._calls if call.is_running()]
        return bool(self._calls)

    def _cast(self) -> bool:
        """Returns whether the forward computes with the module's own parameters."""
        if not self._prepare(False):
            return False
        try:
            self.low.enter(live=self.backward.live())
        except ReplacedError:
            if not self._prepare(True):
                return False
            self.low.enter(live=False)
        self.waits.at_root()
        return True

    def _leave(self, output: Any) -> Any:
        """Returns what the caller gets in the output's place; None: the output."""
        call = self._calls[-1] if self._calls else None
        try:
            self._end_call(call, output)
        finally:
            if call is not None:  # not before: nobody else puts masters back meanwhile
                self._calls.remove(call)
        if self._output_dtype is None or self._calls:
            return None  # a module that called itself casts what leaves the outermost call
        return cast_tensors(output, self._output_dtype)

    def _end_call(self, call: _Call | None, output: Any) -> None:
        self.waits.forward_ended()
        if call is not None and not call.ours:
            self.low.region.low = call.low
            return
        if len(self._calls) > 1 or self.backward.running:
            return  # the module called itself, or a checkpoint computes its forward again inside a backward
        failed = call is not None and sys.exc_info()[1] is not call.handled
        if failed or not torch.is_grad_enabled():
            with span("ddp_mp::restore"):
                self.backward.leave()
            return
        self.backward.add([t for t in tensors_in(output) if t.requires_grad and t.grad_fn is not None])


def _module_call(frame: FrameType) -> FrameType:
    """The frame of ``nn.Module.__call__`` that runs the hook, which lasts as long as the call."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_name != "_call_impl":
        found = found.f_back
    return found or frame


class _Call:
    """One call of the root module under way."""

    __slots__ = ("frame", "handled", "low", "ours")

    def __init__(self, frame: FrameType, handled: BaseException | None) -> None:
        self.frame = frame
        self.ours = True  # no tensors stand in for the parameters
        self.low = False  # where some do: whether the module itself is in low precision meanwhile
        self.handled = handled  # the exception being handled when the call began: an error of the call is another one

    def is_running(self) -> bool:
        """Whether the call has not ended, in whatever thread.  Python can clear a frame only when it has."""
        if self.frame.f_code.co_name != "_call_impl":
            return True  # not that of the call, which a compiler may have taken apart: the call says when it ends
        try:
            self.frame.clear()
        except RuntimeError:
            return True
        return False

    def on_stack(self, frame: FrameType | None) -> bool:
        """Whether the call is still under way, seen from ``frame``.  A call ended by KeyboardInterrupt never said so."""
        while frame is not None:
            if frame is self.frame:
                return True
            frame = frame.f_back
        return False
