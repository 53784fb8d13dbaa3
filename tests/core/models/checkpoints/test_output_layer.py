"""Weights that differ from their configuration are used, refused by name, or said to be ignored."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from fp8_weights import FORMS, write_fp8
from models_small import (
    OWN_SIZES,
    SIZES,
    agree,
    built,
    edit_config,
    expected_logits,
    our_logits,
    randomized,
    refused,
    small_model,
    tokens_of,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from srv.models.config.tensor_notes import is_uncompared
from srv.models.options import ReadOptions
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import LaunchPlan, make_plan
from srv.testing.engine import user_input

OWN_NOTE = "its weights have another one, which is used"
OWN: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 48, "n_layer": 3, "n_head": 6},  # word_embeddings
    "opt": {"hidden_size": 48, "ffn_dim": 80, "word_embed_proj_dim": 48, "init_std": 0.25},  # model.decoder
}
TIE = ("--json-model-override-args", '{"tie_word_embeddings": true}')


def tied_only_by_config(folder: Path, kind: str = "llama") -> Any:
    """A model with an output layer of its own, whose configuration says that it is tied."""
    config = AutoConfig.for_model(kind, **{**SIZES, **OWN_SIZES.get(kind, {}), **OWN.get(kind, {})})
    config.tie_word_embeddings = False
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    model.save_pretrained(folder)
    edit_config(folder, tie_word_embeddings=True)
    return model


def add(folder: Path, **tensors: torch.Tensor) -> None:
    """In whose names __ is a dot."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **{name.replace("__", "."): each for name, each in tensors.items()}}, path)


def plan(folder: Path, *arguments: str) -> LaunchPlan:
    return make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder), *arguments]))


@every(
    ("kind", "impl"),
    [("llama", "auto"), ("llama", "transformers"), ("bloom", "auto"), ("opt", "auto"), ("olmo2", "auto")],
)
def test_an_output_layer_that_differs_from_the_embedding_is_used(kind: str, impl: str, tmp_path: Path) -> None:
    """The plan counts it, and says so."""
    model = tied_only_by_config(tmp_path, kind)
    ours = built(tmp_path, impl)
    assert agree(ours, model)
    planned = plan(tmp_path, "--dtype", "float32", "--model-impl", impl)
    assert planned.refusals == ()
    assert [OWN_NOTE in note for note in planned.notes].count(True) == 1
    assert planned.model is not None
    assert weight_bytes(planned.resolved.config, planned.model) == ours.loaded_bytes()


def test_a_copy_of_the_embedding_is_not_held_twice(tmp_path: Path) -> None:
    model = small_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    before = read_facts(tmp_path)
    add(tmp_path, lm_head__weight=model.lm_head.weight.detach().clone())
    assert agree(ours := built(tmp_path), model)
    assert (read_facts(tmp_path).parameters, ours.loaded_bytes()) == (before.parameters, 4 * (before.parameters or 0))
    assert not [note for note in plan(tmp_path).notes if "output layer" in note]


@every("row", [0, 96])
def test_one_row_makes_a_difference(row: int, tmp_path: Path) -> None:
    model = small_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    head = model.lm_head.weight.detach().clone()
    head[row, 0] += 1
    add(tmp_path, lm_head__weight=head)
    assert read_facts(tmp_path).untied


def test_a_quantized_checkpoint_keeps_its_output_layer(tmp_path: Path) -> None:
    model = write_fp8(tmp_path, FORMS["fp8, static"], tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=True)
    ours, tokens = built(tmp_path), tokens_of(model, 12)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert any(OWN_NOTE in note for note in plan(tmp_path).notes)


def test_the_users_word_counts_for_more(tmp_path: Path) -> None:
    model = tied_only_by_config(tmp_path)
    model.lm_head.weight = model.model.embed_tokens.weight
    options = ReadOptions(json.loads(TIE[1]))
    assert not read_facts(tmp_path, options).untied
    notes = plan(tmp_path, *TIE).notes
    assert any("is served without lm_head.weight: tie_word_embeddings of --json-model" in note for note in notes)


def test_weights_that_are_not_here_are_not_compared(tmp_path: Path) -> None:
    """Those of a model on a hub are holes; they would seem to be equal."""
    tied_only_by_config(tmp_path)
    facts = read_facts(tmp_path, ReadOptions(headers_only=True))
    assert (facts.config["tie_word_embeddings"], facts.untied) == (True, False)
    assert is_uncompared(facts, tmp_path), "a plan says that only the launch finds out"


NEW_LAYER = "model.layers.5.mlp.gate_proj.weight"


@every(
    ("name", "shape"),
    [
        (NEW_LAYER, (64, 48)),
        ("model.layers.0.self_attn.q_proj.bias", (48,)),
        ("model.layers.0.self_attn.q_norm.weight", (8,)),
        ("model.norm.bias", (48,)),
        ("lm_head.bias", (97,)),
        ("model.word_embeddings.weight", (97, 48)),
    ],
)
def test_what_native_layers_do_not_compute_is_refused_and_transformers_is_said_to_ignore_it(
    name: str, shape: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_model("llama").save_pretrained(tmp_path)
    add(tmp_path, **{name: torch.ones(shape)})
    error = refused(tmp_path)
    assert (error.code, name in error.reason) == ("unexpected_tensors", True)
    with caplog.at_level(logging.WARNING):
        built(tmp_path, "transformers")
    assert [name in record.getMessage() for record in caplog.records].count(True) == 1


@every(
    ("names", "reason"),
    [
        (("model.layers.0.self_attn.rotary_emb.inv_freq",), "frequencies of RoPE follow from the configuration"),
        (("mtp.fc.weight", "mtp.norm.weight"), "they predict further tokens, which is not supported"),
    ],
)
def test_a_plan_says_once_what_is_ignored(names: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    add(tmp_path, **{name: torch.ones(4) for name in names})
    built(tmp_path)
    assert [note for note in plan(tmp_path).notes if "is served without" in note] == [
        f"{tmp_path.name} is served without {', '.join(names)}: {reason}"
    ]


def test_a_plan_says_once_that_an_adapter_beside_the_weights_is_not_applied(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    assert not [note for note in plan(tmp_path).notes if "adapter" in note]
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    (note,) = [note for note in plan(tmp_path).notes if "adapter" in note]
    assert note.startswith(f"{tmp_path.name} is served without the adapter in adapter_model.safetensors")
    assert "merge" in note
