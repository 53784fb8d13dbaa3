"""Encoders in every form in which their checkpoints are published, with the sizes that their files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pooled_engine import PROMPTS, close, engine, pooled, states_of, vector
from pooled_models import MODELS, POSITIONS, pooled_model, write_modules
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from srv.errors import ModelError, Refusal
from srv.models.read import read_facts
from srv.testing.pooled import pooled_reference
from srv.types import PooledOutput, Pooling

PUBLISHED = ("gte", "gte masked", "gte classifier", "nomic", "nomic masked", "nomic classifier", "jina", "jina scorer")
FAMILIES = ("gte", "nomic", "jina", "distilbert", "eurobert")


def change_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def rename(folder: Path, name: Callable[[str], str], more: dict[str, torch.Tensor] | None = None) -> None:
    file = folder / "model.safetensors"
    tensors = {name(each): tensor for each, tensor in load_file(file).items()}
    save_file({**tensors, **(more or {})}, file, metadata={"format": "pt"})


def assert_served(folder: Path, model: Any, name: str) -> None:
    """What is pooled, or the logits of labels, are those of transformers, and the weights have the planned size."""
    labels = name.endswith(("classifier", "scorer"))
    output = PooledOutput.LABELS if labels else PooledOutput.EMBEDDING
    facts = read_facts(folder)
    with engine(folder) as running:
        (weights,) = (line for line in running.ready.memory[0] if line.name == "weights")
        assert (weights.predicted, weights.measured) == (facts.weight_bytes, facts.weight_bytes)
        kernels = {key: each for key, each in running.ready.kernels.items() if not key.startswith("write_kv ")}
        assert {each.key: each.name for each in running.context.kernels.kernels} == kernels
        pooling = Pooling(running.context.resolved.config.model.pooling)
        results = running.generate([pooled(str(at), each, pooling, output=output) for at, each in enumerate(PROMPTS)])
    for prompt, result in zip(PROMPTS, results, strict=True):
        if labels:
            with torch.no_grad():
                wanted = model(input_ids=torch.tensor([prompt])).logits[0]
        else:
            wanted = normalize(pooled_reference(states_of(model, prompt), pooling), dim=0)
        close(vector(result), wanted)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layout_of_the_layers_of_transformers_is_read_as_well(name: str, tmp_path: Path) -> None:
    """Published checkpoints have queries, keys and values in one matrix; these layers have one for each."""
    model = pooled_model(name, tmp_path)
    published = set(load_file(tmp_path / "model.safetensors"))
    model.save_pretrained(tmp_path, save_original_format=False)
    assert not published & {each for each in load_file(tmp_path / "model.safetensors") if "layers." in each}
    assert_served(tmp_path, model, name)


@pytest.mark.parametrize("name", ["gte", "gte classifier"])
def test_published_weights_of_gte_have_another_prefix_and_further_heads(name: str, tmp_path: Path) -> None:
    model = pooled_model(name, tmp_path)
    own_head = name.endswith("classifier")
    more = {} if own_head else {"classifier.weight": torch.randn(1, 48), "classifier.bias": torch.randn(1)}
    rename(tmp_path, lambda each: each if "classifier" in each else f"new.{each.removeprefix('gte.')}", more)
    assert_served(tmp_path, model, name)


def test_gte_as_published(tmp_path: Path) -> None:
    """Classes that transformers does not have, and a scaling of their own, as in `NTKScalingRotaryEmbedding` of the
    published implementation: the frequencies are (theta factor)^(-2 i / dim) factor^(-2 / dim).
    """
    factor, dim = 8.0, 16
    model = pooled_model("gte", tmp_path)
    rename(tmp_path, lambda each: f"new.{each.removeprefix('gte.')}")
    published = {
        "architectures": ["NewModel", "NewForTokenClassification"],
        "model_type": "new",
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        "rope_theta": 20000,
        "rope_scaling": {"type": "ntk", "factor": factor},
    }
    change_config(tmp_path, lambda fields: {**fields, "rope_parameters": None, **published})
    exponents = torch.arange(0, dim, 2) / dim
    frequencies = (20000 * factor) ** -exponents * factor ** (-2 / dim)
    (rotary,) = (each for each in model.modules() if hasattr(each, "inv_freq"))
    rotary.inv_freq.copy_(frequencies)
    assert read_facts(tmp_path).architecture == "GteModel"
    assert_served(tmp_path, model, "gte")


def test_jina_embeddings_v3_as_published(tmp_path: Path) -> None:
    """The class of XLM-RoBERTa, other names of fields, and the adapters of five tasks beside each matrix."""
    model = pooled_model("jina", tmp_path)
    adapted = ("embeddings", "Wqkv.weight", "out_proj.weight", "fc1.weight", "fc2.weight")
    more: dict[str, torch.Tensor] = {"roberta.pooler.dense.bias": torch.zeros(48)}

    def published(name: str) -> str:
        if not name.endswith("weight") or not any(each in name for each in adapted):
            return f"roberta.{name}"
        stem = f"roberta.{name.removesuffix('weight')}parametrizations.weight"
        more.update({f"{stem}.0.lora_{side}": torch.ones(5, 4, 48) for side in "AB"})
        return f"{stem}.original"

    more["roberta.pooler.dense.parametrizations.weight.original"] = torch.zeros(48, 48)
    rename(tmp_path, published, more)
    assert "roberta.encoder.layers.3.mixer.Wqkv.parametrizations.weight.0.lora_A" in load_file(
        tmp_path / "model.safetensors"
    )
    theta = read_facts(tmp_path).config["rope_parameters"]["rope_theta"]
    fields = {"architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary", "rotary_emb_base": theta}
    dropped = ("model_type", "rope_parameters")
    change_config(
        tmp_path, lambda given: {name: value for name, value in given.items() if name not in dropped} | fields
    )
    assert read_facts(tmp_path).architecture == "JinaEmbeddingsV3Model"
    assert_served(tmp_path, model, "jina")


def published_nomic(fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the names of the published ones."""
    kept = {each: fields[each] for each in ("architectures", "model_type", "vocab_size", "type_vocab_size")}
    return {
        **kept,
        "activation_function": "swiglu",
        "causal": False,
        "layer_norm_epsilon": 1e-12,
        "max_trained_positions": POSITIONS,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "n_embd": 48,
        "n_head": 3,
        "n_inner": 80,
        "n_layer": 4,
        "n_positions": 4 * POSITIONS,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_scaling_factor": 2,
        "use_rms_norm": False,
    }


def test_published_configurations_of_nomic_are_read(tmp_path: Path) -> None:
    """With the names of GPT-2 for their fields; texts are served up to the trained positions."""
    model = pooled_model("nomic", tmp_path)
    change_config(tmp_path, published_nomic)
    facts = read_facts(tmp_path)
    assert (facts.context_length, facts.layers, facts.hidden_size) == (POSITIONS, 4, 48)
    assert_served(tmp_path, model, "nomic")


@pytest.mark.parametrize("name", [each for each in MODELS if each.split()[0] in FAMILIES])
def test_a_configuration_alone_says_the_size(name: str, tmp_path: Path) -> None:
    pooled_model(name, tmp_path)
    stored = read_facts(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    alone = read_facts(tmp_path)
    assert (alone.parameters, alone.weight_bytes) == (stored.parameters, stored.weight_bytes)
    assert (alone.format, alone.context_length, alone.pooling) == ("config", POSITIONS, stored.pooling)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_of_sentence_transformers_say_how_states_are_pooled(name: str, tmp_path: Path) -> None:
    model = pooled_model(name, tmp_path)
    write_modules(tmp_path, {"pooling_mode_cls_token": True}, ("Normalize", "2_Normalize", {}))
    facts = read_facts(tmp_path)
    assert (facts.pooling, facts.head.normalize) == ("cls", True)
    assert_served(tmp_path, model, name)


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("gte", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale = True"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "rope_scaling.mixed_b = 0.5"),
        ("gte", {"rope_scaling": {"type": "ntk-aware", "factor": 2.0}}, "RoPE type 'ntk-aware'"),
        ("gte", {"partial_rotary_factor": 0.5}, "8 rotated dimensions of 16"),
        ("nomic", {"activation_function": "geglu"}, "activation_function = 'geglu'"),
        ("nomic", {"moe_every_n_layers": 2}, "moe_every_n_layers = 2"),
        ("nomic", {"prenorm": True}, "prenorm = True"),
        ("nomic", {"qkv_proj_bias": True}, "qkv_proj_bias = True"),
        ("nomic", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction = 0.5"),
        ("nomic", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base = 512"),
        ("nomic", {"hidden_size": None}, "the field n_embd is missing"),
        ("distilbert", {"activation": "silu"}, "activation = 'silu'"),
        ("eurobert", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("eurobert", {"num_key_value_heads": 2}, "3 heads cannot share 2 key heads"),
        ("eurobert classifier", {"classifier_pooling": "late"}, "classifier_pooling = 'late'"),
        ("jina", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("jina", {"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    pooled_model(name, tmp_path)
    change_config(tmp_path, lambda config: {**config, **fields})
    with pytest.raises((ModelError, Refusal), match=text), engine(tmp_path):
        pass
