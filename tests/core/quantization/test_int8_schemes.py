"""The schemes of int8 that compressed-tensors writes, computed from the stored tensors, and damaged ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from every import every
from models_small import built, edit_config, expected_logits, our_logits, refused, small_model, tokens_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from srv.args.config import make_config
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import make_plan
from srv.quantization.layers.int8 import DynamicInt8Linear, StaticInt8Linear, WeightOnlyInt8Linear
from srv.quantization.registry import unsupported_form
from srv.testing.engine import user_input

SIZES = {"num_hidden_layers": 2}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
INPUTS: dict[str, Any] = {
    "dynamic": {**INT8, "strategy": "token", "dynamic": True},
    "static": {**INT8, "strategy": "tensor", "dynamic": False},
    "none": None,
}
CLASSES = {"dynamic": DynamicInt8Linear, "static": StaticInt8Linear, "none": WeightOnlyInt8Linear}
STEP = 0.04  # the scale of static activations
NAME = "model.layers.0.self_attn.o_proj"


class Stored(nn.Module):
    """A layer as compressed-tensors defines it, in float64, from its stored tensors."""

    def __init__(self, inputs: str, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.inputs, self.tensors = inputs, {name: tensor.double() for name, tensor in tensors.items()}

    def forward(self, x: Tensor) -> Tensor:
        got, wide = self.tensors, x.double()
        if self.inputs != "none":
            scale = got.get("input_scale", wide.abs().amax(-1, keepdim=True) / 127)
            wide = (wide / scale).round().clamp(-128, 127) * scale
        out = wide @ (got["weight"] * got["weight_scale"].reshape(-1, 1)).T
        return (out + got.get("bias", torch.zeros(()).double())).float()


def config_of(inputs: str, strategy: str, form: str = "int-quantized") -> dict[str, Any]:
    weights = {**INT8, "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": INPUTS[inputs]}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**config, "ignore": ["lm_head"]}


def write(
    folder: Path,
    inputs: str,
    strategy: str = "channel",
    arch: str = "qwen2",
    spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    config: dict[str, Any] | None = None,
) -> Any:
    """A checkpoint of the scheme. Returns the model of transformers with the stored layers."""
    model = small_model(arch, **SIZES)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or not name.endswith("_proj"):
            continue
        dim = (1,) if strategy == "channel" else (0, 1)
        scale = module.weight.detach().abs().amax(dim, keepdim=True) / 127
        tensors = {"weight": (module.weight.detach() / scale).round().to(torch.int8), "weight_scale": scale}
        tensors["weight_scale"] = scale if strategy == "channel" else scale.reshape(1)
        if inputs == "static":
            tensors["input_scale"] = torch.tensor([STEP])
        weights |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
        bias = {} if module.bias is None else {"bias": module.bias.detach()}
        model.set_submodule(name, Stored(inputs, tensors | bias))
    spoil(weights)
    save_file(weights, folder / "model.safetensors")
    edit_config(folder, quantization_config=config or config_of(inputs, strategy))
    return model


def planned(folder: Path, dtype: str = "float32") -> int:
    return weight_bytes(make_config({"dtype": dtype}), read_facts(folder))


@every("inputs", CLASSES)
@every("strategy", ["channel", "tensor"])
@every("arch", ["llama", "qwen2"])
def test_logits_are_those_that_the_stored_tensors_define(inputs: str, strategy: str, arch: str, tmp_path: Path) -> None:
    """Except for activations that round differently; qwen2 has biases. The plan has the bytes that are loaded."""
    folder = tmp_path / f"{inputs}-{strategy}-{arch}"
    model = write(folder, inputs, strategy, arch)
    ours, tokens = built(folder), tokens_of(model, 12)
    wanted = expected_logits(model, tokens)
    tolerance = 1e-4 if inputs == "none" else 0.05 * float(wanted.std())
    torch.testing.assert_close(our_logits(ours, tokens), wanted, atol=tolerance, rtol=1e-4)
    layers = [module for module in ours.modules() if isinstance(module, CLASSES[inputs])]
    assert len(layers) == 2 * 4
    assert ours.loaded_bytes() == planned(folder)
    assert built(folder, dtype=torch.bfloat16).loaded_bytes() == planned(folder, "bfloat16")
    assert make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals == ()


def test_a_layer_with_static_activations_is_exact(tmp_path: Path) -> None:
    """On inputs that are whole steps, no activation can round differently."""
    model = write(tmp_path, "static")
    layer = next(module for name, module in built(tmp_path).named_modules() if name == "layers.0.attention.qkv_proj")
    generator = torch.Generator().manual_seed(3)
    x = STEP * torch.randint(-200, 200, (7, model.config.hidden_size), generator=generator).float()
    attention = model.model.layers[0].self_attn
    wanted = torch.cat([projection(x) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)], -1)
    torch.testing.assert_close(layer.kernel(x), wanted, atol=1e-5, rtol=1e-5)


def test_a_plain_name_of_the_format_is_read_as_well(tmp_path: Path) -> None:
    model = write(tmp_path, "none", config=config_of("none", "channel", "naive-quantized"))
    tokens = tokens_of(model, 12)
    torch.testing.assert_close(
        our_logits(built(tmp_path), tokens), expected_logits(model, tokens), atol=1e-4, rtol=1e-4
    )


def test_layers_of_several_schemes_of_int8(tmp_path: Path) -> None:
    """Each layer is that of its group; a mixture keeps the scheme of its weights."""
    config = config_of("static", "channel")
    groups = {
        "group_0": {**config["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]},
        "group_1": {**config["config_groups"]["group_0"], "targets": ["re:.*mlp.*"], "input_activations": None},
    }

    def without_inputs(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "mlp" in name and name.endswith("input_scale")]:
            del tensors[name]

    write(tmp_path, "static", spoil=without_inputs, config={**config, "config_groups": groups})
    ours = built(tmp_path)
    kinds = {name: type(module) for name, module in ours.named_modules()}
    assert kinds["layers.0.attention.o_proj"] is StaticInt8Linear
    assert kinds["layers.0.mlp.down_proj"] is WeightOnlyInt8Linear
    assert ours.loaded_bytes() == planned(tmp_path)
    assert make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)])).refusals == ()


def test_experts_with_static_activations_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "static", arch="qwen2_moe", spoil=_divided_experts("static"))
    error = refused(tmp_path)
    assert (error.code, "0.mlp.experts are int8" in error.reason) == ("unsupported_quantization", True)
    refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)])).refusals
    assert [(refusal.code, error.reason in refusal.reason) for refusal in refusals] == [(error.code, True)], refusals


def test_experts_with_biases_are_refused_by_name(tmp_path: Path) -> None:
    """By a plan as well."""
    name = "model.layers.0.mlp.experts.0.up_proj"

    def add_bias(tensors: dict[str, Tensor]) -> None:
        _divided_experts("dynamic")(tensors)
        tensors[f"{name}.bias"] = torch.zeros(len(tensors[f"{name}.weight"]))

    write(tmp_path, "dynamic", arch="qwen2_moe", spoil=add_bias)
    error = refused(tmp_path)
    assert (error.code, f"{name} is int8 and has a bias" in error.reason) == ("unsupported_quantization", True)
    refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)])).refusals
    assert [(refusal.code, error.reason in refusal.reason) for refusal in refusals] == [(error.code, True)], refusals


def _divided_experts(inputs: str) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]:
            outputs, layer = len(tensors[name]), name.removesuffix(".weight")
            tensors[name] = tensors[name].to(torch.int8)
            tensors[f"{layer}.weight_scale"] = torch.ones(outputs, 1)
            if inputs == "static":
                tensors[f"{layer}.input_scale"] = torch.ones(1)

    return spoil


def _change(suffix: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        name = f"{NAME}.{suffix}"
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed.contiguous()

    return spoil


def _add(suffix: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{NAME}.{suffix}": tensor})


def _with(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@every(
    ("inputs", "spoil", "code", "part"),
    [
        ("dynamic", _change("weight_scale", lambda scale: None), "missing_tensors", f"{NAME}.weight_scale"),
        ("dynamic", _change("weight", lambda weight: None), "missing_tensors", f"lacks {NAME}.weight, to which"),
        ("dynamic", _change("weight", lambda weight: weight.view(torch.uint8)), "dtype_mismatch", "uint8, not as int8"),
        ("dynamic", _change("weight", lambda weight: weight.float()), "unexpected_tensors", f"{NAME}.weight_scale"),
        ("dynamic", _change("weight", lambda weight: weight[0]), "shape_mismatch", f"{NAME}.weight"),
        ("dynamic", _change("weight", lambda weight: weight[:, 1:]), "shape_mismatch", f"{NAME}.weight"),
        ("dynamic", _change("weight_scale", lambda scale: scale.int()), "dtype_mismatch", "stored as int32"),
        ("dynamic", _change("weight_scale", lambda scale: scale[:-1]), "shape_mismatch", f"{NAME}.weight_scale"),
        ("dynamic", _add("weight_zero_point", torch.zeros(48, 1).to(torch.int8)), "unexpected_tensors", "zero_point"),
        ("dynamic", _add("input_scale", torch.ones(1)), "unexpected_tensors", f"{NAME}.input_scale"),
        ("dynamic", _change("weight_scale", _with(math.nan)), "damaged", "weight_scale is not finite"),
        ("dynamic", _change("weight_scale", _with(math.inf)), "damaged", "weight_scale is not finite"),
        ("dynamic", _change("weight_scale", _with(-0.5)), "damaged", "weight_scale is negative"),
        ("dynamic", _change("weight_scale", torch.zeros_like), "unsupported_quantization", "weight_scale is 0 for all"),
        ("static", _change("input_scale", lambda scale: None), "missing_tensors", f"{NAME}.input_scale"),
        ("static", _change("input_scale", lambda scale: scale.int()), "dtype_mismatch", f"{NAME}.input_scale"),
        ("static", _change("input_scale", lambda scale: torch.ones(3)), "shape_mismatch", f"{NAME}.input_scale"),
        ("static", _change("weight_scale", lambda scale: None), "missing_tensors", f"{NAME}.weight_scale"),
        ("static", _add("input_zero_point", torch.zeros(1).to(torch.int8)), "unexpected_tensors", "input_zero_point"),
        ("static", _change("input_scale", _with(math.nan)), "damaged", "input_scale is not finite"),
        ("static", _change("input_scale", _with(-1.0)), "damaged", "input_scale is negative"),
        (
            "static",
            _change("input_scale", _with(0.0)),
            "unsupported_quantization",
            "is 0, which is not above",
        ),
        ("static", _change("weight_scale", torch.zeros_like), "unsupported_quantization", "deq_scale is 0 for all"),
        ("none", _change("weight_scale", lambda scale: None), "missing_tensors", f"{NAME}.weight_scale"),
        ("none", _change("weight_scale", _with(-0.5)), "damaged", "weight_scale is negative"),
        ("none", _add("input_scale", torch.ones(1)), "unexpected_tensors", f"{NAME}.input_scale"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    inputs: str, spoil: Callable[[dict[str, Tensor]], None], code: str, part: str, tmp_path: Path
) -> None:
    """By a plan as well, if headers show it."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write(folder, inputs, spoil=spoil, arch="llama")
    error = refused(folder)
    assert (error.code, part in error.reason) == (code, True), error
    if code not in ("damaged", "unsupported_quantization"):  # which values show
        refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals
        assert [(refusal.code, error.reason in refusal.reason) for refusal in refusals] == [(code, True)], refusals


def test_a_row_of_zeros_may_have_the_scale_0(tmp_path: Path) -> None:
    """A tool that divides the largest magnitude of each row by 127 writes it."""

    def empty(tensors: dict[str, Tensor]) -> None:
        tensors[f"{NAME}.weight"][3] = 0
        tensors[f"{NAME}.weight_scale"][3] = 0

    write(tmp_path, "dynamic", spoil=empty)
    assert built(tmp_path).loaded_bytes()


def test_asymmetric_integers_are_refused_by_name(tmp_path: Path) -> None:
    for section in ("weights", "input_activations"):
        config = config_of("static", "channel")
        config["config_groups"]["group_0"][section]["symmetric"] = False
        clause = unsupported_form(tmp_path, {"quantization_config": config})
        assert clause == f"its group_0 has {section} with symmetric False, not True"
