"""All declared arguments: what each declaration must have, and that none is accepted without being implemented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from args_world import manifest, resolved, user
from every import every

from srv.args.command_line import read_text
from srv.args.config import ARGUMENTS, DEPRECATED, GROUPS, SPELLINGS, find_argument, find_argument_or_deprecated
from srv.args.spec import Argument
from srv.args.statement import Origin, UserStatement
from srv.errors import Refusal
from srv.platform.capabilities import CAPABILITIES
from srv.platform.op_choice import NAMED_BY
from srv.speculative.algorithm import READABLE

CORE = Path(__file__).resolve().parents[3] / "core" / "srv"
PLANNED = [argument for argument in ARGUMENTS.values() if argument.arg.planned]
IMPLEMENTED = [argument for argument in ARGUMENTS.values() if not argument.arg.planned]

# The flags of SGLang (0.5.2 to the newest page), except `--config`, which is a flag of the command line itself.
PUBLISHED = Path(__file__).with_name("args_published.txt").read_text(encoding="utf-8").split()


def other_value(argument: Argument) -> Any:
    """A valid value that is not the default."""
    for text in _candidates(argument):
        read = read_text(argument, text, Origin.COMMAND_LINE, "test")
        if not isinstance(read, UserStatement) or read.value == argument.default:
            continue
        if argument.validation_error(read.value) is None:
            return read.value
    raise AssertionError(f"this test knows no other value of {argument.name}")


def _candidates(argument: Argument) -> list[str]:
    texts = ["true", "false", *argument.choices, "1", "2", "3", "0.25", "16", "32", "0", "8080"]
    return [*texts, '{"a": 1}', "[1]", "default", "custom,1,2", "name=path", "q_proj", "x/y", "1,2"]


@every("argument", ARGUMENTS.values(), ids=lambda argument: argument.name)
def test_declaration_is_complete(argument: Argument) -> None:
    assert argument.arg.help.endswith(".")
    assert len(argument.arg.help) >= 20
    assert argument.group in GROUPS
    assert argument.kind.base in (bool, int, float, str, Path)
    assert argument.validation_error(argument.default) is None
    assert argument.arg.needs is None or argument.arg.needs in CAPABILITIES
    assert argument.kind.read(argument.kind.dump(argument.default)) == argument.default
    for reason in (argument.arg.planned, *(text for _, text in argument.arg.planned_values)):
        assert reason is None or (reason and reason == reason.strip(". "))


@every("flag", PUBLISHED)
def test_published_flag_belongs_to_an_argument(flag: str) -> None:
    assert find_argument_or_deprecated("--" + flag) is not None


def test_arguments_are_the_published_ones_and_our_own() -> None:
    """273 rows are published; `config` is not among these flags, and some rows have two spellings."""
    assert len(PUBLISHED) == len(set(PUBLISHED))
    reached = {
        (argument.name, argument.deprecated) for flag in PUBLISHED if (argument := find_argument_or_deprecated(flag))
    }
    ours = {"max_request_bytes", "max_stop_strings", "graceful_shutdown_seconds", "engine_start_timeout_seconds"}
    ours |= {"max_held_request_bytes", "max_connections", "connection_timeout_seconds"}
    ours |= {"api_key_file", "admin_api_key", "allowed_hosts", "allowed_origins"}
    ours |= {"dequantize_weights", "pooling", "score_template", "ui", "access_log", "uds", "root_path", "api_keys_file"}
    ours |= {"share_cache", "trust_request_chat_template", "activation_precision"}
    ours |= {"ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "calculate_kv_scales"}
    of_other_releases = {"attn_cp_size", "nsa_prefill_cp_mode", "speculative_draft_model_quantization"}
    ours |= of_other_releases  # of SGLang, for which vendors' launch lines are written
    assert {name for name, _ in reached} == (ARGUMENTS.keys() | DEPRECATED.keys()) - ours


@every("argument", PLANNED, ids=lambda argument: argument.name)
def test_planned_argument_is_refused_by_name(argument: Argument) -> None:
    value = other_value(argument)
    with pytest.raises(Refusal) as caught:
        resolved(user(**{argument.name: value}))
    (rejected,) = caught.value.rejections
    assert (rejected.code, rejected.what, rejected.value) == ("planned", argument.name, argument.show(value))
    assert rejected.reason == argument.arg.planned


@every(
    ("name", "value"),
    [(argument.name, value) for argument in ARGUMENTS.values() for value, _ in argument.arg.planned_values],
)
def test_planned_choice_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(Refusal) as caught:
        resolved(user(**{name: value}))
    (rejected,) = caught.value.rejections
    assert (rejected.code, rejected.what, rejected.value) == ("planned", name, value)
    assert rejected.remedy == f"Choose {', '.join(ARGUMENTS[name].implemented_choices)}."


@every("argument", ARGUMENTS.values(), ids=lambda argument: argument.name)
def test_default_is_accepted_from_a_user(argument: Argument) -> None:
    if argument.default is None:
        assert argument.kind.optional
        return
    config = resolved(user(**{argument.name: argument.default}), model=None).config
    assert argument.asks_for_automatic(argument.default) or config.get(argument.name) == argument.default


# Implemented arguments that are not read in the form `config.group.name`.
READ_ELSEWHERE = {
    "model_path": "srv.planning.resolution: selects the model",
    "revision": "srv.planning.resolution: selects the model",
    "device": "srv.planning.resolution: selects the platform",
    "attention_backend": "srv.args.backends: selects the backend",
    "prefill_attention_backend": "srv.args.backends: selects the backend",
    "decode_attention_backend": "srv.args.backends: selects the backend",
    "nsa_prefill_backend": "srv.args.backend_groups: selects the backend",
    "nsa_decode_backend": "srv.args.backend_groups: selects the backend",
    "sampling_backend": "srv.args.backends: selects the backend",
    "moe_runner_backend": "srv.args.backends: selects the backend",
    "json_model_override_args": "srv.planning.resolution: how the model is read",
    "trust_remote_code": "srv.planning.resolution: how the model is read",
    "download_dir": "srv.planning.resolution: selects the model",
    "model_loader_extra_config": "srv.args.rules.loading: how weight files are read",
    "weight_loader_disable_mmap": "srv.args.rules.loading: how weight files are read",
    "ep_size": "srv.dist.mesh: how the ranks divide the model",
    "enable_dp_lm_head": "srv.dist.mesh: how the ranks divide the model",
    **{name: "a backend that names it" for name, argument in ARGUMENTS.items() if argument.arg.read_by},
    **dict.fromkeys(READABLE, "srv.planning.steps: the algorithm names those that it reads"),
    **dict.fromkeys(NAMED_BY.values(), "srv.platform.op_choice: selects the implementation of an op"),
}


def test_every_implemented_argument_is_read_by_the_engine() -> None:
    sources = [path.read_text(encoding="utf-8") for path in CORE.rglob("*.py") if "args" not in path.parts]
    code = "\n".join(sources)
    unread = [
        argument.name
        for argument in IMPLEMENTED
        if argument.name not in READ_ELSEWHERE and not re.search(rf"\b{argument.group}\.{argument.name}\b", code)
    ]
    assert unread == []


def test_names_of_arguments_contain_no_device() -> None:
    word = re.compile(r"(^|_)(cuda|cudagraph|rocm|npu|xpu|hip|nccl|hccl|flashinfer|ascend|cpu|gpu|nvtx)(_|$)")
    assert [name for name in ARGUMENTS if word.search(name)] == []
    for table in (SPELLINGS.names, SPELLINGS.old_names):
        assert table.keys() <= ARGUMENTS.keys()
    assert SPELLINGS.published.keys() <= ARGUMENTS.keys()


@every(("name", "values"), SPELLINGS.published.items())
def test_published_values_are_valid(name: str, values: tuple[str, ...]) -> None:
    argument = ARGUMENTS[name]
    assert len(set(values)) == len(values)
    assert not argument.choices
    assert all(argument.validation_error(value) is None for value in values)
    assert argument.default is None or argument.default in values


@every("name", ["graph_max_batch_size", "cuda_graph_max_bs", "--cuda-graph-max-bs"])
def test_spelling_finds_the_argument(name: str) -> None:
    assert find_argument(name) is ARGUMENTS["graph_max_batch_size"]


def test_argument_without_its_capability_is_refused() -> None:
    bare = manifest(capabilities=frozenset({"float32", "bfloat16"}))
    with pytest.raises(Refusal) as caught:
        resolved(user(page_size=2), on=bare)
    assert caught.value.rejections[0].code == "capability_missing"
