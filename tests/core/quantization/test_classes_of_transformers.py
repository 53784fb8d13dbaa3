"""Quantized checkpoints of architectures without native layers: in the modules of transformers' classes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import engine, messages, prompted
from every import every
from models_small import built, edit_weights, expected_logits, our_logits, randomized, refused, tokens_of
from packed_weights import exact_formula
from planned_sizes import planned_bytes
from quantized_cells import METHODS
from safetensors import safe_open
from stored_orders import Stored, stored_form, write_stored
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from srv.errors import ModelError
from srv.models.choice import choose_layers
from srv.models.read import read_facts
from srv.models.transformers.hf_quantized import QuantizedExperts, QuantizedLinear, quantized_modules
from srv.planning.plan import make_plan
from srv.testing.engine import user_input

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 97}
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
KINDS: dict[str, dict[str, Any]] = {
    "helium": {"head_dim": 16},
    "vaultgemma": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},  # which ties its output layer
    "biogpt": {"num_key_value_heads": 4},  # whose layers have biases
    "youtu": {**LATENT, "num_key_value_heads": 4},  # whose up-projections storage formats make floats of
    "mellum": {**EXPERTS, "head_dim": 16, "num_experts": 4},
    "mixtral": {**EXPERTS, "num_local_experts": 4},  # whose checkpoints have other names than its class
    "minimax_m3_vl_text": {**EXPERTS, "num_local_experts": 4, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
LAYERS = ["helium", "vaultgemma", "biogpt", "youtu"]
PACKED = ["awq", "gptq", "gptq in another order", "compressed-tensors", "compressed-tensors of 8 bits"]
SCALED = ["int8", "fp8, blocks", "fp8, static", "compressed-tensors, channel"]
BITSANDBYTES = ["bitsandbytes nf4", "bitsandbytes int8"]
CASES = [
    *(("helium", form) for form in (*PACKED, *SCALED, *BITSANDBYTES, "torchao")),
    *((kind, form) for kind in LAYERS[1:] for form in ("awq", "gptq", "compressed-tensors, channel", *BITSANDBYTES)),
    *((kind, form) for kind in ("mellum", "mixtral") for form in ("gptq in another order", "fp8, blocks", "awq")),
]


def made(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **fields})
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))


def written(folder: Path, kind: str, form: str | Stored, **fields: Any) -> Any:
    return write_stored(folder, made(kind, **fields), stored_form(form) if isinstance(form, str) else form)


def quantized_names(folder: Path) -> set[str]:
    """Those of the layers that a checkpoint has no floats of."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = {name for name in file.keys() if file.get_slice(name).get_dtype() not in ("F16", "F32")}  # noqa: SIM118
    return {name.partition(".weight")[0].removesuffix(".qweight") for name in names if "proj" in name or "fc" in name}


def check(folder: Path, model: Any, *, dequantize: bool) -> Any:
    """Logits are those of `model`, and as many bytes are loaded as planned."""
    ours, tokens = built(folder, impl="transformers", dequantize=dequantize), tokens_of(model, 12)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned_bytes(folder, dequantize_weights=dequantize, model_impl="transformers")
    return ours


@every(("kind", "form"), CASES)
def test_logits_are_those_of_the_dequantized_weights(kind: str, form: str, tmp_path: Path) -> None:
    folder = tmp_path / f"{kind} {form}"
    model = written(folder, kind, form)
    ours = check(folder, model, dequantize=False)
    left = [name for name, each in ours.model.named_modules() if type(each) is nn.Linear]
    assert all(name.endswith(("lm_head", "output_projection", ".kv_b_proj", ".gate")) for name in left), left
    mixtures = sum(isinstance(each, QuantizedExperts) for each in quantized_modules(ours))
    assert mixtures == (2 if kind in ("mellum", "mixtral") else 0)


@pytest.fixture
def formula() -> Iterator[None]:
    with exact_formula():
        yield


@every(("kind", "form"), CASES)
def test_dequantized_weights_are_those_of_the_formula(kind: str, form: str, formula: None, tmp_path: Path) -> None:
    folder = tmp_path / f"{kind} {form}"
    ours = check(folder, written(folder, kind, form), dequantize=True)
    assert not list(quantized_modules(ours))
    assert {each.dtype for each in ours.parameters()} == {torch.float32}


class RoundedInputs(nn.Module):
    """A linear layer whose inputs are integers from -127 to 127, with a scale per token."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        out: Tensor = self.linear((x / scale).round() * scale)
        return out


def test_activations_are_rounded_where_the_scheme_says_so(tmp_path: Path) -> None:
    """W8A8 with dynamic scales."""
    model = written(tmp_path, "helium", METHODS["w8a8_int8"].form)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, RoundedInputs(module))
    check(tmp_path, model, dequantize=False)


def test_random_weights(tmp_path: Path) -> None:
    written(tmp_path, "helium", "awq")
    ours = built(tmp_path, load_format="dummy")
    assert ours.loaded_bytes() == planned_bytes(tmp_path, load_format="dummy")
    assert our_logits(ours, tokens_of(made("helium"), 12)).isfinite().all()
    (tmp_path / "model.safetensors").unlink()
    alone = built(tmp_path, load_format="dummy")
    assert len(list(quantized_modules(alone))) == len(list(quantized_modules(ours))) == 14


def test_weights_of_quantized_modules_are_never_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers loads in their place has one element."""
    written(tmp_path, "helium", "fp8, static")
    sizes: list[int] = []
    original = QuantizedLinear.__init__

    def watched(module: QuantizedLinear, layer: Any) -> None:
        original(module, layer)
        sizes.append(len(layer.weight_views()))

    monkeypatch.setattr(QuantizedLinear, "__init__", watched)
    built(tmp_path)
    assert len(sizes) == 14


def test_an_engine_serves_quantized_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = written(tmp_path, "helium", "fp8, static")
    small = prompted(model, tmp_path)
    with caplog.at_level(logging.INFO), engine(small) as made_engine:
        results = made_engine.generate(messages(small.prompts))
        assert [each.tokens for each in results] == small.tokens
    assert "14 linear layers hold weights of fp8" in caplog.text
