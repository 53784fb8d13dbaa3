"""Rules of prefill and decode on separate servers."""

from __future__ import annotations

from srv.platform.facts import Constraint, Default, Seen

_MODE = "disaggregation_mode"


def _told_to_prefill(argument: str) -> Constraint:
    def check(seen: Seen) -> str | None:
        if seen[_MODE] != "decode" or seen[argument] is None:
            return None
        return "it tells a prefill server of its decode server, and this is the decode server"

    return Constraint(argument, "excluded", check, "Give it to the prefill server alone.", reads=(_MODE,))


def _in_turn(seen: Seen) -> str | None:
    if seen[_MODE] != "decode" or seen["dp_size"] == 1 or seen["prefill_round_robin_balance"]:
        return None
    return "a decode server with replicas must know which of them prefill chose (prefill_round_robin_balance is false)"


def _no_prefixes(seen: Seen) -> str | None:
    if seen[_MODE] != "decode" or seen["disable_radix_cache"]:
        return None
    return "a decode server gets each request's KV from elsewhere and can share none of it"


def _no_graphs(seen: Seen) -> str | None:
    if seen[_MODE] != "prefill" or seen["disable_graphs"]:
        return None
    return "graphs are of output, and a prefill server makes none"


def _ranks_divide(seen: Seen) -> str | None:
    here, there = seen["tp_size"], seen["disaggregation_decode_tp"]
    if seen[_MODE] != "prefill" or there is None or max(here, there) % min(here, there) == 0:
        return None
    return f"neither {here} ranks here (tp_size) nor {there} there are a multiple of the other"


def _same_on_prefill(there: str, here: str) -> Default:
    return Default(
        there,
        lambda seen: seen[here] if seen[_MODE] == "prefill" else None,
        f"the other server is taken to have the same {here}",
        reads=(_MODE, here),
    )


DEFAULTS: tuple[Default, ...] = (
    _same_on_prefill("disaggregation_decode_tp", "tp_size"),
    _same_on_prefill("disaggregation_decode_dp", "dp_size"),
    _same_on_prefill("disaggregation_prefill_pp", "pp_size"),
    Default(
        "disable_graphs",
        lambda seen: True if seen[_MODE] == "prefill" else None,
        "graphs are of output, and a prefill server makes none",
        reads=(_MODE,),
    ),
    Default(
        "disable_radix_cache",
        lambda seen: True if seen[_MODE] == "decode" else None,
        "a decode server gets each request's KV from elsewhere",
        reads=(_MODE,),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    _told_to_prefill("disaggregation_decode_tp"),
    _told_to_prefill("disaggregation_decode_dp"),
    Constraint(
        "disaggregation_decode_tp",
        "not_divisible",
        _ranks_divide,
        "Choose sizes of which one divides the other.",
        reads=(_MODE, "tp_size"),
    ),
    Constraint(
        "dp_size",
        "other_missing",
        _in_turn,
        "Set prefill_round_robin_balance on both servers.",
        reads=(_MODE, "prefill_round_robin_balance"),
    ),
    Constraint("disable_graphs", "excluded", _no_graphs, "Leave it out, or set it to true.", reads=(_MODE,)),
    Constraint("disable_radix_cache", "excluded", _no_prefixes, "Leave it out, or set it to true.", reads=(_MODE,)),
)
