"""The table of weight formats: for each quantization method, whether a platform serves it, and with which kernels.

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
from srv_matrix.marks import mark, per_variant
from srv_matrix.matrix import Matrix

DESCRIPTION = (
    "Quantization methods of checkpoints, and those that quantize at load (`--torchao-config`), by the kernels that "
    'multiply with the weights as they are stored. A platform without such kernels refuses the method ("no"), or '
    "dequantizes the weights while they are loaded. Rows of experts are for architectures with mixtures of "
    "experts, and the others for all other matrices of all architectures. `torch_native` computes quantized experts "
    "only if `--moe-runner-backend` names it, or `--mxfp4-moe-precision` asks for what it alone computes."
)
DEQUANTIZED = "dequantized"
_SIZES = {"inputs": 4096, "outputs": 4096}
_DTYPES = ("bfloat16", "float16", "float32")  # the first one that the platform has


def weight_formats(matrix: Matrix) -> Iterator[str]:
    """The lines of the table, one row per method; nothing if the matrix has no values of methods."""
    methods = [method for name in BUILT_IN if (method := find(name)) is not None]
    rows = [(_feature(method), method) for method in methods]
    rows = [(feature, method) for feature, method in rows if _is_judged(matrix, feature)]
    if not rows:
        return
    yield "| | " + " | ".join(manifest.name for manifest in matrix.manifests) + " |"
    yield "| --- |" + " :---: |" * len(matrix.manifests)
    for feature, method in rows:
        argument, _, value = feature.partition("=")
        cells = [_cell(matrix, manifest, feature, method) for manifest in matrix.manifests]
        name = f"`--{argument.replace('_', '-')} {value}`"
        yield f"| {name} | " + " | ".join(cells) + " |"
        if EXPERT_OP_OF.keys() & set(method.ops) and (method.experts is None or method.experts(False) is None):
            cells = [_experts_cell(matrix, manifest, feature, method) for manifest in matrix.manifests]
            yield f"| {name}, experts | " + " | ".join(cells) + " |"


def _feature(method: QuantMethod) -> str:
    return f"{'torchao_config' if method.online else 'quantization'}={method.name}"


def _is_judged(matrix: Matrix, feature: str) -> bool:
    return any(matrix.cell(feature, each.name, variant) for each in matrix.manifests for variant in each.variants)


def _cell(matrix: Matrix, manifest: Manifest, feature: str, method: QuantMethod) -> str:
    texts = {}
    for variant in manifest.variants:
        record = matrix.cell(feature, manifest.name, variant)
        how = _how(manifest, variant, method) if record is not None and record.status.works else ""
        texts[variant] = ", ".join(filter(None, (mark(record), how)))
    return per_variant(texts)


def _experts_cell(matrix: Matrix, manifest: Manifest, feature: str, method: QuantMethod) -> str:
    """The kernels of quantized experts where the method is served, and whether a user has to name them."""
    ops = [EXPERT_OP_OF[op] for op in method.ops if op in EXPERT_OP_OF]
    texts = {}
    for variant in manifest.variants:
        record = matrix.cell(feature, manifest.name, variant)
        if record is None or not record.status.works:
            texts[variant] = "no"
        elif specs := _chosen(manifest, variant, ops):
            by = f"by {_names(specs)}"
            texts[variant] = f"{by}, if it is named" if any(spec.fallback for spec in specs) else by
        else:
            texts[variant] = DEQUANTIZED if _how(manifest, variant, method) == DEQUANTIZED else "no"
    return per_variant(texts)


def _how(manifest: Manifest, variant: str, method: QuantMethod) -> str:
    """The names of the kernels of the method's products, without repetition; or that the weights are dequantized."""
    specs = _chosen(manifest, variant, method.ops)
    return f"by {_names(specs)}" if specs else DEQUANTIZED


def _names(specs: Sequence[OpSpec]) -> str:
    return ", ".join(dict.fromkeys(spec.name for spec in specs))


def _chosen(manifest: Manifest, variant: str, ops: Sequence[str]) -> list[OpSpec]:
    """What computes each of the ops that the platform has, for large matrices."""
    device = manifest.facts.profiles[variant]
    dtype = next((each for each in _DTYPES if each in manifest.facts.capabilities(device)), _DTYPES[0])
    chosen = (choose_op(manifest.facts.ops, device, op, OpCall(dtype, _SIZES)).spec for op in ops)
    return [spec for spec in chosen if spec is not None]
