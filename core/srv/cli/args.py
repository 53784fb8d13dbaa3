"""`srv args`: what the server arguments are, and what a platform makes of them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from srv.args import explain
from srv.args.config import ARGUMENTS, DEPRECATED, GROUPS, SPELLINGS
from srv.args.spec import STATUSES, Argument
from srv.cli.translate import add_translate
from srv.errors import Refusal

if TYPE_CHECKING:
    from srv.platform.facts import DeviceFacts
    from srv.platform.manifest import Manifest

UNSUPPORTED = "unsupported"  # implemented, and not to be had on the platform asked about
_ALL = (*ARGUMENTS.values(), *DEPRECATED.values())


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("args", help="list and explain server arguments")
    parser.set_defaults(handler=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    explaining = verbs.add_parser("explain", help="everything about one argument")
    explaining.add_argument("name", metavar="NAME", help="name of the argument, with underscores or hyphens")
    explaining.add_argument("--device", metavar="NAME[:PROFILE]", help="also say what it would be on this platform")
    explaining.add_argument("--json", action="store_true", help="print JSON")
    explaining.set_defaults(handler=run_explain)
    listing = verbs.add_parser("list", help="all arguments, a line each, and how many there are of which status")
    listing.add_argument("--group", choices=tuple(GROUPS), help="only those of this group")
    listing.add_argument("--status", choices=(*STATUSES, UNSUPPORTED), help="only those of this status")
    listing.add_argument("--platform", metavar="NAME[:PROFILE]", help="status on this platform")
    listing.add_argument("--json", action="store_true", help="print JSON, with counts for every platform")
    listing.set_defaults(handler=run_list)
    schema = verbs.add_parser("schema", help="JSON Schema of the configuration file, for editors")
    schema.set_defaults(handler=run_schema)
    add_translate(verbs)
    completing = verbs.add_parser("completion", help="completion script for a shell")
    completing.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    completing.set_defaults(handler=run_completion)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def run_list(namespace: argparse.Namespace) -> int:
    """Print declarations, and how many there are of each status."""
    status = _status_on(namespace.platform) if namespace.platform else explain.own_status
    chosen = [
        argument
        for argument in _ALL
        if namespace.group in (None, argument.group) and namespace.status in (None, status(argument))
    ]
    if namespace.json:
        told = [{**explain.to_dict(argument), "status": status(argument)} for argument in chosen]
        counts: dict[str, Any] = {"status": _counts(chosen, status), "platforms": _platform_counts(chosen)}
        print(json.dumps({"arguments": told, "counts": counts}, indent=2))
        return 0
    if chosen:
        print(explain.listing(sorted(chosen, key=lambda each: list(GROUPS).index(each.group)), status) + "\n")
    summary = ", ".join(f"{count} {name}" for name, count in _counts(chosen, status).items())
    where = f" on {namespace.platform}" if namespace.platform else ""
    print(f"{len(chosen)} arguments{where}: " + (summary or "none"))
    return 0


def _counts(arguments: Iterable[Argument], status: Callable[[Argument], str]) -> dict[str, int]:
    counted = Counter(status(argument) for argument in arguments)
    return {name: counted[name] for name in (*STATUSES, UNSUPPORTED) if counted[name]}


def _status_on(device: str) -> Callable[[Argument], str]:
    """What a platform's device makes of an argument: core's own status, or that the platform has not got it."""
    from srv.cli.plan import find_target

    target = find_target(device)
    return partial(_device_status, target.manifest, target.device)


def _device_status(manifest: Manifest, device: DeviceFacts, argument: Argument) -> str:
    """An implemented argument is unsupported if no value but its default is accepted there."""
    if argument.status != "implemented":
        return argument.status
    if argument.arg.needs and argument.arg.needs not in manifest.facts.capabilities(device):
        return UNSUPPORTED
    from srv.args.support import REFUSED, by_argument, on_variant, said_of_argument

    said = said_of_argument(on_variant(device.variant, by_argument(manifest.facts.support).get(argument.name, ())))
    return UNSUPPORTED if said is not None and said.status in REFUSED else argument.status


def _platform_counts(arguments: list[Argument]) -> Mapping[str, dict[str, int]]:
    """Counts by status for every variant of every installed platform, by NAME:VARIANT."""
    from srv.platform.registry import find_platforms

    counts: dict[str, dict[str, int]] = {}
    for name, found in sorted(find_platforms().items()):
        if found.error is None:
            manifest = found.loaded
            for variant in manifest.variants:
                status = partial(_device_status, manifest, manifest.facts.profiles[variant])
                counts[f"{name}:{variant}"] = _counts(arguments, status)
    return counts


def run_schema(_: argparse.Namespace) -> int:
    """Print the JSON Schema of the configuration file."""
    from srv.args.schema import make_schema

    print(json.dumps(make_schema(), indent=2))
    return 0


def run_completion(namespace: argparse.Namespace) -> int:
    """Print a completion script."""
    from srv.args.completion import script
    from srv.args.dialects import DIALECTS
    from srv.cli.main import whole_parser

    values = {
        flag: argument.choices or SPELLINGS.published.get(argument.name, ())
        for argument in ARGUMENTS.values()
        for flag in argument.flags
    }
    values |= {"--dialect": DIALECTS, "--from": DIALECTS}
    print(script(namespace.shell, whole_parser(), values), end="")
    return 0


def run_explain(namespace: argparse.Namespace) -> int:
    """Print one declaration and, if a device is named, the value there with its story."""
    argument = explain.find(namespace.name)
    told: dict[str, Any] = explain.to_dict(argument)
    text = explain.explain(argument)
    if namespace.device is not None and not argument.deprecated:
        story, backends = _on_device(argument, namespace.device)
        told["on_device"] = {"device": namespace.device, "story": story, "backends": backends}
        lines = story.splitlines() + ([f"backends there: {', '.join(backends)}"] if backends else [])
        text += f"\n\non {namespace.device}\n" + "\n".join(f"  {line}" for line in lines)
    print(json.dumps(told, indent=2) if namespace.json else text)
    return 0


def _on_device(argument: Argument, device: str) -> tuple[str, list[str]]:
    """The argument's story on a device if nobody sets anything, and the backends that it could name there."""
    from srv.args.statement import UserInput
    from srv.cli.plan import find_target
    from srv.cli.survey import resolve_for

    target = find_target(device)
    family = argument.arg.family
    backends = sorted(spec.name for spec in target.backends(family)) if family else []
    try:
        return str(resolve_for(UserInput(), target, None).stories[argument.name]), backends
    except Refusal as refusal:
        about = [each for each in refusal.rejections if each.what == argument.name] or list(refusal.rejections)
        return "refused: " + "\n".join(str(each) for each in about), backends
