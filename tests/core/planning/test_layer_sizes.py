"""What configurations say of the matrices of layers, compared with the layers that are built."""

from __future__ import annotations

from pathlib import Path

import deepseek_small
from every import every
from models_small import CONFIGS, OWN_SIZES, SIZES, built

from srv.models import derive
from srv.models.families.trees import native_tree
from srv.models.layers.linear import Projection
from srv.models.read import read_facts

LATENT = ("v2-lite", "v3")  # with queries as they are, and with compressed ones


@every("kind", [*CONFIGS, *LATENT])
def test_a_fused_matrix_has_the_outputs_of_its_parts(kind: str, tmp_path: Path) -> None:
    """Methods count their blocks and scales by them."""
    folder = tmp_path / kind
    if kind in LATENT:
        deepseek_small.small(kind).config.save_pretrained(folder)
    else:
        CONFIGS[kind](**{**SIZES, **OWN_SIZES.get(kind, {})}).save_pretrained(folder)
    facts = read_facts(folder)
    ops = derive.model_ops(native_tree(facts.architecture, facts.config), "float32")
    layers = [module for module in built(folder, load_format="dummy").modules() if isinstance(module, Projection)]
    sizes = {tuple(layer.output_sizes): tuple(layer.output_sizes.values()) for layer in layers}
    described = {matrix.names: matrix.output_sizes for matrix in ops.matrices if not matrix.embedding}
    assert {names: sizes[names] for names in described} == described
