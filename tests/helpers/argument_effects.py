"""The test of each argument's effect.

Each implemented argument is listed once, with a test in which two of its values make the server, the engine or a plan
behave differently for a user; a line in a log is not such a difference, except for the argument of the log level.
"""

from __future__ import annotations

from collections.abc import Mapping

ENGINE = "tests/core/args/test_effects.py::"
MODEL_FILES = "tests/core/args/test_effects_of_model_files.py::"
PLACING = "tests/core/args/test_effects_placing.py::"
RECURRENT = "tests/core/args/test_effects_recurrent.py::"
CAPTURE = "tests/core/args/test_effects_of_capture.py::"
SERVER = "tests/e2e/test_e2e_arguments.py::"
TOOLS = "tests/e2e/test_e2e_tools.py::"
GRAMMARS = "tests/core/args/test_effects_of_grammars.py::"
ANSWERS = "tests/e2e/test_e2e_answers.py::"
OPERATION = "tests/e2e/test_e2e_operation.py::"
LIMITS = "tests/e2e/test_e2e_limits.py::"
OBSERVE = "tests/e2e/test_e2e_observe.py::"
DEBUG = "tests/core/args/test_effects_debug.py::"
TOY = "plugins/toy_device/tests/test_toy_graphs.py::"  # features that a CPU does not have
PIECES = "plugins/toy_device/tests/test_toy_pieces.py::"
GPU = "platforms/gpu/tests/test_gpu_attention.py::"
RANKS = "tests/core/executor/test_ranks.py::"
SPARSE = "tests/core/args/test_effects_sparse.py::"
EXPERTS = "tests/core/args/test_effects_experts.py::"
PAGE = "tests/e2e/test_e2e_page.py::"
LOADING = "tests/core/args/test_effects_of_loading.py::"
SCALES = "tests/core/args/test_effects_kv_scales.py::"
REPLICAS = "tests/core/engine/test_replicas.py::"
OFFLOAD = "plugins/toy_device/tests/test_toy_offload.py::"
LATENT = "tests/platforms/cpu/test_latent_attention.py::"
PRODUCTS = "tests/core/args/test_effects_of_products.py::"

EFFECTS: Mapping[str, str] = {
    "config": ENGINE + "test_config",
    # model
    "model_path": ENGINE + "test_model_path",
    "tokenizer_path": SERVER + "test_tokenizer_path",
    "served_model_name": SERVER + "test_served_model_name",
    "revision": ENGINE + "test_revision",
    "context_length": ENGINE + "test_context_length",
    "dtype": ENGINE + "test_dtype",
    "load_format": ENGINE + "test_load_format",
    "model_impl": ENGINE + "test_model_impl",
    "json_model_override_args": MODEL_FILES + "test_json_model_override_args",
    "trust_remote_code": MODEL_FILES + "test_trust_remote_code",
    "quantization": ENGINE + "test_quantization",
    "dequantize_weights": ENGINE + "test_dequantize_weights",
    "torchao_config": ENGINE + "test_torchao_config",
    "chat_template": SERVER + "test_chat_template",
    "completion_template": SERVER + "test_completion_template",
    "score_template": "tests/e2e/test_e2e_pooled.py::test_a_generator_is_asked_for_yes_or_no",
    "is_embedding": SERVER + "test_is_embedding",
    "pooling": SERVER + "test_pooling",
    "download_dir": LOADING + "test_download_dir",
    "weight_loader_disable_mmap": LOADING + "test_weight_loader_disable_mmap",
    "delete_ckpt_after_loading": LOADING + "test_delete_ckpt_after_loading",
    "model_loader_extra_config": LOADING + "test_model_loader_extra_config",
    "custom_weight_loader": LOADING + "test_custom_weight_loader",
    "host_offload_gb": OFFLOAD + "test_host_offload_gb",
    "offload_group_size": OFFLOAD + "test_offload_group_size",
    "offload_num_in_group": OFFLOAD + "test_offload_num_in_group",
    "offload_prefetch_step": OFFLOAD + "test_offload_prefetch_step",
    "random_seed": ENGINE + "test_random_seed_decides_dummy_weights",
    # platform
    "device": ENGINE + "test_device",
    "base_device_id": PLACING + "test_base_device_id",
    "device_id_step": PLACING + "test_device_id_step",
    "numa_node": PLACING + "test_numa_node",
    "attention_backend": ENGINE + "test_attention_backend",
    "prefill_attention_backend": ENGINE + "test_prefill_attention_backend",
    "decode_attention_backend": ENGINE + "test_decode_attention_backend",
    "sampling_backend": ENGINE + "test_sampling_backend",
    "nsa_prefill_backend": SPARSE + "test_nsa_prefill_backend",
    "nsa_decode_backend": SPARSE + "test_nsa_decode_backend",
    "moe_runner_backend": EXPERTS + "test_moe_runner_backend",
    "enable_expert_distribution_metrics": EXPERTS + "test_enable_expert_distribution_metrics",
    "expert_distribution_recorder_mode": EXPERTS + "test_expert_distribution_recorder_mode",
    "expert_distribution_recorder_buffer_size": EXPERTS + "test_expert_distribution_recorder_buffer_size",
    "kv_cache_dtype": ENGINE + "test_kv_cache_dtype",
    "quantization_param_path": SCALES + "test_quantization_param_path",
    "calculate_kv_scales": SCALES + "test_calculate_kv_scales",
    "fp8_gemm_backend": PRODUCTS + "test_fp8_gemm_backend",
    "activation_precision": "tests/platforms/cpu/test_precision.py::test_activation_precision",
    "mxfp4_moe_precision": PRODUCTS + "test_mxfp4_moe_precision",
    # limits of clients
    "api_key_file": LIMITS + "test_api_key_file",
    "admin_api_key": LIMITS + "test_admin_api_key",
    "allowed_hosts": LIMITS + "test_allowed_hosts",
    "allowed_origins": LIMITS + "test_allowed_origins",
    "max_held_request_bytes": LIMITS + "test_max_held_request_bytes",
    "max_connections": LIMITS + "test_max_connections",
    "connection_timeout_seconds": LIMITS + "test_connection_timeout_seconds",
    "soft_watchdog_timeout": LIMITS + "test_soft_watchdog_timeout",
    "watchdog_timeout": LIMITS + "test_watchdog_timeout",
    # memory
    "mem_fraction_static": ENGINE + "test_mem_fraction_static",
    "max_total_tokens": ENGINE + "test_max_total_tokens",
    "page_size": ENGINE + "test_page_size",
    "swa_full_tokens_ratio": ENGINE + "test_swa_full_tokens_ratio",
    "disable_hybrid_swa_memory": ENGINE + "test_disable_hybrid_swa_memory",
    "disable_radix_cache": ENGINE + "test_disable_radix_cache",
    "max_mamba_cache_size": RECURRENT + "test_max_mamba_cache_size",
    "mamba_ssm_dtype": RECURRENT + "test_mamba_ssm_dtype",
    "mamba_full_memory_ratio": RECURRENT + "test_mamba_full_memory_ratio",
    "mamba_track_interval": RECURRENT + "test_mamba_track_interval",
    # schedule
    "max_running_requests": ENGINE + "test_max_running_requests",
    "max_queued_requests": SERVER + "test_max_queued_requests",
    "chunked_prefill_size": ENGINE + "test_chunked_prefill_size",
    "max_prefill_tokens": ENGINE + "test_max_prefill_tokens",
    "schedule_policy": ENGINE + "test_schedule_policy",
    "schedule_conservativeness": ENGINE + "test_schedule_conservativeness",
    "disable_overlap_schedule": ENGINE + "test_disable_overlap_schedule",
    "enable_deterministic_inference": "tests/core/engine/test_deterministic.py::"
    "test_a_long_prompt_gets_the_same_bits_whatever_its_last_chunk_is",
    # speculative
    "speculative_algorithm": ENGINE + "test_speculative_algorithm",
    "speculative_num_draft_tokens": ENGINE + "test_speculative_num_draft_tokens",
    "speculative_ngram_min_match_window_size": ENGINE + "test_speculative_ngram_min_match_window_size",
    "speculative_ngram_max_match_window_size": ENGINE + "test_speculative_ngram_max_match_window_size",
    "speculative_ngram_branch_length": ENGINE + "test_speculative_ngram_branch_length",
    # graphs
    "disable_graphs": TOY + "test_disable_graphs",
    "graph_max_batch_size": TOY + "test_graph_max_batch_size",
    "graph_batch_sizes": TOY + "test_graph_batch_sizes",
    "disable_graph_padding": TOY + "test_disable_graph_padding",
    "enable_piecewise_graphs": PIECES + "test_enable_piecewise_graphs",
    "piecewise_graph_tokens": PIECES + "test_piecewise_graph_tokens",
    "piecewise_graph_max_tokens": PIECES + "test_piecewise_graph_max_tokens",
    # observe
    "enable_layer_markers": ENGINE + "test_enable_layer_markers",
    "log_level_http": OBSERVE + "test_log_level_http",
    "log_requests": OBSERVE + "test_request_log",
    "log_requests_level": OBSERVE + "test_request_log",
    "crash_dump_folder": OBSERVE + "test_crash_dump_and_replay",
    "show_time_cost": OBSERVE + "test_lines_of_the_engine",
    "enable_request_time_stats_logging": OBSERVE + "test_time_of_each_stage",
    "decode_log_interval": OBSERVE + "test_lines_of_the_engine",
    "gc_warning_threshold_secs": OBSERVE + "test_lines_of_the_engine",
    "enable_metrics": OBSERVE + "test_metrics_can_be_switched_off",
    "bucket_time_to_first_token": OBSERVE + "test_bucket_bounds",
    "bucket_inter_token_latency": OBSERVE + "test_bucket_bounds",
    "bucket_e2e_request_latency": OBSERVE + "test_bucket_bounds",
    "collect_tokens_histogram": OBSERVE + "test_histograms_of_token_counts",
    "prompt_tokens_buckets": OBSERVE + "test_histograms_of_token_counts",
    "generation_tokens_buckets": OBSERVE + "test_histograms_of_token_counts",
    "tokenizer_metrics_custom_labels_header": OBSERVE + "test_custom_labels",
    "tokenizer_metrics_allowed_custom_labels": OBSERVE + "test_custom_labels",
    "enable_trace": OBSERVE + "test_traces",
    "oltp_traces_endpoint": OBSERVE + "test_traces",
    # debug
    "debug_tensor_dump_output_folder": DEBUG + "test_debug_tensor_dump_output_folder",
    "debug_tensor_dump_input_file": DEBUG + "test_debug_tensor_dump_input_file",
    "debug_tensor_dump_prefill_only": DEBUG + "test_debug_tensor_dump_prefill_only",
    "enable_nan_detection": DEBUG + "test_enable_nan_detection",
    "crash_on_nan": DEBUG + "test_crash_on_nan",
    "forward_hooks": DEBUG + "test_forward_hooks",
    "enable_graph_gc": CAPTURE + "test_enable_graph_gc",
    "enable_graph_profiling": CAPTURE + "test_enable_graph_profiling",
    "enable_torch_compile": CAPTURE + "test_enable_torch_compile",
    "torch_compile_max_bs": CAPTURE + "test_torch_compile_max_bs",
    "enable_torch_compile_debug_mode": CAPTURE + "test_torch_compile_max_bs",
    "triton_attention_num_kv_splits": GPU + "test_the_user_limits_the_splits_of_a_row",
    "triton_attention_split_tile_size": GPU + "test_the_user_limits_the_splits_of_a_row",
    "disable_mla_ragged_prefill": LATENT + "test_the_user_chooses_how_prompts_are_computed",
    "disable_chunked_prefix_cache": LATENT + "test_the_user_chooses_how_prompts_are_computed",
    # structured output
    "grammar_backend": GRAMMARS + "test_the_grammar_backend_constrains_outputs_and_none_refuses_them",
    "constrained_json_whitespace_pattern": GRAMMARS + "test_white_space_follows_the_pattern",
    "constrained_json_disable_any_whitespace": GRAMMARS + "test_white_space_is_disabled",
    # parallel
    "tp_size": RANKS + "test_tp_size_divides_weights_and_pool",
    "dp_size": REPLICAS + "test_replicas_share_the_requests",
    "load_balance_method": "tests/core/engine/test_balance.py::test_what_counts",
    "enable_dp_attention": REPLICAS + "test_replicas_that_compute_each_step_together",
    "enable_dp_lm_head": "tests/core/models/test_replica_ranks.py::test_replicas_compute_their_own_tokens",
    "ep_size": RANKS + "test_ep_size_distributes_experts",
    "dist_timeout": RANKS + "test_dist_timeout",
    # server
    "host": SERVER + "test_host",
    "port": SERVER + "test_port",
    "api_key": SERVER + "test_api_key",
    "log_level": SERVER + "test_log_level",
    "max_request_bytes": SERVER + "test_max_request_bytes",
    "max_stop_strings": SERVER + "test_max_stop_strings",
    "enable_return_hidden_states": SERVER + "test_enable_return_hidden_states",
    "tool_call_parser": TOOLS + "test_tool_call_parser",
    "reasoning_parser": TOOLS + "test_reasoning_parser",
    "graceful_shutdown_seconds": SERVER + "test_graceful_shutdown_seconds",
    "engine_start_timeout_seconds": SERVER + "test_engine_start_timeout_seconds",
    # how the server is reached
    "api_keys_file": OPERATION + "test_api_keys_file",
    "share_cache": OPERATION + "test_share_cache",
    "ssl_certfile": OPERATION + "test_ssl_certfile",
    "ssl_keyfile": OPERATION + "test_ssl_certfile",
    "ssl_keyfile_password": OPERATION + "test_ssl_certfile",
    "ssl_ca_certs": OPERATION + "test_ssl_ca_certs",
    "uds": OPERATION + "test_uds",
    "root_path": OPERATION + "test_root_path",
    "access_log": OPERATION + "test_access_log",
    "ui": PAGE + "test_ui",
    # answers and text
    "stream_interval": ANSWERS + "test_stream_interval",
    "stream_output": ANSWERS + "test_stream_output",
    "enable_cache_report": ANSWERS + "test_enable_cache_report",
    "sampling_defaults": ANSWERS + "test_sampling_defaults",
    "preferred_sampling_params": ANSWERS + "test_preferred_sampling_params",
    "tokenizer_worker_num": ANSWERS + "test_tokenizer_worker_num",
    "enable_tokenizer_batch_encode": ANSWERS + "test_enable_tokenizer_batch_encode",
    "enable_dynamic_batch_tokenizer": ANSWERS + "test_dynamic_batch_tokenizer",
    "dynamic_batch_tokenizer_batch_size": ANSWERS + "test_dynamic_batch_tokenizer",
    "dynamic_batch_tokenizer_batch_timeout": ANSWERS + "test_dynamic_batch_tokenizer",
    "skip_server_warmup": ANSWERS + "test_skip_server_warmup_and_warmups",
    "warmups": ANSWERS + "test_skip_server_warmup_and_warmups",
    "enable_custom_logit_processor": ANSWERS + "test_enable_custom_logit_processor",
    "trust_request_chat_template": ANSWERS + "test_trust_request_chat_template",
    "skip_tokenizer_init": ANSWERS + "test_skip_tokenizer_init",
    "file_storage_path": ANSWERS + "test_file_storage_path",
}

# Those whose tests start the servers that they need: other tests need not start them with each value.
OF_OWN_SERVERS: Mapping[str, str] = {
    name: test
    for name, test in EFFECTS.items()
    if test.startswith((TOOLS, GRAMMARS, ANSWERS, OPERATION, OBSERVE, DEBUG, PAGE, LOADING, OFFLOAD, EXPERTS, SCALES))
}
