"""Records of what is no argument: models, endpoints, ops, and pairs of arguments that depend on each other.

    model:ARCHITECTURE/FORMAT      the architectures with native layers, and every other one through transformers
    endpoint:METHOD PATH           the routes of the HTTP server
    op:NAME/DTYPE                  the kernels' contracts, and what each platform's package implements of them
    pair:ARGUMENT+ARGUMENT         what constraints and backends tie (`srv_matrix.pairs`)

Each asks what a launch asks: resolution, the constraints, the backends' checks. No page is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from srv.models.decoder_config import NATIVE, decoder_config
from srv.models.facts import ModelFacts
from srv.models.gguf_config import ARCHITECTURES
from srv.models.rope_config import UnsupportedConfig
from srv.platform.manifest import Manifest
from srv_matrix.ground import Ground, make_ground
from srv_matrix.inventory import Inventory
from srv_matrix.judge import baseline, verdict
from srv_matrix.pairs import pairs
from srv_matrix.records import Record, Status

UNBUILT = "not_implemented"  # the code of a platform that has no device code yet
OTHERS = "any other decoder"
CHECKED = "served only if the same tokens get the same logits however they are cut, which is tried when it is loaded"


def features(manifests: Iterable[Manifest], models: Sequence[ModelFacts], inventory: Inventory) -> tuple[Record, ...]:
    """Every record that is of no argument: kind by kind, then platform by platform."""
    grounds = [make_ground(manifest, variant, models[0]) for manifest in manifests for variant in manifest.variants]
    found = [
        *(record for ground in grounds for record in _models(ground, models, inventory)),
        *(record for ground in grounds for record in _endpoints(ground, inventory)),
        *(record for ground in grounds for record in _ops(ground, inventory)),
        *(record for ground in grounds for record in pairs(ground)),
    ]
    return tuple(found)


# ---- models


def _models(ground: Ground, models: Sequence[ModelFacts], inventory: Inventory) -> Iterator[Record]:
    """Native architectures in each format that holds them, then what transformers alone has."""
    unbuilt = inventory.unbuilt.get(ground.manifest.name)
    safetensors = next(model for model in models if model.format == "safetensors")
    gguf = next((model for model in models if model.format == "gguf"), None)
    for architecture in NATIVE:
        yield _model(ground, architecture, safetensors, unbuilt)
        if gguf is not None and architecture in ARCHITECTURES.values():
            yield _model(ground, architecture, gguf, unbuilt)
    there = verdict("model_impl", "transformers", [safetensors], (ground.manifest, ground.device))
    declared = Status.SUPPORTED if there.taken else Status.UNSUPPORTED
    why = ("checked_at_load", CHECKED) if there.taken else (there.code, there.reason)
    if there.taken and unbuilt is not None:
        declared, why = Status.PLANNED, (UNBUILT, unbuilt)
    yield ground.record("model", f"{OTHERS}/safetensors", (declared, Status.LIMITED), why)


def _model(ground: Ground, architecture: str, like: ModelFacts, unbuilt: str | None) -> Record:
    """One architecture of the sample's sizes, judged as a launch would with nothing said."""
    config = {
        "hidden_size": like.hidden_size,
        "intermediate_size": like.config["intermediate_size"],
        "num_hidden_layers": like.layers,
        "num_attention_heads": like.heads,
        "num_key_value_heads": like.kv_heads,
        "vocab_size": like.vocab_size,
        "max_position_embeddings": like.context_length,
    }
    facts = (Status.SUPPORTED, Status.SUPPORTED)
    why = ("", "")
    try:
        decoder_config(architecture, config)
    except UnsupportedConfig as error:
        facts, why = (Status.SUPPORTED, Status.UNSUPPORTED), ("unsupported_config", str(error))
    model = replace(like, architecture=architecture, config=config)
    there = baseline(model, ground.manifest, ground.device).verdict
    if not there.taken:
        facts, why = (Status.UNSUPPORTED, facts[1]), (there.code, there.reason)
    elif unbuilt is not None:
        facts, why = (Status.PLANNED, facts[1]), (UNBUILT, unbuilt)
    return ground.record("model", f"{architecture}/{like.format}", facts, why)


# ---- endpoints and ops


def _endpoints(ground: Ground, inventory: Inventory) -> Iterator[Record]:
    """The API process answers them and no platform speaks of them: core has them, and no level until one ran there.

    Where there is no device code yet, no server starts that could answer.
    """
    unbuilt = inventory.unbuilt.get(ground.manifest.name)
    for endpoint in inventory.endpoints:
        if unbuilt is None:
            made = ground.record("endpoint", endpoint, (Status.SUPPORTED, Status.SUPPORTED))
            yield replace(made, declared_by="", base=None)
        else:
            yield ground.record("endpoint", endpoint, (Status.PLANNED, Status.SUPPORTED), (UNBUILT, unbuilt))


def _ops(ground: Ground, inventory: Inventory) -> Iterator[Record]:
    brought = inventory.implemented.get(f"{ground.manifest.name}:{ground.variant}", {})
    unbuilt = inventory.unbuilt.get(ground.manifest.name)
    for op in inventory.ops:
        for dtype in op.dtypes:
            declared, why = Status.SUPPORTED, ("", "")
            if dtype not in ground.facts.capabilities:
                declared, why = Status.UNSUPPORTED, ("dtype_missing", f"the platform has no {dtype} on this device")
            elif unbuilt is not None:
                declared, why = Status.PLANNED, (UNBUILT, unbuilt)
            elif dtype not in brought.get(op.name, ()):
                reason = f"platform {ground.manifest.name} brings no implementation of it"
                declared, why = Status.UNSUPPORTED, ("no_implementation", reason)
            yield ground.record("op", f"{op.name}/{dtype}", (declared, Status.SUPPORTED), why)
