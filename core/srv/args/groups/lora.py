"""Arguments of LoRA adapters: low-rank additions to the weights, selected per request."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import adapters, all_or_some, at_least, one_of
from srv.args.spec import Arg

_LATER = "LoRA adapters are not implemented yet"


class LoraArgs(NamedTuple):
    """Which adapters are served, and how many of them at a time."""

    enable_lora: Annotated[bool, Arg("Let requests select an adapter.", planned=_LATER)] = False
    lora_paths: Annotated[
        tuple[str, ...] | None,
        Arg("Adapters to load at start-up.", adapters(), planned=_LATER, metavar="ADAPTER"),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        Arg(
            "Highest rank of an adapter; that of the adapters loaded at start-up if not set.",
            at_least(1),
            planned=_LATER,
            metavar="RANK",
        ),
    ] = None
    lora_target_modules: Annotated[
        tuple[str, ...] | None,
        Arg(
            "Modules that adapters may change; those of the adapters loaded at start-up if not set.",
            all_or_some(
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
                "qkv_proj",
                "gate_up_proj",
            ),
            planned=_LATER,
            metavar="MODULE",
        ),
    ] = None
    max_loras_per_batch: Annotated[
        int,
        Arg(
            "Maximum number of adapters in one step; the base model counts as one.",
            at_least(1),
            planned=_LATER,
            metavar="ADAPTERS",
        ),
    ] = 8
    max_loaded_loras: Annotated[
        int | None, Arg("Maximum number of adapters in host memory.", at_least(1), planned=_LATER, metavar="ADAPTERS")
    ] = None
    lora_eviction_policy: Annotated[
        Literal["lru", "fifo"],
        Arg("Which adapter is evicted first: the least recently used one, or the oldest.", planned=_LATER),
    ] = "lru"
    lora_backend: Annotated[
        Literal["triton", "csgmv"], Arg("Kernels that apply several adapters in one step.", planned=_LATER)
    ] = "triton"
    max_lora_chunk_size: Annotated[
        int,
        Arg(
            "Maximum number of tokens in one chunk of the csgmv kernels.",
            one_of(16, 32, 64, 128),
            planned=_LATER,
            unit="tokens",
        ),
    ] = 16
