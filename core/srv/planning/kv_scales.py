"""The scales of a KV pool of 8-bit floats: of a JSON file, of the checkpoint, calculated, or none. Torch-free.

Owns which scales apply, and the format of the file, that of vLLM and SGLang:

    {"model_type": "llama",
     "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02, "1": 0.03}}}}
                                                                 rank  layer

A factor scales both the keys and the values of its layer. Calculated scales follow from the magnitudes that a rank
measures when it starts (`srv.worker.calculated_scales`). Must not know pools nor devices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from srv.args.config import Config
from srv.dist.mesh import mesh_of
from srv.dtypes import FLOAT8, KVScales
from srv.errors import ModelError
from srv.models.checkpoints.kv_scale_tensors import StoredScale, read_scales
from srv.models.checkpoints.safetensors_header import KVScaleTensor, read_checkpoint
from srv.models.facts.layer_names import layer_names
from srv.planning.pools import kv_dtype
from srv.quantization.formats.kv_scheme import kv_field, unsupported_kv_scheme
from srv.specs import ModelFacts, attention_specs

CODE = "kv_scales"
LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57_344}
_CORRECT_FILE = "Correct the file, or leave --quantization-param-path out"
_OTHER_SCALES = "Set --quantization-param-path to a file with scales, or leave --kv-cache-dtype out"
HEADROOM = 2.0  # calculated scales leave room for larger magnitudes; a float has the same precision at half its range
_SMALLEST = 2.0**-126  # of float32, without loss of precision


class ScaleSource(NamedTuple):
    """The scales of each attention layer of the model, on one rank; {} if all are 1."""

    by_layer: Mapping[int, KVScales]

    def of(self, layers: tuple[int, ...]) -> tuple[KVScales, ...]:
        """Those of the layers of a cache group; () if all are 1."""
        return tuple(self.by_layer[layer] for layer in layers) if self.by_layer else ()


NO_SCALES = ScaleSource({})


def has_scales(config: Config, model: ModelFacts) -> bool:
    """Whether the model has a KV pool whose keys and values are scaled: one of 8-bit floats."""
    return kv_dtype(config) in FLOAT8.values() and model.has_pool and bool(attention_specs(model.cache_groups))


def configured_scales(config: Config, model: ModelFacts, rank: int = 0) -> ScaleSource:
    """The scales of a resolved configuration; those of the checkpoint unless there is a file, or weights are random.

    None if they are calculated, which is done when the weights have been loaded.
    Raises ModelError, of the file if there is one: kv_scales, not_found or damaged; and dtype_mismatch or
    shape_mismatch for tensors of the checkpoint that are no scales.
    """
    dtype, file = kv_dtype(config), config.weights.quantization_param_path
    if not has_scales(config, model) or config.weights.calculate_kv_scales:
        return NO_SCALES
    if file is not None:
        factors = _read_file(file.expanduser(), model, dtype, mesh_of(config.get).width("heads"))[rank]
        return ScaleSource({layer: KVScales(factor, factor) for layer, factor in factors.items()})
    stored = model.format == "safetensors" and config.model.load_format != "dummy"
    return _of_checkpoint(model) if stored else NO_SCALES


def unused_scheme(config: Config, model: ModelFacts, *, supported: bool) -> tuple[str, ...]:
    """A note on a checkpoint that states 8-bit floats for keys and values, which a pool has only if it is set.

    `supported`: the platform has such pools.
    """
    if kv_dtype(config) in FLOAT8.values() or not model.has_pool or model.latents:
        return ()
    if not attention_specs(model.cache_groups) or not (field := kv_field(Path(model.path), model.config)):
        return ()
    why = f"the KV pool has {kv_dtype(config)} all the same, which is more exact and takes more memory"
    remedy = "set --kv-cache-dtype fp8_e4m3 to store them so, with its scales if it has any"
    remedy = remedy if supported else "the platform has no pool of 8-bit floats"
    return (f"{model.name} states keys and values in 8-bit floats ({field}), and {why}: {remedy}",)


def missing_scales(config: Config, model: ModelFacts, scales: ScaleSource) -> tuple[str, ...]:
    """The warning of a pool of 8-bit floats without scales; () if it has some, or none is needed."""
    if scales.by_layer or not has_scales(config, model) or config.weights.calculate_kv_scales:
        return ()
    limit = f"larger magnitudes than {LARGEST[kv_dtype(config)]:,} are limited to it"
    remedy = "set --calculate-kv-scales, or --quantization-param-path to a file with scales"
    return (f"{model.name} has no scales of keys and values, so that they are stored unscaled and {limit}: {remedy}",)


def calculated_scales(config: Config, model: ModelFacts, largest: Mapping[int, tuple[float, float]]) -> ScaleSource:
    """The smallest powers of two by which keys and values fit the pool's format with `HEADROOM`.

    Powers of two round numbers as the scale 1 does, so that calculated scales only ever widen the range.
    `largest`: the magnitudes of keys and values in each layer. A layer of zeros has the scale 1. Raises ModelError
    (kv_scales) for NaN and infinity.
    """
    limit, scales = LARGEST[kv_dtype(config)], dict[int, KVScales]()
    for layer, magnitudes in sorted(largest.items()):
        for part, magnitude in zip(("keys", "values"), magnitudes, strict=True):
            if not math.isfinite(magnitude):
                reason = f"{part} of layer {layer} are {magnitude:g}, so that --calculate-kv-scales finds no scale"
                raise ModelError(CODE, model.path, reason, _OTHER_SCALES)
        keys, values = (_power_of_two(magnitude * HEADROOM / limit) if magnitude else 1.0 for magnitude in magnitudes)
        scales[layer] = KVScales(keys, values)
    return ScaleSource(scales)


def _power_of_two(least: float) -> float:
    """The smallest power of two that is not smaller, and a scale."""
    fraction, exponent = math.frexp(least)
    return max(math.ldexp(1.0, exponent - (fraction == 0.5)), _SMALLEST)


def _layers(model: ModelFacts) -> tuple[int, ...]:
    return tuple(sorted(layer for group in attention_specs(model.cache_groups) for layer in group.layers))


def _read_file(path: Path, model: ModelFacts, dtype: str, ranks: int) -> list[dict[int, float]]:
    """The factor of each layer, by rank."""
    content = _object(path, _json(path), "it")
    kind, expected = content.get("model_type"), model.config.get("model_type")
    if None not in (kind, expected) and kind != expected:
        _refuse(path, f"it is for the model_type {kind}, and {model.name} has {expected}")
    cache = _object(path, content.get("kv_cache"), "kv_cache")
    if cache.get("dtype") != dtype:
        _refuse(path, f"kv_cache.dtype is {cache.get('dtype')}, and that of the pool {dtype}")
    factors = _object(path, cache.get("scaling_factor"), "kv_cache.scaling_factor")
    if sorted(factors) != sorted(map(str, range(ranks))):
        _refuse(path, f"kv_cache.scaling_factor has the ranks {_listed(factors)}, and tp_size is {ranks}")
    return [_factors(path, rank, factors[str(rank)], model) for rank in range(ranks)]


def _factors(path: Path, rank: int, table: Any, model: ModelFacts) -> dict[int, float]:
    where = f"kv_cache.scaling_factor of rank {rank}"
    factors = _object(path, table, where)
    if unknown := sorted(factors.keys() - set(map(str, range(model.layers)))):
        _refuse(path, f"{where} has layer {unknown[0]}, and {model.name} has the layers 0 to {model.layers - 1}")
    if missing := [layer for layer in _layers(model) if str(layer) not in factors]:
        _refuse(path, f"{where} lacks layer {missing[0]}; it has {len(factors)} of {len(_layers(model))} layers")
    for layer, factor in factors.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not _is_scale(factor):
            _refuse(
                path,
                f"{where} is {factor!r} for layer {layer}; it must be a finite number above 0, in the range of float32",
            )
    return {layer: float(factors[str(layer)]) for layer in _layers(model)}


def _json(path: Path) -> Any:
    remedy = "Correct --quantization-param-path"
    try:
        if not path.is_file():  # a pipe would be waited for, and can be read only once
            raise ModelError("not_found", str(path), "it is no regular file", remedy)
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError("not_found", str(path), f"it cannot be read ({error.strerror})", remedy) from error
    except (ValueError, RecursionError) as error:
        raise ModelError("damaged", str(path), f"it is not JSON ({error})", _CORRECT_FILE) from error


def _object(path: Path, value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        shown = "missing" if value is None else repr(value)[:60]
        _refuse(path, f"{name} is {shown}, where a JSON object is expected")
    return value


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ModelError(CODE, str(path), reason, _CORRECT_FILE)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "of none"


def _is_scale(value: float) -> bool:
    """Whether float32 holds it without loss of precision; not if it is NaN."""
    return _SMALLEST <= value < 2.0**127


def _of_checkpoint(model: ModelFacts) -> ScaleSource:
    """Those of the safetensors files; a layer with a scale of keys or values alone has it for both."""
    folder = Path(model.path)
    checkpoint = read_checkpoint(folder)
    rename = layer_names(model.architecture, model.text_part_of)
    files: dict[Path, dict[str, KVScaleTensor]] = {}
    for name, scale in () if checkpoint is None else checkpoint.kv_scales.items():
        if rename(name) is not None:
            files.setdefault(scale.path, {})[name] = scale
    factors: dict[int, dict[str, float]] = {}
    for path, stored in files.items():
        for name, value in read_scales(path, {name: scale.tensor for name, scale in stored.items()}).items():
            _add(path, factors, name, stored[name].scale, value)
    if not factors:
        return NO_SCALES
    quant_config = model.config.get("quantization_config")
    if isinstance(quant_config, Mapping) and (refused := unsupported_kv_scheme(quant_config)) is not None:
        reason = f"its scales of keys and values are not for 8-bit floats: {refused}"
        raise ModelError(CODE, str(folder), reason, _OTHER_SCALES)
    layers = _layers(model)
    if factors.keys() != set(layers):
        other = sorted(factors.keys() ^ set(layers))[0]
        has = (
            "a scale of keys or values, but is no attention layer of the model" if other in factors else "no such scale"
        )
        reason = f"layer {other} has {has}; {len(factors)} layers have one, of {len(layers)} that need it"
        raise ModelError(CODE, str(folder), reason, _OTHER_SCALES)
    scales = {layer: KVScales(_either(factors[layer], "keys"), _either(factors[layer], "values")) for layer in layers}
    return ScaleSource(scales)


def _add(path: Path, factors: dict[int, dict[str, float]], name: str, scale: StoredScale, value: float) -> None:
    """Add a scale to those of its layer."""
    if scale.part == "neither":
        return
    if not _is_scale(value):
        reason = f"tensor {name} is {value}; it must be a finite number above 0, in the range of float32"
        raise ModelError(CODE, str(path), reason, _OTHER_SCALES)
    parts = factors.setdefault(scale.layer, {})
    for part in ("keys", "values") if scale.part == "both" else (scale.part,):
        if part in parts:
            reason = f"layer {scale.layer} has more than one scale of {part}, the last of them {name}"
            raise ModelError(CODE, str(path), reason, _OTHER_SCALES)
        parts[part] = value


def _either(parts: Mapping[str, float], part: str) -> float:
    return parts.get(part, next(iter(parts.values())))
