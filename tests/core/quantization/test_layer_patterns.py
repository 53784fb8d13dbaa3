"""How configurations name the layers that are not quantized."""

from __future__ import annotations

import pytest
from every import every

from srv.errors import ModelError
from srv.quantization.formats.layer_patterns import names_any, names_layer

LAYER = "model.layers.12.self_attn.q_proj"


@every(
    ("pattern", "matches"),
    [
        (LAYER, True),
        ("self_attn", True),
        ("model.layers.12", True),
        ("model.layers.1", False),
        ("q_pro", False),
        ("model.layers.*.self_attn", True),
        ("*.k_proj", False),
        (r"re:.*layers\.(1|12)\.", True),
        ("re:self_attn", False),  # from the beginning of the name
        ("re:self_attn|model", True),
    ],
)
def test_names_and_patterns(pattern: str, matches: bool) -> None:
    assert names_layer(pattern, LAYER) is matches
    assert names_any((pattern,), LAYER) is matches
    assert names_any(("mlp", "re:none", pattern, "*.none", "q_proj.bias"), LAYER) is matches


@every("pattern", ["re:(.+)+!", "re:(a|.)*(b|.)*!", "re:" + ".?" * 60 + "." * 60, "*" + "e*" * 60 + "!"])
def test_no_pattern_takes_exponential_time(pattern: str) -> None:
    """Each would take years by backtracking; the test ends."""
    assert not names_layer(pattern, LAYER * 4 if "?" not in pattern else LAYER)


@every("pattern", ["re:(?!model)", r"re:(\w)\1"])
def test_a_pattern_that_needs_backtracking_is_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match="needs backtracking") as caught:
        names_layer(pattern, LAYER)
    assert caught.value.code == "unsupported_quantization"
