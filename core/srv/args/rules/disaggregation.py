"""Rules for prefill and decode on separate servers."""

from __future__ import annotations

from srv.platform.facts import Constraint, Default, ResolutionContext

_MODE = "disaggregation_mode"


def _prefill_server_only(argument: str) -> Constraint:
    def check(context: ResolutionContext) -> str | None:
        if context[_MODE] != "decode" or context[argument] is None:
            return None
        return "it describes the decode server to a prefill server, and this is a decode server"

    return Constraint(argument, "excluded", check, "Set it on the prefill server only.", reads=(_MODE,))


def _replicas_need_round_robin(context: ResolutionContext) -> str | None:
    if context[_MODE] != "decode" or context["dp_size"] == 1 or context["prefill_round_robin_balance"]:
        return None
    return "replicas of a decode server need round-robin balancing (prefill_round_robin_balance is false)"


def _no_prefix_cache_on_decode(context: ResolutionContext) -> str | None:
    if context[_MODE] != "decode" or context["disable_radix_cache"]:
        return None
    return "a decode server receives the KV of each request and cannot share it between requests"


def _no_graphs_on_prefill(context: ResolutionContext) -> str | None:
    if context[_MODE] != "prefill" or context["disable_graphs"]:
        return None
    return "graphs are captured for decode steps, and a prefill server runs none"


def _ranks_divide(context: ResolutionContext) -> str | None:
    prefill, decode = context["tp_size"], context["disaggregation_decode_tp"]
    if context[_MODE] != "prefill" or decode is None or max(prefill, decode) % min(prefill, decode) == 0:
        return None
    return f"neither of tp_size {prefill} here and {decode} on the decode server is a multiple of the other"


def _same_as_prefill(decode_argument: str, prefill_argument: str) -> Default:
    return Default(
        decode_argument,
        lambda context: context[prefill_argument] if context[_MODE] == "prefill" else None,
        f"the other server is assumed to have the same {prefill_argument}",
        reads=(_MODE, prefill_argument),
    )


DEFAULTS: tuple[Default, ...] = (
    _same_as_prefill("disaggregation_decode_tp", "tp_size"),
    _same_as_prefill("disaggregation_decode_dp", "dp_size"),
    _same_as_prefill("disaggregation_prefill_pp", "pp_size"),
    Default(
        "disable_graphs",
        lambda context: True if context[_MODE] == "prefill" else None,
        "graphs are captured for decode steps, and a prefill server runs none",
        reads=(_MODE,),
    ),
    Default(
        "disable_radix_cache",
        lambda context: True if context[_MODE] == "decode" else None,
        "a decode server receives the KV of each request from a prefill server",
        reads=(_MODE,),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    _prefill_server_only("disaggregation_decode_tp"),
    _prefill_server_only("disaggregation_decode_dp"),
    Constraint(
        "disaggregation_decode_tp",
        "not_divisible",
        _ranks_divide,
        "Choose sizes one of which is a multiple of the other.",
        reads=(_MODE, "tp_size"),
    ),
    Constraint(
        "dp_size",
        "other_missing",
        _replicas_need_round_robin,
        "Set prefill_round_robin_balance on both servers.",
        reads=(_MODE, "prefill_round_robin_balance"),
    ),
    Constraint("disable_graphs", "excluded", _no_graphs_on_prefill, "Leave it out, or set it to true.", reads=(_MODE,)),
    Constraint(
        "disable_radix_cache",
        "excluded",
        _no_prefix_cache_on_decode,
        "Leave it out, or set it to true.",
        reads=(_MODE,),
    ),
)
