"""The demo model: our logits compared with those of transformers for the same GGUF file."""

from __future__ import annotations

import pytest
import torch
from models_small import built, our_logits

from srv.models.base import ForwardContext, ModelInputs
from srv.models.locate import demo_model
from srv.models.transformers.hf_check import DenseCache

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.mark.slow
def test_logits_equal_transformers_own_gguf_reader() -> None:
    from transformers import AutoModelForCausalLM

    path = demo_model()
    theirs = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor(PROMPT)
    with torch.no_grad():
        expected = theirs(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
    del theirs
    got = our_logits(built(path), tokens)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_the_demo_model_completes_a_known_fact() -> None:
    """The greedy continuation of a known fact is right only if row order, scales and RoPE are all right."""
    model = built(demo_model())
    tokens = torch.tensor([504, 3575, 282, 4649, 314])  # "The capital of France is"
    cache = DenseCache()
    cache.rows = (("a", 0, len(tokens)),)
    with torch.inference_mode():
        hidden = model(ModelInputs(tokens, torch.arange(len(tokens))), ForwardContext(cache.attend))
        last = model.logits(hidden[-1:])
    assert int(last.argmax()) == 7042  # " Paris"
