"""Takes the gradients of a wrapped module from autograd to one reduction per bucket and back.

PyTorch's reducer copies every gradient into a bucket, and every result back, one parameter at a time; it must also be told
about a type that its buckets were not built for, which is where wrong first gradients come from.  This reducer packs a bucket
with one launch, in the type that is reduced, and leaves full-precision gradients in that memory.  Buckets are reduced in the
order of their index on every rank, whatever order they become ready in.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from . import _C
from .buckets import Bucket, Extra, build
from .comm import Communicator, GradBucket
from .hooks import in_range, profiling
from .parameters import Managed


class Reducer:
    """Readiness, reduction and hand-over for the trainable parameters of one wrapped module.

    Args:
        entries: trainable parameters in registration order; the index into it is a parameter's row.
        is_cast: whether a leaf stands for each of them.
        communicator: how a bucket is reduced.
        reduce_dtype: the type that is reduced in; None: each parameter's own.
        caps: byte limits of the buckets, see :func:`ddp_mp.buckets.assign`.
        on_first: called with a row when a gradient arrives while no backward is known to run; see :class:`ddp_mp._C.Gradients`.
        on_error: called when a hook fails, before the error leaves it.
    """

    #: Those that reduce what the backward under way brings.
    _under_way: ClassVar[list[weakref.ref[Reducer]]] = []

    def __init__(
        self,
        entries: Sequence[Managed],
        is_cast: Sequence[bool],
        communicator: Communicator,
        reduce_dtype: torch.dtype | None,
        caps: Sequence[int],
        on_first: Callable[[int, bool], None],
        on_error: Callable[[], None],
    ) -> None:
        self.entries = list(entries)
        self.comm = communicator
        self.buckets = build(self.entries, caps, reduce_dtype)
        self.any_unused = False  # parameters without a gradient are legal: find_unused_parameters or static_graph
        self.static_graph = False  # which ones they are is the same in every round
        self._static_used: bytes | None = None  # empty: all are used
        self._static_flags = b""  # what had gradients on this rank in the first round
        self.open = False  # a synchronised round has begun and not every gradient has arrived
        self.hold = False  # nothing is launched before a backward ends: gradients of a row were seen to arrive more than once
        self.rounds = 0
        self.bytes_reduced = 0
        self.reductions = 0
        self._on_error = on_error
        self._tied = [any(len(self.entries[row].sites) > 1 for row in bucket.rows) for bucket in self.buckets]
        self._ready = [False] * len(self.buckets)
        self._next = 0  # buckets before this one are launched
        self._weak = weakref.ref(self)
        self._held = False  # nothing more is launched before the backward ends
        self._task = -1  # the autograd task of the backward under way
        self._was_open = False
        self._out_of_step = False  # a round failed on this rank: other ranks may have gone on
        self._pending: list[Any] = []
        self._extra: Extra = {}
        self._several = False  # a master may get gradients by several leaves in the backward under way
        self._to_show: dict[int, None] = {}  # rows whose hooks wait for all of them
        self.gradients = self._new_gradients(is_cast, on_first)
        self._hooks = [_MasterHook(e.master, self.gradients.hook(row)) for row, e in enumerate(self.entries)]
        self._direct = [hook for hook, cast in zip(self._hooks, is_cast, strict=True) if not cast]

    def _new_gradients(self, is_cast: Sequence[bool], on_first: Callable[[int, bool], None]) -> _C.Gradients:
        owner = self._weak

        def on_ready(bucket: int) -> None:
            reducer = owner()
            if reducer is not None:
                reducer._bucket_ready(bucket)

        def on_special(row: int, leaf: torch.nn.Parameter) -> None:
            reducer = owner()
            if reducer is not None:
                reducer._special(row, leaf)

        gradients = _C.Gradients(
            [entry.master for entry in self.entries],
            [entry.name for entry in self.entries],
            [bucket.rows for bucket in self.buckets],
            list(is_cast),
            on_first,
            on_ready,
            on_special,
            self._on_error,
        )
        for bucket in self.buckets:
            bucket.gradients, bucket.extra = gradients, self._extra
        return gradients

    def detach(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = self._direct = []

    def __del__(self) -> None:
        """The plan went with its last forward."""
        for hook in getattr(self, "_hooks", ()):
            hook.remove()

    def hook_again(self) -> None:
        """Puts hooks back on masters whose inner tensor was swapped (``torch.utils.swap_tensors``)."""
        for hook in self._hooks:
            hook.order()

    # --- a backward --------------------------------------------------------------------------------------------------

    def begin(self, sync: bool, early: bool, several: bool) -> None:
        """A backward starts.

        ``sync``: it is to be reduced; ``early``: buckets may be reduced before it ends; ``several``: leaves of more than one
        cast may take part.
        """
        self._several = several
        for hook in self._direct:
            hook.order()
        self.gradients.begin(sync and early and not self.hold and self.rounds > 0)
        self._held = bool(self._under_way) and self._is_after_another()
        self._task = torch._C._current_graph_task_id()
        self._was_open = self.open
        if sync:
            self.upgrade()

    def upgrade(self) -> None:
        """The backward under way is to be reduced after all."""
        if self._weak not in self._under_way:
            self._under_way.append(self._weak)
        self.open = True

    def _is_after_another(self) -> bool:
        """Whether the backward under way came to another model before, and that one is not done with reducing.

        Some ranks may reduce a bucket early and others at the end, as where weights may be unused.  What a second model
        reduces in the same backward must come after all of the first one's on every rank, so that ranks pair the same ones.
        """
        for weak in self._under_way:
            other = weak()
            if other is not None and other is not self and (other.any_unused or other._next < len(other.buckets)):
                return True
        return False

    def _leave(self) -> None:
        if self._weak in self._under_way:
            self._under_way.remove(self._weak)

    def cancel(self) -> None:
        """The backward accumulated no gradient: everything is as before it."""
        self._leave()
        self.gradients.end()
        if not self._was_open:
            self._close()

    def finish(self, sync: bool) -> bool:
        """The backward is over: reduces what is left and leaves full-precision gradients on the masters.

        Returns whether the round is complete.  An incomplete one (some expected gradient is missing, and unused parameters
        were not announced) waits for another backward; :meth:`require_closed` complains about it at the next forward.
        """
        if self._to_show:
            self._show_sums()
        complete = sync and (self._next == len(self.buckets) or self.any_unused or not self._missing())
        used = None
        if complete:
            while self._next < len(self.buckets):
                self._launch()
            used = self._used()
        self._give(used)
        self.hold = self.hold or self.gradients.refired
        self.gradients.end()
        self._leave()
        if complete or not self.open:
            self._close()
        self.rounds += complete
        return complete

    def abort(self) -> None:
        """After an error: leaves hold no gradient; what masters have in ``.grad`` stays."""
        self._leave()
        if self.open:
            self._out_of_step = True
        for bucket in self.buckets[self._next - len(self._pending) : self._next]:
            bucket.forget()  # a collective under way may still write there
        self._extra.clear()
        self._to_show.clear()
        try:
            self.gradients.abort()
        finally:
            self._close()

    def require_closed(self) -> None:
        """Raises as PyTorch's reducer does when the last synchronised round still lacks gradients."""
        if not self.open:
            return
        names = [self.entries[row].name for row in self._missing()]
        self._close()
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one. These parameters "
            f"received no gradient in the last backward: {', '.join(names)}. If that is meant, build "
            "DistributedDataParallel with find_unused_parameters=True; otherwise make sure that every output of the "
            "module takes part in the loss."
        )

    def forget_round(self) -> None:
        """The process group changed: what the last round left open is not waited for."""
        self._close()

    # --- ranks without input (Join) ----------------------------------------------------------------------------------

    def zero_buckets(self) -> list[GradBucket]:
        """What a rank without input contributes, in the order of reduction."""
        self.comm.require_agreement()
        last = len(self.buckets) - 1
        return [GradBucket(b, b.zeros(), b.index == last) for b in self.buckets]

    def no_flags(self) -> torch.Tensor:
        """The used flags of a rank without input."""
        return torch.zeros(len(self.entries), dtype=torch.int32, device=self.buckets[0].params[0].device)

    # --- gradients of user hooks, and of several leaves --------------------------------------------------------------

    def _special(self, row: int, leaf: torch.nn.Parameter) -> None:
        """A leaf's gradient that is not simply packed: the master has hooks, or another leaf of it has a gradient too."""
        master = self.entries[row].master
        earlier = self.gradients.source(row)
        for holder in (earlier, leaf) if earlier is not leaf else (leaf,):
            if holder is None or holder.grad is None:
                continue
            part, holder.grad = holder.grad.to(master.dtype), None
            self._add(row, part if self._several else _hooked(master, part))
        if self._several:
            self._to_show[row] = None
        else:
            self._show(row, master)

    def _show_sums(self) -> None:
        """The user's hooks see what all leaves of a master have brought."""
        rows, self._to_show = self._to_show, {}
        for row in rows:
            master = self.entries[row].master
            if row in self._extra:
                self._extra[row] = _hooked(master, self._extra[row])
            self._show(row, master)

    def _show(self, row: int, master: torch.nn.Parameter) -> None:
        if any(not isinstance(hook, _C.GradientHook) for hook in (master._post_accumulate_grad_hooks or {}).values()):
            self._show_to_hooks(row, master)

    def _add(self, row: int, part: torch.Tensor) -> None:
        present = self._extra.get(row)
        self._extra[row] = part if present is None else present + part

    def _show_to_hooks(self, row: int, master: torch.nn.Parameter) -> None:
        """The user's hooks after accumulation see the gradient on the master; what they leave there is reduced."""
        part = self._extra.pop(row, None)
        if part is not None:
            with torch.no_grad():
                master.grad = part.detach() if master.grad is None else master.grad + part.detach()
        for hook in list(master._post_accumulate_grad_hooks.values()):
            if not isinstance(hook, _C.GradientHook):
                hook(master)

    # --- the order of reduction --------------------------------------------------------------------------------------

    def _bucket_ready(self, index: int) -> None:
        self._ready[index] = True
        if self._tied[index] and torch._C._current_graph_task_id() != self._task:
            self._held = True  # in a reentrant checkpoint: the weight's other uses are still to come
        if not self._held:
            while self._next < len(self.buckets) and self._ready[self._next]:
                self._launch()

    def _launch(self) -> None:
        if self.comm.unsettled is not None:
            self.comm.require_agreement()
        if self._out_of_step:  # before the round's first collective, so that ranks pair it
            self.comm.require_same_round(self.rounds + 1, self.buckets)
            self._out_of_step = False
        if profiling():
            in_range("ddp_mp::reduce", self._reduce)(self.buckets[self._next])
        else:
            self._reduce(self.buckets[self._next])
        self._next += 1

    def _reduce(self, bucket: Bucket) -> None:
        before, after = self.comm.division(bucket.reduce_dtype or bucket.params[0].dtype)
        buffer = bucket.contribution(before)
        self._pending.append((self.comm.reduce(bucket, buffer, bucket is self.buckets[-1]), after))
        self.reductions += 1
        self.bytes_reduced += buffer.numel() * buffer.element_size()  # a sparse tensor has no nbytes

    def _give(self, used: bytes | None) -> None:
        """Masters get what was reduced; of buckets that were not, what this rank has."""
        first = self._next - len(self._pending)
        results = [(self.comm.wait(pending), after) for pending, after in self._pending]
        if self.comm.hook is not None:  # before the first gradient changes
            for offset, (reduced, _) in enumerate(results):
                self.buckets[first + offset].check_reduced(reduced)
        given = self.buckets[first : self._next]
        local = self.buckets[self._next :]
        for bucket, (reduced, _) in zip(given, results, strict=True):
            bucket.prepare(reduced)
        for bucket in local:
            bucket.prepare(None)
        for bucket, (reduced, after) in zip(given, results, strict=True):
            bucket.give(reduced, after, used)
        for bucket in local:
            bucket.keep_local()
        self._pending = []

    def _close(self) -> None:
        self.gradients.reset()
        self._ready = [False] * len(self.buckets)
        self._next = 0
        self._pending = []
        self.open = False

    # --- unused parameters -------------------------------------------------------------------------------------------

    def _missing(self) -> list[int]:
        """Rows that are trainable and have had no gradient in this round."""
        rows = [row for bucket in self.buckets for row in self.gradients.unfired(bucket.index)]
        return sorted(row for row in rows if self.entries[row].master.requires_grad)

    def _used(self) -> bytes | None:
        """By row, whether any rank has a gradient for it.  None: all have.

        The flags are reduced after all buckets on every rank, so that ranks pair the same collectives.
        """
        local = self.gradients.contributes()
        if not self.any_unused:
            # a parameter frozen after the model was wrapped has none on any rank, and keeps what it had
            return local if 0 in local else None
        if self.static_graph and self._static_used is not None:
            self._require_same_graph()
            return self._static_used or None
        flags_of_all = self.comm.reduce_flags(local, self.buckets[0].params[0].device)
        if 0 not in local and not self.static_graph:
            return None  # used here is used: the host need not wait for what other ranks say
        total = flags_of_all()
        if self.static_graph:
            self._static_flags = self.gradients.fired_flags()
            self._static_used = total if 0 in total else b""
            return self._static_used or None
        return total

    def _require_same_graph(self) -> None:
        """Raises when this round's gradients are of other parameters than the first round's."""
        flags = self.gradients.fired_flags()
        if flags == self._static_flags:
            return
        pairs = list(zip(self.entries, self._static_flags, flags, strict=True))
        new = [entry.name for entry, before, now in pairs if now > before]
        gone = [entry.name for entry, before, now in pairs if now < before]
        parts = [f"{what}: {', '.join(names)}" for what, names in (("now used", new), ("not used any more", gone)) if names]
        raise RuntimeError(
            "Your training graph has changed in this iteration, and DistributedDataParallel was told that it is static "
            f"({'; '.join(parts)}). Gradients would be lost: build it without static_graph=True, with "
            "find_unused_parameters=True"
        )


class _MasterHook:
    """Our post-accumulate-grad hook on one master.

    PyTorch's reducer hears of a gradient when every such hook has run, so that what hooks do to ``.grad`` is reduced.  Ours is
    a hook like any other: it is kept behind those that the user registers.
    """

    __slots__ = ("_handle", "_inner", "_master")

    def __init__(self, master: Any, hook: Callable[[torch.Tensor], None]) -> None:
        self._master, self._inner = master, master._cdata
        self._handle = master.register_post_accumulate_grad_hook(hook)

    def order(self) -> None:
        """Before a backward: behind all others, and on the tensor that the master is now (``torch.utils.swap_tensors``)."""
        master, key = self._master, self._handle.id
        hooks = master._post_accumulate_grad_hooks
        if len(hooks) > 1 and next(reversed(hooks)) != key:
            ours = hooks[key]  # move_to_end() would not do: autograd goes in the order of the plain dictionary
            OrderedDict.__delitem__(hooks, key)
            OrderedDict.__setitem__(hooks, key, ours)
        if master._cdata != self._inner:
            # the tensor that went away took what calls the hooks along; the parameter still lists them
            master._post_accumulate_grad_hooks, self._inner = hooks, master._cdata

    def remove(self) -> None:
        self._handle.remove()


def _hooked(master: torch.nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """A gradient after the tensor hooks that the user has registered on the master."""
    for hook in list((master._backward_hooks or {}).values()):
        changed = hook(part)
        part = part if changed is None else changed
    return part
