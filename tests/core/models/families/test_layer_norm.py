"""Decoders with LayerNorm have the logits and parameters of transformers, and its greedy tokens in the engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import engine, messages, saved_small
from every import every
from models_small import SIZES, built, edit_config, expected_logits, our_logits, randomized, tokens_of
from planned_sizes import check_sizes
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from srv.errors import ModelError, Refusal
from srv.models import derive
from srv.models.facts.attention_layers import attention_layers
from srv.models.facts.sharding import rank_facts
from srv.models.families.trees import native_tree
from srv.models.modules.decoder import Decoder
from srv.models.read import read_facts
from srv.models.unsupported import UnsupportedConfig
from srv.planning.resolution import resolve_launch
from srv.testing.engine import user_input

N_SIZES = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}
BLOOM = {"hidden_size": 48, "n_layer": 3, "n_head": 6}
MPT = {"d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 256}
COHERE = {"logit_scale": 0.3, "pad_token_id": 0}
COHERE2 = {**COHERE, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2}
QUARTER = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}}
ALL_HEADS = {"num_key_value_heads": 6}
OPT = {"hidden_size": 48, "ffn_dim": 80, "word_embed_proj_dim": 48, "init_std": 0.25}
XGLM = {"d_model": 48, "num_layers": 3, "attention_heads": 6, "ffn_dim": 80, "init_std": 0.25}
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}
EIGHT_HEADS = {"hidden_size": 64, "num_attention_heads": 8}  # the slopes of ALiBi are then exact in bfloat16
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", {}),
    "stablelm in parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "stablelm with norms of heads": ("stablelm", {"qk_layernorm": True, "tie_word_embeddings": True}),
    "gptj": ("gptj", {**N_SIZES, "rotary_dim": 4}),
    "gptj, all of a head rotated": ("gptj", {**N_SIZES, "rotary_dim": 8, "n_inner": 80, "activation_function": "relu"}),
    "falcon with one key head": ("falcon", {}),
    "falcon with few key heads": ("falcon", GROUPED),
    "falcon with few key heads and one norm": ("falcon", {**GROUPED, "num_ln_in_parallel_attn": 1, "bias": True}),
    "falcon in sequence": ("falcon", {"multi_query": False, "parallel_attn": False, "tie_word_embeddings": False}),
    "falcon with alibi": (
        "falcon",
        {**EIGHT_HEADS, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon with alibi in groups": ("falcon", {**EIGHT_HEADS, **GROUPED, "alibi": True, "ffn_hidden_size": 80}),
    "bloom": ("bloom", BLOOM),
    "bloom with the residual of norms": (
        "bloom",
        {
            **BLOOM,
            "num_attention_heads": 8,
            "apply_residual_connection_post_layernorm": True,
            "tie_word_embeddings": False,
        },
    ),
    "mpt": ("mpt", MPT),
    "mpt with another scale": ("mpt", {**MPT, "num_attention_heads": 12, "attn_config": {"softmax_scale": 0.3}}),
    "xglm": ("xglm", XGLM),
    "cohere": ("cohere", COHERE),
    "cohere with norms of heads": (
        "cohere",
        {**COHERE, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2": ("cohere2", COHERE2),
    "cohere2 by layer types": (
        "cohere2",
        {**COHERE, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "phi": ("phi", {**ALL_HEADS, "hidden_act": "gelu_new"}),
    "phi with few key heads": ("phi", {**QUARTER, "hidden_act": "gelu_new"}),
    "gpt_neox": ("gpt_neox", {"hidden_act": "gelu"}),
    "gpt_neox in sequence": (
        "gpt_neox",
        {**QUARTER, "hidden_act": "gelu_fast", "use_parallel_residual": False, "attention_bias": False},
    ),
    "opt": ("opt", OPT),
    "opt without biases": ("opt", {**OPT, "enable_bias": False, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", N_SIZES),
    "gpt2 with a narrow mlp": ("gpt2", {**N_SIZES, "n_inner": 80, "activation_function": "relu"}),
    "nemotron": ("nemotron", {"head_dim": 8}),
    "nemotron with biases": (
        "nemotron",
        {**QUARTER, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "jais2": ("jais2", {}),
    "jais2 without biases": ("jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
    "persimmon": ("persimmon", {"num_attention_heads": 3}),
    "persimmon without norms of heads": (
        "persimmon",
        {**QUARTER, "qk_layernorm": False, "hidden_act": "relu", "tie_word_embeddings": True},
    ),
    "xglm without a scale": ("xglm", {**XGLM, "scale_embedding": False, "activation_function": "relu"}),
}
SHARDED = [
    "stablelm in parallel",
    "gptj",
    "falcon with few key heads and one norm",
    "falcon with one key head",
    "bloom with the residual of norms",
    "mpt",
    "xglm",
    "cohere2",
    "gpt2 with a narrow mlp",
    "nemotron with biases",
    "jais2",
    "persimmon without norms of heads",
]


def made(kind: str, fields: dict[str, Any]) -> Any:
    """A random model of transformers."""
    config = AutoConfig.for_model(kind, **{**SIZES, "vocab_size": 98, **fields})
    torch.manual_seed(0)
    own = "sdpa" if kind == "falcon" else "eager"  # the latter adds the biases of ALiBi twice
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation=own, dtype=torch.float32))


def saved(case: str, folder: Path) -> Any:
    model = made(*CASES[case])
    model.save_pretrained(folder)
    return model


@every("case", CASES)
def test_logits_and_parameter_counts_equal_transformers(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    tokens = tokens_of(model)
    ours = built(tmp_path)
    assert isinstance(ours, Decoder)
    expected = expected_logits(model, tokens)
    torch.testing.assert_close(our_logits(ours, tokens), expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.3, "the logits are too flat for the comparison to mean anything"
    facts = read_facts(tmp_path)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert facts.parameters == derive.parameters(native_tree(facts.architecture, facts.config)) == counted
    check_sizes(tmp_path, ours)
    (layer, *_) = ours.attention_layers
    assert (facts.heads, facts.kv_heads, facts.head_dim) == (layer.heads, layer.kv_heads, layer.head_dim)


@every("case", SHARDED)
def test_ranks_compute_the_same_logits(case: str, tmp_path: Path) -> None:
    """Fused matrices are divided before they are sliced, and each rank has the slopes of its heads."""
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


# Heads of 16, so that models with rotary embeddings run on the native kernels, in captured steps.
WIDE = {"hidden_size": 96, "n_embd": 96}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "StableLmForCausalLM": ("stablelm", {**WIDE, "use_parallel_residual": True}),
    "GPTJForCausalLM": ("gptj", {**N_SIZES, **WIDE, "rotary_dim": 4}),
    "FalconForCausalLM": ("falcon", {**WIDE, **GROUPED}),
    "BloomForCausalLM": ("bloom", BLOOM),
    "MptForCausalLM": ("mpt", MPT),
    "XGLMForCausalLM": ("xglm", XGLM),
    "CohereForCausalLM": ("cohere", {**WIDE, **COHERE}),
    "Cohere2ForCausalLM": ("cohere2", {**WIDE, **COHERE2}),
    "Starcoder2ForCausalLM": ("starcoder2", {**WIDE, "sliding_window": 9}),
    "PhiForCausalLM": ("phi", {**WIDE, "hidden_act": "gelu_new"}),
    "GPTNeoXForCausalLM": ("gpt_neox", {**WIDE, "hidden_act": "gelu"}),
    "OPTForCausalLM": ("opt", {**OPT, **WIDE, "word_embed_proj_dim": 96}),
    "GPT2LMHeadModel": ("gpt2", {**N_SIZES, **WIDE}),
}
TORCH_ONLY = ("bloom", "mpt", "xglm")  # ALiBi, or heads of another size


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts are split into chunks and hit the prefix cache; models with ALiBi run on torch's operators."""
    small = saved_small(made(*SERVED[name]), tmp_path, lengths=(5, 17, 33))
    assert read_facts(tmp_path).architecture == name
    with engine(small, 16, 16) as served:
        missed, hits = (served.generate(messages(small.prompts)) for _ in range(2))
        assert (served.stats().replayed_steps > 0) == (SERVED[name][0] not in TORCH_ONLY)
    assert [result.tokens for result in missed] == [result.tokens for result in hits] == small.tokens
    assert [result.cached_tokens for result in hits] == [0, 16, 32]


def test_backends_without_alibi_are_refused(tmp_path: Path) -> None:
    made("bloom", {**BLOOM, "hidden_size": 96}).save_pretrained(tmp_path)
    arguments = ["--device", "cpu", "--model-path", str(tmp_path), "--dtype", "float32"]
    choice = resolve_launch(user_input(arguments)).resolved.backends["decode_attention_backend"]
    assert choice.spec.name == "torch_native"
    with pytest.raises(Refusal, match=r"layers 0-2: it does not support linear position biases \(ALiBi\)"):
        resolve_launch(user_input([*arguments, "--attention-backend", "native"]))


def test_a_rank_has_the_slopes_of_its_heads(tmp_path: Path) -> None:
    made("bloom", {**BLOOM, "num_attention_heads": 8}).save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    parts = on_ranks(2, lambda group, comm: built(tmp_path, group=group, communicator=comm).attention_layers[0].alibi)
    whole = attention_layers(facts)[0].alibi
    assert whole is not None
    assert parts == [whole[:4], whole[4:]]
    assert attention_layers(rank_facts(facts, 2))[0].alibi == whole[:4]
    assert whole[:2] == (0.5, 0.25)


def test_the_names_of_checkpoints_on_the_hub(tmp_path: Path) -> None:
    """Those of Bloom have no "transformer."; those of GPT-J contain causal masks."""
    bloom, gptj = tmp_path / "bloom", tmp_path / "gptj"
    for case, folder in (("bloom", bloom), ("gptj", gptj)):
        model = saved(case, folder)
        stored = load_file(folder / "model.safetensors")
        if folder is bloom:
            stored = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
        else:
            stored["transformer.h.1.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
            stored["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e9)
        save_file(stored, folder / "model.safetensors")
        tokens = tokens_of(model)
        torch.testing.assert_close(
            our_logits(built(folder), tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4
        )
        assert read_facts(folder).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_fused_matrix_of_another_size_is_reported(tmp_path: Path) -> None:
    saved("bloom", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.0.self_attention.query_key_value.weight"
    save_file({**stored, name: stored[name][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.(k_proj|q_proj|query_key_value)"):
        built(tmp_path)


def test_weights_are_quantized_at_load(tmp_path: Path) -> None:
    model = saved("falcon with few key heads", tmp_path)
    tokens = tokens_of(model)
    expected = expected_logits(model, tokens)
    ours = our_logits(built(tmp_path, online_quantization="int8wo"), tokens)
    assert 1e-4 < float((ours - expected).norm() / expected.norm()) < 0.1


FALCON = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 97}


@every(
    ("name", "fields", "named"),
    [
        ("StableLmForCausalLM", {**SIZES, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("GPTJForCausalLM", {**N_SIZES, "rotary_dim": 3}, "rotary_dim = 3 of 8 is not an even number"),
        ("GPTJForCausalLM", {**N_SIZES, "rotary_dim": None}, "rotary_dim = None of 8 is not an even number"),
        (
            "GPTJForCausalLM",
            {**N_SIZES, "rotary_dim": 4, "activation_function": "tanh"},
            "activation_function = 'tanh'",
        ),
        ("FalconForCausalLM", {**FALCON, "hidden_size": 50}, "a hidden size of 50 with 6 heads"),
        ("FalconForCausalLM", {**FALCON, **GROUPED, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn = 3"),
        ("FalconForCausalLM", {**FALCON, **GROUPED, "parallel_attn": False}, "'parallel_attn': False"),
        ("FalconForCausalLM", {**FALCON, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
        ("BloomForCausalLM", {**BLOOM, "slow_but_exact": True}, "slow_but_exact = True"),
        ("MptForCausalLM", {**MPT, "logit_scale": 0.5}, "logit_scale = 0.5"),
        ("MptForCausalLM", {**MPT, "attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv = 6"),
        ("MptForCausalLM", {**MPT, "attn_config": {"alibi": False}}, "attn_config.alibi = False"),
        ("MptForCausalLM", {**MPT, "attn_config": 5}, "attn_config = 5"),
        ("XGLMForCausalLM", {**XGLM, "add_cross_attention": True}, "add_cross_attention = True"),
        ("CohereForCausalLM", {**SIZES, "logit_scale": 0}, "logit_scale = 0.0 is not a positive number"),
        ("Cohere2ForCausalLM", {**SIZES, "layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ("Starcoder2ForCausalLM", {**SIZES, "hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("PhiForCausalLM", {**SIZES, "qk_layernorm": True}, "qk_layernorm = True"),
        ("OPTForCausalLM", {**OPT, "word_embed_proj_dim": 24}, "word_embed_proj_dim = 24"),
        ("OPTForCausalLM", {**OPT, "do_layer_norm_before": False}, "do_layer_norm_before = False"),
        ("GPT2LMHeadModel", {**N_SIZES, "scale_attn_weights": False}, "scale_attn_weights = False"),
    ],
)
def test_fields_that_are_not_implemented_are_refused_by_name(name: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfig, match=re.escape(named)):
        native_tree(name, fields)


def test_the_class_that_published_mpt_checkpoints_name_has_native_layers(tmp_path: Path) -> None:
    model = saved("mpt", tmp_path)
    tokens = tokens_of(model)
    edit_config(tmp_path, architectures=["MPTForCausalLM"])
    facts = read_facts(tmp_path)
    assert (facts.architecture, facts.unknown_sizes) == ("MptForCausalLM", None)
    ours = our_logits(built(tmp_path, impl="srv"), tokens)
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=3e-4, rtol=1e-3)


def test_a_refused_field_is_named_when_a_model_is_built(tmp_path: Path) -> None:
    """transformers cannot serve these classes either, so that the log names the field, and the error the class."""
    saved("mpt", tmp_path)
    edit_config(tmp_path, attn_config={"clip_qkv": 6.0})
    with pytest.raises(ModelError, match=r"attn_config\.clip_qkv = 6\.0"):
        built(tmp_path, impl="srv")
    with pytest.raises(ModelError, match="does not support attention backends"):
        built(tmp_path)


def test_a_field_of_a_type_that_transformers_refuses(tmp_path: Path) -> None:
    saved("mpt", tmp_path)
    edit_config(tmp_path, attn_config={"clip_qkv": 6})
    with pytest.raises(ModelError, match="transformers cannot build it: StrictDataclassFieldValidationError"):
        built(tmp_path)
