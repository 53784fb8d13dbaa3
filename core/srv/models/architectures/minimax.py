"""MiniMax-Text-01: lightning attention in most layers, softmax attention in the others, and experts in all.

Each norm's result, times a constant, is the residual. Torch-free; `minimax_layers` computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import decoder_config, one_window
from srv.models.architectures.hybrid_config import ATTENTION, HybridConfig, attending, check_experts
from srv.models.architectures.op_uses import OUTPUT, layer_experts, mixture_matrices, mixture_ops, rotary
from srv.models.blueprint import NORM, OpUse
from srv.models.derive import Matrix, ModelOps
from srv.models.formats.stored_weights import StoredWeights
from srv.models.layers.moe_config import MoEConfig, Routing
from srv.models.layers.recurrent_sizes import ScanSizes

KINDS = (ATTENTION, "linear_attention")

_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # stored, but known from the sizes


class Factors(NamedTuple):
    """By which the residual (`kept`), and what is added to it, are multiplied."""

    kept: float
    added: float


@dataclass(frozen=True)
class MiniMaxConfig(HybridConfig):
    """`attends`: whether each layer has softmax attention. `moe`: the mixture of experts of all layers. `full`,
    `linear`, `mlp`: the factors after softmax attention, after lightning attention and after experts.
    """

    moe: MoEConfig
    full: Factors
    linear: Factors
    mlp: Factors

    @property
    def scan(self) -> ScanSizes:
        sizes = self.decoder
        return ScanSizes(sizes.heads, sizes.heads, sizes.head_dim, sizes.head_dim)

    @property
    def recurrent(self) -> ScanSizes | None:
        return None if all(self.attends) else self.scan

    def share(self, index: int) -> float:
        """That of `LightningAttention` in a layer."""
        return 1 - index / (self.decoder.layers - 1 + 1e-5) + 1e-5

    @property
    def parameters(self) -> int:
        """The matrices, norms and routers."""
        sizes, hidden = self.decoder, self.decoder.hidden_size
        recurrent = (sizes.layers - sum(self.attends)) * self.scan.inner
        layers = sizes.layers * (2 * hidden + self.moe.other_params(hidden))
        return sizes.embedding_parameters + self.projection_params + recurrent + layers + hidden

    @property
    def projection_params(self) -> int:
        sizes, hidden, attending = self.decoder, self.decoder.hidden_size, sum(self.attends)
        attention = 2 * hidden * (sizes.heads + sizes.kv_heads) * sizes.head_dim
        recurrent = 5 * hidden * self.scan.inner
        experts = sizes.layers * self.moe.projection_params(hidden)
        return experts + attending * attention + (sizes.layers - attending) * recurrent

    def model_ops(self, dtype: str) -> ModelOps:
        sizes, hidden = self.decoder, self.decoder.hidden_size
        ops = [OpUse(NORM, {"dim": hidden})]
        if not all(self.attends):
            if self.scan.inner != hidden:
                ops.append(OpUse(NORM, {"dim": self.scan.inner}))
            ops.append(OpUse("state_space_scan", self.scan.op_sizes))
        ops += [*rotary(sizes), *mixture_ops(self.moe)]
        experts = layer_experts([self.moe] * sizes.layers, hidden)
        return ModelOps(tuple(ops), tuple(self._matrices()), experts)

    def _matrices(self) -> Iterator[Matrix]:
        """Those of linear layers, in the order of the checkpoint's layers; not those of experts."""
        sizes, hidden, inner = self.decoder, self.decoder.hidden_size, self.scan.inner
        yield Matrix(("model.embed_tokens",), hidden, sizes.vocab_size, embedding=True)
        for index, attends in enumerate(self.attends):
            mixer = f"model.layers.{index}.self_attn"
            if attends:
                qkv = tuple(f"{mixer}.{name}_proj" for name in "qkv")
                yield Matrix(qkv, hidden, sizes.qkv_size, parts=sizes.qkv_parts)
                yield Matrix((f"{mixer}.o_proj",), inner, hidden)
            else:
                yield Matrix((f"{mixer}.qkv_proj",), hidden, 3 * inner)
                yield Matrix((f"{mixer}.output_gate",), hidden, inner)
                yield Matrix((f"{mixer}.out_proj",), inner, hidden)
            yield from mixture_matrices(self.moe, f"model.layers.{index}.mlp", hidden)
        yield Matrix((OUTPUT,), hidden, sizes.vocab_size, tied=sizes.tied_embeddings)


def make_config(config: Mapping[str, Any]) -> MiniMaxConfig:
    base = decoder_config(config, reads=("num_local_experts",))
    types = config["layer_types"]
    attends = attending([KINDS[i % 2] for i in range(base.layers)] if types is None else types, KINDS, base.layers)
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=True)
    moe = MoEConfig(int(config["num_local_experts"]), base.intermediate_size, routing)
    check_experts(moe)
    full, linear, mlp = (
        Factors(float(config[f"{name}_alpha_factor"]), float(config[f"{name}_beta_factor"]))
        for name in ("full_attn", "linear_attn", "mlp")
    )
    decoder = base._replace(windows=one_window(config, base.layers))
    return MiniMaxConfig(decoder, attends, moe, full, linear, mlp)


ARCHITECTURE = Architecture(
    name="MiniMaxForCausalLM",
    make_config=make_config,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "layer_types": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        **{f"{name}_{side}_factor": 1 for name in ("full_attn", "linear_attn", "mlp") for side in ("alpha", "beta")},
    },
    layers="srv.models.architectures.minimax_layers:MiniMax",
    weights=StoredWeights(
        components={"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
        unused=tuple(f"model.layers.*.self_attn.{name}" for name in _DECAYS),
    ),
)
