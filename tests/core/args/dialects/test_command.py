"""`srv args translate` and `--dialect`, as an operator uses them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from args_world import CONFIG
from every import every

from srv.args.parser import Parser
from srv.cli.dialect import expand_dialect
from srv.cli.translate import add_translate
from srv.errors import Refusal


def run(*words: str) -> int:
    """The exit status of `srv args translate`; raises the Refusal that the program would print."""
    parser = Parser(prog="srv")
    add_translate(parser.add_subparsers())
    namespace, unknown = parser.parse_known_args(["translate", *words])
    namespace.unknown = unknown
    return int(namespace.handler(namespace))


def test_the_counts_of_rtp_llm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", "rtp-llm", "--counts") == 0
    assert capsys.readouterr().out == (
        "RTP-LLM: 94 rows: 14 mapped, 45 converted, 35 refused, 0 unknown\n"
        "18 flags that its page of arguments does not list: 12 mapped, 6 converted, 0 refused\n"
    )


def test_the_table_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", "rtp-llm", "--table") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("--reuse-cache") and line.endswith("converted  --disable-radix-cache") for line in lines)
    assert run("--from", "vllm", "--table", "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"flags": ["--block-size"], "arguments": ["page_size"]}.items() <= next(
        row for row in rows if row["flags"] == ["--block-size"]
    ).items()


def test_a_translation_is_printed_as_command_line_and_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tp_size", "2", "--reuse-cache", "0", "--lora-info", '{"a": "/x y"}', "--start_port", "8088")
    with pytest.raises(Refusal) as refused:  # a launch refuses it: the translation is printed nevertheless
        run("--from", "rtp-llm", "--", *words)
    assert [(rejection.what, rejection.code) for rejection in refused.value.rejections] == [("lora_paths", "planned")]
    assert 'set by --lora-info {"a": "/x y"} (rtp-llm)' in str(refused.value)
    assert capsys.readouterr().out == (
        "command line\n"
        "  srv launch --tp-size 2 --disable-radix-cache --lora-paths 'a=/x y' --port 8088\n"
        "\n"
        "as YAML, for --config\n"
        "  tp_size: 2\n"
        "  disable_radix_cache: true\n"
        "  lora_paths:\n"
        "  - a=/x y\n"
        "  port: 8088\n"
        "\n"
        "notes\n"
        "  - --reuse-cache false: disable_radix_cache = true\n"
        '  - --lora-info {"a": "/x y"}: lora_paths = a=/x y\n'
        "  - without --host, RTP-LLM has 0.0.0.0 and srv 127.0.0.1: set --host 0.0.0.0 to keep it\n"
    )


@every(
    ("words", "refused"),
    [
        (("vllm", "--", "serve", "x/m", "--enable-lora", "--max-num-seqs", "4"), [("enable_lora", "planned")]),
        (("sglang", "--", "--model", "x/m", "--pp", "2"), [("pp_size", "planned")]),
        (("vllm", "--", "serve", "x/m", "-tp", "2"), []),  # the device is not known
        (("vllm", "--device", "cuda:sm90", "--", "serve", "x/m", "-tp", "2"), [("tp_size", "too_few_devices")]),
        (("vllm", "--", "x/m", "-tp", "2", "--device", "cuda:sm90,count=2"), []),
        (("vllm", "--device", "npu:a2", "--", "x/m", "--block-size", "16"), [("page_size", "no_backend_fits")]),
        (("vllm", "--device", "nowhere", "--", "x/m"), [("device", "unknown_platform")]),
        (("vllm", "--", "{}", "--load-format", "dummy", "-tp", "3"), [("tp_size", "not_divisible")]),
        # a fault of the device hides none of the arguments, and what a launch checks afterwards is checked
        (
            ("vllm", "--device", "nowhere", "--", "{}", "--load-format", "dummy", "-tp", "3"),
            [("device", "unknown_platform"), ("tp_size", "not_divisible")],
        ),
        (("vllm", "--device", "cpu:avx512", "--", "{}"), [("load_format", "format_not_there")]),
    ],
)
def test_what_a_launch_refuses_is_refused(
    words: tuple[str, ...], refused: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    status = run("--format", "json", "--from", *(word.format(tmp_path) for word in words))
    output = json.loads(capsys.readouterr().out)
    assert [(refusal["what"], refusal["code"]) for refusal in output["refusals"]] == refused
    assert status == (2 if refused else 0)


def test_a_command_line_may_be_pasted_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", "vllm", "--format", "command", "vllm", "serve", "x/m", "-tp", "2") == 0
    assert capsys.readouterr().out == "srv launch --model-path x/m --tp-size 2\n"


def test_words_that_yaml_cannot_express_are_a_comment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", "sglang", "--format", "yaml", "--", "--model", "x/m", "--config=own.yaml") == 0
    assert capsys.readouterr().out == "model_path: x/m\n# not included: '--config own.yaml'\n"


def test_refusals_come_after_the_translation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refusal, match="no_equivalent"):
        run("--from", "rtp-llm", "--format", "command", "--", "--tp-size", "2", "--m-split", "4")
    assert capsys.readouterr().out == "srv launch --tp-size 2\n"


@every(
    ("words", "message"),
    [
        (
            ("rtp-llm", "--", "--tp_size", "abc"),
            "(set by --tp_size abc (rtp-llm)): it is not an integer (of at most 19 digits)",
        ),
        (("vllm", "--", "--gpu-memory-utilization", "nan"), "mem_fraction_static = nan"),
        (("vllm", "--", "--gpu-memory-utilization", "2"), "it must be above 0 and below 1"),
        (("vllm", "--", "--port=70000"), "port = 70000 (set by --port 70000 (vllm)): it must be between 1 and 65535"),
    ],
)
def test_invalid_value_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        run("--from", *words)
    assert message in str(caught.value)


def test_json_says_whether_all_flags_were_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", "rtp-llm", "--format", "json", "--", "--m-split", "4") == 2
    translation = json.loads(capsys.readouterr().out)
    assert not translation["accepted"]
    assert translation["refusals"][0]["code"] == "no_equivalent"
    assert run("--from", "rtp-llm", "--format", "json", "--", "--m-split", "0") == 0
    assert json.loads(capsys.readouterr().out)["accepted"]


def test_words_without_a_dialect_are_unchanged() -> None:
    for words in ([], ["args", "list"], ["launch", "--tp-size", "2"], ["args", "--dialect", "vllm"]):
        assert expand_dialect(words) == (words, None)


def test_launch_and_plan_keep_their_own_flags() -> None:
    words, translation = expand_dialect(["plan", "--json", "--dialect", "rtp-llm", "--tp_size", "2", "--m-split", "4"])
    assert words == ["plan", "--json"]
    assert translation is not None
    assert translation.values == {"tp_size": 2}
    assert [rejection.code for rejection in translation.rejections] == ["no_equivalent"]
    words, translation = expand_dialect(["launch", "--dialect=sglang", "--model", "m", "--config=own.yaml"])
    assert words == ["launch", "--config", "own.yaml"]
    assert translation is not None
    assert translation.values == {"model_path": "m"}


def test_dialect_must_be_set_and_known() -> None:
    with pytest.raises(Refusal, match="Available dialects: rtp-llm, vllm, sglang"):
        expand_dialect(["launch", "--dialect", "tgi"])
    with pytest.raises(Refusal, match="it has no value"):
        expand_dialect(["launch", "--dialect"])


def test_missing_separator_is_refused() -> None:
    with pytest.raises(Refusal, match="Write -- before the command line to translate"):
        run("--from", "rtp-llm", "--tp_size", "2")
