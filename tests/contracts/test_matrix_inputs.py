"""Files and folders given to `srv matrix` that are not what they should be: it says so, and gives no traceback."""

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
def test_a_fresh_run_that_is_no_evidence_is_refused(
    tmp_path: Path, make: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fresh.jsonl"
    make(path)  # type: ignore[operator]
    with pytest.raises(MatrixError, match=r"fresh\.jsonl cannot be read: .*Name a file that `pytest -m covers"):
        read_file(path)
    assert main(["matrix", "check", "--root", str(ROOT), "--rerun", str(path)]) == FAILED
    printed = capsys.readouterr().err
    assert "fresh.jsonl cannot be read" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"x\n1\n", r"has no column group, argument, aliases, default, options, a2, a3\. Its first line must name"),
        (b"x\n", r"has no column group"),
        (b"", r"has no column group"),
        (HEAD.replace(",aliases", "").encode() + b"\n", r"has no column aliases\."),
        (HEAD.encode() + b"\n", r"names its columns and has no row"),
        (HEAD.encode() + b"\n" + BINARY, r"cannot be read as a table: .*must be CSV in UTF-8"),
        (HEAD.encode() + b"\nOne,--port,,1\n", r"line 2: it has more or fewer cells"),
        (HEAD.encode() + b"\nOne,--port,,1,Type: int,yes,no,yes\n", r"line 2: it has more or fewer cells"),
        (HEAD.encode() + b"\nOne,--port,,1,Type: int,yes,maybe\n", r"line 2: --port has 'maybe'"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "ascend.csv"
    path.write_bytes(content)
    with pytest.raises(MatrixError, match=told):
        read_rows(path, VARIANTS)


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        (b'[[reason]]\nclass = "AGREE"\n', r"reasons\.toml: a reason has no 'arguments'\. Each has"),
        (BINARY, r"reasons\.toml cannot be read"),
    ],
)
def test_reasons_that_are_none_are_refused(tmp_path: Path, reasons: bytes, told: str) -> None:
    (tmp_path / "index.toml").write_text(
        '[[table]]\nname = "ascend"\nfile = "ascend.csv"\nreasons = "reasons.toml"\nplatform = "npu"\ntitle = "t"\n'
        'variants = { a2 = "a2", a3 = "a3" }\n'
    )
    (tmp_path / "ascend.csv").write_text(f"{HEAD}\nOne,--port,,1,Type: int,yes,no\n")
    (tmp_path / "reasons.toml").write_bytes(reasons)
    with pytest.raises(MatrixError, match=told):
        read_tables(tmp_path)


def test_a_table_from_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """Some write a mark of the encoding before the first column's name."""
    path = tmp_path / "ascend.csv"
    path.write_text(f"\ufeff{HEAD}\nOne,--port,--p,1,Type: int,yes,no\n", encoding="utf-8")
    (row,) = read_rows(path, VARIANTS)
    assert (row.section, row.flag, row.aliases, row.says) == ("One", "--port", ("--p",), {"a2": True, "a3": False})


def test_diff_tells_of_a_wrong_table_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ascend.csv"
    for content, told in ((b"x\n", "has no column"), (None, "cannot be read as a table")):  # None: there is no file
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        assert main(["matrix", "diff", "--root", str(ROOT), "--against", str(path)]) == FAILED
        printed = capsys.readouterr().err
        assert told in printed
        assert "Traceback" not in printed
    assert main(["matrix", "diff", "--root", str(ROOT), "--against", str(tmp_path / "mars.csv")]) == FAILED
    assert (
        "there is no table mars. Name a file after one of published/index.toml: ascend.csv" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words", [("show", "--device", "npu:a3"), ("coverage",), ("check",), ("prune",), ("generate",), ("diff",)]
)
def test_a_root_that_is_no_checkout_is_refused(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for root in (tmp_path, tmp_path / "nope"):
        assert main(["matrix", *words, "--root", str(root)]) == FAILED
        assert f"{root} lies in no checkout of srv" in capsys.readouterr().err
