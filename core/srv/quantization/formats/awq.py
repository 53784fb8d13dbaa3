"""Checkpoints of AWQ, by AutoAWQ and GPTQModel: how their quantization_config is read. Torch-free.

The layout of the tensors is in `srv.quantization.formats.packed_integers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.quantization.formats.packed_integers import PackedForm, excluded_of, first, group_of, grouped, method
from srv.quantization.formats.stored_counts import bits_of, ceil, group_size, names_of, one_layout
from srv.quantization.method import StoredCounts, UnknownStorage

NAME = "awq"


def read_form(quant_config: Mapping[str, Any]) -> PackedForm | str:
    bits, version = (
        first(quant_config, "bits", "w_bit"),
        str(first(quant_config, "version", "format") or "gemm").lower(),
    )
    if bits not in (4, 8):
        return f"its integers have {bits} bits, not 4 or 8"
    if version != "gemm" or str(quant_config.get("backend", "autoawq")).lower() != "autoawq":
        return f"it is packed for the kernels {version}, not as AutoAWQ's gemm"
    symmetric = not first(quant_config, "zero_point", default=True)  # GPTQModel's; its zeros of 8 or 128 are stored
    if bits == 8 and not symmetric:
        return "its 8-bit integers have zero points other than 128 (zero_point is true)"
    interleaved = bits == 4 or not _is_of_gptqmodel(quant_config)
    excluded = excluded_of(quant_config)
    return grouped(
        PackedForm("awq", bits, group_of(quant_config), symmetric, excluded=excluded, interleaved=interleaved)
    )


def _is_of_gptqmodel(quant_config: Mapping[str, Any]) -> bool:
    """Whether GPTQModel wrote a checkpoint: it packs 8-bit integers of AWQ as they come, and 4-bit ones in turn.

    The kernels that other servers have for AWQ read both in turn.
    """
    meta = quant_config.get("meta")
    made_by = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = made_by if isinstance(made_by, list) else [made_by]
    return any(str(name).lower().startswith("gptqmodel") for name in names)


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: packed along the outputs, with scales and zeros per group of inputs (AutoAWQ's gemm)."""
    if config.get("version", "gemm").lower() != "gemm":
        raise UnknownStorage(f"AWQ weights of version {config['version']} are not known")
    per_word, size = 32 // bits_of(config, "bits", "w_bit"), group_size(config, "group_size", "q_group_size")

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        groups = ceil(inputs, size) if size else 1
        return {"int32": (inputs + groups) * ceil(outputs, per_word), "float16": groups * outputs}

    return one_layout(layout, names_of(config, "modules_to_not_convert"))


METHOD = method(NAME, read_form, "srv.quantization.formats.awq_storage:AWQStorageFormat", stored=stored)
