"""Every configuration key that DeepSpeed 0.19.8 documents or reads, and what it does here.

A key is in exactly one of USED, HARMLESS and REFUSED. Keys below a listed key are not listed. `zero/config/deepspeed/reader.py`
follows these tables.
"""

from __future__ import annotations


def _each(block: str, names: str, why: str) -> dict[str, str]:
    return {f"{block}.{name}": why for name in names.split()}


# Options of ours for which DeepSpeed has no word.
_OURS = ("masters", "gathered_bytes", "keep_whole_numel", "shard_ranks", "on_nonfinite", "kernels")
OWN: dict[str, str] = {f"zero_accelerators.{name}": name for name in _OURS}

USED: dict[str, str] = {
    **OWN,
    "train_batch_size": "batch.global_samples",
    "train_micro_batch_size_per_gpu": "batch.micro_samples",
    "gradient_accumulation_steps": "accumulation",
    "managed_gradient_accumulation": "count_micro_steps",
    "dataloader_drop_last": "drop_last",
    "optimizer.type": "optimizer.kind",
    "optimizer.params": "optimizer.settings",
    "scheduler.type": "schedule.kind",
    "scheduler.params": "schedule.settings",
    "communication_data_type": "reduce_dtype",
    **_each("zero_optimization", "zero_hpz_partition_size mics_shard_size", "shard_ranks"),
    "zero_optimization.zero_quantized_gradients": "reduce_dtype",
    "gradient_allreduce_op": "reduce",
    "gradient_clipping": "clip",
    "fp16.enabled": "dtype",
    "fp16.auto_cast": "cast_inputs",
    "fp16.loss_scale": "loss_scale.dynamic",
    "fp16.initial_scale_power": "loss_scale.initial",
    "fp16.loss_scale_window": "loss_scale.window",
    "fp16.hysteresis": "loss_scale.hysteresis",
    "fp16.consecutive_hysteresis": "loss_scale.refill_hysteresis",
    "fp16.min_loss_scale": "loss_scale.minimum",
    "bf16.enabled": "dtype",
    "bf16.check_grad_overflow": "on_nonfinite",
    "bf16.bf16_optimizer_states": "optimizer.settings",
    "torch_autocast.enabled": "autocast",
    "torch_autocast.dtype": "autocast",
    "data_types.buffer_dtype": "buffer_dtype",
    "data_types.keep_in_fp32_modules": "keep_fp32_buffers",
    "data_types.param_dtype": "dtype",
    "zero_optimization.stage": "stage",
    "zero_optimization.reduce_bucket_size": "bucket_bytes",
    "zero_optimization.ignore_unused_parameters": "on_unused",
    "zero_optimization.offload_optimizer.device": "offload.home",
    "zero_optimization.offload_optimizer.pin_memory": "offload.pinned",
    "zero_optimization.offload_optimizer.ratio": "offload.ratio",
    "zero_optimization.offload_optimizer.nvme_path": "homes.masters.path",
    "zero_optimization.cpu_offload": "offload.home",
    "zero_optimization.offload_param.device": "homes.weights",
    "zero_optimization.offload_param.nvme_path": "homes.weights.path",
    "zero_optimization.cpu_offload_param": "homes.weights",
    "zero_allow_untested_optimizer": "elementwise",
    "tensor_parallel.autotp_size": "tensor_ranks",
    "sequence_parallel_size": "sequence_ranks",
    **_each("expert_parallel", "enabled autoep_size", "expert_ranks"),
    "steps_per_print": "report.every_steps",
    "wall_clock_breakdown": "report.wall_clock",
    "memory_breakdown": "report.memory",
    **_each("tensorboard", "enabled output_path job_name", "report.tensorboard"),
}

# Other spellings that DeepSpeed accepts.
ALIASES = {"bfloat16": "bf16"}

# Keys whose "auto" the call implies an answer for, each with the field of Implied that has the answer.
AUTO: dict[str, str] = {
    "train_batch_size": "global_samples",
    "train_micro_batch_size_per_gpu": "micro_samples",
    "gradient_accumulation_steps": "accumulation",
    "gradient_clipping": "clip",
    "fp16.enabled": "dtype",
    "bf16.enabled": "dtype",
    "zero_optimization.reduce_bucket_size": "bucket_numel",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": "betas",
    "optimizer.params.eps": "eps",
    "scheduler.params.warmup_min_lr": "warmup_min_lr",
    "scheduler.params.warmup_max_lr": "lr",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "total_steps",
}

_ONE_WAY = "there is one way to lay out and reduce gradients here, and it needs no switch"
_STAGE_3 = "what is gathered of sharded weights, and when, is learned while training; gathered_bytes limits it"
_PERSISTENT = "small weights are in shares like others; zero_accelerators.keep_whole_numel keeps them whole"
_OFFLOADED_WEIGHTS = "shares of weights need no buffers beside them; on the host they are pinned if masters are"
_DISK = "three buckets are in memory, and how a disk is read and written is found out by a short try; homes says it by hand"
_NO_MONITOR = "nobody is written to but TensorBoard; zero.MetricsWriter writes a line of JSON a step"
_NO_PROFILER = "nothing is profiled by configuration; use torch.profiler"
_OWN_CHECKPOINTS = "checkpoints are written in a format of our own"
_WIDE = ("masters, gradient sums and optimizer state are float32 all the same, which is more exact and takes up to twice "
         "their memory; offload_optimizer moves it to the host")
_RECOMPUTE = "recomputation is chosen in the model, with torch.utils.checkpoint"

HARMLESS: dict[str, str] = {
    **_each("zero_optimization", "contiguous_gradients reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce "
            "round_robin_gradients legacy_stage1", _ONE_WAY),
    "zero_optimization.overlap_comm": "reductions overlap the backward pass wherever the device and the group allow it",
    "zero_optimization.allgather_bucket_size": "weights are gathered bucket by bucket, and reduce_bucket_size cuts the buckets",
    "zero_optimization.parameter_alignment": "every parameter starts on an aligned address",
    "zero_optimization.compute_grad_norm": "the norm is part of what the ranks exchange at each step",
    "zero_optimization.enable_sanity_checks": "the checks are always on",
    "zero_optimization.elastic_checkpoint": "any number of ranks loads any checkpoint",
    "zero_optimization.load_from_fp32_weights": "masters come from the checkpoint",
    "zero_optimization.cpu_offload_use_pin_memory": "write offload_optimizer.pin_memory instead",
    **_each("zero_optimization", "sub_group_size prefetch_bucket_size stage3_prefetch_bucket_size "
            "max_live_parameters stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance "
            "gather_16bit_weights_on_model_save "
            "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save module_granularity_threshold "
            "stage3_module_granularity_threshold use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params "
            "allgather_sequential stage3_allgather_sequential memory_efficient_linear pipeline_loading_checkpoint "
            "override_module_apply log_trace_cache_warnings save_muon_momentum_buffer_in_memory leaf_module", _STAGE_3),
    **_each("zero_optimization", "param_persistence_threshold stage3_param_persistence_threshold "
            "model_persistence_threshold stage3_model_persistence_threshold", _PERSISTENT),
    **_each("zero_optimization.offload_optimizer", "buffer_count pipeline_read pipeline_write fast_init", _DISK),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "the step on the host has the threads of torch",
    **_each("zero_optimization.offload_param", "buffer_count buffer_size max_in_cpu pin_memory", _OFFLOADED_WEIGHTS),
    "bf16.immediate_grad_update": "every gradient is collected as soon as it is ready",
    "torch_autocast.lower_precision_safe_modules": "gradients are summed in fp32 whatever the module",
    "data_types.grad_accum_dtype": "gradients are always added up in float32, which loses nothing to a narrower type",
    **dict.fromkeys(("prescale_gradients", "gradient_predivide_factor"), "sums are taken in float32, so nothing overflows "
                    "before it is divided; the result is the same mean or sum"),
    "bf16.bf16_master_weights_and_grads": _WIDE,
    "fp16.fp16_master_weights_and_grads": _WIDE,
    "optimizer.torch_adam": "DeepSpeed reads it in optimizer.params only, and torch's own Adam steps here in any case",
    "optimizer.legacy_fusion": "kernels are chosen by the optimizer's own settings",
    "zero_force_ds_cpu_optimizer": "the step on the host is the torch optimizer's own",
    "disable_allgather": _ONE_WAY,
    "allgather_size": "weights are gathered bucket by bucket",
    "seq_parallel_communication_data_type": "heads of attention travel in their own dtype",
    "disable_python_gc": "Python's garbage collector is left as it is",
    "dump_state": "the effective configuration is logged once in any case",
    "vocabulary_size": "nothing depends on it",
    "log_level": "set the level of the logger 'zero'",
    **_each("timers", "throughput", _NO_PROFILER),
    **_each("aio", "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds", _DISK),
    **_each("activation_checkpointing", "partition_activations cpu_checkpointing contiguous_memory_optimization "
            "number_checkpoints synchronize_checkpoint_boundary profile", _RECOMPUTE),
    **_each("flops_profiler", "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
            _NO_PROFILER),
    **_each("comms_logger", "enabled verbose prof_all debug prof_ops", _NO_PROFILER),
    **_each("csv_monitor", "enabled output_path job_name", _NO_MONITOR),
    **_each("wandb", "enabled group team project", _NO_MONITOR),
    **_each("comet", "enabled workspace project samples_log_interval experiment_name api_key experiment_key online mode",
            _NO_MONITOR),
    **_each("checkpoint", "tag_validation checkpoint_serialization writer", _OWN_CHECKPOINTS),
    "checkpoint.parallel_write.pipeline_stage": _OWN_CHECKPOINTS,
    **dict.fromkeys(("tensor_parallel.preset_model", "expert_parallel.preset_model", "expert_parallel.use_grouped_mm"),
                    "a model is cut by its own plan in transformers, where experts_implementation chooses kernels"),
}

_MODEL_PARALLEL = "a model is cut by its own plan in transformers, or by parallelize_module or zero.part before it is sharded"
_FEWER_BITS = "it changes the numbers, and sharded training is to equal plain training"
_GONE = "DeepSpeed 0.19.8 has removed it as well"

REFUSED: dict[str, str] = {
    **_each("zero_optimization", "zero_quantized_weights zero_quantized_nontrainable_weights", _FEWER_BITS),
    "zero_optimization.zenflow": _FEWER_BITS,
    "zero_optimization.offload_optimizer.super_offload": "offloaded masters and moments are stepped on the host",
    **_each("zero_optimization", "mics_hierarchical_params_gather zeropp_loco_param", _GONE),
    "checkpoint.load_universal": "loaded by any number of ranks directly; `python -m zero import` makes one of DeepSpeed's",
    "checkpoint.use_node_local_storage": "a checkpoint is one place that all ranks see",
    "datastates_ckpt": "checkpoints are written in a format of our own",
    "data_parallel_size": "pass the data-parallel process group to the call instead",
    "use_data_before_expert_parallelism": "call `deepspeed.utils.groups._create_expert_and_data_parallel(ep_size, "
                                          "use_data_before_expert_parallel_=True)` before initialize",
    "pipeline": "pipeline parallelism is not supported",
    "weight_quantization": _FEWER_BITS,
    **_each("tensor_parallel", "tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend "
            "partition_config dtype tensor_parallel tp injection_policy_tuple keep_module_on_host replace_with_kernel_inject "
            "kernel_inject", _MODEL_PARALLEL),
    **_each("expert_parallel", "expert_tensor_parallel_size validate_folding_routing async_split_plan "
            "moe_layer_pattern expert_pattern router_pattern disable_triton_grouped_mm route_norm "
            "route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin "
            "comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k load_balance_coeff "
            "routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts "
            "shared_experts_pattern shared_experts_gate_pattern expert_activation", _MODEL_PARALLEL),
    **_each("hybrid_engine", "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
            "tp_gather_partition_size enable_cuda_graph", "there is no inference engine"),
    **_each("compile", "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
            "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
            "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
            "keep_all_input_tensors passes", "graphs are compiled by torch.compile in your own code"),
    **_each("autotuning", "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
            "tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
            "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size "
            "model_info model_info_path", "nothing is tuned by trial runs"),
    **_each("data_efficiency", "enabled seed data_sampling data_routing", "your own loader and model choose data and layers"),
    **dict.fromkeys(("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue",
                     "sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning",
                     "progressive_layer_drop"), _GONE),
}

# Keys without effect, each with the values that ask for what happens anyway, so that nothing is reported.
QUIET: dict[str, tuple[object, ...]] = {
    "data_types.grad_accum_dtype": ("fp32", "float32"),
    "prescale_gradients": (False,),
    "gradient_predivide_factor": (1, 1.0),
    "zero_optimization.zero_hpz_partition_size": (0, 1),
    "zero_optimization.mics_shard_size": (-1, 0),
    **dict.fromkeys(("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"), (False,)),
}

# Keys that are used at stage 3 alone, each with the report for other stages.
OF_STAGE_3: dict[str, str] = {
    **dict.fromkeys(
        ("zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path",
         "zero_optimization.cpu_offload_param"),
        "weights are not offloaded below stage 3, in DeepSpeed neither",
    ),
    **dict.fromkeys(
        ("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"),
        "DeepSpeed reads it at stage 3 only; zero_accelerators.shard_ranks holds at each stage",
    ),
}

# Keys without effect that take no other values than these, in any case of letters.
CHOICES: dict[str, tuple[str, ...]] = {
    "checkpoint.tag_validation": ("ignore", "warn", "fail"),
    "data_types.grad_accum_dtype": ("none", "fp32", "float32", "fp16", "float16", "bf16", "bfloat16"),
}

# Refused keys, each with the values with which it asks for nothing. False, null and an empty block always do.
OFF: dict[str, tuple[object, ...]] = {}

# Blocks that have no effect while this key in them is off or missing.
SWITCHES: dict[str, tuple[str, tuple[object, ...]]] = {
    "zero_optimization.offload_param": ("device", ("none",)),
    "tensor_parallel": ("autotp_size", (0, 1)),
    "expert_parallel": ("enabled", (False,)),
    "hybrid_engine": ("enabled", (False,)),
    "compile": ("deepcompile", (False,)),
    "autotuning": ("enabled", (False,)),
    "data_efficiency": ("enabled", (False,)),
    "flops_profiler": ("enabled", (False,)),
    "comms_logger": ("enabled", (False,)),
    "csv_monitor": ("enabled", (False,)),
    "wandb": ("enabled", (False,)),
    "comet": ("enabled", (False,)),
    **dict.fromkeys(("nebula", "compression_training", "amp", "quantize_training", "eigenvalue", "elasticity",
                     "curriculum_learning", "progressive_layer_drop", "datastates_ckpt"), ("enabled", (False,))),
}

KNOWN = frozenset(USED) | frozenset(HARMLESS) | frozenset(REFUSED)
BLOCKS = frozenset(path.rsplit(".", depth)[0] for path in KNOWN for depth in range(1, path.count(".") + 1))
