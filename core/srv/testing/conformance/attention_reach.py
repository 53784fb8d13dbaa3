"""L2: sinks, temperature, attention within chunks and to later tokens, in every backend that accepts such models."""

from __future__ import annotations

from typing import Any

import torch

from srv.testing.conformance.attention import LONG_ROW, SOFT_CAP, check_typical, run_each
from srv.testing.conformance.bench import PAGES, Bench
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.setups import AttentionSetup, select_setups

# Classes without native layers: the fields alone tell which attention they have.
SINKS = {"architectures": ["FlintForCausalLM"], "model_type": "flint"}
CHUNKS = {"architectures": ["InChunksForCausalLM"], "model_type": "in_chunks", "attention_chunk_size": 5}
_TEMPERATURE = 4
SHARPENED = {"architectures": ["SharpenedForCausalLM"], "model_type": "sharpened", "attn_temperature_len": _TEMPERATURE}
_ENCODER = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "type_vocab_size": 2}
_LOCAL = 5


def sinks(kit: Kit) -> str:
    """Layers with a score per head that has no value, in short rows and in one whose keys kernels divide."""

    def check(setup: AttentionSetup) -> None:
        traits = with_sinks(setup)
        check_typical(kit, setup, "attention sinks", **traits)
        further: dict[str, Any] = {"window": 5, "soft_cap": SOFT_CAP}
        for trait in further.keys() & set(setup.spec.traits):
            check_typical(kit, setup, f"attention sinks with {trait}", **traits, **{trait: further[trait]})
        bench = Bench(kit, setup, **traits)
        lengths = (min(LONG_ROW, PAGES // 2 * setup.layout.page_size), 5, 1, 8, 2)
        rows = [bench.sequence() for _ in lengths]
        bench.step(list(zip(rows, lengths, strict=True)), "attention sinks")
        bench.step([(row, 1) for row in rows], "attention sinks of a long row and short ones")

    return run_each(select_setups(kit, fields=SINKS), check)


def with_sinks(setup: AttentionSetup) -> dict[str, Any]:
    """The fields of a layer whose heads have different sinks."""
    return {"sinks": True, "sink_scores": tuple(2.0 * head - 3.0 for head in range(setup.shape.heads))}


def chunks(kit: Kit) -> str:
    """Layers whose tokens attend within chunks, which end anywhere in a page."""

    def check(setup: AttentionSetup) -> None:
        for tokens in (1, 5, setup.span + 2):
            check_typical(kit, setup, f"attention within chunks of {tokens} tokens", chunk=tokens)

    return run_each(select_setups(kit, fields=CHUNKS), check)


def temperature(kit: Kit) -> str:
    """Layers whose scores grow with the position, with and without a soft cap, in short rows and in a long one."""

    def check(setup: AttentionSetup) -> None:
        check_typical(kit, setup, "scores that grow with the position", temperature_from=_TEMPERATURE)
        further: dict[str, Any] = {"soft_cap": SOFT_CAP}
        for trait in further.keys() & set(setup.spec.traits):
            capped = {"temperature_from": _TEMPERATURE, trait: further[trait]}
            check_typical(kit, setup, "capped scores that grow with the position", **capped)

    return run_each(select_setups(kit, fields=SHARPENED), check)


def both_ways(kit: Kit) -> str:
    """Layers of encoders: in whole sequences, tokens attend to all others, or to near ones on both sides."""

    def check(setup: AttentionSetup) -> None:
        for window in (None, *((_LOCAL, LONG_ROW) if "window" in setup.spec.traits else ())):
            bench = Bench(kit, setup, bidirectional=True, window=window)
            for lengths in ((7,), (3, 1, min(LONG_ROW, PAGES // 2 * setup.layout.page_size), _LOCAL)):
                rows = [(bench.sequence(), length) for length in lengths]
                bench.step(rows, "attention to later tokens" + (f" in a window of {window}" if window else ""))
        if "relative_bias" in setup.spec.traits:
            check_biases(setup)

    def check_biases(setup: AttentionSetup) -> None:
        """Biases by head and distance: distances beyond an end of the table have the bias of that end."""
        numbers = torch.Generator().manual_seed(3)
        table = torch.randn(setup.shape.heads, 2 * _LOCAL + 1, generator=numbers)
        values = tuple(tuple(bias_row) for bias_row in table.tolist())
        bench = Bench(kit, setup, bidirectional=True, relative_bias=True, bias_values=values)
        rows = [(bench.sequence(), length) for length in (3, 4 * _LOCAL, 1)]
        bench.step(rows, "attention to later tokens with biases by distance")

    return run_each(select_setups(kit, fields=_ENCODER), check)
