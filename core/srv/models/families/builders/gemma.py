"""What Gemma 3n and Gemma 4 have in common: inputs of single layers, and layers that read the cache of lower ones.

Torch-free. Raises UnsupportedConfig with the name of a field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from srv.models.blueprint import Attention, Embedding, Linear, Norm
from srv.models.blueprint.gemma import LayerInput, LayerInputs, ReadingAttention
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.unsupported import UnsupportedConfig


def attention(sizes: Sizes, bias: bool, window: int | None, *, kept: bool) -> Attention:
    """With norms of queries, keys and values, and without a scale. `kept`: higher layers read its keys and values."""
    made = parts.attention(sizes, bias=bias, norms=parts.head_norms(sizes), scale=1.0, window=window)
    return dataclasses.replace(made, v_norm=Norm(sizes.head_dim, sizes.norm_eps, learned=False), kept=kept)


def reading_attention(own: Attention, source: int) -> ReadingAttention:
    """What a layer has in place of `own`, which reads the cache of layer `source`."""
    fields = {each.name: getattr(own, each.name) for each in dataclasses.fields(own)}
    queries = dataclasses.replace(own.qkv, outputs={"q_proj": own.qkv.outputs["q_proj"]})
    return ReadingAttention(**{**fields, "qkv": queries, "k_norm": None, "v_norm": None, "kept": False}, source=source)


def sources_of(windows: Sequence[int | None], reading: int) -> list[int | None]:
    """The layer whose cache each of the last `reading` layers reads: the last of its kind before these; None of the
    others."""
    first = len(windows) - reading
    if not 0 <= reading < len(windows):
        raise UnsupportedConfig(f"num_kv_shared_layers = {reading} of {len(windows)} layers is not possible")
    last = {window: index for index, window in enumerate(windows[:first])}
    missing = next((index for index, window in enumerate(windows) if window not in last), None)
    if reading and missing is not None:
        raise UnsupportedConfig(f"num_kv_shared_layers = {reading} leaves layer {missing} no lower one of its kind")
    return [None if index < first else last[window] for index, window in enumerate(windows)]


def layer_inputs(sizes: Sizes, vocab: int, size: int) -> LayerInputs:
    """The inputs of all layers, of `size` elements each. `vocab`: the rows of their table."""
    of_layers = sizes.layers * size
    return LayerInputs(
        Embedding(vocab, of_layers, name="embed_tokens_per_layer"),
        Linear({"per_layer_model_projection": of_layers}, sizes.hidden_size),
        Norm(size, sizes.norm_eps, name="per_layer_projection_norm"),
        size,
    )


def layer_input(sizes: Sizes, size: int) -> LayerInput:
    return LayerInput(
        Linear({"per_layer_input_gate": size}, sizes.hidden_size),
        Linear({"per_layer_projection": sizes.hidden_size}, size),
        Norm(sizes.hidden_size, sizes.norm_eps, name="post_per_layer_input_norm"),
    )
