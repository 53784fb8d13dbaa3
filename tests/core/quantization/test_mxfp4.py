"""Checkpoints in MXFP4: gpt-oss as it is published, and compressed-tensors' format, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_small import built, expected_logits, our_logits, tokens_of
from mxfp4_weights import compressed, write_compressed, write_gpt_oss
from planned_sizes import planned_bytes
from torch import Tensor

from srv.args.config import make_config
from srv.errors import ModelError
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import make_plan
from srv.quantization.layers.blocks import GGUFExperts, GGUFLinear
from srv.quantization.registry import detect, unsupported_form
from srv.testing.engine import user_input

EXPERTS = "model.layers.0.mlp.experts"


def test_gpt_oss_as_published_has_the_logits_of_its_dequantized_weights(tmp_path: Path) -> None:
    """The plan has the bytes that are loaded, and biases are those of interleaved rows."""
    model = write_gpt_oss(tmp_path)
    facts, tokens = read_facts(tmp_path), tokens_of(model, 16)
    assert facts.quantization == "mxfp4"
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    ours = built(tmp_path)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    experts = [module for module in ours.modules() if isinstance(module, GGUFExperts)]
    assert [(expert.gate_up_type, expert.down_type, expert.down_bias is None) for expert in experts] == [
        ("MXFP4", "MXFP4", False)
    ] * 2
    assert ours.loaded_bytes() == planned_bytes(tmp_path)
    assert weight_bytes(make_config({"dtype": "float32"}), facts) > ours.loaded_bytes()


def test_compressed_tensors_in_mxfp4(tmp_path: Path) -> None:
    model = write_compressed(tmp_path)
    facts, tokens = read_facts(tmp_path), tokens_of(model, 12)
    ours = built(tmp_path)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert {
        matrix.quant_type for layer in ours.modules() if isinstance(layer, GGUFLinear) for matrix in layer.matrices
    } == {"MXFP4"}
    assert (facts.quantization, ours.loaded_bytes()) == ("mxfp4", planned_bytes(tmp_path))


def _change(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        changed = change(tensors.pop(f"{EXPERTS}.{name}"))
        if changed is not None:
            tensors[f"{EXPERTS}.{name}"] = changed.contiguous()

    return spoil


def _nan(scales: Tensor) -> Tensor:
    scales[0, 3, 1] = 255
    return scales


@every(
    ("spoil", "code", "part"),
    [
        (_change("gate_up_proj_scales", lambda _: None), "missing_tensors", "lacks .*gate_up_proj_scales"),
        (_change("down_proj_blocks", lambda _: None), "missing_tensors", "lacks .*down_proj_blocks"),
        (_change("gate_up_proj_scales", lambda tensor: tensor[..., :1]), "shape_mismatch", r"fits its blocks of 32"),
        (_change("gate_up_proj_blocks", lambda tensor: tensor.flatten(2)), "shape_mismatch", "not .experts, outputs"),
        (_change("down_proj_scales", lambda tensor: tensor.float()), "dtype_mismatch", "float32, not as uint8"),
        (_change("down_proj_scales", _nan), "damaged", "a scale in .*down_proj_scales is 255"),
        (_change("gate_up_proj_bias", lambda _: None), "missing_tensors", "gate_proj.bias"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    spoil: Callable[[dict[str, Tensor]], None], code: str, part: str, tmp_path: Path
) -> None:
    """By a plan as well, if headers show it."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write_gpt_oss(folder, spoil)
    with pytest.raises(ModelError, match=part) as caught:
        built(folder)
    assert caught.value.code == code
    if code != "damaged" and "bias" not in part:  # the headers of blocks and scales show it
        refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals
        assert [(refusal.code, caught.value.reason in refusal.reason) for refusal in refusals] == [(code, True)], (
            refusals
        )


@every(
    ("quant_config", "part"),
    [
        (compressed(input_activations={"num_bits": 4}), "quantizes activations"),
        (compressed(weights={"num_bits": 4, "type": "float", "group_size": 16}), "in groups of 16"),
        ({**compressed(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**compressed(), "config_groups": {}}, "no config_groups"),
        ({**compressed(), "ignore": 5}, "its ignore is 5, not a list of names"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": 5}, "its modules_to_not_convert is 5"),
    ],
)
def test_forms_that_no_layer_supports_are_refused(quant_config: dict[str, Any], part: str, tmp_path: Path) -> None:
    config = {"quantization_config": quant_config}
    assert part in (unsupported_form(tmp_path, config) or "")
    assert detect(tmp_path, config) == quant_config["quant_method"]
