"""Small random models of classes that transformers does not have, computed by formulas of their published code.

`Reference` behaves as a model of transformers does in tests: it has parameters by the names of published checkpoints,
can be saved, and returns logits. The functions that compute are plain torch operators, without a cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Fields = dict[str, Any]
Weights = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class Family(NamedTuple):
    """`defaults`: of the fields of its configuration. `shapes(fields)`: of its weights, by their published names.

    `compute(fields, weights, tokens)`: the logits of one sequence. `embedding`: the name of that weight.
    """

    name: str
    defaults: Fields
    shapes: Callable[[Fields], Shapes]
    compute: Callable[[Fields, Weights, Tensor], Tensor]
    embedding: str = "model.embed_tokens.weight"


class Reference(nn.Module):
    """A model of a family, in float32."""

    def __init__(self, family: Family, fields: Fields) -> None:
        super().__init__()
        self.family, self.fields, self.config = family, fields, SimpleNamespace(**fields)
        for name, shape in family.shapes(fields).items():
            values = torch.randn(shape) * fields["initializer_range"]
            self.register_parameter(name.replace(".", "/"), nn.Parameter(values, requires_grad=False))

    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> Reference:
        fields = json.loads((folder / "config.json").read_text())
        model = cls(FAMILIES[fields["model_type"]], fields)
        stored = load_file(folder / "model.safetensors")
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])
        return model

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name.replace("/", "."), parameter) for name, parameter in super().named_parameters(*args, **options))

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=dict(self.named_parameters())[self.family.embedding])

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        logits = self.family.compute(self.fields, dict(self.named_parameters()), input_ids[0])
        return SimpleNamespace(logits=logits.unsqueeze(0))

    def save_pretrained(self, folder: Path) -> None:
        save_file(
            {name: parameter.contiguous() for name, parameter in self.named_parameters()},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps(self.fields))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def rotated(x: Tensor, theta: float, dims: int) -> Tensor:
    """x [T, heads, dim], of which the first `dims` dimensions are rotated, in pairs half of them apart."""
    frequencies = theta ** -(torch.arange(0, dims, 2) / dims)
    angles = torch.outer(torch.arange(len(x)).float(), frequencies).unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., : dims // 2], x[..., dims // 2 : dims]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., dims:]), -1)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Causal attention of q [T, heads, dim] to k and v [T, KV heads, dim]: [T, heads · dim]. `cap`: of scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = cap(torch.einsum("qhd,khd->hqk", q, k).float() * scale)
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).to(v.dtype), v).flatten(1)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activate: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    return F.linear(activate(F.linear(x, gate)) * F.linear(x, up), down)


def mixed(x: Tensor, ids: Tensor, weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """For each token, the sum of what its experts `ids` [T, K] make of it, by their `weights` [T, K]."""
    rows = [
        sum(factor * expert(int(expert_index), row) for expert_index, factor in zip(chosen, factors, strict=True))
        for row, chosen, factors in zip(x, ids, weights.to(x.dtype), strict=True)
    ]
    return torch.stack(rows)  # type: ignore[arg-type]


def _bailing_shapes(c: Fields) -> Shapes:
    hidden, dim, heads, keys = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    rows = (heads + 2 * keys) * dim
    shapes: Shapes = {
        "model.word_embeddings.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (c["vocab_size"], hidden),
    }

    def mlp(name: str, inner: int) -> Shapes:
        up = dict.fromkeys((f"{name}.gate_proj.weight", f"{name}.up_proj.weight"), (inner, hidden))
        return {**up, f"{name}.down_proj.weight": (hidden, inner)}

    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= dict.fromkeys(
            (f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"), (hidden,)
        )
        shapes |= {f"{prefix}.attention.query_key_value.weight": (rows, hidden)}
        shapes |= {f"{prefix}.attention.query_key_value.bias": (rows,)} if c["use_qkv_bias"] else {}
        shapes |= {f"{prefix}.attention.dense.weight": (hidden, heads * dim)}
        if c.get("use_qk_norm"):
            norms = (f"{prefix}.attention.{name}_layernorm.weight" for name in ("query", "key"))
            shapes |= dict.fromkeys(norms, (dim,))
        if layer < c["first_k_dense_replace"]:
            shapes |= mlp(f"{prefix}.mlp", c["intermediate_size"])
            continue
        shapes |= {f"{prefix}.mlp.gate.weight": (c["num_experts"], hidden)}
        shapes |= {f"{prefix}.mlp.gate.expert_bias": (c["num_experts"],)} if "score_function" in c else {}
        for expert in range(c["num_experts"]):
            shapes |= mlp(f"{prefix}.mlp.experts.{expert}", c["moe_intermediate_size"])
        if c["num_shared_experts"]:
            shapes |= mlp(f"{prefix}.mlp.shared_experts", c["moe_intermediate_size"] * c["num_shared_experts"])
    return shapes


def _bailing(c: Fields, w: Weights, tokens: Tensor) -> Tensor:
    """modeling_bailing_moe.py and modeling_bailing_moe_v2.py of github.com/inclusionAI/Ling and Ling-V2."""
    dim, heads, keys, eps = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    rotary = int(dim * c.get("partial_rotary_factor", 1.0))

    def feed(x: Tensor, name: str) -> Tensor:
        return gated(x, *(w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")))

    x = w["model.word_embeddings.weight"][tokens]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        y = rms_norm(x, w[f"{prefix}.input_layernorm.weight"], eps)
        fused = F.linear(
            y, w[f"{prefix}.attention.query_key_value.weight"], w.get(f"{prefix}.attention.query_key_value.bias")
        )
        q, k, v = fused.view(len(tokens), -1, dim).split([heads, keys, keys], 1)
        if c.get("use_qk_norm"):
            q = rms_norm(q, w[f"{prefix}.attention.query_layernorm.weight"], eps)
            k = rms_norm(k, w[f"{prefix}.attention.key_layernorm.weight"], eps)
        q, k = rotated(q, c["rope_theta"], rotary), rotated(k, c["rope_theta"], rotary)
        x = x + F.linear(attended(q, k, v, dim**-0.5), w[f"{prefix}.attention.dense.weight"])
        y = rms_norm(x, w[f"{prefix}.post_attention_layernorm.weight"], eps)
        if layer < c["first_k_dense_replace"]:
            x = x + feed(y, f"{prefix}.mlp")
            continue
        ids, weights = _bailing_route(c, w, f"{prefix}.mlp.gate", y)
        out = mixed(y, ids, weights, lambda expert, row, name=f"{prefix}.mlp": feed(row, f"{name}.experts.{expert}"))
        x = x + out + (feed(y, f"{prefix}.mlp.shared_experts") if c["num_shared_experts"] else 0)
    return F.linear(rms_norm(x, w["model.norm.weight"], eps), w["lm_head.weight"])


def _bailing_route(c: Fields, w: Weights, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    logits, used = F.linear(x.float(), w[f"{name}.weight"].float()), c["num_experts_per_tok"]
    if "score_function" not in c:
        best = logits.softmax(-1).topk(used)
        return best.indices, best.values / best.values.sum(-1, keepdim=True) if c["norm_topk_prob"] else best.values
    scores = logits.sigmoid()
    groups = (scores + w[f"{name}.expert_bias"].float()).view(len(x), c["n_group"], -1)
    kept = groups.topk(2).values.sum(-1).topk(c["topk_group"]).indices
    left = torch.full_like(groups, -torch.inf).scatter(1, kept.unsqueeze(-1).expand(-1, -1, groups.shape[2]), 0.0)
    ids = (groups + left).flatten(1).topk(used).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) * c["routed_scaling_factor"]


def _xverse_shapes(c: Fields) -> Shapes:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    dim = hidden // c["num_attention_heads"]
    shapes: Shapes = {"model.norm.weight": (hidden,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (c["vocab_size"], hidden))
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norms = (f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight")
        shapes |= dict.fromkeys(norms, (hidden,))
        shapes |= dict.fromkeys((f"{prefix}.self_attn.{name}_proj.weight" for name in "qo"), (hidden, hidden))
        keys = (c["num_key_value_heads"] * dim, hidden)
        shapes |= dict.fromkeys((f"{prefix}.self_attn.{name}_proj.weight" for name in "kv"), keys)
        mlps = [(f"{prefix}.mlp", inner)]
        if c["num_experts"]:
            shapes |= {f"{prefix}.mlp.router.weight": (c["num_experts"], hidden)}
            mlps = [(f"{prefix}.mlp.experts.{expert}", inner) for expert in range(c["num_experts"])]
            mlps += [(f"{prefix}.mlp.shared_experts", inner * c["num_shared_experts"])]
        for name, size in mlps:
            shapes |= dict.fromkeys((f"{name}.gate_proj.weight", f"{name}.up_proj.weight"), (size, hidden))
            shapes |= {f"{name}.down_proj.weight": (hidden, size)}
    return shapes


def _xverse(c: Fields, w: Weights, tokens: Tensor) -> Tensor:
    """xverse_moe.py of SGLang, and xverse.py of vLLM for models without experts."""
    heads, keys, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    dim = c["hidden_size"] // heads

    def feed(x: Tensor, name: str) -> Tensor:
        return gated(x, *(w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")))

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        y = rms_norm(x, w[f"{prefix}.input_layernorm.weight"], eps)
        q, k, v = (
            F.linear(y, w[f"{prefix}.self_attn.{name}_proj.weight"]).view(len(x), count, dim)
            for name, count in (("q", heads), ("k", keys), ("v", keys))
        )
        out = attended(rotated(q, c["rope_theta"], dim), rotated(k, c["rope_theta"], dim), v, dim**-0.5)
        x = x + F.linear(out, w[f"{prefix}.self_attn.o_proj.weight"])
        y, name = rms_norm(x, w[f"{prefix}.post_attention_layernorm.weight"], eps), f"{prefix}.mlp"
        if not c["num_experts"]:
            x = x + feed(y, name)
            continue
        best = F.linear(y, w[f"{name}.router.weight"]).float().softmax(-1).topk(c["moe_top_k"])
        weights = best.values / best.values.sum(-1, keepdim=True) if c["norm_topk_prob"] else best.values
        routed = mixed(y, best.indices, weights, lambda number, row, name=name: feed(row, f"{name}.experts.{number}"))
        x = x + routed + feed(y, f"{name}.shared_experts")
    return F.linear(rms_norm(x, w["model.norm.weight"], eps), w["lm_head.weight"])


_XVERSE: Fields = {
    "architectures": ["XverseForCausalLM"],
    "model_type": "xverse",
    "rope_theta": 600.0,
    "rms_norm_eps": 1e-6,
    "num_experts": 8,
    "moe_top_k": 3,
    "num_shared_experts": 2,
    "norm_topk_prob": False,
}
_BAILING: Fields = {
    "architectures": ["BailingMoeForCausalLM"],
    "model_type": "bailing_moe",
    "rope_theta": 600.0,
    "rms_norm_eps": 1e-6,
    "use_qkv_bias": False,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
}
_EMBEDDINGS = "model.word_embeddings.weight"


# By model types.
def _grok_shapes(c: Fields) -> Shapes:
    hidden, dim = c["hidden_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes: Shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (c["vocab_size"], hidden))
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.{name}_norm.weight": (hidden,) for name in ("pre_attn", "post_attn", "pre_moe", "post_moe")
        }
        rows = {"q": queries, "k": keys, "v": keys}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (size, hidden) for name, size in rows.items()}
        shapes |= {f"{prefix}.self_attn.o_proj.weight": (hidden, queries)}
        shapes |= {f"{prefix}.block_sparse_moe.gate.weight": (c["num_local_experts"], hidden)}
        if c["residual_moe"]:
            inner = c["intermediate_size"]
            shapes |= {f"{prefix}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes |= {f"{prefix}.mlp.down_proj.weight": (hidden, inner)}
        for expert in range(c["num_local_experts"]):
            name, inner = f"{prefix}.block_sparse_moe.experts.{expert}", c["moe_intermediate_size"]
            shapes |= {f"{name}.w1.weight": (inner, hidden), f"{name}.w3.weight": (inner, hidden)}
            shapes |= {f"{name}.w2.weight": (hidden, inner)}
    return shapes


def _grok(c: Fields, w: Weights, tokens: Tensor) -> Tensor:
    """grok.py of SGLang, with its router (moe/router.py) and the temperature of its Triton attention."""
    dim, heads, keys, eps = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    gelu = partial(F.gelu, approximate="tanh")
    positions = torch.arange(len(tokens)).float()
    longer = torch.log2(positions.clamp(min=1.0)) / torch.log2(torch.tensor(float(c["attn_temperature_len"])))
    temperature = torch.where(positions > c["attn_temperature_len"], longer, 1.0)

    def capped(x: Tensor, field: str) -> Tensor:
        return c[field] * torch.tanh(x / c[field])

    def cap(scores: Tensor) -> Tensor:
        return capped(scores, "attn_logit_softcapping") * temperature[:, None]

    def feed(x: Tensor, prefix: str) -> Tensor:
        logits = F.linear(x, w[f"{prefix}.block_sparse_moe.gate.weight"]).float()
        weights = capped(logits, "router_logit_softcapping").softmax(-1)
        weights, ids = weights.topk(c["num_experts_per_tok"], -1)

        def expert(number: int, row: Tensor) -> Tensor:
            name = f"{prefix}.block_sparse_moe.experts.{number}"
            return gated(row, *(w[f"{name}.{part}.weight"] for part in ("w1", "w3", "w2")), gelu)

        routed = mixed(x, ids, weights, expert)
        if not c["residual_moe"]:
            return routed
        dense = gated(x, *(w[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")), gelu)
        return (dense + routed) / 1.4142135623730951

    x = w["model.embed_tokens.weight"][tokens] * c["embedding_multiplier_scale"]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norms = {name: w[f"{prefix}.{name}_norm.weight"] for name in ("pre_attn", "post_attn", "pre_moe", "post_moe")}
        read = rms_norm(x, norms["pre_attn"], eps)
        rows = (F.linear(read, w[f"{prefix}.self_attn.{name}_proj.weight"]) for name in "qkv")
        q, k, v = (each.unflatten(-1, (-1, dim)) for each in rows)
        assert (q.shape[1], k.shape[1]) == (heads, keys)
        q, k = rotated(q, c["rope_theta"], dim), rotated(k, c["rope_theta"], dim)
        mixed_tokens = F.linear(attended(q, k, v, dim**-0.5, cap), w[f"{prefix}.self_attn.o_proj.weight"])
        x = x + rms_norm(mixed_tokens, norms["post_attn"], eps)
        x = x + rms_norm(feed(rms_norm(x, norms["pre_moe"], eps), prefix), norms["post_moe"], eps)
    logits = F.linear(rms_norm(x, w["model.norm.weight"], eps), w["lm_head.weight"]) * c["output_multiplier_scale"]
    return capped(logits, "final_logit_softcapping")


_GROK: Fields = {
    "architectures": ["Grok1ForCausalLM"],
    "model_type": "git",  # as it is published
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "residual_moe": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_type": "original",
    "scaling_factor": 16.0,
    "attn_logit_softcapping": 1.5,
    "router_logit_softcapping": 0.7,
    "final_logit_softcapping": 5.0,
    "attn_temperature_len": 6,
    "embedding_multiplier_scale": 3.0,
    "output_multiplier_scale": 0.5,
    "sliding_window_size": -1,
    "global_attn_every_n": 1,
}
FAMILIES: dict[str, Family] = {
    "git": Family("Grok1ForCausalLM", _GROK, _grok_shapes, _grok),
    "bailing_moe": Family("BailingMoeForCausalLM", _BAILING, _bailing_shapes, _bailing, _EMBEDDINGS),
    "xverse": Family("XverseForCausalLM", _XVERSE, _xverse_shapes, _xverse),
    "bailing_moe_v2": Family(
        "BailingMoeV2ForCausalLM",
        {
            **_BAILING,
            "architectures": ["BailingMoeV2ForCausalLM"],
            "model_type": "bailing_moe_v2",
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
        },
        _bailing_shapes,
        _bailing,
        _EMBEDDINGS,
    ),
}


def fields_of(kind: str, fields: Fields) -> Fields:
    return {**FAMILIES[kind].defaults, **fields}


def reference(kind: str, **fields: Any) -> Reference:
    """A random model of a model type. `given`: fields of its configuration."""
    return Reference(FAMILIES[kind], fields_of(kind, fields))
