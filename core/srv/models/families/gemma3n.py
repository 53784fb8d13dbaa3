"""Gemma 3n (text): inputs of single layers, several residual streams, and layers that read the cache of lower ones.

Torch-free. The first layers have MLPs in which most gates are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Layer, Linear, Norm, Part, Tensors, alike
from srv.models.blueprint.gemma import AltUp, Laurel, StreamMean, StreamProjections
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes, soft_cap, windows_of_pattern
from srv.models.families.builders.gemma import (
    attention,
    layer_input,
    layer_inputs,
    reading_attention,
    sources_of,
)
from srv.models.families.builders.sandwich import local_rope, with_rope_of
from srv.models.unsupported import UnsupportedConfig, refuse_unless

SPARSE_LAYERS, SPARSITY = 10, 0.95  # of models with more layers whose configuration does not say it


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"hidden_activation": ("gelu_pytorch_tanh",)})
    inner, layers = config["intermediate_size"], int(config["num_hidden_layers"])
    widths = _of_layers(config, "intermediate_size", inner if isinstance(inner, list) else [inner] * layers)
    full = {**with_rope_of(config, "full_attention", "rope_theta"), "intermediate_size": widths[0]}
    sizes = decoder_sizes(full, reads=("hidden_act", "final_logit_softcapping"))
    ropes = {True: local_rope(config, sizes.head_dim, "rope_local_base_freq"), False: sizes.rope}
    windows, bias = windows_of_pattern(config, layers), bool(config["attention_bias"])
    small, streams = int(config["hidden_size_per_layer_input"]), int(config["altup_num_inputs"])
    before_mixer, after_mixer, before_mlp, after_mlp = (
        Norm(sizes.hidden_size, sizes.norm_eps, name=name)
        for name in (
            *(parts.BEFORE_MIXER, parts.BEFORE_MLP),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
    )
    altup, laurel, own = _altup(config, sizes), _laurel(sizes, int(config["laurel_rank"])), layer_input(sizes, small)

    def layer(kind: tuple[int | None, int | None, bool, int, float]) -> Layer:
        window, source, kept, width, sparsity = kind
        of_kind = sizes._replace(rope=ropes[window is not None])
        mixer = attention(of_kind, bias, window, kept=kept)
        mlp = parts.mlp(sizes, activation="gelu_tanh_gated", inner=width, sparsity=sparsity)
        return Layer(
            (altup, before_mixer),
            (mixer if source is None else reading_attention(mixer, source),),
            (after_mixer, laurel, before_mlp),
            mlp,
            (after_mlp, own),
            "altup",
        )

    sources = sources_of(windows, int(config["num_kv_shared_layers"]))
    kept = [index in sources for index in range(layers)]
    kinds = zip(windows, sources, kept, widths, _sparsities(config, layers), strict=True)
    others = range(1, streams)
    mean = StreamMean(
        tuple(_projections(sizes, "altup_unembed_projections", range(index, index + 1)) for index in range(streams - 1))
    )
    return parts.decoder(
        sizes,
        alike(kinds, layer),
        mean,
        parts.last_norm(sizes, adds=False),
        before=(
            layer_inputs(sizes, int(config["vocab_size_per_layer_input"]), small),
            StreamProjections(_projections(sizes, "altup_projections", range(len(others)))),
        ),
        factor=sizes.hidden_size**0.5,
        factor_dtype="",
        logits_soft_cap=soft_cap(config, "final_logit_softcapping"),
    )


def _of_layers(config: Mapping[str, Any], field: str, values: list[Any]) -> list[Any]:
    if len(values) != config["num_hidden_layers"]:
        raise UnsupportedConfig(f"{field} has {len(values)} entries for {config['num_hidden_layers']} layers")
    return values


def _sparsities(config: Mapping[str, Any], layers: int) -> list[float]:
    stated = config.get("activation_sparsity_pattern")
    if stated is None:
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        return [SPARSITY] * sparse + [0.0] * (layers - sparse)
    found = [float(each) for each in _of_layers(config, "activation_sparsity_pattern", stated)]
    if any(not 0 <= each < 1 for each in found):
        raise UnsupportedConfig(f"activation_sparsity_pattern = {stated} has a value that is no share of the gates")
    return found


def _projections(sizes: Sizes, name: str, numbers: range) -> Linear:
    return Linear({f"{name}.{index}": sizes.hidden_size for index in numbers}, sizes.hidden_size)


def _altup(config: Mapping[str, Any], sizes: Sizes) -> AltUp:
    hidden, streams, active = sizes.hidden_size, int(config["altup_num_inputs"]), int(config["altup_active_idx"])
    if not 0 <= active < streams:
        raise UnsupportedConfig(f"altup_active_idx = {active} is none of {streams} streams (altup_num_inputs)")
    return AltUp(
        Tensors({"correct_output_scale": (hidden,)}),
        Linear({"correction_coefs": streams}, streams),
        Linear({"prediction_coefs": streams**2}, streams),
        Linear({"modality_router": streams}, hidden),
        Norm(hidden, sizes.norm_eps, name="router_norm"),
        streams,
        active,
        bool(config["altup_correct_scale"]),
        name="altup",
    )


def _laurel(sizes: Sizes, rank: int) -> Laurel:
    hidden = sizes.hidden_size
    norm = Norm(hidden, sizes.norm_eps, name="post_laurel_norm")
    return Laurel(Linear({"linear_left": rank}, hidden), Linear({"linear_right": hidden}, rank), norm, name="laurel")


ARCHITECTURE = Architecture(
    name="Gemma3nForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "final_logit_softcapping": 30.0,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "num_kv_shared_layers": 15,
    },
    model_type="gemma3n_text",
)
