"""In captured steps, int8 keys and values are rounded towards zero, not to the nearest integer.

Caught by graph.kv_dtypes at L2, naming "over int8".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, of_8_bits, rounding
from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext

MANIFEST = manifest("graph_int8_truncates", attention="graph_int8_truncates:attention", **of_8_bits("int8_kv"))


def attention(context: BackendContext) -> Any:
    return rounding(context, rounded)


def rounded(call: Call, x: torch.Tensor, scale: float) -> torch.Tensor:
    unit = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    counts = x.float() / unit
    return (counts.trunc() if call.captured else counts.round()) * unit  # the fault
