"""Evidence for the pooled models of the GPU platforms, as test_gpu_models.py for those that generate text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pooled_cells import EMBEDDING, LABELLING, cell, check, is_decoder, pooled_engine

from srv_matrix.pytest_plugin import covers


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(name, marks=covers(cell(name))) for name in (*EMBEDDING, *LABELLING)])
def test_a_bfloat16_checkpoint(srv_device: str, name: str, tmp_path: Path) -> None:
    flags = ["--disable-graphs"] if is_decoder(name) else []
    with torch.inference_mode(False), pooled_engine(name, tmp_path, *flags, device=srv_device) as (model, engine):
        check(name, model, engine)
