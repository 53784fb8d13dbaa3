"""`srv plugin new NAME`: generate the package of a third party's plugin, which works without changes.

The templates are in `srv/plugin_kinds`, with what all of them have in `common`. The code of a platform is that of
plugins/toy_device, which the wheel contains, with other names.
Owns the names that are inserted, and their rules. Must not know the contents of the templates' files.
`srv plugin docs` prints the pages for authors of plugins, which the wheel contains.
"""

from __future__ import annotations

import argparse
import importlib.resources
import importlib.util
import io
import keyword
import os
import re
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

from srv.errors import Refusal, Rejection
from srv.platform.doctor import run_child
from srv.platform.manifest import AUTOLOAD
from srv.platform.registry import find_platforms

if TYPE_CHECKING:
    from srv.cli.families import Family

TEMPLATES, COMMON = "plugin_kinds", "common"
PLATFORM = "platform"  # the kind that is made without --kind
SUFFIX = ".template"
# What a package of a platform has of the toy device; the wheel has it in the folder of the kind (pyproject.toml).
EXAMPLE = ("srv_toy_device", "tests/test_toy_limits.py")
# The names of the toy device, with what stands for them in a template.
_PLACEHOLDERS = {"srv_toy_device": "package", "TOY": "NAME", "Toy": "Name", "toy": "name"}
_EXAMPLE_NAMES = re.compile("|".join(_PLACEHOLDERS))
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
    """The names of a plugin, its import package and its distribution. `platform`: the one that a backend is for."""

    name: str
    package: str
    distribution: str
    platform: str = ""

    def fill(self, text: str, family: Family | None = None) -> str:
        """Insert the words of a family, and then these names, into a text of the template."""
        placeholders = {} if family is None else family._asdict()
        placeholders |= {
            "package": self.package,
            "distribution": self.distribution,
            "platform": self.platform,
            "name": self.name,
            "Name": "".join(part.capitalize() for part in self.name.split("_")),
            "NAME": self.name.upper(),
        }
        for placeholder, value in placeholders.items():
            text = text.replace(f"{{{{{placeholder}}}}}", str(value))
        return text

    def fill_path(self, path: str) -> str:
        """Convert a path in the template to the path in the package."""
        return path.replace("PACKAGE", self.package).replace("NAME", self.name)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from srv.cli.families import FAMILIES

    parser = subparsers.add_parser("plugin", help="create your own platform, or another plugin")
    parser.set_defaults(handler=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    new = verbs.add_parser(
        "new",
        help="create a package with a working plugin",
        description="Create a distribution with one plugin, which works without any changes, and with its own tests."
        " A platform is initially a simulated device: it serves models and passes `srv conformance run`.",
    )
    new.add_argument("name", metavar="NAME", help="name of the plugin, such as that of a platform for --device")
    kinds = [PLATFORM, *(family.kind for family in FAMILIES if family.use)]
    new.add_argument(
        "--kind", choices=kinds, default=PLATFORM, help="what the plugin is (default: %(default)s)", metavar="KIND"
    )
    new.add_argument(
        "--platform",
        metavar="PLATFORM",
        help="platform that a backend is for (default: the one that is chosen if no other is available)",
    )
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
        help="print the documentation for authors of plugins",
        description="Print a page of the documentation for authors of plugins, in the version of this srv.",
    )
    names = pages()
    docs.add_argument(
        "page", nargs="?", choices=names, default=names[0], metavar="PAGE", help=f"one of: {', '.join(names)}"
    )
    docs.add_argument("--all", action="store_true", help="print all pages, one after the other")
    docs.set_defaults(handler=run_docs)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def run_new(namespace: argparse.Namespace) -> int:
    """Create the package and print the next steps. Refusal, with nothing written, if its name or folder is taken."""
    from srv.cli.families import FAMILIES

    family = next(candidate for candidate in FAMILIES if candidate.kind == namespace.kind)
    name = namespace.name
    folder = namespace.into / f"srv-{name.replace('_', '-')}"
    names = Names(name, f"srv_{name}", folder.name, _platform_of(namespace.platform))
    _check_name(names, family)
    _check_folder(folder)
    written = write(names, folder, family)
    if family.kind != PLATFORM:
        print(f"{folder}: {len(written)} files. README.md says what to do with them.")
        print(f"    python -m pip install -e '{folder}[test]'")
        print(f"    python -m pytest {folder / 'tests'}")
        print(f"    {names.fill(family.use)}")
        return 0
    print(f"{folder}: {len(written)} files. The device is simulated; README.md explains how to implement your own.")
    print(f"    python -m pip install -e {folder}")
    print(f"    srv doctor --device {name}")
    print(f"    srv launch --device {name}")
    print(f"    srv conformance run --device {name} --level L3 --report report.jsonl")
    return 0


def run_docs(namespace: argparse.Namespace) -> int:
    """Print one page or all, as Markdown."""
    print("\n".join(map(page, pages() if namespace.all else (namespace.page,))), end="")
    return 0


def pages() -> tuple[str, ...]:
    """The guide for authors of platforms, what the kit checks, and the pages of all families. The wheel has them."""
    from srv.cli.families import FAMILIES

    return tuple(
        dict.fromkeys(("plugin-authors", "conformance", "plugin-families", *(family.page for family in FAMILIES)))
    )


def page(name: str) -> str:
    """The text of one of `pages()`: from the wheel, or from the checkout that srv is imported from."""
    package = importlib.resources.files("srv")
    installed = package / "docs" / f"{name}.md"
    if installed.is_file():
        return installed.read_text(encoding="utf-8")
    return (Path(str(package)).parents[1] / "docs" / f"{name}.md").read_text(encoding="utf-8")


def write(names: Names, folder: Path, family: Family) -> list[Path]:
    """Write the filled template to a new folder; returns the files. FileExistsError if the folder exists."""
    folder.mkdir(parents=True)
    written = []
    for path, text in rendered(names, family):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def rendered(names: Names, family: Family) -> Iterator[tuple[str, str]]:
    """The path (with "/") and the text of every file of the package."""
    for path, text in template(family.kind).items():
        yield names.fill_path(path), names.fill(text, family)


def template(kind: str) -> dict[str, str]:
    """The text of every file of the template of a kind, by path; its own files replace those of `common`."""
    folder = importlib.resources.files("srv") / TEMPLATES
    files = {**_files(folder / COMMON, SUFFIX), **_files(folder / kind, SUFFIX)}
    return {**files, **_example()} if kind == PLATFORM else files


def _example() -> dict[str, str]:
    """The code of the toy device with placeholders for its names."""
    package = importlib.resources.files("srv")
    folder = package / TEMPLATES / PLATFORM
    if not (folder / EXAMPLE[0]).is_dir():  # a checkout
        folder = Path(str(package)).parents[1] / "plugins" / "toy_device"
    source = {path: text for part in EXAMPLE for path, text in _files(folder / part, ".py", part).items()}
    return {
        path.replace("srv_toy_device", "PACKAGE").replace("toy", "NAME"): _EXAMPLE_NAMES.sub(
            lambda placeholder: f"{{{{{_PLACEHOLDERS[placeholder[0]]}}}}}", text
        )
        for path, text in source.items()
    }


def _files(entry: Traversable, suffix: str, path: str = "") -> dict[str, str]:
    """The texts of the files with a suffix in a folder, or of one file, by path, without the suffix of templates."""
    if entry.is_dir():
        inside = sorted(entry.iterdir(), key=lambda inner: inner.name)
        prefix = f"{path}/" if path else ""
        return {name: text for inner in inside for name, text in _files(inner, suffix, prefix + inner.name).items()}
    return {path.removesuffix(SUFFIX): entry.read_text(encoding="utf-8")} if path.endswith(suffix) else {}


def _platform_of(name: str | None) -> str:
    """The installed platform of this name; by default, the one with the lowest priority."""
    platforms = find_platforms()
    if name is not None and name not in platforms:
        raise _refused(
            "unknown_platform", name, "no installed platform has this name", f"Use {' or '.join(platforms)}."
        )
    manifests = {platform: platforms[platform].manifest for platform in platforms} if name is None else {}
    real = {
        platform: manifest.priority for platform, manifest in manifests.items() if manifest and not manifest.simulated
    }
    return name or min(real, key=lambda platform: real[platform])


def _check_name(names: Names, family: Family) -> None:
    """Refusal unless the name is valid and free for the plugin and a Python package; for a platform, as a device."""
    name, example = names.name, "Choose another name, such as that of your company: srv plugin new acme"
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii() or name != name.lower():
        raise _refused("bad_name", name, "it is not a lower-case Python identifier", example)
    if family.kind == PLATFORM:
        _check_device(name)
    if importlib.util.find_spec(names.package) is not None:
        raise _refused("name_taken", name, f"a package {names.package} is already installed", example)
    if family.has(names.fill(family.entry)):
        raise _refused("name_taken", name, f"{family.noun} {names.fill(family.entry)} is there already", example)
    if _clashes(names, family):
        raise _refused("name_taken", name, "the generated package already uses this name", example)
    if family.kind == PLATFORM and _is_torch_name(name):
        raise _refused("name_taken", name, "PyTorch already uses this name", example)


def _check_device(name: str) -> None:
    example = "Choose another name, such as that of your device: srv plugin new mychip"
    if not name.replace("_", "").isalpha() or name.startswith("_"):
        reason = "names of PyTorch devices have only letters and underscores, and platform names begin with a letter"
        raise _refused("bad_name", name, reason, example)
    platforms = find_platforms()
    if name in platforms:
        reason = f"{platforms[name].distribution} {platforms[name].version} provides a platform of this name"
        remedy = f"Choose another name, or uninstall it. These are taken: {', '.join(platforms)}."
        raise _refused("name_taken", name, reason, remedy)


def _clashes(names: Names, family: Family) -> bool:
    """Whether a name that the template makes from the plugin's is one that its code has already."""
    texts = [text for path, text in rendered(Names("zzz", "zzz", "zzz"), family) if path.endswith(".py")]
    words = {
        token.string
        for text in texts
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NAME
    }
    templates = {word for word in words if "zzz" in word.lower()}
    placeholders = {"zzz": "{{name}}", "Zzz": "{{Name}}", "ZZZ": "{{NAME}}"}
    for word, placeholder in placeholders.items():
        templates = {text.replace(word, placeholder) for text in templates}
    return any(names.fill(text) in words for text in templates)


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
