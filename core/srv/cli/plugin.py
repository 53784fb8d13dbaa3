"""`srv plugin new NAME`: a third party's platform, as a package that works before a line of it is changed.

The template ships inside `srv` (`srv/plugin_template`) and is made from a platform that is served and tested with it.
Owns the names that go into it, and their rules. Must not know what the template's files hold.
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

from srv.errors import Refusal, Rejected
from srv.platform.doctor import run_child
from srv.platform.manifest import AUTOLOAD
from srv.platform.registry import find_platforms

TEMPLATE = "plugin_template"
SUFFIX = ".template"
_CHECK_TIMEOUT_S = 60.0
_TORCH_KNOWS = """
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
    """What a platform, its import package and its distribution are called."""

    name: str
    package: str
    distribution: str

    def fill(self, text: str) -> str:
        """A text of the template, with these names."""
        words = {
            "{{package}}": self.package,
            "{{distribution}}": self.distribution,
            "{{name}}": self.name,
            "{{Name}}": "".join(part.capitalize() for part in self.name.split("_")),
            "{{NAME}}": self.name.upper(),
        }
        for word, value in words.items():
            text = text.replace(word, value)
        return text

    def place(self, path: str) -> str:
        """A path in the template, as it is called in the package."""
        return path.replace("PACKAGE", self.package).replace("NAME", self.name).removesuffix(SUFFIX)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("plugin", help="make a platform of your own")
    parser.set_defaults(handler=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    new = verbs.add_parser(
        "new",
        help="make a package with a platform that works",
        description="Make a distribution with one platform, a simulated device to begin with: it installs, serves and"
        " passes `srv conformance run` as it is.",
    )
    new.add_argument("name", metavar="NAME", help="of the platform, as --device will take it")
    new.add_argument("--into", type=Path, default=Path(), metavar="DIR", help="where the folder goes (default: here)")
    new.set_defaults(handler=run_new)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def run_new(namespace: argparse.Namespace) -> int:
    """Make the package and say what to do with it. Refusal, and nothing written, if its name or place is taken."""
    name = namespace.name
    folder = namespace.into / f"srv-{name.replace('_', '-')}"
    _check_name(name)
    _check_folder(folder)
    names = Names(name, f"srv_{name}", folder.name)
    written = write(names, folder)
    print(f"{folder}: {len(written)} files. A simulated device, until you make it yours; its README.md says how.")
    print(f"    python -m pip install -e {folder}")
    print(f"    srv doctor --device {name}")
    print(f"    srv launch --device {name}")
    print(f"    srv conformance run --device {name} --level L3 --report report.jsonl")
    return 0


def write(names: Names, folder: Path) -> list[Path]:
    """Fill the template into a new folder; the files written. FileExistsError if the folder is there."""
    folder.mkdir(parents=True)
    written = []
    for path, text in rendered(names):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def rendered(names: Names) -> Iterator[tuple[str, str]]:
    """Every file of the package: its path, with "/", and its text."""
    for path, text in template():
        yield names.place(path), names.fill(text)


def template() -> Iterator[tuple[str, str]]:
    """Every file of the template: its path within it, and its text."""
    yield from _files(importlib.resources.files("srv") / TEMPLATE, "")


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for each in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if each.is_dir():
            yield from _files(each, f"{prefix}{each.name}/")
        elif each.name.endswith(SUFFIX):
            yield prefix + each.name, each.read_text(encoding="utf-8")


def _check_name(name: str) -> None:
    """Refusal unless a platform, a Python package and a device of PyTorch can be called so."""
    example = "Choose another, such as the name that your device is known by: srv plugin new mychip"
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii() or name != name.lower():
        raise _refused("bad_name", name, "it is no lower-case Python identifier", example)
    if not name.replace("_", "").isalpha() or name.startswith("_"):
        reason = "PyTorch names devices with letters and underscores alone, and a platform's name begins with a letter"
        raise _refused("bad_name", name, reason, example)
    found = find_platforms()
    if name in found:
        reason = f"{found[name].distribution} {found[name].version} brings a platform of this name"
        remedy = f"Choose another, or uninstall it. Taken are {', '.join(found)}."
        raise _refused("name_taken", name, reason, remedy)
    if importlib.util.find_spec(f"srv_{name}") is not None:
        raise _refused("name_taken", name, f"a package srv_{name} is installed already", example)
    if name in _identifiers() or _torch_knows(name):
        raise _refused("name_taken", name, "PyTorch, or the package that would be made, uses this word itself", example)


def _identifiers() -> frozenset[str]:
    """Every identifier of the template's code: a platform named like a variable in it would shadow that."""
    neutral = Names("xx", "xx", "xx")
    texts = [neutral.fill(text) for path, text in template() if path.endswith(f".py{SUFFIX}")]
    return frozenset(
        token.string
        for text in texts
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NAME
    )


def _torch_knows(name: str) -> bool:
    """Whether `torch.NAME` or a device NAME is there before any plugin's: asked of torch in a child process."""
    with tempfile.TemporaryDirectory(prefix="srv-plugin-") as folder:
        variables = {**os.environ, AUTOLOAD: "0"}
        ended = run_child(["-c", _TORCH_KNOWS, name], Path(folder), _CHECK_TIMEOUT_S, environment=variables)
        answer = (Path(folder) / "stdout").read_text(encoding="utf-8").strip()
    if ended.text:
        reason = f"torch, which every platform computes with, cannot be asked about it: python {ended.text}"
        raise _refused("torch_unusable", name, reason, "Run `srv doctor`, and mend what it says of torch.")
    return answer == "yes"


def _check_folder(folder: Path) -> None:
    if folder.exists():
        raise _refused("folder_exists", str(folder), "there is such a file or folder", "Remove it, or say --into DIR.")


def _refused(code: str, value: str, reason: str, remedy: str) -> Refusal:
    return Refusal([Rejected(code, "srv plugin new", value, "command line", reason, remedy)])
