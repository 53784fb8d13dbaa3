"""FP8 weights of experts: with biases, and those of all experts of a layer in one tensor, as tools store them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from every import every
from fp8_weights import FORMS, LARGEST, fp8, write_fp8
from model_cells import minimax_m2
from models_small import built, edit_config, expected_logits, our_logits, small_model, tokens_of
from safetensors.torch import load_file, save_file
from stored_orders import made, stored_form, write_stored
from torch import Tensor

from srv.args.config import make_config
from srv.errors import ModelError
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import make_plan
from srv.quantization.layers.fp8 import Fp8Experts
from srv.testing.engine import user_input


def planned(folder: Path, **values: Any) -> int:
    return weight_bytes(make_config({"dtype": "float32", **values}), read_facts(folder))


def refusals(folder: Path, *arguments: str) -> list[str]:
    plan = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder), *arguments]))
    return [refusal.reason for refusal in plan.refusals]


def served(folder: Path, model: Any, **values: Any) -> None:
    """The logits are those of the dequantized model, by FP8 experts, and the plan has the bytes that are loaded."""
    tokens = tokens_of(model, 12)
    ours = built(folder, **values)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert sum(isinstance(module, Fp8Experts) for module in ours.modules()) == 2
    assert ours.loaded_bytes() == planned(folder, **values)
    assert refusals(folder) == []


class InOne(NamedTuple):
    """How the weights of all experts are stored: [E, 2 I, H] and [E, H, I], or with the last axes exchanged.

    scale: from the largest magnitudes of each row, [E, N, K / columns] or less, to the stored scale. config: as of
    `fp8_weights.Form`. suffix: of the scale. extra: further tensors by their suffixes. block: rows and columns that
    share a scale; (0, 0): one for all of a projection.
    """

    config: dict[str, Any]
    suffix: str
    scale: Callable[[Tensor], Tensor] = lambda scale: scale
    block: tuple[int, int] = (1, 0)
    extra: Mapping[str, Tensor] = MappingProxyType({})


PLAIN = fp8()
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
FBGEMM: dict[str, Any] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
TENSOR = (1 << 20, 0)
IN_ONE = {
    "qwen3_moe, a scale for each projection": InOne(PLAIN, "_scale_inv", block=TENSOR),
    "qwen3_moe, static": InOne(
        fp8(activation_scheme="static"), "_scale_inv", block=TENSOR, extra={"_activation_scale": torch.full((4,), 0.5)}
    ),
    "qwen3_moe, blocks": InOne(fp8((16, 32)), "_scale_inv", block=(16, 32)),
    "qwen3_moe, blocks larger than a projection": InOne(fp8((128, 128)), "_scale_inv", block=(128, 128)),
    "llama4, modelopt": InOne(
        MODELOPT,
        "_weight_scale",
        lambda scale: scale.amax(),
        TENSOR,
        {"_input_scale": torch.tensor(0.25)},
    ),
    "llama4, modelopt, a scale for each expert": InOne(MODELOPT, "_weight_scale", lambda s: s.amax((1, 2)), TENSOR),
    "llama4, fbgemm_fp8": InOne(FBGEMM, "_scale", lambda s: s.transpose(1, 2) if s.shape[1] > 64 else s),
    "gpt_oss, a scale for each output": InOne(PLAIN, "_scale", lambda s: s[..., 0]),
    "gpt_oss, a scale for each projection": InOne(PLAIN, "_scale_inv", lambda s: s[..., 0], TENSOR),
}


def in_one(weight: Tensor, form: InOne, parts: int, in_turn: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [E, N, K] of a projection of all experts: the FP8 values, the stored scale, and what they stand for."""
    if in_turn:
        weight = torch.cat([weight[:, part::parts] for part in range(parts)], 1)
    experts, outputs, inputs = weight.shape
    rows, columns = min(form.block[0], outputs // parts), form.block[1] or inputs
    row = torch.arange(outputs) // rows
    column = torch.arange(inputs) // columns
    scale = torch.zeros(experts, int(row[-1]) + 1, int(column[-1]) + 1)
    for first in range(scale.shape[1]):
        for second in range(scale.shape[2]):
            part = weight[:, row == first][:, :, column == second].abs().amax((1, 2)) / LARGEST * 1.0625
            scale[:, first, second] = part
    stored_scale = form.scale(scale)
    if stored_scale.numel() in (1, experts):  # those of all rows of a tensor, or of an expert
        scale = stored_scale.reshape(-1, 1, 1).expand_as(scale)
    wide = scale[:, row][:, :, column]
    values = (weight / wide).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    same = values.float() * wide
    if in_turn:  # back to the order of the file
        values, same = (
            torch.stack(tensor.float().chunk(parts, 1), 2).flatten(1, 2).to(tensor.dtype) for tensor in (values, same)
        )
        if stored_scale.shape == (experts, outputs):
            stored_scale = torch.stack(stored_scale.chunk(parts, 1), 2).flatten(1)
    return values, stored_scale, same


def write_in_one(
    folder: Path, kind: str, form: InOne, spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None
) -> Any:
    """A checkpoint whose experts are FP8, and a model of transformers with the same weights in float32."""
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 2}
    model = small_model(kind, **sizes) if kind == "qwen3_moe" else made(kind)
    turned = kind != "qwen3_moe"
    stored: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        suffix = name.rpartition(".")[2]
        if suffix not in ("gate_up_proj", "down_proj"):
            stored[name] = tensor.bfloat16()
            same[name] = stored[name].float()
            continue
        weight = tensor.transpose(1, 2) if turned else tensor
        parts = 2 if suffix == "gate_up_proj" else 1
        values, scale, plain = in_one(weight, form, parts, kind == "gpt_oss")
        stored[name], same[name] = (part.transpose(1, 2) if turned else part for part in (values, plain))
        stored |= {
            f"{name}{form.suffix}": scale,
            **{f"{name}{end}": extra.clone() for end, extra in form.extra.items()},
        }
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.load_state_dict(same)
    spoil(stored)
    save_file({name: tensor.clone().contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    edit_config(folder, quantization_config=form.config)
    return model.eval()


@every("kind", IN_ONE)
def test_weights_of_all_experts_in_one_tensor_are_divided(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    model = write_in_one(folder, kind.partition(",")[0], IN_ONE[kind])
    assert read_facts(folder).quantization == IN_ONE[kind].config["quant_method"]
    served(folder, model)


@every("form", ["fp8, static", "compressed-tensors, channel", "fp8, blocks"])
def test_experts_with_biases_have_fp8_weights(form: str, tmp_path: Path) -> None:
    folder = tmp_path / form
    model = write_stored(folder, made("gpt_oss"), stored_form(form))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    biases = [name for name in tensors if name.endswith("gate_up_proj_bias")]
    assert len(biases) == 2
    assert all(bool(tensors[name].any()) for name in biases)
    served(folder, model)


def test_experts_with_biases_become_fp8_at_load(tmp_path: Path) -> None:
    model = made("gpt_oss")
    model.save_pretrained(tmp_path)
    ours = built(tmp_path, quantization="fp8")
    assert sum(isinstance(module, Fp8Experts) for module in ours.modules()) == 2
    assert ours.loaded_bytes() == planned(tmp_path, quantization="fp8")
    tokens = tokens_of(model, 12)
    expected = expected_logits(model, tokens)
    distance = (our_logits(ours, tokens) - expected).square().mean().sqrt() / expected.std()
    assert 0.001 < float(distance) < 0.3  # a weight is rounded to four bits of significand
    assert refusals(tmp_path, "--quantization", "fp8") == []


# Fields that say what the layers do; transformers reads none of them.
PUBLISHED_MINIMAX_M2: dict[str, Any] = {
    "attn_type_list": [1, 1],
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "use_mtp": True,
    "num_mtp_modules": 3,
}
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
BLOCKS, STATIC = IN_ONE["qwen3_moe, blocks"], IN_ONE["qwen3_moe, static"]
EACH = IN_ONE["qwen3_moe, a scale for each projection"]


def _change(suffix: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        changed = change(tensors.pop(f"{FUSED}{suffix}"))
        if changed is not None:
            tensors[f"{FUSED}{suffix}"] = changed

    return spoil


def _with(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def _nan(tensor: Tensor) -> Tensor:
    tensor.view(torch.uint8)[1, 60, 5] = 0xFF
    return tensor


def _one_axis(tensors: dict[str, Tensor]) -> None:
    """A scale for each output of an expert, without an axis of experts."""
    tensors[f"{DOWN}_scale_inv"] = torch.ones(tensors[DOWN].shape[1])


DAMAGED: list[tuple[InOne, Callable[[dict[str, Tensor]], None], str, str, bool]] = [
    (BLOCKS, _change("_scale_inv", lambda scale: None), "missing_tensors", f"lacks {FUSED}_scale_inv", True),
    (BLOCKS, _change("", lambda weight: None), "missing_tensors", f"which {FUSED}_scale_inv scales", True),
    (BLOCKS, _change("_scale_inv", lambda scale: scale[:, 1:]), "shape_mismatch", f"{FUSED}_scale_inv has the", True),
    (BLOCKS, _change("_scale_inv", lambda scale: scale.int()), "dtype_mismatch", f"{FUSED}_scale_inv is stored", True),
    (BLOCKS._replace(config=fp8((32, 32))), lambda tensors: None, "unsupported_quantization", "end within a blo", True),
    (BLOCKS._replace(config=fp8()), lambda tensors: None, "shape_mismatch", f"{FUSED}_scale_inv has the shape", True),
    (EACH, _one_axis, "shape_mismatch", f"{DOWN}_scale_inv has the shape", True),
    (STATIC, _change("_scale_inv", _with(-1.0)), "damaged", "gate_proj.weight_scale_inv has the value -1", False),
    (STATIC, _change("_activation_scale", _with(math.nan)), "damaged", "input_scale has the value nan", False),
    (BLOCKS, _change("", _nan), "damaged", "experts.1.up_proj.weight has values that are NaN", False),
]


@every(("form", "spoil", "code", "part", "in_headers"), DAMAGED)
def test_damaged_weights_of_all_experts_are_refused_by_name(
    form: InOne, spoil: Callable[[dict[str, Tensor]], None], code: str, part: str, in_headers: bool, tmp_path: Path
) -> None:
    """By a plan as well, if headers show it."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write_in_one(folder, "qwen3_moe", form, spoil)
    with pytest.raises(ModelError) as caught:
        built(folder)
    assert (caught.value.code, part in str(caught.value)) == (code, True), caught.value
    if in_headers:
        assert [part in reason for reason in refusals(folder)] == [True], refusals(folder)


def test_blocks_of_transposed_experts_are_refused_by_name(tmp_path: Path) -> None:
    write_in_one(tmp_path, "llama4", BLOCKS)
    part = "are in one tensor whose columns share scales in blocks of 16"
    with pytest.raises(ModelError, match=part):
        built(tmp_path)
    assert [part in reason for reason in refusals(tmp_path)] == [True]


def test_experts_of_single_projections_are_still_read(tmp_path: Path) -> None:
    model = write_fp8(tmp_path, FORMS["fp8, blocks"], kind="qwen3_moe", moe_intermediate_size=48, num_hidden_layers=2)
    served(tmp_path, model)


def test_a_checkpoint_of_minimax_m2_is_read_as_published(tmp_path: Path) -> None:
    """Names of tensors, `rotary_dim` in place of a share, and modules that the configuration leaves unquantized."""
    unquantized = ["gate", "e_score_correction_bias", "lm_head"]
    config = fp8((32, 32), fmt="float8_e4m3fn", modules_to_not_convert=unquantized)
    model = write_fp8(tmp_path, FORMS["fp8, blocks"]._replace(config=config), made=minimax_m2(num_hidden_layers=2))
    edit_config(tmp_path, rope_parameters=None, rope_theta=5e6, **PUBLISHED_MINIMAX_M2)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.block_sparse_moe.experts.3.w2.weight_scale_inv"].shape == (2, 3)
    assert bool(stored["model.layers.1.block_sparse_moe.e_score_correction_bias"].any())
    served(tmp_path, model)
