"""Conversions that depend on more than their own flag: on other flags of the command line, or on the device."""

from __future__ import annotations

from collections.abc import Callable

from srv.args.dialects.interface import ConversionInput, Converted, Outcome, Untranslatable, set_argument, wrong_type
from srv.args.dialects.single import choice
from srv.args.dialects.values import fraction_of, parse_integer, size_in_bytes, tokens
from srv.args.statement import amount_text


def memory_fraction(setting: ConversionInput) -> Outcome:
    """Bytes of device memory that the engine uses (if negative: leaves free), as a fraction of the device memory."""
    return _fraction(setting, lambda number, total: number if number >= 0 else total + number)


def memory_left(setting: ConversionInput) -> Outcome:
    """Memory that the engine leaves free, in units of the row's factor, as the fraction that it uses."""
    return _fraction(setting, lambda number, total: total - number * int(setting.row.factor))


def _fraction(setting: ConversionInput, used: Callable[[int, int], int]) -> Outcome:
    number = size_in_bytes(setting.text)
    if number is None:
        return wrong_type(setting, "a number of bytes")
    total = setting.device_memory()
    if not total:
        return Untranslatable(
            "needs_device_memory",
            f"{setting.row.to} is a fraction of the device memory, and the device is not known",
            f"Name the device (--device NAME:PROFILE,memory=64GiB), or set --{setting.row.to.replace('_', '-')}"
            " instead.",
        )
    part = used(number, total)
    if not 0 < part < total:
        reason = f"that is {part} of the {total} bytes of the device"
        return Untranslatable("bad_value", reason, "Give a size between 0 and the device's memory.")
    return set_argument(setting, fraction_of(part, total), f"of {amount_text(total, 'bytes')}")


def product(setting: ConversionInput) -> Outcome:
    """The product of this flag's number (1 for a switch) and those of its partners; 0 and false set nothing.

    Partners have the form "--flag" or, with the engine's default, "--flag=16".
    """
    factor = {"true": 1, "false": None}.get(setting.text, parse_integer(setting.text))
    if factor is None:
        return Converted({}) if setting.text == "false" else wrong_type(setting, "an integer")
    numbers = [] if setting.text == "true" or factor == 0 else [factor]
    for partner in setting.row.partners:
        flag, _, default = partner.partition("=")
        number = parse_integer(setting.other(flag, default or "1"))
        if number is None:
            return Untranslatable("bad_value", f"{flag} is not an integer", f"Set {flag} to an integer.")
        numbers.append(number)
    result = 1
    for number in numbers:
        result *= number
    return set_argument(setting, str(result), "= " + " x ".join(map(str, numbers)) if len(numbers) > 1 else "")


def unless_zero(setting: ConversionInput) -> Outcome:
    """The number, unchanged; 0 stands for the product of the partners."""
    return product(setting) if parse_integer(setting.text) == 0 else set_argument(setting, setting.text)


def replicas(setting: ConversionInput) -> Outcome:
    """The total number of devices, divided by the number that share a model (the partner): the number of replicas."""
    (partner,) = setting.row.partners
    devices, shared = parse_integer(setting.text), parse_integer(setting.other(partner, "1"))
    if not devices or not shared or devices < 0 or shared < 0:
        return wrong_type(setting, "a positive integer")
    if devices % shared:
        reason = f"{devices} devices cannot be divided by {partner} {shared}"
        return Untranslatable("contradiction", reason, f"Set it to a multiple of {partner}.")
    return set_argument(setting, str(devices // shared), f"{devices} devices, {shared} per replica")


def nodes(setting: ConversionInput) -> Outcome:
    """The total number of devices divided by those of this node: the number of nodes.

    The first partner is the total; if it is not given, the total is the product of the other partners.
    """
    per_node = parse_integer(setting.text)
    total = _devices(setting)
    if not per_node or per_node < 0 or not total:
        return wrong_type(setting, "a positive integer")
    if total % per_node and per_node < total:
        reason = f"{total} devices cannot be distributed over nodes of {per_node} devices"
        return Untranslatable("contradiction", reason, "Give each node the same number of devices.")
    return set_argument(setting, str(max(1, total // per_node)), f"{total} devices, {per_node} per node")


def _devices(setting: ConversionInput) -> int | None:
    world, *sizes = setting.row.partners
    if setting.other(world):
        return parse_integer(setting.other(world))
    total = 1
    for size in sizes:
        total *= parse_integer(setting.other(size, "1")) or 0
    return total


def node_of_rank(setting: ConversionInput) -> Outcome:
    """The rank of a device, divided by the number of devices per node (the partner): the rank of its node."""
    (partner,) = setting.row.partners
    rank, per_node = parse_integer(setting.text), parse_integer(setting.other(partner, "0"))
    if rank is None or per_node is None or rank < 0 or per_node < 0:
        return wrong_type(setting, "a non-negative integer")
    if rank and not per_node:
        reason = "the rank of the node depends on the number of devices per node"
        return Untranslatable("needs_flag", reason, f"Set {partner} too, or set --node-rank instead.")
    if rank and rank % per_node:
        reason = f"rank {rank} is not the first rank of its node, and srv starts all ranks of a node itself"
        return Untranslatable(
            "one_start_a_node", reason, f"Start srv once per node, for the ranks 0, {per_node}, {2 * per_node}, ..."
        )
    return set_argument(setting, str(rank // per_node if per_node else 0), "start srv once per node, not once per rank")


def concurrency(setting: ConversionInput) -> Outcome:
    """Maximum number of requests, running and waiting. Without a batch size (the first partner) all of them run.

    The second partner is a switch that allows any number of requests to wait.
    """
    batch_flag, waiting = setting.row.partners
    limit, batch = parse_integer(setting.text), parse_integer(setting.other(batch_flag, "0"))
    if limit is None or batch is None:
        return wrong_type(setting, "an integer")
    if batch == 0:
        return Converted({"max_running_requests": str(limit)})
    if batch > limit:
        reason = f"{batch_flag} {batch} is more than the {limit} requests that it admits"
        return Untranslatable("contradiction", reason, f"Set {batch_flag} to {limit}, or leave it out.")
    if setting.other(waiting) == "true" or batch == limit:
        return Converted({}, f"{batch_flag} limits the running requests")
    return Converted({"max_queued_requests": str(limit - batch)}, f"{batch} requests run, the others wait")


def step_budget(setting: ConversionInput) -> Outcome:
    """Maximum number of tokens per step: the chunk size, unless the partner disables chunked prefill."""
    number = tokens(setting.text)
    if number is None:
        return wrong_type(setting, "a number of tokens")
    (chunked_prefill,) = setting.row.partners
    name = "max_prefill_tokens" if setting.other(chunked_prefill) == "false" else "chunked_prefill_size"
    return Converted({name: str(number)})


def whole_prompts(setting: ConversionInput) -> Outcome:
    """A limit on the prompts of a step, which matters only where the partner says that they are not split."""
    (chunk,) = setting.row.partners
    if parse_integer(setting.other(chunk)) == -1:
        return set_argument(setting, setting.text)
    size = setting.other(chunk)
    return Converted({}, f"prompts are split, so that {f'{chunk} {size}' if size else chunk} limits those of a step")


def scattered_input(setting: ConversionInput) -> Outcome:
    """A switch that its engine ignores with data-parallel attention (the first partner) and where tokens are sent to
    experts on other ranks (the second)."""
    attention, experts = setting.row.partners
    if setting.other(attention) == "true":
        return Converted({}, f"it has no effect with {attention}")
    if setting.other(experts, "none") != "none":
        return Converted({}, f"it has no effect with {experts} {setting.other(experts)}")
    return set_argument(setting, setting.text)


def with_partner(setting: ConversionInput) -> Outcome:
    """A switch that its engine ignores without the partner, another switch."""
    (partner,) = setting.row.partners
    if setting.other(partner) == "true":
        return set_argument(setting, setting.text)
    return Converted({}, f"it has no effect without {partner}")


def draft_tokens(setting: ConversionInput) -> Outcome:
    """Draft tokens per step, as one chain; a draft model generates one of them in each of its own steps.

    `speculative_num_draft_tokens` counts the token before them as well, which the model verifies with them.
    """
    number = parse_integer(setting.text)
    if number is None or number < 1:
        return wrong_type(setting, "a positive integer")
    (method,) = setting.row.partners
    by_lookup = setting.other(method) in ("ngram", "[ngram]")
    steps = {} if by_lookup else {"speculative_num_steps": str(number), "speculative_eagle_topk": "1"}
    note = "the token that the model itself adds is included"
    return Converted({**steps, "speculative_num_draft_tokens": str(number + 1)}, note)


def address(setting: ConversionInput) -> Outcome:
    """A host, and the port of the partner ("--flag=29501" includes the default)."""
    flag, _, default = setting.row.partners[0].partition("=")
    host = f"[{setting.text}]" if ":" in setting.text and not setting.text.startswith("[") else setting.text
    return set_argument(setting, f"{host}:{setting.other(flag, default)}")


def kv_role(setting: ConversionInput) -> Outcome:
    """The server's part in the transfer of KV pages: both only if they go to a cache tier."""
    if setting.text.lower() != "kv_both":
        return choice(setting)
    if setting.other("kv_connector").lower().startswith("lmcache"):
        return Converted({}, "LMCache both stores and loads pages")
    reason = "a server of srv either computes prompts for others or decodes what others computed"
    return Untranslatable("no_equivalent_value", reason, "Start two servers, with kv_producer and kv_consumer.")
