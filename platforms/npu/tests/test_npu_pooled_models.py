"""Evidence for the pooled models of NPUs, as test_npu_models.py for those that generate text: encoders and decoders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pooled_cells import EMBEDDING, LABELLING, cell, check, is_decoder, pooled_engine

from srv_matrix.pytest_plugin import covers
from srv_npu.facts import VARIANTS

# Without MPNet, whose attention has biases by distance, which NPUs do not compute.
NAMES = tuple(name for name in (*EMBEDDING, *LABELLING) if not name.startswith("mpnet"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(name, marks=covers(cell(name), platform="npu")) for name in NAMES])
def test_a_bfloat16_checkpoint(name: str, tmp_path: Path) -> None:
    flags = ["--disable-graphs"] if is_decoder(name) else []
    with torch.inference_mode(False), pooled_engine(name, tmp_path, *flags, device="npu") as (model, engine):
        assert engine.context.device.variant in VARIANTS
        check(name, model, engine)
