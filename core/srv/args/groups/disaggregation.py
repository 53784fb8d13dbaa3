"""Arguments for prompts and output on different servers, or on different parts of one device."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, between, not_empty
from srv.args.spec import Arg

_LATER = "prefill and decode on separate servers are not implemented yet"
_MULTIPLEX = "prompts and output on separate parts of one device are not implemented yet"


class DisaggregationArgs(NamedTuple):
    """Which half this server does, and how KV gets to the other."""

    disaggregation_mode: Annotated[
        Literal["null", "prefill", "decode"],
        Arg("Whether this server does prompts only, output only, or both (null).", planned=_LATER),
    ] = "null"
    disaggregation_transfer_backend: Annotated[
        str, Arg("What carries KV from prefill to decode.", not_empty(), planned=_LATER, metavar="NAME")
    ] = "mooncake"
    disaggregation_bootstrap_port: Annotated[
        int, Arg("Port of the prefill server on which decode servers find it.", between(1, 65535), planned=_LATER)
    ] = 8998
    disaggregation_decode_tp: Annotated[
        int | None,
        Arg(
            "Tensor-parallel ranks of the decode server, told to prefill.", at_least(1), planned=_LATER, metavar="RANKS"
        ),
    ] = None
    disaggregation_decode_dp: Annotated[
        int | None,
        Arg("Replicas of the decode server, told to prefill.", at_least(1), planned=_LATER, metavar="REPLICAS"),
    ] = None
    disaggregation_prefill_pp: Annotated[
        int,
        Arg("Pipeline stages of the prefill server, told to decode.", at_least(1), planned=_LATER, metavar="STAGES"),
    ] = 1
    disaggregation_ib_device: Annotated[
        str | None,
        Arg(
            "InfiniBand devices that carry KV, separated by commas; found by the backend if not set.",
            not_empty(),
            planned=_LATER,
            metavar="NAMES",
        ),
    ] = None
    disaggregation_decode_enable_offload_kvcache: Annotated[
        bool, Arg("Let a decode server move KV to the tiers below its pool.", planned=_LATER)
    ] = False
    disaggregation_decode_polling_interval: Annotated[
        int,
        Arg("Steps of a decode server between two looks for arrived KV.", at_least(1), planned=_LATER, unit="steps"),
    ] = 1
    num_reserved_decode_tokens: Annotated[
        int,
        Arg("Room that a decode server keeps for each request's output.", at_least(1), planned=_LATER, unit="tokens"),
    ] = 512
    enable_pdmux: Annotated[
        bool, Arg("Run prompts and output side by side on parts of one device.", planned=_MULTIPLEX)
    ] = False
    pdmux_config_path: Annotated[Path | None, Arg("File that says how the device is divided.", planned=_MULTIPLEX)] = (
        None
    )
    sm_group_num: Annotated[
        int, Arg("Ways to divide the device that are prepared.", at_least(1), planned=_MULTIPLEX, metavar="COUNT")
    ] = 8
