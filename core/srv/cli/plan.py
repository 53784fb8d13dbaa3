"""`srv plan`: resolve a launch for hardware that need not be present, without weights and without torch.

Prints every argument with its provenance, the chosen backends and why the others were rejected, the quantities and the
memory budget; or all refusals together (exit status 2).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from srv.errors import Refusal

if TYPE_CHECKING:
    from srv.planning.plan import LaunchPlan
    from srv.specs import ModelFacts


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from srv.args.cli import add_arguments
    from srv.cli.dialect import add_dialect

    parser = subparsers.add_parser(
        "plan",
        help="show the result of a launch on any hardware",
        description="Resolve all arguments for a device that need not be present, and show the reason for each value."
        " --device NAME:PROFILE[,memory=64GiB][,count=8] describes a device.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(parser)
    add_dialect(parser)
    parser.set_defaults(handler=run)


def run(namespace: argparse.Namespace) -> int:
    """Print the plan. Refusals are raised, or with --json printed to standard output with exit status 2."""
    from srv.args.sources import gather
    from srv.planning.plan import make_plan

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


def to_text(planned: LaunchPlan) -> str:
    """The whole plan as text."""
    from srv.args.config import all_arguments
    from srv.args.statement import amount_text

    device, resolved = planned.target.device, planned.resolved
    name = f"{planned.target.manifest.name}:{device.variant}"
    memory = amount_text(device.memory_bytes, "bytes")
    lines = [f"device  {name}, {device.count} x {memory}{', ' + device.name if device.name else ''}"]
    lines.append(f"model   {_model_line(planned.model)}")
    group, hidden = None, 0
    for argument in all_arguments().values():
        provenance = resolved.provenance[argument.name]
        if argument.arg.planned and provenance.value == argument.default:
            hidden += 1
            continue
        if argument.group != group:
            group = argument.group
            lines += ["", f"[{group}]"]
        lines.append(str(provenance))
    lines += ["", f"{hidden} planned arguments have their defaults (`srv args list --status planned` shows them)"]
    lines += ["", "[backends]", *(str(choice) for choice in resolved.backends.values())]
    lines += ["", "[quantities]", *(str(quantity) for quantity in resolved.quantities.values())]
    lines += ["", "[memory budget]"]
    if planned.budget is None:
        lines.append("unknown: it depends on the model (--model-path)")
    else:
        lines += [f"{quantity}: {sentence}" for quantity, sentence in planned.budget.breakdown]
    return "\n".join(lines)


def _model_line(model: ModelFacts | None) -> str:
    if model is None:
        return "none: values that depend on the model are unknown (set one with --model-path)"
    quantized = f", {model.quantization}" if model.quantization else ""
    return f"{model.name}, {model.architecture}, {model.parameters / 1e6:.0f} M parameters{quantized}"


def to_dict(planned: LaunchPlan) -> dict[str, Any]:
    """The whole plan as JSON-compatible values."""
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
                "because": choice.reason,
                "rejected": {name: list(reasons) for name, reasons in choice.rejected},
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
            "breakdown": [list(line) for line in budget.breakdown],
        },
        "notes": list(planned.notes),
    }
