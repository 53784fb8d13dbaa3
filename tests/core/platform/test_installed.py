"""`srv.platform.installed` reads the same entry points as `importlib.metadata`, from the same files."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from every import every

import srv
from srv.errors import PluginError
from srv.platform.installed import Entry, entries
from srv.platform.registry import load

GROUP = "srv.platforms"
MARKED = 'srv[trace] >= 0.1; python_version > "3"'


def from_metadata(group: str) -> set[Entry]:
    """The entry points of a group by importlib.metadata, without what they require."""
    return {
        Entry(entry_point.group, entry_point.name, entry_point.value, entry_point.dist.name, entry_point.dist.version)
        for entry_point in importlib.metadata.entry_points(group=group)
        if entry_point.dist is not None
    }


def distribution(folder: Path, name: str, lines: Iterable[str], version: str = "1.0", kind: str = "dist") -> Path:
    info = folder / f"{name.replace('-', '_')}-{version}.{kind}-info"
    info.mkdir(parents=True)
    header = "METADATA" if kind == "dist" else "PKG-INFO"
    (info / header).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not this one\n")
    (info / "entry_points.txt").write_text("\n".join((f"[{GROUP}]", *lines)))
    return info


@every("group", [GROUP, "srv.commands", "srv.backends.attention"])
def test_entry_points_are_those_of_importlib(group: str) -> None:
    assert {entry._replace(requires="") for entry in entries(group)} == from_metadata(group)
    assert len(entries(group)) == len(from_metadata(group))


def test_every_form_of_a_line_and_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("# a comment", "", "one = a.b:C", "  two=a.b", "three = a:B.c [extra,more]", "[other]", "four = d:E")
    distribution(tmp_path, "My-Plugin", lines)
    distribution(tmp_path, "older-kind", ("five = f:G",), kind="egg")
    monkeypatch.syspath_prepend(str(tmp_path))
    here = {entry for entry in entries(GROUP) if entry.distribution in ("My-Plugin", "older-kind")}
    assert {(entry.name, entry.value) for entry in here} == {
        ("one", "a.b:C"),
        ("two", "a.b"),
        ("three", "a:B.c"),
        ("five", "f:G"),
    }
    assert {(entry.distribution, entry.version, entry.module) for entry in here if entry.name in ("one", "five")} == {
        ("My-Plugin", "1.0", "a.b"),
        ("older-kind", "1.0", "f"),
    }
    assert {entry._replace(value="") for entry in here} == {
        entry._replace(value="") for entry in from_metadata(GROUP) if entry.distribution in ("My-Plugin", "older-kind")
    }


def test_first_distribution_of_a_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path / "later", "my.plugin", ("old = a:B",), "1.0")
    distribution(tmp_path / "first", "my-plugin", ("new = a:B",), "2.0")
    for folder in ("later", "first"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert [(entry.name, entry.version) for entry in entries(GROUP) if entry.value == "a:B"] == [("new", "2.0")]


def test_damaged_files_and_missing_folders_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(entries(GROUP))
    info = distribution(tmp_path, "damaged", ())
    (info / "entry_points.txt").write_bytes(b"[srv.platforms]\nbad = \xff\xfe:X\n")
    without = distribution(tmp_path, "no-header", ("alone = a:B",))
    (without / "METADATA").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "nowhere"))
    assert set(entries(GROUP)) - before == {Entry(GROUP, "alone", "a:B", "no_header", "")}


def test_an_archive_on_the_path_is_left_to_importlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "in-archive", ("zipped = a:B",))
    with zipfile.ZipFile(tmp_path / "plugins.zip", "w") as archive:
        for file in sorted(tmp_path.rglob("*.*-info/*")):
            archive.write(file, file.relative_to(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "plugins.zip")])
    assert [(entry.name, entry.distribution) for entry in entries(GROUP) if entry.value == "a:B"] == [
        ("zipped", "in-archive")
    ]


def test_entry_loads_the_object_that_it_names() -> None:
    entry = Entry(GROUP, "x", "pathlib:Path", "d", "1")
    assert entry.load() is Path
    assert entry.module == "pathlib"


@every(
    ("lines", "requires"),
    [
        ((), ""),
        (("srv>=9",), "srv>=9"),
        (("srv (>=0.1,<0.2)",), "srv (>=0.1,<0.2)"),
        (("srv-kernels>=9", "srvx>=9", "srv.more>=9", "srv"), "srv"),
        (('srv[cuda]>=9; extra == "gpu"', MARKED), MARKED),
    ],
)
def test_what_a_distribution_requires_of_srv(lines: tuple[str, ...], requires: str, tmp_path: Path) -> None:
    """Read from folders, and by importlib.metadata if the path has an archive."""
    info = distribution(tmp_path, "needy", ("needy = a:B",))
    header = "".join(f"Requires-Dist: {line}\n" for line in lines)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: needy\nVersion: 1.0\n{header}\nRequires-Dist: srv>=8\n"
    )
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w"):
        pass
    for more in ((), (str(archive),)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [str(tmp_path), *sys.path, *more])
            assert [entry.requires for entry in entries(GROUP) if entry.name == "needy"] == [requires]


@every("requires", ["srv>=9", "srv<0.1", 'srv==3; python_version > "3"'])
def test_a_distribution_for_another_srv_is_not_loaded(requires: str) -> None:
    entry = Entry("srv.hooks", "needy", "json:loads", "needy", "1.0", requires)
    with pytest.raises(PluginError, match=r"needy 1\.0 requires srv.*, but this is srv") as raised:
        load(entry)
    assert raised.value.code == "version"


@every("requires", ["", "srv", f"srv=={srv.__version__}", 'srv>=9; python_version < "3"', "srv ?? 1"])
def test_a_distribution_for_this_srv_is_loaded(requires: str) -> None:
    assert load(Entry("srv.hooks", "needy", "json:loads", "needy", "1.0", requires)) is json.loads
