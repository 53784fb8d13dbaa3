"""Classes that transformers lacks compute what the code published with their checkpoints does, from the same tensors.

The reference is `published_small`, which says where the formulas are from.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import engine, messages, prompted
from every import every
from fp8_weights import FORMS, quantized
from models_small import built, edit_config, our_logits, refused
from planned_sizes import check_sizes
from published_small import CASES, HIDDEN, VOCAB, Computed, Published, baichuan
from thread_ranks import on_ranks
from torch import Tensor

from srv.models import derive
from srv.models.config.tensor_notes import tensor_notes
from srv.models.families.registry import known_name
from srv.models.families.trees import native_tree
from srv.models.read import read_facts
from srv.models.unsupported import UnsupportedConfig
from srv_matrix.pytest_plugin import covers

TOKENS = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(1))


@every("case", CASES)
def test_logits_and_parameter_counts_are_those_of_the_published_code(case: str, tmp_path: Path) -> None:
    model, weights = CASES[case], CASES[case].weights()
    model.save(tmp_path, weights)
    facts, ours, expected = read_facts(tmp_path), built(tmp_path, impl="srv"), model.logits(weights, TOKENS)
    torch.testing.assert_close(our_logits(ours, TOKENS), expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.3, "the logits are too flat for the comparison to mean anything"
    (published,) = model.config["architectures"]
    assert facts.architecture == known_name(published, model.config)
    counted = sum(tensor.numel() for tensor in weights.values())
    assert facts.parameters == derive.parameters(native_tree(facts.architecture, facts.config)) == counted
    assert facts.context_length == 256
    check_sizes(tmp_path, ours)


@every("case", ["exaone", "internlm2 with biases", "baichuan with alibi", "chatglm", "mimo", "solar"])
def test_ranks_compute_the_same_logits(case: str, tmp_path: Path) -> None:
    """Fused matrices are divided before they are sliced, and rows of an output layer have norms of their own."""
    CASES[case].save(tmp_path, CASES[case].weights())
    expected = our_logits(built(tmp_path), TOKENS)
    parts = on_ranks(
        2, lambda group, communicator: our_logits(built(tmp_path, group=group, communicator=communicator), TOKENS)
    )
    for logits in parts:
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
        assert torch.equal(logits, parts[0]), "ranks sample from different logits"


@every("case", ["exaone", "internlm2", "internlm3", "baichuan", "chatglm", "mimo", "solar"])
def test_fp8_weights_with_a_scale_for_each_row(case: str, tmp_path: Path) -> None:
    """Scales change places with the rows of fused matrices; a NormHead is not quantized."""
    model, form, stored = CASES[case], FORMS["compressed-tensors, channel"], dict[str, Tensor]()
    weights = model.weights()
    outside = (model.embedding, model.head)
    for name, tensor in model.weights().items():
        if tensor.dim() == 1 or name in outside:
            stored[name] = tensor
            continue
        stored[name], stored[f"{name}_scale"], weights[name] = quantized(tensor, form)
    model.save(tmp_path, stored)
    edit_config(tmp_path, quantization_config=form.config)
    expected = model.logits(weights, TOKENS)
    torch.testing.assert_close(our_logits(built(tmp_path, impl="srv"), TOKENS), expected, atol=5e-4, rtol=1e-3)


SERVED = {
    "exaone": "ExaoneForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "baichuan with alibi": "BaichuanForCausalLM",
    "chatglm": "ChatGLMModel",
    "mimo": "MiMoForCausalLM",
    "solar": "SolarForCausalLM",
}


@covers(*(f"model:{cell}/safetensors" for cell in SERVED.values()), platform="cpu")
@every("case", SERVED)
def test_greedy_tokens_are_those_of_the_published_code(case: str, tmp_path: Path) -> None:
    """Prompts are split into chunks and hit the prefix cache, in captured steps."""
    model = CASES[case]
    model.save(tmp_path, model.weights())
    small = prompted(Computed(model, model.weights()), tmp_path, lengths=(5, 17, 33))
    with engine(small, 16, 16, model_impl="srv") as served:
        missed, hits = (served.generate(messages(small.prompts)) for _ in range(2))
        assert served.stats().replayed_steps > 0 or "alibi" in case  # which runs on torch's operators
    assert read_facts(tmp_path).architecture == SERVED[case]
    assert [result.tokens for result in missed] == [result.tokens for result in hits] == small.tokens
    assert [result.cached_tokens for result in hits] == [0, 16, 32]


def test_the_output_layer_of_the_first_baichuan_is_as_stored(tmp_path: Path) -> None:
    """Its vocabulary has 64000 tokens. Its models of 7B name their class otherwise."""
    model = baichuan()
    config = {**model.config, "vocab_size": 64000, "architectures": ["BaiChuanForCausalLM"]}
    first = dataclasses.replace(model, config=config, unit_head=False)
    weights = model.weights()
    weights |= {name: torch.randn(64000, HIDDEN) * 0.25 for name in (model.embedding, model.head)}
    first.save(tmp_path, weights)
    assert read_facts(tmp_path).architecture == "BaichuanForCausalLM"
    ours = our_logits(built(tmp_path, impl="srv"), TOKENS)
    torch.testing.assert_close(ours, first.logits(weights, TOKENS), atol=2e-4, rtol=1e-4)


def test_a_quantized_norm_head_is_refused(tmp_path: Path) -> None:
    model, form = baichuan(), FORMS["compressed-tensors, channel"]
    weights = model.weights()
    weights[model.head], weights[f"{model.head}_scale"], _ = quantized(weights[model.head], form)
    model.save(tmp_path, weights)
    edit_config(tmp_path, quantization_config={**(form.config or {}), "ignore": []})
    error = refused(tmp_path)
    assert error.code == "unsupported_quantization"
    assert "the rows of lm_head are divided by their norms, which quantized ones cannot be" in str(error)


def test_layers_of_mimo_that_predict_further_tokens_are_named(tmp_path: Path) -> None:
    CASES["mimo"].save(tmp_path, CASES["mimo"].weights())
    (note,) = tensor_notes(read_facts(tmp_path), tmp_path)
    assert "model.mtp_layers.0.input_proj.weight" in note
    assert note.endswith("they predict further tokens, which is not supported")


@every(
    ("case", "fields", "named"),
    [
        ("exaone", {"activation_function": "gelu"}, "hidden_act = 'gelu'"),
        ("internlm2", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("internlm3", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("baichuan", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("chatglm", {"position_encoding_2d": True}, "position_encoding_2d = True"),
        ("chatglm", {"vision_config": {"depth": 1}}, "vision_config = {'depth': 1}"),
        ("chatglm", {"multi_query_attention": False}, "multi_query_attention = False"),
        ("chatglm", {"rmsnorm": False}, "rmsnorm = False"),
        ("chatglm", {"apply_residual_connection_post_layernorm": True}, "connection_post_layernorm = True"),
        ("chatglm", {"quantization_bit": 4}, "quantization_bit = 4"),
        ("mimo", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("solar", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("solar", {"bskcn_1": [3], "bskcn_3": [2]}, "bskcn_1 = [3] has none for layer 2 of bskcn_3"),
    ],
)
def test_fields_that_are_not_implemented_are_refused_by_name(case: str, fields: dict[str, Any], named: str) -> None:
    model: Published = CASES[case]
    name = known_name(model.config["architectures"][0], model.config)
    native_tree(name, model.config)
    with pytest.raises(UnsupportedConfig, match=re.escape(named)):
        native_tree(name, {**model.config, **fields})
