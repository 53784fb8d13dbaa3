"""Outdated words: they work, a note says what to say today, and contradictions are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from srv.args.cli import add_arguments
from srv.args.config import ARGUMENTS, DEPRECATED
from srv.args.parser import Parser
from srv.args.sources import gather
from srv.args.spec import Argument
from srv.args.statement import UserInput


def said(words: list[str], environment: dict[str, str] | None = None, file: Path | None = None) -> UserInput:
    parser = Parser(prog="srv launch")
    add_arguments(parser)
    namespace, unknown = parser.parse_known_args([*words, *(["--config", str(file)] if file else [])])
    namespace.unknown = unknown
    return gather(namespace, environment or {})


@pytest.mark.parametrize("switch", DEPRECATED.values(), ids=lambda switch: switch.name)
def test_a_switch_says_what_replaced_it(switch: Argument) -> None:
    replacement = switch.replaced_by
    assert replacement is not None
    heard = said([switch.flag])
    assert heard.rejections == ()
    (statement,) = heard.statements
    today = ARGUMENTS[replacement.argument]
    assert statement.argument == today.name
    assert today.against(statement.value) is None
    assert statement.source == f"command line with {switch.flag}"
    assert heard.notes == (f"command line: {switch.flag} is deprecated; say {replacement} instead",)


def test_a_switch_takes_the_value_of_another_argument() -> None:
    heard = said(["--enable-ep-moe", "--tp-size", "8"])
    assert {each.argument: each.value for each in heard.statements} == {"ep_size": 8, "tp_size": 8}


def test_a_switch_that_is_off_says_nothing_but_is_noted() -> None:
    heard = said(["--no-enable-deepep-moe"])
    assert heard.statements == ()
    assert len(heard.notes) == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_micro_batch_size", "pp_max_micro_batch_size", ["4"]),
        ("tokenizer_metrics_allowed_customer_labels", "tokenizer_metrics_allowed_custom_labels", ["a", "b"]),
        ("nccl_init_addr", "dist_init_addr", ["here:1"]),
    ],
)
def test_a_former_name_works_everywhere_with_a_note(old: str, new: str, words: list[str], tmp_path: Path) -> None:
    value = ARGUMENTS[new].parse(",".join(words))
    flag = "--" + old.replace("_", "-")
    file = tmp_path / "serve.yaml"
    file.write_text(f"{old}: {list(words) if len(words) > 1 else words[0]}\n")
    for heard in (
        said([flag, *words]),
        said([], {f"SRV_{old.upper()}": ",".join(words)}),
        said([], file=file),
    ):
        assert [(each.argument, each.value) for each in heard.statements] == [(new, value)]
        assert len(heard.notes) == 1
        assert heard.notes[0].endswith(f"{flag} is now called {ARGUMENTS[new].flag}")


def test_a_spelling_of_another_engine_needs_no_note() -> None:
    heard = said(["--cuda-graph-max-bs", "8", "--disable-cuda-graph", "--base-gpu-id", "0"])
    names = {each.argument for each in heard.statements}
    assert names == {"graph_max_batch_size", "disable_graphs", "base_device_id"}
    assert heard.notes == ()


def test_two_things_said_in_one_place_are_refused() -> None:
    heard = said(["--enable-deepep-moe", "--moe-a2a-backend", "none"])
    (rejected,) = heard.rejections
    assert rejected.code == "contradiction"
    assert "--enable-deepep-moe" in str(rejected)
    assert said(["--max-micro-batch-size", "1", "--pp-max-micro-batch-size", "2"]).rejections[0].code == "contradiction"
    twice = {"SRV_TP_SIZE": "1", "SRV_TENSOR_PARALLEL_SIZE": "2"}
    assert said([], twice).rejections[0].code == "contradiction"


def test_the_same_thing_said_twice_is_heard() -> None:
    assert said(["--enable-deepep-moe", "--moe-a2a-backend", "deepep"]).rejections == ()


def test_a_stronger_place_still_goes_before_a_weaker_one() -> None:
    heard = said(["--pp-max-micro-batch-size", "2"], {"SRV_MAX_MICRO_BATCH_SIZE": "1"})
    assert heard.rejections == ()
    assert heard.value("pp_max_micro_batch_size") == 2


def test_words_for_a_choice() -> None:
    assert said(["--dtype", "half"]).value("dtype") == "float16"
    assert said(["--model-impl", "sglang"]).value("model_impl") == "srv"
    assert said(["--offload-mode", "cpu"]).value("offload_mode") == ARGUMENTS["offload_mode"].default


def test_a_flag_that_may_stand_alone() -> None:
    assert said(["--hybrid-kvcache-ratio"]).value("hybrid_kvcache_ratio") == 0.5
    assert said(["--hybrid-kvcache-ratio", "0.25"]).value("hybrid_kvcache_ratio") == 0.25
