"""`make test-faults-drawn` draws faults that change behaviour, and counts as caught only what the fault causes."""

from __future__ import annotations

import ast
import importlib
import random
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from every import every

FOLDER = Path(__file__).resolve().parents[1] / "faults"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("drawn")


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("mutations")


@every(
    ("source", "changed"),
    [
        ("x = a < b", {("change a comparison", "x = (a <= b)")}),
        ("x = a in b", {("change a comparison", "x = (a not in b)")}),
        ("x = y[1]", {("one more", "x = y[2]")}),
        ("if a: b", {("negate a condition", "if (not (a)): b")}),
        ("x = [a for a in b if a.c]", {("negate a condition", "x = [a for a in b if (not (a.c))]")}),
        ("while not a: b", {("drop `not`", "while (a): b")}),
        ("x = a and b.c", {("swap and/or", "x = (a or b.c)")}),
        ("a.append(b)", {("drop a call", "pass")}),
        ("x = f(a, b, 'c', *d)", {("swap two arguments", "x = f(b, a, 'c', *d)")}),
        ("x = f(a, a, a.b, 'c')", set()),
        (
            "def f() -> bool:\n    '''Doc.'''\n    x = a\n    return x",
            {("return early", "    return False\n    x = a")},
        ),
        ("def f() -> list[int]:\n    x = a\n    return x", {("return early", "    return []\n    x = a")}),
        ("def f() -> None:\n    x = a\n    g = x", {("return early", "    return\n    x = a")}),
        ("ä = 'ü'; x = a < b", {("change a comparison", "ä = 'ü'; x = (a <= b)")}),
    ],
)
def test_each_kind_of_fault_changes_one_place(
    mutations: ModuleType, source: str, changed: set[tuple[str, str]]
) -> None:
    assert {(mutation.kind, mutation.after) for mutation in mutations.mutations(source)} == changed


def test_a_comment_is_put_where_the_fault_would_be(mutations: ModuleType) -> None:
    """At the end, if it would be within a string."""
    comment = "# Nothing is planted here.\n"
    assert mutations.commented("def f():\n    return 1\n", 2) == f"def f():\n{comment}    return 1\n"
    text = 'x = """\n""" if a < b else c\n'
    assert mutations.commented(text, 2) == text + comment


def test_what_is_said_or_never_run_is_left_alone(mutations: ModuleType) -> None:
    source = textwrap.dedent('''
        """A module with 1 docstring."""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            x = 1
        limit: Annotated[int, 3]
        large = 4096
        yes = True
        text = f"{a < b} of {2}"
        assert a < 1, 2
        logger.info("one", 1, 2)
        self.logger.warning(a, b)
        tl.static_assert(a == b)
        @decorated(1)
        def f(x: Literal[1]) -> Literal[2]:
            raise ValueError(a, b, 1)
        class C:
            def __repr__(self) -> str:
                return f"{self.a}" if a else str(1)
        if __name__ == "__main__":
            main(1)
    ''')
    assert mutations.mutations(source) == []


def test_a_seed_draws_the_same_faults_and_each_is_valid_python(drawn: ModuleType, mutations: ModuleType) -> None:
    module = FOLDER / "plant.py"
    source = module.read_text(encoding="utf-8")
    faults = [mutations.draw(source, random.Random(seed)) for seed in (1, 1, *range(2, 12))]
    assert faults[0] == faults[1]
    assert len({(fault.kind, fault.line) for fault in faults}) > 5
    assert all(ast.dump(ast.parse(fault.source)) != ast.dump(ast.parse(source)) for fault in faults)
    few, more = ([fault.identity for fault in drawn.draw_modules(7, count)] for count in (2, 3))
    assert more[:2] == few
    assert len({module for module, *_ in more}) == 3


def test_only_what_the_fault_causes_counts_as_caught(drawn: ModuleType, tmp_path: Path) -> None:
    """A file of tests is a set of what makes it fail: the fault, a failure that is always there, or any change."""
    module, planted = "code.py", "b = 1\n"

    class Copy(drawn.Copy):  # type: ignore[misc, name-defined]
        def pytest(self, tests: Sequence[str], *options: str, limit_s: float, tier: str, **_: str) -> object:
            source = (tmp_path / module).read_text(encoding="utf-8")
            if limit_s <= 0:
                return drawn.Run(None, (), False, "", 1.0)
            for file in tests:
                found_by, *causes = files[file.removesuffix("::test")]
                broken = "always" in causes or ("fault" in causes and source == planted)
                if broken or ("text" in causes and source != "a = 1\n"):
                    deselected = f"--deselect={file}::test" in options
                    if found_by == tier and not deselected:
                        return drawn.Run(1, (f"{file.removesuffix('::test')}::test",), False, "", 1.0)
            return drawn.Run(0, (), False, "", 1.0)

    (tmp_path / module).write_text("a = 1\n", encoding="utf-8")
    fault = drawn.Drawn(module, drawn.Mutation("kind", 1, "a = 1", "b = 1", planted))
    cases = [
        ({"x.py": ("fast",), "y.py": ("fast", "fault")}, 9.0, ("caught", "y.py::test", "fast")),
        ({"x.py": ("fast", "always"), "y.py": ("slow", "fault")}, 9.0, ("caught", "y.py::test", "slow")),
        ({"x.py": ("fast", "text"), "y.py": ("proof", "fault")}, 9.0, ("caught", "y.py::test", "proof")),
        ({"x.py": ("fast", "always"), "y.py": ("fast", "text")}, 9.0, ("ESCAPED", "", "")),
        ({"x.py": ("fast", "fault")}, -1.0, ("TIME UP", "", "fast")),
    ]
    for files, limit_s, expected in cases:
        outcome = drawn.Hunt(Copy(tmp_path)).hunt(7, fault, list(files), limit_s)
        assert (outcome.verdict, outcome.test, outcome.tier) == expected, files
        assert (tmp_path / module).read_text(encoding="utf-8") == "a = 1\n"


def test_a_later_run_tries_only_what_was_not_caught(drawn: ModuleType, tmp_path: Path) -> None:
    record = tmp_path / "7.jsonl"
    assert drawn.recorded(record) == {}
    line = '{"seed": 7, "module": "%s", "line": 1, "kind": "k", "before": "b", "after": "a", "verdict": "%s", '
    line += '"test": "t", "tier": "fast", "seconds": 1}\n'
    record.write_text(line % ("x.py", "caught") + line % ("y.py", "ESCAPED"), encoding="utf-8")
    assert list(drawn.recorded(record)) == [("x.py", 1, "b", "a")]
