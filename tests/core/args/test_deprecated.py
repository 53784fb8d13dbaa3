"""Deprecated switches and former names: they work, a note names the replacement, contradictions are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from every import every

from srv.args.cli import add_arguments
from srv.args.config import ARGUMENTS, DEPRECATED
from srv.args.parser import Parser
from srv.args.sources import gather
from srv.args.spec import Argument
from srv.args.statement import UserInput


def parse(words: list[str], environment: dict[str, str] | None = None, file: Path | None = None) -> UserInput:
    parser = Parser(prog="srv launch")
    add_arguments(parser)
    namespace, unknown = parser.parse_known_args([*words, *(["--config", str(file)] if file else [])])
    namespace.unknown = unknown
    return gather(namespace, environment or {})


@every("switch", DEPRECATED.values(), ids=lambda switch: switch.name)
def test_switch_sets_its_replacement_with_a_note(switch: Argument) -> None:
    replacement = switch.replaced_by
    assert replacement is not None
    parsed = parse([switch.flag])
    assert parsed.rejections == ()
    (statement,) = parsed.statements
    current = ARGUMENTS[replacement.argument]
    assert statement.argument == current.name
    assert current.validation_error(statement.value) is None
    assert statement.source == f"command line with {switch.flag}"
    assert parsed.notes == (f"command line: {switch.flag} is deprecated; use {replacement} instead",)


def test_switch_can_use_the_value_of_another_argument() -> None:
    parsed = parse(["--enable-ep-moe", "--tp-size", "8"])
    assert {statement.argument: statement.value for statement in parsed.statements} == {"ep_size": 8, "tp_size": 8}


def test_switch_that_is_off_sets_nothing_but_is_noted() -> None:
    parsed = parse(["--no-enable-deepep-moe"])
    assert parsed.statements == ()
    assert len(parsed.notes) == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_micro_batch_size", "pp_max_micro_batch_size", ["4"]),
        ("tokenizer_metrics_allowed_customer_labels", "tokenizer_metrics_allowed_custom_labels", ["a", "b"]),
        ("nccl_init_addr", "dist_init_addr", ["here:1"]),
    ],
)
def test_former_name_works_in_every_origin_with_a_note(old: str, new: str, words: list[str], tmp_path: Path) -> None:
    value = ARGUMENTS[new].parse(",".join(words))
    flag = "--" + old.replace("_", "-")
    file = tmp_path / "serve.yaml"
    file.write_text(f"{old}: {list(words) if len(words) > 1 else words[0]}\n")
    for parsed in (
        parse([flag, *words]),
        parse([], {f"SRV_{old.upper()}": ",".join(words)}),
        parse([], file=file),
    ):
        assert [(statement.argument, statement.value) for statement in parsed.statements] == [(new, value)]
        assert len(parsed.notes) == 1
        assert parsed.notes[0].endswith(f"{flag} is now called {ARGUMENTS[new].flag}")


def test_a_spelling_of_another_engine_needs_no_note() -> None:
    parsed = parse(["--cuda-graph-max-bs", "8", "--disable-cuda-graph", "--base-gpu-id", "0"])
    names = {statement.argument for statement in parsed.statements}
    assert names == {"graph_max_batch_size", "disable_graphs", "base_device_id"}
    assert parsed.notes == ()


def test_different_values_in_one_origin_are_refused() -> None:
    parsed = parse(["--enable-deepep-moe", "--moe-a2a-backend", "none"])
    (rejected,) = parsed.rejections
    assert rejected.code == "contradiction"
    assert "--enable-deepep-moe" in str(rejected)
    flags = ["--max-micro-batch-size", "1", "--pp-max-micro-batch-size", "2"]
    assert parse(flags).rejections[0].code == "contradiction"
    twice = {"SRV_TP_SIZE": "1", "SRV_TENSOR_PARALLEL_SIZE": "2"}
    assert parse([], twice).rejections[0].code == "contradiction"


def test_equal_values_in_one_origin_are_accepted() -> None:
    assert parse(["--enable-deepep-moe", "--moe-a2a-backend", "deepep"]).rejections == ()


def test_higher_origin_overrides_a_lower_one() -> None:
    parsed = parse(["--pp-max-micro-batch-size", "2"], {"SRV_MAX_MICRO_BATCH_SIZE": "1"})
    assert parsed.rejections == ()
    assert parsed.value("pp_max_micro_batch_size") == 2


def test_synonyms_of_choices() -> None:
    assert parse(["--dtype", "half"]).value("dtype") == "float16"
    assert parse(["--model-impl", "sglang"]).value("model_impl") == "srv"
    assert parse(["--offload-mode", "cpu"]).value("offload_mode") == ARGUMENTS["offload_mode"].default


def test_flag_with_an_optional_value() -> None:
    assert parse(["--hybrid-kvcache-ratio"]).value("hybrid_kvcache_ratio") == 0.5
    assert parse(["--hybrid-kvcache-ratio", "0.25"]).value("hybrid_kvcache_ratio") == 0.25
