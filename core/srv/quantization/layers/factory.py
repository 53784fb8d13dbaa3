"""The factory of the layers of all quantization methods: each matrix is held as the scheme that its format names.

Must not know formats, nor methods.
"""

from __future__ import annotations

from collections.abc import Mapping

from srv.errors import InternalError, ModelError
from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory, LocalSizes, Unit
from srv.models.layers.linear import Projection, Split
from srv.models.layers.moe_config import expert_names
from srv.quantization.layers.blocks import (
    GatheredLinear,
    GGUFEmbedding,
    GGUFExperts,
    GGUFLinear,
    OrderedExperts,
    OrderedLinear,
    empty_matrix,
)
from srv.quantization.layers.fp8 import Fp8Experts, Fp8Linear
from srv.quantization.layers.int8 import (
    BiasedLinear,
    DynamicInt8Linear,
    Int8Experts,
    StaticInt8Linear,
    WeightOnlyInt8Linear,
)
from srv.quantization.schemes import BIASES, Blocks, Fp8, Int8, LayerSchemes, Scheme

_REMEDY = "Use another checkpoint of the model, or set --dequantize-weights for a GGUF file"


class SchemeLayers(LayerFactory):
    """Layers by the schemes of their matrices; without one, unquantized layers."""

    def __init__(self, context: BuildContext, schemes: LayerSchemes) -> None:
        super().__init__(context)
        self._schemes = schemes

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: Unit = 1
    ) -> Projection:
        local = self.local_sizes(output_sizes, inputs, split, unit)
        scheme = self._schemes(tuple(output_sizes), inputs, False)
        if scheme is None:
            return super().linear(output_sizes, inputs, bias, split, unit)
        match scheme:
            case Int8():
                return self._int8_linear(scheme, local, bias)
            case Fp8():
                return Fp8Linear(self.context, local, bias, scheme)
            case Blocks():
                return self._block_linear(scheme, local, bias)
        return self.other_linear(scheme, local, bias)

    def other_linear(self, scheme: Scheme, local: LocalSizes, bias: bool) -> Projection:
        """The linear layer of a scheme that this class does not know; for the factory of a method that has one."""
        raise _without_layers(scheme)

    def _int8_linear(self, scheme: Int8, local: LocalSizes, bias: bool) -> Projection:
        match scheme.inputs:
            case "dynamic":
                return DynamicInt8Linear(self.context, local, bias, offset=scheme.offsets)
            case "none":
                return WeightOnlyInt8Linear(self.context, local, bias)
        static = StaticInt8Linear(self.context, local)
        return BiasedLinear(self.context, static) if bias and scheme.has_biases else static

    def _block_linear(self, scheme: Blocks, local: LocalSizes, bias: bool) -> Projection:
        runs = scheme.runs(tuple(local.output_sizes.values()))
        matrices = [empty_matrix(self.context, outputs, local.inputs, kind) for kind, outputs in runs]
        if scheme.ordered and local.sharding.columns is None:
            return OrderedLinear(self.context, local.output_sizes, matrices, bias, local.sharding)
        linear = GGUFLinear(self.context, local.output_sizes, matrices, bias, sharding=local.sharding)
        return GatheredLinear(self.context, linear) if scheme.ordered else linear

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        """Raises ModelError for experts that are quantized in part, and for those that no layers hold."""
        local = self.local_experts(sizes)
        names, inputs = expert_names(prefix, sizes.experts, sizes.activation), (sizes.hidden, sizes.intermediate)
        first, down = (self._schemes(*pair, False) for pair in zip(names, inputs, strict=True))
        if first == down and first is not None and not isinstance(first, Int8 | Fp8 | Blocks):
            return self.other_experts(first, prefix, local, bias)
        match first, down:
            case None, None:
                return super().experts(prefix, sizes, bias)
            case Int8(), Int8() if first == down:
                return self._int8_experts(first, prefix, local, bias)
            case Fp8(), Fp8() if first == down:
                return Fp8Experts(self.context, prefix, local, first, bias)
            case Blocks(), Blocks() if first.ordered == down.ordered:
                experts = GGUFExperts(self.context, prefix, local, first.type, down.type, bias)
                return OrderedExperts(self.context, experts) if first.ordered else experts
        how = "quantized in part" if first is None or down is None else f"held as {first} and {down}"
        raise _refused(prefix, f"{how}, which no layers support")

    def other_experts(self, scheme: Scheme, prefix: str, sizes: ExpertSizes, bias: bool) -> ExpertWeights:
        """As `other_linear`, the experts of a layer."""
        raise _refused(prefix, f"held as {scheme} and {scheme}, which no layers support")

    def _int8_experts(self, scheme: Int8, prefix: str, sizes: ExpertSizes, bias: bool) -> ExpertWeights:
        if scheme.inputs == "static":
            raise _refused(prefix, "int8 with static activations, which no layers support")
        if bias:
            raise ModelError("unsupported_quantization", prefix, BIASES, _REMEDY)
        return Int8Experts(self.context, prefix, sizes, offset=scheme.offsets)

    def embedding(self, name: str, vocab: int, hidden: int) -> TokenEmbedding:
        scheme = self._schemes((name,), hidden, True)
        if scheme is None:
            return super().embedding(name, vocab, hidden)
        if not isinstance(scheme, Blocks):
            raise _without_layers(scheme)
        local = self.local_vocab(vocab)
        matrix = empty_matrix(self.context, local.end - local.begin, hidden, scheme.type)
        return GGUFEmbedding(self.context, name, local, matrix)

    def tied_lm_head(self, name: str, embedding: TokenEmbedding) -> Projection:
        if not isinstance(embedding, GGUFEmbedding):
            return super().tied_lm_head(name, embedding)
        return GGUFLinear(self.context, {name: embedding.matrix.outputs}, [embedding.matrix], bias=False, tied=True)


def _refused(prefix: str, how: str) -> ModelError:
    return ModelError("unsupported_quantization", prefix, f"the experts {prefix} are {how}", _REMEDY)


def _without_layers(scheme: Scheme) -> InternalError:
    return InternalError(f"{scheme} has no layers in srv: its method must name a factory of its own (layers)")
