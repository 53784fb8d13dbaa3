"""Backend selection: choose the highest-priority backends that are compatible with the user's values and each other.

A slot is an argument that names a backend of a family. Slots of one family share its candidates; the two
attention slots must also agree on the axis order of the KV pool. Pure functions: no backend is imported or built.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.args.config import ARGUMENTS
from srv.args.context import DeclaredReadsContext, Facts, call_plugin
from srv.args.spec import nearest
from srv.args.statement import BackendChoice, Layer, Statement
from srv.dist.group import is_divisible
from srv.errors import PluginError, Rejection
from srv.models.architectures.attention_layers import attention_layers
from srv.models.architectures.sharding import rank_facts
from srv.platform.facts import BackendSpec, Requires, Unfit
from srv.platform.layers import missing_traits, unsupported_layers
from srv.platform.manifest import Manifest
from srv.specs import AttentionLayer, AttentionSpec, ModelFacts, spec_name

# slot -> (family, the arguments that name its backend, the most specific first)
SLOTS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "prefill_attention_backend": ("attention", ("prefill_attention_backend", "attention_backend")),
        "decode_attention_backend": ("attention", ("decode_attention_backend", "attention_backend")),
        "sampling_backend": ("sampling", ("sampling_backend",)),
    }
)

# Families that have a slot. Backends that a plugin offers in other families are unused, and `srv doctor` reports them.
USED_FAMILIES = tuple(dict.fromkeys(family for family, _ in SLOTS.values()))


class Candidate(NamedTuple):
    """A backend for a slot. `requires`: allowed values by argument. `reasons`: why it does not fit; () if it fits."""

    slot: str
    spec: BackendSpec
    requires: Mapping[str, tuple[Any, ...]]
    reasons: tuple[str, ...] = ()


class BackendSlot(NamedTuple):
    """A slot and its candidates, best first. `user_choice`: the statement in which the user named a backend, if any."""

    name: str
    family: str
    candidates: tuple[Candidate, ...]
    user_choice: Statement | None

    def eligible(self) -> tuple[Candidate, ...]:
        """The candidates that fit; if the user named a backend, only that one."""
        return tuple(
            each
            for each in self.candidates
            if not each.reasons and (not self.user_choice or each.spec.name == self.user_choice.value)
        )


class BackendSelection(NamedTuple):
    """The result: one backend per slot, the statements of layer BACKEND that follow from them, and the rejections."""

    backends: Mapping[str, BackendChoice]
    statements: tuple[Statement, ...]
    rejections: tuple[Rejection, ...]


def unused_backends(manifest: Manifest, extra: Mapping[str, Sequence[BackendSpec]]) -> str:
    """A clause that names the offered backends of families without a slot; "" if there are none.

    extra: third-party specs for the platform, by family.
    """
    offered = {family: (*manifest.facts.backends.get(family, ()), *more) for family, more in extra.items()}
    names = [
        f"{family} backend {spec.name}"
        for family, specs in offered.items()
        if family not in USED_FAMILIES
        for spec in specs
    ]
    return f"not used by this version of srv: {', '.join(names)}" if names else ""


def choose_backends(
    platform: str,
    offered: Mapping[str, Sequence[BackendSpec]],
    facts: Facts,
    user: Mapping[str, Statement],
) -> BackendSelection:
    """Select backends for all slots together. `user` holds the user's winning statement by argument.

    The backends see the model as one rank does.
    """
    facts = facts._replace(model=on_one_rank(facts.model, user["tp_size"].value if "tp_size" in user else 1))
    layers = () if facts.model is None else attention_layers(facts.model)
    slots = [_make_slot(name, platform, offered, facts, layers, user) for name in SLOTS]
    rejections = _distinct(rejected for slot in slots for rejected in _slot_rejections(slot, platform))
    if rejections:
        return BackendSelection({}, (), rejections)
    first_conflict: list[str] = []
    for picks in itertools.product(*(slot.eligible() for slot in slots)):
        conflicts = _conflicts(picks)
        if not conflicts:
            ties = _distinct(
                rejected for slot, pick in zip(slots, picks, strict=True) for rejected in _tie_rejections(slot, pick)
            )
            chosen = {slot.name: _backend_choice(slot, pick, picks) for slot, pick in zip(slots, picks, strict=True)}
            return BackendSelection(chosen, _backend_statements(slots, picks, user), ties)
        first_conflict = first_conflict or conflicts
    return BackendSelection({}, (), (_no_combination_rejection(slots, platform, first_conflict),))


def on_one_rank(model: ModelFacts | None, ranks: int) -> ModelFacts | None:
    """The facts of one rank's part; of the whole model if it cannot be divided, which a constraint refuses."""
    if model is None or model.heads % ranks or not is_divisible(model.kv_heads, ranks):
        return model
    return rank_facts(model, ranks)


def _make_slot(
    name: str,
    platform: str,
    offered: Mapping[str, Sequence[BackendSpec]],
    facts: Facts,
    layers: Sequence[AttentionLayer],
    user: Mapping[str, Statement],
) -> BackendSlot:
    family, arguments = SLOTS[name]
    specs = sorted(offered.get(family, ()), key=lambda spec: (-spec.priority, spec.name))
    user_choice = next((user[argument] for argument in arguments if argument in user), None)
    candidates = tuple(
        _without_layers(_make_candidate(name, spec, platform, facts, user), facts.model, layers) for spec in specs
    )
    return BackendSlot(name, family, candidates, user_choice)


def _make_candidate(
    slot: str, spec: BackendSpec, platform: str, facts: Facts, user: Mapping[str, Statement]
) -> Candidate:
    family = SLOTS[slot][0]
    member = f"{family} backend {spec.name}"
    if family == "attention" and (unread := _unread_groups(facts.model)):
        return Candidate(slot, spec, {}, unread)
    values = {name: statement.value for name, statement in user.items()}
    context = DeclaredReadsContext(f"platform {platform}", member, facts, ARGUMENTS.keys(), values)
    result: object = call_plugin(f"platform {platform}", member, spec.check, context)
    if isinstance(result, Unfit):
        return Candidate(slot, spec, {}, result.reasons or ("it gives no reason",))
    if not isinstance(result, Requires):
        reason, remedy = f"check returned {type(result).__name__}", "It must return Requires or Unfit."
        raise PluginError(f"platform {platform}", member, reason, remedy)
    if result.slots and slot not in result.slots:
        return Candidate(slot, spec, {}, (f"it fits only {' or '.join(result.slots)} here",))
    requires = dict(result.values)
    if slot == "decode_attention_backend" and "graphs" in facts.capabilities and not spec.graphs:
        requires["disable_graphs"] = (True,)  # a replayed graph would use the sequence lengths of the captured step
    reasons: list[str] = []
    for name, allowed in requires.items():
        _check_requirement(name, allowed, platform, member)
        if name in user and user[name].value not in allowed:
            value = ARGUMENTS[name].show(user[name].value)
            reasons.append(f"requires {_requirement(name, allowed)}, not {value} (set by {user[name].owner})")
    return Candidate(slot, spec, requires, tuple(reasons))


def _unread_groups(model: ModelFacts | None) -> tuple[str, ...]:
    """Why no attention backend can serve a model: its cache groups without a key and a value per head."""
    return tuple(
        f"layers {', '.join(map(str, group.layers))} need a {spec_name(group)} cache group, which no attention backend "
        "of this version of srv reads"
        for group in (model.cache_groups if model else ())
        if not isinstance(group, AttentionSpec)
    )


def _without_layers(candidate: Candidate, model: ModelFacts | None, layers: Sequence[AttentionLayer]) -> Candidate:
    """The candidate, unfit if it is an attention backend without a trait that one of the model's layers has."""
    if model is None or SLOTS[candidate.slot][0] != "attention":
        return candidate
    missing = unsupported_layers(layers, model.context_length, partial(missing_traits, candidate.spec.traits))
    return candidate._replace(reasons=(*candidate.reasons, *missing)) if missing else candidate


def _check_requirement(name: str, values: Sequence[Any], platform: str, member: str) -> None:
    owner = f"platform {platform}"
    if name not in ARGUMENTS:
        reason = f"it requires {name}, which is not an argument"
        raise PluginError(owner, member, reason, "It must name arguments of srv.")
    if not values:
        raise PluginError(owner, member, f"it allows no value of {name}", "It must return Unfit instead.")
    for value in values:
        error = ARGUMENTS[name].validation_error(value)
        if error:
            reason = f"it requires {name} = {value!r}, which {error}"
            raise PluginError(owner, member, reason, "Report this to its authors.")


def _requirement(name: str, values: Sequence[Any]) -> str:
    """An argument with its allowed values: "page_size 32 or 64"."""
    shown = [ARGUMENTS[name].show(value) for value in values]
    return f"{name} {' or '.join(shown)}"


def _slot_rejections(slot: BackendSlot, platform: str) -> Iterator[Rejection]:
    if slot.eligible():
        return
    names = [candidate.spec.name for candidate in slot.candidates]
    if slot.user_choice is None:
        reasons = "; ".join(f"{each.spec.name}: {', '.join(each.reasons)}" for each in slot.candidates)
        yield Rejection(
            "no_backend_fits" if names else "no_backend",
            f"{slot.family} backend",
            None,
            "automatic choice",
            reasons or f"platform {platform} has none",
            "Change the conflicting settings." if names else "Choose another platform with --device.",
        )
        return
    named, argument = slot.user_choice, ARGUMENTS[slot.user_choice.argument]
    found = next((each for each in slot.candidates if each.spec.name == named.value), None)
    if found is None:
        closest = nearest(named.value, names)
        yield Rejection(
            "unknown_backend",
            named.argument,
            argument.show(named.value),
            named.owner,
            f"platform {platform} has no {slot.family} backend of that name",
            (f"Did you mean {closest}? " if closest else "") + f"Available backends: {', '.join(names) or 'none'}.",
        )
        return
    others = [each.spec.name for each in slot.candidates if not each.reasons]
    advice = f"Choose one that fits ({', '.join(others)}), or" if others else "Change the conflicting setting, or"
    yield Rejection(
        "backend_unfit",
        named.argument,
        argument.show(named.value),
        named.owner,
        "; ".join(found.reasons),
        f"{advice} leave {argument.flag} out.",
    )


def _conflicts(picks: Sequence[Candidate]) -> list[str]:
    """Clauses that say why these backends cannot work together; empty if they can."""
    conflicts: list[str] = []
    attention = {pick.slot: pick for pick in picks if SLOTS[pick.slot][0] == "attention"}
    if len({pick.spec.kv_order for pick in attention.values()}) > 1:
        orders = [f"{slot} {pick.spec.name} uses {pick.spec.kv_order}" for slot, pick in attention.items()]
        conflicts.append("prefill and decode must use the same axis order of the KV pool, but " + ", ".join(orders))
    for name, allowed in _requirements(picks).items():
        if not allowed:
            clauses = [
                f"{pick.spec.name} requires {_requirement(name, pick.requires[name])}"
                for pick in {each.spec.name: each for each in picks if name in each.requires}.values()
            ]
            conflicts.append(", but ".join(clauses))
    return conflicts


def _requirements(picks: Sequence[Candidate]) -> dict[str, tuple[Any, ...]]:
    """For each argument that a backend requires, the values that all backends allow, in the order of the first one."""
    merged: dict[str, tuple[Any, ...]] = {}
    for pick in picks:
        for name, values in pick.requires.items():
            merged[name] = tuple(each for each in merged[name] if each in values) if name in merged else tuple(values)
    return merged


def _tie_rejections(slot: BackendSlot, pick: Candidate) -> Iterator[Rejection]:
    equal = [each.spec.name for each in slot.eligible() if each.spec.priority == pick.spec.priority]
    if slot.user_choice is None and len(equal) > 1:
        yield Rejection(
            "equal_backends",
            f"{slot.family} backend",
            None,
            "automatic choice",
            f"{' and '.join(equal)} fit and have the same priority {pick.spec.priority}",
            f"Choose one with {ARGUMENTS[SLOTS[slot.name][1][-1]].flag}.",
        )


def _backend_choice(slot: BackendSlot, pick: Candidate, picks: Sequence[Candidate]) -> BackendChoice:
    if slot.user_choice is not None:
        reason = f"set by {slot.user_choice.owner}"
    elif pick is slot.eligible()[0]:
        reason = f"it has the highest priority ({pick.spec.priority}) of the backends that fit"
    else:
        reason = "it has the highest priority of the backends that are compatible with those of the other slots"
    rejected = tuple(
        (each.spec.name, each.reasons or (_why_not_picked(slot, each, pick, picks),))
        for each in slot.candidates
        if each is not pick
    )
    return BackendChoice(slot.name, slot.family, pick.spec, reason, rejected)


def _why_not_picked(slot: BackendSlot, other: Candidate, pick: Candidate, picks: Sequence[Candidate]) -> str:
    """Why a candidate that fits was not picked."""
    if slot.user_choice is not None:
        return f"fits, but {slot.user_choice.owner} selects {pick.spec.name}"
    swapped = [other if each is pick else each for each in picks]
    conflicts = _conflicts(swapped)
    if other.spec.priority > pick.spec.priority and conflicts:
        return "; ".join(conflicts)
    return f"fits, but its priority {other.spec.priority} is not higher than {pick.spec.priority}"


def _backend_statements(
    slots: Sequence[BackendSlot], picks: Sequence[Candidate], user: Mapping[str, Statement]
) -> tuple[Statement, ...]:
    """The statements of layer BACKEND: the requirements of the chosen backends, and their names."""
    statements: list[Statement] = []
    for name, values in _requirements(picks).items():
        owners = {f"{SLOTS[each.slot][0]} backend {each.spec.name}" for each in picks if name in each.requires}
        owner = " and ".join(sorted(owners))
        value = user[name].value if name in user else values[0]
        verb = "require" if len(owners) > 1 else "requires"
        reason = f"{owner} {verb} {_requirement(name, values)}"
        statements.append(Statement(name, value, Layer.BACKEND, owner, reason))
    for slot, pick in zip(slots, picks, strict=True):
        reason, owner = "automatic choice found that it is the best backend that fits", "automatic choice"
        if slot.user_choice:
            reason, owner = f"{slot.user_choice.argument} was set by {slot.user_choice.owner}", slot.user_choice.owner
        statements.append(Statement(slot.name, pick.spec.name, Layer.BACKEND, owner, reason))
    names = {pick.spec.name for pick in picks if SLOTS[pick.slot][0] == "attention"}
    if len(names) == 1 and "attention_backend" not in user:
        reason = "prefill and decode both use it"
        statements.append(Statement("attention_backend", names.pop(), Layer.BACKEND, "automatic choice", reason))
    return tuple(statements)


def _no_combination_rejection(slots: Sequence[BackendSlot], platform: str, conflicts: Sequence[str]) -> Rejection:
    named = sorted({f"{each.argument} by {each.owner}" for slot in slots if (each := slot.user_choice) is not None})
    return Rejection(
        "backends_disagree",
        "backends of platform " + platform,
        None,
        ", ".join(named) or "automatic choice",
        "; ".join(conflicts),
        "Choose compatible backends, or leave them out.",
    )


def _distinct(rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    return tuple(dict.fromkeys(rejections))
