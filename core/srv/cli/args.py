"""`srv args`: what the server arguments are, and what a platform makes of them."""

from __future__ import annotations

import argparse
import json

from srv.args import explain
from srv.args.config import ARGUMENTS
from srv.args.spec import Argument
from srv.args.statement import UserInput
from srv.errors import Refusal


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("args", help="list and explain server arguments")
    parser.set_defaults(handler=lambda _: _help(parser))
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    explaining = verbs.add_parser("explain", help="everything about one argument")
    explaining.add_argument("name", metavar="NAME", help="name of the argument, with underscores or hyphens")
    explaining.add_argument("--device", metavar="NAME[:PROFILE]", help="also say what it would be on this platform")
    explaining.add_argument("--json", action="store_true", help="print JSON")
    explaining.set_defaults(handler=run_explain)
    listing = verbs.add_parser("list", help="all arguments, a line each")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(handler=run_list)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def run_list(namespace: argparse.Namespace) -> int:
    """Print all declarations."""
    if namespace.json:
        print(json.dumps([explain.to_dict(argument) for argument in ARGUMENTS.values()], indent=2))
    else:
        print(explain.listing())
    return 0


def run_explain(namespace: argparse.Namespace) -> int:
    """Print one declaration and, if a device is named, the value there with its story."""
    argument = explain.find(namespace.name)
    told, text = explain.to_dict(argument), explain.explain(argument)
    if namespace.device is not None:
        story, backends = _on_device(argument, namespace.device)
        told["on_device"] = {"device": namespace.device, "story": story, "backends": backends}
        lines = story.splitlines() + ([f"backends there: {', '.join(backends)}"] if backends else [])
        text += f"\n\non {namespace.device}\n" + "\n".join(f"  {line}" for line in lines)
    print(json.dumps(told, indent=2) if namespace.json else text)
    return 0


def _on_device(argument: Argument, device: str) -> tuple[str, list[str]]:
    """The argument's story on a device if nobody sets anything, and the backends that it could name there."""
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
