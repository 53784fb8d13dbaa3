"""Pairs of arguments that depend on each other on one variant, each once, with every law found that ties the two.

Three kinds of laws: constraints that read another argument; what a backend demands of an argument, of ordinary models
and of those with another kind of attention; and backends of two slots that cannot share a pool. All are asked, never
read: a law that speaks only of models or values that are not tried here is told by its remedy, or not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from srv.args.backends import SLOTS
from srv.args.config import ARGUMENTS, SPELLINGS
from srv.args.defaults import CONSTRAINTS, DEVICE_CONSTRAINTS
from srv.args.seen import Facts, View, ask
from srv.models.facts import ModelFacts
from srv.platform.facts import BackendSpec, Constraint, Requires, Unfit
from srv.platform.manifest import Manifest
from srv_matrix.ground import Ground
from srv_matrix.records import Record, Status, lower
from srv_matrix.sweep import values_of

CORE = "srv"
_ORDER = {name: place for place, name in enumerate(ARGUMENTS)}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@dataclass(frozen=True, slots=True)
class Law:
    """What ties two arguments. `owner`: who says so."""

    one: str
    other: str
    code: str
    reason: str
    owner: str

    @property
    def pair(self) -> tuple[str, str]:
        """The two in the order of their declaration, whichever of them the law blames."""
        first, second = sorted((self.one, self.other), key=_ORDER.__getitem__)
        return first, second


def pairs(ground: Ground) -> Iterator[Record]:
    """A record for each pair of arguments that some law ties."""
    found: dict[tuple[str, str], list[Law]] = {}
    for law in (*_by_constraints(ground), *_by_backends(ground), *_by_shared_pool(ground)):
        found.setdefault(law.pair, []).append(law)
    for (one, other), laws in found.items():
        core = lower(_core(one), _core(other))
        code = "planned" if core is Status.PLANNED else laws[0].code
        reason = "; ".join(dict.fromkeys(law.reason for law in laws))
        owners = ", ".join(dict.fromkeys(law.owner for law in laws))
        yield ground.record("pair", f"{one}+{other}", (Status.LIMITED, core), (code, reason), owners)


def _core(argument: str) -> Status:
    return Status.PLANNED if ARGUMENTS[argument].arg.planned else Status.LIMITED


def _values(ground: Ground, argument: str) -> tuple[Any, ...]:
    """The value it would have, those that the sweep tries, and a few more: laws of sizes need more than boundaries."""
    declared, family = ARGUMENTS[argument], ARGUMENTS[argument].arg.family
    names = [spec.name for spec in ground.manifest.facts.backends.get(family, ())] if family else []
    more: list[Any] = [] if names else list(SPELLINGS.published.get(argument, ()))
    if declared.kind.base is int and declared.kind.many:
        more = [(2, 3)]
    elif declared.kind.base is int:
        more = [2, 3]
    elif declared.kind.many:
        more = [("x", "y")]
    tried = [ground.values[argument], *values_of(declared, names), *more]
    return tuple(dict.fromkeys(value for value in tried if value is None or declared.against(value) is None))


# ---- constraints


def _by_constraints(ground: Ground) -> Iterator[Law]:
    for owner, constraint in _constraints(ground.manifest):
        for other in constraint.reads:
            if other in ARGUMENTS and other != constraint.argument and len(_values(ground, other)) > 1:
                reason = _refused(ground, owner, constraint, other)
                yield Law(constraint.argument, other, constraint.code, reason, owner)


def _constraints(manifest: Manifest) -> Iterator[tuple[str, Constraint]]:
    yield from ((CORE, each) for each in (*CONSTRAINTS, *DEVICE_CONSTRAINTS))
    yield from ((f"platform {manifest.name}", each) for each in manifest.facts.constraints)


def _refused(ground: Ground, owner: str, constraint: Constraint, other: str) -> str:
    """Two values that the law refuses together while it takes the one beside another; else its remedy.

    If no two alone are refused, up to two further arguments that it reads get values of their own, which are told.
    """
    one = constraint.argument
    further = [name for name in constraint.reads if name in ARGUMENTS and name not in (one, other)]
    for (label, model), count in itertools.product(_models(ground).items(), range(min(2, len(further)) + 1)):
        seen = replace(ground, facts=ground.facts._replace(model=model))
        for names in itertools.combinations(further, count):
            for chosen in itertools.product(*(_values(ground, name) for name in names)):
                with_these = dict(zip(names, chosen, strict=True))
                for value in _values(ground, one):
                    told = _told(seen, owner, constraint, other, {one: value, **with_these})
                    if told:
                        return told + label
    return f"{one} depends on {other}, among others. {constraint.remedy}".removesuffix(".")


def _told(ground: Ground, owner: str, constraint: Constraint, other: str, said: Mapping[str, Any]) -> str:
    """The refusal of `said` beside a first value of the other argument, if it is taken beside another value."""
    one = constraint.argument
    answers = [
        (beside, _judge(ground, owner, constraint, {**said, other: beside})) for beside in _values(ground, other)
    ]
    against = [(beside, reason) for beside, reason in answers if reason is not None]
    if not against or len(against) == len(answers):
        return ""
    beside, reason = against[0]
    more = ", ".join(f"{name} {_show(name, value)}" for name, value in said.items() if name != one)
    place = f"beside {other} {_show(other, beside)}" + (f" with {more}" if more else "")
    return f"not {one} {_show(one, said[one])} {place}: {reason}"


def _judge(ground: Ground, owner: str, constraint: Constraint, said: Mapping[str, Any]) -> str | None:
    """The law's answer where some arguments are said and all others are what they would be."""
    reads = {constraint.argument, *constraint.reads}
    member = f"constraint {constraint.code} on {constraint.argument}"
    return ask(owner, member, constraint.check, View(owner, member, ground.facts, reads, {**ground.values, **said}))


def _show(argument: str, value: Any) -> str:
    return ARGUMENTS[argument].show(value)


# ---- backends


class _Noting(View):
    """A view that notes which arguments were looked at."""

    def __init__(self, owner: str, member: str, facts: Facts, values: Mapping[str, Any]) -> None:
        super().__init__(owner, member, facts, ARGUMENTS.keys(), values)
        self.noted: dict[str, None] = {}

    def __getitem__(self, argument: str) -> Any:
        self.noted[argument] = None
        return super().__getitem__(argument)


def _models(ground: Ground) -> Mapping[str, ModelFacts]:
    """The ordinary model, and like it ones of families with laws of their own: by what a reason says of them."""
    ordinary = ground.facts.model
    if ordinary is None:
        return {}
    latent = replace(ordinary, architecture="DeepseekV3ForCausalLM", heads=128, config={**ordinary.config, **_LATENT})
    chunks = replace(
        ordinary, architecture="Qwen2ForCausalLM", config={**ordinary.config, "dual_chunk_attention_config": {}}
    )
    sinks = replace(ordinary, architecture="GptOssForCausalLM")
    return {"": ordinary, " for latent attention": latent, " for two chunk lengths": chunks, " for GPT-OSS": sinks}


def _by_backends(ground: Ground) -> Iterator[Law]:
    """What each backend demands of arguments: with nothing said, and with each value said that it looks at."""
    owner = f"platform {ground.manifest.name}"
    for spec, names in _named(ground.manifest):
        ordinary: set[tuple[str, str]] = set()
        for label, model in _models(ground).items():
            free, noted = _ask(ground, spec, model, {names[0]: spec.name})
            slots = free.slots if isinstance(free, Requires) else ()
            for required, demand in _demands(ground, spec, model, free, [name for name in noted if name not in names]):
                if label and (required, demand) in ordinary:
                    continue
                if not label:
                    ordinary.add((required, demand))
                for name in slots or names:
                    reason = f"{name} {spec.name} {demand}{label}"
                    yield Law(name, required, "no_backend_fits", reason, owner)


def _named(manifest: Manifest) -> Iterator[tuple[BackendSpec, tuple[str, ...]]]:
    """Backends with all arguments that name them."""
    for family, specs in manifest.facts.backends.items():
        names = dict.fromkeys(name for kind, namings in SLOTS.values() if kind == family for name in reversed(namings))
        yield from ((spec, tuple(names)) for spec in specs)


def _ask(
    ground: Ground, spec: BackendSpec, model: ModelFacts, said: Mapping[str, Any]
) -> tuple[Requires | Unfit, tuple[str, ...]]:
    """The backend's answer where a user says that, and the arguments it looked at."""
    owner, member = f"platform {ground.manifest.name}", f"backend {spec.name}"
    view = _Noting(owner, member, Facts(ground.device, model, ground.facts.capabilities), said)
    return ask(owner, member, spec.check, view), tuple(view.noted)


def _demands(
    ground: Ground, spec: BackendSpec, model: ModelFacts, free: Requires | Unfit, noted: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """(argument, what of it) that a backend demands of a model that it fits if it is named and nothing else said."""
    if not isinstance(free, Requires):
        return
    named = {name: spec.name for each, names in _named(ground.manifest) if each is spec for name in names[:1]}
    for required, values in free.values.items():
        yield required, _wants(required, values)
    for name in noted:
        for value in _values(ground, name):
            answer = free if value is None else _ask(ground, spec, model, {**named, name: value})[0]
            if isinstance(answer, Unfit):
                yield name, f"is not for {name} {_show(name, value)}: {', '.join(answer.reasons)}"
                break
            if name not in free.values and value not in answer.values.get(name, (value,)):
                yield name, _wants(name, answer.values[name])
                break


def _wants(argument: str, values: Sequence[Any]) -> str:
    return f"requires {argument} {', '.join(_show(argument, value) for value in values)}"


# ---- two slots


def _by_shared_pool(ground: Ground) -> Iterator[Law]:
    """Prefill and decode backends that cannot share a pool: of another order of its axes, or of other pages."""
    owner = f"platform {ground.manifest.name}"
    both = [name for name, (family, _) in SLOTS.items() if family == "attention"]
    specs = ground.manifest.facts.backends.get("attention", ())
    for label, model in _models(ground).items():
        fitting = [(spec, free) for spec in specs if isinstance(free := _ask(ground, spec, model, {})[0], Requires)]
        for (one, first), (other, second) in itertools.combinations(fitting, 2):
            reason = _apart(one, first, other, second)
            if reason:
                general = SLOTS[both[0]][1][-1]
                for slots in itertools.combinations((general, *both), 2):
                    told = f"not {slots[0]} {one.name} beside {slots[1]} {other.name}: {reason}{label}"
                    yield Law(*slots, "backends_disagree", told, owner)
                return


def _apart(one: BackendSpec, first: Requires, other: BackendSpec, second: Requires) -> str:
    if one.kv_order != other.kv_order:
        return f"one pool cannot have the axes {one.kv_order} and {other.kv_order}"
    for name in first.values.keys() & second.values.keys():
        if not set(first.values[name]) & set(second.values[name]):
            return f"one {_wants(name, first.values[name])}, the other {_wants(name, second.values[name])}"
    return ""
