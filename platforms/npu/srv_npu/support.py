"""What the NPU platform declares of arguments, variant by variant. Data alone: the matrix prints it, launch obeys it.

Its sources are the vendor's page of supported features and the operators that torch_npu documents. Where this
table departs from that page, `support_matrix/published/ascend_reasons.toml` says why. Arguments that the platform
has no part in (logging, metrics, HTTP) need no word here once core implements them; they are declared all the same,
so that the comparison with the vendor's page can tell an opinion from silence.
"""

from __future__ import annotations

from collections.abc import Iterable

from srv.platform.facts import Support

HOST_ONLY = "the API process or the scheduler does it, before any device work"


def _all(status: str, reason: str, names: str, variants: Iterable[str] = ()) -> tuple[Support, ...]:
    return tuple(Support(name, status, reason, variants=tuple(variants)) for name in names.split())


# Served by the platform on both variants.
_SUPPORTED = _all(
    "supported",
    "",
    """
    model_path tokenizer_path tokenizer_mode tokenizer_worker_num skip_tokenizer_init trust_remote_code
    context_length is_embedding pooling enable_multimodal
    host port skip_server_warmup warmups nccl_port
    dtype dequantize_weights
    mem_fraction_static max_running_requests prefill_max_requests max_queued_requests max_total_tokens
    chunked_prefill_size max_prefill_tokens schedule_policy enable_priority_scheduling
    schedule_low_priority_values_first priority_scheduling_preemption_threshold schedule_conservativeness page_size
    device stream_interval stream_output random_seed watchdog_timeout soft_watchdog_timeout
    base_gpu_id gpu_id_step tensor_parallel_size dist_timeout sleep_on_idle
    log_level log_level_http log_requests log_requests_level decode_log_interval
    api_key served_model_name weight_version chat_template completion_template enable_cache_report
    data_parallel_size load_balance_method prefill_round_robin_balance
    dist_init_addr nnodes node_rank json_model_override_args preferred_sampling_params
    enable_lora max_lora_rank lora_paths
    attention_backend prefill_attention_backend decode_attention_backend sampling_backend
    speculative_draft_model_path speculative_num_steps speculative_eagle_topk
    speculative_num_draft_tokens speculative_accept_threshold_single speculative_accept_threshold_acc
    speculative_attention_mode speculative_moe_runner_backend speculative_moe_a2a_backend
    moe_dense_tp_size moe_runner_backend
    enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy radix_eviction_policy
    cpu_offload_gb disable_radix_cache disable_cuda_graph
    enable_tokenizer_batch_encode disable_outlines_disk_cache disable_overlap_schedule enable_mixed_chunk
    enable_dp_attention enable_dp_lm_head
    enable_return_hidden_states enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout
    disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port num_reserved_decode_tokens
    disaggregation_decode_polling_interval weight_loader_disable_mmap
    """,
)

_DRAFTS = (
    Support(
        "speculative_algorithm",
        "supported",
        "attention takes KV lengths from the host, so a request waits for the result of a step with drafts before its "
        "next one is planned",
    ),
)

# The vendor's page has these unsupported; none of them asks anything of a device.
_HOST_ONLY = _all(
    "supported",
    HOST_ONLY,
    """
    revision model_loader_extra_config delete_ckpt_after_loading custom_weight_loader
    grammar_backend constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
    crash_dump_folder enable_metrics enable_metrics_for_all_schedulers tokenizer_metrics_custom_labels_header
    tokenizer_metrics_allowed_custom_labels bucket_time_to_first_token bucket_inter_token_latency
    bucket_e2e_request_latency collect_tokens_histogram prompt_tokens_buckets generation_tokens_buckets
    gc_warning_threshold_secs enable_request_time_stats_logging kv_events_config enable_trace oltp_traces_endpoint
    sampling_defaults tool_server speculative_draft_model_revision allow_auto_truncate scheduler_recv_interval
    """,
)
# Arguments that the vendor's page does not have.
_UNPUBLISHED = (
    *_all(
        "supported",
        HOST_ONLY,
        """
        engine_start_timeout_seconds graceful_shutdown_seconds max_request_bytes max_stop_strings
        access_log ui show_time_cost debug_tensor_dump_prefill_only
        """,
    ),
    Support("load_format", "supported", "the host reads every format; a card is given tensors"),
)
_WINDOWS = _all(
    "supported",
    "windows are masked by the fused attention, in a pool of their own or in that of all layers",
    "swa_full_tokens_ratio disable_hybrid_swa_memory",
)
_MARKERS = (Support("enable_layerwise_nvtx_marker", "supported", "ranges are marked with MSTX, which msprof reads"),)
_HOST_MEMORY = (Support("numa_node", "supported", "it binds the host's own processes to the host's own memory"),)

# What differs between the two generations.
_ONLY_A3 = (
    *_all(
        "unsupported",
        "experts are spread over devices on A3 alone, whose interconnect the dispatch operators are written for",
        "expert_parallel_size moe_a2a_backend deepep_mode",
        ("a2",),
    ),
    *_all(
        "unsupported",
        "the largest batch size of graphs, and steps without padding to one, are published for A3 alone",
        "cuda_graph_max_bs disable_cuda_graph_padding",
        ("a2",),
    ),
    *_all(
        "supported",
        "",
        "expert_parallel_size deepep_mode cuda_graph_max_bs disable_cuda_graph_padding",
        ("a3",),
    ),
    Support("cuda_graph_bs", "supported"),
    Support(
        "moe_a2a_backend",
        "limited",
        "the dispatch libraries built for NPUs are these",
        ("a3",),
        only=("none", "deepep", "ascend_fuseep"),
    ),
    Support(
        "model_impl",
        "unsupported",
        "models of the transformers library are published for A3 alone",
        ("a2",),
        values=("transformers",),
    ),
    Support("model_impl", "supported", variants=("a3",)),
)

# Some values only.
_VALUES = (
    Support(
        "kv_cache_dtype",
        "limited",
        "the fused attention reads keys and values in 16 bits",
        only=("auto", "bfloat16", "float16"),
    ),
    Support(
        "reasoning_parser",
        "limited",
        "these formats are published as tried",
        only=("deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "kimi", "qwen3", "qwen3-thinking", "step3"),
    ),
    Support("tool_call_parser", "limited", "these formats are published as tried", only=("llama3", "qwen")),
    Support("mm_attention_backend", "limited", "one kernel for images is built for NPUs", only=("ascend_attn",)),
    Support("hicache_io_backend", "limited", "one copy kernel is built for NPUs", only=("kernel_ascend",)),
    Support(
        "hicache_mem_layout",
        "limited",
        "the copy kernel reads these layouts",
        only=("page_first_direct", "page_first_kv_split"),
    ),
    Support("hicache_storage_backend", "limited", "one storage is published as tried", only=("file",)),
)

# Made of another vendor's libraries: there is nothing for them to act on.
_NOT_APPLICABLE = _all(
    "not_applicable",
    "it steers a library or link that Ascend devices do not have",
    """
    fp8_gemm_backend disable_flashinfer_autotune
    enable_flashinfer_allreduce_fusion enable_nccl_nvls enable_symm_mem
    disable_flashinfer_cutlass_moe_fp4_allgather disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
    triton_attention_reduce_in_fp32 triton_attention_num_kv_splits triton_attention_split_tile_size
    enable_p2p_check
    mooncake_ib_device disaggregation_ib_device enable_profile_cuda_graph enable_cudagraph_gc
    enable_pdmux pdmux_config_path sm_group_num
    """,
)

# The device's part of these is not there on either variant.
_UNSUPPORTED = (
    *_all(
        "unsupported",
        "sparse attention, in which an indexer chooses the keys, is not implemented for NPUs",
        "nsa_prefill_backend nsa_decode_backend",
    ),
    *_all(
        "unsupported",
        "stages of a pipeline do not pass activations on NPUs",
        "pipeline_parallel_size pp_max_micro_batch_size",
    ),
    *_all(
        "unsupported",
        "sliding windows have one pool with the other layers or one of their own on NPUs, and nothing between",
        "hybrid_kvcache_ratio",
    ),
    *_all(
        "unsupported",
        "there is no kernel for adapters chosen this finely on NPUs",
        """
        lora_target_modules max_loras_per_batch max_loaded_loras lora_eviction_policy lora_backend max_lora_chunk_size
        """,
    ),
    *_all(
        "unsupported",
        "trees of drafts from n-grams are not implemented for NPUs",
        """
        speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth speculative_ngram_match_type
        """,
    ),
    *_all(
        "unsupported",
        "drafts are matched in the text of their own request; nothing is stored",
        "speculative_ngram_capacity",
    ),
    *_all("unsupported", "drafters with a reduced vocabulary are not implemented for NPUs", "speculative_token_map"),
    *_all(
        "unsupported",
        "experts stay where they were loaded on NPUs",
        """
        ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold deepep_config
        elastic_ep_backend
        """,
    ),
    *_all("unsupported", "no experts in MXFP4 are computed on NPUs", "mxfp4_moe_precision"),
    *_all(
        "unsupported",
        "nobody has shown other settings of recurrent states to work on NPUs",
        """
        max_mamba_cache_size mamba_ssm_dtype mamba_full_memory_ratio mamba_scheduler_strategy mamba_track_interval
        """,
    ),
    *_all(
        "unsupported",
        "prompts have one way through multi-head latent attention (MLA) on NPUs",
        "disable_mla_ragged_prefill disable_chunked_prefix_cache",
    ),
    *_all(
        "unsupported",
        "attention over chosen heads or items has no kernel on NPUs",
        """
        multi_item_scoring_delimiter enable_double_sparsity ds_channel_config_path ds_heavy_channel_num
        ds_heavy_token_num ds_heavy_channel_type ds_sparse_decode_threshold enable_nsa_prefill_context_parallel
        """,
    ),
    *_all(
        "unsupported",
        "the tiers of the KV cache on NPUs have no such choice",
        "hicache_storage_prefetch_policy hicache_storage_backend_extra_config enable_lmcache",
    ),
    *_all(
        "unsupported",
        "weights are moved to the host by size alone on NPUs",
        "offload_group_size offload_num_in_group offload_prefetch_step offload_mode",
    ),
    *_all(
        "unsupported",
        "steps are neither split in two nor run several at a time on NPUs",
        """
        enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
        num_continuous_decode_steps enable_attn_tp_input_scattered
        """,
    ),
    *_all(
        "unsupported",
        "that way of capturing or compiling is not implemented for NPUs",
        """
        enable_piecewise_cuda_graph piecewise_cuda_graph_tokens piecewise_cuda_graph_max_tokens
        enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs
        """,
    ),
    *_all("unsupported", "weights of 8 bits come from the modelslim tool on NPUs, ready made", "torchao_config"),
    *_all(
        "unsupported",
        "the allocator of NPUs cannot give memory back and take it again",
        "enable_memory_saver enable_weights_cpu_backup",
    ),
    *_all(
        "unsupported",
        "nobody has shown the device's part of it to work on NPUs",
        """
        quantization_param_path mm_process_config crash_on_nan
        enable_nan_detection enable_custom_logit_processor disable_shared_experts_fusion
        disable_fast_image_processor keep_mm_feature_on_device forward_hooks debug_tensor_dump_input_file
        debug_tensor_dump_inject enable_deterministic_inference expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size enable_expert_distribution_metrics
        """,
    ),
    *_all(
        "unsupported",
        "prefill and decode on NPUs must be cut alike, and KV is not moved to the host between them",
        """
        disaggregation_decode_tp disaggregation_decode_dp disaggregation_prefill_pp
        disaggregation_decode_enable_offload_kvcache
        """,
    ),
    *_all(
        "unsupported",
        "weights reach an NPU from files alone",
        """
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        """,
    ),
)

SUPPORT: tuple[Support, ...] = (
    *_SUPPORTED,
    *_DRAFTS,
    *_HOST_ONLY,
    *_UNPUBLISHED,
    *_WINDOWS,
    *_MARKERS,
    *_HOST_MEMORY,
    *_ONLY_A3,
    *_VALUES,
    *_NOT_APPLICABLE,
    *_UNSUPPORTED,
)
