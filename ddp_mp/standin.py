"""What ``ddp.reducer`` and ``ddp.logger`` are while a model is patched.

``DistributedDataParallel`` calls its reducer around forward, under ``Join`` and when it is configured; these classes take those
calls.  PyTorch's own reducer is gone meanwhile, and its gradient buckets with it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from .backward import Backward
from .comm import Communicator, GradBucket
from .reducer import Reducer


class ReducerStandIn:
    """The calls that ``DistributedDataParallel`` makes to its reducer."""

    def __init__(self, reducer: Reducer, backward: Backward, comm: Communicator, any_unused: Callable[[], bool]) -> None:
        self._reducer, self._backward, self._comm = reducer, backward, comm
        self._any_unused = any_unused

    # --- around a forward --------------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """A synchronised forward of the wrapper starts."""

    def _rebuild_buckets(self) -> bool:
        """Called before every forward with gradients.  Our buckets never change; an unfinished round is an error here."""
        if not self._backward.running:
            self._reducer.require_closed()
        return False

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """A synchronised forward of the wrapper ended: the backward of the forward just done is to be reduced."""
        self._reducer.any_unused = self._any_unused()
        self._reducer.static_graph = self._backward.static_graph
        if self._backward.passes and not self._backward.running:
            self._backward.passes[-1].sync = True

    def _delay_all_reduce(self) -> None:
        """Static graph, first backward: our own end-of-backward callback does it."""

    def _install_post_backward_futures(self, futures: list[Any]) -> None:
        self._backward.futures.extend(futures)

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
        return self._reducer.zero_buckets()

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(self._comm.shadow(bucket))
        return future

    def _get_local_used_map(self) -> torch.Tensor:
        return self._reducer.no_flags()

    def _push_all_rebuilt_params(self) -> None:
        """Our buckets never change."""

    # --- configuration -----------------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        self._backward.set_static_graph()

    def _ddp_graph_static(self) -> bool:
        return self._backward.static_graph and self._backward.in_order

    def _check_reducer_finalized(self) -> None:
        if self._reducer.open or self._backward.running:
            raise RuntimeError("Expected the reduction of the last backward to be finished.")

    def _update_process_group(self, process_group: Any) -> None:
        self._comm.process_group = process_group

    def _reset_state(self) -> None:
        self._reducer.forget_round()

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
