"""What a model is built of: what neither native layers nor those of transformers compute is refused, by plans too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every import every
from models_small import built, edit_config, small_model
from pooled_models import pooled_model
from transformers import Gemma2Config, Gemma2ForSequenceClassification

from srv.errors import ModelError, Refusal
from srv.models.choice import LayerOptions, choose_layers
from srv.models.read import read_facts
from srv.planning.plan import make_plan
from srv.testing.engine import user_input

SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}


def refusals(folder: Path, impl: str) -> tuple[str, str, str]:
    """Code, reason and remedy: those of a plan, which are those of a launch."""
    with pytest.raises(ModelError) as launched:
        built(folder, impl=impl)
    error = launched.value
    try:
        (found,) = make_plan(
            user_input(["--device", "cpu:avx512", "--model-path", str(folder), "--model-impl", impl])
        ).refusals
    except Refusal as refusal:
        (found,) = refusal.rejections
    assert (found.code, error.reason in found.reason) == (error.code, True), found
    return error.code, error.reason, error.remedy


@every(
    ("name", "reason"),
    [
        ("Gemma2ForSequenceClassification", "Gemma2ForSequenceClassification has no native layers"),
        ("Gemma2ForTokenClassification", "Gemma2ForTokenClassification has no native layers"),
        ("Gemma2ForRewardModel", "Gemma2ForRewardModel has no native layers"),
    ],
)
def test_a_head_without_native_layers_is_refused_by_name(name: str, reason: str, tmp_path: Path) -> None:
    """Its class would be served as one that generates text, with tied embeddings in place of its head."""
    torch.manual_seed(0)
    folder = tmp_path / name
    config = Gemma2Config(**SIZES, **HEADS, pad_token_id=0, num_labels=2)
    Gemma2ForSequenceClassification(config).save_pretrained(folder)
    edit_config(folder, architectures=[name])
    code, found, remedy = refusals(folder, "auto")
    assert (code, reason in found) == ("unsupported_architecture", True), found
    assert "LlamaForSequenceClassification, Mistral" in remedy


@every("name", ["qwen3 classifier", "bert"])
def test_transformers_is_refused_for_what_only_native_layers_pool(name: str, tmp_path: Path) -> None:
    pooled_model(name, tmp_path / name)
    code, reason, remedy = refusals(tmp_path / name, "transformers")
    assert (code, remedy) == ("unsupported_architecture", "Leave --model-impl at auto")
    assert "only native layers compute what it does: model_impl is transformers" in reason


def test_remedies_do_not_list_every_architecture(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        built(tmp_path, impl="transformers", online_quantization="int8dq")
    assert (error.value.code, error.value.remedy) == ("unsupported_quantization", "Leave --model-impl at auto")
    assert error.value.reason.endswith("which only native layers support: model_impl is transformers")
    edit_config(tmp_path, hidden_act="gelu")
    with pytest.raises(ModelError) as error:
        built(tmp_path, online_quantization="int8dq")
    assert error.value.remedy == "Leave out --torchao-config"
    with pytest.raises(ModelError) as unsupported:
        built(tmp_path, impl="srv")
    assert error.value.reason.endswith(f"which only native layers support: {unsupported.value.reason}")
    with pytest.raises(ModelError) as error:
        choose_layers(read_facts(tmp_path), LayerOptions(ranks=2))
    assert error.value.reason.endswith(f"only native layers can, and it has none ({unsupported.value.reason})")
    with pytest.raises(ModelError) as error:
        built(tmp_path, impl="srv")
    assert error.value.remedy == "Leave --model-impl at auto"
