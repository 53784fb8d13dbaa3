"""What the support matrix shows as verified of pooled models, on the path of a user who sets nothing but the model.

As `test_model_cells.py`, by `pooled_cells`. Exact comparisons in float32 are in `test_encoders.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_cells import assert_fast_path
from pooled_cells import EMBEDDING, LABELLING, cell, check, is_decoder, pooled_engine

from srv.models.layers.linear import Linear
from srv.types import Pooling
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load")

FAST = ("modernbert", "qwen3 classifier")


def marked(name: str) -> Any:
    slow = () if name in FAST else (pytest.mark.slow,)
    return pytest.param(name, marks=[covers(cell(name), platform="cpu"), *slow])


@pytest.mark.parametrize("name", [marked(name) for name in EMBEDDING])
def test_embeddings_of_a_bfloat16_checkpoint(name: str, tmp_path: Path) -> None:
    check_cell(name, tmp_path, Pooling.LAST if is_decoder(name) else Pooling.MEAN)


@pytest.mark.parametrize("name", [marked(name) for name in LABELLING])
def test_labels_of_a_bfloat16_checkpoint(name: str, tmp_path: Path) -> None:
    check_cell(name, tmp_path)


def check_cell(name: str, folder: Path, default: Pooling | None = None) -> None:
    """Encoders attend with torch's operator, since the native kernel does not support attention to later tokens."""
    with pooled_engine(name, folder) as (model, engine):
        if is_decoder(name):
            assert_fast_path(engine)
        modules = engine.executor.worker.loaded.model.modules()  # type: ignore[attr-defined]
        assert {each.implementation for each in modules if isinstance(each, Linear)} == {"native"}
        assert default is None or engine.context.resolved.config.model.pooling == default.value
        check(name, model, engine)
