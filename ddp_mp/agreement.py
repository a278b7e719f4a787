"""Whether all ranks of a wrapper's process group were patched alike.

Ranks that reduce other buckets, other types or in another order hang, or compute wrong numbers without a word.  Before the
first reduction of a new plan each rank therefore compares what decides collectives and numbers with what the others said.
That goes through the store of the process group and never through a collective, which a rank that is not patched would pair
with one of its own.

What is in the store, for each wrapper, under its number in the order in which a rank patches the wrappers of the group:

``rank/R``        the digest of what rank R has now, and in which comparison it stands by it; see :class:`_Said`.
``count/D``       how many ranks have the digest D.  It equals the size of the group when all agree: one small read tells.
``text/D``        what the digest stands for; read only to say what differs.
``settled/N``     how the N-th comparison ended: the digest on which all agreed, or a rank that differs from rank 0.

A rank says what it has when it is patched and when it has a new plan, and waits for nothing then.  Before the first reduction
it reads the count.  Only where that is not complete it waits: rank 0 looks at all ranks, the others at rank 0 and at how it
ended.  A rank whose digest has not changed since the last comparison does not come to the store at all.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.nn.parallel.distributed import _MixedPrecision

from . import ddp as native
from ._version import __version__
from .full_precision import plain_name
from .log import logger
from .options import Options

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from .plan import Plan

#: By group of fields, the value of each.  A list is the value of several, which :data:`_OF_PARAMETER` names.
Description = dict[str, dict[str, Any]]

_OF_PARAMETER = ("shape", "type", "requires_grad", "cast", "sparse gradient")

_AS_BUILT = "build DistributedDataParallel with the same arguments, and register the same communication hook, on every rank"

_CURES = {
    "options": "call ddp_mp.unpatch(ddp) and ddp_mp.patch(ddp, ...) with the same arguments on every rank",
    "wrapper": _AS_BUILT,
    "parameters": "give the model the same parameters, with the same requires_grad, on every rank; then unpatch and patch it",
    "buckets": _AS_BUILT,
}

_KEPT = "Nothing was reduced, and masters are in place"

_SHOWN = 4  # differences in one error

_UNPATCHED = "-"  # in the place of a digest
_FOR_GOOD = 2**31  # later than any comparison: the rank reduces by PyTorch's own hooks and never comes to one


# --- what is compared ----------------------------------------------------------------------------------------------------


def of_options(precision: _MixedPrecision, options: Options) -> dict[str, Any]:
    """What of the arguments of ``patch`` decides collectives or numbers, in the words in which an error shows it."""
    return {
        "ddp_mp.__version__": __version__,
        "hooks": repr(options.hooks),
        "param_dtype": str(precision.param_dtype),
        "reduce_dtype": str(precision.reduce_dtype),
        "buffer_dtype": str(precision.buffer_dtype),
        "full_precision_modules": str(_entries(options.full_precision_modules)),
        "full_precision_outputs": str(_entries(options.full_precision_outputs)),
        "output_dtype": str(options.output_dtype),
        "cast_forward_inputs": str(options.cast_forward_inputs),
        "autocast": str(options.autocast),
    }


def _entries(entries: tuple[Any, ...]) -> list[str]:
    return sorted(entry if isinstance(entry, str) else entry.__qualname__ for entry in entries)


def of_wrapper(ddp: DistributedDataParallel, hook: tuple[Any, Any] | None) -> dict[str, Any]:
    """What of the wrapper decides collectives: how unused parameters are dealt with, and the communication hook."""
    name = None if hook is None else getattr(hook[0], "__qualname__", type(hook[0]).__name__)
    return {
        "find_unused_parameters": str(bool(ddp.find_unused_parameters)),
        "static_graph": str(bool(ddp.static_graph)),
        "communication hook": str(name),
    }


def of_plan(plan: Plan) -> Description:
    """The parameters in their order, and the buckets that their gradients are reduced in."""
    cast = {id(row) for row in plan.pool.rows}
    trained = {id(row) for row in plan.trained}
    parameters = {
        plain_name(row.name): [
            str(list(row.master.shape)),
            str(row.master.dtype),
            str(id(row) in trained),
            str(id(row) in cast),
            str(row.sparse),
        ]
        for row in plan.rows
    }
    buckets: dict[str, Any] = {"number of gradient buckets": str(len(plan.reducer.buckets))}
    for bucket in plan.reducer.buckets:
        elements = sum(param.numel() for param in bucket.params)
        names = f"{plain_name(bucket.names[0])!r} to {plain_name(bucket.names[-1])!r}"
        reduced_in = bucket.reduce_dtype or bucket.params[0].dtype
        buckets[f"gradient bucket {bucket.index}"] = f"{elements} elements, reduced in {reduced_in}, {names}"
    return {"parameters": parameters, "buckets": buckets}


def _differences(theirs: Description, ours: Description, they: str, we: str) -> str:
    """What differs in the first group that does, and what to do; empty when nothing differs."""
    for group, cure in _CURES.items():
        found = _of_group(theirs.get(group, {}), ours.get(group, {}), they, we)
        if found:
            more = f"; and {len(found) - _SHOWN} more differences" if len(found) > _SHOWN else ""
            return f"{'; '.join(found[:_SHOWN])}{more}. To mend it, {cure}"
    return ""


def _of_group(theirs: dict[str, Any], ours: dict[str, Any], they: str, we: str) -> list[str]:
    found = []
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        their, our = theirs.get(name), ours.get(name)
        if their is None or our is None:
            holder, other = (we, they) if their is None else (they, we)
            found.append(f"{holder} has {_label(name, our or their)}, which {other} has not")
        elif isinstance(their, list):
            fields = zip(_OF_PARAMETER, their, our, strict=True)
            found += [f"{they} has {f}={a} for parameter {name!r}, {we} has {b}" for f, a, b in fields if a != b]
        elif their != our:
            found.append(f"{they} has {name}={their}, {we} has {our}")
    if not found and list(theirs) != list(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        index, (a, b) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        found.append(f"{they} has {a!r} as parameter number {index}, {we} has {b!r}")
    return found


def _label(name: str, value: Any) -> str:
    return f"parameter {name!r}" if isinstance(value, list) else f"{name}: {value}"


# --- how it is compared --------------------------------------------------------------------------------------------------


class _Said(NamedTuple):
    """What a rank has in the store.

    ``comparison``: the number of the last one that it has come to with this digest; 0 for none.  Until then it may still get
    another plan, and a difference is none yet.
    """

    digest: str
    comparison: int

    def encode(self) -> str:
        return f"{self.digest} {self.comparison}"

    @classmethod
    def decode(cls, text: bytes) -> _Said:
        digest, comparison = text.decode().split()
        return cls(digest, int(comparison))


class _Ranks:
    """The ranks of one wrapper's process group, as one of them sees them through the store."""

    def __init__(self, group: Any, store: dist.Store) -> None:
        self.group = group
        self.rank, self.size = int(group.rank()), int(group.size())
        number = store.add(f"wrappers of rank {self.rank}", 1)
        self._store: dist.Store = dist.PrefixStore(f"wrapper {number}", store)
        self._keys = [f"rank/{rank}" for rank in range(self.size)]
        self._digest = ""  # what this rank has said; empty: nothing, or that it is not patched
        self._agreed = ""  # what all ranks have agreed on
        self._ours: Description = {}
        self._comparison = 0

    def say(self, ours: Description, comparison: int = 0) -> bool:
        """Tells the others what this rank has, and waits for nothing.  Returns whether it is to be compared."""
        text = json.dumps(ours)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._ours = ours
        if digest != self._digest:
            self.withdraw(_Said(digest, comparison))
            if self._store.add(f"count/{digest}", 1) == 1:
                self._store.set(f"text/{digest}", text)
            self._digest = digest
        return digest != self._agreed

    def withdraw(self, instead: _Said) -> None:
        """What this rank has said holds no more."""
        if self._digest:
            self._store.add(f"count/{self._digest}", -1)
            self._digest = ""
        self._store.set(self._keys[self.rank], instead.encode())

    def compare(self, seconds: float) -> None:
        """Returns when all ranks have said the same.  RuntimeError when one differs, or has not said it in time."""
        self._comparison += 1
        deadline, pause = time.monotonic() + seconds, 0.002
        if not self._all_agree():
            self._store.set(self._keys[self.rank], _Said(self._digest, self._comparison).encode())
            while not self._settled():
                if time.monotonic() > deadline:
                    self._end_late(seconds)
                    break
                time.sleep(pause)
                pause = min(1.5 * pause, 0.5)
        self._agreed = self._digest

    def _all_agree(self) -> bool:
        """One small read.  The outcome is written down: ranks that go on may say something else before the others look."""
        if self._store.add(f"count/{self._digest}", 0) != self.size:
            return False
        self._store.set(self._end, f"agreed {self._digest}")
        return True

    def _settled(self) -> bool:
        """Whether all ranks agree.  Raises where it is certain that they will not."""
        if self._store.check([self._end]):
            return self._is_agreement(self._store.get(self._end).decode())
        if self._all_agree():
            return True
        rank, digest = self._certain_to_differ()
        if digest:
            odd, first = ((rank, digest), self._digest) if self.rank == 0 else ((self.rank, self._digest), digest)
            self._store.set(self._end, f"differs {odd[0]} {odd[1]} {first}")
            raise self._difference(rank, digest)
        return False

    def _is_agreement(self, outcome: str) -> bool:
        """Whether the comparison ended well for this rank too; raises otherwise."""
        verdict, *what = outcome.split()
        if verdict == "agreed":
            if what[0] != self._digest:  # this rank has got another plan since, and only this one
                raise self._difference(0 if self.rank else 1, what[0])
            return True
        rank, digest, first = what
        raise self._difference(int(rank), digest) if self._digest == first else self._difference(0, first)

    @property
    def _end(self) -> str:
        return f"settled/{self._comparison}"

    def _certain_to_differ(self) -> tuple[int, str]:
        """A rank that stands by another digest in this comparison, and the digest, which is empty when there is none.

        Only rank 0 reads what all have said.
        """
        keys = self._keys if self.rank == 0 else self._keys[:1]
        if self._store.check(keys):
            for rank, text in enumerate(self._store.multi_get(keys)):
                said = _Said.decode(text)
                if said.digest != self._digest and said.comparison >= self._comparison:
                    return rank, said.digest
        return 0, ""

    # --- errors --------------------------------------------------------------------------------------------------------

    def _end_late(self, seconds: float) -> None:
        """The time is over: raises, unless all have agreed by now."""
        error = self._late(seconds)
        if error is not None:  # other ranks may never have come to this comparison: it is still to be made
            self._store.set(self._keys[self.rank], _Said(self._digest, 0).encode())
            self._comparison -= 1
            raise error

    def _late(self, seconds: float) -> RuntimeError | None:
        """The error that says who has not answered, or what is different; None when nothing is."""
        silent = self._first_silent()
        if silent is not None:
            return RuntimeError(
                f"ddp_mp: {self._name(silent)} has not said within {seconds:g} s (Options.agree_seconds) what it was patched "
                "with: it is not patched, or was not given as many wrappers of this process group, or comes to it later. "
                f"{_KEPT}. Patch on every rank, wrappers in the same order"
            )
        for rank, text in enumerate(self._store.multi_get(self._keys)):
            digest = _Said.decode(text).digest
            if digest == _UNPATCHED:
                return RuntimeError(
                    f"ddp_mp: {self._name(rank)} was unpatched, and has not been patched again within {seconds:g} s "
                    f"(Options.agree_seconds), while {self._name(self.rank)} is patched. {_KEPT}. Unpatch and patch on "
                    "every rank alike"
                )
            if digest != self._digest:
                late = f"{self._name(rank)} has made no plan like this one within {seconds:g} s (Options.agree_seconds): "
                return self._difference(rank, digest, late)
        return None

    def _first_silent(self) -> int | None:
        """The first rank that has said nothing, by halves: ten questions for a thousand ranks."""
        if self._store.check(self._keys):
            return None
        low, high = 0, self.size  # keys before ``low`` are there, one before ``high`` is not
        while high - low > 1:
            middle = (low + high) // 2
            if self._store.check(self._keys[low:middle]):
                low = middle
            else:
                high = middle
        return low

    def _difference(self, rank: int, digest: str, late: str = "") -> RuntimeError:
        """The error of a rank that has another digest."""
        theirs = json.loads(self._store.get(f"text/{digest}"))
        return RuntimeError(
            f"ddp_mp: ranks do not agree, so that gradients would be reduced wrong, or never: {late}"
            f"{_differences(theirs, self._ours, self._name(rank), self._name(self.rank))}. {_KEPT}"
        )

    def _name(self, rank: int) -> str:
        number = dist.get_global_rank(self.group, rank)
        return f"this rank {number}" if rank == self.rank else f"rank {number}"


# --- what is called ------------------------------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[DistributedDataParallel, _Ranks] = weakref.WeakKeyDictionary()


def say(ddp: DistributedDataParallel, group: Any, description: Description, by_pytorch: bool = False) -> bool:
    """Tells the other ranks what this one has.  No rank is waited for.

    Args:
        ddp: the wrapper.
        group: its process group.
        description: by group of fields, what :func:`of_options` and others return.
        by_pytorch: PyTorch's own hooks reduce, so that this rank never comes to compare.

    Returns:
        Whether it is to be compared before the next reduction.  Never in a group of one rank, and not in one without a store.
    """
    ranks = _ranks_of(ddp, group)
    if ranks is None:
        return False
    try:
        return ranks.say(description, _FOR_GOOD if by_pytorch else 0)
    except dist.DistError as error:
        _give_up(error)
        return False


def compare(ddp: DistributedDataParallel, group: Any, description: Description, seconds: float) -> None:
    """Compares what this rank has with all other ranks, which are waited for.

    Raises:
        RuntimeError: a rank has something else, which the error names with both values; or it has not said within ``seconds``
            what it has.
    """
    if not say(ddp, group, description):
        return
    try:
        _known[ddp].compare(seconds)
    except dist.DistError as error:
        _give_up(error)


def withdraw(ddp: DistributedDataParallel) -> None:
    """Tells the other ranks that this one is not patched any more."""
    ranks = _known.get(ddp)
    if ranks is None:
        return
    try:
        ranks.withdraw(_Said(_UNPATCHED, 0))
    except dist.DistError as error:
        _give_up(error)


def _ranks_of(ddp: DistributedDataParallel, group: Any) -> _Ranks | None:
    known = _known.get(ddp)
    if known is not None and known.group is group:
        return known
    if group.size() == 1:
        return None
    store = native.group_store(group)
    if store is None:
        logger.debug("the process group has no store: ranks do not compare what they were patched with")
        return None
    try:
        _known[ddp] = ranks = _Ranks(group, dist.PrefixStore("ddp_mp", store))
    except dist.DistError as error:
        _give_up(error)
        return None
    return ranks


def _give_up(error: Exception) -> None:
    """The store is gone, as its process may have ended: a wrapper is patched and unpatched without it."""
    logger.debug("ranks do not compare what they were patched with, as the process group's store fails: %s", error)
