"""What `srv plan` says of a model's sizes from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from pooled_models import write_modules
from safetensors.torch import save_file
from sizes_expected import SIZES
from sizes_published import CONFIGS, model_type_of

from srv.args.config import make_config
from srv.cli.main import main
from srv.errors import Refusal
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.sizes import size_lines
from srv.specs import ModelFacts, Recurrent

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
RIDDLE = {
    "architectures": ["RiddleForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 96, "max_position_embeddings": 128,
}  # fmt: skip


def folder(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def facts(path: Path, name: str, **further: Any) -> ModelFacts:
    architecture, fields = CONFIGS[name]
    kind = model_type_of(architecture)
    config = {"architectures": [architecture], "model_type": kind, "torch_dtype": "bfloat16", **fields, **further}
    return read_facts(folder(path, **config))


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Kimi-K2", "falcon-7b", "Jamba-v0.1"])
def test_facts_of_a_configuration_have_the_sizes_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    model_facts, expected = facts(tmp_path, name), SIZES[name]
    assert (model_facts.parameters, model_facts.active_parameters) == (expected.parameters, expected.active)
    assert (model_facts.weight_bytes, model_facts.unknown_sizes) == (2 * expected.parameters, None)
    paged = [group for group in model_facts.cache_groups if not isinstance(group, Recurrent)]
    assert sum(group.bytes_per_token("bfloat16") for group in paged) == expected.token_bytes


@pytest.mark.parametrize(
    ("kind", "part_of", "name"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration", "gemma-3-4b"),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2.5-7B"),
    ],
)
def test_the_text_part_of_a_vision_model_counts_alone(kind: str, part_of: str, name: str, tmp_path: Path) -> None:
    """Qwen2-VL has a language model of these sizes."""
    fields = {"text_config": CONFIGS[name][1], "vision_config": {}, "torch_dtype": "bfloat16"}
    model_facts = read_facts(folder(tmp_path, architectures=[part_of], model_type=kind, **fields))
    parameters = SIZES[name].parameters
    assert (model_facts.text_part_of, model_facts.parameters, model_facts.weight_bytes) == (
        part_of,
        parameters,
        2 * parameters,
    )


def test_a_model_without_attention_has_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_facts, expected = facts(tmp_path, "Mamba-Codestral-7B"), SIZES["Mamba-Codestral-7B"]
    assert model_facts.parameters == expected.parameters
    (states,) = model_facts.cache_groups
    assert isinstance(states, Recurrent)
    assert states.bytes_per_slot() == expected.request_bytes
    assert main(["plan", "--device", "cpu", "--model-path", str(tmp_path), "--load-format", "dummy"]) == 2
    assert "of its layers keep recurrent states" in capsys.readouterr().err


def test_a_quantized_configuration_counts_as_its_checkpoint_stores_it(tmp_path: Path) -> None:
    model = facts(tmp_path, "Qwen3-32B", quantization_config=FP8)
    assert model.parameters == 32_762_123_264
    linear = model.stored_types["float8_e4m3fn"]
    assert linear == 64 * (5120 * 128 * (2 * 64 + 2 * 8) + 3 * 5120 * 25600)
    scales = linear // (128 * 128)
    assert model.weight_bytes == linear + 4 * scales + 2 * (model.parameters - linear)


def test_a_form_that_layers_do_not_support_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 32, "symmetric": True}
    scheme = {
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    facts(tmp_path, "Qwen3-32B", quantization_config={"quant_method": "compressed-tensors", "ignore": [], **scheme})
    assert main(["plan", "--device", "cuda:sm90", "--model-path", str(tmp_path), "--load-format", "dummy"]) == 2
    shown = capsys.readouterr()
    assert "in this form: its group_0 has weights with group_size 32, not 16, as NVFP4 has" in shown.err
    assert "[memory budget]" in shown.out


def plan(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status and all text of a plan without weights and tokenizer."""
    code = main(["plan", "--load-format", "dummy", "--skip-tokenizer-init", "--model-path", str(path), *arguments])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


@every(
    ("quant_config", "stored", "held"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "19.25", "19.25"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "31.98", "31.98"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, "31.96", "31.98"),
        ({"quant_method": "fbgemm_fp8"}, "31.98", "31.98"),
    ],
)
def test_a_launch_without_weights_has_a_size(
    quant_config: dict[str, Any], stored: str, held: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts(tmp_path, "Qwen3-32B", quantization_config=quant_config)
    code, shown = plan(tmp_path, capsys, "--device", "cuda:sm90")
    assert code == 0
    assert f"weights: {stored} GiB, quantized" in shown
    assert f"estimated with {held} GiB of weights quantized" in shown
    assert "(weights as layers hold them; [sizes] has those of the files)" in shown


def test_weights_of_no_known_size_in_files_have_one_in_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts(tmp_path, "Qwen3-30B-A3B", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    code, shown = plan(tmp_path, capsys, "--device", "cuda:sm90")
    assert code == 0
    assert "weights: unknown, from the configuration alone: whether its experts are quantized depends on" in shown
    code, shown = plan(tmp_path, capsys, "--device", "cuda:sm90", "--dequantize-weights")
    assert code == 0
    assert "estimated with 56.87 GiB of weights in bfloat16" in shown


def test_an_assumed_dtype_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts(tmp_path, "Qwen3-32B", torch_dtype=None)
    _, shown = plan(tmp_path, capsys, "--device", "cuda:sm90")
    assert "dtype = bfloat16 because it is assumed: config.json states none" in " ".join(shown.split())
    assert "weights: 61.02 GiB in bfloat16, from the configuration alone" in shown
    assert "estimated with 61.02 GiB of weights in bfloat16" in shown
    assert "tokenizer_path = unset" in shown


def test_embeddings_need_no_output_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-Embedding-8B is published without one, and a launch accepts it."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    further = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151665, "max_position_embeddings": 40960}
    facts(tmp_path, "Qwen3-32B", tie_word_embeddings=False, **sizes, **further)
    for flags in ((), ("--is-embedding",)):
        assert "parameters: 8,188,515,328\n" in plan(tmp_path, capsys, "--device", "cpu:avx512", *flags)[1]
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, ("Normalize", "2_Normalize", {}))
    code, shown = plan(tmp_path, capsys, "--device", "cpu:avx512")
    assert (code, "parameters: 7,567,295,488\n" in shown) == (0, True)
    assert "there are no weights: its modules.json makes it an embedding model" in " ".join(shown.split())


def test_modelopt_s_own_file_says_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in its older checkpoints, whose config.json states no quantization."""
    facts(tmp_path, "Qwen3-32B")
    quant_config = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quant_config}))
    code, shown = plan(tmp_path, capsys, "--device", "cuda:sm90")
    assert (code, "weights: 31.96 GiB, quantized with modelopt" in shown) == (0, True)


def test_an_unknown_code_of_4_bits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quant_config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}
    facts(tmp_path, "Qwen3-32B", quantization_config=quant_config)
    code, shown = plan(tmp_path, capsys, "--device", "cuda:sm90")
    assert (code, "its weights of 4 bits are of type nf5, not nf4 or fp4" in shown) == (2, True)


def test_one_cause_is_one_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quant_config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
    facts(tmp_path, "Qwen3-32B", quantization_config=quant_config)
    code, shown = plan(tmp_path, capsys, "--device", "cuda:sm90,count=3", "--tp-size", "3")
    assert (code, "launch would refuse: tp_size (not_divisible)\n" in shown) == (2, True)
    facts(tmp_path, "Qwen3-32B", quantization_config={"quant_method": "quark"})
    code, shown = plan(tmp_path, capsys, "--device", "cuda:sm90")
    assert (code, "launch would refuse: model_path (unsupported_quantization)\n" in shown) == (2, True)


@every(
    ("name", "arguments", "expected"),
    [
        ("Qwen3-32B", ("--device", "cuda:sm90"), "products that quantize them, which is less exact\n"),
        ("Qwen3-30B-A3B", ("--device", "cuda:sm90"), "less exact; those of experts are never quantized\n"),
        ("Qwen3-32B", ("--device", "cpu:avx512,memory=256GiB"), "whatever the checkpoint states of these\n"),
        ("Qwen3-32B", ("--device", "cuda:sm90", "--dequantize-weights"), ""),
        ("Qwen3-32B", ("--device", "npu:a3"), ""),
    ],
)
def test_the_note_on_fp8_says_what_holds_on_the_device(
    name: str, arguments: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts(tmp_path, name, quantization_config=FP8)
    _, shown = plan(tmp_path, capsys, *arguments)
    note = next((line for line in shown.splitlines(keepends=True) if "multiplied by activations" in line), "")
    assert bool(note) == bool(expected)
    assert note.endswith(expected)


def test_no_size_is_claimed_of_an_unknown_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = read_facts(folder(tmp_path, **RIDDLE))
    assert (model.parameters, model.weight_bytes) == (None, 0)
    assert main(["plan", "--device", "cuda:sm90", "--model-path", str(tmp_path), "--load-format", "dummy"]) == 2
    shown = capsys.readouterr().out
    assert "parameters: unknown: RiddleForCausalLM is an unknown architecture\n" in shown
    assert "[memory budget]\nunknown: see the refusals" in shown
    assert shown.startswith("launch would refuse: model_path (unsupported_architecture)\n")
    assert "per token" not in shown.partition("[model]")[0]


def test_stored_elements_count_if_neither_method_nor_architecture_is_known(tmp_path: Path) -> None:
    config = {**RIDDLE, "quantization_config": {"quant_method": "awq"}}
    tensors = {"a.qweight": torch.zeros(8, 4, dtype=torch.int32), "norm.weight": torch.zeros(16, dtype=torch.bfloat16)}
    save_file(tensors, folder(tmp_path, **config) / "model.safetensors")
    model = read_facts(tmp_path)
    assert (model.parameters, model.weight_bytes, model.unknown_sizes) == (48, 160, None)
    arguments = ["--device", "cpu", "--model-path", str(tmp_path), "--torchao-config", "int8wo"]
    assert main(["plan", *arguments]) == 2


def test_a_budget_of_unknown_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="RiddleForCausalLM is an unknown architecture"):
        weight_bytes(make_config({"dtype": "bfloat16"}), read_facts(folder(tmp_path, **RIDDLE)))


def test_a_plan_shows_parameters_weights_and_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts(tmp_path, "Qwen3-30B-A3B", max_position_embeddings=40960)
    plan = ["plan", "--device", "cuda:sm90", "--model-path", str(tmp_path), "--load-format", "dummy"]
    assert main(plan) == 0
    shown = capsys.readouterr().out
    assert "parameters: 30,532,122,624, of which 3,353,032,704 compute one token" in shown
    assert "weights: 56.87 GiB in bfloat16, from the configuration alone" in shown
    assert "cache: 98,304 bytes per token: 48 layers of attention in bfloat16" in shown
    assert "layers: native layers" in shown
    assert main([*plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"] == {
        "parameters": 30_532_122_624,
        "active_parameters": 3_353_032_704,
        "weight_bytes": 61_064_245_248,
        "cache_bytes_per_token": 98_304,
        "layers": "native layers",
        "unknown": None,
    }


def test_lines_of_latent_attention_windows_and_states(tmp_path: Path) -> None:
    def lines(name: str, planned: str | None) -> list[str]:
        model = facts(tmp_path, name, max_position_embeddings=131072)
        size_texts = size_lines(model, "bfloat16", planned)
        return [sentence for quantity, sentence in size_texts if quantity in ("cache", "layers")]

    none = "none: srv knows the sizes of this architecture, but of no layers that run it"
    assert lines("DeepSeek-V3", "transformers") == [
        "70,272 bytes per token: 61 layers of latent attention, 512 + 64 numbers in bfloat16",
        none,
    ]
    sparse = "61 layers of latent attention, 512 + 64 numbers, 61 with an index key of 128 in bfloat16"
    assert lines("DeepSeek-V3.2", "native layers") == [f"85,888 bytes per token: {sparse}", "native layers"]
    assert lines("gemma-3-1b", "native layers") == [
        "4,096 bytes per token: 4 layers of attention in bfloat16",
        "22,528 bytes per token, for the last 512 of a request: 22 layers of attention in bfloat16",
        "native layers",
    ]
    assert lines("Jamba-v0.1", "native layers") == [
        "16,384 bytes per token: 4 layers of attention in bfloat16",
        "16,515,072 bytes per request: 28 layers with recurrent states",
        "native layers",
    ]
