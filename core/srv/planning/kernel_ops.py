"""The part of a kernel plan about ops: norms, rotary embeddings, activations, weights, logits. Torch-free.

The blueprint of a model says which ops its layers call (`srv.models.derive`), the quantization
method which of them multiply its weights, and the platform's facts what implements them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from srv.models.blueprint import OpUse
from srv.models.derive import OUTPUT, ExpertMatrices, LayerMatrix, ModelOps
from srv.models.inspection import QuantizedOp
from srv.models.layers.moe_config import expert_names
from srv.planning.kernel import Kernel, logits_key
from srv.platform.experts import EXPERT_OP_OF, EXPERTS, INT8
from srv.platform.facts import DeviceFacts, OpCall, OpSpec
from srv.platform.op_choice import AUTO, NAMED_BY, OpChoice, choose_op, op_key
from srv.quantization.schemes import BIASES, LayerSchemes, Scheme

TORCH = "torch"
NO_OP_OF_EXPERTS = "its experts are quantized in a way for which there is no op of experts"
NOT_SERVED = (NO_OP_OF_EXPERTS, BIASES)  # on any platform: the layers refuse it when they are built
_LINEAR, _EMBEDDING = "linear", "embedding"
_OWN_OPERATORS = (_LINEAR, _EMBEDDING)  # torch's, for which a platform needs no implementation
_FLOAT32 = {_LINEAR: "linear_float32", "linear_gguf": "linear_gguf_float32"}  # of logits, if the platform has them


class OpTable(NamedTuple):
    """What a platform has for the ops of a model. `dtype`: of the model. `named`, `full`: as of `choose_op`."""

    platform: str
    specs: Sequence[OpSpec]
    device: DeviceFacts
    dtype: str
    batch_invariant: bool = False
    named: Mapping[str, str] = MappingProxyType({})
    full: bool = False

    def choose(self, op: str, dtype: str, sizes: dict[str, int]) -> OpChoice:
        call = OpCall(dtype, sizes)
        return choose_op(
            self.specs, self.device, op, call, batch_invariant=self.batch_invariant, named=self.named, full=self.full
        )


def op_kernels(table: OpTable, ops: ModelOps, schemes: LayerSchemes) -> Iterator[Kernel]:
    """A Kernel for each distinct call. `schemes`: of the matrices."""
    for use in ops.ops:
        yield _of_use(table, use)
    shapes: dict[tuple[object, ...], tuple[LayerMatrix, str]] = {}  # of most matrices there is one in every layer
    for matrix in ops.matrices:
        quantized = _quantized_op(matrix, ops.matrices[0], schemes)
        output = matrix.names[-1] == OUTPUT
        shape = (quantized, matrix.inputs, matrix.outputs, matrix.embedding, output, matrix.role)
        shapes.setdefault(shape, (matrix, quantized))
    by_key: dict[str, Kernel] = {}
    for matrix, quantized in shapes.values():
        kernel = _of_matrix(table, matrix, quantized)
        by_key.setdefault(kernel.key, kernel)
    yield from by_key.values()
    experts = [_of_experts(table, expert, schemes) for expert in ops.experts]
    yield from {(kernel.key, kernel.name): kernel for kernel in experts}.values()


def quantized_kernels(table: OpTable, ops: Iterable[QuantizedOp]) -> Iterator[Kernel]:
    """A Kernel for each call on quantized weights that the modules of a class of transformers make."""
    for op in ops:
        key, what = op_key(op.op, table.dtype, op.sizes), _what(op.op, table.dtype, op.sizes)
        if op.op:
            yield _kernel(table, key, what, table.choose(op.op, table.dtype, op.sizes))


def _of_experts(table: OpTable, experts: ExpertMatrices, schemes: LayerSchemes) -> Kernel:
    """The op on the matrices of experts, all of which are quantized alike."""
    sizes = dict(experts.sizes)
    names = expert_names(experts.prefix, sizes["experts"], experts.activation)
    matrices = zip(names, (sizes["hidden"], sizes["intermediate"]), strict=True)
    linear = {_op(schemes(names, inputs, False)) for names, inputs in matrices}
    op = EXPERT_OP_OF.get(linear.pop(), "") if len(linear) == 1 else ""
    key, what = op_key(op or EXPERTS, table.dtype, sizes), _what(op or EXPERTS, table.dtype, sizes)
    if not op:
        return Kernel("op", what, key, None, NO_OP_OF_EXPERTS)
    if op == INT8 and experts.bias:
        return Kernel("op", what, key, None, BIASES)
    return _kernel(table, key, what, table.choose(op, table.dtype, sizes))


def _of_use(table: OpTable, use: OpUse) -> Kernel:
    dtype, sizes = use.dtype or table.dtype, dict(use.sizes)
    key, what = op_key(use.op, dtype, sizes), _what(use.op, dtype, sizes)
    if use.always_own:
        return Kernel("op", what, key, TORCH, f"the layers use {use.own} on every platform")
    choice = table.choose(use.op, dtype, sizes)
    if choice.spec is None and use.own:
        because = f"the layers use {use.own} where a platform has no implementation that fits"
        return Kernel("op", what, key, TORCH, because, choice.rejected, choice.slower)
    return _kernel(table, key, what, choice)


def _of_matrix(table: OpTable, matrix: LayerMatrix, quantized: str) -> Kernel:
    op = quantized or (_EMBEDDING if matrix.embedding else _LINEAR)
    sizes = {"inputs": matrix.inputs}
    full = sizes if matrix.embedding else {**sizes, "outputs": matrix.outputs}
    if (matrix.names[-1] == OUTPUT or matrix.role) and table.dtype != "float32":
        return _logits(table, op, sizes, full, matrix)
    if matrix.role:
        what = _what(matrix.role, table.dtype, sizes)
        return _kernel(table, op_key(matrix.role, table.dtype, sizes), what, table.choose(op, table.dtype, full), op)
    choice = table.choose(op, table.dtype, full)
    return _kernel(table, op_key(op, table.dtype, sizes), _what(op, table.dtype, sizes), choice)


def _logits(table: OpTable, op: str, sizes: dict[str, int], full: dict[str, int], matrix: LayerMatrix) -> Kernel:
    """The output layer or a router, whose sums are float32 where the platform has a kernel that returns them.

    Such kernels add no bias.
    """
    key = op_key(matrix.role, table.dtype, sizes) if matrix.role else logits_key(table.dtype, sizes)
    wide = op in _FLOAT32 and not matrix.bias
    choice = table.choose(_FLOAT32[op], table.dtype, full) if wide else OpChoice(None, ())
    if choice.spec is not None:
        return _kernel(table, key, f"{_what(op, table.dtype, sizes)}, with float32 results", choice)
    what = f"{_what(op, table.dtype, sizes)}, with results rounded to that"
    return _kernel(table, key, what, table.choose(op, table.dtype, full), op)


def _quantized_op(matrix: LayerMatrix, embedding: LayerMatrix, schemes: LayerSchemes) -> str:
    """The op of a matrix that stays quantized; "" for one with unquantized weights."""
    if matrix.tied:
        return _op(schemes(embedding.names, embedding.inputs, True))
    scheme = schemes(matrix.names, matrix.inputs, matrix.embedding)
    return scheme.rows_op if matrix.embedding and scheme is not None else _op(scheme)


def _op(scheme: Scheme | None) -> str:
    return "" if scheme is None else scheme.op


def _kernel(table: OpTable, key: str, what: str, choice: OpChoice, op: str = "") -> Kernel:
    name = key.partition(" ")[0]
    if choice.spec is not None:
        spec, because = choice.spec, _reason(table, choice)
        return Kernel("op", what, key, spec.name, because, choice.rejected, choice.slower, spec.rounds)
    if (op or name) in _OWN_OPERATORS:
        because = f"platform {table.platform} leaves it to torch's own operator"
        return Kernel("op", what, key, TORCH, because, choice.rejected, choice.slower)
    return Kernel("op", what, key, None, f"platform {table.platform} has no implementation that fits", choice.rejected)


def _reason(table: OpTable, choice: OpChoice) -> str:
    assert choice.spec is not None
    rounds = f"; it {choice.spec.rounds}" if choice.spec.rounds else ""
    return f"{_why(table, choice)}{rounds}"


def _why(table: OpTable, choice: OpChoice) -> str:
    assert choice.spec is not None
    if table.named.get(choice.spec.op, AUTO) != AUTO:
        return f"{NAMED_BY[choice.spec.op]} names it"
    if not choice.rejected:
        return f"it is the only implementation that platform {table.platform} has"
    invariant = " and is batch invariant" if table.batch_invariant else ""
    return f"it is the first in the order of platform {table.platform} that fits{invariant}"


def _what(op: str, dtype: str, sizes: dict[str, int]) -> str:
    return ", ".join((f"{op} in {dtype}", *(f"{name} {size}" for name, size in sizes.items())))
