"""Arguments for prefill and decode on separate servers, or on separate partitions of one device."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, between, not_empty
from srv.args.spec import Arg

_LATER = "prefill and decode on separate servers are not implemented yet"
_MULTIPLEX = "prefill and decode on separate partitions of one device are not implemented yet"


class DisaggregationArgs(NamedTuple):
    """The role of this server, and how KV is transferred to the other one."""

    disaggregation_mode: Annotated[
        Literal["null", "prefill", "decode"],
        Arg("Role of this server: prefill only, decode only, or both (null).", planned=_LATER),
    ] = "null"
    disaggregation_transfer_backend: Annotated[
        str, Arg("Backend that transfers KV from prefill to decode.", not_empty(), planned=_LATER, metavar="NAME")
    ] = "mooncake"
    disaggregation_bootstrap_port: Annotated[
        int,
        Arg(
            "Bootstrap port of the prefill server, to which decode servers connect.", between(1, 65535), planned=_LATER
        ),
    ] = 8998
    disaggregation_decode_tp: Annotated[
        int | None,
        Arg(
            "Tensor-parallel ranks of the decode server; for a prefill server.",
            at_least(1),
            planned=_LATER,
            metavar="RANKS",
        ),
    ] = None
    disaggregation_decode_dp: Annotated[
        int | None,
        Arg("Replicas of the decode server; for a prefill server.", at_least(1), planned=_LATER, metavar="REPLICAS"),
    ] = None
    disaggregation_prefill_pp: Annotated[
        int,
        Arg(
            "Pipeline stages of the prefill server; for a decode server.", at_least(1), planned=_LATER, metavar="STAGES"
        ),
    ] = 1
    disaggregation_ib_device: Annotated[
        str | None,
        Arg(
            "InfiniBand devices for the transfer of KV, comma-separated; found by the backend if not set.",
            not_empty(),
            planned=_LATER,
            metavar="NAMES",
        ),
    ] = None
    disaggregation_decode_enable_offload_kvcache: Annotated[
        bool, Arg("Let a decode server offload KV to the cache tiers below its pool.", planned=_LATER)
    ] = False
    disaggregation_decode_polling_interval: Annotated[
        int,
        Arg(
            "Steps of a decode server between two polls for transferred KV.", at_least(1), planned=_LATER, unit="steps"
        ),
    ] = 1
    num_reserved_decode_tokens: Annotated[
        int,
        Arg(
            "Tokens that a decode server reserves for the output of each request.",
            at_least(1),
            planned=_LATER,
            unit="tokens",
        ),
    ] = 512
    enable_pdmux: Annotated[
        bool, Arg("Run prefill and decode concurrently on partitions of one device.", planned=_MULTIPLEX)
    ] = False
    pdmux_config_path: Annotated[
        Path | None, Arg("File that defines the partitions of the device.", planned=_MULTIPLEX)
    ] = None
    sm_group_num: Annotated[
        int, Arg("Number of partition groups of the device.", at_least(1), planned=_MULTIPLEX, metavar="COUNT")
    ] = 8
