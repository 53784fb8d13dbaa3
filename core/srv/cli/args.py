"""`srv args`: describe the server arguments, and their values and status on a platform."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from srv.args import explain
from srv.args.config import DEPRECATED, GROUPS, SPELLINGS, all_arguments, plugin_arguments
from srv.args.spec import STATUSES, Argument
from srv.cli.translate import add_translate
from srv.errors import Refusal

if TYPE_CHECKING:
    from srv.platform.facts import DeviceFacts
    from srv.platform.manifest import Manifest

UNSUPPORTED = "unsupported"  # implemented in core, but not on the requested platform


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("args", help="list and explain server arguments")
    parser.set_defaults(handler=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    explaining = verbs.add_parser("explain", help="describe one argument in full")
    explaining.add_argument("name", metavar="NAME", help="name of the argument, with underscores or hyphens")
    explaining.add_argument("--device", metavar="NAME[:PROFILE]", help="also show its value on this platform")
    explaining.add_argument("--json", action="store_true", help="print JSON")
    explaining.set_defaults(handler=run_explain)
    listing = verbs.add_parser("list", help="list all arguments, one per line, with counts by status")
    listing.add_argument("--group", choices=tuple(_groups()), help="only arguments of this group")
    listing.add_argument("--status", choices=(*STATUSES, UNSUPPORTED), help="only arguments with this status")
    listing.add_argument("--platform", metavar="NAME[:PROFILE]", help="show the status on this platform")
    listing.add_argument("--json", action="store_true", help="print JSON, with counts for every platform")
    listing.set_defaults(handler=run_list)
    schema = verbs.add_parser("schema", help="print a JSON Schema of the configuration file, for editors")
    schema.set_defaults(handler=run_schema)
    add_translate(verbs)
    completing = verbs.add_parser("completion", help="print a completion script for a shell")
    completing.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    completing.set_defaults(handler=run_completion)


def _groups() -> list[str]:
    return [*GROUPS, *dict.fromkeys(plugin_argument.group for plugin_argument in plugin_arguments().values())]


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def run_list(namespace: argparse.Namespace) -> int:
    """Print the declarations, and counts by status."""
    status = _status_on(namespace.platform) if namespace.platform else explain.core_status
    chosen = [
        argument
        for argument in (*all_arguments().values(), *DEPRECATED.values())
        if namespace.group in (None, argument.group) and namespace.status in (None, status(argument))
    ]
    if namespace.json:
        described = [{**explain.to_dict(argument), "status": status(argument)} for argument in chosen]
        counts: dict[str, Any] = {"status": _counts(chosen, status), "platforms": _platform_counts(chosen)}
        print(json.dumps({"arguments": described, "counts": counts}, indent=2))
        return 0
    if chosen:
        print(explain.listing(sorted(chosen, key=lambda argument: _groups().index(argument.group)), status) + "\n")
    summary = ", ".join(f"{count} {name}" for name, count in _counts(chosen, status).items())
    where = f" on {namespace.platform}" if namespace.platform else ""
    print(f"{len(chosen)} arguments{where}: " + (summary or "none"))
    return 0


def _counts(arguments: Iterable[Argument], status: Callable[[Argument], str]) -> dict[str, int]:
    counted = Counter(status(argument) for argument in arguments)
    return {name: counted[name] for name in (*STATUSES, UNSUPPORTED) if counted[name]}


def _status_on(device: str) -> Callable[[Argument], str]:
    """A function that returns the status of an argument on a device: that of core, or unsupported."""
    from srv.planning.target import find_target

    target = find_target(device)
    return partial(_device_status, target.manifest, target.device)


def _device_status(manifest: Manifest, device: DeviceFacts, argument: Argument) -> str:
    """An implemented argument is unsupported if the device accepts only its default."""
    if argument.status != "implemented":
        return argument.status
    if argument.arg.needs and argument.arg.needs not in manifest.facts.capabilities(device):
        return UNSUPPORTED
    from srv.args.support import REFUSED, by_argument, on_variant, support_of_argument

    declared = by_argument(manifest.facts.support).get(argument.name, ())
    support = support_of_argument(on_variant(device.variant, declared))
    return UNSUPPORTED if support is not None and support.status in REFUSED else argument.status


def _platform_counts(arguments: list[Argument]) -> Mapping[str, dict[str, int]]:
    """Counts by status for every variant of every installed platform, keyed by NAME:VARIANT."""
    from srv.platform.registry import find_platforms

    counts: dict[str, dict[str, int]] = {}
    for name, platform in sorted(find_platforms().items()):
        if platform.error is None:
            manifest = platform.loaded
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
    from srv.cli.main import complete_parser

    values = {
        flag: (*argument.choices, *argument.further_choices) or SPELLINGS.published.get(argument.name, ())
        for argument in all_arguments().values()
        for flag in argument.flags
    }
    values |= {"--dialect": DIALECTS, "--from": DIALECTS}
    print(script(namespace.shell, complete_parser(), values), end="")
    return 0


def run_explain(namespace: argparse.Namespace) -> int:
    """Print one declaration and, with --device, the value on that device with its provenance."""
    argument = explain.find(namespace.name)
    description: dict[str, Any] = explain.to_dict(argument)
    text = explain.explain(argument)
    if namespace.device is not None and not argument.deprecated:
        provenance, backends = _on_device(argument, namespace.device)
        description["on_device"] = {"device": namespace.device, "provenance": provenance, "backends": backends}
        lines = provenance.splitlines() + ([f"available backends: {', '.join(backends)}"] if backends else [])
        text += f"\n\non {namespace.device}\n" + "\n".join(f"  {line}" for line in lines)
    print(json.dumps(description, indent=2) if namespace.json else text)
    return 0


def _on_device(argument: Argument, device: str) -> tuple[str, list[str]]:
    """The provenance of the argument's default on a device, and the backends that it can select there."""
    from srv.args.statement import UserInput
    from srv.planning.resolution import resolve_arguments
    from srv.planning.target import find_target

    target = find_target(device)
    family = argument.arg.family
    backends = sorted(spec.name for spec in target.backends(family)) if family else []
    try:
        return str(resolve_arguments(UserInput(), target, None).provenance[argument.name]), backends
    except Refusal as refusal:
        about = [rejection for rejection in refusal.rejections if rejection.what == argument.name] or list(
            refusal.rejections
        )
        return "refused: " + "\n".join(str(rejection) for rejection in about), backends
