"""Every refusal code in the source has an entry on the troubleshooting page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from docs_site import DOCS, ROOT
from refusal_codes import codes_in

from srv_matrix.guides.refusals import read_refusals

FOLDERS = ("core", "platforms", "support_matrix")


def test_every_code_has_an_entry() -> None:
    entries = {code for group in read_refusals(DOCS / "guides" / "refusals.toml") for code in group.codes}
    by_code = codes_in([ROOT / folder for folder in FOLDERS])
    missing = {code: sorted(os.path.relpath(file, ROOT) for file in by_code[code]) for code in by_code.keys() - entries}
    assert missing == {}, "write entries in docs/guides/refusals.toml"
    assert len(by_code) > 150


def test_entries_are_sentences_and_no_code_has_two() -> None:
    groups = read_refusals(DOCS / "guides" / "refusals.toml")
    codes = [code for group in groups for code in group.codes]
    assert len(codes) == len(set(codes))
    faults = [
        code
        for group in groups
        for code, entry in group.codes.items()
        if not (entry.means.endswith(".") and entry.do.endswith("."))
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("source", "codes"),
    [
        ("def refuse(code, text): ...\nrefuse('one_code', 'text')", {"one_code"}),
        ("raise Error('text', code='by_name')", {"by_name"}),
        ("class Error:\n    code: str = 'by_default'\nError('by_place')", {"by_default", "by_place"}),
        ("code = 'this' if test else 'that'", {"this", "that"}),
        ("CODE = 'constant'\ndef refuse(code): ...\nrefuse(CODE)", {"constant"}),
        ("def limit() -> tuple[str, str]:\n    return 'some text', 'second_place'", {"second_place"}),
        ("code, text = error or ('in_a_pair', 'text')", {"in_a_pair"}),
        ("print('Free memory. [in_text]')", {"in_text"}),
        ("def refuse(reason): ...\nrefuse('no_code')", set()),
    ],
)
def test_codes_are_found_wherever_they_are_written(tmp_path: Path, source: str, codes: set[str]) -> None:
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    assert codes_in([tmp_path]).keys() == codes
