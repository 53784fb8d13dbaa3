"""Every argument that can be set has an effect, which is tested by the test in the table below.

Each implemented argument is listed once, with a test in which two of its values make the server, the engine or a plan
behave differently for a user; a line in a log is not such a difference, except for the argument of the log level. The
tests are looked up in their files, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from every import every

from srv.args.config import ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "tests/core/args/test_effects.py::"
SERVER = "tests/e2e/test_e2e_arguments.py::"
TOY = "plugins/toy_device/tests/test_toy_graphs.py::"  # features that a CPU does not have
RANKS = "tests/core/executor/test_ranks.py::"
UNDECLARED_FLAGS = frozenset({"config"})  # flags of the command line without a declaration

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
    "quantization": ENGINE + "test_quantization",
    "dequantize_weights": ENGINE + "test_dequantize_weights",
    "torchao_config": ENGINE + "test_torchao_config",
    "chat_template": SERVER + "test_chat_template",
    "is_embedding": SERVER + "test_is_embedding",
    "pooling": SERVER + "test_pooling",
    "random_seed": ENGINE + "test_random_seed_decides_dummy_weights",
    # platform
    "device": ENGINE + "test_device",
    "attention_backend": ENGINE + "test_attention_backend",
    "prefill_attention_backend": ENGINE + "test_prefill_attention_backend",
    "decode_attention_backend": ENGINE + "test_decode_attention_backend",
    "sampling_backend": ENGINE + "test_sampling_backend",
    "kv_cache_dtype": ENGINE + "test_kv_cache_dtype",
    # memory
    "mem_fraction_static": ENGINE + "test_mem_fraction_static",
    "max_total_tokens": ENGINE + "test_max_total_tokens",
    "page_size": ENGINE + "test_page_size",
    "swa_full_tokens_ratio": ENGINE + "test_swa_full_tokens_ratio",
    "disable_hybrid_swa_memory": ENGINE + "test_disable_hybrid_swa_memory",
    "disable_radix_cache": ENGINE + "test_disable_radix_cache",
    # schedule
    "max_running_requests": ENGINE + "test_max_running_requests",
    "max_queued_requests": SERVER + "test_max_queued_requests",
    "chunked_prefill_size": ENGINE + "test_chunked_prefill_size",
    "max_prefill_tokens": ENGINE + "test_max_prefill_tokens",
    "schedule_policy": ENGINE + "test_schedule_policy",
    "schedule_conservativeness": ENGINE + "test_schedule_conservativeness",
    "disable_overlap_schedule": ENGINE + "test_disable_overlap_schedule",
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
    # parallel
    "tp_size": RANKS + "test_tp_size_divides_weights_and_pool",
    "dist_timeout": RANKS + "test_dist_timeout",
    # server
    "host": SERVER + "test_host",
    "port": SERVER + "test_port",
    "api_key": SERVER + "test_api_key",
    "log_level": SERVER + "test_log_level",
    "max_request_bytes": SERVER + "test_max_request_bytes",
    "max_stop_strings": SERVER + "test_max_stop_strings",
    "enable_return_hidden_states": SERVER + "test_enable_return_hidden_states",
    "graceful_shutdown_seconds": SERVER + "test_graceful_shutdown_seconds",
    "engine_start_timeout_seconds": SERVER + "test_engine_start_timeout_seconds",
}


def faults(effects: Mapping[str, str], needed: frozenset[str], planned: frozenset[str]) -> list[str]:
    """The faults of a table of effects, one sentence each."""
    found = [f"{name} is not planned and has no test" for name in sorted(needed - effects.keys())]
    for name, where in effects.items():
        if name in planned:
            found.append(f"{name} is planned: it can have no effect")
        elif name not in needed:
            found.append(f"{name} is not an argument")
        if not _exists(where):
            found.append(f"{name}: there is no test {where}")
    return found


def _exists(where: str) -> bool:
    """Whether "path::function" is a test function of a test module."""
    path, _, function = where.partition("::")
    file = ROOT / path
    if not (function.startswith("test_") and file.name.startswith("test_") and file.is_file()):
        return False
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, functions) and node.name == function for node in ast.parse(file.read_text()).body)


def test_every_argument_has_a_test_of_its_effect() -> None:
    planned = frozenset(name for name, argument in ARGUMENTS.items() if argument.arg.planned)
    assert faults(EFFECTS, (ARGUMENTS.keys() - planned) | UNDECLARED_FLAGS, planned) == []


@every(
    ("effects", "fault"),
    [
        ({}, "port is not planned and has no test"),
        ({"port": SERVER + "test_port", "dp_size": SERVER + "test_port"}, "dp_size is planned"),
        ({"port": SERVER + "test_port", "prot": SERVER + "test_port"}, "prot is not an argument"),
        ({"port": SERVER + "test_prot"}, "port: there is no test"),
        ({"port": SERVER + "running"}, "port: there is no test"),
        ({"port": "tests/e2e/test_nowhere.py::test_port"}, "port: there is no test"),
    ],
)
def test_faults_of_a_table(effects: dict[str, str], fault: str) -> None:
    (only,) = faults(effects, frozenset({"port"}), frozenset({"dp_size"}))
    assert only.startswith(fault)
