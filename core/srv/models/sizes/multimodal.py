"""Families with a vision tower beside their language model. The tower caches nothing."""

from __future__ import annotations

import math

from srv.models.sizes.blocks import two_layer_mlp
from srv.models.sizes.fields import Fields
from srv.models.sizes.mixture import llama4, qwen3_moe
from srv.models.sizes.parts import NOTHING, Part, linear, norm, norms, plain, stack


def _pair(value: int | list[int]) -> int:
    """The area of a patch or an image, which is a square if one size is given."""
    return math.prod(value) if isinstance(value, list) else value**2


def _qwen_block(hidden: int, mlp: Part) -> Part:
    own = linear("qkv", hidden, 3 * hidden, bias=True) + linear("proj", hidden, hidden, bias=True)
    return own.under("attn") + mlp.under("mlp") + norms(hidden, "norm1", "norm2", bias=True)


def qwen3_vl_moe(c: Fields) -> Part:
    text = c.part("text_config", "qwen3_vl_moe_text")
    tower = _qwen3_tower(c.part("vision_config", "qwen3_vl_moe_vision"))
    return tower.under("model.visual") + qwen3_moe(text, "model.language_model", c.tie_word_embeddings)


def _qwen3_tower(v: Fields) -> Part:
    """With features of several depths, each through a merger of its own."""
    hidden, inner, merged = v.hidden_size, v.intermediate_size, v.hidden_size * v.spatial_merge_size**2
    mlp = linear("linear_fc1", hidden, inner, bias=True) + linear("linear_fc2", inner, hidden, bias=True)
    last = linear("linear_fc1", merged, merged, bias=True) + linear("linear_fc2", merged, v.out_hidden_size, bias=True)
    tower = plain("patch_embed.proj", hidden, v.in_channels, v.temporal_patch_size, _pair(v.patch_size))
    tower += plain("patch_embed.proj.bias", hidden) + plain("pos_embed", v.num_position_embeddings, hidden)
    tower += stack("blocks", v.depth, lambda i: _qwen_block(hidden, mlp))
    tower += (norm("norm", hidden, bias=True) + last).under("merger")
    deep = norm("norm", merged, bias=True) + last
    return tower + stack("deepstack_merger_list", len(v.deepstack_visual_indexes), lambda i: deep)


def llama4_vision(c: Fields) -> Part:
    v, text = c.part("vision_config", "llama4_vision_model"), c.part("text_config", "llama4_text")
    hidden, inner = v.hidden_size, v.intermediate_size
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    block = sum((linear(f"self_attn.{name}", hidden, hidden, bias=True) for name in names), NOTHING)
    block += two_layer_mlp(v, "mlp", inner, "fc1", "fc2", bias=True)
    block += norms(hidden, "input_layernorm", "post_attention_layernorm", bias=True)
    positions = _pair(v.image_size) // _pair(v.patch_size) + 1
    tower = linear("patch_embedding.linear", v.num_channels * _pair(v.patch_size), hidden)
    tower += plain("class_embedding", hidden) + plain("positional_embedding_vlm", positions, hidden)
    tower += stack("model.layers", v.num_hidden_layers, lambda i: block)
    tower += norms(hidden, "layernorm_pre", "layernorm_post", bias=True)
    tower += linear("vision_adapter.mlp.fc1", inner, v.projector_input_dim)
    tower += linear("vision_adapter.mlp.fc2", v.projector_output_dim, v.projector_output_dim)
    projector = linear("multi_modal_projector.linear_1", v.vision_output_dim, text.hidden_size)
    return tower.under("vision_model") + projector + llama4(text, "language_model.model", text.tie_word_embeddings)
