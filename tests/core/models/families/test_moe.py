"""Mixtures of experts have the logits of transformers for small random models, and their exact number of parameters."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from gguf import GGMLQuantizationType as Kind
from models_reference_ops import reference_impls
from models_small import built, edit_config, expected_logits, our_logits, small_model, tokens_of, write_gguf
from planned_sizes import check_sizes, planned_bytes
from safetensors.torch import load_file, save_file

from srv.dist.group import RankGroup
from srv.errors import ModelError
from srv.models import derive
from srv.models.families.trees import native_tree
from srv.models.modules.decoder import Decoder
from srv.models.modules.feed_forward import MoE
from srv.models.read import read_facts
from srv.platform.interface import OpImpl
from srv.platform.ops import Ops
from srv.quantization.formats.online_storage import OnlineInt8StorageFormat, quantize_int8
from srv.quantization.layers.blocks import GGUFExperts
from srv.quantization.layers.int8 import Int8Experts
from srv.quantization.method import StoredModel
from srv_kernels.contracts import CONTRACTS

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral_window_every_expert": ("mixtral", {"sliding_window": 5, "num_experts_per_tok": 5}),
    "mixtral_one_of_two": ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe_renormalized": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2_moe_dense_layers": ("qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]}),
    "qwen2_moe_windows": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_renormalized": ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe_window_dense": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 6, "mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
}


@every("case", CASES)
def test_native_logits_and_parameter_counts_equal_transformers(case: str, tmp_path: Path) -> None:
    kind, fields = CASES[case]
    if "layer_types" in fields:
        fields = {**fields, "num_hidden_layers": 4}
    model = small_model(kind, **fields)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model)
    ours = built(tmp_path, impl="srv")
    assert isinstance(ours, Decoder)
    expected = expected_logits(model, tokens)
    torch.testing.assert_close(our_logits(ours, tokens), expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.5, "the logits are too flat for the comparison to mean anything"
    facts = read_facts(tmp_path)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert derive.parameters(native_tree(facts.architecture, facts.config)) == counted
    assert facts.parameters == counted
    check_sizes(tmp_path, ours)


@every("kind", ["mixtral", "qwen2_moe"])
def test_checkpoints_with_fused_experts_are_read(kind: str, tmp_path: Path) -> None:
    """As transformers has them in memory, and writes them if it is asked to."""
    model = small_model(kind)
    model.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    tokens = tokens_of(model)
    ours = our_logits(built(tmp_path, impl="srv"), tokens)
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=2e-4, rtol=1e-4)


GGUF_KEYS = {"ARCH__expert_count": "num_experts", "ARCH__expert_used_count": "num_experts_per_tok"}
SIZES_OF_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4}
GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("mixtral", {}),
    "qwen2moe": ("qwen2_moe", {"shared_expert_intermediate_size": 64}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True, "head_dim": 16}),
}


def write_moe_gguf(path: Path, arch: str, **more: Any) -> Any:
    """A small MoE model, written as a GGUF file; the model has the dequantized values."""
    kind, fields = GGUF_CASES[arch]
    model = small_model(kind, **{**SIZES_OF_BLOCKS, **fields})
    config = model.config
    keys: dict[str, Any] = {key: getattr(config, field) for key, field in GGUF_KEYS.items()}
    if arch != "llama":
        keys["ARCH__expert_feed_forward_length"] = config.moe_intermediate_size
    if arch == "qwen2moe":
        keys["ARCH__expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    with torch.no_grad():
        write_gguf(path, model, arch, **keys, **more)
    return model


@every("dequantize", [True, False])
@every("arch", GGUF_CASES)
def test_gguf_files_have_the_logits_of_transformers(arch: str, dequantize: bool, tmp_path: Path) -> None:
    """Experts are one tensor per projection there; they are dequantized, or computed with as they are stored."""
    path = tmp_path / "model.gguf"
    kinds = {"down_proj": Kind.Q4_1, "norm": Kind.F32, "gate.weight": Kind.F32, "expert_gate": Kind.F32}
    model = write_moe_gguf(
        path, arch, kinds=lambda name: next((kind for part, kind in kinds.items() if part in name), Kind.Q8_0)
    )
    ours = built(path, impl="srv", dequantize=dequantize)
    kept = [module for module in ours.modules() if isinstance(module, GGUFExperts)]
    assert bool(kept) is not dequantize
    tokens = tokens_of(model)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4)
    facts = read_facts(path)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert ours.loaded_bytes() == (
        facts.parameters * 4 if dequantize else planned_bytes(path, dequantize_weights=False)
    )


def test_experts_of_mixed_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kinds = {"gate_proj": Kind.Q4_1, "norm": Kind.F32, "gate.weight": Kind.F32}
    write_moe_gguf(
        path, "llama", kinds=lambda name: next((kind for part, kind in kinds.items() if part in name), Kind.Q8_0)
    )
    with pytest.raises(ModelError, match=r"stored as Q4_1 and Q8_0.*--dequantize-weights"):
        built(path, impl="srv", dequantize=False)
    built(path, impl="srv", dequantize=True)


def _exact(op: str, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """A contract's op without quantized inputs, so that logits can be compared exactly."""
    oracle = CONTRACTS["linear_int8" if op == "linear_w8a8" else op].oracle
    result = oracle(x, *args)
    assert isinstance(result, torch.Tensor)
    return result.to(x.dtype)


EXACT = [OpImpl(op, "exact", lambda args: None, partial(_exact, op)) for op in ("linear_w8a8", "experts_int8")]


def test_int8_experts_have_the_logits_of_their_dequantized_weights(tmp_path: Path) -> None:
    """Quantized while they are loaded, and from a checkpoint with int8 weights."""
    model = small_model("qwen2_moe", decoder_sparse_step=2)
    folder, stored = tmp_path / "float", tmp_path / "int8"
    model.save_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight").endswith("_proj"):
                quantized, scale = quantize_int8(parameter.flatten(0, -2))
                parameter.copy_((quantized * scale).view(parameter.shape))
    tensors = load_file(folder / "model.safetensors")
    shutil.copytree(folder, stored)
    convert = OnlineInt8StorageFormat(StoredModel(read_facts(folder), {})).convert
    int8 = {new: tensor for name, each in tensors.items() for new, tensor in convert(name, each).items()}
    save_file(int8, stored / "model.safetensors")
    edit_config(stored, quantization_config={"quant_method": "w8a8_int8"})
    tokens, ops = tokens_of(model), Ops("exact", [*EXACT, *reference_impls()])
    for ours in (built(folder, ops=ops, online_quantization="int8dq"), built(stored, ops=ops)):
        experts = [module for module in ours.modules() if isinstance(module, Int8Experts)]
        assert len(experts) == 1
        torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4)
    with pytest.raises(ModelError, match=r"int8wo excludes.*int8dq"):
        built(folder, online_quantization="int8wo")


def test_ranks_hold_a_part_of_each_expert(tmp_path: Path) -> None:
    """The sum of what the ranks compute is what one rank computes; the router is on every rank."""
    world = 2
    small_model("qwen2_moe", num_attention_heads=4, vocab_size=96).save_pretrained(tmp_path)
    whole = built(tmp_path)
    parts = [built(tmp_path, group=RankGroup(rank=rank, size=world)) for rank in range(world)]
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = _mlp(whole)(x)
        torch.testing.assert_close(sum(_mlp(part)(x) for part in parts), expected, atol=1e-5, rtol=1e-4)
    facts = read_facts(tmp_path)
    tree = native_tree(facts.architecture, facts.config)
    assert [part.loaded_bytes() for part in parts] == [derive.parameters(tree.of_rank(world)) * 4] * world


def _mlp(model: Any) -> MoE:
    found = model.stack[0].mlp
    assert isinstance(found, MoE)
    return found
