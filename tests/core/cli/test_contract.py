"""`srv contract`: the recorded versions, and what the author of a plugin reads to port it from one to another."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from srv.cli.main import main
from srv.platform import API_VERSION

PRESENT = f"{API_VERSION[0]}.{API_VERSION[1]}"


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["contract", *words]) == 0
    return capsys.readouterr().out


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each class (or what else has members), without their indentation by part."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("    "):
            found[name].append(line.removeprefix("  "))
        elif line.startswith("  "):
            name = line.strip()
            found[name] = []
    return found


def test_versions_names_the_present_one_and_those_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "versions").splitlines()
    noted = {line.split(maxsplit=1)[0]: line for line in lines if line}
    assert "no longer accepted" in noted["1.2"]
    assert "no longer accepted" in noted["1.3"]
    assert "the present version" in noted[PRESENT]
    assert "no longer accepted" not in noted[PRESENT]
    assert lines[-1] == f"This srv accepts plugins whose Manifest.api is {PRESENT}."


def test_diff_shows_what_was_added_since_contract_1_2(capsys: pytest.CaptureFixture[str]) -> None:
    """These are the additions of contract 1.3, and what changed without a version of its own (in srv.specs)."""
    text = output(capsys, "diff", "1.2", "1.3")
    found = sections(text)
    assert found["AttentionBatch"] == ["  added    lengths: torch.Tensor | None = None"]
    assert found["BackendSpec"] == ["  added    lengths: str = 'host'"]
    assert found["EngineContext"] == ["  added    local_ranks: int = 1"]
    assert found["Platform"] == ["  added    communicator(group: RankGroup) -> Communicator"]
    assert found["Communicator"][0] == "  added    protocol in srv.platform.interface"
    assert "  added    all_reduce(tensor: torch.Tensor) -> torch.Tensor" in found["Communicator"]
    assert found["constant CAPABILITIES"] == ["  added    communicator"]
    assert found["entry-point groups"] == ["  added    srv.architectures", "  added    srv.quantization"]
    assert found["KVLayout"] == ["  changed  group: CacheGroup", "        to group: CacheSpec"]
    assert "  removed  int8_params: int = 0" in found["ModelFacts"]
    assert "Graphs" not in found  # since 1.1
    assert "GreedySampling" not in found  # since 1.2
    assert text.splitlines()[:2] == [
        "Contract 1.2 to 1.3: 41 added, 8 removed, 3 changed",
        "A plugin of 1.2 is accepted if it does not use what was removed or changed."
        " To use what was added, set Manifest.api = (1, 3).",
    ]


def test_diff_to_2_0_says_that_an_older_plugin_is_refused_and_what_became_optional(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = output(capsys, "diff", "1.3", "2.0")
    assert "A plugin of 1.3 is refused: make these changes, and set Manifest.api = (2, 0)." in text
    member = "communicator(group: RankGroup) -> Communicator"
    optional = f"{member} (needed only with the capability communicator)"
    assert f"    changed  {member}\n          to {optional}\n" in text
    assert text.index("What a plugin implements") < text.index(member) < text.index("What it is given, constructs")
    markdown = output(capsys, "diff", "1.3", "2.0", "--markdown")
    assert markdown.startswith("# Contract 1.3 to 2.0\n")
    assert "\n### Platform\n" in markdown
    assert f"\n- changed `{member}` to `{optional}`\n" in markdown


def test_diff_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer: dict[str, Any] = json.loads(output(capsys, "diff", "1.2", "2.0", "--json"))
    assert (answer["old"], answer["new"], answer["accepted"]) == ("1.2", "2.0", False)
    assert {
        "group": "BackendSpec",
        "kind": "added",
        "member": "lengths",
        "before": "",
        "after": "lengths: str = 'host'",
    } in answer["changes"]
    assert json.loads(output(capsys, "diff", "1.2", "1.3", "--json"))["accepted"]


def test_a_version_does_not_differ_from_itself_and_differs_backwards(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "diff", "1.3", "1.3") == "Contract 1.3 to 1.3: no difference\n"
    backwards = sections(output(capsys, "diff", "1.3", "1.2"))
    assert backwards["BackendSpec"] == ["  removed  lengths: str = 'host'"]
    assert not any("A plugin of" in line for lines in backwards.values() for line in lines)


def test_an_unknown_version_is_refused_with_those_that_are_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contract", "diff", "1.0", "newest"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("srv: 2 refusals:")
    assert "srv contract diff OLD = 1.0 (set by command line)" in error
    assert "srv contract diff NEW = newest (set by command line)" in error
    assert f"Recorded versions: 1.2, 1.3, {PRESENT}." in error


def test_without_a_verb_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys)
    assert "versions" in text
    assert "diff" in text


def test_contract_imports_no_torch() -> None:
    code = "import sys; from srv.cli.main import main; main(['contract', 'diff', '1.2', '1.3'])"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
