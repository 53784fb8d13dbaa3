"""Records of what is no argument: models, endpoints, ops, and pairs of arguments that depend on each other.

    model:ARCHITECTURE/FORMAT      the architectures with native layers, and every other one through transformers
    endpoint:METHOD PATH           the routes of the HTTP server
    op:NAME/DTYPE                  the kernels' contracts, and what each platform's package implements of them
    pair:ARGUMENT+ARGUMENT         constraints that read another argument, and what backends require

Each asks what a launch asks: resolution, the constraints, the backends' checks. No page is written here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from srv.args.config import ARGUMENTS
from srv.args.defaults import CONSTRAINTS, DEVICE_CONSTRAINTS
from srv.args.seen import Facts, View, ask
from srv.models.decoder_config import NATIVE, decoder_config
from srv.models.facts import ModelFacts
from srv.models.gguf_config import ARCHITECTURES
from srv.models.rope_config import UnsupportedConfig
from srv.platform.facts import BackendSpec, Constraint, DeviceFacts, Requires
from srv.platform.manifest import Manifest
from srv_matrix.inventory import Inventory
from srv_matrix.judge import baseline, verdict
from srv_matrix.records import Kind, Level, Record, Status, lower
from srv_matrix.sweep import values_of

CORE = "srv"
OTHERS = "any other decoder"
CHECKED = "served only if the same tokens get the same logits however they are cut, which is tried when it is loaded"


@dataclass(frozen=True)
class Ground:
    """One variant of a platform with the model that pairs are judged with, and what nobody's word comes to there."""

    manifest: Manifest
    variant: str
    device: DeviceFacts
    facts: Facts
    values: Mapping[str, Any]

    def record(
        self,
        kind: Kind,
        name: str,
        facts: tuple[Status, Status],
        why: tuple[str, str] = ("", ""),
        declared_by: str = "",
    ) -> Record:
        """A record of this variant; `facts`: what is declared, and what core has."""
        declared_by = declared_by or f"platform {self.manifest.name}"
        silent = facts[0] in (Status.UNKNOWN, Status.PLANNED)
        return Record(
            f"{kind}:{name}",
            kind,
            self.manifest.name,
            self.variant,
            *facts,
            reason_code=why[0],
            reason=why[1],
            declared_by="" if silent else declared_by,
            base=None if silent else Level.E1,
        )


def features(manifests: Iterable[Manifest], models: Sequence[ModelFacts], inventory: Inventory) -> tuple[Record, ...]:
    """Every record that is of no argument: kind by kind, then platform by platform."""
    grounds = [_ground(manifest, variant, models[0]) for manifest in manifests for variant in manifest.variants]
    found = [
        *(record for ground in grounds for record in _models(ground, models)),
        *(record for ground in grounds for record in _endpoints(ground, inventory)),
        *(record for ground in grounds for record in _ops(ground, inventory)),
        *(record for ground in grounds for record in _pairs(ground)),
    ]
    return tuple(found)


def _ground(manifest: Manifest, variant: str, model: ModelFacts) -> Ground:
    device = manifest.facts.profiles[variant]
    facts = Facts(device, model, manifest.facts.capabilities(device))
    own = baseline(model, manifest, device).values
    values = {name: own.get(name, argument.default) for name, argument in ARGUMENTS.items()}
    return Ground(manifest, variant, device, facts, values)


# ---- models


def _models(ground: Ground, models: Sequence[ModelFacts]) -> Iterator[Record]:
    """Native architectures in each format that holds them, then what transformers alone has."""
    safetensors = next(model for model in models if model.format == "safetensors")
    gguf = next((model for model in models if model.format == "gguf"), None)
    for architecture in NATIVE:
        yield _model(ground, architecture, safetensors)
        if gguf is not None and architecture in ARCHITECTURES.values():
            yield _model(ground, architecture, gguf)
    there = verdict("model_impl", "transformers", [safetensors], (ground.manifest, ground.device))
    declared = Status.SUPPORTED if there.taken else Status.UNSUPPORTED
    why = ("checked_at_load", CHECKED) if there.taken else (there.code, there.reason)
    yield ground.record("model", f"{OTHERS}/safetensors", (declared, Status.LIMITED), why)


def _model(ground: Ground, architecture: str, like: ModelFacts) -> Record:
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
    return ground.record("model", f"{architecture}/{like.format}", facts, why)


# ---- endpoints and ops


def _endpoints(ground: Ground, inventory: Inventory) -> Iterator[Record]:
    """The API process answers them before any device work: no platform has a say."""
    for endpoint in inventory.endpoints:
        yield ground.record("endpoint", endpoint, (Status.SUPPORTED, Status.SUPPORTED), declared_by=CORE)


def _ops(ground: Ground, inventory: Inventory) -> Iterator[Record]:
    brought = inventory.implemented.get(f"{ground.manifest.name}:{ground.variant}", {})
    unbuilt = inventory.unbuilt.get(ground.manifest.name)
    for op in inventory.ops:
        for dtype in op.dtypes:
            declared, why = Status.SUPPORTED, ("", "")
            if dtype not in ground.facts.capabilities:
                declared, why = Status.UNSUPPORTED, ("dtype_missing", f"the platform has no {dtype} on this device")
            elif unbuilt is not None:
                declared, why = Status.PLANNED, ("not_implemented", unbuilt)
            elif dtype not in brought.get(op.name, ()):
                reason = f"platform {ground.manifest.name} brings no implementation of it"
                declared, why = Status.UNSUPPORTED, ("no_implementation", reason)
            yield ground.record("op", f"{op.name}/{dtype}", (declared, Status.SUPPORTED), why)


# ---- pairs


def _pairs(ground: Ground) -> Iterator[Record]:
    """Each pair of arguments once, with every law that ties the two."""
    laws: dict[tuple[str, str], list[tuple[str, str, str]]] = {}  # pair -> code, reason, owner
    for owner, constraint in _constraints(ground.manifest):
        for other in constraint.reads:
            if other in ARGUMENTS and other != constraint.argument:
                said = laws.setdefault((constraint.argument, other), [])
                said.append((constraint.code, _refused(ground, owner, constraint, other), owner))
    for argument, spec, required, values in _requirements(ground):
        told = ", ".join(ARGUMENTS[required].show(value) for value in values)
        reason = f"{argument} {spec.name} requires {required} {told}"
        laws.setdefault((argument, required), []).append(
            ("no_backend_fits", reason, f"platform {ground.manifest.name}")
        )
    for (one, other), said in laws.items():
        core = lower(_core(one), _core(other))
        code = "planned" if core is Status.PLANNED else said[0][0]
        reason = "; ".join(dict.fromkeys(reason for _, reason, _ in said))
        owners = ", ".join(dict.fromkeys(owner for _, _, owner in said))
        yield ground.record("pair", f"{one}+{other}", (Status.LIMITED, core), (code, reason), owners)


def _core(argument: str) -> Status:
    return Status.PLANNED if ARGUMENTS[argument].arg.planned else Status.LIMITED


def _constraints(manifest: Manifest) -> Iterator[tuple[str, Constraint]]:
    yield from ((CORE, each) for each in (*CONSTRAINTS, *DEVICE_CONSTRAINTS))
    yield from ((f"platform {manifest.name}", each) for each in manifest.facts.constraints)


def _refused(ground: Ground, owner: str, constraint: Constraint, other: str) -> str:
    """The first two values that the law refuses together while it takes the one beside another; else its remedy."""
    one = constraint.argument
    offered = [
        (ground.values[name], *values_of(ARGUMENTS[name], _names(ground.manifest, name))) for name in (one, other)
    ]
    for value in offered[0]:
        answers = {
            ARGUMENTS[other].show(beside): _judge(ground, owner, constraint, {one: value, other: beside})
            for beside in offered[1]
        }
        against = {beside: reason for beside, reason in answers.items() if reason is not None}
        if against and len(against) < len(answers):
            beside, reason = next(iter(against.items()))
            return f"not {one} {ARGUMENTS[one].show(value)} beside {other} {beside}: {reason}"
    return f"{one} depends on {other}, among others. {constraint.remedy}".removesuffix(".")


def _judge(ground: Ground, owner: str, constraint: Constraint, said: Mapping[str, Any]) -> str | None:
    """The law's answer where two arguments are said and all others are what they would be."""
    reads = {constraint.argument, *constraint.reads}
    member = f"constraint {constraint.code} on {constraint.argument}"
    return ask(owner, member, constraint.check, View(owner, member, ground.facts, reads, {**ground.values, **said}))


def _names(manifest: Manifest, argument: str) -> tuple[str, ...]:
    family = ARGUMENTS[argument].arg.family
    return tuple(spec.name for spec in manifest.facts.backends.get(family, ())) if family else ()


def _requirements(ground: Ground) -> Iterator[tuple[str, BackendSpec, str, tuple[Any, ...]]]:
    """(argument that names the backend, backend, argument, values that it takes) of every requirement."""
    owner = f"platform {ground.manifest.name}"
    for family, specs in ground.manifest.facts.backends.items():
        named = [name for name, argument in ARGUMENTS.items() if argument.arg.family == family]
        for spec, name in itertools.product(specs, named[:1]):
            seen = View(owner, f"backend {spec.name}", ground.facts, ARGUMENTS.keys(), {})
            answer = ask(owner, f"backend {spec.name}", spec.check, seen)
            if isinstance(answer, Requires):
                for required, values in answer.values.items():
                    yield name, spec, required, values
