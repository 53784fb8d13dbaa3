"""By which method the layers of a model will hold its weights. Torch-free."""

from __future__ import annotations

from srv.args.config import Config
from srv.models.architectures.registry import native_or_reason
from srv.models.blueprint import Part
from srv.quantization.method import QuantMethod
from srv.quantization.registry import chosen
from srv.specs import ModelFacts


def quantization_method(config: Config, model: ModelFacts) -> QuantMethod | None:
    """None if the weights are not quantized."""
    weights = config.weights
    dequantize = weights.dequantize_weights or config.model.load_format == "dummy"
    dequantize = dequantize or config.model.model_impl == "transformers" or native_of(model) is None
    return chosen(model, weights.quantization, weights.torchao_config, dequantize=dequantize)


def native_of(model: ModelFacts) -> Part | None:
    """The blueprint of the native layers; None if they do not support the model."""
    native = native_or_reason(model.architecture, model.config)
    return None if isinstance(native, str) else native
