"""Declarations: their required parts, the parsing of values, and the frozen configuration."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pytest
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st

from srv.args.checks import above, at_least, at_least_or, between, fraction, not_empty, one_of
from srv.args.config import ARGUMENTS, Config, find_argument, make_config
from srv.args.kinds import Kind, kind_of
from srv.args.spec import Arg, read_group, read_groups
from srv.executor.spec import decode, encode


@every(
    ("annotation", "expected"),
    [
        (int, Kind(int)),
        (str | None, Kind(str, optional=True)),
        (Path, Kind(Path)),
        (tuple[int, ...], Kind(int, many=True)),
        (tuple[str, ...] | None, Kind(str, optional=True, many=True)),
        (Literal["a", "b"], Kind(str, choices=("a", "b"))),
    ],
)
def test_kind_of_an_annotation(annotation: Any, expected: Kind) -> None:
    assert kind_of(annotation) == expected


@every("annotation", [dict, int | str, tuple[int, int], Literal[1, 2], int | str | None])
def test_annotation_without_a_kind_is_refused(annotation: Any) -> None:
    with pytest.raises(TypeError, match="argument"):
        kind_of(annotation)


@every(
    ("kind", "text", "value"),
    [
        (Kind(int), "-1", -1),
        (Kind(float), "1e3", 1000.0),
        (Kind(bool), "No", False),
        (Kind(Path), "a b", Path("a b")),
        (Kind(int, many=True), "1, 2,3", (1, 2, 3)),
    ],
)
def test_text_is_parsed(kind: Kind, text: str, value: Any) -> None:
    assert kind.parse(text) == value


@every(
    ("kind", "text"),
    [
        (Kind(int), "1_0"),
        (Kind(int), "٣"),
        (Kind(int), "9" * 5000),
        (Kind(int), ""),
        (Kind(float), "nan"),
        (Kind(float), "inf"),
        (Kind(float), "1e999"),
        (Kind(bool), "maybe"),
        (Kind(str), "a\0b"),
    ],
)
def test_invalid_text_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises(ValueError, match=r"is|holds"):
        kind.parse(text)


@every(
    ("kind", "value"),
    [
        (Kind(int), True),
        (Kind(int), 1.0),
        (Kind(int), "1"),
        (Kind(int), 10**30),
        (Kind(str), 1),
        (Kind(bool), 1),
        (Kind(float), "1"),
        (Kind(float), float("nan")),
        (Kind(float), 10**400),
        (Kind(int), None),
        (Kind(int, many=True), 3),
    ],
)
def test_typed_value_of_the_wrong_type_is_refused(kind: Kind, value: Any) -> None:
    with pytest.raises(ValueError, match=r"is|has"):
        kind.read(value)


@every(
    ("check", "good", "bad"),
    [
        (at_least(2), 2, 1),
        (above(0), 0.1, 0),
        (between(1, 3), 3, 4),
        (fraction(), 0.5, 1.0),
        (at_least_or(1, -1, "whole"), -1, 0),
        (one_of("a", "b"), "b", "c"),
        (not_empty(), "x", "  "),
    ],
)
def test_check_accepts_only_valid_values(check: Any, good: Any, bad: Any) -> None:
    assert check.accepts(good)
    assert not check.accepts(bad)
    assert check.expected


def group(**fields: Any) -> Any:
    """A group of fields: pairs of an annotation and an optional default."""
    hints = {name: field[0] for name, field in fields.items()}
    body: dict[str, Any] = {"__annotations__": hints, "__module__": __name__}
    body |= {name: field[1] for name, field in fields.items() if len(field) > 1}
    return types.new_class("Group", (NamedTuple,), exec_body=lambda space: space.update(body))


def test_default_that_violates_its_own_check_is_refused() -> None:
    declared = Annotated[int, Arg("Size.", at_least(1))]
    bad = group(size=(declared, 0))
    with pytest.raises(TypeError, match=r"g\.size: its own default must be at least 1"):
        read_group("g", bad)


def test_field_without_declaration_or_default_is_refused() -> None:
    plain = group(size=(int, 1))
    bare = group(size=(Annotated[int, Arg("Size.")],))
    with pytest.raises(TypeError, match=r"g\.size is not declared"):
        read_group("g", plain)
    with pytest.raises(TypeError, match=r"g\.size has no default"):
        read_group("g", bare)


def test_name_used_in_two_groups_is_refused() -> None:
    one = group(size=(Annotated[int, Arg("Size.")], 1))
    two = group(width=(Annotated[int, Arg("W.", aliases=("size",))], 1))
    with pytest.raises(TypeError, match=r"the name size belongs to a\.size"):
        read_groups({"a": one, "b": two})


def test_every_argument_has_help_that_is_a_sentence() -> None:
    assert [name for name, argument in ARGUMENTS.items() if not argument.arg.help.rstrip().endswith(".")] == []


def test_names_are_found_by_alias_and_flag() -> None:
    assert find_argument("--tensor-parallel-size") is ARGUMENTS["tp_size"]
    assert find_argument("page_size") is ARGUMENTS["page_size"]
    assert find_argument("pages") is None


def test_secret_value_is_never_shown() -> None:
    assert ARGUMENTS["api_key"].show("s3cret") == "(hidden)"
    assert ARGUMENTS["api_key"].show(None) == "unset"


def test_config_is_typed_by_group_and_flat_by_name() -> None:
    config = make_config({"page_size": 16, "chat_template": Path("chat.jinja")})
    assert config.memory.page_size == config.get("page_size") == 16
    assert config.schedule == Config().schedule
    with pytest.raises(KeyError):
        config.get("nothing")
    with pytest.raises(AttributeError):
        config.memory.page_size = 1  # type: ignore[misc]


class Held(msgspec.Struct):
    config: Config


@settings(max_examples=30, deadline=None)
@given(
    page=st.integers(1, 10**6),
    name=st.text(min_size=1).filter(lambda text: "\0" not in text and text.strip()),
    fraction_=st.floats(0.01, 0.99),
    template=st.none() | st.sampled_from(["a.jinja", "folder/b c.jinja"]),
)
def test_config_round_trip_through_json(page: int, name: str, fraction_: float, template: str | None) -> None:
    values = {"page_size": page, "served_model_name": name, "mem_fraction_static": fraction_}
    config = make_config({**values, "chat_template": Path(template) if template else None})
    assert decode(encode(Held(config)), Held).config == config
    assert decode(encode(Held(config._replace(extras={"a": 1}))), Held).config.extras == {"a": 1}


def test_infinity_reaches_the_engine() -> None:
    """As in `time_step_limit` of published configurations with state-space layers."""
    config = make_config({})._replace(extras={"limit": [0.0, float("inf")]})
    assert decode(encode(Held(config)), Held).config.extras == {"limit": [0.0, float("inf")]}
    with pytest.raises(msgspec.ValidationError, match="not JSON"):
        decode(b"{", Held)
