"""Arguments of LoRA adapters: small additions to the weights, chosen by each request."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import adapters, all_or_some, at_least, one_of
from srv.args.spec import Arg

_LATER = "LoRA adapters are not implemented yet"


class LoraArgs(NamedTuple):
    """Which adapters there are, and how many at a time."""

    enable_lora: Annotated[bool, Arg("Let requests name an adapter.", planned=_LATER)] = False
    lora_paths: Annotated[
        tuple[str, ...] | None,
        Arg("Adapters to load at the start.", adapters(), planned=_LATER, metavar="ADAPTER"),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        Arg(
            "Highest rank of an adapter; that of the adapters loaded at the start if not set.",
            at_least(1),
            planned=_LATER,
            metavar="RANK",
        ),
    ] = None
    lora_target_modules: Annotated[
        tuple[str, ...] | None,
        Arg(
            "Layers that adapters may change; those of the adapters loaded at the start if not set.",
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
            metavar="LAYER",
        ),
    ] = None
    max_loras_per_batch: Annotated[
        int,
        Arg(
            "Most adapters in one step; the bare model counts as one.", at_least(1), planned=_LATER, metavar="ADAPTERS"
        ),
    ] = 8
    max_loaded_loras: Annotated[
        int | None, Arg("Most adapters in host memory.", at_least(1), planned=_LATER, metavar="ADAPTERS")
    ] = None
    lora_eviction_policy: Annotated[
        Literal["lru", "fifo"],
        Arg("Which adapter makes room first: the one not used for longest, or the oldest.", planned=_LATER),
    ] = "lru"
    lora_backend: Annotated[
        Literal["triton", "csgmv"], Arg("Kernels that apply several adapters in one step.", planned=_LATER)
    ] = "triton"
    max_lora_chunk_size: Annotated[
        int,
        Arg("Most tokens in one block of the csgmv kernels.", one_of(16, 32, 64, 128), planned=_LATER, unit="tokens"),
    ] = 16
