"""The names that tensors of checkpoints have in the layers."""

from __future__ import annotations

import torch

from srv.models.checkpoints.row_orders import SizedRules
from srv.models.checkpoints.rules import GATE_UP, QKV, ExpertColumns, Permute, Rename, Split, WeightMapping
from srv.models.checkpoints.stacked_experts import StackedExpertStorage
from srv.models.checkpoints.storage import StorageFormat
from srv.specs import AttentionLayer


def test_tensors_below_a_weight_follow_its_module() -> None:
    """As bitsandbytes stores the scales of a weight."""
    mapping = WeightMapping((Rename({"h.*.fc": "model.layers.*.mlp.up_proj"}, prefix="transformer."),))
    layer = "model.layers.3.mlp.up_proj"
    for suffix in ("weight", "bias", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"):
        assert mapping.layer_name(f"transformer.h.3.fc.{suffix}") == f"{layer}.{suffix}"


FUSED = WeightMapping(
    (
        Split("self_attn.query_key_value", QKV),
        Permute("self_attn.query_key_value", "kv_heads"),
        Split("mlp.gate_up_proj", GATE_UP),
        Permute("mlp.gate_up_proj", "swapped_halves"),
    )
)


def test_a_fused_matrix_is_divided_and_found_again() -> None:
    parts = FUSED.split("model.layers.3.self_attn.query_key_value.weight")
    assert parts == tuple(f"model.layers.3.self_attn.{part}.weight" for part in QKV)
    assert FUSED.split("model.layers.3.self_attn.o_proj.weight") == ("model.layers.3.self_attn.o_proj.weight",)
    layers = [f"model.layers.3.self_attn.{part}" for part in QKV]
    assert FUSED.fused(layers) == ("model.layers.3.self_attn.query_key_value",)
    for others in (layers[:2], [layers[0], layers[2], layers[1]], layers[1:]):
        assert FUSED.fused(others) == tuple(others)


def test_rows_of_a_fused_matrix_are_permuted_to_the_order_of_its_parts() -> None:
    """Two KV heads with two queries each, of one row: q0 q1 k0 v0 q2 q3 k1 v1."""
    sized = SizedRules(FUSED, [AttentionLayer(index=0, heads=4, kv_heads=2, head_dim=1, scale=1.0)], 0)
    order = sized.order("model.layers.0.self_attn.query_key_value", 8)
    assert order is not None
    assert order.rows == [0, 1, 4, 5, 2, 6, 3, 7]
    swapped = sized.order("model.layers.0.mlp.gate_up_proj", 6)
    assert swapped is not None
    assert swapped.rows == [3, 4, 5, 0, 1, 2]
    assert sized.order("model.layers.0.mlp.down_proj", 6) is None
    assert sized.split_sizes("model.layers.0.self_attn.query_key_value.weight", 8) == [4, 2, 2]
    assert sized.split_sizes("model.layers.0.mlp.gate_up_proj.weight", 6) == [3, 3]


def test_stacked_experts_have_inputs_as_rows_and_columns_in_halves_or_pairs() -> None:
    name, stack = "model.layers.0.mlp.experts.gate_up_proj", torch.arange(2 * 3 * 4.0).reshape(2, 3, 4)
    kinds: tuple[tuple[ExpertColumns, list[int]], ...] = (("halves", [0, 1, 2, 3]), ("pairs", [0, 2, 1, 3]))
    for columns, order in kinds:
        storage = StackedExpertStorage(StorageFormat(), columns)
        storage.shapes({name: tuple(stack.shape)})
        made = storage.convert(name, stack)
        for expert in range(2):
            parts = [made[f"model.layers.0.mlp.experts.{expert}.{part}.weight"] for part in GATE_UP]
            assert torch.equal(torch.cat(parts), stack[expert].T[order])
