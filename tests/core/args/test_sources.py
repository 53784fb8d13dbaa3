"""The user's input: command line, environment variables, YAML; misspellings name the nearest known name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from every import every

from srv.args.cli import add_arguments
from srv.args.command_line import unknown_flags
from srv.args.config import ARGUMENTS, DEPRECATED, find_argument_or_deprecated
from srv.args.parser import Parser
from srv.args.sources import gather, misspelt_variables, read_environment
from srv.args.statement import UserInput
from srv.args.yaml import MAX_FILE_BYTES, read_file, read_text
from srv.errors import Refusal


def parse(*arguments: str, environment: dict[str, str] | None = None) -> UserInput:
    parser = Parser(prog="srv plan")
    add_arguments(parser)
    namespace, unknown = parser.parse_known_args(arguments, argparse.Namespace())
    namespace.unknown = unknown
    return gather(namespace, environment or {})


def values(user_input: UserInput) -> dict[str, object]:
    assert user_input.rejections == ()
    return {statement.argument: user_input.value(statement.argument) for statement in user_input.statements}


def test_no_input_sets_nothing() -> None:
    assert parse() == UserInput()


def test_flags_are_parsed_by_type() -> None:
    words = ["--page-size", "16", "--schedule-conservativeness", "0.5", "--disable-radix-cache"]
    words += ["--chunked-prefill-size", "-1"]
    assert values(parse(*words)) == {
        "page_size": 16,
        "schedule_conservativeness": 0.5,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
    }


def test_alias_and_negated_flag() -> None:
    assert values(parse("--tensor-parallel-size=1", "--no-trust-remote-code")) == {
        "tp_size": 1,
        "trust_remote_code": False,
    }


def test_abbreviated_flag_is_unknown() -> None:
    (rejected,) = parse("--page-siz", "3").rejections
    assert (rejected.code, rejected.remedy) == ("unknown_flag", "Did you mean --page-size?")


@every(
    ("word", "near"),
    [("--pagesize=3", "--page-size"), ("--max_running_request", "--max-running-requests"), ("--dtpye", "--dtype")],
)
def test_unknown_flag_names_the_nearest(word: str, near: str) -> None:
    (rejected,) = unknown_flags([word])
    assert rejected.remedy == f"Did you mean {near}?"


def test_unknown_flag_without_a_similar_one_refers_to_the_list() -> None:
    (rejected,) = unknown_flags(["--zzzzzz"])
    assert "srv args list" in rejected.remedy


def test_all_invalid_values_are_refused_together() -> None:
    user_input = parse("--page-size", "x", "--port", "1.5", "--bogus", "stray", "more")
    assert [rejected.what for rejected in user_input.rejections] == ["page_size", "port", "--bogus", "more"]


def test_secret_is_not_repeated_in_a_refusal() -> None:
    (rejected,) = parse("--api-key", "s3cret\0").rejections
    assert "s3cret" not in str(rejected)


def test_flag_without_its_value_is_refused() -> None:
    with pytest.raises(Refusal, match="--page-size: expected one argument"):
        parse("--page-size")


def test_environment_is_read_and_overridden() -> None:
    user_input = parse("--port", "1", environment={"SRV_PORT": "2", "SRV_DISABLE_RADIX_CACHE": "true", "SRV_HOST": ""})
    assert values(user_input) == {"port": 1, "disable_radix_cache": True}
    assert [statement.source for statement in user_input.statements] == [
        "command line",
        "environment SRV_DISABLE_RADIX_CACHE",
        "environment SRV_PORT",
    ]


def test_bad_environment_variable_names_itself() -> None:
    (rejected,) = parse(environment={"SRV_PORT": "tcp://10.0.0.1:80"}).rejections
    assert rejected.who == "environment SRV_PORT"


def test_misspelt_variable_is_noted_and_others_are_ignored() -> None:
    notes = misspelt_variables({"SRV_PAGE_SIZ": "1", "SRV_SERVICE_ACCOUNT": "x", "HOME": "/"})
    assert len(notes) == 1
    assert "SRV_PAGE_SIZE" in notes[0]


def test_file_is_read_and_overridden(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("page-size: 16\nport: 5\nmem_fraction_static: 1e-1\nschedule_conservativeness: 2\n")
    user_input = parse("--port", "6", "--config", str(path))
    assert user_input.value("port") == 6
    assert user_input.value("page_size") == 16
    assert user_input.value("schedule_conservativeness") == 2.0
    assert f"config file {path} line 1" in [statement.source for statement in user_input.statements]


def test_refusals_of_all_origins_are_collected(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("pagesize: 16\n")
    user_input = parse("--config", str(path), "--zzzz", environment={"SRV_PORT": "x"})
    assert {rejected.code for rejected in user_input.rejections} == {"unknown_key", "unknown_flag", "bad_value"}


@every(
    ("text", "code", "part"),
    [
        ("pagesize: 1", "unknown_key", "Did you mean page_size?"),
        ("zzzz: 1", "unknown_key", "srv args list"),
        ("--page-size: 1", "unknown_key", "Did you mean page_size?"),
        ("port: 1\npage_size: 1\nport: 2", "duplicate_key", "line 1 sets it already"),
        ("tp_size: 1\ntensor_parallel_size: 1", "duplicate_key", "line 1 sets it already"),
        ("page_size: '1'", "bad_value", "is not an integer but a string"),
        ("page_size: true", "bad_value", "is not an integer but true or false"),
        ("page_size: null", "bad_value", "Leave the key out"),
        ("revision: 0123", "bad_value", "is not a string but an integer"),
        ("revision: 2024-99-99", "bad_value", "YAML cannot parse it"),
        ("host: [a, b]", "bad_value", "is not a string but a list"),
        ("? [a, b]\n: 1", "unknown_key", "a key that is not a string"),
        ("- page_size", "bad_config_file", "not a mapping"),
        ("page_size: [", "bad_config_file", "not valid YAML"),
        ("a: *nothing", "bad_config_file", "not valid YAML"),
        ("port: !!python/object:os.system 1", "bad_config_file", "not valid YAML"),
        ("port: \x00", "bad_config_file", "not valid YAML"),
        ("port: " + "[" * 5000, "bad_config_file", "nested too deeply"),
    ],
)
def test_bad_file_is_refused_with_its_name(text: str, code: str, part: str) -> None:
    _, rejections = read_text(text, Path("serve.yaml"))
    assert [rejected.code for rejected in rejections] == [code]
    assert part in str(rejections[0])
    assert "serve.yaml" in str(rejections[0])


def test_wrong_value_names_its_line() -> None:
    _, (rejected,) = read_text("# first\n\nport: x\n", Path("serve.yaml"))
    assert rejected.who == "config file serve.yaml line 3"


def test_valid_entries_are_kept() -> None:
    statements, rejections = read_text("port: 5\npagesize: 1\nhost: h\n", Path("serve.yaml"))
    assert [statement.argument for statement in statements] == ["port", "host"]
    assert len(rejections) == 1


def test_empty_file_sets_nothing() -> None:
    assert read_text("# nothing\n", Path("serve.yaml")) == ([], [])


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"host: \xff\xfe")
    (tmp_path / "long").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    for path in (tmp_path, tmp_path / "absent", tmp_path / "latin", tmp_path / "long", Path("a\0b")):
        _, (rejected,) = read_file(path)
        assert rejected.code == "bad_config_file"


@every("name", [*ARGUMENTS, *DEPRECATED])
def test_every_name_of_an_argument_has_a_variable(name: str) -> None:
    argument = find_argument_or_deprecated(name)
    assert argument is not None
    text = (
        argument.choices[0] if argument.choices else {bool: "true", int: "7", float: "0.5"}.get(argument.kind.base, "x")
    )
    for spelling in argument.names:
        statements, rejections = read_environment({f"SRV_{spelling.upper()}": text})
        assert not rejections
        (statement,) = statements
        assert statement.argument == name
        assert statement.source == f"environment SRV_{spelling.upper()}"
        assert statement.value == argument.parse(text)


def rejections_of(*words: str) -> list[tuple[str, str, str]]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    user = gather(parser.parse_args(words), {})
    return [(rejection.code, rejection.what, rejection.reason) for rejection in user.rejections]


@every(
    ("words", "name", "reason"),
    [
        (("--page-size", "16", "--page-size", "32"), "page_size", "it is set to 16 and 32"),
        (("--model", "a", "--model-path", "b"), "model_path", "it is set to a and b"),
        (("--config", "a.yaml", "--config", "b.yaml"), "config", "it is set to a.yaml and b.yaml"),
        (("--api-key", "one", "--api-key", "two"), "api_key", "it is set to two different values"),
    ],
)
def test_repeated_flag_with_different_values_is_refused(words: tuple[str, ...], name: str, reason: str) -> None:
    assert rejections_of(*words) == [("said_twice", name, reason)]


def test_repeated_flag_with_the_same_value_is_accepted() -> None:
    assert (
        rejections_of("--page-size", "16", "--page-size", "16", "--disable-radix-cache", "--disable-radix-cache") == []
    )
