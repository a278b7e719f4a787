"""The plan: what one set of parameters of a wrapped module is trained with.

A plan is built as a whole and never changed.  When the module holds other parameters than it did, the model gets a new plan;
forwards that were computed with the old one keep it until their backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from .autocast import AutocastForward, device_type
from .backward import Backward
from .casts import require_shape
from .comm import Communicator
from .full_precision import FullPrecisionModules
from .leaves import LeafPool
from .options import Options
from .parameters import Managed, managed_parameters
from .reducer import Reducer
from .step import Region
from .waits import Waits

# The property itself: a loop over many frozen parameters then runs in C.
_requires_grad: Callable[[torch.Tensor], bool] = vars(torch._C.TensorBase)["requires_grad"].__get__


class Plan:
    """Leaves, gradients, reduction and waits for the parameters that a module has now.

    Args:
        module: the wrapped module.
        ignored: names as ``DistributedDataParallel.parameters_to_ignore`` holds them.
        caps: byte limits of the gradient buckets.
        region: of the patched model, whose plans follow each other.

    Raises:
        ValueError: the options do not fit the module.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: set[str],
        caps: Sequence[int],
        precision: _MixedPrecision,
        options: Options,
        comm: Communicator,
        region: Region,
    ) -> None:
        self.region, self.device_type = region, device_type(module)
        self.casts = precision.param_dtype is not None
        self.full_modules = FullPrecisionModules(module, options, precision.param_dtype, self.region)
        self.rows = self.full_modules.mark(managed_parameters(module, ignored))
        for row in self.rows:
            row.own_reduction = row.full and precision.reduce_dtype is None
        self.trained = [row for row in self.rows if row.master.requires_grad]
        self.pool = LeafPool(self.rows, precision.param_dtype, options)
        self.ids = {id(row.master) for row in self.rows}
        self.added: set[int] = set()  # ``id`` of parameters that came after the wrapper was built
        cast = {id(row) for row in self.pool.rows}
        self.is_cast = [id(row) in cast for row in self.trained]
        reduce_dtype = precision.reduce_dtype or precision.param_dtype
        make_reducer = functools.partial(Reducer, self.trained, self.is_cast, comm, reduce_dtype, caps)
        self.backward = Backward(self.pool, self.region, make_reducer)
        self.training, self.reducer = self.backward.training, self.backward.reducer
        for row in self.rows:  # a frozen one too: it may be trained later in a forward
            row.leaf_hook = _drop_gradient
        for index, row in enumerate(self.trained):
            row.leaf_hook = self.reducer.gradients.hook(index)
        self.waits = Waits(module, self.pool, by_module=options.wait == "module")
        self.full_modules.attach()
        self.autocasts: list[AutocastForward] = []
        if options.autocast and precision.param_dtype is not None:
            full = [AutocastForward(member.module, None, self.region) for member in self.full_modules.outermost]
            self.autocasts = [AutocastForward(module, precision.param_dtype, self.region), *full]

    def retire(self) -> None:
        """Another plan takes over.  Hooks that hear of gradients stay for forwards that still have their backward."""
        self.waits.detach()
        self.full_modules.detach()
        for forward in self.autocasts:
            forward.remove()
        self.autocasts = []

    def detach(self) -> None:
        """Nothing of the plan is left on the module or its parameters; a backward of an earlier forward is an error."""
        self.training.abandon()
        self.retire()
        self.reducer.detach()

    @property
    def trains(self) -> bool:
        """Whether any parameter may get a gradient now."""
        return any(map(_requires_grad, (row.master for row in self.trained)))

    def has_stand_ins(self) -> bool:
        """Whether plain tensors stand in for parameters, as ``functional_call`` puts them there."""
        present = (site.parameters.get(site.key) for row in self.rows for site in row.sites)
        return any(isinstance(p, torch.Tensor) and not isinstance(p, nn.Parameter) for p in present)

    def same_as(self, rows: Sequence[Managed], full_modules: FullPrecisionModules) -> bool:
        """Whether a plan of these would be this one."""
        then, now = (
            [(id(r.master), r.full, [(id(s.parameters), s.key) for s in r.sites]) for r in each] for each in (self.rows, rows)
        )
        return then == now and full_modules.module_ids() == self.full_modules.module_ids()

    def require_same_model(self, rows: Sequence[Managed]) -> set[int]:
        """Raises for parameters that DistributedDataParallel cannot take: of another shape, or added and to be trained.

        Returns ``id`` of parameters that were added and are not trained yet: an error once they would be.
        """
        added = set()
        by_id = {id(row.master): row for row in self.rows}  # under another name, as when it is pruned or parametrised
        by_name = {row.name: row for row in self.rows}
        for row in rows:
            old = by_id.get(id(row.master)) or by_name.get(row.name)
            if old is None or id(old.master) in self.added:
                added.add(id(row.master))
                if row.master.requires_grad and torch.is_grad_enabled():
                    raise RuntimeError(
                        f"parameter {row.name!r} was added after DistributedDataParallel was built, so that its gradient "
                        "would not be reduced; wrap the module again"
                    )
            if old is not None:
                require_shape(row.name, old.master.shape, row.master.shape)
        return added

    def leaves_of(self, master: torch.Tensor) -> list[nn.Parameter]:
        """Every leaf that stands for a master in a graph that may still have a backward."""
        return self.pool.leaves_of(master) if id(master) in self.ids else []


def _drop_gradient(leaf: nn.Parameter) -> None:
    """The master was frozen when the plan was built, and is thawed inside a forward: the next forward makes a new plan."""
    leaf.grad = None
