"""Tensors that hold a projection of all experts of a layer: the tensors of single experts within them. Torch-free.

    experts.gate_up_proj      [E, 2 I, H]        experts.0.gate_proj.weight, experts.0.up_proj.weight, …
    experts.gate_up_proj_bias [E, 2 I]           experts.0.gate_proj.bias, …
    experts.down_proj         [E, H, I]          experts.0.down_proj.weight, …
    experts.down_proj_bias    [E, H]             experts.0.down_proj.bias, …

or, in the checkpoints of some architectures, all rows in a matrix,

    experts.gate_proj, experts.up_proj [E I, H], experts.down_proj [E I, H]

and, beside FP8 weights, what these are multiplied by, and scales of static activations:

    _scale_inv, _scale, _weight_scale            weight_scale_inv or weight_scale of each projection
    _activation_scale, _input_scale              input_scale of each projection

A scale has one value for all experts, for each expert, for each projection of each expert, for each of its outputs
(with the axes of experts and outputs, and one of a single element or none), or for each block.

torchao has the parts of a quantized tensor under names of their own. Scales and zero points of 4-bit weights have the
outputs last.

    experts._gate_up_proj_qdata [E, 2 I, H]      experts.0.gate_proj._weight_qdata, …
    experts._gate_up_proj_scale [E, H / g, 2 I]  experts.0.gate_proj._weight_scale, …

Launches divide tensors by these names (`srv.models.checkpoints.stacked_experts`), and plans divide headers.
(Sources: transformers' `FP8Experts` and `FbgemmFp8Llama4TextExperts`; the export of ModelOpt; torchao's `Int8Tensor`,
`Int4Tensor` and `Float8Tensor`)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from srv.models.checkpoints.rules import ExpertColumns

INPUT_SCALE = "input_scale"
_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {
        **{"": "weight", "_bias": "bias", "_scale_inv": "weight_scale_inv", "_scale": "weight_scale"},
        **{"_weight_scale": "weight_scale", "_activation_scale": INPUT_SCALE, "_input_scale": INPUT_SCALE},
    }
)
_PROJECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "down_proj": ("down_proj",),
        "gate_proj": ("gate_proj",),
        "up_proj": ("up_proj",),
    }
)
_ROUTER = "gate.weight"  # beside the experts
_NAME = re.compile(rf"(.*\.experts)\.({'|'.join(_PROJECTIONS)})({'|'.join(_SUFFIXES)})")
_PARTS = ("qdata", "scale", "zero_point", "act_pre_scale")  # of a quantized tensor of torchao
_NAME_OF_PART = re.compile(rf"(.*\.experts)\._({'|'.join(_PROJECTIONS)})_({'|'.join(_PARTS)})")
_QDATA = "_weight_qdata"
_WEIGHTS = ("weight", _QDATA)


class ExpertTensor(NamedTuple):
    """A tensor of all experts, by its name. `prefix`: of the experts. `suffix`: of the tensors that it consists of."""

    prefix: str
    projection: str
    suffix: str

    @property
    def is_weight(self) -> bool:
        return self.suffix in _WEIGHTS

    @property
    def is_scale(self) -> bool:
        return not self.is_weight and self.suffix != "bias"

    @property
    def is_part(self) -> bool:
        """Whether it is one of the tensors that torchao makes of a weight."""
        return self.suffix.startswith("_")

    @property
    def is_down(self) -> bool:
        return self.projection == "down_proj"

    @property
    def projections(self) -> tuple[str, ...]:
        return _PROJECTIONS[self.projection]

    @property
    def weight(self) -> str:
        """The name of the weight that it belongs to."""
        return f"{self.prefix}._{self.projection}_qdata" if self.is_part else f"{self.prefix}.{self.projection}"

    def parts(self, experts: int) -> tuple[str, ...]:
        """The names of the tensors of single experts, in the order in which they are stored."""
        each = (f"{self.prefix}.{expert}.{name}" for expert in range(experts) for name in self.projections)
        return tuple(f"{name}.{self.suffix}" for name in each)


def expert_tensor(name: str) -> ExpertTensor | None:
    """None for the name of any other tensor."""
    if (found := _NAME.fullmatch(name)) is not None:
        return ExpertTensor(found[1], found[2], _SUFFIXES[found[3]])
    found = _NAME_OF_PART.fullmatch(name)
    return None if found is None else ExpertTensor(found[1], found[2], f"_weight_{found[3]}")


def is_weight_of_all_experts(name: str) -> bool:
    found = expert_tensor(name)
    return found is not None and found.is_weight


def scale_name(weight: str) -> str:
    """The name, or one of those, that the scale of a weight of all experts has."""
    return weight.replace("_qdata", "_scale") if weight.endswith("_qdata") else f"{weight}_scale_inv"


class Division(NamedTuple):
    """How a tensor of all experts is divided.

    `parts`: the names of the tensors that it becomes, those of one expert after those of another. `shape`: of each.
    `kind`: as `scale_kind`, of a scale. `columns`: as `StackedExperts.columns`, of this tensor.
    """

    tensor: ExpertTensor
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str = ""
    columns: ExpertColumns = ""


def divisions(stored: Mapping[str, tuple[int, ...]], columns: ExpertColumns) -> Iterator[tuple[str, Division]]:
    """The tensors among `stored`, by name and shape, that hold all experts, and how each is divided.

    `columns`: as `StackedExperts.columns`; "" where outputs are the rows. Tensors of another number of axes are left
    out: nothing divides them. The weight of the router tells how many experts are in a matrix of rows, and whether the
    rows of stacks are outputs.
    """
    for name, shape in stored.items():
        tensor = expert_tensor(name)
        if tensor is None:
            continue
        count, router = len(tensor.projections), stored.get(f"{tensor.prefix.removesuffix('experts')}{_ROUTER}", (0, 0))
        weight = stored.get(tensor.weight, ())
        own = _columns_of(tensor, weight, router[1]) if columns == "either" else columns
        if own == "rows":
            experts = router[0]
            if experts and len(shape) == 2 and tensor.is_weight and shape[0] % experts == 0:
                part = (shape[0] // experts, shape[1])
                yield name, Division(tensor, tensor.parts(experts), part[::-1] if tensor.is_down else part, "", own)
        elif tensor.is_scale:
            experts = weight[0] if len(weight) == 3 else shape[0] if shape else 0
            outputs = weight[2 if own else 1] if len(weight) == 3 else 0
            kind = scale_kind(tensor, shape, experts, outputs)
            divided = _scale_shape(kind, shape, experts, count, outputs)
            yield name, Division(tensor, tensor.parts(experts), divided, kind, own)
        elif len(shape) == (3 if tensor.is_weight else 2):
            rows, *inputs = shape[:0:-1] if own else shape[1:]
            yield name, Division(tensor, tensor.parts(shape[0]), (rows // count, *inputs), "", own)


def _columns_of(tensor: ExpertTensor, weight: tuple[int, ...], hidden: int) -> ExpertColumns:
    """Of a weight with three axes: "" if outputs are its rows, by the `hidden` size of the model."""
    if len(weight) != 3:
        return ""
    at = 1 if tensor.is_down else 2  # the axis of the hidden size, if outputs are the rows
    return "" if weight[at] == hidden != weight[3 - at] else "halves"


def scale_kind(tensor: ExpertTensor, shape: tuple[int, ...], experts: int, outputs: int) -> str:
    """What a scale of this shape has a value for: "all", "expert", "projection", "output", "group" or "block".

    `outputs`: of all projections in the tensor. A group has inputs of one output, which are the last axis.
    """
    count, axes = len(tensor.projections), [size for size in shape[1:] if size != 1]
    if prod(shape) == 1:
        return "all"
    if tensor.is_part and len(shape) == 3 and shape[0] == experts and shape[2] == outputs > 1:
        return "group"
    if shape[:1] == (experts,) and not axes:
        return "expert"
    if shape == (experts, count) or (shape[:1] == (experts,) and axes == [count] and count > 1 and outputs != count):
        return "projection"
    return "output" if shape[:1] == (experts,) and axes == [outputs] else "block"


def _scale_shape(kind: str, shape: tuple[int, ...], experts: int, count: int, outputs: int) -> tuple[int, ...]:
    """That of the scale of one projection. If the scale cannot be divided, it fits no weight, and is refused."""
    match kind:
        case "all" | "expert" | "projection":
            return ()
        case "output":
            return (outputs // count, 1)
        case "group":
            return (shape[1], outputs // count)
    fits = len(shape) == 3 and shape[0] == experts and shape[1] % count == 0
    if fits:
        return (shape[1] // count, shape[2])
    return shape if len(shape) > 1 else (0, *shape)
