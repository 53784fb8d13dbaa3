"""Core's rules for single features, called directly, because planned arguments cannot be set by a user yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from args_world import CAPABLE, GIB, device, manifest, model, resolved, user
from every import every

from srv.args.checks import adapters, all_or_some, ascending, bucket_rule, json_counts, json_list, json_object
from srv.args.config import ARGUMENTS
from srv.args.context import DeclaredReadsContext, Facts
from srv.args.defaults import (
    CONSTRAINTS,
    CONTRIBUTIONS,
    DEVICE_CONSTRAINTS,
    DEVICE_DEFAULTS,
    GENERIC_DEFAULTS,
    MODEL_DEFAULTS,
    USER_CONSTRAINTS,
)
from srv.args.rules.graphs import captured_rows
from srv.args.rules.speculative import draft_tree_constraint
from srv.errors import Refusal
from srv.platform.facts import Default, Support
from srv.specs import Latent

DEFAULTS = (*MODEL_DEFAULTS, *GENERIC_DEFAULTS, *DEVICE_DEFAULTS)
DEEPSEEK = model(architecture="DeepseekV3ForCausalLM")
# A model and a machine that allow 2, 3 and 4 ranks.
SHARDABLE = Facts(
    replace(device(), count=5),
    model(
        config={
            "vocab_size": 1200,
            "hidden_size": 1536,
            "intermediate_size": 2400,
            "num_hidden_layers": 10,
            "num_attention_heads": 24,
            "num_key_value_heads": 12,
            "max_position_embeddings": 1000,
        }
    ),
    CAPABLE,
)


def context_of(reads: tuple[str, ...], facts: Facts | None = None, **values: Any) -> DeclaredReadsContext:
    """A context with these values and the declared defaults of all other arguments."""
    everything = {name: argument.default for name, argument in ARGUMENTS.items()} | values
    facts = facts or Facts(device(), model(), CAPABLE)
    return DeclaredReadsContext("test", "test", facts, reads, everything)


def broken(**values: Any) -> set[tuple[str, str]]:
    """(argument, code) of every constraint of core that these values violate, besides those of test_inert.py."""
    return {
        (constraint.argument, constraint.code)
        for constraint in (*CONSTRAINTS, *DEVICE_CONSTRAINTS, *USER_CONSTRAINTS)
        if constraint.code != "inert"
        and constraint.check(context_of((constraint.argument, *constraint.reads), SHARDABLE, **values)) is not None
    }


def given(argument: str, facts: Facts | None = None, **values: Any) -> Any:
    """The value of core's defaults for an argument; all defaults that apply must agree."""
    values_found = [
        default.compute(context_of(default.reads, facts, **values))
        for default in DEFAULTS
        if isinstance(default, Default) and default.argument == argument
    ]
    actual = [value for value in values_found if value is not None]
    assert all(value == actual[0] for value in actual)
    return actual[0] if actual else None


def part(name: str, facts: Facts | None = None, **values: Any) -> float:
    """The amount of core's contribution with this name: bytes, or a share of the remaining memory."""
    (contribution,) = (contribution for contribution in CONTRIBUTIONS if contribution.name == name)
    return contribution.compute(context_of(contribution.reads, facts, **values))


def reserved(name: str, facts: Facts | None = None, **values: Any) -> float:
    return part(name, facts, **values) / GIB


def test_declared_defaults_violate_no_constraint() -> None:
    assert broken() == set()


CASES: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"tp_size": 5}, ("tp_size", "not_divisible")),
    ({"tp_size": 2, "model_impl": "transformers"}, ("tp_size", "not_divisible")),
    ({"tp_size": 6}, ("tp_size", "too_few_devices")),
    ({"base_device_id": 5}, ("base_device_id", "too_few_devices")),
    ({"base_device_id": 4, "tp_size": 2}, ("base_device_id", "too_few_devices")),
    ({"device_id_step": 5, "tp_size": 2}, ("device_id_step", "too_few_devices")),
    ({"numa_node": (0, 1)}, ("numa_node", "not_one_per_rank")),
    ({"tp_size": 3, "nnodes": 2}, ("nnodes", "not_divisible")),
    ({"nnodes": 2, "tp_size": 2, "node_rank": 2}, ("node_rank", "rank_missing")),
    ({"pp_size": 2}, ("pp_size", "excluded")),
    ({"pp_size": 2, "disable_overlap_schedule": True, "speculative_algorithm": "NGRAM"}, ("pp_size", "excluded")),
    ({"dp_size": 2, "nnodes": 2, "tp_size": 2}, ("dp_size", "excluded")),
    ({"enable_dp_attention": True}, ("enable_dp_attention", "not_divisible")),
    ({"enable_dp_attention": True, "dp_size": 2, "tp_size": 3}, ("enable_dp_attention", "not_divisible")),
    ({"enable_dp_lm_head": True}, ("enable_dp_lm_head", "other_missing")),
    ({"speculative_num_steps": 3}, ("speculative_num_steps", "other_missing")),
    ({"speculative_algorithm": "EAGLE"}, ("speculative_algorithm", "excluded")),
    (
        {
            "speculative_algorithm": "EAGLE",
            "disable_overlap_schedule": True,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 8,
        },
        ("speculative_num_draft_tokens", "guesses_disagree"),
    ),
    (
        {"speculative_ngram_min_match_window_size": 13, "speculative_algorithm": "NGRAM"},
        ("speculative_ngram_max_match_window_size", "out_of_order"),
    ),
    ({"moe_a2a_backend": "deepep", "tp_size": 4}, ("ep_size", "not_divisible")),
    ({"enable_eplb": True}, ("enable_eplb", "other_missing")),
    ({"lora_paths": ("a",)}, ("lora_paths", "excluded")),
    ({"enable_lora": True, "max_lora_rank": 8}, ("enable_lora", "other_missing")),
    ({"max_loaded_loras": 4}, ("max_loaded_loras", "too_few")),
    (
        {"enable_lora": True, "lora_paths": ("a", "b"), "max_loaded_loras": 1, "max_loras_per_batch": 1},
        ("max_loaded_loras", "too_few"),
    ),
    (
        {"disaggregation_mode": "decode", "disable_radix_cache": True, "disaggregation_decode_tp": 2},
        ("disaggregation_decode_tp", "excluded"),
    ),
    (
        {"disaggregation_mode": "decode", "disable_radix_cache": True, "disaggregation_decode_dp": 2},
        ("disaggregation_decode_dp", "excluded"),
    ),
    ({"disaggregation_mode": "decode"}, ("disable_radix_cache", "excluded")),
    (
        {"disaggregation_mode": "decode", "disable_radix_cache": True, "dp_size": 2},
        ("dp_size", "other_missing"),
    ),
    (
        {"disaggregation_mode": "prefill", "tp_size": 4, "disaggregation_decode_tp": 6, "disable_graphs": True},
        ("disaggregation_decode_tp", "not_divisible"),
    ),
    ({"swa_full_tokens_ratio": 0.5, "disable_hybrid_swa_memory": True}, ("swa_full_tokens_ratio", "excluded")),
    (
        {"moe_a2a_backend": "deepep", "deepep_mode": "normal", "disable_graphs": False},
        ("disable_graphs", "excluded"),
    ),
    ({"disaggregation_mode": "prefill", "disable_graphs": False}, ("disable_graphs", "excluded")),
    ({"graph_batch_sizes": (1, 9), "graph_max_batch_size": 8}, ("graph_batch_sizes", "out_of_order")),
    (
        {"enable_piecewise_graphs": True, "piecewise_graph_tokens": "[1, 9]", "piecewise_graph_max_tokens": 8},
        ("piecewise_graph_tokens", "out_of_order"),
    ),
    ({"enable_piecewise_graphs": True, "disable_graphs": True}, ("enable_piecewise_graphs", "excluded")),
    ({"graph_batch_sizes": (1, 9), "max_running_requests": 8}, ("graph_batch_sizes", "out_of_order")),
]


@every(("values", "expected"), CASES)
def test_values_violate_exactly_one_constraint(values: dict[str, Any], expected: tuple[str, str]) -> None:
    assert broken(**values) == {expected}


@every(
    "values",
    [
        {"tp_size": 4, "nnodes": 2, "node_rank": 1},
        {"pp_size": 2, "disable_overlap_schedule": True},
        {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "enable_dp_lm_head": True, "nnodes": 2},
        {"moe_a2a_backend": "deepep", "tp_size": 4, "ep_size": 4, "enable_eplb": True},
        {"enable_lora": True, "lora_paths": ("a",), "max_loaded_loras": 8},
        {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ("all",)},
        {"disaggregation_mode": "prefill", "tp_size": 2, "disaggregation_decode_tp": 8, "disable_graphs": True},
        {"moe_a2a_backend": "deepep", "deepep_mode": "low_latency", "disable_graphs": False},
        {"disaggregation_mode": "decode", "disable_radix_cache": True, "disable_graphs": False},
        {"enable_piecewise_graphs": True, "piecewise_graph_tokens": "[8]", "enable_torch_compile": True},
        {"enable_piecewise_graphs": True, "tp_size": 4, "graph_batch_sizes": (1, 2)},
    ],
)
def test_compatible_values_violate_no_constraint(values: dict[str, Any]) -> None:
    assert broken(**values) == set()


@every(
    "constraint", (*CONSTRAINTS, *USER_CONSTRAINTS), ids=lambda constraint: f"{constraint.argument}-{constraint.code}"
)
def test_remedy_of_a_constraint_is_a_sentence(constraint: Any) -> None:
    assert constraint.remedy[0].isupper()
    assert constraint.remedy.endswith(".")
    assert {constraint.argument, *constraint.reads} <= ARGUMENTS.keys()


@every(
    ("algorithm", "architecture", "shape"),
    [
        ("EAGLE", "LlamaForCausalLM", (5, 4, 8)),
        ("EAGLE", "Qwen3ForCausalLM", (5, 4, 8)),
        ("NEXTN", "DeepseekV3ForCausalLM", (3, 1, 4)),
        ("EAGLE3", "GptOssForCausalLM", (3, 1, 4)),
        ("STANDALONE", "LlamaForCausalLM", (3, 1, 4)),
        ("NGRAM", "LlamaForCausalLM", (None, None, 4)),
        (None, "LlamaForCausalLM", (None, None, None)),
    ],
)
def test_draft_shape_by_drafter_and_model_family(
    algorithm: str | None, architecture: str, shape: tuple[Any, ...]
) -> None:
    facts = Facts(device(), model(architecture=architecture), CAPABLE)
    steps = given("speculative_num_steps", facts, speculative_algorithm=algorithm)
    topk = given("speculative_eagle_topk", facts, speculative_algorithm=algorithm)
    decided = {"speculative_num_steps": steps, "speculative_eagle_topk": topk}
    verified = given("speculative_num_draft_tokens", facts, speculative_algorithm=algorithm, **decided)
    assert (steps, topk, verified) == shape


def test_chain_verifies_one_more_token_than_its_steps() -> None:
    settings = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 6, "speculative_eagle_topk": 1}
    assert given("speculative_num_draft_tokens", **settings) == 7


def test_drafts_over_large_pages_are_chains() -> None:
    settings = {"speculative_algorithm": "EAGLE", "page_size": 64}
    assert (given("speculative_num_steps", **settings), given("speculative_eagle_topk", **settings)) == (3, 1)


def test_draft_tree_constraint_exempts_the_named_backends() -> None:
    constraint, strict = draft_tree_constraint("one", "other"), draft_tree_constraint()
    tree = {"speculative_eagle_topk": 4, "page_size": 16}
    for backend, refused in (("one", False), ("other", False), ("third", True)):
        context = context_of((constraint.argument, *constraint.reads), decode_attention_backend=backend, **tree)
        assert (constraint.check(context) is not None) == refused
        assert strict.check(context) is not None
    assert constraint.remedy == "Set it to 1, or choose the backend one or other."


def test_model_family_with_a_draft_head_needs_no_path() -> None:
    settings = {"speculative_algorithm": "EAGLE", "model_path": "/m"}
    assert given("speculative_draft_model_path", Facts(device(), DEEPSEEK, CAPABLE), **settings) == "/m"
    assert given("speculative_draft_model_path", **settings) is None


@every(
    ("argument", "values", "expected"),
    [
        ("max_running_requests", {"speculative_algorithm": "EAGLE"}, 48),
        ("disable_overlap_schedule", {"speculative_algorithm": "EAGLE", "pp_size": 2}, True),
        ("schedule_conservativeness", {"enable_dp_attention": True}, 0.3),
        ("ep_size", {"moe_a2a_backend": "deepep", "tp_size": 8}, 8),
        ("expert_distribution_recorder_mode", {"enable_eplb": True}, "stat"),
        ("expert_distribution_recorder_buffer_size", {"expert_distribution_recorder_mode": "stat"}, 1000),
        ("ep_dispatch_algorithm", {"init_expert_location": "x.json"}, "static"),
        ("enable_lora", {"lora_paths": ("a",)}, True),
        ("disaggregation_decode_tp", {"disaggregation_mode": "prefill", "tp_size": 4}, 4),
        ("disaggregation_prefill_pp", {"disaggregation_mode": "prefill", "pp_size": 2}, 2),
        ("disable_radix_cache", {"disaggregation_mode": "decode"}, True),
        ("disable_graphs", {"disaggregation_mode": "prefill"}, True),
        ("disable_graphs", {"moe_a2a_backend": "deepep", "deepep_mode": "normal"}, True),
    ],
)
def test_a_default_follows_from_another_argument(argument: str, values: dict[str, Any], expected: object) -> None:
    assert given(argument) is None
    assert given(argument, **values) == expected


def test_weights_in_four_bits_compute_in_bfloat16() -> None:
    facts = Facts(device(), model(dtype="float16", quantization="mxfp4"), CAPABLE)
    assert given("dtype", facts) == "bfloat16"


@every(
    ("memory", "chunk", "few", "many"),
    [
        (16, 2048, 8, 8),
        (24, 2048, 24, 80),
        (48, 4096, 32, 160),
        (80, 8192, 256, 512),
        (141, 8192, 256, 512),
        (180, 16384, 512, 512),
    ],
)
def test_sizes_by_device_memory(memory: int, chunk: int, few: int, many: int) -> None:
    facts = Facts(replace(device(), memory_bytes=memory * GIB), model(), CAPABLE)
    assert given("chunked_prefill_size", facts) == chunk
    assert given("chunked_prefill_size", facts, enable_dp_attention=True, dp_size=2) == chunk
    assert given("graph_max_batch_size", facts) == few
    assert given("graph_max_batch_size", facts, tp_size=4) == many
    assert given("graph_max_batch_size", facts, graph_batch_sizes=(3, 9)) == 9
    assert given("graph_max_batch_size", facts, disable_graphs=True) is None
    assert given("graph_max_batch_size", facts, disable_graphs=True, graph_batch_sizes=(3, 9)) is None


def test_graphs_are_captured_if_the_platform_can_replay_them() -> None:
    cannot = Facts(device(), model(), CAPABLE - {"graphs"})
    assert given("disable_graphs") is None
    assert given("disable_graphs", cannot) is True
    assert given("graph_max_batch_size", cannot) is None
    assert resolved(on=manifest(capabilities=CAPABLE)).config.graphs.disable_graphs is False
    poor = manifest(capabilities=CAPABLE - {"graphs"})
    assert resolved(on=poor).config.graphs.disable_graphs is True
    assert resolved(user(disable_graphs=True), on=poor).config.graphs.disable_graphs is True


@every(
    "values",
    [
        {"disable_graphs": False},
        {"graph_max_batch_size": 4},
        {"graph_batch_sizes": (1, 2)},
        {"disable_graph_padding": True},
    ],
    ids=lambda values: next(iter(values)),
)
def test_arguments_of_graphs_are_refused_without_the_capability(values: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refused:
        resolved(user(**values), on=manifest(capabilities=CAPABLE - {"graphs"}))
    (rejected,) = refused.value.rejections
    assert (rejected.code, rejected.what, rejected.who) == ("capability_missing", next(iter(values)), "command line")


def test_core_does_not_set_a_size_that_the_platform_does_not_support() -> None:
    """The platform's own default is accepted, but a value of the user is refused."""
    declared = (Support("graph_max_batch_size", "unsupported", "it chooses them itself"),)
    for defaults, expected in (((), None), ((Default("graph_max_batch_size", lambda context: 5, "it has room"),), 5)):
        on = manifest(capabilities=CAPABLE, support=declared, defaults=defaults)
        assert resolved(on=on).config.graphs.graph_max_batch_size == expected
        with pytest.raises(Refusal, match="it chooses them itself"):
            resolved(user(graph_max_batch_size=4), on=on)


@every(
    ("sizes", "max_size", "running", "padding", "rows"),
    [
        (None, 8, 100, True, (1, 2, 4, 8)),
        (None, None, 5, True, (1, 2, 4, 5)),
        (None, 1, 100, True, (1,)),
        (None, 600, 20, True, (1, 2, 4, 8, 16, 20)),
        (None, 100, 600, True, (1, 2, 4, *range(8, 100, 8), 100)),
        (None, 600, 600, True, (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), 512, 544, 576, 600)),
        (None, 40, 600, False, (*range(1, 33), 40)),
        ((6, 2, 2), 8, 100, True, (2, 6)),
        ((6,), 8, 100, False, (6,)),
    ],
)
def test_row_counts_that_are_captured(
    sizes: tuple[int, ...] | None, max_size: int | None, running: int, padding: bool, rows: tuple[int, ...]
) -> None:
    assert captured_rows(sizes, max_size, running, padding=padding) == rows


def test_contributions_to_reserved_memory() -> None:
    assert reserved("drafter", speculative_algorithm="EAGLE") == 2
    assert reserved("drafter", speculative_algorithm="STANDALONE") == 6
    assert reserved("drafter") == 0
    ngram = {"speculative_algorithm": "NGRAM", "max_running_requests": 2**10, "context_length": 2**18}
    assert reserved("drafter", **ngram) == 1
    drafted = {**ngram, "speculative_num_draft_tokens": 4, "max_prefill_tokens": 2 * 3 * 2**10}
    logits = 3 * 2**10 * SHARDABLE.model.vocab_size * 3 * 4
    for chunk, share in ((-1, 1.0), (3 * 2**10, 0.5)):
        in_gib = reserved("drafter", SHARDABLE, **drafted, chunked_prefill_size=chunk)
        assert in_gib == pytest.approx(1 + share * logits / GIB)
    assert reserved("ranks") == 0
    assert reserved("ranks", tp_size=2, pp_size=2) == pytest.approx(3 * 0.125)
    graphs = {"max_running_requests": 400, "graph_max_batch_size": 96}
    row = (2 * 2**20 * 16 / 80 + 2 * 4 * 1000 + 4 * 1000) / GIB  # a device of 16 GiB; logits and page table, pages of 1
    assert reserved("graphs", **graphs) == pytest.approx(96 * row)
    assert reserved("graphs", **graphs | {"max_running_requests": 48}) == pytest.approx(48 * row)
    assert reserved("graphs", **graphs, graph_batch_sizes=(7, 24)) == pytest.approx(24 * row)
    assert reserved("graphs", **graphs, disable_graphs=True) == 0
    wide = Facts(device(), model(vocab_size=2**27), CAPABLE)
    assert reserved("graphs", wide, **graphs) == pytest.approx(96, rel=0.01)  # float32 logits, twice


@every(
    ("check", "good", "bad"),
    [
        (
            bucket_rule(),
            [("default",), ("tse", "1000", "2", "8"), ("custom", "0", "5"), ("customer", "1")],
            [
                (),
                ("default", "1"),
                ("tse", "1000", "2"),
                ("tse", "0", "2", "8"),
                ("tse", "1", "1", "8"),
                ("tse", "1", "2", "0"),
                ("tse", "1", "2", "1.5"),
                ("tse", "a", "2", "1"),
                ("custom",),
                ("custom", "1", "1"),
                ("custom", "-1"),
                ("custom", "inf"),
                ("custom", "nan"),
                ("other", "1"),
            ],
        ),
        (
            adapters(),
            [("path/to",), ("a=b", "c"), ('{"lora_name": "a", "lora_path": "b", "pinned": true}',)],
            [(), ("=b",), ("a=",), ("",), ('{"lora_name": "a"}',), ("{",), ('{"lora_name": 1, "lora_path": "b"}',)],
        ),
        (all_or_some("q", "k"), [("all",), ("q",), ("q", "k")], [(), ("all", "q"), ("v",)]),
        (ascending(), [(0.1, 1.0)], [(), (1.0, 1.0), (-1.0, 2.0), (2.0, 1.0)]),
        (json_object(), ["{}", '{"a": 1}'], ["", "[]", "{", "null", "[" * 100_000]),
        (json_list(), ["[]", "[1]"], ["", "{}", "["]),
        (json_counts(), ["[1]", "[8, 2]"], ["", "[]", "[0]", "[1.5]", "[true]", '["1"]', "8"]),
    ],
)
def test_checks_of_composed_values(check: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not check.accepts(value)] == []
    assert [value for value in bad if check.accepts(value)] == []
    assert check.expected


def test_adapters_as_json_keep_their_commas() -> None:
    text = 'a=b,{"lora_name": "x", "lora_path": "y"},z'
    assert ARGUMENTS["lora_paths"].parse(text) == ("a=b", '{"lora_name": "x", "lora_path": "y"}', "z")


def test_int8_pool_needs_the_capability() -> None:
    with pytest.raises(Refusal) as caught:
        resolved(user(kv_cache_dtype="int8"), model=model())
    (rejected,) = caught.value.rejections
    assert (rejected.code, "(capability int8_kv)" in rejected.reason) == ("capability_missing", True)
    able = manifest(capabilities=CAPABLE | {"int8_kv"})
    assert resolved(user(kv_cache_dtype="int8"), able, model=model()).config.platform.kv_cache_dtype == "int8"


def test_pools_of_8_bit_floats_and_their_scales_need_each_other_and_the_capability(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refusal:
        resolved(user(kv_cache_dtype="fp8_e4m3"), model=model())
    (rejected,) = refusal.value.rejections
    assert (rejected.code, "(capability fp8_kv)" in rejected.reason) == ("capability_missing", True)
    able = manifest(capabilities=CAPABLE | {"fp8_kv"})
    assert resolved(user(kv_cache_dtype="fp8_e5m2"), able, model=model()).config.platform.kv_cache_dtype == "fp8_e5m2"
    latent = model(cache_groups=(Latent((0,), 512, 64),))
    for facts, values, code in (
        (latent, {"kv_cache_dtype": "fp8_e4m3"}, "dtype_missing"),
        (model(), {"quantization_param_path": tmp_path}, "other_missing"),
        (model(), {"calculate_kv_scales": True, "kv_cache_dtype": "bfloat16"}, "other_missing"),
        (
            model(),
            {"calculate_kv_scales": True, "kv_cache_dtype": "fp8_e4m3", "quantization_param_path": tmp_path},
            "excluded",
        ),
    ):
        with pytest.raises(Refusal) as refusal:
            resolved(user(**values), able, model=facts)
        assert code in [rejection.code for rejection in refusal.value.rejections]


@every(
    ("settings", "facts", "capability"),
    [
        ({"torchao_config": "int8dq"}, {}, "w8a8"),
        ({"torchao_config": "int8wo"}, {}, "int8_weights"),
        ({}, {"quantization": "w8a8_int8", "stored_types": {"int8": 9}}, "w8a8"),
        ({"quantization": "w8a8_int8"}, {"stored_types": {"int8": 9}}, "w8a8"),
    ],
)
def test_int8_weights_need_the_capability(settings: dict[str, Any], facts: dict[str, Any], capability: str) -> None:
    """The quantization of the checkpoint is refused like that of an argument."""
    with pytest.raises(Refusal) as caught:
        resolved(user(**settings), model=model(**facts))
    (rejected,) = caught.value.rejections
    assert (rejected.code, f"(capability {capability})" in rejected.reason) == ("capability_missing", True)
    able = manifest(capabilities=CAPABLE | {capability})
    config = resolved(user(**settings), able, model=model(**facts)).config
    assert config.weights.quantization == (None if "torchao_config" in settings else "w8a8_int8")
