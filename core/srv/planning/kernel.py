"""One line of a kernel plan: what computes a part of a model, why that, and why nothing else. Torch-free data.

Also owns the keys by which plans and running engines name the same part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.platform.facts import WRITE_KV
from srv.platform.op_choice import op_key

LAYERS, WEIGHTS, SAMPLING = "layers", "weights", "sampling"
ATTENTION_SLOTS = ("prefill_attention_backend", "decode_attention_backend")
SAMPLING_SLOT = "sampling_backend"
DEQUANTIZED = "dequantized at load"


class Kernel(NamedTuple):
    """What computes one part of every step.

    `part`: "layers", "attention", "op", "sampling" or "steps". `what`: the part in words. `key`: its name in plans and
    in what a running engine reports. `name`: the implementation; None if it is not known before the layers are built,
    and `because` then says why. `rejected`: the others, each with its reason. `slower`: why none of the faster ones is
    used, where this is a fallback; "" if it is not, or if the user chose it. `rounds`: as that of an `OpSpec`.
    """

    part: str
    what: str
    key: str
    name: str | None
    because: str
    rejected: tuple[tuple[str, str], ...] = ()
    slower: str = ""
    rounds: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "what": self.what,
            "key": self.key,
            "implementation": self.name,
            "because": self.because,
            "rejected": dict(self.rejected),
            "slower_because": self.slower or None,
        }


def layers_name(*, native: bool) -> str:
    return "native layers" if native else "transformers"


def attention_key(group: int, slot: str) -> str:
    """Of a cache group. `slot`: the argument that selects the backend ("decode_attention_backend")."""
    return f"attention {slot.partition('_')[0]} group={group}"


def write_key(slot: str) -> str:
    """Of what writes keys and values for the backend of a slot."""
    return f"{WRITE_KV} {slot.partition('_')[0]}"


def logits_key(dtype: str, sizes: Mapping[str, int]) -> str:
    """Of an output layer whose results should be float32."""
    return op_key("logits", dtype, sizes)
