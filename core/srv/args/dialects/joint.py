"""Conversions that look beyond their flag: at the other flags of the command line, and at the device."""

from __future__ import annotations

from collections.abc import Callable

from srv.args.dialects.given import Converted, Given, Outcome, Unfit, no_number, to
from srv.args.dialects.values import fraction_of, size_in_bytes, tokens, whole
from srv.args.statement import amount_text


def memory_fraction(given: Given) -> Outcome:
    """Bytes that the engine takes of a device (below zero: that it leaves) as a fraction of the device's memory."""
    return _fraction(given, lambda number, total: number if number >= 0 else total + number)


def memory_left(given: Given) -> Outcome:
    """Memory that the engine must leave free, in units of the row's factor, as the fraction that it takes."""
    return _fraction(given, lambda number, total: total - number * int(given.row.factor))


def _fraction(given: Given, taken: Callable[[int, int], int]) -> Outcome:
    number = size_in_bytes(given.text)
    if number is None:
        return no_number(given, "a number of bytes")
    total = given.device_memory()
    if not total:
        return Unfit(
            "needs_device_memory",
            f"{given.row.to} is a fraction, and of a device whose memory is not known here",
            f"Name the device (--device NAME:PROFILE,memory=64GiB), or say --{given.row.to.replace('_', '-')} instead.",
        )
    part = taken(number, total)
    if not 0 < part < total:
        reason = f"that comes to {part} of the {total} bytes of the device"
        return Unfit("bad_value", reason, "Give a size between 0 and the device's memory.")
    return to(given, fraction_of(part, total), f"of {amount_text(total, 'bytes')}")


def product(given: Given) -> Outcome:
    """The product of this flag's number (1 for a switch) and those of its partners; 0 and false say nothing of it.

    Partners are written as "--flag" or, with what the engine takes if it is not given, "--flag=16".
    """
    own = {"true": 1, "false": None}.get(given.text, whole(given.text))
    if own is None:
        return Converted({}) if given.text == "false" else no_number(given, "a whole number")
    numbers = [] if given.text == "true" or own == 0 else [own]
    for partner in given.row.partners:
        flag, _, default = partner.partition("=")
        number = whole(given.other(flag, default or "1"))
        if number is None:
            return Unfit("bad_value", f"{flag} says no whole number", f"Give {flag} a whole number.")
        numbers.append(number)
    result = 1
    for number in numbers:
        result *= number
    return to(given, str(result), "= " + " x ".join(map(str, numbers)) if len(numbers) > 1 else "")


def unless_zero(given: Given) -> Outcome:
    """The number as it is; 0 stands for the product of the partners."""
    return product(given) if whole(given.text) == 0 else to(given, given.text)


def replicas(given: Given) -> Outcome:
    """A number of devices in all, of which the partner says how many share a model: replicas of the model."""
    (partner,) = given.row.partners
    devices, shared = whole(given.text), whole(given.other(partner, "1"))
    if not devices or not shared or devices < 0 or shared < 0:
        return no_number(given, "a whole number above zero")
    if devices % shared:
        reason = f"{devices} devices cannot be shared out by {partner} {shared}"
        return Unfit("contradiction", reason, f"Give a multiple of {partner}.")
    return to(given, str(devices // shared), f"{devices} devices, {shared} to a replica")


def nodes(given: Given) -> Outcome:
    """Devices of this node, of a number in all: nodes. The partners: all devices, or else the sizes that make them."""
    here = whole(given.text)
    total = _devices(given)
    if not here or here < 0 or not total:
        return no_number(given, "a whole number above zero")
    if total % here and here < total:
        reason = f"{total} devices in all cannot be shared out over nodes of {here}"
        return Unfit("contradiction", reason, "Give each node the same number of devices.")
    return to(given, str(max(1, total // here)), f"{total} devices, {here} to a node")


def _devices(given: Given) -> int | None:
    world, *sizes = given.row.partners
    if given.other(world):
        return whole(given.other(world))
    total = 1
    for size in sizes:
        total *= whole(given.other(size, "1")) or 0
    return total


def node_of_rank(given: Given) -> Outcome:
    """A device's number among all: its node's number. The partner says how many devices a node has."""
    (partner,) = given.row.partners
    rank, here = whole(given.text), whole(given.other(partner, "0"))
    if rank is None or here is None or rank < 0 or here < 0:
        return no_number(given, "a whole number of 0 or more")
    if rank and not here:
        reason = "which node that is follows only from the number of devices of a node"
        return Unfit("needs_flag", reason, f"Give {partner} too, or say --node-rank instead.")
    if rank and rank % here:
        reason = f"rank {rank} is not the first of its node, and srv starts all ranks of a node itself"
        return Unfit("one_start_a_node", reason, f"Start srv once a node, for the ranks 0, {here}, {2 * here}, ...")
    return to(given, str(rank // here if here else 0), "start srv once a node, not once a rank")


def concurrency(given: Given) -> Outcome:
    """Most requests in the system. With a batch size (the first partner) what is above it may wait; else all run.

    The second partner is the switch that lets requests wait without limit.
    """
    batch_flag, waiting = given.row.partners
    limit, batch = whole(given.text), whole(given.other(batch_flag, "0"))
    if limit is None or batch is None:
        return no_number(given, "a whole number")
    if batch == 0:
        return Converted({"max_running_requests": str(limit)})
    if batch > limit:
        reason = f"{batch_flag} {batch} is more than the {limit} that it lets in"
        return Unfit("contradiction", reason, f"Give {batch_flag} {limit}, or leave it out.")
    if given.other(waiting) == "true" or batch == limit:
        return Converted({}, f"{batch_flag} says how many run")
    return Converted({"max_queued_requests": str(limit - batch)}, f"{batch} run, the others wait")


def step_budget(given: Given) -> Outcome:
    """Most tokens of a step: where prompts are cut (unless the partner says not), that is the size of a piece."""
    number = tokens(given.text)
    if number is None:
        return no_number(given, "a number of tokens")
    (cutting,) = given.row.partners
    name = "max_prefill_tokens" if given.other(cutting) == "false" else "chunked_prefill_size"
    return Converted({name: str(number)})


def draft_tokens(given: Given) -> Outcome:
    """Draft tokens a step, in one chain. By prompt lookup they are counted; a draft model makes one in each step."""
    number = whole(given.text)
    if number is None or number < 1:
        return no_number(given, "a whole number above zero")
    (method,) = given.row.partners
    if given.other(method) in ("ngram", "[ngram]"):
        return Converted({"speculative_num_draft_tokens": str(number)})
    steps = {"speculative_num_steps": str(number), "speculative_eagle_topk": "1"}
    note = "the token that the model itself adds is counted too"
    return Converted({**steps, "speculative_num_draft_tokens": str(number + 1)}, note)


def address(given: Given) -> Outcome:
    """A host, and the port that the partner says ("--flag=29501" with its default)."""
    flag, _, default = given.row.partners[0].partition("=")
    host = f"[{given.text}]" if ":" in given.text and not given.text.startswith("[") else given.text
    return to(given, f"{host}:{given.other(flag, default)}")
