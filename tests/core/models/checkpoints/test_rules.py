"""The names that tensors of checkpoints have in the layers."""

from __future__ import annotations

from srv.models.checkpoints.rules import Rename, WeightMapping


def test_tensors_below_a_weight_follow_its_module() -> None:
    """As bitsandbytes stores the scales of a weight."""
    mapping = WeightMapping((Rename({"h.*.fc": "model.layers.*.mlp.up_proj"}, prefix="transformer."),))
    layer = "model.layers.3.mlp.up_proj"
    for suffix in ("weight", "bias", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"):
        assert mapping.layer_name(f"transformer.h.3.fc.{suffix}") == f"{layer}.{suffix}"
