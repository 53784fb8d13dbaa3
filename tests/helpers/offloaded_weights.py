"""Models whose layers are in host memory, without an engine, and small checkpoints of every way to quantize them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bitsandbytes_weights
import fp8_weights
import mixed_weights
import mxfp4_weights
import packed_weights
import stored_orders
import torch
from gguf import GGMLQuantizationType as Kind
from latent_steps import Steps
from models_small import HOST, built, our_logits, small_model, write_gguf
from torch import Tensor

from srv.args.config import Config
from srv.args.groups.model import ModelArgs
from srv.args.groups.weights import WeightsArgs
from srv.models.base import CausalLM, NativeModel
from srv.models.layers.op_layer import op_layers
from srv.models.read import read_facts
from srv.planning.budget import loaded_bytes
from srv.planning.offload import host_layers
from srv.platform.streams import HostStream, Streams
from srv.specs import Latent
from srv.worker.offload import HostWeights

LAYERS = 3  # the fewest of which something is saved with two buffers
SIZES: dict[str, Any] = {"num_hidden_layers": LAYERS}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, **SIZES}


@dataclass(frozen=True)
class Case:
    """A checkpoint, or a GGUF file. `arguments`: of the server, beside its path. `ops`: those of quantized layers."""

    write: Callable[[Path], Path]
    ops: frozenset[str]
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _folder(write: Callable[[Path], Any], *ops: str, **arguments: Any) -> Case:
    def written(folder: Path) -> Path:
        write(folder)
        return folder

    return Case(written, frozenset(ops), arguments)


def _packed(form: str, kind: str = "llama", *ops: str, **fields: Any) -> Case:
    stored = packed_weights.FORMS[form]
    write = packed_weights.write_packed
    return _folder(lambda folder: write(folder, stored, kind=kind, **{**SIZES, **fields}), *(ops or ("linear_gguf",)))


def _fp8(form: str, kind: str = "llama", *ops: str, **fields: Any) -> Case:
    stored = fp8_weights.FORMS[form]
    write = fp8_weights.write_fp8
    return _folder(lambda folder: write(folder, stored, kind=kind, **{**SIZES, **fields}), *(ops or ("linear_fp8",)))


def _bits(form: str, *ops: str) -> Case:
    stored = bitsandbytes_weights.FORMS[form]
    return _folder(lambda folder: bitsandbytes_weights.write(folder, stored, **SIZES), *ops)


def _fused(kind: str, form: str, *ops: str, **fields: Any) -> Case:
    """Of an architecture whose matrices stay fused, as it stores them. `fields`: of its configuration."""

    def write(folder: Path) -> None:
        stored_orders.write_stored(folder, stored_orders.made(kind, **SIZES, **fields), stored_orders.stored_form(form))

    return _folder(write, *ops)


def _online(method: str, kind: str, *ops: str, **fields: Any) -> Case:
    return _folder(lambda folder: small_model(kind, **fields).save_pretrained(folder), *ops, torchao_config=method)


def _mixed(folder: Path) -> None:
    """Attention of packed integers, and MLPs in FP8 blocks, of which some end within a fused layer, or of int8."""
    floats, dense = mixed_weights.of_floats("block", block_structure=[64, 32]), mixed_weights.of_int8()
    layers = {"self_attn": mixed_weights.of_integers(), r"layers\.0\.mlp": floats, "mlp": dense}
    targets = {
        ("re:.*self_attn.*",): layers["self_attn"],
        (r"re:.*layers\.0\.mlp.*",): floats,
        (r"re:.*layers\.[12]\.mlp.*",): dense,
    }
    mixed_weights.write_mixed(folder, layers, mixed_weights.config_of(targets), **SIZES)


def _gguf(kinds: Callable[[str], Kind], arch: str = "llama") -> Case:
    def write(folder: Path) -> Path:
        wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, **SIZES}
        path = folder / "model.gguf"
        write_gguf(path, small_model(arch, **wide), arch, kinds=kinds)
        return path

    return Case(write, frozenset({"linear_gguf"}), {"dequantize_weights": False})


def _more_bits(name: str) -> Kind:
    """Types as in published files: values and down projections have more bits, and one matrix is not quantized."""
    if "o_proj" in name:
        return Kind.F16
    return Kind.Q6_K if "v_proj" in name or "down_proj" in name else Kind.Q4_K


def _gguf_experts(folder: Path) -> Path:
    """gate and up have another type than down."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, **EXPERTS}
    kinds = {"down_proj": Kind.Q4_1, "norm": Kind.F32, "gate.weight": Kind.F32}
    model, path = small_model("qwen3_moe", **sizes), folder / "model.gguf"
    keys = {"expert_count": model.config.num_experts, "expert_used_count": model.config.num_experts_per_tok}
    keys["expert_feed_forward_length"] = model.config.moe_intermediate_size
    with torch.no_grad():
        write_gguf(
            path,
            model,
            "qwen3moe",
            kinds=lambda name: next((kind for part, kind in kinds.items() if part in name), Kind.Q8_0),
            **{f"ARCH__{key}": value for key, value in keys.items()},
        )
    return path


CASES: Mapping[str, Case] = {
    "awq": _packed("awq"),
    "gptq in another order": _packed("gptq in another order"),
    "gptq of 8 bits": _packed("gptq of 8 bits"),
    "compressed-tensors": _packed("compressed-tensors with zeros"),
    "experts of packed integers": _packed("gptq", "qwen3_moe", "linear_gguf", "experts_gguf", **EXPERTS),
    "experts of packed integers in another order": _packed(
        "gptq in another order", "qwen3_moe", "linear_gguf", "experts_gguf", **EXPERTS
    ),
    "experts in fp8 with biases": _fused(
        "gpt_oss", "fp8, blocks", "linear_fp8", "experts_fp8", layer_types=["full_attention"] * LAYERS
    ),
    "fused matrices of packed integers": _fused("phi3", "gptq with zeros in another order", "linear_gguf"),
    "latent attention of packed integers": _fused("v3", "awq", "linear_gguf", "experts_gguf"),
    "fp8, one scale": _fp8("fp8, one scale"),
    "fp8, blocks that end within layers": _fp8("fp8, blocks that end within layers"),
    "fbgemm_fp8": _fp8("fbgemm_fp8"),
    "modelopt": _fp8("modelopt"),
    "experts in fp8": _fp8("fp8, blocks", "qwen3_moe", "linear_fp8", "experts_fp8", **EXPERTS),
    "fused matrices in fp8 blocks": _fused("phi3", "fp8, blocks that end within layers", "linear_fp8"),
    "torchao, fp8": _fp8("torchao"),
    "int8": _fused("phi3", "int8", "linear_int8"),
    "mxfp4": _folder(mxfp4_weights.write_compressed, "linear_gguf"),
    "experts in mxfp4": _folder(lambda folder: mxfp4_weights.write_gpt_oss(folder, **SIZES), "experts_gguf"),
    "bitsandbytes, nf4": _bits("nf4", "linear_gguf"),
    "bitsandbytes, int8": _bits("int8", "linear_int8"),
    "several schemes": _folder(_mixed, "linear_gguf", "linear_fp8", "linear_w8a8"),
    "gguf": _gguf(_more_bits),
    "experts of gguf": Case(_gguf_experts, frozenset({"linear_gguf", "experts_gguf"}), {"dequantize_weights": False}),
    "int8dq": _online("int8dq", "qwen3_moe", "linear_w8a8", "experts_int8", **SIZES),
    "int8wo": _online("int8wo", "qwen2", "linear_int8", **SIZES),
    "fp8wo": _online("fp8wo", "qwen3_moe", "linear_fp8", "experts_fp8", **SIZES),
}


def check_offloaded(path: Path, *, first: int = 0, **arguments: Any) -> set[str]:
    """Build a checkpoint with the layers from `first` on in host memory, and compare it with one on the device.

    `arguments`: of weights. Returns the ops of the layers in host memory. The reference ops compute the logits of both,
    so that they are the same; the bytes that a plan counts are those that are moved.
    """
    dequantize = arguments.get("dequantize_weights", False)
    online = arguments.get("torchao_config")
    options: dict[str, Any] = {"dequantize": dequantize, "online_quantization": online}
    facts = read_facts(path)
    plain = Config(model=ModelArgs(dtype="float32"), weights=WeightsArgs(**arguments))
    config = Config(model=plain.model, weights=WeightsArgs(offload_group_size=1, **arguments))
    chosen = host_layers(config, facts)
    assert chosen is not None
    streams = Streams(HostStream(), HostStream(), HostStream())
    host = HostWeights(chosen, lambda shape, dtype: torch.empty(shape, dtype=dtype), HOST, streams)
    moved, resident = built(path, layer_made=host.place, **options), built(path, **options)
    assert isinstance(moved, NativeModel)
    host.move()  # it raises if bytes differ
    assert host.saved == chosen.saved == loaded_bytes(plain, facts) - loaded_bytes(config, facts) > 0
    in_host_memory = [layer for layer in op_layers(moved, offloaded=True) if layer.offloaded]
    storages = {tensor.untyped_storage().data_ptr() for layer in in_host_memory for tensor in layer.weight_tensors()}
    assert len(storages) == len(chosen.buffers) == 2
    host.fetch_for_kernels()
    tokens = torch.arange(3, 27)
    for _ in range(2):  # the second time, buffers hold other layers than the first ones
        assert torch.equal(_logits(moved, facts, tokens), _logits(resident, facts, tokens))
    return {layer.op for layer in in_host_memory}


def _logits(model: CausalLM, facts: Any, tokens: Tensor) -> Tensor:
    (group, *_) = facts.cache_groups
    if isinstance(group, Latent):
        return Steps(model, group).run([([3, 1, 4], tokens[:12], 0)])
    return our_logits(model, tokens)
