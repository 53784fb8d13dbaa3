"""The recorded interface of the present contract version is that of the code; records can be read and compared.

While a version is not published, a change of the interface changes its record: `python
tests/core/platform/test_recorded.py` writes it. The record of a published version never changes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import pytest
from every import every

from srv.platform import API_VERSION, OLDEST_API
from srv.platform.recorded import (
    FOLDER,
    Change,
    Class,
    Field,
    Header,
    Interface,
    compare,
    number,
    read,
    recorded_versions,
)
from srv.testing.contract_record import Record, describe, recorded, text

PRESENT = f"{API_VERSION[0]}.{API_VERSION[1]}"
PATH = FOLDER / f"{PRESENT}.json"
MADE = "python tests/core/platform/test_recorded.py"
ADVICE = f"""\
The interface of contract {PRESENT} is not what {PATH.name} records. If {PRESENT} is published, a plugin could rely on
the record: undo the change, or raise API_VERSION and list what is new in SINCE. Otherwise record it again with
    {MADE}
and review `git diff`, and `srv contract diff`, which plugin authors read."""


def present(published: bool = False) -> str:
    return text(recorded(MADE, published))


def write(path: Path = PATH) -> None:
    """Write the record of the present version. Exits with a message if that is published."""
    if path.exists() and msgspec.json.decode(path.read_bytes(), type=Interface).header.published:
        sys.exit(f"{path.name} is published and must not change: raise API_VERSION in srv.platform")
    path.write_text(present(), encoding="utf-8")


def test_the_present_version_is_recorded() -> None:
    published = read(PRESENT).header.published if PRESENT in recorded_versions() else False
    if not PATH.exists() or PATH.read_text(encoding="utf-8") != present(published):
        pytest.fail(ADVICE)


def test_a_published_version_is_not_recorded_again(tmp_path: Path) -> None:
    path = tmp_path / "2.0.json"
    write(path)
    assert path.read_text(encoding="utf-8") == present()
    published = present(published=True)
    path.write_text(published, encoding="utf-8")
    with pytest.raises(SystemExit, match="published and must not change"):
        write(path)
    assert path.read_text(encoding="utf-8") == published


def test_every_record_is_that_of_its_version() -> None:
    assert PRESENT in recorded_versions()
    for version in recorded_versions():
        record = read(version)
        assert record.header.version == version
        assert number(record.header.oldest) <= number(version)
        assert {"Platform", "Manifest", "PlatformFacts", "AttentionBackend", "KVLayout"} <= record.classes.keys()
        assert {"srv.platforms", "srv.backends.attention", "srv.commands"} <= set(record.entry_points)
    assert number(read(PRESENT).header.oldest) == OLDEST_API
    assert {"srv.architectures", "srv.quantization"} <= set(read(PRESENT).entry_points)


def test_versions_are_ordered_by_number() -> None:
    assert sorted(("2.0", "1.10", "1.9"), key=number) == ["1.9", "1.10", "2.0"]


@dataclass(frozen=True)
class Value:
    size: int
    names: tuple[str, ...] = ("a",)
    table: dict[str, int] = field(default_factory=dict)
    late: float = field(default=0.5, kw_only=True)
    _hidden: int = 0


class Asked(Protocol):
    level: int

    @property
    def kind(self) -> str | None: ...
    def __getitem__(self, name: str) -> int: ...
    def act(self, first: int, /, second: object = None, *rest: str, third: bool = False, **more: int) -> None: ...
    def _internal(self) -> None: ...


def decoded(described: Record) -> Class:
    return msgspec.convert(described, Class)


def interface(**classes: type) -> Interface:
    members = {name: decoded(describe(cls)) for name, cls in {"Platform": Asked, **classes}.items()}
    return Interface(Header("7.0", "7.0", False, "here"), members, {}, {}, {}, ())


def test_fields_are_recorded_with_types_and_defaults() -> None:
    assert decoded(describe(Value)).fields == (
        Field("size", "int"),
        Field("names", "tuple[str, ...]", "('a',)"),
        Field("table", "dict[str, int]", "dict()"),
        Field("late", "float", "0.5", keyword_only=True),
    )


@every(
    ("member", "declared"),
    [
        ("class", f"protocol in {__name__}"),
        ("level", "level: int"),
        ("kind", "kind: str | None, a property"),
        ("__getitem__", "__getitem__(name: str) -> int"),
        (
            "act",
            "act(first: int, /, second: object = None, *rest: str, third: bool = False, **more: int) -> None",
        ),
    ],
)
def test_members_of_a_protocol_are_recorded_as_they_are_declared(member: str, declared: str) -> None:
    changes = {change.member: change.after for change in compare(interface(), interface(Asked=Asked))}
    assert changes[member] == declared
    assert "_internal" not in changes


class Before:
    @dataclass
    class Thing:
        first: int
        second: int
        gone: str = ""

    class Acting(Protocol):
        def act(self, level: int) -> None: ...


class After:
    @dataclass
    class Thing:
        new: int
        first: int
        second: float
        last: int = 0

    class Acting(Protocol):
        def act(self, level: int, more: int = 0) -> None: ...
        def stop(self) -> None: ...


def test_a_comparison_names_what_was_added_removed_and_changed() -> None:
    old, new = (interface(Thing=version.Thing, Acting=version.Acting) for version in (Before, After))
    thing = [change for change in compare(old, new) if change.group == "Thing" and change.member != "class"]
    assert thing == [
        Change("Thing", "changed", "second", "second: int", "second: float"),
        Change("Thing", "removed", "gone", "gone: str = ''", ""),
        Change("Thing", "added", "new", "", "new: int"),
        Change("Thing", "added", "last", "", "last: int = 0"),
        Change(
            "Thing",
            "changed",
            "order of fields",
            "order of fields: first, second, gone",
            "order of fields: new, first, second, last",
        ),
    ]
    assert [change for change in compare(old, new) if change.group == "Acting"] == [
        Change("Acting", "changed", "act", "act(level: int) -> None", "act(level: int, more: int = 0) -> None"),
        Change("Acting", "added", "stop", "", "stop() -> None"),
    ]
    assert compare(new, new) == ()


def test_a_comparison_covers_constants_optional_members_and_entry_points() -> None:
    old = interface()
    new = msgspec.structs.replace(
        old,
        aliases={"Both": "One | Two"},
        constants={"LIMIT": "3", "FAMILIES": {"attention": ""}, "OPS_OF": {"w8a8": "('linear',)"}},
        optional={"act": "acting"},
        entry_points=("srv.platforms",),
    )
    assert [(change.group, change.kind, change.after) for change in compare(old, new)] == [
        (
            "Platform",
            "changed",
            "act(first: int, /, second: object = None, *rest: str, third: bool = False, **more: int) -> None"
            " (needed only with the capability acting)",
        ),
        ("constant FAMILIES", "added", "attention"),
        ("constant LIMIT", "added", "LIMIT = 3"),
        ("constant OPS_OF", "added", "w8a8 = ('linear',)"),
        ("entry-point groups", "added", "srv.platforms"),
        ("type aliases", "added", "Both = One | Two"),
    ]


if __name__ == "__main__":
    write()
