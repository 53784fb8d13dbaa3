"""What checkpoints of each quantization method state, in the forms that tools write: data with which cells are judged.

Torch-free. Must not know architectures: `described` of modelslim gets the names of layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.quantization.registry import CHECKPOINT_METHODS
from srv.specs import ModelFacts

# Small matrices do not have whole groups: A.X K2's within norms, and those of Gemma 3n beside its MLPs.
_LEFT_OUT = ("lm_head", "input_layernorm", "post_attention_layernorm", "altup", "laurel")
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_ARGS: Mapping[str, Any] = {"num_bits": 8, "symmetric": True}


class Form(NamedTuple):
    """One form of checkpoints. `name`: what users call it, "" for the ordinary one. `quant_config`: its
    quantization_config.

    Unless a method has a form of its own for an architecture (`only`), its forms are those of all others.
    """

    name: str
    quant_config: Mapping[str, Any]
    only: str = ""


def _compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": _LEFT_OUT}
    return {**config, "config_groups": {"group_0": group}}


def _gptq(**fields: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, **fields}
    return {**config, "modules_to_not_convert": _LEFT_OUT}


_CHANNEL = {**_ARGS, "strategy": "channel", "dynamic": False}
_TOKEN = {**_ARGS, "strategy": "token", "dynamic": True}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
_MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
_INT8 = ({**_CHANNEL, "type": "int"}, {**_TOKEN, "type": "int"})
_FLOAT8 = ({**_CHANNEL, "type": "float"}, {**_TOKEN, "type": "float"})
_NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_INT8_WEIGHTS = {"_type": "Int8WeightOnlyConfig", "_data": {}}
_NOT_EXPERTS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
# By method, in the order of columns. Those of modelslim name their layers (`modelslim_types`).
FORMS: Mapping[str, tuple[Form, ...]] = MappingProxyType(
    {
        "awq": (Form("", {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": _LEFT_OUT}),),
        "gptq": (Form("", _gptq()), Form("desc_act", _gptq(desc_act=True))),
        "compressed-tensors": (
            Form("", _compressed("pack-quantized", _INT4)),
            Form("NVFP4", _compressed("nvfp4-pack-quantized", _NVFP4)),
        ),
        "w8a8_int8": (Form("", _compressed("int-quantized", *_INT8)),),
        "fp8": (
            Form("blocks of 128 x 128", {**_FP8, "weight_block_size": [128, 128]}),
            Form("scales per channel", _compressed("float-quantized", *_FLOAT8)),
        ),
        "fbgemm_fp8": (Form("", {"quant_method": "fbgemm_fp8"}),),
        "modelopt": (
            Form("FP8", {"quant_method": "modelopt", "quant_algo": "FP8"}),
            Form("NVFP4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": _LEFT_OUT}),
        ),
        "mxfp4": (
            Form("", {"quant_method": "mxfp4", "modules_to_not_convert": _NOT_EXPERTS}, only="GptOssForCausalLM"),
            Form("", _compressed("mxfp4-pack-quantized", _MXFP4)),
        ),
        "bitsandbytes": (Form("", {**_NF4, "llm_int8_skip_modules": _LEFT_OUT}),),
        "torchao": (Form("", {"quant_method": "torchao", "quant_type": {"default": _INT8_WEIGHTS}}),),
        "modelslim": (Form("", {"model_quant_type": "W8A8_DYNAMIC"}),),
    }
)
METHODS = tuple(FORMS)
assert {*METHODS, "gguf"} == CHECKPOINT_METHODS.keys()  # GGUF files are cells of their own


def forms(method: str, architecture: str) -> tuple[Form, ...]:
    """The forms in which a method stores the models of an architecture."""
    special = tuple(form for form in FORMS[method] if form.only == architecture)
    return special or tuple(form for form in FORMS[method] if not form.only)


def in_form(model: ModelFacts, method: str, form: Form, layers: Iterable[str]) -> ModelFacts:
    """The facts of a model quantized in a form. `layers`: the names of its linear layers."""
    quant_config = dict(form.quant_config)
    if method == "modelslim":
        quant_config |= {f"{name}.weight": "W8A8_DYNAMIC" for name in layers}
    config = {**model.config, "quantization_config": quant_config}
    return replace(model, config=config, quantization=method)
