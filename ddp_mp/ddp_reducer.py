"""What ``ddp.reducer`` and ``ddp.logger`` are while a model is patched.

``DistributedDataParallel`` calls its reducer around forward, under ``Join`` and when it is configured; this class takes those
calls.  PyTorch's own reducer is gone meanwhile, and its gradient buckets with it.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from .comm import GradBucket

if TYPE_CHECKING:
    from .model import PatchedModel


class ReducerStandIn:
    """The calls that ``DistributedDataParallel`` makes to its reducer."""

    def __init__(self, model: PatchedModel, static_graph: bool) -> None:
        self._model = model
        self._static_graph = static_graph

    # --- around a forward --------------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """A synchronised forward of the wrapper starts."""
        self._model.plan.training.ended = None

    def _rebuild_buckets(self) -> bool:
        """Called before every forward with gradients.  Our buckets never change; an unfinished round is an error here."""
        plan = self._model.plan
        if plan.reducer.open and plan.training.running is None:
            plan.reducer.require_closed()
        return False

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """A synchronised forward of the wrapper ended, or is about to run a backward inside: that one is to be reduced."""
        plan, ddp = self._model.plan, self._model.wrapper()
        if ddp is not None:
            plan.reducer.static_graph = self._static_graph or bool(ddp.static_graph)
            plan.reducer.any_unused = plan.reducer.static_graph or bool(ddp.find_unused_parameters)
        synchronised = plan.training.forwarding or plan.training.ended
        if synchronised is not None:
            synchronised.sync = True

    def _delay_all_reduce(self) -> None:
        """Static graph, first backward: our own end-of-backward callback does it."""

    def _install_post_backward_futures(self, futures: list[Any]) -> None:
        self._model.plan.training.futures.extend(futures)

    # --- uneven inputs (Join) ----------------------------------------------------------------------------------------

    def _set_forward_pass_work_handle(self, work: Any, divide_by_initial_world_size: bool) -> None:
        if divide_by_initial_world_size:
            self._model.comm.ranks_with_input = None
            return

        def ranks() -> int:
            work.wait()
            return int(work.get_future().wait()[0].item())

        self._model.comm.ranks_with_input = ranks

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        return self._model.plan.reducer.zero_buckets()

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(self._model.comm.shadow(bucket))
        return future

    def _get_local_used_map(self) -> torch.Tensor:
        return self._model.plan.reducer.no_flags()

    def _push_all_rebuilt_params(self) -> None:
        """Our buckets never change."""

    # --- configuration -----------------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        self._static_graph = True

    def _ddp_graph_static(self) -> bool:
        return self._static_graph and not self._model.plan.reducer.hold

    def _check_reducer_finalized(self) -> None:
        if self._model.plan.reducer.open or self._model.plan.training.running is not None:
            raise RuntimeError("Expected the reduction of the last backward to be finished.")

    def _update_process_group(self, process_group: Any) -> None:
        self._model.comm.process_group = process_group

    def _reset_state(self) -> None:
        self._model.plan.reducer.forget_round()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        """Nothing is sampled."""

    def _set_sparse_metadata(self, metadata: Any) -> None:
        raise RuntimeError("ddp_mp does not support sparse metadata (_set_sparse_metadata); call ddp_mp.unpatch first")

    def _set_optimizer_in_backward(self) -> None:
        raise RuntimeError(
            "ddp_mp does not work with an optimizer that runs inside backward (_apply_optimizer_in_backward): masters are "
            "not in place there. Call optimizer.step() after backward, or ddp_mp.unpatch(ddp) first."
        )


class LoggerStandIn:
    """The calls that ``DistributedDataParallel`` makes to its logger, over what PyTorch's logger last said."""

    def __init__(self, strs_map: dict[str, str], ints_map: dict[str, int]) -> None:
        self._strs, self._ints = dict(strs_map), dict(ints_map)

    def set_runtime_stats_and_log(self) -> None:
        """Nothing is sampled."""

    def set_error_and_log(self, message: str) -> None:
        self._strs["error"] = message
        self._ints["has_error"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self._strs["comm_hook"] = name

    def _set_static_graph(self) -> None:
        self._ints["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._ints["join_uneven_inputs"] = 1

    def _get_ddp_logging_data(self) -> Any:
        return types.SimpleNamespace(strs_map=dict(self._strs), ints_map=dict(self._ints))
