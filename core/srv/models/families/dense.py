"""Families of dense decoders, by what they have otherwise than Llama. Torch-free."""

from __future__ import annotations

import dataclasses
from typing import Any

from srv.models.blueprint import Attention, Embedding, Layer, Linear, Norm, Part, Tensors, alike
from srv.models.blueprint.without_layers import Group, LearnedMLP, UncachedAttention
from srv.models.families import gpt2
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.sandwich import sandwich_decoder
from srv.models.families.builders.without_layers import (
    EPS,
    SLIDING,
    attending,
    every,
    latent,
    normed,
    sizes,
    uniform,
    windows,
)
from srv.models.families.family import Family, Fields, common

SANDWICH = (
    *(parts.BEFORE_MIXER, parts.BEFORE_MLP),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


def gemma(c: Fields) -> Part:
    base = sizes(c)
    return uniform(
        base, parts.attention(base, bias=bool(c.attention_bias)), parts.mlp(base, activation="gelu_tanh_gated")
    )


def ministral(c: Fields) -> Part:
    return _windowed(c, windows(c, lambda index: SLIDING))


def ministral3(c: Fields) -> Part:
    return _windowed(c, (c.sliding_window,) * c.num_hidden_layers)


def _windowed(c: Fields, each: tuple[int | None, ...]) -> Part:
    base = sizes(c)
    return parts.decoder(base, parts.pre_norm_layers(base, attending(base, each), parts.mlp(base)))


def olmo(c: Fields) -> Part:
    """Its norms have no weights."""
    base = sizes(c)
    norm = Norm(base.hidden_size, EPS, rms=False, learned=False)
    layer = Layer((norm,), (parts.attention(base, bias=bool(c.attention_bias)),), (norm,), parts.mlp(base))
    return parts.decoder(base, (layer,) * base.layers, norm)


def olmo3(c: Fields) -> Part:
    """As OLMo 2; all but every fourth layer have a window."""
    base = sizes(c)
    mixers = attending(base, windows(c, every(4)), norms=parts.joint_norms(base), bias=bool(c.attention_bias))
    return sandwich_decoder(base, mixers, parts.mlp(base), before=False)


def exaone4(c: Fields) -> Part:
    """Norms after attention and MLP, and norms of heads; most layers may have a window."""
    base = sizes(c)
    mixers = attending(base, exaone_windows(c), norms=parts.head_norms(base))
    return sandwich_decoder(base, mixers, parts.mlp(base), before=False)


def exaone_windows(c: Fields) -> tuple[int | None, ...]:
    """Every `sliding_window_pattern`-th layer has full attention, and all if there is no window."""
    return windows(c, every(c.sliding_window_pattern if c.sliding_window else 1))


def nemotron(c: Fields) -> Part:
    """Two linear layers per MLP, and layer norms. Also Jais 2."""
    base = sizes(c)
    return normed(base, parts.attention(base, bias=bool(c.attention_bias)), parts.mlp(base, bool(c.mlp_bias), "relu2"))


def arcee(c: Fields) -> Part:
    base = sizes(c)
    return uniform(base, parts.attention(base, bias=bool(c.attention_bias)), parts.mlp(base, bool(c.mlp_bias), "relu2"))


def apertus(c: Fields) -> Part:
    """The activation xIELU has two parameters per layer, and two constants that are stored."""
    base = sizes(c)
    mlp = parts.mlp(base, activation="xielu")
    if c.hidden_act == "xielu":
        shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        learned = Tensors(shapes, name="act_fn")
        mlp = LearnedMLP(mlp.up, mlp.down, mlp.activation, learned=learned, name=mlp.name)
    names = ("attention_layernorm", "feedforward_layernorm")
    mixer = parts.attention(base, norms=parts.head_norms(base), bias=bool(c.attention_bias))
    layer = parts.pre_norm(base, mixer, mlp, names=names)
    return parts.decoder(base, (layer,) * base.layers)


def hunyuan(c: Fields) -> Part:
    base = sizes(c)
    return uniform(
        base, parts.attention(base, norms=parts.head_norms(base), bias=bool(c.attention_bias)), parts.mlp(base)
    )


def seed_oss(c: Fields) -> Part:
    base = sizes(c)
    mixer = parts.attention(base, bias=bool(c.attention_bias), output_bias=bool(c.attention_out_bias))
    return uniform(base, mixer, parts.mlp(base, bool(c.mlp_bias)))


def minicpm3(c: Fields) -> Part:
    """Latent attention in a dense model."""
    base = sizes(c)
    return uniform(base, latent(c, base), parts.mlp(base, bool(c.get("mlp_bias"))))


def gpt_bigcode(c: Fields) -> Part:
    """GPT-2 with one key and value for all heads."""
    keys, inner = 1 if c.multi_query else c.num_attention_heads, c.n_inner or 4 * c.hidden_size
    base = sizes(c, kv_heads=keys, intermediate_size=inner)
    positions = layer_norm.learned_positions(base, c.max_position_embeddings)
    mixer = parts.attention(base, bias=True)
    return layer_norm.decoder(base, mixer, parts.mlp(base, True, "gelu_tanh"), before=(positions,))


def mllama(c: Fields) -> Part:
    """Layers that only attend to images keep nothing of text; eight rows of the embedding stand for images."""
    base = sizes(c, tied_embeddings=False, head_dim=c.hidden_size // c.num_attention_heads)
    crossing, mlp = set(c.cross_attention_layers or range(3, 40, 5)), parts.mlp(base)
    own = parts.attention(base, norms=parts.head_norms(base), name="cross_attn")
    gates = Tensors({"cross_attn_attn_gate": (1,), "cross_attn_mlp_gate": (1,)})
    crossed = dataclasses.replace(parts.pre_norm(base, _uncached(own), mlp), after=(gates,))
    usual = parts.pre_norm(base, parts.attention(base), mlp)
    made = tuple(crossed if index in crossing else usual for index in range(base.layers))
    tree = parts.decoder(base, made)
    rows = Embedding(base.vocab_size + 8, base.hidden_size, name="embed_tokens")
    return dataclasses.replace(tree, stack=dataclasses.replace(tree.stack, embedding=rows))


def _uncached(attention: Attention, **changes: Any) -> UncachedAttention:
    fields = {each.name: getattr(attention, each.name) for each in dataclasses.fields(attention)}
    return UncachedAttention(**{**fields, **changes})


def gemma3n(c: Fields) -> Part:
    """Embeddings per layer, four alternative residual streams, and upper layers that read the cache of lower ones."""
    hidden, small, layers = c.hidden_size, c.hidden_size_per_layer_input, c.num_hidden_layers
    inner, streams, first_shared = c.intermediate_size, c.altup_num_inputs, layers - c.num_kv_shared_layers
    widths = tuple(inner[:layers]) if isinstance(inner, list) else (inner,) * layers
    base, norms, bias = sizes(c), parts.head_norms(sizes(c)), bool(c.attention_bias)
    of_streams = _gemma3n_streams(base, small, streams, c.laurel_rank)
    before_mixer, after_mixer, before_mlp, after_mlp = (Norm(hidden, EPS, name=name) for name in SANDWICH)

    def layer(kind: tuple[int | None, int, bool]) -> Layer:
        window, width, reads_lower = kind
        own = parts.attention(base, norms=norms, bias=bias, window=window)
        if reads_lower:
            queries = dataclasses.replace(own.qkv, outputs={"q_proj": own.qkv.outputs["q_proj"]})
            own = _uncached(own, qkv=queries, k_norm=None)
        mlp = parts.mlp(base, activation="gelu_tanh_gated", inner=width)
        return Layer((before_mixer,), (own,), (after_mixer, before_mlp), mlp, (after_mlp, *of_streams))

    shared = [index >= first_shared for index in range(layers)]
    kinds = zip(windows(c, every(5)), widths, shared, strict=True)
    before = (
        Tensors({"weight": (c.vocab_size_per_layer_input, small * layers)}, name="embed_tokens_per_layer"),
        Linear({"per_layer_model_projection": small * layers}, hidden),
        Norm(small, EPS, name="per_layer_projection_norm"),
        *(
            Tensors({f"{index}.weight": (hidden, hidden) for index in range(streams - 1)}, name=name)
            for name in ("altup_projections", "altup_unembed_projections")
        ),
    )
    return parts.decoder(base, alike(kinds, layer), before=before)


def _gemma3n_streams(base: Sizes, small: int, streams: int, rank: int) -> tuple[Part, ...]:
    hidden = base.hidden_size
    altup = (
        Tensors({"correct_output_scale": (hidden,)}),
        Linear({"correction_coefs": streams, "prediction_coefs": streams**2}, streams),
        Linear({"modality_router": streams}, hidden),
        Norm(hidden, EPS, name="router_norm"),
    )
    laurel = (
        Linear({"linear_left": rank}, hidden),
        Linear({"linear_right": hidden}, rank),
        Norm(hidden, EPS, name="post_laurel_norm"),
    )
    return (
        Group(altup, name="altup"),
        Group(laurel, name="laurel"),
        Linear({"per_layer_input_gate": small}, hidden),
        Linear({"per_layer_projection": hidden}, small),
        Norm(hidden, EPS, name="post_per_layer_input_norm"),
    )


_BIGCODE_NAMES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}  # fmt: skip
APERTUS = Family("apertus", apertus, common(131072, 4096, 14336, 32, 32, None, 65536, hidden_act="xielu"))
ARCEE = Family("arcee", arcee, common(32000, 2560, 18432, 32, 32, None, 4096, mlp_bias=False))
EXAONE4 = Family(
    "exaone4",
    exaone4,
    common(102400, 4096, 16384, 32, 32, 32, 2048, sliding_window=4096, sliding_window_pattern=4),
)
GEMMA = Family("gemma", gemma, common(256000, 3072, 24576, 28, 16, 16, 8192, head_dim=256, tie_word_embeddings=True))
GEMMA3N = Family(
    "gemma3n_text", gemma3n,
    common(
        262400, 2048, 16384, 35, 8, 2, 32768, head_dim=256, tie_word_embeddings=True, sliding_window=512,
        hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, altup_num_inputs=4, laurel_rank=64,
        num_kv_shared_layers=15,
    ),
)  # fmt: skip
GPT_BIGCODE = Family(
    "gpt_bigcode",
    gpt_bigcode,
    common(50257, 768, 3072, 12, 12, None, 1024, n_inner=None, multi_query=True, tie_word_embeddings=True),
    _BIGCODE_NAMES,
    weights=gpt2.ARCHITECTURE.weights,
)
HUNYUAN = Family("hunyuan_v1_dense", hunyuan, common(290943, 4096, 11008, 32, 32, None, 2048))
JAIS2 = Family("jais2", nemotron, common(150272, 3328, 26624, 32, 26, None, 8192, attention_bias=True, mlp_bias=True))
MINICPM3 = Family(
    "minicpm3", minicpm3,
    common(
        73448, 2560, 6400, 62, 40, 40, 32768, tie_word_embeddings=True, mlp_bias=False, kv_lora_rank=256,
        q_lora_rank=768, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=None,
    ),
)  # fmt: skip
MINISTRAL = Family("ministral", ministral, common(32000, 4096, 14336, 32, 32, 8, 131072, sliding_window=4096))
MINISTRAL3 = Family(
    "ministral3", ministral3, common(131072, 4096, 14336, 34, 32, 8, 262144, head_dim=128, sliding_window=None)
)
MLLAMA = Family(
    "mllama_text_model", mllama, common(128256, 4096, 14336, 40, 32, 8, 131072, cross_attention_layers=None)
)
NEMOTRON = Family("nemotron", nemotron, common(256000, 6144, 24576, 32, 48, None, 4096, mlp_bias=False))
OLMO = Family("olmo", olmo, common(50304, 4096, 11008, 32, 32, None, 2048))
OLMO3 = Family("olmo3", olmo3, common(50304, 4096, 11008, 32, 32, None, 2048, sliding_window=4096))
SEED_OSS = Family(
    "seed_oss", seed_oss,
    common(
        155136, 4096, 27648, 64, 80, 8, 524288, head_dim=128, attention_bias=True, attention_out_bias=False,
        mlp_bias=False,
    ),
)  # fmt: skip
