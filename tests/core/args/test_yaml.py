"""Configuration files: a resolved configuration can be written and read again; no file causes a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from args_world import both, resolved, user
from every import every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srv.args.config import ARGUMENTS, DEPRECATED, Config, make_config
from srv.args.statement import Resolved, UserInput
from srv.args.yaml import read_text
from srv.cli.main import main
from srv.errors import Refusal

FILE = Path("serve.yaml")
SETTABLE = {name: argument for name, argument in ARGUMENTS.items() if argument.status == "implemented"}
# Not generated: arguments that need existing files or particular backends.
FIXED = {"device", "model_path", "revision", "load_format", "model_impl", "tokenizer_path", "chat_template"}
FIXED |= {name for name, argument in ARGUMENTS.items() if argument.arg.family}
NAMES = [*ARGUMENTS, *DEPRECATED, "no_such_argument"]


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Values of an argument's kind, many of which are valid."""
    argument = ARGUMENTS[name]
    planned = {word for word, _ in argument.arg.planned_values}
    if argument.choices:
        return st.sampled_from([word for word in argument.choices if word not in planned])
    base, many = argument.kind.base, argument.kind.many
    texts = st.text("abc xyz:#-'\"{}[],0", min_size=1, max_size=12)
    single: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(0, 24) if many else st.integers(-1, 2**17),
        float: st.floats(0.05, 8, allow_nan=False).map(lambda number: round(number, 6)),
        str: texts,
        Path: texts.map(Path),
    }
    return st.lists(single[base], min_size=1, max_size=3).map(tuple) if many else single[base]


VALUES = st.lists(st.sampled_from(sorted(SETTABLE.keys() - FIXED)), unique=True, max_size=6).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(name) for name in names})
)


def written(config: Config, only: set[str]) -> str:
    """A configuration as the text of a file, without unset arguments."""
    values = {name: ARGUMENTS[name].kind.dump(config.get(name)) for name in only}
    return yaml.safe_dump({name: value for name, value in values.items() if value is not None}, allow_unicode=True)


def from_file(text: str) -> UserInput:
    """The values that a file gives (statements), and the reasons why it is refused (rejections)."""
    statements, rejections = read_text(text, FILE)
    return UserInput(tuple(statements), tuple(rejections))


@settings(max_examples=150, deadline=None)
@given(values=VALUES)
def test_resolved_configuration_can_be_read_from_a_file(values: dict[str, Any]) -> None:
    try:
        first: Resolved = resolved(user(**values))
    except Refusal:
        return  # refused values need not be written to a file
    second = resolved(from_file(written(first.config, SETTABLE.keys() - FIXED)))
    assert second.config == first.config
    for name in values:
        assert second.provenance[name].reason.startswith("set by config file serve.yaml line ")


@settings(max_examples=150, deadline=None)
@given(values=VALUES)
def test_file_and_command_line_are_refused_alike(values: dict[str, Any]) -> None:
    def codes(user_input: UserInput) -> set[tuple[str, str]]:
        try:
            resolved(user_input)
        except Refusal as refusal:
            return {(rejection.code, rejection.what) for rejection in refusal.rejections}
        return set()

    dumped = {name: ARGUMENTS[name].kind.dump(value) for name, value in values.items()}
    text = yaml.safe_dump(dumped, allow_unicode=True) if values else ""
    assert codes(from_file(text)) == codes(user(**values))


@every("name", ARGUMENTS)
def test_every_default_can_be_written_to_a_file(name: str) -> None:
    """Also those of planned arguments, because they change nothing."""
    argument = ARGUMENTS[name]
    text = written(make_config({}), {name})
    parsed = from_file(text)
    assert not parsed.rejections
    if argument.default is None:
        assert parsed.statements == ()
    else:
        assert [statement.value for statement in parsed.statements] == [argument.default]
        assert argument.planned_reason(parsed.statements[0].value) is None


def test_command_line_overrides_the_file() -> None:
    first = resolved(user(page_size=16, max_running_requests=4))
    merged = both(from_file(written(first.config, {"page_size", "max_running_requests"})), user(page_size=32))
    second = resolved(merged)
    assert (second.config.memory.page_size, second.config.schedule.max_running_requests) == (32, 4)
    assert second.provenance["page_size"].overridden[0].reason.startswith("set by config file")


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**25), 10**25), st.floats(), st.text(max_size=12), st.dates()
)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3), max_leaves=6
)
DOCUMENTS = st.one_of(
    st.dictionaries(st.sampled_from(NAMES), TREES, max_size=5).map(
        lambda tree: yaml.safe_dump(tree, allow_unicode=True)
    ),
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.text("ab:{}[]&*!|>'\"%@`#-? \t\n\\0~=<", max_size=10)), max_size=4
    ).map(lambda lines: "\n".join(f"{name}: {text}" for name, text in lines)),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=DOCUMENTS)
def test_no_file_causes_a_traceback(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    arguments = ["plan", "--json", "--device=npu:a3", "--model-path=./nowhere/x", f"--config={path}"]
    assert main(arguments) == 2  # at least the model does not exist
    refusals = json.loads(capsys.readouterr().out)["refusals"]
    assert all(refusal["code"] and refusal["reason"] and refusal["remedy"].endswith((".", "?")) for refusal in refusals)
    assert any(refusal["what"] == "model_path" for refusal in refusals)


@settings(max_examples=100, deadline=None)
@given(
    values=st.dictionaries(
        st.sampled_from([argument.variable for argument in (*ARGUMENTS.values(), *DEPRECATED.values())]),
        st.text(max_size=12).filter(lambda text: "\0" not in text),
        max_size=5,
    )
)
def test_no_environment_causes_a_traceback(values: dict[str, str]) -> None:
    from srv.args.sources import read_environment

    statements, rejections = read_environment(values)
    assert len(statements) + len(rejections) == sum(1 for text in values.values() if text)
    assert all(
        rejection.code == "bad_value" and rejection.who.startswith("environment SRV_") for rejection in rejections
    )
