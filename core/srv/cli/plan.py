"""`srv plan`: resolve a launch for hardware that need not be present, without weights and without torch.

Prints every argument with its provenance, the chosen backends and why the others were rejected, the quantities and the
memory budget. Exit status 2 if a launch would refuse; the plan is printed nevertheless if it can be computed, and
planned values are resolved like all others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from srv.cli.text import columns, wrapped
from srv.errors import Refusal

if TYPE_CHECKING:
    from srv.planning.plan import LaunchPlan
    from srv.specs import ModelFacts

REFUSED = 2  # exit status


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
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--kernels", action="store_true", help="show what computes each kind of layer and op, and why, instead"
    )
    instead.add_argument(
        "--fit",
        choices=("context", "concurrency", "devices", "card"),
        help="the largest context of one request, the most requests as long as the context, the fewest devices, or the"
        " cards (all profiles of all platforms) that serve this model, and why the next one does not",
    )
    add_arguments(parser)
    add_dialect(parser)
    parser.set_defaults(handler=run)


def run(namespace: argparse.Namespace) -> int:
    """Print the plan; exit status 2 if a launch would refuse.

    Refusals are raised, or with --json printed to standard output.
    """
    from srv.args.sources import gather
    from srv.planning.plan import make_plan

    try:
        user = gather(namespace, os.environ)
        answer = None
        if namespace.fit is not None:
            from srv.planning.fit import fit

            answer = fit(user, namespace.fit)
        planned = make_plan(user) if answer is None else answer.plan
    except Refusal as refusal:
        if not namespace.json:
            raise
        print(
            json.dumps(
                {"accepted": False, "refusals": [asdict(rejection) for rejection in refusal.rejections]}, indent=2
            )
        )
        return REFUSED
    if answer is not None:
        from srv.cli.fit import fit_dict, fit_text

        for note in () if planned is None else planned.notes:
            print(f"note: {note}", file=sys.stderr)
        print(json.dumps(fit_dict(answer), indent=2) if namespace.json else fit_text(answer))
        return 0 if answer.found else REFUSED
    assert planned is not None
    refused = bool(planned.refusals) and not namespace.json
    for note in planned.notes:
        print(f"note: {note}", file=sys.stdout if refused else sys.stderr)
    if namespace.json:
        text = json.dumps(to_dict(planned), indent=2)
    else:
        text = kernel_text(planned) if namespace.kernels else to_text(planned)
    print(text if namespace.json else wrapped(text, "    ", columns(sys.stdout)), flush=True)
    if refused:
        raise Refusal(planned.refusals)
    return REFUSED if planned.refusals else 0


def kernel_text(planned: LaunchPlan) -> str:
    """Device, model and the kernel plan as text."""
    from srv.cli.kernels import kernels_text

    return "\n".join([*_head(planned), "", kernels_text(planned.kernels.kernels)])


def to_text(planned: LaunchPlan) -> str:
    """The whole plan as text."""
    from srv.args.config import all_arguments
    from srv.planning.ledger import predicted_text

    resolved, lines = planned.resolved, _head(planned)
    if sizes := _sizes(planned):
        lines += ["", "[sizes]", *(f"{quantity}: {sentence}" for quantity, sentence in sizes)]
    if planned.experts is not None:
        lines += ["", "[experts]", f"init_expert_location: {planned.experts}"]
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
    if planned.budget is not None:
        lines += [f"{quantity}: {sentence}" for quantity, sentence in planned.budget.breakdown]
        lines += ["", "[memory ledger] of one rank, as predicted; a launch measures it"]
        lines += ["(weights as layers hold them; [sizes] has those of the files)"]
        lines += [f"{line.name}: {predicted_text(line)}" for line in planned.ledger]
    else:
        unknown = "it depends on the model (--model-path)" if planned.model is None else "see the refusals"
        lines.append(f"unknown: {unknown}")
    if planned.unchecked:
        lines += ["", "[not checked]", *planned.unchecked]
    return "\n".join(lines)


def _head(planned: LaunchPlan) -> list[str]:
    """What a launch would refuse, the device and the model."""
    from srv.planning.target import device_text

    lines = _refused_lines(planned)
    lines.append(f"device  {device_text(planned.target.manifest.name, planned.target.device)}")
    lines.append(f"model   {_model_line(planned.model)}")
    return lines


def _refused_lines(planned: LaunchPlan) -> list[str]:
    """What a launch would refuse, in one line; [] if nothing."""
    if not planned.refusals:
        return []
    short = dict.fromkeys(f"{refusal.what} ({refusal.code})" for refusal in planned.refusals)
    return [f"launch would refuse: {', '.join(short)}", ""]


def _model_line(model: ModelFacts | None) -> str:
    if model is None:
        return "none: values that depend on the model are unknown (set one with --model-path)"
    return f"{model.name}, {model.architecture}"


def _sizes(planned: LaunchPlan) -> list[tuple[str, str]]:
    from srv.planning.pools import kv_dtype
    from srv.planning.sizes import size_lines

    if planned.model is None:
        return []
    return size_lines(planned.model, kv_dtype(planned.resolved.config), planned.kernels.layers)


def _sizes_dict(planned: LaunchPlan) -> dict[str, Any] | None:
    from srv.planning.pools import kv_dtype
    from srv.planning.sizes import cache_bytes_per_token, layers_of

    model = planned.model
    if model is None:
        return None
    counted = model.parameters is not None
    return {
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "weight_bytes": model.weight_bytes if model.unknown_sizes is None else None,
        "cache_bytes_per_token": cache_bytes_per_token(model, kv_dtype(planned.resolved.config)) if counted else None,
        "layers": layers_of(model, planned.kernels.layers),
        "unknown": model.unknown_sizes,
    }


def to_dict(planned: LaunchPlan) -> dict[str, Any]:
    """The whole plan as JSON-compatible values."""
    resolved, budget = planned.resolved, planned.budget
    return {
        "accepted": not planned.refusals,
        "refusals": [asdict(refusal) for refusal in planned.refusals],
        "unchecked": list(planned.unchecked),
        "platform": planned.target.manifest.name,
        "device": asdict(planned.target.device),
        "model": planned.model.name if planned.model else None,
        "sizes": _sizes_dict(planned),
        "arguments": resolved.describe(),
        "backends": {
            slot: {
                "name": choice.spec.name,
                "distribution": choice.provider or None,
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
        "experts": None if planned.experts is None else planned.experts.to_dict(),
        "ledger": [{"line": line.name, "predicted_bytes": line.predicted} for line in planned.ledger],
        "kernels": planned.kernels.to_dicts(),
        "notes": list(planned.notes),
    }
