"""What core must know of a quantization method, as data. Torch-free.

A method is its facts (a `QuantMethod`), which `srv plan` reads without torch, and the conversion of its tensors, which
is imported when a model is built. Must not know any method by name: `srv.quantization.registry` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from srv.quantization.schemes import LayerSchemes

if TYPE_CHECKING:
    from srv.specs import ModelFacts  # what lists arguments reads the registry, and needs no facts

GROUP = "srv.quantization"  # the entry points of other distributions
UP_PROJECTION = ".kv_b_proj"  # of latent attention: it is no linear layer here
DOWNLOAD_REMEDY = "Download the checkpoint again, or use another one of the model"  # for damaged ones


class StoredModel(NamedTuple):
    """What the layers and the storage format of a method are made for.

    `types`: the dtype of each stored tensor, or its quantization type in a GGUF file, by its Hugging Face name; {} if
    there are no weights. `shapes`: of the tensors of safetensors files, by the same names. `stored_names`: the names
    that safetensors files have for tensors whose Hugging Face name is another. `dequantize`: the storage format makes
    floats of all quantized weights, for layers that are not quantized.
    """

    facts: ModelFacts
    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    stored_names: Mapping[str, str] = MappingProxyType({})
    dequantize: bool = False

    def dequantizes(self, layer: str) -> bool:
        """Whether the quantized weight of a layer becomes floats: the result of its format's formula in float32."""
        return self.dequantize or layer.endswith(UP_PROJECTION)


class StoredMatrix(NamedTuple):
    """A matrix of a model whose checkpoint has no weights here, by its name in the checkpoint.

    `copies`: how many experts of a layer have one; 0 for a linear layer. `is_head`: it is that of the output layer.
    """

    name: str
    outputs: int
    inputs: int
    copies: int = 0
    is_head: bool = False

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs * max(1, self.copies)


# A matrix -> the elements of one copy and of what is stored with it, by dtype; None if it is not quantized.
StoredCounts: TypeAlias = Callable[[StoredMatrix], Mapping[str, int] | None]


class UnknownStorage(Exception):
    """It is not known what a checkpoint stores. The message is a clause with the reason."""


def not_detected(folder: Path, config: Mapping[str, Any]) -> bool | str:
    """For methods that do not follow from the configuration of a checkpoint."""
    return False


def shape_of_bytes(model: StoredModel, layer: str, suffix: str = "weight") -> tuple[int, int] | None:
    """The shape of a weight that is stored as a matrix of 8-bit elements; None if it is not."""
    name = f"{layer}.{suffix}"
    shape, dtype = model.shapes.get(name, ()), model.types.get(name, "")
    if len(shape) != 2 or not (dtype == "int8" or dtype.startswith("float8")):
        return None
    return shape[0], shape[1]


class QuantMethod(NamedTuple):
    """The facts of one quantization method.

    What it is:

    - `name`: the value of `--quantization`, or of `--torchao-config` if `online`.
    - `layers`: "module:Class" of a `srv.models.layers.factory.LayerFactory` that is made with a BuildContext and a
      StoredModel; None for those of `srv.quantization.layers`, which are made of `schemes`.
    - `storage`: "module:Class" of a `srv.models.checkpoints.storage.StorageFormat` that is made with a StoredModel;
      None if tensors are stored as the layers hold them.
    - `ops`: the op contracts that the layers need.
    - `detect(folder, config)`: whether a Hugging Face checkpoint is of this method, from its folder and its config.json
      (with the fields of a nested text model); a clause if it is stored in the format of this method, but in a form
      that the layers do not support. It may raise ModelError.
    - `accepts(model)`: for a checkpoint whose configuration names no method, if the user sets this one: the clause that
      says why its weights are not of this method, or None. A method without `accepts` must be detected.
    - `online`: it quantizes the weights of an unquantized checkpoint while they are loaded.
    - `at_load(model)`: the online method that the name of this one means for a checkpoint whose configuration names
      none; None if its weights are of this method already. `at_load` itself is None if the name means no other one.
    - `of_form(model)`: these facts for the form in which a checkpoint is stored, if some of them depend on it.

    How its weights are held:

    - `schemes(model)`: the function (names, inputs, embedding) -> the scheme of the matrix that fuses the layers of
      these names, None for unquantized weights. `names` may be those of projections of all experts of a layer;
      `embedding`: rows of the matrix are looked up. Layers, the bytes of weights, and the ops of plans follow from it.
      Both functions may raise ModelError for damaged checkpoints. `schemes` itself is None if that is not known before
      the layers are built.
    - `stored(quantization_config, dtype)`: for a checkpoint without weights, also one that the layers do not support:
      the function that counts what it stores for each matrix; `dtype` is that of its other weights. It may raise
      UnknownStorage, and so may the function. `stored` itself is None if no size is claimed without weights.
    - `block_types`: the types of the blocks as which it always holds quantized weights, if they are `Blocks`.
    - `packed`: the checkpoint has fewer stored elements than there are weights.
    - `matrix_shape(model, layer)`: the outputs and inputs of a quantized linear layer of the checkpoint, by the shapes
      of its tensors; None if they do not show them. `matrix_shape` itself is None for methods that store the weight of
      a layer as a matrix of 8-bit elements, `weight`.

    How its layers compute, and what they do not:

    - `dtype`: in which models of this method compute if the user sets none; "": that of the checkpoint.
    - `fp8_inputs`: the checkpoint states that inputs of all FP8 weights are quantized to FP8 as well, so that a
      platform may do so.
    - `note`: what an operator should know of how the layers compute, as a clause; "" for nothing.
    - `dequantizable`: the loader can dequantize the weights instead, so that the method is used only if that is not
      asked for: its storage format obeys `StoredModel.dequantize`.
    - `sharding`: the clause that says why its layers cannot be sharded over ranks; None if their schemes say how
      (`Scheme.units`).
    - `experts(bias)`: why the method cannot hold experts, with biases or without, as a clause and a remedy; or None.
    - `fused_experts`: experts that a checkpoint has in two quantized tensors can be divided, by the storage format or
      before it gets them (`srv.models.checkpoints.stacked_experts`).
    - `row_tensors`: the suffixes of the tensors of layers that have an entry for each output, or for each block of
      them: these get the order that layers have where a checkpoint stores rows in another one
      (`srv.models.checkpoints.rule_storage`). (): such rows are refused.
    - `turns_inputs`: its tensors have an order of their own even where the architecture stores unquantized weights as
      [in, out] (GPT-2), so that such layers can be quantized.
    - `row_block(model)`: how many rows share a scale, so that they may change places only within it; None: one.
    - `up_projections`: the storage format dequantizes the up-projection of latent attention, which no linear layer
      holds.
    """

    name: str
    layers: str | None = None
    storage: str | None = None
    ops: tuple[str, ...] = ()
    detect: Callable[[Path, Mapping[str, Any]], bool | str] = not_detected
    accepts: Callable[[ModelFacts], str | None] | None = None
    sharding: str | None = "weights quantized by this method cannot be sharded yet"
    online: bool = False
    dequantizable: bool = False
    schemes: Callable[[StoredModel], LayerSchemes] | None = None
    experts: Callable[[bool], tuple[str, str] | None] | None = None
    stored: Callable[[Mapping[str, Any], str], StoredCounts] | None = None
    block_types: tuple[str, ...] = ()
    packed: bool = False
    at_load: Callable[[ModelFacts], str | None] | None = None
    note: str = ""
    fused_experts: bool = False
    matrix_shape: Callable[[StoredModel, str], tuple[int, int] | None] | None = None
    row_tensors: tuple[str, ...] = ()
    row_block: Callable[[ModelFacts], int] | None = None
    turns_inputs: bool = False
    up_projections: bool = False
    dtype: str = ""
    fp8_inputs: bool = False
    of_form: Callable[[ModelFacts], QuantMethod] | None = None

    def makes_floats(self, layer: str) -> bool:
        """Whether the storage format dequantizes the weight of a layer, whatever is asked for."""
        return self.up_projections and layer.endswith(UP_PROJECTION)
