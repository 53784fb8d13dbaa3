"""Plans for consumer cards: defaults of the size table, and which models fit, with the arithmetic by hand.

The models have the shape of Llama-3-8B: 8,030,261,248 weights; a token takes 128 KiB (32 layers, 8 KV heads of 128
elements, keys and values in 16 bits).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from every import every
from rules_world import model

from srv.args.resolve import resolve
from srv.args.statement import Origin, Resolved, UserInput, UserStatement
from srv.errors import Refusal
from srv.planning.budget import estimate
from srv.platform.registry import find_platforms
from srv.specs import FullAttention, ModelFacts

MIB, GIB = 1 << 20, 1 << 30
WEIGHTS = 8_030_261_248
TOKEN = 128 << 10
IN_16_BITS = model(
    hidden_size=4096,
    layers=32,
    heads=32,
    head_dim=128,
    vocab_size=128256,
    context_length=8192,
    parameters=WEIGHTS,
    weight_bytes=2 * WEIGHTS,
    cache_groups=(FullAttention(tuple(range(32)), 8, 128, 128),),
    config={"intermediate_size": 14336},
)
IN_Q4 = replace(
    IN_16_BITS,
    format="gguf",
    quantization="gguf:Q4_K",
    dtype="float16",
    weight_bytes=4_920_000_000,
    stored_types={"Q4_K": WEIGHTS - 10**9, "Q6_K": 10**9 - 266_240, "F32": 266_240},  # as llama.cpp's Q4_K_M
)
SMALL = ("cuda:sm86-12gb", "cuda:sm89-16gb", "cuda:sm120-16gb")
MIDDLE = ("cuda:sm86", "cuda:sm89", "cuda:sm120", "rocm:gfx1100")


def planned(place: str, about: ModelFacts, **user: Any) -> Resolved:
    name, _, profile = place.partition(":")
    manifest = find_platforms()[name].loaded
    statements = tuple(UserStatement(name, value, Origin.COMMAND_LINE, "command line") for name, value in user.items())
    return resolve(UserInput(statements), manifest=manifest, device=manifest.facts.profiles[profile], model=about)


def pages(place: str, about: ModelFacts) -> int:
    name, _, profile = place.partition(":")
    result = planned(place, about)
    reserved = result.quantities["reserved_memory"].total
    on = find_platforms()[name].loaded.facts.profiles[profile]
    return estimate(result.config, about, on, reserved_bytes=int(reserved)).pages[0]


@every("place", [*SMALL, *MIDDLE])
def test_defaults_are_those_of_the_size_table(place: str) -> None:
    config = planned(place, IN_Q4).config
    rows = 8 if place in SMALL else 24
    attention = "triton" if place.startswith("rocm") else "flashinfer"
    assert (config.schedule.chunked_prefill_size, config.graphs.graph_max_batch_size) == (2048, rows)
    assert (config.platform.attention_backend, config.memory.page_size) == (attention, 1)
    assert config.platform.kv_cache_dtype == "float16"


@every(
    ("place", "memory", "rows"),
    [
        ("cuda:sm86", 24, 24),
        ("cuda:sm89", 24, 24),
        ("cuda:sm120", 32, 24),
        ("rocm:gfx1100", 24, 24),
    ],
)
def test_eight_billion_weights_in_16_bits_fit_a_card_of_24_gib(place: str, memory: int, rows: int) -> None:
    """Whatever the weights, 512 MiB, 1.5 MiB per prompt token, 2 MiB per row and 128 MiB leave is the pool."""
    total, reserved = memory * GIB, (512 + 3072 + 2 * rows + 128) * MIB
    fraction = round(1 - reserved / total, 3)
    pool = min(int(fraction * total) - 2 * WEIGHTS, total - 2 * WEIGHTS - reserved)
    assert pages(place, IN_16_BITS) == pool // TOKEN - 1  # page 0 is not usable
    assert pages(place, IN_16_BITS) > 5 * 8192


@every("place", SMALL)
def test_they_do_not_fit_smaller_cards_but_quantized_to_4_bits_they_do(place: str) -> None:
    with pytest.raises(Refusal) as raised:
        pages(place, IN_16_BITS)
    assert "14.96 GiB of weights in bfloat16" in str(raised.value)
    assert pages(place, IN_Q4) > 2 * 8192


@every(
    ("place", "user", "reason"),
    [
        ("cuda:sm86-12gb", {"attention_backend": "fa3"}, "its kernels are for sm90, not sm86"),
        ("cuda:sm120", {"attention_backend": "trtllm_mha"}, "its kernels are for sm90, sm100, not sm120"),
        (
            "cuda:sm86",
            {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "triton"},
            "Triton does not convert fp8_e4m3 on sm86; torch_native does",
        ),
        ("cuda:sm86", {"tp_size": 2}, "each rank needs a device of its own, but there is one device"),
        ("rocm:gfx1100", {"attention_backend": "aiter"}, "its kernels are for gfx942, gfx950, not gfx1100"),
        ("rocm:gfx1100", {"attention_backend": "flashinfer"}, "Available backends: aiter, triton, torch_native"),
    ],
)
def test_what_these_cards_cannot_do_is_refused_with_the_reason(place: str, user: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refusal) as raised:
        planned(place, IN_16_BITS, **user)
    assert reason in str(raised.value)
