"""Model types that srv does not serve, whatever their sizes, and what it lacks for them. Torch-free.

Their configurations may have fields of any names, so that a search for sizes would complain of one that is missing.
Must not know model types that only some configurations of are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_NO_ATTENTION = "has no attention: it keeps a recurrent state, which no native layers compute"
_DRAFTS = "only assists another model, from whose hidden states and keys it drafts: srv has no such drafter"
_AUDIO = (
    "generates audio from what an encoder computes of a text, a token of each of several codebooks at a time: srv"
    " generates one token at a time, of text"
)
_OWN = "and its class in transformers does not support attention backends"
# Clauses whose subject is the class of a model.
UNSERVED: Mapping[str, str] = MappingProxyType(
    {
        "blt": "attends to patches of bytes, whose lengths another model in it chooses: srv caches one entry per token",
        "cpmant": f"adds biases of relative positions and segments to its scores, {_OWN}",
        "deepseek_v4": "attends, beyond a window, to compressed keys and values of the tokens before it"
        " (`compress_ratios`), which neither native layers nor srv's pools hold",
        "falcon_mamba": _NO_ATTENTION,
        "gemma4_assistant": _DRAFTS,
        "gemma4_unified_assistant": _DRAFTS,
        "musicgen": _AUDIO,
        "musicgen_decoder": _AUDIO,
        "musicgen_melody": _AUDIO,
        "musicgen_melody_decoder": _AUDIO,
        "rwkv": _NO_ATTENTION,
        "xlm": f"attends in both directions unless `causal` is set, {_OWN}",
        "xlnet": f"attends by relative positions, with scores of its own, {_OWN}",
        "xlstm": _NO_ATTENTION,
        "zaya": "has recurrent states within its attention: queries and keys pass two convolutions over time, and a"
        " part of each value is that of the token before; its experts are chosen by hidden states of the router of the"
        " layer before. No native layers compute these",
    }
)


def reason_of(config: Mapping[str, Any]) -> str | None:
    """Why a model is not served, a clause; None if its type does not say. `config`: as in its file."""
    return UNSERVED.get(str(config.get("model_type")))
