"""Weights as the libraries that make checkpoints store them, compared bit for bit with what these dequantize them to.

library_weights.json has, of each form that is read, the tensors and the configuration that a library wrote, and the
SHA-256 of the float32 values that the same library computes from them; tests/bench/libraries/weights.py writes it, and
says which versions of the libraries it runs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from every import every
from models_small import built, edit_config, small_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.args.config import make_config
from srv.dtypes import KVScales
from srv.models.layers.linear import Projection
from srv.models.read import read_facts
from srv.planning.kv_scales import configured_scales
from srv.planning.plan import make_plan
from srv.quantization.layers.blocks import GGUFLinear, OrderedLinear
from srv.quantization.layers.fp8 import Fp8Linear
from srv.quantization.layers.int8 import ScaledInt8Linear
from srv.quantization.method import StoredMatrix
from srv.quantization.registry import find
from srv.testing.engine import user_input
from srv_kernels.oracles import dequantize_rows

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "library_weights.json").read_text())
DOWN = "model.layers.0.mlp.down_proj"
METHODS = {"fp8": "fp8", "mxfp4": "mxfp4", "int8 and int8 activations": "w8a8_int8"}  # of compressed-tensors


def decoded(stored: dict[str, Any]) -> Tensor:
    raw = bytearray(zlib.decompress(base64.b64decode(stored["data"])))
    return torch.frombuffer(raw, dtype=getattr(torch, stored["dtype"])).reshape(stored["shape"])


def write(folder: Path, case: dict[str, Any]) -> None:
    """A Llama in which some layers are those that the library stored."""
    sizes = {"hidden_size": outputs_of(case), "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    small_model("llama", **sizes, num_attention_heads=2, num_key_value_heads=2).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    plain = {name: tensor for name, tensor in stored.items() if name.removesuffix(".weight") not in case["sha256"]}
    tensors = {name: decoded(tensor) for name, tensor in case["tensors"].items()}
    save_file(plain | tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=case["config"])


def outputs_of(case: dict[str, Any]) -> int:
    """The number of outputs of the down-projection, from the shapes of its tensors; any number if there are none."""
    shapes = {name.removeprefix(DOWN): tensor["shape"] for name, tensor in case["tensors"].items()}
    if ".qweight" in shapes:
        return int(shapes[".scales"][1])
    return int(next((shapes[name][0] for name in (".weight_packed", "._weight_qdata", ".weight") if name in shapes), 8))


def dequantized(layer: Projection) -> Tensor:
    """The weight that a layer holds, in float64: [outputs, inputs]."""
    if isinstance(layer, GGUFLinear):
        weight = torch.cat([dequantize_rows(matrix.rows, matrix.quant_type) for matrix in layer.matrices])
        if isinstance(layer, OrderedLinear):
            return torch.empty_like(weight).index_copy_(1, layer.columns[0], weight)
        return weight
    if isinstance(layer, ScaledInt8Linear):
        return layer.weight.double() * layer.weight_scale.double()[:, None]
    assert isinstance(layer, Fp8Linear)
    (operands,) = layer.operands()
    weight, scale = operands["weight"].double(), operands["scale"].double()
    rows, columns = operands["block_outputs"], operands["block_inputs"]
    wide = scale.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return weight * wide


@every("name", [name for name, case in CASES.items() if case["sha256"]])
def test_weights_have_the_bits_that_their_library_computes(name: str, tmp_path: Path) -> None:
    case, folder = CASES[name], tmp_path / name.replace(" ", "-")
    write(folder, case)
    library, _, form = name.partition(": ")
    methods = (
        method for start, method in METHODS.items() if library == "compressed-tensors" and form.startswith(start)
    )
    assert read_facts(folder).quantization == next(methods, case["config"]["quant_method"])
    assert make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals == ()
    digests = {}
    for module in built(folder).modules():
        if isinstance(module, Projection) and (layer := next(iter(module.output_sizes))) in case["sha256"]:
            weight = dequantized(module).float() + 0.0  # of the two zeros, the positive one
            digests.setdefault(
                layer, hashlib.sha256(weight.numpy().tobytes()).hexdigest()
            )  # not those inside of others
    assert digests == case["sha256"]


@every("name", [name for name, case in CASES.items() if case["sha256"]])
def test_a_configuration_alone_counts_what_the_library_stores(name: str) -> None:
    case = CASES[name]
    tensors = {tensor: tuple(stored["shape"]) for tensor, stored in case["tensors"].items() if tensor.startswith(DOWN)}
    expected: Counter[str] = Counter()
    for tensor, shape in tensors.items():
        expected[case["tensors"][tensor]["dtype"]] += math.prod(shape)
    method = find(case["config"]["quant_method"])
    assert method is not None
    assert method.stored is not None
    outputs = outputs_of(case)
    counted = dict(method.stored(case["config"], "bfloat16")(StoredMatrix(DOWN, outputs, 64)) or {})
    if name == "torchao: fp8 per tensor":
        counted["float32"] -= outputs - 1  # layers hold a scale for each output, and so it is counted
    assert counted == expected


def test_scales_of_keys_and_values_are_those_of_the_library(tmp_path: Path) -> None:
    """Rounded to bfloat16, as it stores them."""
    write(tmp_path, CASES["compressed-tensors: scales of keys and values"])
    facts = read_facts(tmp_path)
    scales = configured_scales(make_config({"dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}), facts)
    keys, values = torch.tensor([0.0371, 0.0123]).bfloat16().tolist()
    assert scales.by_layer == {0: KVScales(keys, values)}
