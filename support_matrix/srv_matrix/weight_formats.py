"""The page of weight formats: for each quantization method, whether a platform serves it, and with which kernels.

A kernel is the one that a plan would name for a large product. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from srv.platform.experts import EXPERT_OP_OF
from srv.platform.facts import OpCall, OpSpec
from srv.platform.manifest import Manifest
from srv.platform.op_choice import choose_op
from srv.quantization.method import QuantMethod
from srv.quantization.registry import BUILT_IN, find
from srv_matrix.feature_pages import head
from srv_matrix.marks import GENERATED, KEY, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.page_notes import PageNotes, columns
from srv_matrix.records import Record

NAME = "weight-formats.md"
ABOUT = (
    "Quantization methods of checkpoints, and those that quantize at load (`--torchao-config`), by the kernels that "
    "multiply with the weights as they are stored. A platform without such kernels refuses the method (✕), or "
    "dequantizes the weights while they are loaded. Rows of experts are for architectures with mixtures of "
    "experts, and the others for all other matrices of all architectures. `torch_native` computes quantized experts "
    "only if `--moe-runner-backend` names it, or `--mxfp4-moe-precision` asks for what it alone computes."
)
DEQUANTIZED = "dequantized"
REFUSED = "✕"
_SIZES = {"inputs": 4096, "outputs": 4096}
_DTYPES = ("bfloat16", "float16", "float32")  # the first one that the platform has


def weight_formats_page(matrix: Matrix) -> str:
    """The page, with a row per method; "" if the matrix has no values of methods."""
    notes = PageNotes(platforms=True)
    table = list(weight_formats(matrix, notes))
    if not table:
        return ""
    return text_of(
        [GENERATED, "# Weight formats", "", ABOUT, "", f"{KEY}. [Index](index.md).", "", *table, "", *notes.lines()]
    )


def weight_formats(matrix: Matrix, notes: PageNotes) -> Iterator[str]:
    """The lines of the table."""
    methods = [method for name in BUILT_IN if (method := find(name)) is not None]
    methods = [method for method in methods if _is_judged(matrix, _feature(method))]
    names: list[str] = []
    cells: dict[tuple[str, str], list[str]] = {}
    for method in methods:
        experts = EXPERT_OP_OF.keys() & set(method.ops) and (method.experts is None or method.experts(False) is None)
        argument, _, value = _feature(method).partition("=")
        names += [f"`--{argument.replace('_', '-')} {value}`{of}" for of in ("", ", experts")[: 2 if experts else 1]]
        for manifest in matrix.manifests:
            for variant in manifest.variants:
                record = matrix.cell(_feature(method), manifest.name, variant)
                row = cells.setdefault((manifest.name, variant), [])
                row.append(_cell(record, manifest, variant, method, notes))
                row += [_experts_cell(record, manifest, variant, method)] if experts else []
    shown = columns(cells)
    if names:
        yield head("Method", shown)
        yield from (" | ".join(row) for row in zip(names, *(column.cells for column in shown), strict=True))


def _feature(method: QuantMethod) -> str:
    return f"{'torchao_config' if method.online else 'quantization'}={method.name}"


def _is_judged(matrix: Matrix, feature: str) -> bool:
    return any(
        matrix.cell(feature, manifest.name, variant) for manifest in matrix.manifests for variant in manifest.variants
    )


def _cell(record: Record | None, manifest: Manifest, variant: str, method: QuantMethod, notes: PageNotes) -> str:
    how = _how(manifest, variant, method) if record is not None and record.status.works else ""
    return f"{notes.cell(record)} {how}".strip()


def _experts_cell(record: Record | None, manifest: Manifest, variant: str, method: QuantMethod) -> str:
    """The kernels of quantized experts where the method is served, and whether a user has to name them."""
    if record is None or not record.status.works:
        return REFUSED
    if specs := _chosen(manifest, variant, [EXPERT_OP_OF[op] for op in method.ops if op in EXPERT_OP_OF]):
        return _names(specs) + (" if it is named" if any(spec.fallback for spec in specs) else "")
    return DEQUANTIZED if _how(manifest, variant, method) == DEQUANTIZED else REFUSED


def _how(manifest: Manifest, variant: str, method: QuantMethod) -> str:
    """The names of the kernels of the method's products, without repetition; or that the weights are dequantized."""
    specs = _chosen(manifest, variant, method.ops)
    return _names(specs) if specs else DEQUANTIZED


def _names(specs: Sequence[OpSpec]) -> str:
    return ", ".join(dict.fromkeys(spec.name for spec in specs))


def _chosen(manifest: Manifest, variant: str, ops: Sequence[str]) -> list[OpSpec]:
    """What computes each of the ops that the platform has, for large matrices."""
    device = manifest.facts.profiles[variant]
    dtype = next((candidate for candidate in _DTYPES if candidate in manifest.facts.capabilities(device)), _DTYPES[0])
    chosen = (choose_op(manifest.facts.ops, device, op, OpCall(dtype, _SIZES)).spec for op in ops)
    return [spec for spec in chosen if spec is not None]
