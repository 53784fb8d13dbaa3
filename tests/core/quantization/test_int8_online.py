"""Weights that are quantized while they are loaded: which of them, their bytes, and what is refused before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_small import small
from every import every
from models_small import built, our_logits, small_model, tokens_of
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, Qwen2MoeConfig

from srv.args.config import make_config
from srv.errors import ModelError
from srv.models.choice import LayerOptions, choose_layers
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import make_plan
from srv.quantization.layers.int8 import DynamicInt8Linear
from srv.testing.engine import user_input

EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
    "mlp_only_layers": [0],
}
MODELS: dict[str, Any] = {
    "tied": lambda: small_model("qwen3", tie_word_embeddings=True),
    "qwen2_moe": lambda: small_model("qwen2_moe"),
    "qwen3_next": lambda: small_model("qwen3_next", **EXPERTS),
    "deepseek v3": lambda: small("v3"),
    "deepseek v2, queries not compressed": lambda: small("v2-lite"),
}
CONFIGURATIONS: dict[str, Any] = {
    "qwen2_moe": lambda: Qwen2MoeConfig(architectures=["Qwen2MoeForCausalLM"]),
    "gpt_oss": lambda: GptOssConfig(architectures=["GptOssForCausalLM"], quantization_config=None),
}


@every("kind", list(MODELS))
def test_planned_bytes_are_those_that_are_loaded(kind: str, tmp_path: Path) -> None:
    """Scales, biases for the choice of experts, and the matrices that stay as they are included."""
    MODELS[kind]().save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    config = make_config({"dtype": "bfloat16", "torchao_config": "int8dq"})
    assert (
        weight_bytes(config, facts)
        == built(tmp_path, online_quantization="int8dq", dtype=torch.bfloat16).loaded_bytes()
    )


def test_matrices_of_latent_attention_stay_as_they_are(tmp_path: Path) -> None:
    """What computes compressed vectors, and what expands them."""
    model = small("v3")
    model.save_pretrained(tmp_path)
    tensors = built(tmp_path, online_quantization="int8dq").weight_views()  # type: ignore[attr-defined]
    matrices = {name: tensor.dtype for name, tensor in tensors.items() if ".0.self_attn." in name and "proj" in name}
    kept = {
        name.split(".")[-2] for name, dtype in matrices.items() if dtype == torch.float32 and name.endswith("weight")
    }
    assert kept == {"q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
    assert matrices["model.layers.0.self_attn.o_proj.weight"] == torch.int8


def _plan(folder: Path, *arguments: str) -> list[tuple[str, str]]:
    """The refusals of a plan for processors: codes and reasons."""
    refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder), *arguments])).refusals
    return [(rejection.code, rejection.reason) for rejection in refusals]


@every("kind", ["tied", "qwen2_moe"])
def test_w8a8_int8_of_an_unquantized_checkpoint_means_int8dq(kind: str, tmp_path: Path) -> None:
    """Planned bytes, layers and logits are those of the online method, and neither plan nor launch refuses it."""
    model = MODELS[kind]()
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model, 8)
    ours, online = built(tmp_path, quantization="w8a8_int8"), built(tmp_path, online_quantization="int8dq")
    config = make_config({"dtype": "float32", "quantization": "w8a8_int8"})
    assert weight_bytes(config, read_facts(tmp_path)) == ours.loaded_bytes() == online.loaded_bytes()
    assert sum(isinstance(module, DynamicInt8Linear) for module in ours.modules()) > 0
    assert torch.equal(our_logits(ours, tokens), our_logits(online, tokens))
    assert _plan(tmp_path, "--quantization", "w8a8_int8") == []


def test_weights_without_a_configuration_that_are_neither_floats_nor_int8_are_refused(tmp_path: Path) -> None:
    """By plan and launch alike, before any layer is built."""
    small_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.1.mlp.up_proj.weight"] = stored["model.layers.1.mlp.up_proj.weight"].to(torch.uint8)
    save_file(stored, path)
    with pytest.raises(ModelError, match="some of its weights are stored as uint8") as refused:
        built(tmp_path, quantization="w8a8_int8")
    assert refused.value.code == "unsupported_quantization"
    codes = dict(_plan(tmp_path, "--quantization", "w8a8_int8"))
    assert codes["no_integers"] == "some of its weights are stored as uint8"


def test_experts_with_biases_are_refused_under_the_name_that_the_user_sets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIGURATIONS["gpt_oss"]().to_json_string())
    with pytest.raises(ModelError, match="experts with biases cannot be int8") as refused:
        choose_layers(read_facts(tmp_path), LayerOptions(load_format="dummy", quantization="w8a8_int8"))
    assert refused.value.remedy == "Leave the weights unquantized"


@every("kind,method,reason,remedy", [
    ("qwen2_moe", "int8wo", "which int8wo excludes", "Use --torchao-config int8dq, or leave it out"),
    ("gpt_oss", "int8dq", "experts with biases cannot be int8", "Leave the weights unquantized"),
])  # fmt: skip
def test_experts_that_a_method_cannot_hold_are_refused_before_loading(
    kind: str, method: str, reason: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(CONFIGURATIONS[kind]().to_json_string())
    with pytest.raises(ModelError) as refused:
        choose_layers(read_facts(tmp_path), LayerOptions(load_format="dummy", online_quantization=method))
    assert (refused.value.code, refused.value.remedy) == ("unsupported_quantization", remedy)
    assert reason in refused.value.reason
