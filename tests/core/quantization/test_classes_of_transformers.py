"""Quantized checkpoints of architectures without native layers: in the modules of transformers' classes."""

from __future__ import annotations

import json
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
from safetensors.torch import load_file, save_file
from stored_orders import Stored, stored_form, write_stored
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from srv.errors import ModelError
from srv.models.choice import LayerOptions, choose_layers
from srv.models.read import read_facts
from srv.models.transformers.hf_quantized import QuantizedExperts, find_quantized, placeholders, quantized_modules
from srv.planning.plan import make_plan
from srv.testing.engine import user_input

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 97}
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
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
    *((kind, form) for kind in LAYERS[1:] for form in ("awq", "compressed-tensors, channel", "bitsandbytes nf4")),
    *((kind, form) for kind in ("mellum", "mixtral") for form in ("gptq in another order", "fp8, blocks")),
]


def made(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **fields})
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))


def written(folder: Path, kind: str, form: str | Stored, **fields: Any) -> Any:
    return write_stored(folder, made(kind, **fields), stored_form(form) if isinstance(form, str) else form)


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
    left = [name for name, module in ours.model.named_modules() if type(module) is nn.Linear]
    assert all(name.endswith(("lm_head", "output_projection", ".kv_b_proj", ".gate")) for name in left), left
    mixtures = sum(isinstance(module, QuantizedExperts) for module in quantized_modules(ours))
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
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}


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


@every("form", ["awq", "bitsandbytes nf4"])
def test_the_language_model_in_a_vision_folder(form: str, tmp_path: Path) -> None:
    """Whose tensors have other names than those of its class."""
    folder = tmp_path / form
    config = MllamaTextConfig(**{**SIZES, "num_hidden_layers": 3}, cross_attention_layers=[1])
    text = randomized(MllamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32))
    model = write_stored(folder, text, stored_form(form))
    file, text_config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    vision = {"vision_model.patch_embedding.weight": torch.zeros(4, 4)}
    save_file({**{f"language_model.{name}": tensor for name, tensor in load_file(file).items()}, **vision}, file)
    whole = {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama", "vision_config": {}}
    whole |= {"text_config": text_config, "quantization_config": text_config["quantization_config"]}
    (folder / "config.json").write_text(json.dumps(whole))
    assert list(quantized_modules(check(folder, model, dequantize=False))) != []


def test_random_weights(tmp_path: Path) -> None:
    written(tmp_path, "helium", "awq")
    ours = built(tmp_path, load_format="dummy")
    assert ours.loaded_bytes() == planned_bytes(tmp_path, load_format="dummy")
    assert our_logits(ours, tokens_of(made("helium"), 12)).isfinite().all()
    (tmp_path / "model.safetensors").unlink()
    alone = built(tmp_path, load_format="dummy")
    assert len(list(quantized_modules(alone))) == len(list(quantized_modules(ours))) == 14


def test_what_transformers_is_given_for_quantized_modules_takes_no_memory(tmp_path: Path) -> None:
    written(tmp_path, "mellum", "awq")
    facts = read_facts(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    method = choose_layers(facts).method
    assert method is not None
    tensors = dict(placeholders(model, find_quantized(model, facts, method), torch.bfloat16))
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 128, 64)
    assert {tensor.untyped_storage().nbytes() for tensor in tensors.values()} == {2}


def test_an_engine_serves_quantized_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = written(tmp_path, "helium", "fp8, static")
    small = prompted(model, tmp_path)
    with caplog.at_level(logging.INFO), engine(small) as made_engine:
        results = made_engine.generate(messages(small.prompts))
        assert [result.tokens for result in results] == small.tokens
    assert "14 linear layers hold weights of fp8" in caplog.text


def refusals(folder: Path, *flags: str) -> tuple[str, str, str]:
    """Code, reason and remedy of a launch; those of a plan are the same."""
    error = refused(folder, dequantize=bool(flags))
    (refusal,) = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder), *flags])).refusals
    assert (refusal.code, error.reason in refusal.reason, error.remedy in refusal.remedy) == (error.code, True, True), (
        refusal
    )
    return error.code, error.reason, error.remedy


@pytest.mark.slow
def test_experts_that_no_op_computes_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    written(tmp_path, "minimax_m3_vl_text", "awq")
    code, reason, remedy = refusals(tmp_path)
    assert (code, remedy) == ("unsupported_quantization", "Use the checkpoint in full precision")
    assert "the experts model.layers.0.mlp.experts are quantized with awq" in reason
    assert reason.endswith("its class computes more than an activation between their products")
    _, reason, remedy = refusals(tmp_path, "--dequantize-weights")
    assert "does not make it of model.layers.0.mlp.experts.0.down_proj" in reason
    assert remedy == "Use the checkpoint in full precision"


def test_weights_with_inputs_as_rows_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "gpt2", "gptq")
    error = refused(tmp_path, impl="transformers")
    assert "transformer.h.0.attn.c_attn is quantized with gptq" in error.reason
    assert error.remedy == "Use the checkpoint in full precision"
    error = refused(tmp_path, impl="transformers", dequantize=True)
    assert error.reason.endswith("transformer.h.0.attn.c_attn has its inputs as rows")


def test_a_class_that_multiplies_in_another_way_takes_dequantized_weights(tmp_path: Path) -> None:
    """The activation of these experts is none of the op of experts."""
    model = written(tmp_path, "mellum", "compressed-tensors", hidden_act="relu")
    error = refused(tmp_path)
    assert error.reason.endswith("their activation is ReLU, which no op of experts computes")
    assert error.remedy == "Set --dequantize-weights: the weights then take the model's dtype"
    ours, tokens = built(tmp_path, dequantize=True), tokens_of(model, 12)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)


def test_ranks_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "helium", "awq")
    with pytest.raises(ModelError) as caught:
        choose_layers(read_facts(tmp_path), LayerOptions(ranks=2))
    assert (caught.value.code, "only native layers can" in caught.value.reason) == ("unsupported_sharding", True)


Q = "model.layers.0.self_attn.q_proj"


@every(
    ("form", "changes", "code", "part"),
    [
        ("awq", {f"{Q}.scales": None}, "missing_tensors", f"{Q}.scales"),
        ("awq", {f"{Q}.qzeros": torch.zeros(1, 8, dtype=torch.int32)}, "shape_mismatch", f"{Q}.qzeros has the shape"),
        (
            "int8",
            {f"{Q}.weight_scale": torch.zeros(64, 1)},
            "unsupported_quantization",
            f"{Q}.weight_scale is 0 for all",
        ),
        ("fp8, static", {"model.norm.weight": None}, "missing_tensors", "it lacks model.norm.weight"),
    ],
)
def test_damaged_checkpoints(
    form: str, changes: dict[str, Tensor | None], code: str, part: str, tmp_path: Path
) -> None:
    folder = tmp_path / f"{form} {part[-9:]}"
    written(folder, "helium", form)
    edit_weights(folder, **changes)
    error = refused(folder)
    assert (error.code, part in error.reason) == (code, True), error


@pytest.mark.slow
def test_a_plan_shows_the_modules_and_what_multiplies_their_weights(tmp_path: Path) -> None:
    written(tmp_path, "mellum", "fp8, blocks")
    plan = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)]))
    assert plan.refusals == ()
    clause = "8 linear layers and the experts of 2 layers hold weights of fp8, in the class of transformers"
    assert [note for note in plan.notes if clause in note] != []
    kernels = {kernel.key: kernel.name for kernel in plan.kernels.kernels}
    assert kernels["weights"] == "fp8"
    assert [key for key in kernels if key.startswith(("linear_fp8 ", "experts_fp8 "))] != []
