"""L2: attention sinks, attention within chunks, and to later tokens, in every backend that accepts such models."""

from __future__ import annotations

from typing import Any

from srv.testing.conformance.attention import LONG_ROW, SOFT_CAP, check_typical, run_each
from srv.testing.conformance.bench import PAGES, Bench
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.setups import Setup, select_setups

# Classes without native layers: the fields alone tell which attention they have.
_SINKS = {"architectures": ["FlintForCausalLM"], "model_type": "flint"}
_CHUNKS = {"architectures": ["InChunksForCausalLM"], "model_type": "in_chunks", "attention_chunk_size": 5}
_ENCODER = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "type_vocab_size": 2}
_LOCAL = 5


def sinks(kit: Kit) -> str:
    """Layers with a score per head that has no value, in short rows and in one whose keys kernels divide."""

    def check(setup: Setup) -> None:
        scores = tuple(2.0 * head - 3.0 for head in range(setup.shape.heads))
        traits: dict[str, Any] = {"sinks": True, "sink_scores": scores}
        check_typical(kit, setup, "attention sinks", **traits)
        further: dict[str, Any] = {"window": 5, "soft_cap": SOFT_CAP}
        for trait in further.keys() & set(setup.spec.traits):
            check_typical(kit, setup, f"attention sinks with {trait}", **traits, **{trait: further[trait]})
        bench = Bench(kit, setup, **traits)
        rows = [bench.sequence(), bench.sequence()]
        bench.step([(rows[0], min(LONG_ROW, PAGES // 2 * setup.layout.page_size)), (rows[1], 5)], "attention sinks")
        bench.step([(row, 1) for row in rows], "attention sinks of a long row and a short one")

    return run_each(select_setups(kit, fields=_SINKS), check)


def chunks(kit: Kit) -> str:
    """Layers whose tokens attend within chunks, which end anywhere in a page."""

    def check(setup: Setup) -> None:
        for tokens in (1, 5, setup.span + 2):
            check_typical(kit, setup, f"attention within chunks of {tokens} tokens", chunk=tokens)

    return run_each(select_setups(kit, fields=_CHUNKS), check)


def both_ways(kit: Kit) -> str:
    """Layers of encoders: in whole sequences, tokens attend to all others, or to near ones on both sides."""

    def check(setup: Setup) -> None:
        for window in (None, *((_LOCAL, LONG_ROW) if "window" in setup.spec.traits else ())):
            bench = Bench(kit, setup, bidirectional=True, window=window)
            for lengths in ((7,), (3, 1, min(LONG_ROW, PAGES // 2 * setup.layout.page_size), _LOCAL)):
                rows = [(bench.sequence(), length) for length in lengths]
                bench.step(rows, "attention to later tokens" + (f" in a window of {window}" if window else ""))

    return run_each(select_setups(kit, fields=_ENCODER), check)
