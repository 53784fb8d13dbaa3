"""Which values of a field ask for nothing, so that a request with them is served although the field is not implemented.

Clients send such values for every feature that they know. A field of a request body that is unknown here, or known and
not implemented, is taken with them and refused with any other (docs/adr/0041-values-that-ask-for-nothing.md).

Must not know the bodies: the table holds for a field of this name in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

NOTHING: tuple[object, ...] = (None, False, "", [], {})

# The neutral values of fields for which these are others, or more. Sources: the references of OpenAI, vLLM and SGLang.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # What this server does anyway.
    "best_of": (*NOTHING, 1),
    "detokenize": (None, True),
    "embed_dtype": (*NOTHING, "float32"),
    "endianness": (*NOTHING, "little", "native"),
    "format": (*NOTHING, {"type": "text"}),
    "include_reasoning": (*NOTHING, True),
    "length_penalty": (*NOTHING, 1, 1.0),
    "log_metrics": (None, True),
    "modalities": (*NOTHING, ["text"]),
    "parallel_tool_calls": (*NOTHING, True),
    "priority": (*NOTHING, 0),
    "response_format": (*NOTHING, {"type": "text"}),
    "separate_reasoning": (*NOTHING, True),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (*NOTHING, 1),
    "stream_reasoning": (*NOTHING, True),
    "tool_choice": (*NOTHING, "none", "auto"),  # without tools there is no choice
    "function_call": (*NOTHING, "none", "auto"),
    "truncation": (*NOTHING, "disabled"),
    "truncation_side": (*NOTHING, "left"),
    "verbosity": (*NOTHING, "medium"),
}


def is_neutral(name: str, value: object) -> bool:
    """Whether this value of a field that is not implemented asks for nothing."""
    return any(_same(value, neutral) for neutral in NEUTRAL.get(name, NOTHING))


def _same(left: object, right: object) -> bool:
    """Equality that distinguishes 1, 1.0 and True."""
    return type(left) is type(right) and left == right
