"""`srv contract`: the versions of the platform contract, and what changed from one to another.

For the author of a plugin who ports it to another version. Reads records only; must not import torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from srv.errors import Refusal, Rejection
from srv.platform import API_VERSION, OLDEST_API
from srv.platform.recorded import Change, Header, Interface, compare, number, read, recorded_versions

_IMPLEMENTED = "What a plugin implements"
_OFFERED = "What it is given, constructs or may use"


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("contract", help="list versions of the platform contract, and what changed")
    parser.set_defaults(handler=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    listing = verbs.add_parser("versions", help="list the recorded versions, and those that this srv accepts")
    listing.set_defaults(handler=run_versions)
    differing = verbs.add_parser(
        "diff",
        help="show what changed between two versions",
        description="Show every class, member, field and constant of the platform contract that was added, removed or"
        " changed from version OLD to version NEW.",
    )
    differing.add_argument("old", metavar="OLD", help="a recorded version, such as that of your plugin's Manifest.api")
    differing.add_argument("new", metavar="NEW", help="another recorded version")
    form = differing.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_const", dest="form", const="markdown", help="print Markdown")
    form.add_argument("--json", action="store_const", dest="form", const="json", help="print JSON")
    differing.set_defaults(handler=run_diff, form="text")


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def run_versions(namespace: argparse.Namespace) -> int:
    """Print one line for each recorded version, and which plugins are accepted."""
    present, oldest = (f"{version[0]}.{version[1]}" for version in (API_VERSION, OLDEST_API))
    for version in recorded_versions():
        header = read(version).header
        notes = ["the present version"] if version == present else []
        notes += [] if header.published else ["not published"]
        notes += ["no longer accepted"] if number(version) < OLDEST_API else []
        print(f"{version:6}{', '.join(notes)}".rstrip())
    accepted = present if oldest == present else f"{oldest} to {present}"
    print(f"\nThis srv accepts plugins whose Manifest.api is {accepted}.")
    return 0


def run_diff(namespace: argparse.Namespace) -> int:
    """Print the differences between two recorded versions."""
    rejected = [*_rejected("OLD", namespace.old), *_rejected("NEW", namespace.new)]
    if rejected:
        raise Refusal(rejected)
    print(difference(read(namespace.old), read(namespace.new), namespace.form))
    return 0


def difference(old: Interface, new: Interface, form: Literal["text", "markdown", "json"] = "text") -> str:
    """What changed from one version to another, for the author of a plugin."""
    changes = compare(old, new)
    if form != "json":
        write = _markdown if form == "markdown" else _text
        return "\n".join(write(old.header, new.header, _parts(old, new, changes)))
    versions = {"old": old.header.version, "new": new.header.version}
    accepted = number(new.header.oldest) <= number(old.header.version) <= number(new.header.version)
    return json.dumps({**versions, "accepted": accepted, "changes": [change._asdict() for change in changes]}, indent=2)


def _rejected(argument: str, version: str) -> Iterator[Rejection]:
    versions = recorded_versions()
    if version not in versions:
        remedy = f"Recorded versions: {', '.join(versions)}."
        reason = "this srv has no record of such a contract version"
        yield Rejection("unknown_version", f"srv contract diff {argument}", version, "command line", reason, remedy)


def _parts(old: Interface, new: Interface, changes: Sequence[Change]) -> dict[str, list[Change]]:
    """The changes to what a plugin implements, which are protocols, and to all else."""
    parts: dict[str, list[Change]] = {}
    for change in changes:
        cls = new.classes.get(change.group) or old.classes.get(change.group)
        implemented = cls is not None and cls.kind == "protocol"
        parts.setdefault(_IMPLEMENTED if implemented else _OFFERED, []).append(change)
    return {part: parts[part] for part in (_IMPLEMENTED, _OFFERED) if part in parts}


def _text(old: Header, new: Header, parts: Mapping[str, list[Change]]) -> Iterator[str]:
    changes = [change for part in parts.values() for change in part]
    yield f"Contract {old.version} to {new.version}: {_counts(changes)}"
    yield from _consequence(old, new, changes)
    for part, changed in parts.items():
        yield f"\n{part}"
        for group, members in itertools.groupby(changed, key=lambda change: change.group):
            yield f"\n  {group}"
            for change in members:
                yield f"    {change.kind:8} {change.before or change.after}"
                if change.kind == "changed":
                    yield f"    {'to':>8} {change.after}"


def _markdown(old: Header, new: Header, parts: Mapping[str, list[Change]]) -> Iterator[str]:
    changes = [change for part in parts.values() for change in part]
    yield f"# Contract {old.version} to {new.version}\n"
    yield f"{_counts(changes).capitalize()}."
    yield from _consequence(old, new, changes)
    for part, changed in parts.items():
        yield f"\n## {part}"
        for group, members in itertools.groupby(changed, key=lambda change: change.group):
            yield f"\n### {group}\n"
            for change in members:
                became = f" to `{change.after}`" if change.kind == "changed" else ""
                yield f"- {change.kind} `{change.before or change.after}`{became}"


def _counts(changes: Sequence[Change]) -> str:
    kinds = [change.kind for change in changes]
    counted = [f"{kinds.count(kind)} {kind}" for kind in ("added", "removed", "changed") if kind in kinds]
    return ", ".join(counted) or "no difference"


def _consequence(old: Header, new: Header, changes: Sequence[Change]) -> Iterator[str]:
    """What the newer version means for a plugin of the older one."""
    if number(old.version) >= number(new.version):
        return
    api = f"Manifest.api = {number(new.version)}"
    if number(old.version) < number(new.oldest):
        yield f"A plugin of {old.version} is refused: make these changes, and set {api}."
    else:
        broken = any(change.kind != "added" for change in changes)
        still = "is accepted if it does not use what was removed or changed" if broken else "is accepted as it is"
        yield f"A plugin of {old.version} {still}. To use what was added, set {api}."
