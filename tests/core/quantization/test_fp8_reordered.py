"""FP8 checkpoints whose rows are in another order than those of the layers: rotary pairs side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_small import small
from every import every
from fp8_weights import FORMS, write_fp8
from indexed_small import small as indexed_small
from latent_steps import Steps
from models_small import built, edit_config, expected_logits, our_logits, randomized, tokens_of
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig

from srv.args.config import make_config
from srv.errors import ModelError, Rejection
from srv.models.base import CausalLM, NativeModel
from srv.models.checkpoints.row_orders import crossing_rows, rotary_rows
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import make_plan
from srv.quantization.layers.fp8 import Fp8Experts, Fp8Linear
from srv.specs import AttentionLayer, Latent, LatentDims
from srv.testing.engine import user_input

# The rotary rows of a head are the second half of a block of 32, those of the compressed vector the first half of one.
WITHIN = {"qk_nope_head_dim": 16, "qk_head_dim": 32, "kv_lora_rank": 32, "v_head_dim": 16, "num_attention_heads": 4}
WITHIN |= {"num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48}
ATTENTION = "model.layers.1.self_attn"
FORMS_AND_MODELS = [
    ("fp8, blocks", "v3"),
    ("fp8, blocks scaled by powers of two", "v2"),
    ("fp8, static", "v3"),
    ("compressed-tensors, channel", "v3-plain"),
    ("modelopt, blocks", "v2-lite"),
]


def planned(folder: Path, **values: Any) -> int:
    return weight_bytes(make_config({"dtype": "float32", **values}), read_facts(folder))


def refusals(folder: Path) -> tuple[Rejection, ...]:
    """Why a plan says that a launch on processors would end."""
    return make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals


def deepseek(kind: str, **fields: Any) -> Any:
    return small(kind, **{**WITHIN, **fields})


def up_projection(model: CausalLM) -> Tensor:
    assert isinstance(model, NativeModel)
    return model.weight_views()[f"{ATTENTION}.kv_b_proj.weight"]


@every(("form", "kind"), FORMS_AND_MODELS)
def test_deepseek_computes_what_the_dequantized_weights_do(form: str, kind: str, tmp_path: Path) -> None:
    """The plan has the bytes that are loaded: the up-projection in the model's dtype, all other projections in FP8."""
    folder = tmp_path / f"{form} {kind}"
    model = write_fp8(folder, FORMS[form], made=deepseek(kind))
    tokens = tokens_of(model, 12)
    ours, (group,) = built(folder), read_facts(folder).cache_groups
    assert isinstance(group, Latent)
    logits = Steps(ours, group).run([([3, 1, 4], tokens, 0)])
    torch.testing.assert_close(logits, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned(folder)
    assert refusals(folder) == ()
    layers = {name for name, module in ours.named_modules() if isinstance(module, Fp8Linear)}
    assert {"layers.1.attention.down_proj", "layers.1.attention.q_proj", "layers.1.attention.o_proj"} <= layers
    assert sum(isinstance(module, Fp8Experts) for module in ours.modules()) == 2
    assert torch.equal(up_projection(ours), model.get_parameter(f"{ATTENTION}.kv_b_proj.weight"))


INDEXED = [("fp8, blocks", "v32"), ("fp8, blocks", "glm"), ("fp8, static", "glm"), ("fp8, blocks", "axk2")]


@every(("form", "kind"), INDEXED)
def test_an_indexer_computes_what_the_dequantized_weights_do(form: str, kind: str, tmp_path: Path) -> None:
    """It chooses from twelve keys. The projection of its weights is not quantized, as in published checkpoints.

    Nor are the gates of norms.
    """
    unquantized = indexed_small(kind, **{**WITHIN, "index_head_dim": 32})
    kept = {
        name: parameter.detach().clone() for name, parameter in unquantized.named_parameters() if "weights_proj" in name
    }

    def keep(tensors: dict[str, Tensor]) -> None:
        for name, tensor in kept.items():
            for stored in [other for other in tensors if other.startswith(name.removesuffix("weight"))]:
                del tensors[stored]
            tensors[name] = tensor

    folder = tmp_path / f"{form} {kind}"
    model = write_fp8(folder, FORMS[form], keep, made=unquantized)
    for name, tensor in kept.items():
        model.get_parameter(name).data.copy_(tensor)
    tokens = tokens_of(model, 12)
    ours, (group,) = built(folder), read_facts(folder).cache_groups
    assert isinstance(group, Latent)
    logits = Steps(ours, group).run([([3, 1, 4], tokens, 0)])
    torch.testing.assert_close(logits, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned(folder)
    assert refusals(folder) == ()
    layers = {name for name, module in ours.named_modules() if isinstance(module, Fp8Linear)}
    indexer = "layers.0.attention.indexer"
    assert {f"{indexer}.q_proj", f"{indexer}.k_proj"} <= layers
    assert f"{indexer}.weights_proj" not in layers


@every("form", ["fp8, static", "compressed-tensors, channel", "fp8, blocks with the other name"])
def test_cohere_computes_what_the_dequantized_weights_do(form: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = CohereConfig(**sizes, num_hidden_layers=2, vocab_size=97, pad_token_id=0, initializer_range=0.25)
    unquantized = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    folder = tmp_path / form
    model = write_fp8(folder, FORMS[form], made=randomized(unquantized))
    tokens = tokens_of(model, 12)
    ours = built(folder)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned(folder)
    assert refusals(folder) == ()


@every("fields", [{"qk_nope_head_dim": 24, "qk_head_dim": 40}, {"kv_lora_rank": 24}])
def test_rows_that_would_leave_their_block_are_refused(fields: dict[str, int], tmp_path: Path) -> None:
    folder = tmp_path / next(iter(fields))
    write_fp8(folder, FORMS["fp8, blocks"], made=deepseek("v3", **fields))
    layer = "kv_a_proj_with_mqa" if "kv_lora_rank" in fields else "q_b_proj"
    part = f"stores them in another order, and the 16 rotary rows of a head of {layer} are not within one of its blocks"
    with pytest.raises(ModelError, match=part) as caught:
        built(folder)
    assert caught.value.code == "unsupported_quantization"
    refused = refusals(folder)
    assert [(rejection.code, part in rejection.reason) for rejection in refused] == [
        ("unsupported_quantization", True)
    ], refused


def test_published_sizes_stay_within_blocks_of_128() -> None:
    """Those of DeepSeek-V3 and Kimi K2; half a block would divide the rows of queries."""
    for heads in (128, 64):
        layer = AttentionLayer(0, heads, 1, 192, 1.0, latent=LatentDims(512, 128, 64, 128))
        assert crossing_rows([layer], 64, 128) is None
        assert crossing_rows([layer], 64, 48) == rotary_rows(layer, 64)[0]


def test_the_gates_beside_queries_move_their_rows(tmp_path: Path) -> None:
    """Queries and gates of 56 rows per head: the rotary rows of the fourth query would leave their block."""
    write_fp8(tmp_path, FORMS["fp8, blocks"], made=indexed_small("axk2", **{**WITHIN, "v_head_dim": 24}))
    with pytest.raises(ModelError, match="the 16 rotary rows of a head of q_b_proj are not within one of its blocks"):
        built(tmp_path)


def _without(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"{ATTENTION}.kv_b_proj.{suffix}")


def _scale(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        name = f"{ATTENTION}.kv_b_proj.weight_scale_inv"
        tensors[name] = change(tensors[name])

    return spoil


@every(
    ("spoil", "code", "part", "in_headers"),
    [
        (_without("weight_scale_inv"), "missing_tensors", "kv_b_proj.weight_scale, by which the FP8 values", True),
        (_without("weight"), "missing_tensors", "kv_b_proj.weight, which", True),
        (_scale(lambda scale: scale[:-1]), "shape_mismatch", "kv_b_proj.weight_scale_inv has the shape", True),
        (_scale(lambda scale: scale * math.nan), "damaged", "kv_b_proj.weight_scale_inv has the value nan", False),
    ],
)
def test_a_damaged_up_projection_is_refused_by_name(
    spoil: Callable[[dict[str, Tensor]], None], code: str, part: str, in_headers: bool, tmp_path: Path
) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write_fp8(folder, FORMS["fp8, blocks"], spoil, made=deepseek("v3", num_hidden_layers=2))
    with pytest.raises(ModelError) as caught:
        built(folder)
    assert (caught.value.code, part in str(caught.value)) == (code, True), caught.value
    if in_headers:
        refused = refusals(folder)
        assert [part in refusal.reason for refusal in refused] == [True], refused


def test_an_up_projection_that_is_not_quantized_stays_as_it_is(tmp_path: Path) -> None:
    def unquantize(tensors: dict[str, Tensor]) -> None:
        tensors[f"{ATTENTION}.kv_b_proj.weight"] = torch.ones(128, 32, dtype=torch.bfloat16)
        del tensors[f"{ATTENTION}.kv_b_proj.weight_scale_inv"]

    write_fp8(tmp_path, FORMS["fp8, blocks"], unquantize, made=deepseek("v3"))
    ours = built(tmp_path)
    assert bool((up_projection(ours) == 1).all())
    assert ours.loaded_bytes() == planned(tmp_path)


def test_layers_that_predict_further_tokens_do_not_count(tmp_path: Path) -> None:
    def predict(tensors: dict[str, Tensor]) -> None:
        more = {
            name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in tensors.items() if ".1." in name
        }
        tensors.update({**more, "model.layers.2.eh_proj.weight": torch.zeros(64, 128)})

    write_fp8(tmp_path, FORMS["fp8, blocks"], predict, made=deepseek("v3", num_hidden_layers=2))
    assert built(tmp_path).loaded_bytes() == planned(tmp_path)
    assert refusals(tmp_path) == ()


def test_dummy_weights_have_about_the_planned_bytes(tmp_path: Path) -> None:
    """Of a configuration alone. Its up-projections would be stored in FP8, but are held in the model's dtype."""
    deepseek("v3").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, quantization_config=FORMS["fp8, blocks"].config)
    held = built(tmp_path, load_format="dummy").loaded_bytes()
    assert planned(tmp_path, load_format="dummy") == pytest.approx(held, rel=0.002)
