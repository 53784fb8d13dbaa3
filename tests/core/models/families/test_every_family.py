"""Decoders with keys and values per head have the logits of transformers, in float32; the models are `bfloat16_models`.

Those with latent attention or states need caches of their own: `test_deepseek.py`, `test_hybrids.py`. A new family
needs no test of its own for this. Fields that it computes in another way are cases beside others of their kind, such as
in `test_dense.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bfloat16_models import DENSE, LAYER_NORM, MIXTURES, MODELS
from every import every
from model_cells import random_model
from models_small import built, expected_logits, our_logits, tokens_of

from srv.models.read import read_facts

NAMES = [name for name in (*DENSE, *LAYER_NORM, *MIXTURES) if "kv_lora_rank" not in MODELS[name].fields]


@pytest.mark.slow  # minutes; `test_blueprint.py` builds the same layers in the fast tier
@every("name", NAMES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(MODELS[name].kind, **MODELS[name].fields)
    model.save_pretrained(tmp_path)
    assert read_facts(tmp_path).architecture == name
    tokens = tokens_of(model)
    ours = our_logits(built(tmp_path, impl="srv"), tokens)
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=2e-4, rtol=1e-4)
