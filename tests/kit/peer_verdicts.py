"""What is expected of PyTorch's own tests of ``DistributedDataParallel``, see ``peers.py``.

Every test is in exactly one of the four; a test that PyTorch adds, or one that ends otherwise, is noticed.
"""

from __future__ import annotations

#: Pass on patched models, in full precision and in bfloat16.
PASS = [
    "test_DistributedDataParallel_requires_grad",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_DistributedSampler_padding",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_compile_static_graph",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_model_diff_shape_across_ranks",
    "test_ddp_native_mixed_precision_ignored_params",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_python_error_logged",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_sink_noclone",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_zero_output_features",
    "test_dump_DDP_relevant_env_vars",
    "test_get_data_parallel_params",
    "test_grads_same_across_ranks_with_no_sync",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
]

#: Pass in full precision.  In bfloat16 they end with an error that begins so, for this reason.
FULL_ONLY = {
    "test_DistributedDataParallelCPU": (
        "AssertionError: Tensor-likes are not close!",
        "compares with numbers computed in full precision",
    ),
    "test_DistributedDataParallelCPU_grad_is_view": (
        "AssertionError: Tensor-likes are not close!",
        "compares with numbers computed in full precision",
    ),
    "test_accumulate_gradients_no_sync": (
        "AssertionError: Tensor-likes are not close!",
        "compares with numbers computed in full precision",
    ),
    "test_accumulate_gradients_no_sync_allreduce_hook": (
        "AssertionError: Tensor-likes are not close!",
        "compares with numbers computed in full precision",
    ),
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": (
        "AssertionError: Tensor-likes are not close!",
        "compares with numbers computed in full precision",
    ),
    "test_accumulate_gradients_no_sync_grad_is_view": (
        "AssertionError: Tensor-likes are not close!",
        "compares with numbers computed in full precision",
    ),
    "test_ddp_forward_backward_hook": (
        "AssertionError: The values for attribute 'dtype' do not matc",
        "wants outputs or gradients of the type of the parameters",
    ),
    "test_ddp_ignore_params_arg": (
        "RuntimeError: expected m1 and m2 to have the same dtype, but",
        "ignored parameters stay in full precision beside copies in one operation",
    ),
    "test_ddp_join_model_equivalence": (
        "AssertionError: Tensor-likes are not close!",
        "compares with numbers computed in full precision",
    ),
    "test_ddp_namedtuple": (
        "AssertionError: The values for attribute 'dtype' do not matc",
        "wants outputs or gradients of the type of the parameters",
    ),
    "test_output_unused_in_loss_dict_module": (
        "AssertionError: Tensor-likes are not close!",
        "compares with numbers computed in full precision",
    ),
    "test_output_unused_in_loss_tuple_module": (
        "AssertionError: Tensor-likes are not close!",
        "compares with numbers computed in full precision",
    ),
}

#: Pass without patching, or would on a GPU, and do not here: (how the error begins in full precision, in bfloat16, the reason).
DIFFER = {
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": (
        "AssertionError: Object comparison failed: torch.float16 != t",
        "AssertionError: Object comparison failed: torch.float16 != t",
        "asks `parameters()` for the type inside the forward, where they are masters",
    ),
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": (
        "AssertionError: Object comparison failed: torch.float16 != t",
        "AssertionError: Object comparison failed: torch.float16 != t",
        "asks `parameters()` for the type inside the forward, where they are masters",
    ),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": (
        "AssertionError: Object comparison failed: torch.float16 != t",
        "AssertionError: Object comparison failed: torch.float16 != t",
        "asks `parameters()` for the type inside the forward, where they are masters",
    ),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": (
        "AssertionError: Object comparison failed: torch.float16 != t",
        "AssertionError: Object comparison failed: torch.float16 != t",
        "asks `parameters()` for the type inside the forward, where they are masters",
    ),
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": (
        "TypeError: _compute_bucket_assignment_by_size(): incompatibl",
        "TypeError: _compute_bucket_assignment_by_size(): incompatibl",
        "hands the wrapper's logger to C++; ours stands in for it",
    ),
    "test_ddp_apply_optim_in_backward": (
        "RuntimeError: ddp_mp.patch: an optimizer that runs inside",
        "RuntimeError: ddp_mp.patch: an optimizer that runs inside",
        "refused by patch(): an optimizer inside backward would step copies",
    ),
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": (
        "RuntimeError: ddp_mp.patch: an optimizer that runs inside",
        "RuntimeError: ddp_mp.patch: an optimizer that runs inside",
        "refused by patch(): an optimizer inside backward would step copies",
    ),
    "test_ddp_apply_optim_in_backward_ignored_params": (
        "RuntimeError: ddp_mp.patch: an optimizer that runs inside",
        "RuntimeError: ddp_mp.patch: an optimizer that runs inside",
        "refused by patch(): an optimizer inside backward would step copies",
    ),
    "test_ddp_comm_hook_logging": (
        "AssertionError: String comparison failed: 'allreduce_hook' !",
        "AssertionError: String comparison failed: 'allreduce_hook' !",
        "the logged name of a built-in hook: ours is the Python hook that does the same",
    ),
    "test_ddp_control_flow_different_across_ranks": (
        "AssertionError: Tensor-likes are not equal!",
        "AssertionError: Tensor-likes are not equal!",
        "reads the reducer's private map of used parameters",
    ),
    "test_ddp_control_flow_same_across_ranks": (
        "AssertionError: Tensor-likes are not equal!",
        "AssertionError: Tensor-likes are not equal!",
        "reads the reducer's private map of used parameters",
    ),
    "test_ddp_logging_data_cpu": (
        "TypeError: '>=' not supported between instances of 'NoneType",
        "TypeError: '>=' not supported between instances of 'NoneType",
        "numbers that the C++ reducer logs about its own buckets and times",
    ),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": (
        "AssertionError: False is not true",
        "RuntimeError: expected scalar type BFloat16 but found Float",
        "the error is raised in other words",
    ),
    "test_ddp_multiple_nested_unused_params_error": (
        "AssertionError: False is not true",
        "RuntimeError: expected scalar type BFloat16 but found Float",
        "the error is raised in other words",
    ),
    "test_ddp_profiling_autograd_profiler": (
        "AssertionError: 0 not greater than or equal to 1",
        "AssertionError: 0 not greater than or equal to 1",
        "the broadcast with which the reducer builds its buckets anew; ours does not",
    ),
    "test_ddp_profiling_torch_profiler": (
        "AssertionError: 0 not greater than or equal to 1",
        "AssertionError: 0 not greater than or equal to 1",
        "the broadcast with which the reducer builds its buckets anew; ours does not",
    ),
    "test_ddp_remove_autograd_hooks": (
        "AttributeError: 'ReducerStandIn' object has no attribute '_r",
        "AttributeError: 'ReducerStandIn' object has no attribute '_r",
        "calls a private method of the reducer",
    ),
    "test_ddp_unused_params_rebuild_buckets_exception": (
        "AssertionError: Expected 'has_error' in ddp_logging_data",
        "AssertionError: Expected 'has_error' in ddp_logging_data",
        "looks for the error in what the C++ reducer logs",
    ),
    "test_detect_ddp_is_actually_static": (
        "AssertionError: False is not true",
        "AssertionError: False is not true",
        "what the C++ reducer logs about the graph",
    ),
    "test_different_graph_across_ranks": (
        "AssertionError: 0 is not true",
        "AssertionError: 0 is not true",
        "what the C++ reducer logs about the graph",
    ),
    "test_invalid_static_graph": (
        "AssertionError: Expected 'has_error' in ddp_logging_data",
        "AssertionError: Expected 'has_error' in ddp_logging_data",
        "the error is raised; what the C++ reducer logs about it is not there",
    ),
    "test_ddp_static_graph_nested_types": (
        "RuntimeError: ddp_mp.patch: the wrapped module, which is a DistributedDataParallel itself",
        "RuntimeError: ddp_mp.patch: the wrapped module, which is a DistributedDataParallel itself",
        "it wraps a wrapped model, which is refused by name",
    ),
    "test_skip_all_reduce_unused_parameters": (
        "AssertionError: None mismatch: None is not 2",
        "AssertionError: None mismatch: None is not 2",
        "counts buckets that the C++ reducer logs",
    ),
    "test_static_graph_api_cpu": (
        "AssertionError: RuntimeError not raised",
        "AssertionError: RuntimeError not raised",
        "ours lets a graph be called static after training began",
    ),
}

#: Cannot be run on two ranks without GPUs, patched or not.
NOT_HERE = {
    "test_DistributedDataParallel": "wants several GPUs a rank",
    "test_DistributedDataParallel_SyncBatchNorm": "PyTorch has SyncBatchNorm on GPUs only",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": "PyTorch has SyncBatchNorm on GPUs only",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": "PyTorch has SyncBatchNorm on GPUs only",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": "PyTorch has SyncBatchNorm on GPUs only",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": "PyTorch has SyncBatchNorm on GPUs only",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": "PyTorch has SyncBatchNorm on GPUs only",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": "PyTorch has SyncBatchNorm on GPUs only",
    "test_DistributedDataParallel_SyncBatchNorm_half": "PyTorch has SyncBatchNorm on GPUs only",
    "test_DistributedDataParallel_non_default_stream": "CUDA streams",
    "test_ddp_device": "looks at which GPU the inputs went to",
    "test_ddp_has_finalized": "looks at a state of the reducer, and without patching never ends here",
    "test_ddp_hook_parity_allreduce_process_group": "makes groups of GPUs",
    "test_ddp_hook_parity_post_localSGD": "a default of that hook that exists with CUDA only",
    "test_ddp_hook_pickling_powerSGD": "PyTorch skips it as flaky, and its log is not written here",
    "test_ddp_inference": "PyTorch has SyncBatchNorm on GPUs only",
    "test_ddp_logging_data_gpu": "logged numbers of GPUs",
    "test_ddp_profiling_execution_trace": "events of NCCL",
    "test_ddp_sync_bn_training_vs_eval": "PyTorch has SyncBatchNorm on GPUs only",
    "test_ddp_uneven_inputs": "more than a minute on a CPU, patched or not; Join is in test_communication",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": "PyTorch has SyncBatchNorm on GPUs only",
    "test_sync_bn_logged": "PyTorch has SyncBatchNorm on GPUs only",
}
