"""Quantized weights over several ranks: each holds its part of every tensor, and all compute what one computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from fp8_weights import FORMS, write_fp8
from gguf_cases import served_logits
from model_cells import minimax_m2
from models_small import built, expected_logits, small_model, tokens_of
from modelslim_weights import everything, quantize
from mxfp4_weights import write_gpt_oss
from nvfp4_weights import write as write_nvfp4
from quantized_cells import METHODS, write_quantized
from stored_orders import made, stored_form, write_stored
from thread_ranks import on_ranks

from srv.dist.group import RankGroup
from srv.dist.mesh import Mesh
from srv.errors import ModelError
from srv.models.base import CausalLM
from srv.models.checkpoints.matching import cut
from srv.models.facts.sharding import Divisions, divisions, rank_facts
from srv.models.read import read_facts
from srv.planning.plan import make_plan
from srv.testing.engine import user_input

# Eight query heads; two KV heads, so that four ranks hold copies. Whole blocks of 64 columns on each of four ranks.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
BIASES = {"attention_bias": True, "mlp_bias": True}


def by_method(method: str, kind: str) -> Callable[[Path], Any]:
    fields = {**SIZES, **(BIASES if kind == "llama" else {})}
    return lambda path: write_quantized(path, small_model(kind, **fields), method)


def static_int8(path: Path) -> Any:
    model = small_model("llama", **SIZES, **BIASES)
    quantize(path, model, everything("W8A8"))
    return model


def fp8(form: str, **fields: Any) -> Callable[[Path], Any]:
    return lambda path: write_fp8(path, FORMS[form], **{**SIZES, **fields})


def fp8_of_minimax_m2(path: Path) -> Any:
    """A fourth of the norm of queries, and half of that of keys, are on each of four ranks."""
    return write_fp8(path, FORMS["fp8, blocks"], made=minimax_m2(**SIZES))


def in_order(kind: str, form: str, ignore: str = "", **fields: Any) -> Callable[[Path], Any]:
    """Matrices that are fused, or rows that the layers have in another order."""
    own = {} if kind in ("phi3", "glm4", "gpt2") else {"moe_intermediate_size": 256}
    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, **own, **fields}
    return lambda path: write_stored(path, made(kind, **sizes), stored_form(form), ignore=ignore)


def of_llama(form: str) -> Callable[[Path], Any]:
    return lambda path: write_stored(path, small_model("llama", **SIZES), stored_form(form))


def nvfp4(kind: str, **fields: Any) -> Callable[[Path], Any]:
    def write(path: Path) -> Any:
        model = small_model(kind, **SIZES, **fields)
        write_nvfp4(path, model)
        return model

    return write


def mxfp4(path: Path) -> Any:
    return write_gpt_oss(path, vocab_size=96, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128)


KIMI = r"self_attn|shared_experts|layers\.0\.mlp\.(gate|up|down)_proj"  # what Kimi K2 leaves as it is


def unquantized(path: Path) -> Any:
    model = small_model("llama", **SIZES)
    model.save_pretrained(path)
    return model


CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    **{f"{method}, {kind}": (by_method(method, kind), {}) for method in METHODS for kind in ("llama", "qwen3_moe")},
    "modelslim, static": (static_int8, {}),
    "fp8, one scale": (fp8("fp8, one scale", **BIASES), {}),
    "fp8, blocks": (fp8("fp8, blocks", **BIASES), {}),
    "fp8, blocks of experts": (fp8("fp8, blocks", kind="qwen3_moe"), {}),
    "fp8, blocks of experts, norms over all heads": (fp8_of_minimax_m2, {}),
    "fused, by channel": (in_order("phi3", "compressed-tensors, channel"), {}),
    "fused, packed": (in_order("phi3", "awq", head_dim=32), {}),
    "rows in another order, fp8": (in_order("glm4", "fp8, static", head_dim=32), {}),
    "latent attention, fp8 blocks": (in_order("v3", "fp8, blocks"), {}),
    "latent attention, packed": (in_order("v3", "awq"), {}),
    "latent attention, packed experts": (in_order("v2-lite", "compressed-tensors", KIMI), {}),
    "inputs in another order": (of_llama("gptq in another order"), {}),
    "experts in one tensor, gates in turn": (mxfp4, {}),
    "nvfp4": (nvfp4("llama", **BIASES), {}),
    "nvfp4 of experts": (nvfp4("qwen3_moe"), {}),
    "int8 at load": (unquantized, {"online_quantization": "int8wo"}),
    "int8 with inputs at load": (unquantized, {"online_quantization": "int8dq"}),
    "fp8 at load": (unquantized, {"online_quantization": "fp8wo"}),
}
# Kernels that round inputs to 8 bits round those of each rank with a scale of their own.
ROUNDED = ("modelslim", "w8a8_int8", "int8 with inputs")


def on_all(path: Path, ranks: int, run: Callable[[CausalLM], Any], options: dict[str, Any]) -> list[Any]:
    return on_ranks(ranks, lambda group, comm: run(built(path, group=group, communicator=comm, **options)))


@every("case", list(CASES))
def test_ranks_hold_parts_and_compute_the_same(case: str, tmp_path: Path) -> None:
    make, more = CASES[case]
    folder = tmp_path / case
    folder.mkdir()
    model = make(folder)
    options = {"dequantize": False, **more}
    one, tokens, facts = built(folder, **options), tokens_of(model, 12), read_facts(folder)
    views, logits = one.weight_views(), served_logits(one, facts, tokens)
    sizes = divisions(facts, in_blocks=True)
    assert isinstance(sizes, Divisions)
    for ranks in (2, 4):
        if sizes.obstacles(Mesh(ranks)):
            assert ranks == 4
            continue
        own = rank_facts(facts, ranks)
        parts = on_all(folder, ranks, lambda part, own=own: (part, served_logits(part, own, tokens)), options)
        for part, rank_logits in parts:
            slices, held = part.weight_slices(), part.weight_views()
            assert held.keys() == views.keys()
            different = [name for name in held if not torch.equal(held[name], cut(views[name], slices.get(name)))]
            assert different == []
            assert torch.equal(rank_logits, parts[0][1]), "ranks sample from different logits"
        if case.startswith(ROUNDED):
            exact = expected_logits(model, tokens)
            assert (rank_logits - exact).abs().mean() <= 2 * (logits - exact).abs().mean() + 1e-3
        else:
            torch.testing.assert_close(rank_logits, logits, atol=1e-3, rtol=1e-3)
        assert parts[0][0].loaded_bytes() < one.loaded_bytes()


@every(
    ("form", "fields", "ranks", "obstacle"),
    [
        (
            "fp8, blocks",
            {"intermediate_size": 96},
            2,
            "a rank's 48 rows of gate_proj are not whole quantization blocks",
        ),
        ("fp8, blocks", {"head_dim": 16, "num_key_value_heads": 8}, 8, "a rank's 16 rows of q_proj are not whole"),
        (
            "fp8, blocks with the other name",
            {},
            4,
            "a rank's 64 columns of o_proj are not whole quantization blocks of 128",
        ),
        ("fp8, one scale", {}, 8, ""),
    ],
)
def test_blocks_are_not_split(form: str, fields: dict[str, Any], ranks: int, obstacle: str, tmp_path: Path) -> None:
    fp8(form, **fields)(tmp_path)
    sizes = divisions(read_facts(tmp_path), in_blocks=True)
    assert not isinstance(sizes, str)
    obstacles = sizes.obstacles(Mesh(ranks))
    assert (ranks in sizes.legal_ranks()) == (obstacles == [])
    assert any(obstacle in clause for clause in obstacles) if obstacle else obstacles == []


ORDERED = "experts whose inputs have an order of their own (desc_act) cannot be divided as they are"


def test_experts_with_inputs_in_another_order_stay_on_one_rank(tmp_path: Path) -> None:
    """Unless they are dequantized, as the refusal says."""
    write_stored(tmp_path, small_model("qwen3_moe", **SIZES), stored_form("gptq in another order"))
    assert divisions(read_facts(tmp_path), in_blocks=True) == ORDERED
    with pytest.raises(ModelError, match="cannot be sharded"):
        built(tmp_path, group=RankGroup(size=2), dequantize=False)
    user = ["--device", "cpu:avx512", "--model-path", str(tmp_path), "--tp-size", "2"]
    (refused,) = make_plan(user_input(user)).refusals
    reason = f"{ORDERED}; with --dequantize-weights it can be divided"
    assert (refused.code, refused.reason) == ("not_divisible", reason)
    assert "set --dequantize-weights" in refused.remedy
    assert make_plan(user_input([*user, "--dequantize-weights"])).refusals == ()
