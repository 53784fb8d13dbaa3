"""The class of planted faults, and their tables: all other modules of this folder that are no tools."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
_NO_TABLES = ("fault", "plant", "drawn", "mutations", "test_planted")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake that a change to the code could make.

    `text` must occur exactly once in `file` and is replaced with `planted`. `effect`: what a user would see.
    `tests`: the test files or node ids that are run, at least one of which must fail; name the cheapest that suffice.
    `hangs`: a run that does not end counts as caught.
    """

    name: str
    file: str
    text: str
    planted: str
    effect: str
    tests: tuple[str, ...]
    hangs: bool = False

    @property
    def is_native(self) -> bool:
        """Whether the native library must be compiled before the fault can be seen."""
        return Path(self.file).suffix in (".cpp", ".h")

    @property
    def folder(self) -> str:
        """The folder of its tests: "tests", or that of a plugin, which claims a device for the whole process."""
        return "tests" if self.tests[0].startswith("tests/") else self.tests[0].rpartition("/")[0]

    def plant(self, root: Path) -> None:
        """Write the fault into the tree at `root`. Raises ValueError, with the reason, if it is stale."""
        path = root / self.file
        path.write_text(self._planted_source(path), encoding="utf-8")

    def stale(self, root: Path = ROOT) -> str | None:
        """Why the fault no longer fits the tree at `root`; None if it does."""
        try:
            source = self._planted_source(root / self.file)
        except ValueError as error:
            return str(error)
        if self.file.endswith(".py"):
            try:
                compile(source, self.file, "exec", dont_inherit=True)
            except SyntaxError as error:
                return f"the planted text is not valid Python: {error}"
        for test in self.tests:
            file, _, name = test.partition("::")
            path = root / file
            if not path.is_file():
                return f"{file} does not exist"
            function = name.partition("[")[0].rpartition("::")[2]
            if function and f"def {function}(" not in path.read_text(encoding="utf-8"):
                return f"{file} has no {function}"
        return None

    def _planted_source(self, path: Path) -> str:
        if not path.is_file():
            raise ValueError(f"{self.file} does not exist")
        source = path.read_text(encoding="utf-8")
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"its text occurs {count} times in {self.file}, not once")
        if self.planted == self.text:
            raise ValueError("the planted text changes nothing")
        return source.replace(self.text, self.planted)


def areas() -> dict[str, tuple[Fault, ...]]:
    """The faults of each area, which is the name of the module that lists them."""
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in _NO_TABLES)
    return {name: importlib.import_module(name).FAULTS for name in names}


def duplicate_names(faults: list[Fault]) -> Iterator[str]:
    seen: set[str] = set()
    for fault in faults:
        if fault.name in seen:
            yield fault.name
        seen.add(fault.name)
