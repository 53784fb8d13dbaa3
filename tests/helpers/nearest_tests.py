"""Which test files are nearest to a change: ranks them by imports.

Owns the graph of what the files of a tree import, tests included, and the order of test files for changed files. It
runs no test, and knows nothing of how a change came about: `make check` asks for uncommitted files,
tests/faults/drawn.py for a file with a planted fault.

An edge is an import, wherever it stands, or a string such as "srv_npu.manifest:MANIFEST" that names a module. A test
that reaches code only through a server's command line has no such edge: tests in the folders that CONTRIBUTING.md lists
for the changed code count as near too.
"""

from __future__ import annotations

import ast
import heapq
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grimp

MIRRORED = 3  # the distance of a test that CONTRIBUTING.md lists for the changed code, if no import leads there
_ROW = re.compile(r"^\| `([^`]+)` \| (`.+) \|$", re.MULTILINE)
_QUOTED_MODULE = re.compile(r"""["'](\w+(?:\.\w+)+)[:"']""")
_NAMED_MODULE = re.compile(r"\b[a-z_]\w*(?:\.\w+)+")


@dataclass(frozen=True)
class Nearest:
    """A test file and its distance: 0 if it has changed itself, 1 if it imports what has changed."""

    file: str
    distance: int


class ImportGraph:
    """What each Python file of a tree imports. Files are paths relative to the root, with slashes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
        self._modules = dict(_modules(root, settings))
        self._sources = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted((root / "tests").rglob("*.py"))
        }
        helpers = [Path(folder) for folder in settings["pytest"]["ini_options"]["pythonpath"]]
        names = {Path(file).stem: file for file in self._sources if Path(file).parent in helpers}
        self._by_name = names | {name: file for file, name in self._modules.items()}
        self._importers: dict[str, set[str]] = {}
        for file, imported in [*self._imports_of_packages(settings), *self._imports_of_tests()]:
            self._importers.setdefault(imported, set()).add(file)
        table = _ROW.findall((root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
        self._mirrors = {code: tuple(re.findall(r"`([^`]+)`", tests)) for code, tests in table}

    def nearest(self, changed: Iterable[str]) -> list[Nearest]:
        """The test files whose imports reach a changed file, or that are listed for it; the nearest come first.

        Among those of one distance, files whose paths have more words in common with the changed file come first.
        """
        best: dict[str, tuple[int, int]] = {}
        for file in changed:
            distances = self._distances(self._seeds(file))
            mirrors = self._mirror(file)
            for test in self.test_files():
                distance = distances.get(test)
                if test.startswith(mirrors):
                    distance = _mirrored(distance)
                if distance is not None:
                    rank = (distance, -len(_words(test) & _words(file)))
                    best[test] = min(best.get(test, rank), rank)
        return [Nearest(test, rank[0]) for test, rank in sorted(best.items(), key=lambda item: (item[1], item[0]))]

    def test_files(self) -> list[str]:
        return [file for file in self._sources if Path(file).name.startswith("test_")]

    def _seeds(self, file: str) -> dict[str, int]:
        """The file itself, and, unless it is a module of a package, the tests and helpers that mention it."""
        seeds = {file: 0}
        if file in self._modules:
            return seeds
        path = Path(file)
        mentions = [(file, 1), (path.name, 2), *((path.parent.as_posix(), 3) for _ in path.parent.parts[1:2])]
        for source_file, source in self._sources.items():
            distance = next((distance for text, distance in mentions if text in source), None)
            if distance is not None:
                seeds.setdefault(source_file, distance)
        return seeds

    def _distances(self, seeds: Mapping[str, int]) -> dict[str, int]:
        """How many imports lead from each file to a seed, whose own distance is added."""
        distances: dict[str, int] = {}
        heap = [(distance, file) for file, distance in seeds.items()]
        heapq.heapify(heap)
        while heap:
            distance, file = heapq.heappop(heap)
            if file not in distances:
                distances[file] = distance
                for importer in self._importers.get(file, ()):
                    heapq.heappush(heap, (distance + 1, importer))
        return distances

    def _mirror(self, file: str) -> tuple[str, ...]:
        """The folders and files that CONTRIBUTING.md lists for the package of this file."""
        codes = [code for code in self._mirrors if file == code or file.startswith(f"{code}/")]
        return self._mirrors[max(codes, key=len)] if codes else ()

    def _imports_of_packages(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        packages = dict.fromkeys(name.partition(".")[0] for name in self._modules.values())
        cache = str(self.root / "build" / "import_graph")
        graph = grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=cache)
        for file, name in self._modules.items():
            parent = self._by_name.get(name.rpartition(".")[0])
            modules = {self._by_name[module] for module in graph.find_modules_directly_imported_by(name)}
            text = (self.root / file).read_text(encoding="utf-8")
            modules.update(self._resolved(_QUOTED_MODULE.findall(text)))
            yield from ((file, imported) for imported in modules | ({parent} if parent else set()))

    def _imports_of_tests(self) -> Iterator[tuple[str, str]]:
        for file, source in self._sources.items():
            for imported in self._resolved(_names(ast.parse(source))):
                yield file, imported
            for folder in Path(file).parents:
                if (conftest := (folder / "conftest.py").as_posix()) in self._sources and conftest != file:
                    yield file, conftest

    def _resolved(self, names: Iterable[str]) -> Iterator[str]:
        """The files of the modules that are named; of a name within a module, the module's."""
        for name in names:
            while name and name not in self._by_name:
                name = name.rpartition(".")[0]
            if name:
                yield self._by_name[name]


def waves(files: Sequence[str]) -> Iterator[Sequence[str]]:
    """The files in their order, a few at first and then twice as many each time: a run of pytest collects all first."""
    begin, size = 0, 8
    while begin < len(files):
        yield files[begin : begin + size]
        begin, size = begin + size, size * 2


def _modules(root: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The file and the name of each module of the packages whose imports are checked, and of the plugins."""
    names = settings["importlinter"]["root_packages"]
    for init in sorted([*root.glob("*/*/__init__.py"), *root.glob("*/*/*/__init__.py")]):
        package = init.parent
        if package.name in names or package.parent.parent == root / "plugins":
            for path in sorted(package.rglob("*.py")):
                parts = path.relative_to(package.parent).with_suffix("").parts
                yield path.relative_to(root).as_posix(), ".".join(parts).removesuffix(".__init__")


def _names(tree: ast.Module) -> Iterator[str]:
    """What a file imports, and the dotted names in its strings."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Constant(value=str(text)):
                yield from _NAMED_MODULE.findall(text)


def _mirrored(distance: int | None) -> int:
    """The distance of a listed test: one import nearer than it is, but not as near as what has changed itself."""
    return MIRRORED if distance is None else max(min(distance, MIRRORED) - 1, min(distance, 1))


def _words(file: str) -> set[str]:
    return set(re.split(r"[/_.\-]", file))
