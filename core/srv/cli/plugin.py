"""`srv plugin new NAME`: generate the package of a third-party platform, which works without changes.

The template is part of `srv` (`srv/plugin_template`) and is made from a platform that is tested together with it.
Owns the names that are inserted, and their rules. Must not know the contents of the template's files.
`srv plugin docs` prints the pages for authors of plugins, which the wheel contains.
"""

from __future__ import annotations

import argparse
import importlib.resources
import importlib.util
import io
import keyword
import os
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

from srv.errors import Refusal, Rejection
from srv.platform.doctor import run_child
from srv.platform.manifest import AUTOLOAD
from srv.platform.registry import find_platforms

TEMPLATE = "plugin_template"
# The first one is the guide; pyproject.toml puts them into the wheel.
PAGES = ("plugin-authors", "conformance", "quantization", "drafters", "hooks")
SUFFIX = ".template"
_CHECK_TIMEOUT_S = 60.0
_IS_TORCH_NAME = """
import sys, torch
name = sys.argv[1]
try:
    torch.device(name)
except RuntimeError:
    print("yes" if hasattr(torch, name) else "no")
else:
    print("yes")
"""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a platform, its import package and its distribution."""

    name: str
    package: str
    distribution: str

    def fill(self, text: str) -> str:
        """Insert these names into a text of the template."""
        placeholders = {
            "{{package}}": self.package,
            "{{distribution}}": self.distribution,
            "{{name}}": self.name,
            "{{Name}}": "".join(part.capitalize() for part in self.name.split("_")),
            "{{NAME}}": self.name.upper(),
        }
        for placeholder, value in placeholders.items():
            text = text.replace(placeholder, value)
        return text

    def fill_path(self, path: str) -> str:
        """Convert a path in the template to the path in the package."""
        return path.replace("PACKAGE", self.package).replace("NAME", self.name).removesuffix(SUFFIX)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("plugin", help="create your own platform")
    parser.set_defaults(handler=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    new = verbs.add_parser(
        "new",
        help="create a package with a working platform",
        description="Create a distribution with one platform, initially a simulated device. Without any changes it"
        " can be installed, serves models and passes `srv conformance run`.",
    )
    new.add_argument("name", metavar="NAME", help="name of the platform, as passed to --device")
    new.add_argument(
        "--into",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where to create the folder (default: the current folder)",
    )
    new.set_defaults(handler=run_new)
    docs = verbs.add_parser(
        "docs",
        help="print the guide for authors of platforms",
        description="Print a page of the documentation for authors of plugins, in the version of this srv.",
    )
    docs.add_argument(
        "page", nargs="?", choices=PAGES, default=PAGES[0], metavar="PAGE", help=f"one of: {', '.join(PAGES)}"
    )
    docs.set_defaults(handler=run_docs)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def run_new(namespace: argparse.Namespace) -> int:
    """Create the package and print the next steps. Refusal, with nothing written, if its name or folder is taken."""
    name = namespace.name
    folder = namespace.into / f"srv-{name.replace('_', '-')}"
    _check_name(name)
    _check_folder(folder)
    names = Names(name, f"srv_{name}", folder.name)
    written = write(names, folder)
    print(f"{folder}: {len(written)} files. The device is simulated; README.md explains how to implement your own.")
    print(f"    python -m pip install -e {folder}")
    print(f"    srv doctor --device {name}")
    print(f"    srv launch --device {name}")
    print(f"    srv conformance run --device {name} --level L3 --report report.jsonl")
    return 0


def run_docs(namespace: argparse.Namespace) -> int:
    """Print one page, as Markdown."""
    print(page(namespace.page), end="")
    return 0


def page(name: str) -> str:
    """The text of one of `PAGES`: from the wheel, or from the checkout that srv is imported from."""
    package = importlib.resources.files("srv")
    installed = package / "docs" / f"{name}.md"
    if installed.is_file():
        return installed.read_text(encoding="utf-8")
    return (Path(str(package)).parents[1] / "docs" / f"{name}.md").read_text(encoding="utf-8")


def write(names: Names, folder: Path) -> list[Path]:
    """Write the filled template to a new folder; returns the files. FileExistsError if the folder exists."""
    folder.mkdir(parents=True)
    written = []
    for path, text in rendered(names):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def rendered(names: Names) -> Iterator[tuple[str, str]]:
    """The path (with "/") and the text of every file of the package."""
    for path, text in template():
        yield names.fill_path(path), names.fill(text)


def template() -> Iterator[tuple[str, str]]:
    """The path and the text of every file of the template."""
    yield from _files(importlib.resources.files("srv") / TEMPLATE, "")


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for each in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if each.is_dir():
            yield from _files(each, f"{prefix}{each.name}/")
        elif each.name.endswith(SUFFIX):
            yield prefix + each.name, each.read_text(encoding="utf-8")


def _check_name(name: str) -> None:
    """Refusal unless the name is valid and free for a platform, a Python package and a PyTorch device."""
    example = "Choose another name, such as that of your device: srv plugin new mychip"
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii() or name != name.lower():
        raise _refused("bad_name", name, "it is not a lower-case Python identifier", example)
    if not name.replace("_", "").isalpha() or name.startswith("_"):
        reason = "names of PyTorch devices have only letters and underscores, and platform names begin with a letter"
        raise _refused("bad_name", name, reason, example)
    found = find_platforms()
    if name in found:
        reason = f"{found[name].distribution} {found[name].version} provides a platform of this name"
        remedy = f"Choose another name, or uninstall it. These are taken: {', '.join(found)}."
        raise _refused("name_taken", name, reason, remedy)
    if importlib.util.find_spec(f"srv_{name}") is not None:
        raise _refused("name_taken", name, f"a package srv_{name} is already installed", example)
    if name in _identifiers() or _is_torch_name(name):
        raise _refused("name_taken", name, "PyTorch, or the generated package, already uses this name", example)


def _identifiers() -> frozenset[str]:
    """Every identifier in the template's code: a platform must not have the name of one of its variables."""
    neutral = Names("xx", "xx", "xx")
    texts = [neutral.fill(text) for path, text in template() if path.endswith(f".py{SUFFIX}")]
    return frozenset(
        token.string
        for text in texts
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NAME
    )


def _is_torch_name(name: str) -> bool:
    """Whether `torch.NAME` or a device NAME exists without any plugin; checked in a child process."""
    with tempfile.TemporaryDirectory(prefix="srv-plugin-") as folder:
        variables = {**os.environ, AUTOLOAD: "0"}
        ended = run_child(["-c", _IS_TORCH_NAME, name], Path(folder), _CHECK_TIMEOUT_S, environment=variables)
        answer = (Path(folder) / "stdout").read_text(encoding="utf-8").strip()
    if ended.text:
        reason = f"the check whether torch uses this name failed: python {ended.text}"
        raise _refused(
            "torch_unusable", name, reason, "Run `srv doctor`, and fix the errors that it reports for torch."
        )
    return answer == "yes"


def _check_folder(folder: Path) -> None:
    if folder.exists():
        raise _refused(
            "folder_exists", str(folder), "it already exists", "Remove it, or choose another folder with --into DIR."
        )


def _refused(code: str, value: str, reason: str, remedy: str) -> Refusal:
    return Refusal([Rejection(code, "srv plugin new", value, "command line", reason, remedy)])
