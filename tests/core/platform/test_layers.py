"""Which layers of a model a backend cannot compute, in words."""

from __future__ import annotations

from rules_world import model

from srv.platform.layers import layer_kinds, unsupported_layers
from srv.specs import AttentionLayer, FullAttention, Recurrent, StateTensor


def test_layers_have_their_numbers_in_the_model() -> None:
    """Recurrent layers are between the attention layers of a hybrid; the cache groups of an encoder have none."""
    states = Recurrent((0, 1, 2, 4, 5, 6, 8, 9, 10), (StateTensor("state", (2,), "float32"),))
    hybrid = model(layers=12, cache_groups=(FullAttention((3, 7, 11), 8, 64, 64), states))
    encoder = model(cache_groups=(FullAttention((), 8, 64, 64),))
    layers = [AttentionLayer(index, 16, 8, 64, 0.125) for index in range(3)]

    def not_the_second(layer: AttentionLayer) -> str | None:
        return "no" if layer.window is None else None

    layers[1] = AttentionLayer(1, 16, 8, 64, 0.125, window=5)
    assert unsupported_layers(layer_kinds(layers, hybrid), not_the_second) == ("it cannot compute layers 3, 11: no",)
    assert unsupported_layers(layer_kinds(layers, encoder), not_the_second) == ("it cannot compute layers 0, 2: no",)
