"""`srv plan`: what a launch would come to, on hardware that need not be present. No weights, no torch.

Prints every argument with its story, the chosen backends and why not the others, the quantities and the
memory budget, or all refusals together (exit status 2).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from srv.errors import PlatformUnavailable, Refusal

if TYPE_CHECKING:
    from srv.args.statement import Resolved, UserInput
    from srv.cli.survey import Target
    from srv.memory.budget import Budget
    from srv.models.facts import ModelFacts
    from srv.platform.facts import DeviceFacts


class Planned(NamedTuple):
    """What a launch would come to. `model` is None if none was named and no demo model is there."""

    target: Target
    model: ModelFacts | None
    resolved: Resolved
    budget: Budget | None
    notes: tuple[str, ...]


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from srv.args.cli import add_arguments
    from srv.cli.dialect import add_dialect

    parser = subparsers.add_parser(
        "plan",
        help="say what a launch would come to, on any hardware",
        description="Resolve all arguments for a device that need not be present, and say why each value is what it is."
        " --device NAME:PROFILE[,memory=64GiB][,count=8] describes a device.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(parser)
    add_dialect(parser)
    parser.set_defaults(handler=run)


def run(namespace: argparse.Namespace) -> int:
    """Print the plan; refusals leave as `Refusal`, or as JSON on standard output with status 2."""
    from srv.args.sources import gather

    try:
        planned = make_plan(gather(namespace, os.environ))
    except Refusal as refusal:
        if not namespace.json:
            raise
        print(json.dumps({"accepted": False, "refusals": [asdict(each) for each in refusal.rejections]}, indent=2))
        return 2
    for note in planned.notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(to_dict(planned), indent=2) if namespace.json else to_text(planned))
    return 0


def make_plan(user: UserInput) -> Planned:
    """Find device and model, resolve, estimate the budget. Refusal with everything that can be judged at once."""
    from srv.cli.survey import judge
    from srv.memory.budget import estimate

    seen = judge(user, find_target, model_needed=False)
    if seen.model is None:
        return Planned(seen.target, None, seen.resolved, None, seen.notes)
    budget = estimate(seen.resolved.config, seen.model, seen.target.device, reserved_bytes(seen.resolved))
    return Planned(seen.target, seen.model, seen.resolved, budget, seen.notes)


def reserved_bytes(resolved: Resolved) -> int:
    """Bytes that the resolved quantities keep free of weights and KV pool."""
    from srv.args.defaults import RESERVED_MEMORY

    quantity = resolved.quantities.get(RESERVED_MEMORY)
    return int(quantity.total) if quantity else 0


def find_target(text: str | None, who: str = "command line") -> Target:
    """The device that a text describes; the machine's own where it says no profile and the platform is available.

    Refusal, or PlatformUnavailable if the platform is unknown (or none is available, where `text` is None).
    """
    from srv.cli.survey import make_target, this_machine
    from srv.platform.choose import device_for_plan, parse_device
    from srv.platform.registry import find_platforms

    if text is None:
        return this_machine(None, who)
    request = parse_device(text, who)
    found = find_platforms()
    device = device_for_plan(request, found) if _is_described(text) else _own_or_only(text, who)
    return make_target(found[request.name].loaded, device, f"set by {who}")


def _is_described(text: str) -> bool:
    return ":" in text or "," in text


def _own_or_only(text: str, who: str) -> DeviceFacts:
    """A bare name: this machine's device if there is one, else the platform's only profile."""
    from srv.platform.choose import choose, device_for_plan, parse_device
    from srv.platform.registry import find_platforms

    request = parse_device(text, who)
    found = find_platforms()
    try:
        return choose(text, found, who=who).device
    except PlatformUnavailable:
        return device_for_plan(request, found)


def to_text(planned: Planned) -> str:
    """The whole plan for a reader."""
    from srv.args.config import ARGUMENTS
    from srv.args.statement import amount_text

    device, resolved = planned.target.device, planned.resolved
    name = f"{planned.target.manifest.name}:{device.variant}"
    memory = amount_text(device.memory_bytes, "bytes")
    lines = [f"device  {name}, {device.count} x {memory}{', ' + device.name if device.name else ''}"]
    lines.append(f"model   {_model_line(planned.model)}")
    group, quiet = None, 0
    for argument in ARGUMENTS.values():
        story = resolved.stories[argument.name]
        if argument.arg.planned and story.value == argument.default:
            quiet += 1
            continue
        if argument.group != group:
            group = argument.group
            lines += ["", f"[{group}]"]
        lines.append(str(story))
    lines += ["", f"{quiet} planned arguments have their defaults (`srv args list --status planned` shows them)"]
    lines += ["", "[backends]", *(str(choice) for choice in resolved.backends.values())]
    lines += ["", "[quantities]", *(str(quantity) for quantity in resolved.quantities.values())]
    lines += ["", "[memory budget]"]
    if planned.budget is None:
        lines.append("open: it needs a model (--model-path)")
    else:
        lines += [f"{quantity}: {sentence}" for quantity, sentence in planned.budget.story]
    return "\n".join(lines)


def _model_line(model: ModelFacts | None) -> str:
    if model is None:
        return "none: what depends on the model stays open (name one with --model-path)"
    quantized = f", {model.quantization}" if model.quantization else ""
    return f"{model.name}, {model.architecture}, {model.parameters / 1e6:.0f} M parameters{quantized}"


def to_dict(planned: Planned) -> dict[str, Any]:
    """The whole plan as JSON can hold it."""
    resolved, budget = planned.resolved, planned.budget
    return {
        "accepted": True,
        "platform": planned.target.manifest.name,
        "device": asdict(planned.target.device),
        "model": planned.model.name if planned.model else None,
        "arguments": resolved.describe(),
        "backends": {
            slot: {
                "name": choice.spec.name,
                "because": choice.why,
                "against": {name: list(reasons) for name, reasons in choice.against},
            }
            for slot, choice in resolved.backends.items()
        },
        "quantities": {
            quantity.name: {
                "total": quantity.total,
                "unit": quantity.unit,
                "parts": [part._asdict() for part in quantity.parts],
            }
            for quantity in resolved.quantities.values()
        },
        "budget": None
        if budget is None
        else {
            "pages": list(budget.pages),
            "page_size": budget.page_size,
            "max_request_tokens": budget.max_request_tokens,
            "story": [list(line) for line in budget.story],
        },
        "notes": list(planned.notes),
    }
