"""A tiny model for server starts, a covering array of argument values, and the effect of each value for a client.

The expectations of a start follow only from its row and from transformers' run of the model; nothing here uses
resolution or the support matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from argument_effects import OF_OWN_SERVERS
from models_small import SIZES, expected_logits, small_model, write_gguf
from tokenizers import Tokenizer, models, pre_tokenizers

from srv.args.config import ARGUMENTS
from srv.platform.op_choice import argument_names
from srv.platform.registry import find_platforms

CONTEXT = SIZES["max_position_embeddings"]
VOCABULARY = tuple(f"w{number}" for number in range(SIZES["vocab_size"]))
OUTPUT = 6
KEY = "a key of the covering array"
STARTS = 12
UNSET = None
LOWEST_PORT = 1
# Arguments that are not in the array, with the reason; separate tests cover them.
ELSEWHERE = {
    "dp_size": "replicas take several processes: tests/core/engine/test_replicas.py",
    "load_balance_method": "as dp_size",
    "enable_dp_attention": "as dp_size",
    "enable_dp_lm_head": "as dp_size",
    "ep_size": "it needs several ranks and experts: tests/core/executor/test_ranks.py",
    "device": "every start names it",
    "model_path": "every start names one of two models",
    "attention_backend": "not every backend supports every KV dtype: each has its own starts",
    "prefill_attention_backend": "as attention_backend",
    "decode_attention_backend": "as attention_backend",
    "nsa_prefill_backend": "it needs sparse attention: tests/core/args/test_effects_sparse.py starts engines",
    "nsa_decode_backend": "as nsa_prefill_backend",
    "quantization": "it follows from the checkpoint, and each value needs its own checkpoint",
    "dequantize_weights": "it needs quantized weights to have an effect: tests/core/args/test_effects.py",
    "activation_precision": "it needs weights in blocks: tests/platforms/cpu/test_precision.py starts engines",
    "torchao_config": "it needs unquantized weights, and the array has a GGUF model",
    "disable_graphs": "not every attention backend can replay graphs: tests/core/args/test_effects.py starts engines",
    "disable_graph_padding": "as disable_graphs",
    "graph_batch_sizes": "as disable_graphs",
    "graph_max_batch_size": "as disable_graphs",
    "enable_deterministic_inference": "its effect is on sums: tests/core/engine/test_deterministic.py starts engines",
    "enable_layer_markers": "its effect is in profiles: tests/core/args/test_effects.py starts engines",
    "base_device_id": "the CPU has one index: tests/core/args/test_effects_placing.py",
    "device_id_step": "as base_device_id",
    "numa_node": "not every host has NUMA nodes: tests/core/args/test_effects_placing.py",
    "enable_graph_gc": "as disable_graphs",
    "enable_graph_profiling": "as disable_graphs",
    "enable_piecewise_graphs": "only toy and GPUs have them: plugins/toy_device/tests/test_toy_pieces.py",
    "piecewise_graph_tokens": "as enable_piecewise_graphs",
    "piecewise_graph_max_tokens": "as enable_piecewise_graphs",
    "enable_torch_compile": "compiling takes long: tests/core/args/test_effects_of_capture.py starts engines",
    "torch_compile_max_bs": "as enable_torch_compile",
    "enable_torch_compile_debug_mode": "as enable_torch_compile",
    "is_embedding": "embeddings are not in the array: tests/e2e/test_e2e_arguments.py",
    "pooling": "as is_embedding",
    "enable_return_hidden_states": "as is_embedding",
    "tp_size": "several ranks take several processes: tests/core/executor/test_ranks.py",
    "dist_timeout": "as tp_size",
    "speculative_algorithm": "drafts are not in the array: tests/core/args/test_effects.py starts engines",
    "speculative_num_draft_tokens": "as speculative_algorithm",
    "speculative_ngram_min_match_window_size": "as speculative_algorithm",
    "speculative_ngram_max_match_window_size": "as speculative_algorithm",
    "speculative_ngram_branch_length": "as speculative_algorithm",
    "swa_full_tokens_ratio": "it needs a model with windows: tests/core/args/test_effects.py starts engines",
    "disable_hybrid_swa_memory": "as swa_full_tokens_ratio",
    "max_mamba_cache_size": "it needs recurrent layers: tests/core/args/test_effects_recurrent.py starts engines",
    "mamba_ssm_dtype": "as max_mamba_cache_size",
    "mamba_full_memory_ratio": "as max_mamba_cache_size",
    "mamba_track_interval": "as max_mamba_cache_size",
    "json_model_override_args": "no field is left as it is: tests/core/args/test_effects_of_model_files.py",
    "trust_remote_code": "it needs a model with code: tests/core/args/test_effects_of_model_files.py",
    "moe_runner_backend": "it needs experts: tests/core/args/test_effects_experts.py starts engines",
    "fp8_gemm_backend": "it needs weights in FP8: tests/core/args/test_effects_of_products.py starts engines",
    "mxfp4_moe_precision": "it needs experts in MXFP4: tests/core/args/test_effects_of_products.py starts engines",
    "disable_mla_ragged_prefill": "it needs latent attention: tests/platforms/cpu/test_latent_attention.py",
    "disable_chunked_prefix_cache": "as disable_mla_ragged_prefill",
    "api_key_file": "it cannot be set with api_key: tests/e2e/test_e2e_limits.py",
    "admin_api_key": "as api_key_file",
    "allowed_hosts": "as api_key_file",
    "allowed_origins": "as api_key_file",
    "revision": "it needs a hub; without one it is refused, which the tests of refusals cover",
    "completion_template": "it needs a tokenizer with tokens for it: tests/e2e/test_e2e_arguments.py",
    "score_template": "it needs a model that answers yes or no: tests/e2e/test_e2e_pooled.py",
    **{name: f"it has servers or engines of its own: {test}" for name, test in OF_OWN_SERVERS.items()},
}


def backends(family: str) -> tuple[str, ...]:
    """The names that the CPU platform's package registers, on any variant."""
    return tuple(spec.name for spec in find_platforms()["cpu"].loaded.facts.backends[family])


def implementations(op: str) -> tuple[str, ...]:
    """The names by which an argument chooses the CPU platform's implementations of an op."""
    return argument_names(find_platforms()["cpu"].loaded.facts.ops, op)


def choices(name: str) -> tuple[str, ...]:
    """The choices of an argument that core implements."""
    argument = ARGUMENTS[name]
    return tuple(value for value in argument.choices if argument.planned_reason(value) is None)


def factors() -> dict[str, tuple[Any, ...]]:
    """The values of each argument in the array: every choice, both booleans, boundaries and values between them."""
    return {
        **{name: choices(name) for name in ("dtype", "kv_cache_dtype", "load_format", "model_impl")},
        **{name: choices(name) for name in ("schedule_policy", "log_level")},
        "sampling_backend": (*backends("sampling"), UNSET),
        "disable_radix_cache": (False, True),
        "disable_overlap_schedule": (True, False),
        "served_model_name": (UNSET, "another-name"),
        "tokenizer_path": (UNSET, "tokens"),
        "chat_template": (UNSET, "template"),
        "api_key": (KEY, UNSET, UNSET),
        "host": ("127.0.0.2", "127.0.0.3", "127.0.0.4"),
        **_numbers(),
        "dequantize_weights": (False, UNSET),  # the tiny model is not quantized: tests/core/args/test_effects.py
        "max_held_request_bytes": (256 * 2**20, 1024, 512 * 2**20),
        "max_connections": (1000, 2000),
        "connection_timeout_seconds": (60.0, 120.0),
        "soft_watchdog_timeout": (300.0, 600.0),
        "watchdog_timeout": (300.0, 600.0),
    }


def _numbers() -> dict[str, tuple[Any, ...]]:
    return {
        "context_length": (CONTEXT, 50, UNSET, 200),
        "random_seed": (0, 2**63 - 1, UNSET),
        "mem_fraction_static": (0.88, 0.4, 0.99),
        "max_total_tokens": (4096, 1024, 100_000),
        "page_size": (1, 2, 16, 64),
        "max_running_requests": (256, 1, 512),
        "max_queued_requests": (4096, 1, 8192),
        "chunked_prefill_size": (256, 2048, 1, -1, 4096),
        "max_prefill_tokens": (16384, 16384, 16384, 1, 16384, 32768),
        "schedule_conservativeness": (1.0, 0.01, 2.0),
        "port": (65535, 30000, 60000),
        "max_request_bytes": (16 * 2**20, 1024, 32 * 2**20),
        "max_stop_strings": (16, 1, 32),
        "graceful_shutdown_seconds": (0.0, 30.0, 60.0),
        "engine_start_timeout_seconds": (900.0, 1800.0),
    }


# Arguments of which a start shows a client the difference that each value makes. Of the two limits of a request's
# bytes, the smaller one does as well. All others are accepted, reported, and leave the output as it is.
SEEN = frozenset(
    {"context_length", "max_total_tokens", "page_size", "disable_radix_cache", "max_stop_strings", "log_level"}
    | {"host", "port", "api_key", "served_model_name"}
)
BODY_LIMITS = ("max_request_bytes", "max_held_request_bytes")
MIN_INT8_PAGE_SIZE = 16  # the smallest page size that a backend supports for int8
Row = Mapping[str, Any]  # argument -> value; UNSET: the argument is not set
MODERATE: Row = {"dtype": "float32", "host": "127.0.0.7", "max_total_tokens": 4096, "max_stop_strings": 16}


def plain(**values: Any) -> Row:
    """A start with moderate values except `values`."""
    return {**dict.fromkeys(factors()), **MODERATE, **values}


def covering_array() -> list[Row]:
    """`STARTS` rows in which each value of each argument occurs, and most pairs of values of neighbouring arguments.

    The n values of an argument are repeated every n rows, shifted after each round by a step that differs between
    arguments. So the values of an argument do not depend on other arguments, except that a page size is raised to one
    that a backend supports for int8, and that a value without effect beside another one gets company with which it has
    one. (int8 is not supported with float16 either, but no row has both.)
    """
    rows: list[dict[str, Any]] = [{} for _ in range(STARTS)]
    for place, (name, values) in enumerate(factors().items()):
        if len(values) > STARTS:
            raise ValueError(f"{name} has {len(values)} values, and there are {STARTS} starts")
        for number, row in enumerate(rows):
            row[name] = values[(number + (number // len(values)) * (place % len(values))) % len(values)]
    for row in rows:
        if row["kv_cache_dtype"] == "int8" and row["page_size"] < MIN_INT8_PAGE_SIZE:
            row["page_size"] = MIN_INT8_PAGE_SIZE
        if row["max_prefill_tokens"] != ARGUMENTS["max_prefill_tokens"].default:
            row["chunked_prefill_size"] = -1
        if row["disable_radix_cache"] and row["schedule_policy"] == "lpm":
            row["schedule_policy"] = "fcfs"
    return [*rows, smallest()]


def smallest() -> Row:
    """Every limit at its declared minimum: requests with one prompt token and one output token still succeed."""
    limits = {
        "context_length": 2, "max_total_tokens": 2, "page_size": 1, "max_running_requests": 1,
        "max_queued_requests": 1, "chunked_prefill_size": 1,
        "schedule_conservativeness": 0.01, "max_request_bytes": 1024, "max_stop_strings": 1,
        "graceful_shutdown_seconds": 0.0,
    }  # fmt: skip
    return plain(**limits)


def name_of(row: Row, number: int) -> str:
    """The name of a start in test ids."""
    return "smallest" if row["context_length"] == 2 else f"start-{number}"


def cells(row: Row) -> tuple[str, ...]:
    """The cells of the support matrix that a start is evidence for: values, or only the argument if it is free text."""
    names: list[str] = []
    for name, value in row.items():
        if value is not UNSET:
            argument = ARGUMENTS[name]
            free = argument.kind.base not in (bool, int, float) and not argument.choices and not argument.arg.family
            names.append(name if free else f"{name}={argument.show(value)}")
    return tuple(names)


def seen_cells(row: Row) -> tuple[str, ...]:
    """Those of them of which a start shows a client what they change."""
    limits = {name: body_limit(row, name) for name in BODY_LIMITS}
    decides = min(limits, key=limits.__getitem__)
    return tuple(cell for cell in cells(row) if (name := cell.partition("=")[0]) in SEEN or name == decides)


def body_limit(row: Row, name: str) -> int:
    """One of the two limits of the bytes of a request."""
    value = row[name]
    return int(ARGUMENTS[name].default if value is UNSET else value)


@dataclass(frozen=True)
class Tiny:
    """One random model as a folder and as a GGUF file, with further files and its greedy tokens."""

    root: Path
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def folder(self) -> Path:
        return self.root / "tiny"

    @property
    def gguf(self) -> Path:
        return self.root / "tiny.gguf"

    def model_path(self, row: Row) -> Path:
        return self.gguf if row["load_format"] == "gguf" else self.folder

    def command_line(self, row: Row, config: Path) -> list[str]:
        """The command line of a start, without the port. Every second argument is written to the file `config`."""
        files = {"tokens": str(self.folder), "template": str(self.root / "twice.jinja")}
        chosen = {**row, "device": "cpu", "model_path": str(self.model_path(row))}
        if chosen["load_format"] == "gguf":
            chosen["tokenizer_path"] = "tokens"  # the GGUF file has token names but no merges
        values = {name: files.get(str(value), value) for name, value in chosen.items() if value is not UNSET}
        values.pop("port", None)
        flags: list[str] = []
        in_file: dict[str, Any] = {}
        for position, (name, value) in enumerate(values.items()):
            if isinstance(value, bool) or position % 2:  # a switch cannot express false on the command line
                in_file[name] = value
            else:
                flags.append(f"{ARGUMENTS[name].flag}={value}")
        config.write_text(yaml.safe_dump(in_file))
        return [*flags, f"--config={config}"]


def make_tiny(root: Path) -> Tiny:
    """Write the model, and compute its tokens with transformers, each in a pass over the whole sequence."""
    torch.manual_seed(0)
    model = small_model("llama", tie_word_embeddings=True, head_dim=16)
    folder = root / "tiny"
    model.save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({word: token for token, word in enumerate(VOCABULARY)}, unk_token=VOCABULARY[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    once = "{% for one in messages %}{{ one.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(once)
    (root / "twice.jinja").write_text(once.replace("{{ one.content }}", "{{ one.content }} {{ one.content }}"))
    write_gguf(root / "tiny.gguf", model, "llama")
    prompt = tuple(3 + number % 90 for number in range(33))
    return Tiny(root, prompt, tuple(_greedy(model, list(prompt))))


def _greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    output: list[int] = []
    for _ in range(OUTPUT):
        output.append(int(expected_logits(model, torch.tensor([*prompt, *output]))[-1].argmax()))
    return output
