"""The quantization methods, by their names. Torch-free; layers are imported when a model is built.

    srv.quantization           <method> = package.module:METHOD                       (a third party's method)

The file of a method is imported when it is needed. `srv.quantization.third_party` checks those of other distributions
(docs/adr/0022-quantization-methods.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from srv.platform.installed import entries
from srv.quantization.method import GROUP, QuantMethod, not_detected

if TYPE_CHECKING:
    from srv.specs import ModelFacts

# "module:attribute" in this package, by name. Detection asks them in this order: compressed-tensors with several
# schemes before those of one scheme.
CHECKPOINT_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "gguf": "formats.gguf:METHOD",
        "modelslim": "formats.modelslim:METHOD",
        "compressed-tensors": "formats.compressed_tensors:METHOD",
        "w8a8_int8": "formats.w8a8_int8:METHOD",
        "awq": "formats.awq:METHOD",
        "gptq": "formats.gptq:METHOD",
        "fp8": "formats.fp8:METHOD",
        "fbgemm_fp8": "formats.fp8:FBGEMM_METHOD",
        "modelopt": "formats.modelopt:METHOD",
        "mxfp4": "formats.mxfp4:METHOD",
        "bitsandbytes": "formats.bitsandbytes:METHOD",
        "torchao": "formats.torchao:METHOD",
    }
)
ONLINE_METHODS: Mapping[str, str] = MappingProxyType(
    {"int8dq": "formats.online:INT8DQ", "int8wo": "formats.online:INT8WO", "fp8wo": "formats.online:FP8WO"}
)
BUILT_IN: Mapping[str, str] = MappingProxyType({**CHECKPOINT_METHODS, **ONLINE_METHODS})
# Names that other servers have for kernels, and the methods whose weights these read.
SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        **{"awq_marlin": "awq", "gptq_marlin": "gptq", "w8a8_fp8": "fp8"},
        **{"modelopt_fp8": "modelopt", "modelopt_fp4": "modelopt"},
    }
)
_OF_SEVERAL: Mapping[str, tuple[str, ...]] = MappingProxyType({"marlin": ("awq", "gptq"), "moe_wna16": ("awq", "gptq")})


UNKNOWN = "unknown"  # the method of a checkpoint whose configuration states none


def further_names() -> tuple[str, ...]:
    """The names of the methods of other distributions; none is loaded."""
    return tuple(dict.fromkeys(entry.name for entry in entries(GROUP)))


def undocumented_names() -> tuple[str, ...]:
    """Further values of `--quantization`: those that mean one of several methods, and the methods of others."""
    return (*_OF_SEVERAL, *further_names())


def detectable_names() -> tuple[str, ...]:
    """The names of the methods that may be recognised in a Hugging Face checkpoint, without loading any others."""
    return (*(method.name for method in _built_in_checkpoints() if method.detect is not not_detected), *further_names())


def find(name: str | None) -> QuantMethod | None:
    """The method of a name; None if there is none. The type of a GGUF file may follow its name: "gguf:Q4_1".

    Raises PluginError if a third party's method of that name is faulty, or if two distributions claim the name.
    """
    name = (name or "").partition(":")[0]
    if name in further_names():
        from srv.quantization import third_party  # most installations do not need it

        return third_party.find(name, taken=name in BUILT_IN)
    return _built_in(name) if name in BUILT_IN else None


def method_of(model: ModelFacts) -> QuantMethod | None:
    """The method of a checkpoint: its file format may be one. None if it is not quantized, or by an unknown method."""
    return of_form(find(model.format if model.format in CHECKPOINT_METHODS else model.quantization), model)


def meant(name: str | None, model: ModelFacts) -> str | None:
    """The name of the method that a value of `--quantization` means for a checkpoint.

    It is the method of the checkpoint if the value is its name, that of one of its kernels, or what its own
    configuration calls it, such as compressed-tensors. It is the value itself if that agrees with none of these.
    """
    method = method_of(model)
    if name is None or method is None:
        return name
    config = model.config.get("quantization_config")
    quant_method = str(config.get("quant_method", "")).lower() if isinstance(config, Mapping) else ""
    return method.name if name in (method.name, quant_method) or method.name in _OF_SEVERAL.get(name, ()) else name


def of_form(method: QuantMethod | None, model: ModelFacts) -> QuantMethod | None:
    """The facts of a method for the form in which a checkpoint is stored."""
    return method if method is None or method.of_form is None else method.of_form(model)


def dequantizes(model: ModelFacts, asked: bool, load_format: str) -> bool:
    """Whether quantized weights become floats: the user asks for it, or there are random ones for a GGUF file's."""
    return asked or (load_format == "dummy" and model.format == "gguf")


def chosen(model: ModelFacts, quantization: str | None, online: str | None, *, dequantize: bool) -> QuantMethod | None:
    """The method by which native layers hold the weights; None for unquantized layers.

    `quantization`, `online`: the values of `--quantization` and `--torchao-config`. `dequantize`: weights are
    dequantized where the loader can.
    """
    method = find(online or meant(quantization, model) or model.quantization)
    if method is not None and method.at_load is not None and model.quantization is None:
        method = _at_load(method, model)
    return None if method is not None and method.dequantizable and dequantize else of_form(method, model)


def _at_load(method: QuantMethod, model: ModelFacts) -> QuantMethod | None:
    """The method that a name means for a checkpoint whose configuration names none."""
    assert method.at_load is not None
    name = method.at_load(model)
    online = method if name is None else find(name)
    if online is None:
        from srv.quantization.third_party import METHODS

        reason = f"returned {name!r}, which is the name of no method"
        raise METHODS.error_in(METHODS.provider(method.name), f"{method.name}.at_load", reason)
    return online


def detect(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The name of the method of a Hugging Face checkpoint, or the one that its configuration states if none fits.

    None if it is not quantized. A method whose own file describes a form that its layers do not support fits, too: the
    checkpoint is refused. Methods of other distributions are asked only if the configuration states a method.
    """
    unsupported: str | None = None
    for method in _built_in_checkpoints():
        answer = method.detect(folder, config)
        if answer is True:
            return method.name
        unsupported = method.name if isinstance(answer, str) and unsupported is None else unsupported
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping):
        return unsupported
    name = str(quant_config.get("quant_method", UNKNOWN))
    if not further_names():
        return name
    from srv.quantization import third_party

    return third_party.detect(name, folder, config) or name


def unsupported_form(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The clause of a method that knows the format of a checkpoint, but not the form in which it is stored."""
    answers = [method.detect(folder, config) for method in _built_in_checkpoints()]
    if further_names():
        from srv.quantization import third_party

        answers += [third_party.answer(name, folder, config) for name in further_names()]
    return next((answer for answer in answers if isinstance(answer, str)), None)


def _built_in_checkpoints() -> Iterator[QuantMethod]:
    return map(_built_in, CHECKPOINT_METHODS)


def _built_in(name: str) -> QuantMethod:
    module, _, attribute = BUILT_IN[name].partition(":")
    method: QuantMethod = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    return method
