"""Loaders: the model computes with the weights of the file; tensors that do not fit are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from every import every
from gguf import GGMLQuantizationType as Kind
from models_small import agree, built, edit_config, edit_weights, our_logits, small_model, tokens_of, write_gguf

from srv.errors import ModelError
from srv.models.checkpoints.filling import own_threads

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# K-quants need rows of a multiple of 256 elements.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.1}


@every("kind", KINDS)
def test_gguf_type_of_the_llama_architecture(kind: str, tmp_path: Path) -> None:
    """Every GGUF type, with query and key rows stored for interleaved RoPE."""
    model = small_model("llama", **WIDE, num_attention_heads=8, head_dim=32)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", Kind[kind])
    assert agree(built(path), model)


@every("arch", ["qwen2", "qwen3"])
def test_gguf_of_architectures_whose_rows_stay_in_place(arch: str, tmp_path: Path) -> None:
    model = small_model(arch, **WIDE, num_attention_heads=8, head_dim=32)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, arch, Kind.Q8_0)
    assert agree(built(path), model)


def test_gguf_tied_embeddings_and_biases(tmp_path: Path) -> None:
    model = small_model("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", Kind.F16)
    assert agree(built(path), model)


def test_gguf_rope_freq_factors_are_llama3_scaling(tmp_path: Path) -> None:
    """llama.cpp's converter writes Llama 3's scaling as one factor per frequency."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "original_max_position_embeddings": 32, "rope_theta": 500.0}
    model = small_model("llama", rope_parameters=rope)
    plain = 1.0 / 500.0 ** (torch.arange(0, 8, 2) / 8)
    model.config.test_freq_factors = (plain / model.model.rotary_emb.inv_freq).tolist()
    assert max(model.config.test_freq_factors) > 2
    write_gguf(tmp_path / "model.gguf", model, "llama")
    assert agree(built(tmp_path / "model.gguf"), model)


def test_gguf_yarn(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
    model = small_model("qwen2", head_dim=8, rope_parameters=yarn)
    path = tmp_path / "model.gguf"
    scaling = {"ARCH__rope__scaling__type": "yarn", "ARCH__rope__scaling__factor": 4.0}
    write_gguf(path, model, "qwen2", original_context=16, **scaling)
    assert agree(built(path), model)


def test_gguf_of_a_native_architecture_through_transformers(tmp_path: Path) -> None:
    model = small_model("llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", Kind.F16)
    assert agree(built(path, impl="transformers"), model)


@every("size", ["1GB", "20KB"])
def test_safetensors_in_one_file_and_in_shards(size: str, tmp_path: Path) -> None:
    model = small_model("llama")
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (size == "20KB")
    assert agree(built(tmp_path), model)


def test_progress_counts_every_stored_byte_once(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    calls: list[tuple[int, int, str]] = []
    built(tmp_path, progress=lambda total, done, name: calls.append((total, done, name)))
    totals, done = {call[0] for call in calls}, [call[1] for call in calls]
    assert len(totals) == 1
    assert done[0] == 0
    assert done[-1] == totals.pop()
    assert done == sorted(done)


@every(
    ("changes", "code", "named"),
    [
        (
            {"model__norm__weight": None, "model__layers__0__mlp__up_proj__weight": None},
            "missing_tensors",
            "model.layers.0.mlp.up_proj.weight, model.norm.weight",
        ),
        ({"model__extra__weight": torch.zeros(1)}, "unexpected_tensors", "model.extra.weight"),
        ({"model__norm__weight": torch.zeros(7)}, "shape_mismatch", "model.norm.weight (stored [7], expected [48])"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(
    changes: dict[str, torch.Tensor | None], code: str, named: str, tmp_path: Path
) -> None:
    small_model("llama").save_pretrained(tmp_path)
    edit_weights(tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        built(tmp_path)
    assert caught.value.code == code
    assert named in caught.value.reason


def test_a_long_list_of_missing_tensors_is_cut(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelError, match=r"and 4 more \(9 in all\)") as caught:
        built(tmp_path)
    assert caught.value.code == "missing_tensors"


def test_truncated_shard_is_refused_before_loading(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ModelError) as caught:
        built(tmp_path)
    assert caught.value.code == "truncated"
    assert shard.name in str(caught.value)


def test_dummy_weights_follow_the_seed_alone(tmp_path: Path) -> None:
    model = small_model("qwen3")
    model.config.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["Qwen3ForCausalLM"])
    tokens = tokens_of(model)
    first, again, other = (our_logits(built(tmp_path, load_format="dummy", seed=s), tokens) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.isfinite().all()


def test_config_without_weights_needs_the_dummy_loader(tmp_path: Path) -> None:
    small_model("llama").config.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError, match="--load-format dummy") as caught:
        built(tmp_path)
    assert caught.value.code == "no_weights"


def test_load_format_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="safetensors, not gguf") as caught:
        built(tmp_path, load_format="gguf")
    assert caught.value.code == "wrong_format"


def test_quantized_checkpoints_of_other_schemes_are_refused(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    for stated, reason in (
        ({"quant_method": "quark"}, "with quark, which srv does not load yet"),
        ({"quant_method": "awq", "bits": 3}, "with awq, .* in this form: its integers have 3 bits, not 4"),
    ):
        edit_config(tmp_path, quantization_config=stated)
        with pytest.raises(ModelError, match=reason) as caught:
            built(tmp_path)
        assert caught.value.code == "unsupported_quantization"


def test_gguf_type_without_decoder_is_refused(tmp_path: Path) -> None:
    """A type that the header supports and the loader does not: the refusal names it and the supported ones."""
    model = small_model("llama", **WIDE, num_attention_heads=8, head_dim=32)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama", Kind.F32)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 16
    assert int.from_bytes(data[at : at + 4], "little") == Kind.F32
    data[at : at + 4] = int(Kind.I32).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="I32") as caught:
        built(path)
    assert caught.value.code == "unsupported_quantization"
    assert "Q4_K" in caught.value.remedy


def test_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    with pytest.raises(ModelError, match="weight files are missing") as caught:
        built(tmp_path)
    assert caught.value.code == "not_found"


def test_invalid_shard_index(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(ModelError) as caught:
        built(tmp_path)
    assert caught.value.code == "damaged"


def test_loading_restores_the_number_of_torch_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with own_threads(2):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
