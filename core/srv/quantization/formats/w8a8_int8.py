"""Checkpoints of the method w8a8_int8: how they are recognised, by their configuration or by
their weights. Torch-free.

Must not know what is stored (`srv.quantization.formats.int8_weights`), nor how
compressed-tensors states the scheme.

The up-projection of latent attention, which is no linear layer here, is dequantized at load.

(Format: https://github.com/vllm-project/compressed-tensors, `int-quantized`)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srv.dtypes import FLOATS
from srv.quantization.formats import int8_weights
from srv.quantization.formats.compressed_tensors import COMPRESSED_TENSORS, read_int, unsupported_names
from srv.quantization.formats.int8_weights import INT8, STATIC_ROWS, Int8Form, experts_note
from srv.quantization.formats.online import INT8DQ
from srv.quantization.formats.stored_counts import names_of, one_layout
from srv.quantization.method import QuantMethod, StoredCounts, StoredModel
from srv.quantization.schemes import SCALE, LayerSchemes

if TYPE_CHECKING:
    from srv.specs import ModelFacts

NAME = "w8a8_int8"
# Those of other methods: `compressed-tensors`, `fp8` and `mxfp4`.
OTHER_FORMATS = ("pack-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    """Whether a `quantization_config` describes this method.

    compressed-tensors covers many schemes, of which this method is one; the reason if it is another one.
    """
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping):
        return False
    if quant_config.get("quant_method") == COMPRESSED_TENSORS:
        if quant_config.get("format") in OTHER_FORMATS:
            return False
        form = read_int(quant_config, OTHER_FORMATS)
        return form if isinstance(form, str) else True
    return quant_config.get("quant_method") == NAME and (unsupported_names(quant_config) or True)


def accepts(model: ModelFacts) -> str | None:
    """Why the weights of a checkpoint that names no method are neither int8, nor can be quantized at load."""
    others = sorted(model.stored_types.keys() - FLOATS)
    return None if model.stored_types.get(INT8) or not others else f"some of its weights are stored as {others[0]}"


def _at_load(model: ModelFacts) -> str | None:
    return None if model.stored_types.get(INT8) else INT8DQ.name


def form_of(config: Mapping[str, Any]) -> Int8Form:
    """The scheme of a checkpoint; that of a scale per token of activations if compressed-tensors does not state it."""
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping) or quant_config.get("quant_method") != COMPRESSED_TENSORS:
        return Int8Form()
    form = read_int(quant_config, OTHER_FORMATS)
    return Int8Form() if isinstance(form, str) else form  # the checkpoint is refused


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: a float32 scale per output."""
    return one_layout(
        lambda outputs, inputs: {INT8: outputs * inputs, "float32": outputs}, names_of(config, "ignore"), head=True
    )


def schemes(model: StoredModel) -> LayerSchemes:
    """Raises ModelError as `int8_weights.are_int8`."""
    return int8_weights.schemes(model, form_of(model.facts.config))


def _of_form(model: ModelFacts) -> QuantMethod:
    """With the op of its form."""
    scheme = form_of(model.config)
    note = experts_note(model) if scheme.inputs == "none" else ""
    return METHOD if scheme == Int8Form() else METHOD._replace(ops=(scheme.held.op,), note=note)


METHOD = QuantMethod(
    name=NAME,
    storage="srv.quantization.formats.w8a8_int8_storage:W8A8StorageFormat",
    ops=("linear_w8a8",),
    detect=detect,
    accepts=accepts,
    sharding=None,
    schemes=schemes,
    at_load=_at_load,
    of_form=_of_form,
    stored=stored,
    row_tensors=("weight", SCALE, *STATIC_ROWS),
    up_projections=True,
    dequantizable=True,
)
