"""The static fraction on each device profile, compared with a published rule for accelerators, computed from its text.

In MiB: 512, plus 1.5 per prompt token of a step, plus 2 per row of the largest graph, plus 1,024 for eight ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from every import every
from rules_world import FACTS, GIB, LATENT, model

from srv.args.resolve import resolve
from srv.args.statement import Origin, Resolved, UserInput, UserStatement
from srv.planning.plan import reserved_bytes, reserved_parts
from srv.platform.registry import find_platforms
from srv.specs import FullAttention, ModelFacts

LLAMA = model(hidden_size=4096, layers=32, heads=32, head_dim=128, vocab_size=128256, context_length=131072)
SHORT = replace(LLAMA, context_length=8192)

# profile -> memory in GiB, prompt tokens per step, rows of the largest graph with fewer than four ranks, and with more
TABLE: dict[tuple[str, str], tuple[int, int, int, int]] = {
    ("cuda", "sm80"): (80, 8192, 256, 512),
    ("cuda", "sm80-40gb"): (40, 4096, 32, 160),
    ("cuda", "sm86"): (24, 2048, 24, 80),
    ("cuda", "sm86-12gb"): (12, 2048, 8, 8),
    ("cuda", "sm86-48gb"): (48, 4096, 32, 160),
    ("cuda", "sm89"): (24, 2048, 24, 80),
    ("cuda", "sm89-16gb"): (16, 2048, 8, 8),
    ("cuda", "sm89-48gb"): (48, 4096, 32, 160),
    ("cuda", "sm120"): (32, 2048, 24, 80),
    ("cuda", "sm120-16gb"): (16, 2048, 8, 8),
    ("cuda", "sm120-96gb"): (96, 8192, 256, 512),
    ("cuda", "sm90"): (80, 8192, 256, 512),
    ("cuda", "sm90-141gb"): (141, 8192, 256, 512),
    ("cuda", "sm100"): (180, 16384, 512, 512),
    ("rocm", "gfx942"): (192, 16384, 512, 512),
    ("rocm", "gfx942-256gb"): (256, 16384, 512, 512),
    ("rocm", "gfx950"): (288, 16384, 512, 512),
    ("rocm", "gfx1100"): (24, 2048, 24, 80),
    ("npu", "a2"): (64, 8192, 64, 256),
    ("npu", "a2-32gb"): (32, 4096, 16, 64),
    ("npu", "a3"): (64, 8192, 64, 256),
}


def published(memory: int, tokens: int, rows: int, ranks: int = 1) -> float:
    whole = memory * 1024
    return (whole - (512 + 1.5 * tokens + 2 * rows + ranks / 8 * 1024)) / whole


def planned(place: tuple[str, str], about: ModelFacts | None = SHORT, **user: Any) -> Resolved:
    platform, profile = place
    manifest = find_platforms()[platform].loaded
    statements = tuple(UserStatement(name, value, Origin.COMMAND_LINE, "command line") for name, value in user.items())
    return resolve(UserInput(statements), manifest=manifest, device=manifest.facts.profiles[profile], model=about)


def fraction(place: tuple[str, str], about: ModelFacts | None = SHORT, **user: Any) -> float:
    return planned(place, about, **user).config.memory.mem_fraction_static


def test_the_table_has_every_profile_of_these_platforms() -> None:
    assert set(TABLE) == {(name, profile) for name in ("cuda", "rocm", "npu") for profile in FACTS[name].profiles}


@every("place", TABLE, ids=":".join)
@every("about", [SHORT, None])
def test_the_fraction_is_that_of_the_published_rule(place: tuple[str, str], about: ModelFacts | None) -> None:
    memory, tokens, few, _ = TABLE[place]
    assert fraction(place, about) == pytest.approx(published(memory, tokens, few), abs=0.0006)


@every("place", TABLE, ids=":".join)
def test_the_largest_graph_is_that_of_a_list(place: tuple[str, str]) -> None:
    memory, tokens, _, _ = TABLE[place]
    listed = fraction(place, graph_batch_sizes=(1, 3), max_running_requests=64)
    assert listed == pytest.approx(published(memory, tokens, 3), abs=0.0006)


def test_a_fraction_of_the_user_bounds_what_the_published_rule_reserves() -> None:
    """It is an estimate, by which long prompts in one step would need more than the device has."""
    whole = {"chunked_prefill_size": -1, "max_prefill_tokens": 49152, "max_running_requests": 64}
    long = planned(("npu", "a3"), **whole)
    chosen = planned(("npu", "a3"), **whole, mem_fraction_static=0.7)
    memory = 64 * 2**30
    assert reserved_parts(long)["steps"] == 1.5 * 2**20 * 49152 > memory
    assert reserved_bytes(chosen) == pytest.approx(0.3 * memory, rel=1e-6)
    others = {name: amount for name, amount in reserved_parts(chosen).items() if name != "steps"}
    assert others == {name: amount for name, amount in reserved_parts(long).items() if name != "steps"}


@every("place", TABLE, ids=":".join)
def test_the_fraction_is_the_same_with_latent_attention(place: tuple[str, str]) -> None:
    memory, tokens, few, _ = TABLE[place]
    latent = replace(LATENT, context_length=8192)
    assert fraction(place, latent) == pytest.approx(published(memory, tokens, few), abs=0.0006)


@every(
    ("place", "expected"),
    [(("cuda", "sm90"), 0.836), (("cuda", "sm90-141gb"), 0.907), (("cuda", "sm100"), 0.858)],
)
def test_figures_worked_out_by_hand(place: tuple[str, str], expected: float) -> None:
    assert fraction(place, LLAMA) == expected


LONG_HEADS = replace(LLAMA, cache_groups=(FullAttention((0, 1, 2, 3), 8, 128, 128),))  # which aiter computes


@every("place", [place for place in TABLE if place[1].startswith("gfx9")], ids=":".join)
def test_aiter_s_reserve_for_long_contexts_multiplies(place: tuple[str, str]) -> None:
    memory, tokens, few, _ = TABLE[place]
    assert fraction(place, LONG_HEADS) == pytest.approx(published(memory, tokens, few) * 0.85, abs=0.0006)
    assert fraction(place, LLAMA, attention_backend="triton") == pytest.approx(
        published(memory, tokens, few), abs=0.0006
    )


def test_aiter_s_figure_by_hand() -> None:
    assert fraction(("rocm", "gfx942"), LONG_HEADS) == 0.737


def test_the_parts_are_named_and_replace_core_s_estimate() -> None:
    parts = {part.name: part.amount / GIB for part in planned(("cuda", "sm90")).quantities["reserved_memory"].parts}
    nonzero = {name: amount for name, amount in parts.items() if amount}
    assert nonzero == pytest.approx({"runtime": 0.5, "steps": 12, "graphs": 0.5, "ranks": 0.125})
    assert "activations" not in parts


def test_steps_graphs_and_ranks_enter_as_the_user_says() -> None:
    """Parts for arguments that a user cannot set yet are called directly."""
    assert fraction(("cuda", "sm90"), chunked_prefill_size=2048) == pytest.approx(published(80, 2048, 256), abs=0.0006)
    by_name = {contribution.name: contribution for contribution in FACTS["cuda"].contributions}
    context: dict[str, Any] = {
        "graph_batch_sizes": None, "graph_max_batch_size": None,
        "chunked_prefill_size": 1024, "max_prefill_tokens": 4096,
        "tp_size": 4, "pp_size": 2, "dp_size": 2, "enable_dp_attention": True,
    }  # fmt: skip
    view = _View(80, context)
    amounts = {name: contribution.compute(view) / 2**20 for name, contribution in by_name.items()}
    assert amounts == {"runtime": 512, "steps": 1.5 * 1024, "graphs": 2 * 512, "dp_attention": 4096, "ranks": 1024}
    context["graph_max_batch_size"], context["chunked_prefill_size"] = 24, -1
    assert by_name["graphs"].compute(view) / 2**20 == 48
    assert by_name["steps"].compute(view) / 2**20 == 1.5 * 4096 * 2


class _View:
    """Resolved arguments on a device with this memory in GiB, without a model."""

    model = None
    capabilities: frozenset[str] = frozenset()

    def __init__(self, memory: int, values: dict[str, Any]) -> None:
        self.device = replace(FACTS["cuda"].profiles["sm90"], memory_bytes=memory * GIB)
        self._values = values

    def __getitem__(self, argument: str) -> Any:
        return self._values[argument]


def test_platforms_without_a_published_rule_use_core_s_estimate() -> None:
    result = planned(("xpu", "pvc"))
    parts = {part.name for part in result.quantities["reserved_memory"].parts}
    assert {"activations", "sampling"} <= parts
    assert result.config.memory.mem_fraction_static == 0.88
    assert "no published figures exist" in result.provenance["mem_fraction_static"].reason


def activations(about: ModelFacts, **user: Any) -> float:
    parts = planned(("xpu", "pvc"), about, **user).quantities["reserved_memory"].parts
    return next(part.amount for part in parts if part.name == "activations")


def test_the_estimate_of_activations_counts_rows_of_experts_and_states_of_requests() -> None:
    """In float32, a row of 3 I + H for each expert of a token; and of each request, its states."""
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 4096,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    user = {"chunked_prefill_size": 1024, "max_running_requests": 16, "dtype": "bfloat16"}
    tokens = 1024 + 16
    between = tokens * 8 * 4096 * 2

    def mixture(used: int, inner: int) -> float:
        fields = {"num_experts": 64, "num_experts_per_tok": used, "moe_intermediate_size": inner}
        return activations(replace(SHORT, architecture="Qwen3MoeForCausalLM", config={**sizes, **fields}), **user)

    def recurrent(running: int) -> float:
        about = replace(SHORT, architecture="Qwen3NextForCausalLM", config={**sizes, "num_experts": 0})
        return activations(about, **{**user, "max_running_requests": running})

    assert activations(replace(SHORT, config=sizes), **user) == between + tokens * 3 * 4096 * 2
    assert mixture(8, 768) == between + tokens * (8 * (3 * 768 + 4096) * 4 + 64 * 7 * 4)
    assert mixture(4, 768) < mixture(8, 768) < mixture(8, 1536) < mixture(16, 1536)
    assert recurrent(17) - recurrent(16) > 32 * 128 * 128 * 4
