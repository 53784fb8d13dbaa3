"""Checkpoints in MXFP4: the experts of gpt-oss, and `mxfp4-pack-quantized` of compressed-tensors. Torch-free.

Owns the configurations, which layers are quantized, and their sizes. Weights are repacked at load into MXFP4 blocks of
GGUF files, which hold the same values in another order (docs/adr/0072-blocks-with-tables.md). Must not know how.

    gpt-oss             experts.gate_up_proj_blocks uint8 [E, 2 I, H / 32, 16], rows of gate and up in turn
                        experts.gate_up_proj_scales uint8 [E, 2 I, H / 32]; experts.down_proj_... likewise
    compressed-tensors  weight_packed uint8 [N, K / 2], weight_scale uint8 [N, K / 32]

(Formats: the OCP Microscaling Formats specification 1.0; the source code of transformers and compressed-tensors)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from srv.errors import ModelError
from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import matched_target, names_layer, stated_names
from srv.quantization.formats.packed_integers import LINEAR
from srv.quantization.formats.stored_counts import ceil, is_named, names_of
from srv.quantization.method import DOWNLOAD_REMEDY, QuantMethod, StoredCounts, StoredMatrix, StoredModel
from srv.quantization.schemes import Blocks, LayerSchemes

NAME = "mxfp4"
BLOCK_TYPE = "MXFP4"
BLOCK = TYPES_BY_NAME[BLOCK_TYPE].elements
FUSED = ("gate_up_proj", "down_proj")  # projections of all experts in one tensor, with `_blocks` and `_scales`
PACKED, SCALE = "weight_packed", "weight_scale"
REMEDY = "Use another checkpoint of the model, or a GGUF file"
# The suffixes of a tensor's blocks and of its scales, and what stands before them in its name.
PAIRS = {**{part: (f"{part}_blocks", f"{part}_scales") for part in FUSED}, "weight": (PACKED, SCALE)}
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of fused experts
_FORMAT = "mxfp4-pack-quantized"  # of compressed-tensors
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.(\w+)$")
_DTYPE = "uint8"


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping):
        return False
    method = str(quant_config.get("quant_method", "")).lower()
    if method != NAME and (method != "compressed-tensors" or quant_config.get("format") != _FORMAT):
        return False
    try:
        _excluded(quant_config)
    except ValueError as error:
        return f"its {error}"
    return method == NAME or _unsupported(quant_config) or True


def _excluded(quant_config: Mapping[str, Any]) -> tuple[str, ...]:
    return stated_names(quant_config, "modules_to_not_convert", "ignore")


def _unsupported(quant_config: Mapping[str, Any]) -> str | None:
    """Why srv does not support a configuration of compressed-tensors; None if it does."""
    groups = quant_config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "it has no config_groups"
    if quant_config.get("transform_config"):
        return "it has a transform_config"
    if (refused := unsupported_kv_scheme(quant_config)) is not None:
        return refused
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            return f"its {name} has no weights"
        if group.get("format") not in (None, _FORMAT):
            return f"its {name} has the format {group['format']}, not {_FORMAT}"
        if group.get("input_activations") or group.get("output_activations"):
            return f"its {name} quantizes activations as well"
        bits, kind, size = (weights.get(name) for name in ("num_bits", "type", "group_size"))
        if (bits, kind, size) != (4, "float", BLOCK):
            return f"its {name} has weights of {bits} bits of type {kind} in groups of {size}, not 4, float and {BLOCK}"
    return None


def is_quantized(model: StoredModel, name: str) -> bool:
    """Whether a projection is in MXFP4: its tensors say so; without weights, the configuration does."""
    expert = _EXPERT.match(name)
    if model.types:
        fused = () if expert is None else tuple(f"{expert[1]}.{matrix}_blocks" for matrix in FUSED)
        blocks = fused[:1] if not name.endswith("down_proj") else fused[1:]
        return f"{name}.{PACKED}" in model.types or any(tensor in model.types for tensor in blocks)
    quant_config = model.facts.config.get("quantization_config") or {}
    if str(quant_config.get("quant_method", "")).lower() == NAME:
        is_target = expert is not None
    else:
        is_target = matched_target(_targets(quant_config), (name,), LINEAR) is not None
    return is_target and not any(names_layer(pattern, name) for pattern in _excluded(quant_config))


def _targets(quant_config: Mapping[str, Any]) -> tuple[str, ...]:
    groups = quant_config.get("config_groups") or {}
    return tuple(itertools.chain(*(stated_names(group, "targets") for group in groups.values())))


def are_quantized(model: StoredModel, names: Sequence[str], inputs: int) -> bool:
    """Whether layers that share one input are in MXFP4, all of them.

    Raises ModelError: unsupported_quantization if only some are, or for inputs that are not whole blocks;
    missing_tensors, dtype_mismatch and shape_mismatch for damaged ones.
    """
    for owner, part in sorted({pair for name in names for pair in _stored_as(name)} if model.types else ()):
        stored = {
            tensor: model.shapes[f"{owner}.{tensor}"] for tensor in PAIRS[part] if f"{owner}.{tensor}" in model.types
        }
        if stored and f"{owner}.weight" not in model.types:
            check_tensors(model, owner, part, stored)
    is_mxfp4 = {name: is_quantized(model, name) for name in names}
    if not any(is_mxfp4.values()):
        return False
    if not all(is_mxfp4.values()):
        quantized, plain = (next(name for name, value in is_mxfp4.items() if value is kind) for kind in (True, False))
        reason = f"of layers that share one input, {quantized} is quantized and {plain} is not"
    elif inputs % BLOCK:
        reason = f"the {inputs} inputs of {names[0]} are not whole blocks of {BLOCK}"
    else:
        return True
    raise ModelError("unsupported_quantization", model.facts.path, reason, REMEDY)


def _stored_as(name: str) -> Iterator[tuple[str, str]]:
    """The names under which a projection's tensors may be stored, each with its key of `PAIRS`."""
    yield name, "weight"
    if (expert := _EXPERT.match(name)) is not None:
        yield expert[1], FUSED[name.endswith("down_proj")]


def check_tensors(model: StoredModel, owner: str, part: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """[experts], outputs and inputs of a part of `PAIRS`, by the shapes of its tensors, which their suffixes name.

    Raises ModelError if a tensor is missing, or if shapes or dtypes do not fit.
    """

    def fail(code: str, reason: str) -> NoReturn:
        raise ModelError(code, model.facts.path, reason, DOWNLOAD_REMEDY)

    for suffix in PAIRS[part]:
        if suffix not in shapes:
            fail("missing_tensors", f"it lacks {owner}.{suffix}")
        if (dtype := model.types.get(f"{owner}.{suffix}", _DTYPE)) != _DTYPE:
            fail("dtype_mismatch", f"{owner}.{suffix} is stored as {dtype}, not as {_DTYPE}")
    blocks, scales = (shapes[suffix] for suffix in PAIRS[part])
    fused = part in FUSED
    if fused:
        expected, fits = blocks[:-1], len(blocks) == 4 and blocks[-1] == BLOCK // 2
        shape = (*blocks[:-2], blocks[-2] * BLOCK) if fits else ()
        fits = fits and blocks[1] % len(PROJECTIONS[part]) == 0
    else:
        fits = len(blocks) == 2 and blocks[1] % (BLOCK // 2) == 0
        shape = (blocks[0], blocks[1] * 2) if fits else ()
        expected = (blocks[0], blocks[1] * 2 // BLOCK) if fits else ()
    if not fits:
        form = f"[experts, outputs, blocks, {BLOCK // 2}]" if fused else f"[outputs, blocks of {BLOCK // 2}]"
        fail("shape_mismatch", f"{owner}.{PAIRS[part][0]} has the shape {list(blocks)}, not {form}")
    if scales != expected:
        reason = f"{owner}.{PAIRS[part][1]} has the shape {list(scales)}, but {list(expected)} fits its blocks"
        fail("shape_mismatch", f"{reason} of {BLOCK} weights")
    return shape


def schemes(model: StoredModel) -> LayerSchemes:
    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Blocks | None:
        return None if embedding or not are_quantized(model, names, inputs) else Blocks((BLOCK_TYPE,))

    return scheme


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: the experts of gpt-oss."""
    excluded = names_of(config, "modules_to_not_convert")

    def counts(matrix: StoredMatrix) -> Mapping[str, int] | None:
        if not matrix.copies or is_named(matrix.name, excluded):
            return None
        return {_DTYPE: matrix.outputs * ceil(matrix.inputs, BLOCK) * (BLOCK // 2 + 1)}

    return counts


METHOD = QuantMethod(
    name=NAME,
    storage="srv.quantization.formats.mxfp4_storage:MXFP4StorageFormat",
    ops=("linear_gguf",),
    detect=detect,
    sharding=None,
    schemes=schemes,
    stored=stored,
    block_types=(BLOCK_TYPE,),
    packed=True,
    fused_experts=True,
    dequantizable=True,
    dtype="bfloat16",
)
