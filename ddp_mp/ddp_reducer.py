"""What ``ddp.reducer`` is while a model is patched.

``DistributedDataParallel`` calls its reducer around forward, under ``Join`` and when it is configured; this class takes those
calls.  PyTorch's own reducer is gone meanwhile, and its gradient buckets with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .comm import Communicator, GradBucket
from .plan import Plan


class ReducerStandIn:
    """The calls that ``DistributedDataParallel`` makes to its reducer."""

    def __init__(self, plan: Callable[[], Plan], comm: Communicator, settings: Callable[[], tuple[bool, bool]]) -> None:
        """``settings`` says whether parameters may be unused, and whether the graph is static."""
        self._plan, self._comm, self._settings = plan, comm, settings
        self._static_graph = settings()[1]

    # --- around a forward --------------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """A synchronised forward of the wrapper starts."""
        self._plan().backward.ended = None

    def _rebuild_buckets(self) -> bool:
        """Called before every forward with gradients.  Our buckets never change; an unfinished round is an error here."""
        plan = self._plan()
        if not plan.backward.running:
            plan.reducer.require_closed()
        return False

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """A synchronised forward of the wrapper ended, or is about to run a backward inside: that one is to be reduced."""
        plan = self._plan()
        backward, reducer = plan.backward, plan.reducer
        reducer.any_unused, static = self._settings()
        reducer.static_graph = static or self._static_graph
        reducer.any_unused = reducer.any_unused or reducer.static_graph
        if backward.forwarding is not None:
            backward.forwarding.sync = True
        elif backward.ended is not None:
            backward.ended.sync = True

    def _delay_all_reduce(self) -> None:
        """Static graph, first backward: our own end-of-backward callback does it."""

    def _install_post_backward_futures(self, futures: list[Any]) -> None:
        self._plan().backward.futures.extend(futures)

    # --- uneven inputs (Join) ----------------------------------------------------------------------------------------

    def _set_forward_pass_work_handle(self, work: Any, divide_by_initial_world_size: bool) -> None:
        if divide_by_initial_world_size:
            self._comm.ranks_with_input = None
            return

        def ranks() -> int:
            work.wait()
            return int(work.get_future().wait()[0].item())

        self._comm.ranks_with_input = ranks

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        return self._plan().reducer.zero_buckets()

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(self._comm.shadow(bucket))
        return future

    def _get_local_used_map(self) -> torch.Tensor:
        return self._plan().reducer.no_flags()

    def _push_all_rebuilt_params(self) -> None:
        """Our buckets never change."""

    # --- configuration -----------------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        self._static_graph = True

    def _ddp_graph_static(self) -> bool:
        return self._static_graph and not self._plan().reducer.hold

    def _check_reducer_finalized(self) -> None:
        if self._plan().reducer.open or self._plan().backward.running:
            raise RuntimeError("Expected the reduction of the last backward to be finished.")

    def _update_process_group(self, process_group: Any) -> None:
        self._comm.process_group = process_group

    def _reset_state(self) -> None:
        self._plan().reducer.forget_round()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        """Nothing is sampled."""

    def _set_sparse_metadata(self, metadata: Any) -> None:
        raise RuntimeError("ddp_mp does not support sparse metadata (_set_sparse_metadata); call ddp_mp.unpatch first")

    def _set_optimizer_in_backward(self) -> None:
        raise RuntimeError(
            "ddp_mp does not work with an optimizer that runs inside backward (_apply_optimizer_in_backward): masters are "
            "not in place there. Call optimizer.step() after backward, or ddp_mp.unpatch(ddp) first."
        )
