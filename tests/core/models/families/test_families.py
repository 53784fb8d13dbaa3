"""Each family whose sizes are known against transformers: small models with drawn fields, counted and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_reference_ops import reference_ops
from sizes_published import model_type_of
from sizes_reference import (
    KNOWN,
    LAYER_KINDS,
    RETURN_NO_CACHE,
    TOKENS,
    cached_shapes,
    parameters,
    small_runs,
    states_in_modules,
    stored_buffers,
)

from srv.errors import ModelError
from srv.models import derive
from srv.models.blueprint import Part, walk
from srv.models.choice import LayerChoice
from srv.models.families.registry import BUILT_IN, is_native, runs_through_transformers
from srv.models.families.trees import tree_for_sizes
from srv.models.layers.context import BuildContext
from srv.models.read import read_facts
from srv.models.transformers.hf_model import HFModel, build_hf
from srv.specs import FullAttention, Latent, Recurrent, SlidingWindow

CONTEXT = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore")


def expected_cache(part: Part, index: int) -> tuple[list[tuple[int, int, int, int]], list[tuple[tuple[int, ...], str]]]:
    """What layer `index` keeps of `TOKENS` tokens; transformers keeps one token less than a window."""
    kept, states = [], []
    caches = (each.cache("bfloat16") for _, each in walk(derive.stack(part).layers[index]))
    for cache in (each for each in caches if each is not None):
        match cache:
            case FullAttention():
                kept.append((TOKENS, cache.kv_heads, cache.key_dim, cache.value_dim))
            case SlidingWindow():
                kept.append((min(TOKENS, cache.window - 1), cache.kv_heads, cache.key_dim, cache.value_dim))
            case Latent():
                kept.append((TOKENS, 1, cache.latent_dim, cache.rope_dim))
                kept += [(TOKENS, 1, cache.index_dim, 0)] * len(cache.indexed)
            case Recurrent():
                states += [(state.shape, state.dtype) for state in cache.states]
    return kept, states


@pytest.mark.slow
@pytest.mark.parametrize("architecture", KNOWN)
def test_parameters_buffers_and_caches_equal_transformers(architecture: str) -> None:
    for run in small_runs(architecture, 2):
        part = tree_for_sizes(architecture, run.fields)
        buffers = 0 if architecture == "MiniMaxForCausalLM" else stored_buffers(run.model)  # decays are not loaded
        assert derive.parameters(part) == parameters(run.model) + buffers, run.fields
        for index, layer in enumerate(run.cache.layers):
            kept, states = cached_shapes(layer)
            if architecture == "FalconForCausalLM" and run.fields["new_decoder_architecture"]:
                kept = [(tokens, run.fields["num_kv_heads"], *dims) for tokens, _, *dims in kept]  # it stores copies
            if architecture == "MiniMaxForCausalLM":
                kept, states = minimax_shapes(run.cache, index, part)
            if run.config.model_type in RETURN_NO_CACHE:
                states = states_in_modules(run.model, index)
            assert (kept, states) == expected_cache(part, index), (index, run.fields)
        groups = derive.cache_groups(part, CONTEXT, "bfloat16")
        assert {layer for group in groups for layer in group.layers} <= set(range(len(run.cache.layers)))


def minimax_shapes(
    cache: Any, index: int, part: Part
) -> tuple[list[tuple[int, int, int, int]], list[tuple[tuple[int, ...], str]]]:
    """Its cache has states of its own, in the model's dtype; it keeps tokens beyond a window, which it masks."""
    kept, _ = cached_shapes(cache.layers[index])
    held = cache.linear_cache[index] if index < len(cache.linear_cache) else []
    if kept:
        wanted, _ = expected_cache(part, index)
        assert kept[0][1:] == wanted[0][1:]
        kept = wanted
    return kept, [(tuple(held.shape[1:]), "float32")] if len(held) else []


def only_attention(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a model without recurrent states, and without windows, which transformers ignores in Qwen2-MoE."""
    attending = {"layer_types": ["full_attention"] * fields["num_hidden_layers"]} if model_type in LAYER_KINDS else {}
    return {**fields, **attending, "use_sliding_window": False}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in BUILT_IN if not is_native(name)])
def test_the_registry_says_whether_the_layers_of_transformers_are_served(architecture: str, tmp_path: Path) -> None:
    served, model_type = runs_through_transformers(architecture), model_type_of(architecture)
    (run,) = small_runs(architecture, 1)
    layers = run.config.get_text_config().num_hidden_layers  # NemotronH counts the letters of a pattern
    fields = {"num_hidden_layers": layers, **run.fields}
    fields = only_attention(model_type, fields) if served else fields
    named = {"architectures": [architecture], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **named}))
    facts = read_facts(tmp_path)

    def build() -> HFModel:
        context = BuildContext(torch.device("cpu"), torch.float32, reference_ops())
        return build_hf(facts, LayerChoice(None, None, "dummy"), context, 0, None)

    if served:
        cached = sorted(layer for group in facts.cache_groups for layer in group.layers)
        assert [layer.index for layer in build().attention_layers] == cached
    else:
        with pytest.raises(ModelError) as caught:
            build()
        assert caught.value.code == "unsupported_architecture"
