"""`srv contract`: the recorded versions, and what the author of a plugin reads to port it from one to another."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from srv.cli.contract import difference
from srv.cli.main import main
from srv.platform import API_VERSION, OLDEST_API
from srv.platform.recorded import Field, Interface, read, recorded_versions

PRESENT, OLDEST = (f"{major}.{minor}" for major, minor in (API_VERSION, OLDEST_API))
ACCEPTED = PRESENT if PRESENT == OLDEST else f"{OLDEST} to {PRESENT}"


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["contract", *words]) == 0
    return capsys.readouterr().out


def changed(version: str, oldest: str) -> tuple[Interface, Interface]:
    """The present contract, and a next one: a member is optional, a class is gone, and another has other fields."""
    present = read(PRESENT)
    backend, classes = present.classes["BackendSpec"], dict(present.classes)
    fields = tuple(field for field in backend.fields if field.name != "lengths")
    classes["BackendSpec"] = msgspec.structs.replace(backend, fields=(*fields, Field("late", "int", "0")))
    del classes["Communicator"]
    header = msgspec.structs.replace(present.header, version=version, oldest=oldest)
    optional = {**present.optional, "diagnose": "doctor"}
    return present, msgspec.structs.replace(present, header=header, classes=classes, optional=optional)


def test_versions_names_the_present_one(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "versions").splitlines()
    noted = {line.split(maxsplit=1)[0]: line for line in lines if line}
    assert noted[PRESENT].split(maxsplit=1)[1] == "the present version, not published"
    assert lines[-1] == f"This srv accepts plugins whose Manifest.api is {ACCEPTED}."


def test_diff_shows_what_changed_by_class() -> None:
    text = difference(*changed("9.1", PRESENT))
    head, consequence, *rest = text.splitlines()
    members = len([line for line in rest if line.startswith("    removed")])
    assert head == f"Contract {PRESENT} to 9.1: 1 added, {members} removed, 2 changed"
    assert consequence == (
        f"A plugin of {PRESENT} is accepted if it does not use what was removed or changed."
        " To use what was added, set Manifest.api = (9, 1)."
    )
    spec = text[text.index("\n  BackendSpec\n") :]
    assert spec.splitlines()[2:4] == ["    removed  lengths: str = 'host'", "    added    late: int = 0"]
    assert "\n  Communicator\n    removed  protocol in srv.platform.interface\n" in text
    assert (
        text.index("What a plugin implements") < text.index("Communicator") < text.index("What it is given, constructs")
    )


def test_diff_says_that_an_older_plugin_is_refused_and_what_became_optional() -> None:
    old, new = changed("9.1", "9.0")
    text = difference(old, new)
    assert f"A plugin of {PRESENT} is refused: make these changes, and set Manifest.api = (9, 1)." in text
    member = "diagnose() -> list[Check]"
    optional = f"{member} (needed only with the capability doctor)"
    assert f"    changed  {member}\n          to {optional}\n" in text
    markdown = difference(old, new, "markdown")
    assert markdown.startswith(f"# Contract {PRESENT} to 9.1\n")
    assert "\n### Platform\n" in markdown
    assert f"\n- changed `{member}` to `{optional}`" in markdown


def test_diff_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(difference(*changed("9.1", "9.0"), "json"))
    assert (answer["old"], answer["new"], answer["accepted"]) == (PRESENT, "9.1", False)
    row = {"group": "BackendSpec", "kind": "added", "member": "late", "before": "", "after": "late: int = 0"}
    assert row in answer["changes"]
    same = json.loads(output(capsys, "diff", PRESENT, PRESENT, "--json"))
    assert same == {"old": PRESENT, "new": PRESENT, "accepted": True, "changes": []}


def test_a_version_does_not_differ_from_itself_and_differs_backwards(capsys: pytest.CaptureFixture[str]) -> None:
    same = f"Contract {PRESENT} to {PRESENT}: no difference\n"
    assert output(capsys, "diff", PRESENT, PRESENT) == same
    assert output(capsys, "diff", PRESENT, PRESENT, "--markdown").startswith("# Contract")
    backwards = difference(*reversed(changed("9.1", "9.0")))
    assert "    removed  late: int = 0" in backwards
    assert "A plugin of" not in backwards


def test_an_unknown_version_is_refused_with_those_that_are_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contract", "diff", "1.0", "newest"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("srv: 2 refusals:")
    assert "srv contract diff OLD = 1.0 (set by command line)" in error
    assert "srv contract diff NEW = newest (set by command line)" in error
    assert f"Recorded versions: {', '.join(recorded_versions())}." in error


def test_without_a_verb_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys)
    assert "versions" in text
    assert "diff" in text


def test_contract_imports_no_torch() -> None:
    code = "import sys; from srv.cli.main import main; main(['contract', 'diff', '2.0', '2.0'])"
    code += "; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "False"
