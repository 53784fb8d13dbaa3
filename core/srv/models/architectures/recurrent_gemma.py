"""RecurrentGemma: the facts of a decoder whose layers have a gated linear recurrence, or attention to a window.

Torch-free; `recurrent_gemma_layers` computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import decoder_config, soft_cap
from srv.models.architectures.hybrid_config import HybridConfig
from srv.models.architectures.op_uses import ADD_NORM, GELU, OUTPUT, mlp_matrices, rotary
from srv.models.blueprint import NORM, OpUse
from srv.models.derive import Matrix, ModelOps
from srv.models.formats.stored_weights import StoredWeights
from srv.models.layers.recurrent_sizes import LinearRecurrenceSizes
from srv.models.layers.rope_config import UnsupportedConfig, refuse_unless

KINDS = ("recurrent", "attention")


@dataclass(frozen=True)
class RecurrentGemmaConfig(HybridConfig):
    """`channels`: those of the recurrence. `width`: the tokens that its convolution reads."""

    channels: int
    width: int

    @property
    def recurrent(self) -> LinearRecurrenceSizes | None:
        """None if all layers attend."""
        return None if all(self.attends) else LinearRecurrenceSizes(self.channels, self.width)

    @property
    def parameters(self) -> int:
        """The matrices, their biases, norms, convolutions, and the gates and decays of the recurrence."""
        sizes, hidden, channels = self.decoder, self.decoder.hidden_size, self.channels
        attention = self.decoder.qkv_size * sizes.qkv_bias + hidden
        gates = 2 * channels * (channels // sizes.heads + 1)
        recurrence = 2 * channels + hidden + channels * (self.width + 1) + gates + channels
        attending = sum(self.attends)
        mixers = attending * attention + (sizes.layers - attending) * recurrence
        mlps = sizes.layers * (2 * sizes.intermediate_size + hidden)
        return sizes.embedding_parameters + self.projection_params + mixers + mlps + (2 * sizes.layers + 1) * hidden

    @property
    def projection_params(self) -> int:
        sizes, hidden, attending = self.decoder, self.decoder.hidden_size, sum(self.attends)
        attention = hidden * (self.decoder.qkv_size + sizes.heads * sizes.head_dim)
        mixers = attending * attention + (sizes.layers - attending) * 3 * hidden * self.channels
        return mixers + sizes.layers * 3 * hidden * sizes.intermediate_size

    def model_ops(self, dtype: str) -> ModelOps:
        """Norms are computed in float32, and those with an addition are not fused in other dtypes."""
        sizes, wide = self.decoder, "float32"
        hidden = {"dim": sizes.hidden_size}
        ops = [OpUse(NORM, hidden, wide, own="torch's operator")]
        if dtype == wide:
            ops.append(OpUse(ADD_NORM, hidden, wide))
        ops += rotary(sizes)
        if not all(self.attends):
            ops.append(OpUse("causal_conv1d", {"channels": self.channels, "width": self.width}))
            ops.append(OpUse("gated_linear_recurrence", {"channels": self.channels}))
        ops.append(OpUse(GELU, {"dim": sizes.intermediate_size}, own="torch's operators"))
        return ModelOps(tuple(ops), tuple(self._matrices()))

    def _matrices(self) -> Iterator[Matrix]:
        """Those of linear layers, in the order of the checkpoint's layers."""
        sizes, hidden = self.decoder, self.decoder.hidden_size
        yield Matrix(("model.embed_tokens",), hidden, sizes.vocab_size, embedding=True)
        for index, attends in enumerate(self.attends):
            prefix = f"model.layers.{index}"
            mixer = f"{prefix}.temporal_block"
            if attends:
                qkv = tuple(f"{mixer}.{name}_proj" for name in "qkv")
                yield Matrix(qkv, hidden, sizes.qkv_size, parts=sizes.qkv_parts)
                yield Matrix((f"{mixer}.o_proj",), sizes.heads * sizes.head_dim, hidden)
            else:
                yield Matrix((f"{mixer}.linear_x", f"{mixer}.linear_y"), hidden, 2 * self.channels)
                yield Matrix((f"{mixer}.linear_out",), self.channels, hidden)
            yield from mlp_matrices(f"{prefix}.mlp", hidden, sizes.intermediate_size)
        yield Matrix((OUTPUT,), hidden, sizes.vocab_size, tied=sizes.tied_embeddings)


def make_config(config: Mapping[str, Any]) -> RecurrentGemmaConfig:
    refuse_unless(config, {"hidden_activation": ("gelu_pytorch_tanh",), "embeddings_scale_by_sqrt_dim": (True,)})
    read = {**config, "intermediate_size": int(config["intermediate_size"]) // 2}  # is that of both inner layers
    base = decoder_config(read, reads=("partial_rotary_factor",))
    if base.rope.rope_type != "default":
        raise UnsupportedConfig(f"RoPE type {base.rope.rope_type!r} is not implemented for this architecture")
    attends, window = _attending(config["block_types"], base.layers), config["attention_window_size"]
    if window is None or window < 1:
        raise UnsupportedConfig(f"attention_window_size = {window!r} is not a number of tokens")
    channels = base.hidden_size if config["lru_width"] is None else int(config["lru_width"])
    if channels % base.heads:
        raise UnsupportedConfig(f"lru_width = {channels} is not a multiple of {base.heads} heads")
    decoder = base._replace(
        windows=(int(window),) * base.layers,
        qkv_bias=bool(config["attention_bias"]),
        output_bias=True,
        mlp_bias=True,
        embedding_multiplier=base.hidden_size**0.5,
        logits_soft_cap=soft_cap(config, "logits_soft_cap"),
    )
    return RecurrentGemmaConfig(decoder, attends, channels, int(config["conv1d_width"]))


def _attending(pattern: list[str], layers: int) -> tuple[bool, ...]:
    """Whether each layer has attention. `pattern`: the kinds of the first layers, which are repeated."""
    unknown = sorted(set(pattern) - set(KINDS))
    if unknown or not pattern:
        reason = f"contains the unknown {', '.join(map(repr, unknown))}" if unknown else "is empty"
        raise UnsupportedConfig(f"block_types {reason}")
    attends = tuple(pattern[index % len(pattern)] == "attention" for index in range(layers))
    if not any(attends):
        raise UnsupportedConfig(f"block_types gives none of {layers} layers attention")
    return attends


ARCHITECTURE = Architecture(
    name="RecurrentGemmaForCausalLM",
    make_config=make_config,
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2560,
        "intermediate_size": 7680,
        "num_hidden_layers": 26,
        "num_attention_heads": 10,
        "num_key_value_heads": None,
        "max_position_embeddings": 8192,
        "lru_width": None,
        "attention_window_size": 2048,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "hidden_activation": "gelu_pytorch_tanh",
        "block_types": ("recurrent", "recurrent", "attention"),
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    layers="srv.models.architectures.recurrent_gemma_layers:RecurrentGemma",
    model_type="recurrent_gemma",
    weights=StoredWeights(names={"model.final_norm": "model.norm"}, components={"mlp_block": "mlp"}),
)
