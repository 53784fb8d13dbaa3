"""GGUF files whose weights stay quantized: the layers that hold them, and their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from every import every
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from models_small import agree, built, codebook_kinds, small_model, write_gguf
from planned_sizes import planned_bytes

from srv.errors import ModelError
from srv.models.base import CausalLM
from srv.models.checkpoints.gguf_header import read_header
from srv.models.checkpoints.gguf_loader import DEQUANTIZED
from srv.models.checkpoints.gguf_scales import finite_scales
from srv.models.checkpoints.gguf_types import CODEBOOK_TYPES, OP_TYPES, TYPES_BY_NAME
from srv.models.layers.embedding import Embedding
from srv.models.layers.linear import Linear
from srv.planning.plan import make_plan
from srv.quantization.layers.blocks import GGUFEmbedding, GGUFLinear
from srv.testing.engine import user_input

Kinds = Callable[[str], Kind]

# K-quants need rows of a multiple of 256 elements.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.1}


def stored(folder: Path, arch: str = "llama", kind: Kind | Kinds = Kind.Q8_0, **fields: Any) -> tuple[CausalLM, Any]:
    """Our model from a file whose matrices have one type, or types by name; and the model of transformers."""
    model = small_model(arch, **WIDE, num_attention_heads=8, head_dim=32, **fields)
    one, many = (kind, None) if isinstance(kind, Kind) else (Kind.F32, kind)
    write_gguf(folder / "model.gguf", model, arch, one, kinds=many)
    return built(folder / "model.gguf", dequantize=False), model


@pytest.mark.parametrize("kind", OP_TYPES)
def test_every_type_with_rows_stored_for_interleaved_rotation(kind: str, tmp_path: Path) -> None:
    ours, model = stored(tmp_path, kind=Kind[kind])
    assert agree(ours, model)
    assert {type(module) for module in ours.modules() if isinstance(module, (GGUFLinear, Linear))} == {GGUFLinear}
    assert isinstance(ours.embedding, GGUFEmbedding)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_biases_and_architectures_whose_rows_stay_in_place(arch: str, tmp_path: Path) -> None:
    ours, model = stored(tmp_path, arch)
    assert agree(ours, model)


def test_an_embedding_that_is_also_the_output_layer_is_held_once(tmp_path: Path) -> None:
    ours, model = stored(tmp_path, tie_word_embeddings=True)
    assert agree(ours, model)
    assert isinstance(ours.lm_head, GGUFLinear)
    assert isinstance(ours.embedding, GGUFEmbedding)
    assert ours.lm_head.matrices == [ours.embedding.matrix]


def test_fused_projections_may_have_different_types(tmp_path: Path) -> None:
    """As in files that use more bits for value and down projections."""

    def kinds(name: str) -> Kind:
        return Kind.Q6_K if "v_proj" in name or "down_proj" in name else Kind.Q4_K

    ours, model = stored(tmp_path, kind=kinds)
    assert agree(ours, model)
    (first, second) = ours.layers[0].attention.qkv_proj.matrices
    assert (first.quant_type, second.quant_type) == ("Q4_K", "Q6_K")


def test_unquantized_tensors_stay_unquantized(tmp_path: Path) -> None:
    def kinds(name: str) -> Kind:
        return Kind.F16 if "k_proj" in name or "embed" in name else Kind.Q8_0

    ours, model = stored(tmp_path, kind=kinds)
    assert agree(ours, model)
    attention = ours.layers[0].attention
    assert isinstance(attention.qkv_proj, Linear)  # its three parts are one matrix, and one of them is not quantized
    assert isinstance(attention.o_proj, GGUFLinear)
    assert isinstance(ours.embedding, Embedding)


@every("kind", CODEBOOK_TYPES)
def test_platforms_without_a_product_of_a_type_dequantize_it_if_the_user_says_so(kind: str, tmp_path: Path) -> None:
    model = small_model("llama", **{**WIDE, "num_hidden_layers": 1}, num_attention_heads=8, head_dim=32)
    path = tmp_path / f"{kind}.gguf"
    write_gguf(path, model, "llama", Kind[kind])
    assert agree(built(path), model)
    gpu = ["--model-path", str(path), "--device", "cuda:sm90"]
    assert [
        (refusal.what, refusal.code, kind in refusal.reason) for refusal in make_plan(user_input(gpu)).refusals
    ] == [("dequantize_weights", "slower_path", True)]
    assert make_plan(user_input([*gpu, "--dequantize-weights"])).refusals == ()
    assert make_plan(user_input(["--model-path", str(path), "--device", "cpu:avx512"])).refusals == ()


def test_a_plan_counts_the_blocks_of_codebooks_as_they_are_loaded(tmp_path: Path) -> None:
    """Each matrix has another type; other tensors are float32."""
    ours, model = stored(tmp_path, kind=codebook_kinds())
    assert agree(ours, model)
    facts = make_plan(user_input(["--model-path", str(tmp_path / "model.gguf"), "--device", "cpu:avx512"])).model
    assert facts is not None
    assert set(CODEBOOK_TYPES) <= facts.stored_types.keys()
    assert planned_bytes(tmp_path / "model.gguf", dequantize_weights=False) == ours.loaded_bytes()


def test_by_default_the_weights_are_dequantized(tmp_path: Path) -> None:
    model = small_model("llama", **WIDE, num_attention_heads=8, head_dim=32)
    write_gguf(tmp_path / "model.gguf", model, "llama", Kind.Q8_0)
    ours = built(tmp_path / "model.gguf")
    assert not any(isinstance(module, (GGUFLinear, GGUFEmbedding)) for module in ours.modules())
    assert agree(ours, model)


@every("kind", DEQUANTIZED)
def test_the_scales_of_every_type_are_found(kind: str) -> None:
    """Those of random blocks are finite where all of the dequantized values are."""
    rows = numpy.random.default_rng(0).integers(0, 256, (400, TYPES_BY_NAME[kind].size), numpy.uint8)
    with numpy.errstate(all="ignore"):
        finite = numpy.isfinite(dequantize(rows, Kind[kind])).all(1)
    if kind == "MXFP4":  # the library computes with an exponent that stands for NaN
        finite = rows[:, 0] != 255
    assert not finite.all()
    assert [finite_scales(row, TYPES_BY_NAME[kind]) for row in rows] == finite.tolist()
    assert not finite_scales(rows.ravel(), TYPES_BY_NAME[kind])


@every(
    ("kind", "scale", "dequantized"),
    [
        ("Q4_0", b"\x00\x7c", False),
        ("Q4_K", b"\x00\x7e", True),
        ("IQ4_NL", b"\x00\xfe", False),
        ("MXFP4", b"\xff", False),
    ],
)
def test_a_scale_that_is_no_finite_number_is_refused_by_name(
    kind: str, scale: bytes, dequantized: bool, tmp_path: Path
) -> None:
    path = tmp_path / f"{kind}.gguf"
    model = small_model("llama", **{**WIDE, "num_hidden_layers": 1}, num_attention_heads=8, head_dim=32)
    write_gguf(path, model, "llama", Kind[kind])
    stored = read_header(path).tensors["blk.0.attn_k.weight"]
    with path.open("r+b") as file:
        file.seek(stored.offset + stored.size - stored.type.size)
        file.write(scale)
    with pytest.raises(ModelError) as caught:
        built(path, dequantize=dequantized)
    assert (caught.value.code, caught.value.what) == ("damaged", str(path))
    assert caught.value.reason == "a scale in model.layers.0.self_attn.k_proj.weight is not a finite number"
