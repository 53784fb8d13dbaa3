"""Checkpoints of ModelOpt and compressed-tensors in NVFP4, written here by the formats' definitions.

They are served with unquantized activations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import engine, messages, prompted
from every import every
from fp8_weights import MODELOPT, SIZES
from latent_steps import Steps
from models_small import built, edit_config, expected_logits, our_logits, refused, small_model, tokens_of
from nvfp4_weights import DENSE, STATED, Spoil, nvfp4, write
from offloaded_weights import check_offloaded
from planned_sizes import check_sizes, planned_bytes
from safetensors.torch import load_file, save_file
from stored_orders import Stored, made, write_stored
from torch import Tensor

from srv.models.read import read_facts
from srv.planning.plan import LaunchPlan, make_plan
from srv.quantization.formats import nvfp4_storage
from srv.quantization.formats.nvfp4_storage import NvFp4Experts, NvFp4Linear
from srv.quantization.registry import detect, unsupported_form
from srv.specs import Latent
from srv.testing.engine import user_input

WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": WEIGHTS}},
    "ignore": ["lm_head", "re:.*gate$"],
}
EXPERTS = {"moe_intermediate_size": 48, "num_hidden_layers": 2}
LAYER = "model.layers.0.self_attn.k_proj"


def compress(folder: Path, **stated: Any) -> None:
    """Store a model that `write` has written as compressed-tensors does: other names, and reciprocals of scales."""
    names = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    file, stored = folder / "model.safetensors", dict[str, Tensor]()
    for name, tensor in load_file(file).items():
        layer, _, suffix = name.rpartition(".")
        if suffix in names:
            stored[f"{layer}.{names[suffix]}"] = tensor.reciprocal().reshape(1)
        else:
            stored[f"{layer}.weight_packed" if tensor.dtype == torch.uint8 else name] = tensor
    save_file(stored, file)
    edit_config(folder, quantization_config={**COMPRESSED, **stated})


def dense(kind: str = "llama", **fields: Any) -> Any:
    torch.manual_seed(0)
    return small_model(kind, **{**SIZES, "num_hidden_layers": 1, **fields})


def planned(folder: Path) -> LaunchPlan:
    return make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)]))


def check_logits(folder: Path, model: Any) -> Any:
    """The model that is built: its logits are those of the dequantized weights, and its bytes those of a plan."""
    tokens, (group, *_) = tokens_of(model, 12), read_facts(folder).cache_groups
    for ours in (built(folder, dequantize=True), built(folder)):
        latent = isinstance(group, Latent)
        logits = Steps(ours, group).run([([3, 1, 4], tokens, 0)]) if latent else our_logits(ours, tokens)
        torch.testing.assert_close(logits, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned_bytes(folder)
    assert planned(folder).refusals == ()
    return ours


def check_served(folder: Path, model: Any) -> None:
    small = prompted(model, folder)
    with engine(small) as served:
        results = served.generate(messages(small.prompts))
    assert [result.tokens for result in results] == small.tokens


def test_a_dense_model_is_served(tmp_path: Path) -> None:
    """With the tokens of the dequantized weights. Fused layers have the scale of each matrix."""
    model = dense(num_hidden_layers=3)
    weights = write(tmp_path, model)
    ours = check_logits(tmp_path, model)
    layers = {name: module for name, module in ours.named_modules() if isinstance(module, NvFp4Linear)}
    assert len(layers) == 3 * 4
    names = [f"model.layers.2.self_attn.{name}_proj.weight" for name in "qkv"]
    fused = layers["layers.2.attention.qkv_proj"].matrix
    assert torch.equal(fused.dequantized(slice(None), torch.float32), torch.cat([weights[name] for name in names]))
    assert len(fused.matrix_scale.unique()) == 3
    check_served(tmp_path, model)
    assert any("its NVFP4 weights are dequantized for every product" in note for note in planned(tmp_path).notes)


@every("at_once", [nvfp4_storage._AT_ONCE, 64 * 40])
def test_weights_are_dequantized_in_parts(at_once: int, tmp_path: Path) -> None:
    """Not more at a time than the limit, which is less than a matrix in the second case."""
    folder, model = tmp_path / str(at_once), dense("qwen2")
    write(folder, model, r"(q_proj|k_proj|v_proj|lm_head)\.weight$", ignore=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvfp4_storage, "_AT_ONCE", at_once)
        ours = check_logits(folder, model)
    kinds = {name for name, module in ours.named_modules() if isinstance(module, NvFp4Linear)}
    assert kinds == {"layers.0.attention.qkv_proj", "lm_head"}  # the first has biases


@every("at_once", [nvfp4_storage._AT_ONCE, 2 * 48 * 64 * 2])
def test_experts_have_tensors_of_their_own(at_once: int, tmp_path: Path) -> None:
    """Of a few tokens the chosen ones are dequantized, of many all, and not more at a time than the limit."""
    folder, model = tmp_path / str(at_once), dense("qwen3_moe", **EXPERTS)
    write(folder, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvfp4_storage, "_AT_ONCE", at_once)
        ours = check_logits(folder, model)
        experts, _ = (module for module in ours.modules() if isinstance(module, NvFp4Experts))
        generator = torch.Generator().manual_seed(0)
        x, weights = torch.randn(9, 64, generator=generator), torch.rand(9, 2, generator=generator)
        ids = torch.stack([torch.randperm(7, generator=generator)[:2] for _ in x])
        ids[0, 0], ids[3, 1] = -1, 7  # of no expert: they contribute nothing
        alone = torch.cat(
            [experts.kernel(*(tensor[row : row + 1] for tensor in (x, ids, weights))) for row in range(9)]
        )
        torch.testing.assert_close(experts.kernel(x, ids, weights), alone)
        check_served(folder, model)


@every(("kind", "quantized"), [("phi3", DENSE), ("cohere", DENSE), ("v3", DENSE.replace("_proj", "(?<!kv_b)_proj"))])
def test_fused_matrices_and_rows_in_another_order(kind: str, quantized: str, tmp_path: Path) -> None:
    model = made(kind)
    write(tmp_path / kind, model, quantized)
    check_logits(tmp_path / kind, model)


@every(("kind", "fields"), [("llama", {"num_hidden_layers": 3}), ("qwen3_moe", {**EXPERTS, "num_hidden_layers": 3})])
def test_layers_in_host_memory(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / kind, dense(kind, **fields))
    assert "" in check_offloaded(tmp_path / kind)


@every(("kind", "fields"), [("llama", {}), ("qwen3_moe", EXPERTS)])
def test_sizes_follow_from_the_configuration(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    folder, model = tmp_path / kind, dense(kind, **fields)
    write(folder, model)
    assert read_facts(folder).parameters == sum(parameter.numel() for parameter in model.parameters())
    check_sizes(folder, built(folder))


def test_the_file_of_modelopt_states_it(tmp_path: Path) -> None:
    model = dense()
    write(tmp_path, model)
    edit_config(tmp_path, quantization_config=None)
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({**MODELOPT, "quantization": quantization}))
    assert read_facts(tmp_path).quantization == "modelopt"
    check_logits(tmp_path, model)


@every(("kind", "fields"), [("llama", {"num_hidden_layers": 2}), ("qwen3_moe", EXPERTS), ("phi3", {})])
def test_checkpoints_of_compressed_tensors(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Plans and layers are those of the same weights as ModelOpt stores them, but for a rounded reciprocal."""
    folder, model = tmp_path / kind, made(kind) if kind == "phi3" else dense(kind, **fields)
    write(folder, model)
    compress(folder)
    assert read_facts(folder).quantization == "compressed-tensors"
    assert read_facts(folder).parameters == sum(each.numel() for each in model.parameters())
    ours = check_logits(folder, model)
    assert any(isinstance(module, NvFp4Linear) for module in ours.modules())
    check_sizes(folder, ours)


@every(
    ("spoil", "code", "part"),
    [
        (lambda _: None, "missing_tensors", "it lacks .*k_proj.weight_global_scale"),
        (lambda each: each.expand(2).contiguous(), "shape_mismatch", "is not one value"),
        (lambda each: each * 0, "damaged", "is 0, which is not a finite number above 0"),
    ],
)
def test_damaged_scales_of_compressed_tensors(spoil: Any, code: str, part: str, tmp_path: Path) -> None:
    folder = tmp_path / code
    write(folder, dense())
    compress(folder)
    file, name = folder / "model.safetensors", f"{LAYER}.weight_global_scale"
    stored = load_file(file)
    changed = spoil(stored.pop(name))
    save_file(stored if changed is None else {**stored, name: changed}, file)
    error = refused(folder)
    assert error.code == code
    assert re.search(part, error.reason), error.reason


def test_groups_of_compressed_tensors_that_no_layer_supports_are_refused(tmp_path: Path) -> None:
    def reason(group: dict[str, Any], **fields: Any) -> str:
        stated = {**COMPRESSED, "config_groups": {"group_0": {**COMPRESSED["config_groups"]["group_0"], **group}}}
        return unsupported_form(tmp_path, {"quantization_config": {**stated, **fields}}) or ""

    assert "has weights with group_size 32, not 16" in reason({"weights": {**WEIGHTS, "group_size": 32}})
    assert "its groups have the targets re:.*mlp.*, not Linear" in reason({"targets": ["re:.*mlp.*"]})
    assert "it has a transform_config" in reason({}, transform_config={"config_groups": {}})
    assert reason({"input_activations": None}) == ""


def _change(suffix: str, change: Callable[[Tensor], Tensor | None]) -> Spoil:
    def spoil(tensors: dict[str, Tensor]) -> None:
        changed = change(tensors.pop(f"{LAYER}.{suffix}"))
        if changed is not None:
            tensors[f"{LAYER}.{suffix}"] = changed

    return spoil


def _set(value: int) -> Callable[[Tensor], Tensor]:
    """The first scale has this code."""

    def change(scale: Tensor) -> Tensor:
        scale.view(torch.uint8)[0, 0] = value
        return scale

    return change


@every(
    ("spoil", "code", "part"),
    [
        (_change("weight", lambda _: None), "missing_tensors", "it lacks .*k_proj.weight"),
        (_change("weight_scale", lambda _: None), "missing_tensors", "it lacks .*k_proj.weight_scale"),
        (_change("weight_scale_2", lambda _: None), "missing_tensors", "it lacks .*k_proj.weight_scale_2"),
        (_change("weight", lambda tensor: tensor[:, :-1]), "shape_mismatch", "bytes of groups of 16"),
        (_change("weight_scale", lambda tensor: tensor[:, :1]), "shape_mismatch", r"weights \[32, 32\] need \[32, 4\]"),
        (_change("weight_scale_2", lambda tensor: tensor.expand(2)), "shape_mismatch", "is not one value"),
        (_change("weight_scale", lambda tensor: tensor.float()), "dtype_mismatch", "as float32, not as float8_e4m3fn"),
        (_change("weight_scale_2", lambda tensor: tensor.half()), "dtype_mismatch", "as float16, not as float32"),
        (_change("weight", lambda tensor: tensor.to(torch.float8_e4m3fn)), "unsupported_quantization", "not as uint8"),
        (_change("weight", lambda tensor: torch.zeros(32, 64)), "unsupported_quantization", "q_proj is in NVFP4 and"),
        (_change("weight_scale", _set(0x7F)), "damaged", "negative or NaN"),
        (_change("weight_scale", _set(0x81)), "damaged", "negative or NaN"),
        (
            _change("weight_scale_2", lambda tensor: tensor * torch.inf),
            "damaged",
            "is inf, which is not a finite number",
        ),
        (_change("weight_scale_2", lambda tensor: -tensor), "damaged", "which is not a finite number from 0 on"),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(spoil: Spoil, code: str, part: str, tmp_path: Path) -> None:
    """By a plan as well, if headers show it."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write(folder, dense(), spoil=spoil)
    error = refused(folder)
    assert error.code == code
    assert re.search(part, error.reason), error.reason
    if code != "damaged":
        assert [(refusal.code, error.reason in refusal.reason) for refusal in planned(folder).refusals] == [
            (code, True)
        ]


def _of_layer(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    tensors, same = nvfp4(weight)
    return {f"{layer}.{suffix}": tensor for suffix, tensor in tensors.items()}, same


def test_layers_that_cannot_be_held_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "embedding", dense(), r"embed_tokens\.weight$")
    write(tmp_path / "latent", made("v3"), r"kv_b_proj\.weight$")
    write_stored(tmp_path / "biases", made("gpt_oss"), Stored(_of_layer, STATED))
    parts = {
        "embedding": "model.embed_tokens is in NVFP4, and no embedding layer supports that",
        "latent": "latent attention needs its weights unquantized",
        "biases": "experts with biases cannot be in NVFP4",
    }
    for name, part in parts.items():
        (refusal,) = planned(tmp_path / name).refusals
        assert (refusal.code, part in refusal.reason) == ("unsupported_quantization", True), refusal


@every(
    ("fields", "part"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "its quant_algo is NVFP4_AWQ, not one of FP8"),
        ({"group_size": 32}, "its group_size is 32, not 16"),
        ({"kv_cache_quant_algo": "NVFP4"}, "a kv_cache_quant_algo NVFP4, which is not FP8"),
        ({"ignore": 5}, "ignore is 5, not a list of names"),
    ],
)
def test_forms_that_no_layer_supports_are_refused(fields: dict[str, Any], part: str, tmp_path: Path) -> None:
    config = {"quantization_config": {**STATED, **fields}}
    assert part in (unsupported_form(tmp_path, config) or "")
    assert detect(tmp_path, config) == "modelopt"
