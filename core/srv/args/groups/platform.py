"""Arguments that choose a platform, and its backends and types within it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from srv.args.checks import not_empty
from srv.args.spec import Arg


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformArgs:
    """Where the model runs, and through which backends."""

    device: Annotated[
        str | None,
        Arg(
            "Platform to run on, as `srv platforms` lists them; the best available one if not set.",
            check=not_empty(),
            metavar="NAME[:PROFILE]",
        ),
    ] = None
    attention_backend: Annotated[
        str | None, Arg("Attention backend, for prompts and for output.", family="attention", metavar="NAME")
    ] = None
    prefill_attention_backend: Annotated[
        str | None,
        Arg("Attention backend for prompts; goes before --attention-backend.", family="attention", metavar="NAME"),
    ] = None
    decode_attention_backend: Annotated[
        str | None,
        Arg("Attention backend for output; goes before --attention-backend.", family="attention", metavar="NAME"),
    ] = None
    sampling_backend: Annotated[str | None, Arg("Backend that draws tokens.", family="sampling", metavar="NAME")] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Arg("Type of keys and values in the KV pool; auto takes that of the activations."),
    ] = "auto"
