"""Takes the gradients of a wrapped module from autograd to one reduction a bucket and back.

PyTorch's reducer copies every low-precision gradient into a bucket, and every result back, one parameter at a time; it must
also be told about a type that its buckets were not built for, which is where wrong first gradients come from.  This reducer
packs a bucket with one launch, in the type that is reduced, and leaves full-precision gradients as views of that memory.
Buckets are reduced in the order of their index on every rank, whatever order they become ready in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from . import _C
from .buckets import Bucket, PackedBucket, build
from .comm import Communicator, GradBucket
from .last_hooks import LastHooks
from .loose import LooseGradients
from .parameters import Managed
from .ranges import span

Source = _C.Gradients | LooseGradients


class Reducer:
    """Readiness, reduction and hand-over for the trainable parameters of one wrapped module.

    Args:
        entries: trainable parameters in registration order.
        communicator: how a bucket is reduced.
        reduce_dtype: the type that is reduced in; None: each parameter's own.
        caps: byte limits of the buckets, see :func:`ddp_mp.buckets.assign`.
        on_late: called when a gradient arrives while no backward is known to run.
        on_error: called when a hook fails, before the error leaves it.
    """

    #: Those that reduce what the backward under way brings.
    _under_way: ClassVar[list[weakref.ref[Reducer]]] = []

    def __init__(
        self,
        entries: Sequence[Managed],
        communicator: Communicator,
        reduce_dtype: torch.dtype | None,
        caps: Sequence[int],
        on_late: Callable[[], None],
        on_error: Callable[[], None],
    ) -> None:
        self.entries = list(entries)
        self.comm = communicator
        self.buckets = build(self.entries, caps, reduce_dtype)
        self.any_unused = False  # parameters without a gradient are legal: find_unused_parameters or static_graph
        self.static_graph = False  # which ones they are is the same in every round
        self._static_used: dict[int, bytes] | None = None  # empty: all are used
        self._static_flags = b""  # what had gradients on this rank in the first round
        self.set_aside = False  # there were gradients when the backward began
        self.open = False  # a synchronised round has begun and not every gradient has arrived
        self.bytes_reduced = 0
        self.reductions = 0
        self._on_late, self._on_error = on_late, on_error
        self._late_source: Source | None = None
        self._late_row = -1
        self._tied = [any(len(self.entries[row].sites) > 1 for row in bucket.rows) for bucket in self.buckets]
        self._ready = [False] * len(self.buckets)
        self._next = 0  # buckets before this one are launched
        self._weak = weakref.ref(self)
        self._held = False  # nothing more is launched before the backward ends
        self._task = -1  # the autograd task of the backward under way
        self._was_open = False
        self._round = 0
        self._out_of_step = False  # a round failed on this rank: other ranks may have gone on
        self._pending: list[Any] = []
        self._of_source: list[tuple[Source, list[Bucket]]] = self._watch()
        # of each bucket, looked up once: what is told that it is launched, and its number there
        self._launched = [(self._source_of(bucket).set_launched, getattr(bucket, "local", 0)) for bucket in self.buckets]
        self._hooks = LastHooks()
        for source, buckets in self._of_source:
            for bucket, k, hook in _hooks(source, buckets):
                self._hooks.put(bucket.params[k], hook)

    # --- construction ------------------------------------------------------------------------------------------------

    def _watch(self) -> list[tuple[Source, list[Bucket]]]:
        """Binds every bucket to what watches its gradients: one ``_C.Gradients`` a device, or itself."""
        of_source: list[tuple[Source, list[Bucket]]] = []
        packed: dict[torch.device, list[PackedBucket]] = {}
        for bucket in self.buckets:
            if isinstance(bucket, PackedBucket):
                packed.setdefault(bucket.device, []).append(bucket)
            else:
                assert isinstance(bucket, LooseGradients)
                bucket.on_first, bucket.on_ready = self._callbacks([bucket], weakref.ref(bucket))
                bucket.on_error = self._on_error
                of_source.append((bucket, [bucket]))
        for group in packed.values():
            of_source.append(self._watch_packed(group))
        return of_source

    def _watch_packed(self, group: list[PackedBucket]) -> tuple[Source, list[Bucket]]:
        order = [row for bucket in group for row in bucket.rows]
        local = {row: k for k, row in enumerate(order)}
        found: list[Source] = []
        on_first, on_ready = self._callbacks(group, lambda: found[0] if found else None)
        gradients = _C.Gradients(
            [self.entries[row].param for row in order],
            [self.entries[row].name for row in order],
            [[local[row] for row in bucket.rows] for bucket in group],
            on_first,
            on_ready,
            self._on_error,
        )
        found.append(gradients)
        for k, bucket in enumerate(group):
            bucket.watched_by(gradients, k)
        return gradients, list(group)

    def _callbacks(
        self, group: Sequence[Bucket], source: Callable[[], Source | None]
    ) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """on_first and on_ready of a source.  They hold the reducer weakly: it owns the source."""
        owner = weakref.ref(self)
        indices = [bucket.index for bucket in group]

        def on_first(row: int) -> None:
            reducer, alive = owner(), source()
            if reducer is not None and alive is not None:
                reducer._late(alive, row)

        def on_ready(bucket: int) -> None:
            reducer = owner()
            if reducer is not None:
                reducer._bucket_ready(indices[bucket])

        return on_first, on_ready

    def hook_again(self) -> None:
        """Puts hooks back on parameters whose inner tensor was swapped (``torch.utils.swap_tensors``)."""
        self._hooks.put_again()

    def detach(self) -> None:
        """Removes the hooks from the parameters."""
        self._hooks.remove()

    # --- a backward --------------------------------------------------------------------------------------------------

    def begin(self, sync: bool, early: bool) -> None:
        """A backward starts.  ``sync``: it is to be reduced; ``early``: buckets may be reduced before it ends."""
        self._hooks.order()
        self.set_aside = False
        for source, buckets in self._of_source:
            row = self._late_row if source is self._late_source else -1
            if source.begin(sync and early, row):
                self.set_aside = True
                for bucket in buckets:
                    bucket.check_stashes()
        self._late_source, self._late_row = None, -1
        self._held, self._task = self._is_after_another(), torch._C._current_graph_task_id()
        self._was_open = self.open
        if sync:
            self.upgrade()

    def upgrade(self) -> None:
        """The backward under way is to be reduced after all."""
        if self._weak not in self._under_way:
            self._under_way.append(self._weak)
        if not self.open:
            self._round += 1
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

    def touched(self) -> bool:
        """Whether any gradient has arrived in the backward under way."""
        for source, _ in self._of_source:  # noqa: SIM110 - a generator costs 2 us in training
            if source.fires:
                return True
        return False

    def cancel(self) -> None:
        """The backward accumulated no gradient: everything is as before it."""
        self._leave()
        for bucket in self.buckets:
            bucket.keep_local()
        for source, _ in self._of_source:
            source.end()
        if not self._was_open:
            self._close()

    def finish(self, sync: bool) -> bool:
        """The backward is over and parameters are masters: reduces what is left and leaves full-precision gradients.

        Returns whether the round is complete.  An incomplete one (some expected gradient is missing, and unused parameters
        were not announced) waits for another backward; :meth:`require_closed` complains about it at the next forward.
        """
        used = None
        complete = False
        if sync and self._next == len(self.buckets) and not self.any_unused:
            complete = True  # every bucket was complete and is launched: nothing is missing, nothing can be unused
        elif sync:
            complete = self.any_unused or not self._missing()
            if complete:
                while self._next < len(self.buckets):
                    self._launch()
            used = self._used() if complete else None
        launched = self._settle(used)
        if len(launched) < len(self.buckets):
            for bucket in self.buckets:
                if bucket.index not in launched:
                    bucket.keep_local()
        for source, _ in self._of_source:
            source.end()
        self._leave()
        if complete or not self.open:
            self._close()
        return complete

    def abort(self) -> None:
        """After an error, with masters in place: gradients become what they were before the backward."""
        self._leave()
        if self.open:
            self._out_of_step = True
        first = self._next - len(self._pending)
        for bucket in self.buckets[first : self._next]:
            bucket.forget()  # a collective under way may still write there
        try:
            for source, _ in self._of_source:
                source.abort()
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
        last = len(self.buckets) - 1
        return [GradBucket(b, b.zeros(b.reduce_dtype), b.index == last) for b in self.buckets]

    def no_flags(self) -> torch.Tensor:
        """The used flags of a rank without input."""
        count = sum(len(bucket.params) for bucket in self.buckets)
        return torch.zeros(count, dtype=torch.int32, device=self.buckets[0].params[0].device)

    def refired(self) -> bool:
        """Whether a gradient arrived more than once in the present round."""
        return any(source.refired for source, _ in self._of_source)

    # --- the order of reduction --------------------------------------------------------------------------------------

    def _late(self, source: Source, row: int) -> None:
        self._late_source, self._late_row = source, row
        with _Report(self._on_error):
            self._on_late()

    def _bucket_ready(self, index: int) -> None:
        self._ready[index] = True
        if self._tied[index] and torch._C._current_graph_task_id() != self._task:
            self._held = True  # in a reentrant checkpoint: the weight's other uses are still to come
        if self._held:
            return
        with _Report(self._on_error):
            while self._next < len(self.buckets) and self._ready[self._next]:
                self._launch()

    def _launch(self) -> None:
        if self._out_of_step:  # before the round's first collective, so that ranks pair it
            self.comm.require_same_round(self._round, self.buckets)
            self._out_of_step = False
        bucket = self.buckets[self._next]
        last = self._next == len(self.buckets) - 1
        before, after = self.comm.division(bucket.reduce_dtype or bucket.params[0].dtype)
        with span("ddp_mp::reduce"):
            buffer = bucket.contribution(bucket.reduce_dtype, before)
            self._pending.append((self.comm.reduce(bucket, buffer, last), after))
        set_launched, local = self._launched[self._next]
        set_launched(local)
        self._next += 1
        self.reductions += 1
        self.bytes_reduced += buffer.numel() * buffer.element_size()  # a sparse tensor has no nbytes

    def _settle(self, used: dict[int, bytes] | None) -> set[int]:
        done = set()
        first = self._next - len(self._pending)
        results = [(self.comm.wait(pending), after) for pending, after in self._pending]
        if self.comm.hook is not None:  # before the first gradient changes
            for offset, (reduced, _) in enumerate(results):
                self.buckets[first + offset].check_reduced(reduced)
        for offset, (reduced, after) in enumerate(results):
            bucket = self.buckets[first + offset]
            bucket.settle(reduced, after, None if used is None else used[id(self._source_of(bucket))])
            done.add(bucket.index)
        self._pending = []
        return done

    def _source_of(self, bucket: Bucket) -> Source:
        return bucket.gradients if isinstance(bucket, PackedBucket) else bucket  # type: ignore[return-value]

    def _close(self) -> None:
        for source, _ in self._of_source:
            source.reset()
        self._ready = [False] * len(self.buckets)
        self._next = 0
        self._pending = []
        self.open = False

    # --- unused parameters -------------------------------------------------------------------------------------------

    def _missing(self) -> list[int]:
        """Rows that are trainable and have had no gradient in this round."""
        rows = []
        for source, buckets in self._of_source:
            for k, bucket in enumerate(buckets):
                for local in source.unfired(k):
                    position = bucket.gradients.position(local) if isinstance(bucket, PackedBucket) else 0
                    if bucket.params[position].requires_grad:
                        rows.append(bucket.rows[position])
        return sorted(rows)

    def _used(self) -> dict[int, bytes] | None:
        """Flags of every source, by its id: whether any rank has a gradient for the row.  None: all have.

        The flags are reduced after all buckets on every rank, so that ranks pair the same collectives.
        """
        local = {id(source): source.contributes() for source, _ in self._of_source}
        if not self.any_unused:
            # a parameter frozen after the model was wrapped has none on any rank, and keeps what it had
            return local if any(0 in flags for flags in local.values()) else None
        if self.static_graph and self._static_used is not None:
            self._require_same_graph()
            return self._static_used or None
        joined = b"".join(local.values())
        flags_of_all = self.comm.reduce_flags(joined.translate(_FIRED_ONLY), self.buckets[0].params[0].device)
        if joined.count(1) == len(joined) and not self.static_graph:
            return None  # used here is used: the host need not wait for what other ranks say
        total = flags_of_all()
        out: dict[int, bytes] = {}
        offset = 0
        for key, flags in local.items():
            out[key] = total[offset : offset + len(flags)]
            offset += len(flags)
        if self.static_graph:
            self._static_flags = self._fired()
            self._static_used = out if 0 in total else {}
            return self._static_used or None
        return out

    def _fired(self) -> bytes:
        """One byte a row, source by source: 1 when a gradient arrived in this round."""
        return b"".join(bytes(source.fired_flags()) for source, _ in self._of_source).translate(_FIRED_ONLY)

    def _require_same_graph(self) -> None:
        """Raises when this round's gradients are of other parameters than the first round's."""
        flags = self._fired()
        if flags == self._static_flags:
            return
        rows = [row for _, buckets in self._of_source for bucket in buckets for row in bucket.rows]
        pairs = sorted(zip(rows, self._static_flags, flags, strict=True))
        new = [self.entries[row].name for row, before, now in pairs if now > before]
        gone = [self.entries[row].name for row, before, now in pairs if now < before]
        if new or gone:
            parts = [f"{what}: {', '.join(names)}" for what, names in (("now used", new), ("not used any more", gone)) if names]
            raise RuntimeError(
                "Your training graph has changed in this iteration, and DistributedDataParallel was told that it is static "
                f"({'; '.join(parts)}). Gradients would be lost: build it without static_graph=True, with "
                "find_unused_parameters=True"
            )


# contributes() also says 2, for a gradient that fired empty: no use.
_FIRED_ONLY = bytes(1 if value == 1 else 0 for value in range(256))


def _hooks(source: Source, buckets: list[Bucket]) -> list[tuple[Bucket, int, Callable[[torch.Tensor], None]]]:
    """(bucket, position, hook) of every row of a source."""
    out, row = [], 0
    for bucket in buckets:
        for position in range(len(bucket.params)):
            out.append((bucket, position, source.hook(row)))
            row += 1
    return out


class _Report:
    """Calls ``on_error`` when its block raises, and lets the error through."""

    __slots__ = ("_on_error",)

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._on_error = on_error

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self._on_error()
