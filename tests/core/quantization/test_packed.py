"""Checkpoints of AWQ, GPTQ and compressed-tensors with packed integers, written here by the formats' descriptions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_small import built, edit_config, expected_logits, our_logits, small_model, tokens_of
from packed_weights import AWQ, FORMS, Form, compressed, gptq, packed, shuffled_by_name, write_packed
from planned_sizes import planned_bytes
from torch import Tensor

from srv.errors import ModelError
from srv.models.read import read_facts
from srv.planning.plan import make_plan
from srv.quantization.formats.packed_words import blocks, unpack
from srv.quantization.layers.blocks import GGUFExperts, OrderedExperts, OrderedLinear
from srv.quantization.registry import detect, unsupported_form
from srv.testing.engine import user_input


@every("kind", FORMS)
def test_logits_are_those_of_the_unpacked_weights(kind: str, tmp_path: Path) -> None:
    """The plan has the bytes that are loaded."""
    form = FORMS[kind]
    folder = tmp_path / kind
    model = write_packed(folder, form)
    facts = read_facts(folder)
    assert facts.quantization == form.method
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    tokens = tokens_of(model, 12)
    ours = built(folder)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned_bytes(folder)
    assert form.ordered == any(isinstance(module, OrderedLinear) for module in ours.modules())


EXPERT_SIZES = {"moe_intermediate_size": 32, "num_hidden_layers": 2}


@every(
    "kind",
    [
        *("awq", "awq of 8 bits", "awq of 8 bits by GPTQModel", "gptq", "gptq of 8 bits"),
        *("compressed-tensors", "compressed-tensors with zeros"),
    ],
)
def test_experts_hold_the_blocks_of_packed_integers(kind: str, tmp_path: Path) -> None:
    form, folder = FORMS[kind], tmp_path / kind
    model = write_packed(folder, form, kind="qwen3_moe", **EXPERT_SIZES)
    tokens = tokens_of(model, 12)
    ours = built(folder)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert [module.gate_up_type for module in ours.modules() if isinstance(module, GGUFExperts)] == [
        "Q8_0" if "8 bits" in kind else "Q4_1" if "zeros" in kind or kind == "awq" else "Q4_0"
    ] * 2
    facts = read_facts(folder)
    assert ours.loaded_bytes() == planned_bytes(folder)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())


@every("kind", ["gptq in another order", "gptq with zeros in another order", "compressed-tensors in another order"])
def test_inputs_of_experts_may_have_an_order_of_their_own(kind: str, tmp_path: Path) -> None:
    """Each expert another one, or all the same. Down projections have more than one group."""
    form, sizes = FORMS[kind], {"moe_intermediate_size": 64, "num_hidden_layers": 2}
    for shared in (False, True):
        folder = tmp_path / f"{kind}, {shared}"
        with shuffled_by_name(not shared):
            model = write_packed(folder, form, kind="qwen3_moe", **sizes)
        tokens, ours = tokens_of(model, 12), built(folder)
        torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
        layers = [module for module in ours.modules() if isinstance(module, OrderedExperts)]
        assert [bool((layer.gate_up_columns == layer.gate_up_columns[:1]).all()) for layer in layers] == [shared] * 2
        assert not bool((layers[0].down_columns[0] == torch.arange(64)).all())
        assert ours.loaded_bytes() == planned_bytes(folder)
        assert make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals == ()


def test_gate_and_up_projection_of_an_expert_must_have_one_order(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.3.up_proj.g_idx"

    def turn(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].flip(0)

    write_packed(tmp_path, FORMS["gptq in another order"], turn, kind="qwen3_moe", **EXPERT_SIZES)
    with pytest.raises(ModelError, match=r"the inputs of .*experts\.3\.gate_proj are in another order") as caught:
        built(tmp_path)
    assert caught.value.code == "unsupported_quantization"


def test_mixtral_s_names_of_packed_experts_are_read(tmp_path: Path) -> None:
    model = write_packed(tmp_path, FORMS["gptq"], kind="mixtral", num_hidden_layers=2)
    tokens = tokens_of(model, 12)
    torch.testing.assert_close(
        our_logits(built(tmp_path), tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4
    )


def test_layers_that_predict_further_tokens_do_not_count(tmp_path: Path) -> None:
    """Checkpoints of GLM-4.5 have one after the layers of the model, which is quantized with them."""

    def predict(tensors: dict[str, Tensor]) -> None:
        more = {
            name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in tensors.items() if ".1." in name
        }
        assert any(name.endswith(".qweight") for name in more)
        tensors.update({**more, "model.layers.2.eh_proj.weight": torch.zeros(64, 128)})

    sizes = []
    for name, spoil in (("without", lambda tensors: None), ("with", predict)):
        write_packed(tmp_path / name, AWQ, spoil, num_hidden_layers=2)
        sizes += [planned_bytes(tmp_path / name), built(tmp_path / name).loaded_bytes()]
    assert sizes == sizes[:1] * 4


@every(
    ("form", "name", "fields"),
    [
        (gptq(desc_act=True), "quantize_config.json", {}),
        (gptq(), "quantize_config.json", {"quant_method": None, "checkpoint_format": None}),
        (AWQ, "quant_config.json", {"quant_method": None, "bits": None, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_a_file_beside_the_configuration_states_the_method(
    form: Form, name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """As older tools wrote it."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    model = write_packed(folder, form, num_hidden_layers=1)
    quant_config = {key: value for key, value in {**form.config, **fields}.items() if value is not None}
    edit_config(folder, quantization_config=None)
    (folder / name).write_text(json.dumps(quant_config))
    assert read_facts(folder).quantization == form.method
    tokens = tokens_of(model, 12)
    logits = our_logits(built(folder), tokens)
    torch.testing.assert_close(logits, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    (folder / name).write_text("[1]")
    with pytest.raises(ModelError, match=f"{name}: it does not describe a quantization") as caught:
        read_facts(folder)
    assert caught.value.code == "damaged"


def test_a_file_that_describes_no_stored_weights_is_not_read(tmp_path: Path) -> None:
    """Of a checkpoint that was dequantized since, or whose config.json states its method."""
    small_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "plain")
    write_packed(tmp_path / "awq", AWQ, num_hidden_layers=1)
    for name, method in (("plain", None), ("awq", "awq")):
        (tmp_path / name / "quantize_config.json").write_text("[1]")
        assert read_facts(tmp_path / name).quantization == method


def _bias(value: float) -> Callable[[dict[str, Tensor]], None]:
    def add(tensors: dict[str, Tensor]) -> None:
        packed = [name for name in tensors if name.endswith(".qweight")]
        biases = {name.replace("qweight", "bias"): torch.full(tensors[name].shape[1:], value) for name in packed}
        tensors.update(biases)

    return add


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ stores one with each quantized layer."""
    model = write_packed(tmp_path / "zeros", gptq(), _bias(0.0))
    tokens = tokens_of(model, 12)
    logits = our_logits(built(tmp_path / "zeros"), tokens)
    torch.testing.assert_close(logits, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    write_packed(tmp_path / "ones", gptq(), _bias(1.0), num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"_proj\.bias, which is not 0") as caught:
        built(tmp_path / "ones")
    assert caught.value.code == "unexpected_tensors"


def _counts_what_is_loaded(folder: Path) -> bool:
    return built(folder).loaded_bytes() == planned_bytes(folder)


def test_only_the_tensors_that_are_loaded_count(tmp_path: Path) -> None:
    """Not those of a vision tower, nor the copy of a tied output layer; and packed integers only where they are."""

    def copy_head(tensors: dict[str, Tensor]) -> None:
        tensors.update(packed("lm_head", torch.randn(96, 64), gptq())[0])

    write_packed(tmp_path / "tied", gptq(lm_head=True), copy_head, vocab_size=96, tie_word_embeddings=True)
    assert _counts_what_is_loaded(tmp_path / "tied")
    small_model("llama").save_pretrained(tmp_path / "plain")
    edit_config(tmp_path / "plain", quantization_config=gptq().config)
    assert _counts_what_is_loaded(tmp_path / "plain")

    def add_vision(tensors: dict[str, Tensor]) -> None:
        text = {f"language_model.{name}": tensors.pop(name) for name in list(tensors)}
        tensors.update(text | packed("vision_tower.layers.0.fc_proj", torch.randn(96, 64), AWQ)[0])

    folder = tmp_path / "vision"
    write_packed(folder, AWQ, add_vision, kind="gemma3")
    nested = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": nested}
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": nested.pop("quantization_config")}))
    assert read_facts(folder).text_part_of is not None
    assert _counts_what_is_loaded(folder)


LAST = "model.layers.1.mlp.experts"


def _whole(tensors: dict[str, Tensor], layer: str) -> None:
    """Replace the packed weights of a layer [64, 32] by unquantized ones."""
    assert f"{layer}.qweight" in tensors
    for name in [name for name in tensors if name.startswith(f"{layer}.")]:
        del tensors[name]
    tensors[f"{layer}.weight"] = torch.zeros(64, 32)


@every(
    ("form", "spoil", "fields", "part"),
    [
        ("awq", lambda tensors: _whole(tensors, f"{LAST}.3.down_proj"), {}, "experts.3.down_proj is not"),
        (
            "gptq of one group",
            lambda tensors: None,
            {"moe_intermediate_size": 48},
            "the 48 inputs of .*down_proj are not whole",
        ),
        (
            "awq",
            lambda tensors: [_whole(tensors, f"{LAST}.{index}.down_proj") for index in range(7)],
            {},
            "quantized in (part|a way)",
        ),
    ],
)
def test_a_plan_refuses_the_experts_that_a_launch_refuses(
    form: str, spoil: Callable[[dict[str, Tensor]], None], fields: dict[str, Any], part: str, tmp_path: Path
) -> None:
    folder = tmp_path / form
    write_packed(folder, FORMS[form], spoil, "qwen3_moe", **{**EXPERT_SIZES, **fields})
    with pytest.raises(ModelError, match=part) as caught:
        built(folder)
    assert caught.value.code == "unsupported_quantization"
    refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals
    assert [re.search(part, refusal.reason) is not None for refusal in refusals] == [True], refusals


def test_words_of_awq_by_hand() -> None:
    """The eight columns of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7 of its bits."""
    word = torch.tensor([[0x7531_6420]], dtype=torch.int32)
    assert unpack(word, 4, 1, interleaved=True).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack(torch.tensor([[0x03010200]], dtype=torch.int32), 8, 1, interleaved=True).tolist() == [[0, 1, 2, 3]]
    negative = torch.tensor([[-1]], dtype=torch.int32)
    assert unpack(negative, 4, 1).tolist() == [[15] * 8]
    assert unpack(torch.tensor([[0x0403_0201]], dtype=torch.int32), 8, 0).tolist() == [[1], [2], [3], [4]]


def test_blocks_are_those_of_gguf() -> None:
    from gguf import GGMLQuantizationType, dequantize

    values = torch.randint(0, 16, (3, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales = torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.125, 4.0]], dtype=torch.float16)
    zeros = torch.tensor([[0, 15], [8, 7], [3, 1]], dtype=torch.uint8)
    wide = scales.float().repeat_interleave(32, 1)
    for kind, stored, expected in (
        (GGMLQuantizationType.Q4_0, blocks(values, scales, None, 4), (values.float() - 8) * wide),
        (
            GGMLQuantizationType.Q4_1,
            blocks(values, scales, zeros, 4),
            (values - zeros.float().repeat_interleave(32, 1)) * wide,
        ),
        (GGMLQuantizationType.Q8_0, blocks(values * 17, scales, None, 8), (values.float() * 17 - 128) * wide),
    ):
        assert torch.equal(torch.from_numpy(dequantize(stored.numpy(), kind)), expected)


def _first_with(suffix: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in sorted(tensors) if name.endswith(suffix))
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed.contiguous()

    return spoil


def _poisoned(tensor: Tensor) -> Tensor:
    tensor[0, 0] = math.nan
    return tensor


def _infinite(tensor: Tensor) -> Tensor:
    tensor[0, 0] = math.inf
    return tensor


@every(
    ("form", "spoil", "code", "part"),
    [
        (AWQ, _first_with(".scales", lambda tensor: None), "missing_tensors", ".scales"),
        (AWQ, _first_with(".scales", _poisoned), "damaged", "a scale of model.layers.0.mlp.down_proj"),
        (AWQ, _first_with(".scales", torch.neg), "damaged", "a scale of model.layers.0.mlp.down_proj is negative"),
        (AWQ, _first_with(".scales", lambda tensor: tensor.float() * 1e-9), "damaged", "that float16 can hold"),
        (AWQ, _first_with(".scales", lambda tensor: tensor[:-1]), "shape_mismatch", "groups of 32 inputs"),
        (AWQ, _first_with(".qzeros", lambda tensor: tensor.float()), "dtype_mismatch", "float32, not as int32"),
        (AWQ, _first_with(".qweight", lambda tensor: None), "missing_tensors", ".qweight"),
        (AWQ, _first_with(".qweight", lambda tensor: tensor.to(torch.uint8)), "dtype_mismatch", "uint8, not as int32"),
        (AWQ, _first_with(".scales", lambda tensor: tensor.int()), "dtype_mismatch", "int32, not as float64 or"),
        (AWQ, _first_with(".qweight", lambda tensor: tensor[0]), "shape_mismatch", "not two axes"),
        (
            AWQ,
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64)}),
            "unexpected_tensors",
            "both model.layers.0.mlp.up_proj.qweight and model.layers.0.mlp.up_proj.weight",
        ),
        (gptq(), _first_with(".scales", _poisoned), "damaged", "a scale of model.layers.0.mlp.down_proj"),
        (gptq(), _first_with(".scales", _infinite), "damaged", "a scale of model.layers.0.mlp.down_proj"),
        (compressed(), _first_with(".weight_scale", _poisoned), "damaged", "a scale of model.layers.0.mlp.down_proj"),
        (compressed(), _first_with(".weight_scale", _infinite), "damaged", "a scale of model.layers.0.mlp.down_proj"),
        (AWQ, _first_with(".scales", torch.zeros_like), "damaged", "every scale of model.layers.0.mlp.down_proj is 0"),
        (gptq(), _first_with(".scales", torch.zeros_like), "damaged", "is 0, but its integers are not"),
        (compressed(), _first_with(".weight_scale", torch.zeros_like), "damaged", "is 0, but its integers are not"),
        (gptq(), _first_with(".qzeros", torch.zeros_like), "damaged", "symmetric"),
        (
            FORMS["awq without zero points"],
            _first_with(".qzeros", lambda tensor: torch.full_like(tensor, 0x7777_7777)),  # those of GPTQ, stored less 1
            *("damaged", "zero points other than 8"),
        ),
        (gptq(), _first_with(".g_idx", torch.zeros_like), "damaged", "desc_act"),
        (gptq(desc_act=True), _first_with(".g_idx", torch.zeros_like), "damaged", "do not fill its groups"),
        (compressed(), _first_with(".weight_shape", lambda tensor: tensor + 1), "shape_mismatch", "weight_shape"),
        (
            compressed(),
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_g_idx": torch.zeros(64)}),
            "unexpected_tensors",
            "weight_g_idx",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    form: Form, spoil: Callable[[dict[str, Tensor]], None], code: str, part: str, tmp_path: Path
) -> None:
    """By a plan as well, if headers show it."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write_packed(folder, form, spoil, num_hidden_layers=1)
    with pytest.raises(ModelError) as caught:
        built(folder)
    assert (caught.value.code, part in str(caught.value)) == (code, True), caught.value
    if code != "damaged" and part != "weight_shape":  # whose values are stored
        refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals
        assert [(refusal.code, caught.value.reason in refusal.reason) for refusal in refusals] == [(code, True)], (
            refusals
        )


def test_layers_that_share_an_input_must_be_quantized_alike(tmp_path: Path) -> None:
    def unquantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".0.self_attn.q_proj." in name]:
            del tensors[name]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 64)

    write_packed(tmp_path / "plain", AWQ, unquantize)
    with pytest.raises(ModelError, match=r"k_proj is quantized and .*q_proj is not"):
        built(tmp_path / "plain")

    def reorder(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.g_idx"] = tensors["model.layers.0.self_attn.q_proj.g_idx"].flip(0)

    write_packed(tmp_path / "order", gptq(desc_act=True), reorder)
    with pytest.raises(ModelError, match="in another order"):
        built(tmp_path / "order")


@every(
    ("changes", "part"),
    [
        ({"version": "gemv"}, "gemv"),
        ({"bits": 3}, "3 bits"),
        ({"bits": 8}, "8-bit integers have zero points other than 128 (zero_point is true)"),
        ({"group_size": 48}, "48 inputs, not a multiple of 32"),
        ({"quant_method": "gptq", "bits": 2}, "2 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 8, "sym": False}, "other than 128"),
        ({"quant_method": "gptq", "dynamic": {"+:.*up": {"bits": 8}}}, "quantized differently"),
        ({**compressed().config, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**compressed(symmetric=False, bits=8).config}, "zero points"),
        ({**compressed().config, "ignore": ["re:(("]}, "ignore has 're:((', which is not a regular expression"),
        ({**compressed().config, "config_groups": {"group_0": {}}}, "its group_0 has no weights"),
        ({"quant_method": "gptq", "dynamic": {"-:((": {}}}, "dynamic has 're:(('"),
        ({"modules_to_not_convert": 5}, "modules_to_not_convert is 5, not a list of names"),
    ],
)
def test_forms_that_no_layer_supports_are_refused(changes: dict[str, Any], part: str, tmp_path: Path) -> None:
    config = {"quantization_config": {**AWQ.config, **changes}}
    clause = unsupported_form(tmp_path, config)
    assert clause is not None
    assert part in clause
    assert detect(tmp_path, config) in ("awq", "gptq", "compressed-tensors")


def test_a_method_of_an_unquantized_model_is_refused_by_its_argument(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    for method in ("awq", "gptq", "compressed-tensors"):
        refusals = make_plan(
            user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path), "--quantization", method])
        ).refusals
        assert [(refusal.what, refusal.code) for refusal in refusals] == [("quantization", "other_method")]
