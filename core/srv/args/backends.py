"""Choosing backends: the first in priority that unifies with the user's values, and why not the others.

A slot is an argument that names a backend of a family. Slots of one family share its candidates; the two
attention slots must also agree on the order of the KV pool's axes. Pure: nothing is imported or built here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.args.config import ARGUMENTS
from srv.args.seen import Facts, View, ask
from srv.args.spec import nearest
from srv.args.statement import BackendChoice, Layer, Statement
from srv.errors import PluginError, Rejected
from srv.platform.facts import BackendSpec, Requires, Unfit
from srv.platform.manifest import Manifest

# slot -> (family, the arguments that name its backend, the most particular first)
SLOTS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "prefill_attention_backend": ("attention", ("prefill_attention_backend", "attention_backend")),
        "decode_attention_backend": ("attention", ("decode_attention_backend", "attention_backend")),
        "sampling_backend": ("sampling", ("sampling_backend",)),
    }
)

# Families that a slot takes its backend from. A plugin may offer others: nothing reads those yet, and it is told so.
USED_FAMILIES = tuple(dict.fromkeys(family for family, _ in SLOTS.values()))


class Candidate(NamedTuple):
    """A backend for a slot with what it requires, or with the reasons against it."""

    slot: str
    spec: BackendSpec
    requires: Mapping[str, tuple[Any, ...]]
    reasons: tuple[str, ...] = ()


class Slot(NamedTuple):
    """A slot with its candidates, best first. `wish` is the user's own naming of one, if there is any."""

    name: str
    family: str
    candidates: tuple[Candidate, ...]
    wish: Statement | None

    def eligible(self) -> tuple[Candidate, ...]:
        """Those that fit and that the user's wish, if any, leaves."""
        return tuple(
            each
            for each in self.candidates
            if not each.reasons and (not self.wish or each.spec.name == self.wish.value)
        )


class Choice(NamedTuple):
    """The outcome: a backend a slot, the statements of layer BACKEND that follow, and the refusals."""

    backends: Mapping[str, BackendChoice]
    statements: tuple[Statement, ...]
    rejections: tuple[Rejected, ...]


def unused_backends(manifest: Manifest, extra: Mapping[str, Sequence[BackendSpec]]) -> str:
    """What is offered in families that this version does not choose from, by name, a clause; empty if nothing is.

    extra: third parties' specs for the platform, by family.
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
) -> Choice:
    """Choose for all slots together. `user` holds the user's winning statement by argument."""
    slots = [_slot(name, platform, offered, facts, user) for name in SLOTS]
    rejections = _distinct(rejected for slot in slots for rejected in _slot_rejections(slot, platform))
    if rejections:
        return Choice({}, (), rejections)
    first_conflict: list[str] = []
    for picks in itertools.product(*(slot.eligible() for slot in slots)):
        conflicts = _conflicts(picks)
        if not conflicts:
            ties = _distinct(rejected for slot, pick in zip(slots, picks, strict=True) for rejected in _tie(slot, pick))
            chosen = {slot.name: _told(slot, pick, picks) for slot, pick in zip(slots, picks, strict=True)}
            return Choice(chosen, _statements(slots, picks, user), ties)
        first_conflict = first_conflict or conflicts
    return Choice({}, (), (_no_combination(slots, platform, first_conflict),))


def _slot(
    name: str,
    platform: str,
    offered: Mapping[str, Sequence[BackendSpec]],
    facts: Facts,
    user: Mapping[str, Statement],
) -> Slot:
    family, namings = SLOTS[name]
    specs = sorted(offered.get(family, ()), key=lambda spec: (-spec.priority, spec.name))
    wish = next((user[naming] for naming in namings if naming in user), None)
    return Slot(name, family, tuple(_candidate(name, spec, platform, facts, user) for spec in specs), wish)


def _candidate(slot: str, spec: BackendSpec, platform: str, facts: Facts, user: Mapping[str, Statement]) -> Candidate:
    member = f"{SLOTS[slot][0]} backend {spec.name}"
    values = {name: said.value for name, said in user.items()}
    view = View(f"platform {platform}", member, facts, ARGUMENTS.keys(), values)
    answer: object = ask(f"platform {platform}", member, spec.check, view)
    if isinstance(answer, Unfit):
        return Candidate(slot, spec, {}, answer.reasons or ("it gives no reason",))
    if not isinstance(answer, Requires):
        raise PluginError(
            f"platform {platform}", member, f"check gave {type(answer).__name__}", "It must give Requires or Unfit."
        )
    if answer.slots and slot not in answer.slots:
        return Candidate(slot, spec, {}, (f"it fits {' or '.join(answer.slots)} alone here",))
    requires = dict(answer.values)
    if slot == "decode_attention_backend" and "graphs" in facts.capabilities and not spec.graphs:
        requires["disable_graphs"] = (True,)  # its lengths would stay those of the captured step
    reasons: list[str] = []
    for name, values_wanted in requires.items():
        _check_requirement(name, values_wanted, platform, member)
        if name in user and user[name].value not in values_wanted:
            said = ARGUMENTS[name].show(user[name].value)
            reasons.append(f"requires {_wanted(name, values_wanted)}, not {said} (set by {user[name].owner})")
    return Candidate(slot, spec, requires, tuple(reasons))


def _check_requirement(name: str, values: Sequence[Any], platform: str, member: str) -> None:
    owner = f"platform {platform}"
    if name not in ARGUMENTS:
        raise PluginError(owner, member, f"it requires {name}, which is no argument", "It must name arguments of srv.")
    if not values:
        raise PluginError(owner, member, f"it requires no value of {name}", "It must answer Unfit instead.")
    for value in values:
        against = ARGUMENTS[name].against(value)
        if against:
            raise PluginError(
                owner, member, f"it requires {name} = {value!r}, which {against}", "Report this to its authors."
            )


def _wanted(name: str, values: Sequence[Any]) -> str:
    shown = [ARGUMENTS[name].show(value) for value in values]
    return f"{name} {' or '.join(shown)}"


def _slot_rejections(slot: Slot, platform: str) -> Iterator[Rejected]:
    if slot.eligible():
        return
    names = [candidate.spec.name for candidate in slot.candidates]
    if slot.wish is None:
        told = "; ".join(f"{each.spec.name}: {', '.join(each.reasons)}" for each in slot.candidates)
        yield Rejected(
            "no_backend_fits" if names else "no_backend",
            f"{slot.family} backend",
            None,
            "automatic choice",
            told or f"platform {platform} offers none",
            "Change what stands against one of them." if names else "Choose another platform with --device.",
        )
        return
    wish, argument = slot.wish, ARGUMENTS[slot.wish.argument]
    found = next((each for each in slot.candidates if each.spec.name == wish.value), None)
    if found is None:
        near = nearest(wish.value, names)
        yield Rejected(
            "unknown_backend",
            wish.argument,
            argument.show(wish.value),
            wish.owner,
            f"platform {platform} has no {slot.family} backend of that name",
            (f"Did you mean {near}? " if near else "") + f"There are: {', '.join(names) or 'none'}.",
        )
        return
    others = [each.spec.name for each in slot.candidates if not each.reasons]
    advice = f"Name one that fits ({', '.join(others)}), or" if others else "Change what stands against it, or"
    yield Rejected(
        "backend_unfit",
        wish.argument,
        argument.show(wish.value),
        wish.owner,
        "; ".join(found.reasons),
        f"{advice} leave {argument.flag} out.",
    )


def _conflicts(picks: Sequence[Candidate]) -> list[str]:
    """Why these backends cannot work together, clause by clause; empty if they can."""
    conflicts: list[str] = []
    orders = {pick.slot: pick for pick in picks if SLOTS[pick.slot][0] == "attention"}
    if len({pick.spec.kv_order for pick in orders.values()}) > 1:
        told = [f"{slot} {pick.spec.name} reads {pick.spec.kv_order}" for slot, pick in orders.items()]
        conflicts.append("prefill and decode must read one order of the KV pool, but " + ", ".join(told))
    for name, wanted in _requirements(picks).items():
        if not wanted:
            told = [
                f"{pick.spec.name} requires {_wanted(name, pick.requires[name])}"
                for pick in {each.spec.name: each for each in picks if name in each.requires}.values()
            ]
            conflicts.append(", but ".join(told))
    return conflicts


def _requirements(picks: Sequence[Candidate]) -> dict[str, tuple[Any, ...]]:
    """For each argument required by any of them, the values that all take, in the first one's order."""
    merged: dict[str, tuple[Any, ...]] = {}
    for pick in picks:
        for name, values in pick.requires.items():
            merged[name] = tuple(each for each in merged[name] if each in values) if name in merged else tuple(values)
    return merged


def _tie(slot: Slot, pick: Candidate) -> Iterator[Rejected]:
    equal = [each.spec.name for each in slot.eligible() if each.spec.priority == pick.spec.priority]
    if slot.wish is None and len(equal) > 1:
        yield Rejected(
            "equal_backends",
            f"{slot.family} backend",
            None,
            "automatic choice",
            f"{' and '.join(equal)} fit with equal priority {pick.spec.priority}",
            f"Name one with {ARGUMENTS[SLOTS[slot.name][1][-1]].flag}.",
        )


def _told(slot: Slot, pick: Candidate, picks: Sequence[Candidate]) -> BackendChoice:
    if slot.wish is not None:
        why = f"set by {slot.wish.owner}"
    else:
        why = f"it fits, and of those that do its priority {pick.spec.priority} is the highest"
        if pick is not slot.eligible()[0]:
            why = "it is the first in priority that fits together with the other backends"
    against = tuple(
        (each.spec.name, each.reasons or (_against_fitting(slot, each, pick, picks),))
        for each in slot.candidates
        if each is not pick
    )
    return BackendChoice(slot.name, slot.family, pick.spec, why, against)


def _against_fitting(slot: Slot, other: Candidate, pick: Candidate, picks: Sequence[Candidate]) -> str:
    if slot.wish is not None:
        return f"fits, but {slot.wish.owner} names {pick.spec.name}"
    swapped = [other if each is pick else each for each in picks]
    conflicts = _conflicts(swapped)
    if other.spec.priority > pick.spec.priority and conflicts:
        return "; ".join(conflicts)
    return f"fits, but its priority {other.spec.priority} is not above {pick.spec.priority}"


def _statements(
    slots: Sequence[Slot], picks: Sequence[Candidate], user: Mapping[str, Statement]
) -> tuple[Statement, ...]:
    """What the chosen backends say as layer BACKEND: their requirements, and their own names."""
    said: list[Statement] = []
    for name, values in _requirements(picks).items():
        asking = {f"{SLOTS[each.slot][0]} backend {each.spec.name}" for each in picks if name in each.requires}
        owner = " and ".join(sorted(asking))
        value = user[name].value if name in user else values[0]
        verb = "require" if len(asking) > 1 else "requires"
        said.append(Statement(name, value, Layer.BACKEND, owner, f"{owner} {verb} {_wanted(name, values)}"))
    for slot, pick in zip(slots, picks, strict=True):
        reason, owner = "automatic choice found it the best that fits", "automatic choice"
        if slot.wish:
            reason, owner = f"{slot.wish.argument} was set by {slot.wish.owner}", slot.wish.owner
        said.append(Statement(slot.name, pick.spec.name, Layer.BACKEND, owner, reason))
    names = {pick.spec.name for pick in picks if SLOTS[pick.slot][0] == "attention"}
    if len(names) == 1 and "attention_backend" not in user:
        reason = "prefill and decode both use it"
        said.append(Statement("attention_backend", names.pop(), Layer.BACKEND, "automatic choice", reason))
    return tuple(said)


def _no_combination(slots: Sequence[Slot], platform: str, conflicts: Sequence[str]) -> Rejected:
    wishes = sorted({f"{slot.wish.argument} by {slot.wish.owner}" for slot in slots if slot.wish})
    return Rejected(
        "backends_disagree",
        "backends of platform " + platform,
        None,
        ", ".join(wishes) or "automatic choice",
        "; ".join(conflicts),
        "Name backends that agree, or leave them out.",
    )


def _distinct(rejections: Iterable[Rejected]) -> tuple[Rejected, ...]:
    return tuple(dict.fromkeys(rejections))
