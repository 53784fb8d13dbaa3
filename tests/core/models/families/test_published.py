"""Sizes of well-known checkpoints from their configurations alone."""

from __future__ import annotations

from typing import Any

import pytest
from every import every
from sizes_expected import SIZES, Sizes
from sizes_published import CONFIGS, model_type_of

from srv.models import derive
from srv.models.blueprint import Part
from srv.models.config.stored_sizes import stored_bytes, stored_types
from srv.models.families.trees import tree_for_sizes
from srv.models.unsupported import InvalidConfig, UnknownSizes
from srv.quantization.method import UnknownStorage
from srv.specs import Latent, Recurrent, SlidingWindow

CONTEXT = 1 << 20
LAYERS = 8  # that the slow test compares


def sizes(part: Part) -> Sizes:
    groups = derive.cache_groups(part, CONTEXT, "bfloat16")
    recurrent = sum(group.bytes_per_slot() for group in groups if isinstance(group, Recurrent))
    paged = sum(group.bytes_per_token("bfloat16") for group in groups if not isinstance(group, Recurrent))
    return Sizes(derive.parameters(part), derive.active_parameters(part), paged, recurrent)


@every("name", sorted(CONFIGS))
def test_sizes_of_well_known_checkpoints(name: str) -> None:
    architecture, fields = CONFIGS[name]
    assert sizes(tree_for_sizes(architecture, fields)) == SIZES[name]


def test_latent_attention_keeps_576_numbers_per_token_and_layer() -> None:
    (group,) = derive.cache_groups(tree_for_sizes(*CONFIGS["DeepSeek-V3"]), CONTEXT, "bfloat16")
    assert isinstance(group, Latent)
    assert (len(group.layers), group.latent_dim + group.rope_dim) == (61, 576)
    assert group.bytes_per_token("bfloat16") == 61 * 576 * 2


def test_layers_with_a_window_are_a_group_of_their_own() -> None:
    full, window = derive.cache_groups(tree_for_sizes(*CONFIGS["gemma-3-27b"]), CONTEXT, "bfloat16")
    assert isinstance(window, SlidingWindow)
    assert (len(full.layers), len(window.layers), window.window) == (10, 52, 1024)
    (everything,) = derive.cache_groups(tree_for_sizes(*CONFIGS["gemma-3-27b"]), 1024, "bfloat16")
    assert len(everything.layers) == 62, "a window that is not shorter than the context frees nothing"


def shortened(fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration with its first layers only."""
    for part in ("text_config", "vision_config"):
        if part in fields:
            fields = fields | {part: shortened(fields[part])}
    counts = {name: fields[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "depth") if name in fields}
    short = fields | {name: min(LAYERS, count) for name, count in counts.items()}
    per_layer = ("layer_types", "moe_topk", "hybrid_override_pattern")
    short |= {name: fields[name][:LAYERS] for name in per_layer if name in fields}
    chosen = {"deepstack_visual_indexes": [1, 3], "attn_layer_indices": [2]}
    return short | {name: value for name, value in chosen.items() if name in fields}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_layers_of_well_known_checkpoints_equal_transformers() -> None:
    from sizes_reference import CONFIG_MAPPING, config_class, meta_model, parameters, stored_buffers

    wrong = {}
    published = {name: each for name, each in CONFIGS.items() if model_type_of(each[0]) in CONFIG_MAPPING}
    for name, (architecture, fields) in published.items():
        short = shortened(fields)
        model = meta_model(architecture, config_class(model_type_of(architecture))(**short))
        buffers = 0 if architecture == "MiniMaxForCausalLM" else stored_buffers(model)
        ours, theirs = derive.parameters(tree_for_sizes(architecture, short)), parameters(model) + buffers
        if ours != theirs:
            wrong[name] = (ours, theirs)
    assert wrong == {}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def compressed(form: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "strategy": "channel", **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ignore, "config_groups": {"group_0": group}}


NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": None,
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


def torchao(kind: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": fields, "_version": 2}}}


@every(("name", "size"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)])
def test_mxfp4_checkpoints_have_the_size_of_their_published_files(name: str, size: int) -> None:
    assert stored_bytes(stored_types(tree_for_sizes(*CONFIGS[name]), "bfloat16", MXFP4)) == size


# A Llama of one layer; its linear layers, of which each case lists what is stored.
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = [(64, 64), (32, 64), (32, 64), (64, 64), (160, 64), (160, 64), (64, 160)]  # [outputs, inputs]
LINEAR = sum(outputs * inputs for outputs, inputs in SHAPES)
OUTPUTS = sum(outputs for outputs, _ in SHAPES)
GROUPS = sum(outputs * inputs // 32 for outputs, inputs in SHAPES)  # scales of groups of 32 inputs
REST = 2 * 96 * 64 + 3 * 64  # embedding, output layer and norms


@every(
    ("quantization", "expected"),
    [
        (
            FP8 | {"weight_block_size": [32, 48]},
            {"float8_e4m3fn": LINEAR, "float32": 4 + 2 + 2 + 4 + 10 + 10 + 8, "bfloat16": REST},
        ),
        (
            FP8 | {"weight_block_size": None, "activation_scheme": "static", "ignored_layers": ["self_attn.q_proj"]},
            {"float8_e4m3fn": LINEAR - 64 * 64, "float32": 2 * 6, "bfloat16": REST + 64 * 64},
        ),
        (
            AWQ | {"group_size": 32},
            {"int32": LINEAR // 8 + GROUPS // 8, "float16": GROUPS, "bfloat16": REST},
        ),
        (
            AWQ | {"group_size": 32, "zero_point": False, "modules_to_not_convert": ["mlp"]},
            {"int32": 12288 // 8 + 12288 // 32 // 8, "float16": 12288 // 32, "bfloat16": REST + 3 * 160 * 64},
        ),
        (
            GPTQ | {"group_size": 32},
            {"int32": LINEAR // 8 + GROUPS // 8 + 6 * 64 + 160, "float16": GROUPS, "bfloat16": REST},
        ),
        (
            GPTQ | {"group_size": -1, "bits": 8, "lm_head": True},
            {
                "int32": (LINEAR + 96 * 64) // 4 + (OUTPUTS + 96) // 4 + 6 * 64 + 160 + 64,
                "float16": OUTPUTS + 96,
                "bfloat16": REST - 96 * 64,
            },
        ),
        (
            GPTQ | {"group_size": 32, "dynamic": {"-:.*self_attn": {}}},
            {"int32": 3840 + 120 + 288, "float16": 960, "bfloat16": REST + 12288},
        ),
        (
            compressed("float-quantized", num_bits=8, type="float"),
            {"float8_e4m3fn": LINEAR, "bfloat16": REST + OUTPUTS},
        ),
        (
            compressed("int-quantized", ("re:.*mlp.*", "lm_head"), num_bits=8, type="int", symmetric=False),
            {"int8": 12288 + 192, "bfloat16": REST + 3 * 160 * 64 + 192},
        ),
        (
            compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
            {"int32": LINEAR // 8, "bfloat16": REST + GROUPS, "int64": 2 * 7},
        ),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
            {"uint8": LINEAR // 2, "float8_e4m3fn": LINEAR // 16, "float32": 7, "bfloat16": REST},
        ),
        (
            compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
            {"uint8": LINEAR // 2 + GROUPS, "bfloat16": REST},
        ),
        (
            NF4 | {"bnb_4bit_use_double_quant": False},
            {"uint8": LINEAR // 2, "float32": LINEAR // 64 + 16 * 7, "bfloat16": REST},
        ),
        (
            NF4 | {"llm_int8_skip_modules": ["mlp"]},  # and not the output layer
            {
                "uint8": (12288 + 96 * 64) // 2 + (12288 + 96 * 64) // 64,
                "float32": 5 * (16 + 1 + 256),
                "bfloat16": REST - 96 * 64 + 3 * 160 * 64,
            },
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None},
            {"int8": LINEAR, "float32": OUTPUTS, "uint8": 7, "bfloat16": REST},
        ),
        (
            {"quant_method": "w8a8_int8", "ignore": ["lm_head"]},
            {"int8": LINEAR, "float32": OUTPUTS, "bfloat16": REST},
        ),
        (MODELOPT, {"float8_e4m3fn": LINEAR, "float32": 2 * 7, "bfloat16": REST}),
        (
            MODELOPT | {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head", "model.layers.0.mlp*"]},
            {"float8_e4m3fn": 12288, "float32": 4, "bfloat16": REST + 3 * 160 * 64},
        ),
        (
            MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            {"float8_e4m3fn": LINEAR, "float32": OUTPUTS, "bfloat16": REST},
        ),
        (
            {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn", "lm_head"]},
            {"float8_e4m3fn": 3 * 160 * 64, "float32": 384, "bfloat16": REST + 12288},
        ),
        (torchao("Int8WeightOnlyConfig"), {"int8": LINEAR + OUTPUTS, "float32": OUTPUTS, "bfloat16": REST}),
        (
            torchao("Int4WeightOnlyConfig", group_size=32),
            {"int8": LINEAR // 2, "bfloat16": REST + 2 * GROUPS},
        ),
        (
            torchao("Float8WeightOnlyConfig") | {"modules_to_not_convert": ["mlp"]},
            {"float8_e4m3fn": 12288, "float32": 192, "bfloat16": REST + 3 * 160 * 64},
        ),
    ],
)
def test_what_each_method_stores(quantization: dict[str, Any], expected: dict[str, int]) -> None:
    assert stored_types(tree_for_sizes("LlamaForCausalLM", SMALL), "bfloat16", quantization) == expected


@pytest.mark.slow
def test_fp8_checkpoints_equal_those_of_transformers() -> None:
    """The layers that transformers makes for an FP8 checkpoint of Qwen3 have the same elements of each dtype."""
    import torch
    from sizes_reference import config_class, meta_model
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    architecture, fields = CONFIGS["Qwen3-32B"]
    model = meta_model(architecture, config_class("qwen3")(**shortened(fields)))
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    with torch.device("meta"):
        model = replace_with_fp8_linear(model, ["lm_head"], config, pre_quantized=True)
    counts: dict[str, int] = {}
    for tensor in model.parameters():
        name = str(tensor.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + tensor.numel()
    assert stored_types(tree_for_sizes(architecture, shortened(fields)), "bfloat16", FP8) == counts


@every(
    ("quantization", "reason"),
    [
        ({"quant_method": "quark"}, "quantized with quark are not known"),
        (MODELOPT | {"quant_algo": "NVFP4", "group_size": 32}, "its group_size is 32, not 16"),
        (torchao("Int4WeightOnlyConfig", group_size=48), "its groups have 48 inputs"),
        (compressed("mxfp4-pack-quantized", num_bits=6, type="float", group_size=32), "weights of 6 bits"),
        (AWQ | {"version": "marlin"}, "version marlin"),
        (AWQ | {"bits": 3}, "weights of 3 bits"),
        (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "differently from one another"),
        (FP8 | {"ignored_layers": ["model.layers.0.mlp.experts.5.down_proj"]}, "experts of one layer differently"),
        (GPTQ | {"dynamic": {"-:[": {}}}, "has 're:[', which is not a regular expression (unterminated"),
        (compressed("int-quantized", ("re:[",), num_bits=8, type="int"), "has 're:[', which is not a regular"),
        (compressed("int-quantized", (r"re:(\w)\1",), num_bits=8, type="int"), "needs backtracking to be matched"),
        (compressed("marlin-24", num_bits=4, type="int"), "format marlin-24"),
        (compressed("float-quantized", num_bits=8, type="float") | {"kv_cache_scheme": {"num_bits": 8}}, "cache"),
    ],
)
def test_no_size_is_claimed_for_other_forms(quantization: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownStorage) as caught:
        stored_types(tree_for_sizes("LlamaForCausalLM", SMALL), "bfloat16", quantization)
    assert reason in str(caught.value)


@every("quantization", [NF4, torchao("Int8WeightOnlyConfig")])
def test_experts_that_may_be_no_linear_layers_have_no_size(quantization: dict[str, Any]) -> None:
    architecture, fields = CONFIGS["Qwen3-30B-A3B"]
    with pytest.raises(UnknownStorage, match="depends on the release of transformers"):
        stored_types(tree_for_sizes(architecture, shortened(fields)), "bfloat16", quantization)


@every(
    ("architecture", "fields", "reason"),
    [
        ("RiddleForCausalLM", SMALL, "RiddleForCausalLM is an unknown architecture"),
        ("LlamaForCausalLM", SMALL | {"hidden_size": "wide"}, "hidden_size is 'wide', with which"),
        ("LlamaForCausalLM", SMALL | {"num_hidden_layers": -1}, "num_hidden_layers is -1, with which"),
        ("LlamaForCausalLM", SMALL | {"intermediate_size": -8}, "intermediate_size is -8, with which"),
        ("NemotronHForCausalLM", {"hidden_size": 64}, "lacks hybrid_override_pattern"),
        ("KimiLinearForCausalLM", {"linear_attn_config": [1]}, "linear_attn_config is [1], with which"),
    ],
)
def test_no_size_is_claimed_without_facts(architecture: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises((InvalidConfig, UnknownSizes)) as caught:
        tree_for_sizes(architecture, fields)
    assert reason in str(caught.value)


def test_a_hostile_pattern_takes_no_exponential_time() -> None:
    """By backtracking it would take years; the test ends, and the pattern matches no layer."""
    hostile = compressed("int-quantized", ("lm_head", "re:(.+)+!"), num_bits=8, type="int")
    stored = stored_types(tree_for_sizes("LlamaForCausalLM", SMALL), "bfloat16", hostile)
    assert stored["int8"] == LINEAR
