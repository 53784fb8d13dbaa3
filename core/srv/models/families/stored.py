"""How many bytes a checkpoint stores, by dtype: those of its weights as a quantization method of the field stores them.

Facts, from the formats of transformers' fine-grained FP8 and MXFP4, AutoAWQ, GPTQModel and compressed-tensors. A
method, or a form of it, that is not listed is UnknownSizes. This module must not know any family, nor what `srv` loads:
`srv.quantization` does.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from srv.dtypes import ITEM_SIZES
from srv.errors import ModelError
from srv.models.blueprint import Decoder, Experts, Linear, Output, Part, Tensors, Weight, below, walk
from srv.models.checkpoints.rules import WeightMapping
from srv.models.unsupported import UnknownSizes
from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import check_pattern, matched_target, names_layer

# Elements of one weight ``[outputs, inputs]`` and of what is stored with it, by dtype.
Layout: TypeAlias = Callable[[int, int], Mapping[str, int]]

STORED_SIZES: Mapping[str, int] = {**ITEM_SIZES, "float8_e4m3fn": 1, "uint8": 1, "int8": 1, "int32": 4, "int64": 8}
NAMED_EXPERT = re.compile(r"experts\.\d")
_WEIGHT = ".weight"


class Module(NamedTuple):
    """A matrix that methods quantize. `copies`: how many experts of a layer have one; 0 for a linear layer."""

    name: str
    outputs: int
    inputs: int
    copies: int = 0
    is_head: bool = False

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs * max(1, self.copies)


def stored_types(
    tree: Part, dtype: str, quantization: Mapping[str, Any] | None = None, mapping: WeightMapping | None = None
) -> dict[str, int]:
    """The number of stored elements of each dtype. `dtype`: that of weights which are not quantized.

    `quantization`: the field `quantization_config`. `mapping`: how checkpoints name and fuse matrices of the tree, if
    they do otherwise. Raises UnknownSizes if the method is not known.
    """
    layout_of = _layouts(quantization, dtype) if quantization else _no_layout
    counts: Counter[str] = Counter()
    decoder = next((name for name, part in walk(tree) if isinstance(part, Decoder)), "")
    for name, part in walk(tree):
        plain, of_layers = part.elements, not decoder or name.startswith(f"{decoder}.")  # a tower has names of its own
        for module in _modules(name, part, mapping if mapping is not None and of_layers else WeightMapping()):
            if (layout := layout_of(module)) is not None:
                plain -= module.elements
                for item, elements in layout(module.outputs, module.inputs).items():
                    counts[item] += elements * max(1, module.copies)
        counts[dtype] += plain
    return {name: count for name, count in counts.items() if count}


def _modules(name: str, part: Part, mapping: WeightMapping) -> Iterator[Module]:
    """The matrices of a part itself. Routers stay as they are."""
    if isinstance(part, Linear) and not part.role:
        is_head = isinstance(part, Output)
        if isinstance(part, Output) and part.tied:
            return
        names = tuple(below(name, each) for each in part.outputs)
        whole, sizes = mapping.fused(names), part.outputs.values()
        for each, size in zip(whole, sizes if whole == names else [sum(sizes)], strict=True):
            yield Module(mapping.checkpoint_name(each), size, part.inputs, is_head=is_head)
    else:
        copies = part.count if isinstance(part, Experts) else 0
        for weight in _matrices(part):
            outputs, inputs = weight.shape
            module = mapping.checkpoint_name(below(name, weight.name.removesuffix(_WEIGHT)))
            yield Module(module, outputs, inputs, copies)


def _matrices(part: Part) -> Iterator[Weight]:
    """Those of the first expert, or of what layers do not multiply by as it is."""
    if isinstance(part, Experts):
        first = itertools.takewhile(lambda weight: weight.name.startswith("0."), part.weights())
        yield from (weight for weight in first if weight.name.endswith(_WEIGHT))
    elif isinstance(part, Tensors) and part.projects:
        yield from part.weights()


def stored_bytes(types: Mapping[str, int]) -> int:
    """The bytes of these elements."""
    return sum(count * STORED_SIZES[name] for name, count in types.items())


def _no_layout(module: Module) -> Layout | None:
    return None


def _layouts(config: Mapping[str, Any], dtype: str) -> Callable[[Module], Layout | None]:
    """How each weight is stored; None for those that stay as they are."""
    method = config.get("quant_method")
    match method:
        case "fp8":
            return _converted(_fp8(config), _names(config, "modules_to_not_convert", "ignored_layers"))
        case "awq":
            return _converted(_awq(config), _names(config, "modules_to_not_convert"))
        case "gptq":
            return _converted(_gptq(config), _gptq_exclusions(config), lm_head=bool(config.get("lm_head")))
        case "mxfp4":
            excluded = _names(config, "modules_to_not_convert")
            return lambda module: _mxfp4 if module.copies and not _matches(module.name, excluded) else None
        case "compressed-tensors":
            return _compressed(config, dtype)
    raise UnknownSizes(f"the sizes of weights that are quantized with {method} are not known: no size is claimed")


def _converted(layout: Layout, excluded: Sequence[str], *, lm_head: bool = False) -> Callable[[Module], Layout | None]:
    """One layout for all weights but the excluded ones and, usually, the output layer."""

    def layout_of(module: Module) -> Layout | None:
        return None if (module.is_head and not lm_head) or _matches(module.name, excluded) else layout

    return layout_of


def _names(config: Mapping[str, Any], *fields: str) -> list[str]:
    names = [name for field in fields for name in config.get(field) or ()]
    if any(NAMED_EXPERT.search(name) for name in names):
        raise UnknownSizes("its quantization treats experts of one layer differently: no size is claimed")
    return names


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module or one around it is named by a pattern, as methods match them."""
    return any(_named(name, pattern) for pattern in patterns)


def _named(name: str, pattern: str) -> bool:
    try:
        check_pattern("its quantization_config", pattern)
        return names_layer(pattern, name)
    except (ValueError, ModelError) as error:
        reason = error.reason if isinstance(error, ModelError) else str(error)
        raise UnknownSizes(f"{reason}: no size is claimed") from error


def _target(targets: Mapping[str, Layout], name: str) -> str | None:
    """The target of compressed-tensors that fits a module best."""
    try:
        for target in targets:
            check_pattern("its quantization_config", target)
        return matched_target(targets, (name,), "Linear")
    except (ValueError, ModelError) as error:
        reason = error.reason if isinstance(error, ModelError) else str(error)
        raise UnknownSizes(f"{reason}: no size is claimed") from error


def _ceil(total: int, size: int) -> int:
    return -(-total // size)


def _fp8(config: Mapping[str, Any]) -> Layout:
    """FP8 weights with a float32 scale per block or, without blocks, per weight; static activations have one, too."""
    rows, columns = config.get("weight_block_size") or (0, 0)
    inputs_scale = 1 if config.get("activation_scheme") == "static" else 0

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        scales = _ceil(outputs, rows) * _ceil(inputs, columns) if rows else 1
        return {"float8_e4m3fn": outputs * inputs, "float32": scales + inputs_scale}

    return layout


def _bits(config: Mapping[str, Any], *fields: str) -> int:
    bits = next((config[field] for field in fields if field in config), None)
    if bits not in (2, 4, 8):
        raise UnknownSizes(f"weights of {bits} bits are not known: no size is claimed")
    return int(bits)


def _group(config: Mapping[str, Any], *fields: str) -> int:
    """Inputs per scale; 0 for all of them."""
    size = next((config[field] for field in fields if config.get(field) is not None), 0)
    return max(0, int(size))


def _awq(config: Mapping[str, Any]) -> Layout:
    """Integers that are packed along the outputs, with scales and zeros per group of inputs (AutoAWQ's "gemm")."""
    if config.get("version", "gemm").lower() != "gemm":
        raise UnknownSizes(f"AWQ weights of version {config['version']} are not known: no size is claimed")
    per_word, size = 32 // _bits(config, "bits", "w_bit"), _group(config, "group_size", "q_group_size")
    zeros = 1 if config.get("zero_point", True) else 0

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        groups = _ceil(inputs, size) if size else 1
        packed = (inputs + groups * zeros) * (outputs // per_word)
        return {"int32": packed, "float16": groups * outputs}

    return layout


def _gptq(config: Mapping[str, Any]) -> Layout:
    """Integers that are packed along the inputs, with scales, zeros and the group of each input (GPTQModel)."""
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        raise UnknownSizes(f"GPTQ weights of format {config['checkpoint_format']} are not known: no size is claimed")
    per_word, size = 32 // _bits(config, "bits"), _group(config, "group_size")

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        groups = _ceil(inputs, size) if size else 1
        packed = inputs // per_word * outputs + groups * (outputs // per_word)
        return {"int32": packed + inputs, "float16": groups * outputs}

    return layout


def _gptq_exclusions(config: Mapping[str, Any]) -> list[str]:
    """The modules that `dynamic` leaves out ("-:"); other values per module are not known."""
    rules = config.get("dynamic") or {}
    if any(not rule.startswith("-:") for rule in rules) or config.get("modules_in_block_to_quantize"):
        raise UnknownSizes("its modules are quantized differently from one another: no size is claimed")
    return [f"re:{rule.removeprefix('-:')}" for rule in rules] + _names(config, "modules_to_not_convert")


def _mxfp4(outputs: int, inputs: int) -> dict[str, int]:
    """Two values per byte, and a scale of one byte per 32 inputs."""
    return {"uint8": outputs * (_ceil(inputs, 32) * 16 + _ceil(inputs, 32))}


def _compressed(config: Mapping[str, Any], dtype: str) -> Callable[[Module], Layout | None]:
    """Groups of layers with a scheme each; layers of no group, and ignored ones, stay as they are.

    A layer belongs to the group that names it, else to that of a pattern, else to that of all linear layers.
    """
    if unsupported_kv_scheme(config) or (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnknownSizes("its quantized cache or sparsity is not known: no size is claimed")
    ignored, groups = _names(config, "ignore"), list((config.get("config_groups") or {}).values())
    schemes: dict[str, Layout] = {}
    for group in groups:
        scheme = _scheme(group, group.get("format") or config.get("format"), dtype)
        schemes |= dict.fromkeys(_names(group, "targets"), scheme)

    def layout_of(module: Module) -> Layout | None:
        if _matches(module.name, ignored):
            return None
        target = _target(schemes, module.name)
        return None if target is None else schemes[target]

    return layout_of


def _scheme(group: Mapping[str, Any], form: str | None, dtype: str) -> Layout:
    """One scheme of compressed-tensors. Its scales have the dtype of the model."""
    weights, inputs_scheme = group["weights"], group.get("input_activations")
    static = 1 if inputs_scheme and inputs_scheme.get("dynamic") is False else 0
    strategy, size, bits = weights.get("strategy"), weights.get("group_size") or 0, weights["num_bits"]
    symmetric, block = weights.get("symmetric", True), weights.get("block_structure")
    ordered = weights.get("actorder") not in (None, False, "static", "weight")
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        raise UnknownSizes(f"quantization of strategy {strategy} is not known: no size is claimed")

    def scales(outputs: int, inputs: int) -> tuple[int, int]:
        match strategy:
            case "tensor":
                return 1, 1
            case "channel":
                return outputs, 1
            case "block":
                return _ceil(outputs, block[0]), _ceil(inputs, block[1])
        return outputs, _ceil(inputs, size)

    def plain(outputs: int, inputs: int) -> dict[str, int]:
        """One byte per value, with zeros of the same width."""
        rows, columns = scales(outputs, inputs)
        item = "int8" if weights["type"] == "int" else "float8_e4m3fn"
        zeros = 0 if symmetric else rows * columns
        return {item: outputs * inputs + zeros, dtype: rows * columns + static}

    def packed(outputs: int, inputs: int) -> dict[str, int]:
        """Words of 32 bits with several values of a row; zeros are packed along the rows. The shape is stored."""
        rows, columns = scales(outputs, inputs)
        per_word = 32 // bits
        zeros = 0 if symmetric else _ceil(rows, per_word) * columns
        words = outputs * _ceil(inputs, per_word) + zeros + (inputs if ordered else 0)
        return {"int32": words, dtype: rows * columns + static, "int64": 2}

    def nvfp4(outputs: int, inputs: int) -> dict[str, int]:
        """Two values per byte, an FP8 scale per group, and a scale of the whole weight and of its inputs."""
        whole = 2 if inputs_scheme else 1
        return {"uint8": outputs * inputs // 2, "float8_e4m3fn": outputs * _ceil(inputs, size), "float32": whole}

    match form:
        case "int-quantized" | "float-quantized" | "naive-quantized" if bits == 8:
            return plain
        case "pack-quantized" if bits in (4, 8):
            return packed
        case "nvfp4-pack-quantized":
            return nvfp4
    raise UnknownSizes(f"weights of {bits} bits in the format {form} are not known: no size is claimed")
