"""Invalid files and folders passed to `srv matrix` are refused with an error message and without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from srv.cli.main import main
from srv_matrix.evidence import read_file
from srv_matrix.published import read_rows, read_tables
from srv_matrix.repository import MatrixError

ROOT = Path(__file__).resolve().parents[2]
HEAD = "group,argument,aliases,default,options,a2,a3"
VARIANTS = {"a2": "a2", "a3": "a3"}
BINARY = b"\x80\x81\xff\x00"
FAILED = 2


def missing(path: Path) -> None:
    assert not path.exists()


@pytest.mark.parametrize(
    "make", [missing, Path.mkdir, lambda path: path.write_bytes(BINARY)], ids=("missing", "folder", "binary")
)
def test_invalid_evidence_of_a_new_run_is_refused(
    tmp_path: Path, make: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fresh.jsonl"
    make(path)  # type: ignore[operator]
    with pytest.raises(MatrixError, match=r"fresh\.jsonl cannot be read: .*Pass a file that `pytest -m covers"):
        read_file(path)
    assert main(["matrix", "check", "--root", str(ROOT), "--rerun", str(path)]) == FAILED
    printed = capsys.readouterr().err
    assert "fresh.jsonl cannot be read" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x\n1\n", r"lacks columns: group, argument, aliases, default, options, a2, a3\. Its first line must list"),
        (b"x\n", r"lacks columns: group"),
        (b"", r"lacks columns: group"),
        (HEAD.replace(",aliases", "").encode() + b"\n", r"lacks columns: aliases\."),
        (HEAD.encode() + b"\n", r"has no rows below its header"),
        (HEAD.encode() + b"\n" + BINARY, r"cannot be read as a table: .*must be CSV in UTF-8"),
        (HEAD.encode() + b"\nOne,--port,,1\n", r"line 2: the row has more or fewer cells"),
        (HEAD.encode() + b"\nOne,--port,,1,Type: int,yes,no,yes\n", r"line 2: the row has more or fewer cells"),
        (HEAD.encode() + b"\nOne,--port,,1,Type: int,yes,maybe\n", r"line 2: --port has 'maybe'"),
    ],
)
def test_invalid_table_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "ascend.csv"
    path.write_bytes(content)
    with pytest.raises(MatrixError, match=message):
        read_rows(path, VARIANTS)


@pytest.mark.parametrize(
    ("reasons", "message"),
    [
        (
            b'[[reason]]\nclass = "AGREE"\n',
            r"reasons\.toml: a reason does not have the key 'arguments'\. Each must have",
        ),
        (BINARY, r"reasons\.toml cannot be read"),
    ],
)
def test_invalid_reasons_are_refused(tmp_path: Path, reasons: bytes, message: str) -> None:
    (tmp_path / "index.toml").write_text(
        '[[table]]\nname = "ascend"\nfile = "ascend.csv"\nreasons = "reasons.toml"\nplatform = "npu"\ntitle = "t"\n'
        'variants = { a2 = "a2", a3 = "a3" }\n'
    )
    (tmp_path / "ascend.csv").write_text(f"{HEAD}\nOne,--port,,1,Type: int,yes,no\n")
    (tmp_path / "reasons.toml").write_bytes(reasons)
    with pytest.raises(MatrixError, match=message):
        read_tables(tmp_path)


def test_a_table_from_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """Some spreadsheets write a byte order mark before the name of the first column."""
    path = tmp_path / "ascend.csv"
    path.write_text(f"\ufeff{HEAD}\nOne,--port,--p,1,Type: int,yes,no\n", encoding="utf-8")
    (row,) = read_rows(path, VARIANTS)
    assert (row.section, row.flag, row.aliases, row.supported) == ("One", "--port", ("--p",), {"a2": True, "a3": False})


def test_diff_refuses_an_invalid_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ascend.csv"
    for content, message in ((b"x\n", "lacks columns"), (None, "cannot be read as a table")):  # None: there is no file
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        assert main(["matrix", "diff", "--root", str(ROOT), "--against", str(path)]) == FAILED
        printed = capsys.readouterr().err
        assert message in printed
        assert "Traceback" not in printed
    assert main(["matrix", "diff", "--root", str(ROOT), "--against", str(tmp_path / "mars.csv")]) == FAILED
    assert (
        "there is no table mars. Name the file after a table in published/index.toml: ascend.csv"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words", [("show", "--device", "npu:a3"), ("coverage",), ("check",), ("prune",), ("generate",), ("diff",)]
)
def test_root_outside_a_checkout_is_refused(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for root in (tmp_path, tmp_path / "nope"):
        assert main(["matrix", *words, "--root", str(root)]) == FAILED
        assert f"{root} is not in a checkout of srv" in capsys.readouterr().err
