"""What a configuration asks of the layers and weights of a model, for planning and for loading. Torch-free."""

from __future__ import annotations

from srv.args.config import Config
from srv.models.choice import LayerOptions


def layer_options(config: Config) -> LayerOptions:
    return LayerOptions(
        model_impl=config.model.model_impl,
        load_format=config.model.load_format,
        dequantize=config.weights.dequantize_weights,
        quantization=config.weights.quantization,
        online_quantization=config.weights.torchao_config,
        ranks=config.parallel.tp_size,
        loaders=config.weights.custom_weight_loader,
    )
