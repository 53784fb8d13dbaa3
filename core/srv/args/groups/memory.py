"""Arguments that divide a device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from srv.args.checks import at_least, fraction
from srv.args.spec import Arg


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryArgs:
    """How much memory weights and KV pool take, and how the pool is cut."""

    mem_fraction_static: Annotated[
        float, Arg("Part of the device's memory for weights and KV pool together.", fraction(), metavar="FRACTION")
    ] = 0.88
    max_total_tokens: Annotated[
        int | None,
        Arg("Most tokens in the KV pool; if not set, memory alone is the limit.", at_least(2), unit="tokens"),
    ] = None
    page_size: Annotated[
        int, Arg("Tokens in one page of the KV pool.", at_least(1), needs="paged_kv", unit="tokens")
    ] = 1
    disable_radix_cache: Annotated[bool, Arg("Do not keep the KV of finished requests for equal prefixes.")] = False
