"""Small random models of classes that transformers lacks: config.json and tensors as published, and what they compute.

`logits` is written from the formulas of the published code (modeling_exaone.py, modeling_internlm2.py,
modeling_baichuan.py of Baichuan2-7B and -13B, modeling_chatglm.py of chatglm3-6b and glm-4-9b, modeling_mimo.py and
modeling_solar.py in the folders of the checkpoints): plain float32, one sequence, no cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KEYS, DIM = 98, 96, 80, 3, 6, 2, 16
Weights: TypeAlias = Mapping[str, Tensor]
Rows: TypeAlias = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Published:
    """`config`: of config.json. The others are names of tensors; those of a layer are below `layer`, with its number.

    `norms`: before attention and MLP. `qkv`: the projections, and how their rows become queries, keys and values.
    `gate_up`: two matrices, or one with the gate first. `biases`: matrices that have one. `rotate`: None with ALiBi.
    """

    config: dict[str, Any]
    embedding: str
    layer: str
    last_norm: str
    head: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    divide: Callable[[Tensor, int], Rows]
    output: str
    gate_up: tuple[str, ...]
    down: str
    kv_heads: int = KEYS
    eps: float = 1e-6
    biases: tuple[str, ...] = ()
    rotate: Callable[[Tensor], Tensor] | None = None
    unit_head: bool = False
    window: int | None = None
    skips: Mapping[str, Any] = field(default_factory=dict)
    unread: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        rows = (HEADS + 2 * self.kv_heads) * DIM
        split = {"q": HEADS * DIM, "k": self.kv_heads * DIM, "v": self.kv_heads * DIM}.values()
        matrices = {
            **dict(zip(self.qkv, ((size, HIDDEN) for size in (split if len(self.qkv) == 3 else (rows,))), strict=True)),
            self.output: (HIDDEN, HEADS * DIM),
            **{name: (2 * INNER // len(self.gate_up), HIDDEN) for name in self.gate_up},
            self.down: (HIDDEN, INNER),
        }
        shapes: dict[str, tuple[int, ...]] = {self.embedding: (VOCAB, HIDDEN), self.last_norm: (HIDDEN,)}
        for layer in range(LAYERS):
            prefix = self.layer.format(layer)
            shapes |= {f"{prefix}.{name}.weight": shape for name, shape in matrices.items()}
            shapes |= {f"{prefix}.{name}.bias": matrices[name][:1] for name in self.biases}
            shapes |= {f"{prefix}.{name}.weight": (HIDDEN,) for name in self.norms}
        return shapes if self.tied else {**shapes, self.head: (VOCAB, HIDDEN)}

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings"))

    def weights(self) -> dict[str, Tensor]:
        """Norms around 1, biases around 0, and matrices with which attention and every bias change the logits."""
        generator, weights = torch.Generator().manual_seed(0), {}
        for name, shape in self.shapes().items():
            around = 0.0 if len(shape) > 1 or name.endswith("bias") else 1.0
            weights[name] = torch.randn(shape, generator=generator) * (0.25 if len(shape) > 1 else 0.3) + around
        return weights

    def save(self, folder: Path, weights: Weights) -> None:
        (folder / "config.json").write_text(json.dumps(self.config))
        unread = {name: torch.ones(shape) for name, shape in self.unread.items()}
        save_file({**weights, **unread}, folder / "model.safetensors", {"format": "pt"})

    def logits(self, weights: Weights, tokens: Tensor) -> Tensor:
        x, kept = weights[self.embedding][tokens], dict[str, Tensor]()
        for layer in range(LAYERS):
            x = self._skipped(layer, x, kept)
            linear = partial(_linear, weights, self.layer.format(layer))
            first, second = (weights[f"{self.layer.format(layer)}.{name}.weight"] for name in self.norms)
            x = x + linear(self.output, self._attended(linear, _rms(x, first, self.eps)))
            read = _rms(x, second, self.eps)
            gate, up = torch.cat([linear(name, read) for name in self.gate_up], -1).chunk(2, -1)
            x = x + linear(self.down, F.silu(gate) * up)
        head = weights[self.embedding if self.tied else self.head]
        head = head / head.norm(dim=1, keepdim=True) if self.unit_head else head
        return _rms(x, weights[self.last_norm], self.eps) @ head.T

    def _attended(self, linear: Callable[[str, Tensor], Tensor], x: Tensor) -> Tensor:
        q, k, v = self.divide(torch.cat([linear(name, x) for name in self.qkv], -1), self.kv_heads)
        if self.rotate is not None:
            q, k = self.rotate(q), self.rotate(k)
        k, v = (tensor.repeat_interleave(HEADS // self.kv_heads, 1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        distance = torch.arange(len(x)).unsqueeze(1) - torch.arange(len(x))
        if self.rotate is None:
            scores = scores - torch.tensor(_slopes(HEADS)).view(-1, 1, 1) * distance
        hidden = (distance < 0) | (distance >= (self.window or len(x)))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v).flatten(1)

    def _skipped(self, layer: int, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
        """Solar: fields 1 and 2 list layers before which x is kept, 3 and 4 those before which it is mixed in."""
        for keep, read in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
            if layer in self.skips.get(keep, ()):
                kept[read] = x
        for read in ("bskcn_3", "bskcn_4"):
            if layer in self.skips.get(read, ()):
                share = self.skips["bskcn_tv"][1]
                x = kept[read] * share + x * (1 - share)
        return x


@dataclass(frozen=True)
class Computed:
    """A model with its weights, called as those of transformers are."""

    model: Published
    weights: Weights

    def __call__(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.model.logits(self.weights, input_ids[0]).unsqueeze(0))


def _linear(weights: Weights, prefix: str, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{prefix}.{name}.weight"], weights.get(f"{prefix}.{name}.bias"))


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _slopes(heads: int) -> list[float]:
    """ALiBi: a geometric series for a power of two of heads; else that of the power below, and of every other head of
    the power above."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]
    below = 1 << (heads.bit_length() - 1)
    return _slopes(below) + _slopes(2 * below)[0::2][: heads - below]


def in_turn(rows: Tensor, kv_heads: int) -> Rows:
    """[T, rows]: all queries, all keys, all values."""
    q, k, v = rows.unflatten(-1, (-1, DIM)).split([HEADS, kv_heads, kv_heads], 1)
    return q, k, v


def by_key_head(rows: Tensor, kv_heads: int) -> Rows:
    """[T, rows]: for each key head, its queries, its key, its value (InternLM 2)."""
    groups = rows.unflatten(-1, (kv_heads, HEADS // kv_heads + 2, DIM))
    return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]


def halves(x: Tensor, theta: float = 10000.0) -> Tensor:
    """RoPE whose pairs are half a head apart."""
    angles = _angles(len(x), DIM, theta)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def neighbours(x: Tensor, theta: float) -> Tensor:
    """RoPE of the first half of each head, whose pairs are adjacent (ChatGLM)."""
    rotated, rest = x.chunk(2, -1)
    angles = _angles(len(x), DIM // 2, theta)
    pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((torch.view_as_real(turned).flatten(-2), rest), -1)


def _angles(positions: int, dims: int, theta: float) -> Tensor:
    return torch.outer(torch.arange(positions).float(), theta ** (-torch.arange(0, dims, 2).float() / dims))


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
GROUPED = {"num_key_value_heads": KEYS}
OF_LLAMA: dict[str, Any] = {
    "embedding": "model.embed_tokens.weight",
    "layer": "model.layers.{}",
    "last_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "norms": ("input_layernorm", "post_attention_layernorm"),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "divide": in_turn,
    "output": "self_attn.o_proj",
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": "mlp.down_proj",
    "rotate": halves,
}


def named(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    code = {"AutoModelForCausalLM": f"modeling_{model_type}.{architecture}"}
    return {"architectures": [architecture], "model_type": model_type, "auto_map": code, **fields}


def exaone(**fields: Any) -> Published:
    sizes = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    config = {"num_layers": LAYERS, "activation_function": "silu", "layer_norm_epsilon": 1e-5, "rope_theta": 500.0}
    return Published(
        named("ExaoneForCausalLM", "exaone", **{**sizes, **GROUPED, **config, **fields}),
        embedding="transformer.wte.weight",
        layer="transformer.h.{}",
        last_norm="transformer.ln_f.weight",
        head="lm_head.weight",
        norms=("ln_1", "ln_2"),
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        divide=in_turn,
        output="attn.attention.out_proj",
        gate_up=("mlp.c_fc_0", "mlp.c_fc_1"),
        down="mlp.c_proj",
        eps=1e-5,
        rotate=partial(halves, theta=500.0),
    )


def internlm2(bias: bool = False) -> Published:
    scaling = {"type": "dynamic", "factor": 2.0}  # beyond the context alone
    config = {"bias": bias, "rms_norm_eps": 1e-5, "rope_scaling": scaling, "rope_theta": 500.0}
    return Published(
        named("InternLM2ForCausalLM", "internlm2", **SIZES, **GROUPED, **config),
        embedding="model.tok_embeddings.weight",
        layer="model.layers.{}",
        last_norm="model.norm.weight",
        head="output.weight",
        norms=("attention_norm", "ffn_norm"),
        qkv=("attention.wqkv",),
        divide=by_key_head,
        output="attention.wo",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        eps=1e-5,
        biases=("attention.wqkv", "attention.wo") if bias else (),
        rotate=partial(halves, theta=500.0),
    )


def internlm3(qkv_bias: bool = False, bias: bool = True) -> Published:
    biases = OF_LLAMA["qkv"] if qkv_bias else ()
    biases = (*biases, "self_attn.o_proj", *OF_LLAMA["gate_up"], "mlp.down_proj") if bias else biases
    config = {"qkv_bias": qkv_bias, "bias": bias, "head_dim": DIM, "rms_norm_eps": 1e-6}
    return Published(
        named("InternLM3ForCausalLM", "internlm3", **SIZES, **GROUPED, **config), **{**OF_LLAMA, "biases": biases}
    )


def baichuan(rotated: bool = True) -> Published:
    sizes = {name: value for name, value in SIZES.items() if rotated or name != "max_position_embeddings"}
    fused = {**OF_LLAMA, "qkv": ("self_attn.W_pack",), "kv_heads": HEADS, "rotate": halves if rotated else None}
    config = named("BaichuanForCausalLM", "baichuan", **sizes, model_max_length=256, rms_norm_eps=1e-6)
    return Published(config, **fused, unit_head=True)


def chatglm(architecture: str = "ChatGLMModel", **fields: Any) -> Published:
    sizes = {"padded_vocab_size": VOCAB, "hidden_size": HIDDEN, "ffn_hidden_size": INNER, "num_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "kv_channels": DIM, "seq_length": 256, "multi_query_group_num": KEYS}
    switches = {"multi_query_attention": True, "rmsnorm": True, "post_layer_norm": True, "original_rope": True}
    switches |= {"add_bias_linear": False, "add_qkv_bias": True, "apply_residual_connection_post_layernorm": False}
    other = {"layernorm_epsilon": 1e-5, "rope_ratio": 5, "tie_word_embeddings": False, "torch_dtype": "float32"}
    config = named(architecture, "chatglm", **{**sizes, **switches, **other, **fields})
    linear = ("self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h") if config["add_bias_linear"] else ()
    rotate = neighbours if config["original_rope"] else _first_half
    return Published(
        config,
        embedding="transformer.embedding.word_embeddings.weight",
        layer="transformer.encoder.layers.{}",
        last_norm="transformer.encoder.final_layernorm.weight",
        head="transformer.output_layer.weight",
        norms=("input_layernorm", "post_attention_layernorm"),
        qkv=("self_attention.query_key_value",),
        divide=in_turn,
        output="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        eps=1e-5,
        biases=("self_attention.query_key_value", *linear),
        rotate=partial(rotate, theta=50000.0),
        unread={"transformer.rotary_pos_emb.inv_freq": (DIM // 4,)},
    )


def _first_half(x: Tensor, theta: float) -> Tensor:
    """RoPE of the first half of each head, whose pairs are half of it apart."""
    (first, second), rest = x[..., : DIM // 2].chunk(2, -1), x[..., DIM // 2 :]
    angles = _angles(len(x), DIM // 2, theta)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def mimo() -> Published:
    """With a layer that predicts further tokens."""
    config = {"attention_bias": True, "head_dim": DIM, "rms_norm_eps": 1e-5, "rope_theta": 640.0}
    config |= {"num_nextn_predict_layers": 1, "use_sliding_window": False, "sliding_window": 32768}
    names = {"input_proj": (HIDDEN, 2 * HIDDEN), "token_layernorm": (HIDDEN,), "self_attn.q_proj": (HIDDEN, HIDDEN)}
    return Published(
        named("MiMoForCausalLM", "mimo", **SIZES, **GROUPED, **config),
        **{**OF_LLAMA, "biases": OF_LLAMA["qkv"], "rotate": partial(halves, theta=640.0), "eps": 1e-5},
        unread={f"model.mtp_layers.0.{name}.weight": shape for name, shape in names.items()},
    )


def solar() -> Published:
    """The first layer's input and that of the second are mixed into later ones."""
    skips = {"bskcn_1": [0, 1], "bskcn_2": [0], "bskcn_3": [1, 2, 16], "bskcn_4": [2], "bskcn_tv": [0.9, 0.8]}
    config = named("SolarForCausalLM", "solar", **SIZES, **GROUPED, **skips, sliding_window=7, rms_norm_eps=1e-5)
    return Published(config, **OF_LLAMA, eps=1e-5, window=7, skips=skips)


CASES: dict[str, Published] = {
    "exaone": exaone(),
    "exaone with the embedding as its output layer": exaone(tie_word_embeddings=True),
    "internlm2": internlm2(),
    "internlm2 with biases": internlm2(bias=True),
    "internlm3": internlm3(),
    "internlm3 with biases of queries, keys and values": internlm3(qkv_bias=True, bias=False),
    "baichuan": baichuan(),
    "baichuan with alibi": baichuan(rotated=False),
    "chatglm": chatglm(),
    "chatglm by its other name, with biases": chatglm("ChatGLMForConditionalGeneration", add_bias_linear=True),
    "chatglm with pairs in halves": chatglm(original_rope=False),
    "mimo": mimo(),
    "solar": solar(),
}
# One of each class, for tests of all native classes.
MODELS: dict[str, Published] = {
    "ExaoneForCausalLM": CASES["exaone"],
    "InternLM2ForCausalLM": CASES["internlm2"],
    "InternLM3ForCausalLM": CASES["internlm3"],
    "BaichuanForCausalLM": CASES["baichuan"],
    "ChatGLMModel": CASES["chatglm"],
    "MiMoForCausalLM": CASES["mimo"],
    "SolarForCausalLM": CASES["solar"],
}
