"""Further dense architectures have the logits and parameters of transformers, and its greedy tokens in the engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import engine, messages, saved_small
from every import every
from gguf import GGMLQuantizationType as Kind
from models_small import SIZES, built, edit_config, expected_logits, our_logits, randomized, tokens_of, write_gguf
from planned_sizes import check_sizes
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from srv.models import derive
from srv.models.blueprint import Attention, walk
from srv.models.families.trees import native_tree
from srv.models.read import read_facts
from srv.models.unsupported import InvalidConfig, UnsupportedConfig

PAD = {"pad_token_id": 0}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
HALF = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.4], "long_factor": [2.0, 8.0], "rope_theta": 500.0}
GEMMA2 = {**PAD, "head_dim": 8, "query_pre_attn_scalar": 11, "sliding_window": 5, "attn_logit_softcapping": 2.0}
GLM = {**PAD, "head_dim": 8, "attention_bias": True}
GLM_MOE = {
    **PAD,
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
LLAMA4 = {
    **PAD,
    "head_dim": 8,
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
    "num_local_experts": 4,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.6,
}
OLMOE = {**PAD, "num_experts": 7, "num_experts_per_tok": 3}
GPT_OSS = {**PAD, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 16.0, "original_max_position_embeddings": 4}
MINISTRAL3 = {
    **PAD,
    "head_dim": 8,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
}
MINISTRAL = {**PAD, "head_dim": 8, "sliding_window": 5}
SEED_OSS = {**PAD, "head_dim": 16}
OLMO3 = {**PAD, "num_hidden_layers": 4, "sliding_window": 5}
EXAONE4_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
EXAONE4 = {**PAD, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 4}
NTK = {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0}
HUNYUAN = {**PAD, "head_dim": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", GEMMA2),
    "gemma2 with other layers and logits": (
        "gemma2",
        {
            **GEMMA2,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "final_logit_softcapping": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2 without bounds": ("gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "olmo2": ("olmo2", PAD),
    "olmo2 with biases": ("olmo2", {**PAD, "attention_bias": True, "tie_word_embeddings": True}),
    "olmoe": ("olmoe", OLMOE),
    "olmoe with bounds, biases and weights of a sum of 1": (
        "olmoe",
        {**OLMOE, "clip_qkv": 0.8, "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", PAD),
    "phi3 with a window and half of a head rotated": ("phi3", {**PAD, **HALF, "sliding_window": 5}),
    "phi3 with long rope": (
        "phi3",
        {
            **PAD,
            "original_max_position_embeddings": 16,
            "rope_parameters": {**LONG, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "glm": ("glm", GLM),
    "glm4": ("glm4", GLM),
    "glm4 without biases, of a quarter": (
        "glm4",
        {**GLM, "attention_bias": False, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
    ),
    "glm4_moe": ("glm4_moe", GLM_MOE),
    "glm4_moe with norms of heads, in groups": (
        "glm4_moe",
        {**GLM_MOE, "use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1},
    ),
    "llama4": ("llama4_text", LLAMA4),
    "llama4 with layers without experts, and two experts per token": (
        "llama4_text",
        {**LLAMA4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "use_qk_norm": False},
    ),
    "llama4 without temperature": ("llama4_text", {**LLAMA4, "attn_temperature_tuning": False, "attention_bias": True}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss without biases of attention": (
        "gpt_oss",
        {**GPT_OSS, "attention_bias": False, "layer_types": ["full_attention"] * 3, "rope_parameters": ROPE},
    ),
    "ernie4_5": ("ernie4_5", {**PAD, "head_dim": 8}),
    "ernie4_5 with biases": ("ernie4_5", {**PAD, "head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    "ministral3": ("ministral3", MINISTRAL3),
    "ministral3 with a window and the default of its RoPE": (
        "ministral3",
        {**PAD, "head_dim": 8, "sliding_window": 5, "tie_word_embeddings": True},
    ),
    "ministral": ("ministral", MINISTRAL),
    "ministral by layer types": (
        "ministral",
        {**MINISTRAL, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "ministral without windows": (
        "ministral",
        {**MINISTRAL, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "seed_oss": ("seed_oss", SEED_OSS),
    "seed_oss with all biases": ("seed_oss", {**SEED_OSS, "attention_out_bias": True, "mlp_bias": True}),
    "seed_oss without biases": ("seed_oss", {**SEED_OSS, "attention_bias": False, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", OLMO3),
    "olmo3 with biases, and RoPE scaled in the layer with full attention": (
        "olmo3",
        {**OLMO3, "attention_bias": True, "rope_scaling": {**YARN, "attention_factor": 1.2}},
    ),
    "arcee": ("arcee", PAD),
    "arcee with biases": (
        "arcee",
        {
            **PAD,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
            "rope_parameters": YARN,
        },
    ),
    "gemma": ("gemma", {**PAD, "head_dim": 8}),
    "gemma with biases": (
        "gemma",
        {**PAD, "head_dim": 16, "attention_bias": True, "hidden_act": "gelu", "tie_word_embeddings": False},
    ),
    "exaone4": ("exaone4", EXAONE4),
    "exaone4 by layer types": ("exaone4", {**EXAONE4, "layer_types": EXAONE4_KINDS, "sliding_window_pattern": None}),
    "exaone4 without windows": (
        "exaone4",
        {**EXAONE4, "sliding_window": None, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True},
    ),
    "hunyuan": ("hunyuan_v1_dense", HUNYUAN),
    "hunyuan with another base and biases": (
        "hunyuan_v1_dense",
        {**HUNYUAN, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": NTK},
    ),
    "apertus": ("apertus", PAD),
    "apertus with biases and another RoPE": (
        "apertus",
        {**PAD, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": ROPE},
    ),
    "apertus with an activation without parameters": ("apertus", {**PAD, "hidden_act": "relu2"}),
    "olmo": ("olmo", PAD),
    "olmo with bounds and biases": (
        "olmo",
        {**PAD, "clip_qkv": 0.8, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
SHARDED = [
    "gemma2 with other layers and logits",
    "phi3 with a window and half of a head rotated",
    "glm4",
    "glm4_moe",
    "ernie4_5 with biases",
    "llama4",
    "gpt_oss",
    "ministral3",
    "olmo3 with biases, and RoPE scaled in the layer with full attention",
    "arcee with biases",
    "gemma",
    "exaone4",
    "hunyuan",
    "apertus with biases and another RoPE",
]


def made(kind: str, fields: dict[str, Any]) -> Any:
    """A random model of transformers."""
    config = AutoConfig.for_model(kind, **{**SIZES, "vocab_size": 98, **fields})
    torch.manual_seed(0)
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    return model


def saved(case: str, folder: Path) -> Any:
    model = made(*CASES[case])
    model.save_pretrained(folder)
    return model


@every("case", CASES)
def test_logits_and_parameter_counts_equal_transformers(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    tokens = tokens_of(model)
    ours = built(tmp_path, impl="srv")
    expected = expected_logits(model, tokens)
    torch.testing.assert_close(our_logits(ours, tokens), expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.3, "the logits are too flat for the comparison to mean anything"
    facts = read_facts(tmp_path)
    stored = load_file(tmp_path / "model.safetensors").values()
    counted = sum(tensor.numel() for tensor in stored)  # with the biases of routers, which are buffers
    assert counted >= sum(parameter.numel() for parameter in model.parameters())
    assert facts.parameters == derive.parameters(native_tree(facts.architecture, facts.config)) == counted
    check_sizes(tmp_path, ours)
    (layer, *_) = ours.attention_layers
    assert (facts.heads, facts.kv_heads, facts.head_dim) == (layer.heads, layer.kv_heads, layer.head_dim)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """Checkpoints of GLM-4.5, and of DeepSeek-V3, have one after the layers of the model."""
    model = saved("glm4_moe", tmp_path)
    tokens, before = tokens_of(model), read_facts(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    more = {name.replace("layers.2", "layers.3"): tensor for name, tensor in stored.items() if "layers.2" in name}
    extra = {"model.layers.3.eh_proj.weight": torch.ones(48, 96), "model.layers.3.enorm.weight": torch.ones(48)}
    save_file(
        {**stored, **{name: tensor.clone() for name, tensor in more.items()}, **extra}, tmp_path / "model.safetensors"
    )
    facts = read_facts(tmp_path)
    assert (facts.parameters, facts.weight_bytes) == (before.parameters, before.weight_bytes)
    ours = built(tmp_path, impl="srv")
    assert ours.loaded_bytes() == facts.weight_bytes
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4)


@every("case", SHARDED)
def test_ranks_compute_the_same_logits(case: str, tmp_path: Path) -> None:
    """Fused matrices are divided before they are sliced."""
    model = saved(case, tmp_path)
    tokens = tokens_of(model, 12)
    expected = our_logits(built(tmp_path), tokens)
    parts = on_ranks(
        2,
        lambda group, communicator: our_logits(built(tmp_path, group=group, communicator=communicator), tokens),
    )
    for logits in parts:
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
        assert torch.equal(logits, parts[0]), "ranks sample from different logits"


WIDE = {**PAD, "hidden_size": 96}  # heads of 16, so that models run on the native kernels, in captured steps
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma2ForCausalLM": ("gemma2", {**GEMMA2, "head_dim": 16}),
    "Olmo2ForCausalLM": ("olmo2", WIDE),
    "Phi3ForCausalLM": ("phi3", {**WIDE, **HALF, "sliding_window": 9}),
    "GlmForCausalLM": ("glm", {**GLM, "head_dim": 16}),
    "Glm4ForCausalLM": ("glm4", {**GLM, "head_dim": 16}),
    "Ernie4_5ForCausalLM": ("ernie4_5", {**PAD, "head_dim": 16}),
    "Glm4MoeForCausalLM": ("glm4_moe", {**GLM_MOE, "head_dim": 16}),
    "OlmoeForCausalLM": ("olmoe", {**OLMOE, **WIDE, "clip_qkv": 1.2}),
    "Llama4ForCausalLM": ("llama4_text", {**LLAMA4, "head_dim": 16}),
    "GptOssForCausalLM": ("gpt_oss", {**GPT_OSS, "head_dim": 16}),
}
MIXTURES = (
    "Glm4MoeForCausalLM",
    "OlmoeForCausalLM",
    "Llama4ForCausalLM",
    "GptOssForCausalLM",
)  # whose steps a platform may run without capturing them


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts are split into chunks and hit the prefix cache, in captured steps."""
    small = saved_small(made(*SERVED[name]), tmp_path, lengths=(5, 17, 33))
    assert read_facts(tmp_path).architecture == name
    with engine(small, 16, 16, model_impl="srv") as served:
        missed, hits = (served.generate(messages(small.prompts)) for _ in range(2))
        assert served.stats().replayed_steps > 0 or name in MIXTURES
        assert served.context.resolved.config.platform.attention_backend == "native"
    assert [result.tokens for result in missed] == [result.tokens for result in hits] == small.tokens
    assert [result.cached_tokens for result in hits] == [0, 16, 32]


WINDOWS = ["sliding_attention"] * 3
CAPS = {"ARCH__attn_logit_softcapping": 2.0, "ARCH__final_logit_softcapping": 30.0}


@every(
    ("kind", "fields", "stored", "dequantize"),
    [
        ("gemma2", {**GEMMA2, "head_dim": 64, "query_pre_attn_scalar": 64}, "F32", True),
        ("gemma2", {**GEMMA2, "head_dim": 64, "query_pre_attn_scalar": 64}, "Q8_0", False),
        ("olmo2", PAD, "Q8_0", True),
        ("ernie4_5", {**PAD, "head_dim": 64}, "F32", True),
        ("ernie4_5", {**PAD, "head_dim": 64}, "Q8_0", False),
    ],
)
def test_gguf_logits_equal_transformers(
    kind: str, fields: dict[str, Any], stored: str, dequantize: bool, tmp_path: Path
) -> None:
    """Those of ERNIE have adjacent rotary pairs, as its safetensors files do."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "initializer_range": 0.1}
    model = made(kind, {**wide, **fields})
    path = tmp_path / "model.gguf"
    write_gguf(path, model, kind, Kind[stored], **(CAPS if kind == "gemma2" else {}))
    tokens = tokens_of(model)
    ours = our_logits(built(path, impl="srv", dequantize=dequantize), tokens)
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=2e-4, rtol=1e-4)


@every(
    ("name", "fields", "named"),
    [
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping = -1.0 is not a positive"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window = None of layers of sliding_attention"),
        ("Olmo2ForCausalLM", HALF, "rotary embeddings of only 4 of 8 dimensions"),
        ("Phi3ForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (
            "Phi3ForCausalLM",
            {"rope_parameters": {"rope_type": "longrope"}},
            "lacks short_factor, long_factor",
        ),
        ("MiniMaxM2ForCausalLM", {"use_qk_norm": False}, "use_qk_norm = False"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0]}, "attn_type_list with layers of linear attention"),
        ("MiniMaxM2ForCausalLM", {"head_dim": 10, "rotary_dim": 3}, "3 rotated dimensions of 10"),
        ("MinistralForCausalLM", {"sliding_window": None, "layer_types": WINDOWS}, "without a sliding_window"),
        ("Ministral3ForCausalLM", {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": WINDOWS}, "sliding_window = None of layers"),
        ("Exaone4ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ("Olmo3ForCausalLM", {"sliding_window": None}, "sliding_window = None of layers of sliding_attention"),
        ("SeedOssForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("HunYuanDenseV1ForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("ArceeForCausalLM", {"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ("ApertusForCausalLM", {"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ("ApertusForCausalLM", {"qk_norm": False}, "qk_norm = False"),
        ("ApertusForCausalLM", {"post_norm": True}, "post_norm = True"),
        ("GemmaForCausalLM", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("OlmoForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 0.3, "head_dim": 10}, "3 rotated dimensions of 10"),
    ],
)
def test_fields_that_are_not_implemented_are_refused_by_name(name: str, fields: dict[str, Any], named: str) -> None:
    base = {**SIZES, "head_dim": 8}
    native_tree(name, base)
    with pytest.raises((InvalidConfig, UnsupportedConfig), match=re.escape(named)):
        native_tree(name, {**base, **fields})


@every("name", ["Exaone4ForCausalLM", "ExaoneMoeForCausalLM"])
def test_the_letters_of_a_pattern_say_which_layers_have_windows(name: str) -> None:
    """As in EXAONE 4 32B, where layers with full attention have no rotation. transformers needs `layer_types`."""
    fields = {**SIZES, "num_hidden_layers": 5, "sliding_window": 9, "sliding_window_pattern": "LLG"}
    mixers = [each for _, each in walk(native_tree(name, fields)) if isinstance(each, Attention)]
    assert [each.window for each in mixers] == [9, 9, None, 9, None]
    assert [each.rope is None for each in mixers] == [False, False, True, False, True]


def test_experts_that_are_not_in_mxfp4_as_stated_are_loaded_as_stored(tmp_path: Path) -> None:
    """Tensors decide; those in MXFP4 are tested with the method."""
    model = saved("gpt_oss", tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    tokens = tokens_of(model)
    torch.testing.assert_close(
        our_logits(built(tmp_path), tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4
    )
