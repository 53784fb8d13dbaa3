"""Backend selection: choose the highest-priority backends that are compatible with the user's values and each other.

A slot is an argument that names a backend of a family. Slots of one family share its candidates; the two
attention slots must also agree on the axis order of the KV pool. Pure functions: no backend is imported or built.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.args.backend_arguments import check_declared, check_requirement, requirement_text
from srv.args.backend_groups import sparse_arguments, unread_groups, unserved_states, without_states
from srv.args.backend_slot import BackendSlot, Candidate
from srv.args.config import ARGUMENTS
from srv.args.context import DeclaredReadsContext, Facts, call_plugin
from srv.args.rules.embeddings import WHOLE_PROMPTS
from srv.args.spec import nearest
from srv.args.statement import BackendChoice, Layer, Statement
from srv.dist.group import is_divisible
from srv.errors import PluginError, Rejection
from srv.kept import kept_per_object
from srv.models.facts.attention_layers import attention_layers
from srv.models.facts.sharding import rank_facts
from srv.models.facts.special_layers import mixture
from srv.models.facts.weight_rules import has_quantized_experts
from srv.platform.experts import EXPERTS, MOE_FAMILY, MOE_SLOT, missing_ops, needed_ops
from srv.platform.facts import BackendSpec, OpSpec, Requires, Unfit
from srv.platform.layers import LayerKind, layer_kinds, missing_traits, unsupported_layers
from srv.platform.manifest import Manifest
from srv.platform.op_choice import FULL_PRECISION, PRECISION
from srv.quantization.registry import chosen, method_of
from srv.specs import ModelFacts

# slot -> (family, the arguments that name its backend, the most specific first)
BACKEND_SLOTS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "prefill_attention_backend": ("attention", ("prefill_attention_backend", "attention_backend")),
        "decode_attention_backend": ("attention", ("decode_attention_backend", "attention_backend")),
        "sampling_backend": ("sampling", ("sampling_backend",)),
        MOE_SLOT: (MOE_FAMILY, (MOE_SLOT,)),
    }
)

# Families that have a slot. Backends that a plugin offers in other families are unused, and `srv doctor` reports them.
USED_FAMILIES = tuple(dict.fromkeys(family for family, _ in BACKEND_SLOTS.values()))
# Without these no model is served.
REQUIRED_FAMILIES = tuple(family for family in USED_FAMILIES if family != MOE_FAMILY)


# The slots whose backends run in captured steps.
_CAPTURED = ("decode_attention_backend", MOE_SLOT)
_CARRIED = ("no_backend_fits", "backend_unfit", "recurrent_states")

_OTHER_PLATFORM = "Choose another platform with --device"
_NOT_INVARIANT = (
    "it is not batch invariant: a result may depend on the other rows of its step, which "
    "enable_deterministic_inference excludes"
)


class BackendSelection(NamedTuple):
    """The result: one backend per slot, the statements of layer BACKEND that follow from them, and the rejections.

    `carried`: those of slots that have no backend, while all others have theirs.
    """

    backends: Mapping[str, BackendChoice]
    statements: tuple[Statement, ...]
    rejections: tuple[Rejection, ...] = ()
    carried: tuple[Rejection, ...] = ()


def unused_backends(manifest: Manifest, extra: Mapping[str, Sequence[BackendSpec]]) -> str:
    """A clause that names the offered backends of families without a slot; "" if there are none.

    extra: third-party specs for the platform, by family.
    """
    offered = {family: (*manifest.facts.backends.get(family, ()), *specs) for family, specs in extra.items()}
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
    *,
    ops: Sequence[OpSpec] = (),
) -> BackendSelection:
    """Select backends for all slots together. `user` holds the user's winning statement by argument.

    The backends see the model as one rank does. A model without experts needs no backend for these. `ops`: those of the
    platform. If no backend fits into one slot, the others are chosen nevertheless.
    """
    values = {name: statement.value for name, statement in user.items()}
    moe = None if facts.model is None else mixture(facts.model, values)
    whole = facts.model
    facts = facts._replace(model=on_one_rank(whole, user["tp_size"].value if "tp_size" in user else 1))
    layers = () if facts.model is None else _layer_kinds_of(facts.model)
    names = [name for name in BACKEND_SLOTS if name != MOE_SLOT or moe is not None]
    slots = [_make_slot(name, platform, offered, facts, layers, user) for name in names]
    slots = [_without_ops(slot, facts, values, ops) if slot.name == MOE_SLOT else slot for slot in slots]
    states = unserved_states(whole, values.get("model_impl"))  # no other backend would help
    judged = [slot for slot in slots if states is None or slot.family != "attention"]
    rejections = _distinct(rejected for slot in judged for rejected in _slot_rejections(slot, platform, user))
    rejections = rejections if states is None else (states, *rejections)
    carried: tuple[Rejection, ...] = ()
    if all(rejection.code in _CARRIED for rejection in rejections):
        carried, rejections = rejections, ()
        slots = [slot for slot in slots if slot.eligible()]
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
            return BackendSelection(chosen, _backend_statements(slots, picks, user), ties, carried)
        first_conflict = first_conflict or conflicts
    return BackendSelection({}, (), (_no_combination_rejection(slots, platform, first_conflict),))


@kept_per_object
def _layer_kinds_of(model: ModelFacts) -> tuple[LayerKind, ...]:
    return layer_kinds(attention_layers(model), model)


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
    layers: Sequence[LayerKind],
    user: Mapping[str, Statement],
) -> BackendSlot:
    family, arguments = BACKEND_SLOTS[name]
    arguments = (*sparse_arguments(name, facts.model), *arguments)
    specs = sorted(offered.get(family, ()), key=lambda spec: (-spec.priority, spec.name))
    user_choice = next((user[argument] for argument in arguments if argument in user), None)
    candidates = tuple(_without_layers(_make_candidate(name, spec, platform, facts, user), layers) for spec in specs)
    return BackendSlot(name, family, candidates, user_choice)


def _make_candidate(
    slot: str, spec: BackendSpec, platform: str, facts: Facts, user: Mapping[str, Statement]
) -> Candidate:
    family = BACKEND_SLOTS[slot][0]
    member = f"{family} backend {spec.name}"
    check_declared(spec, family, f"platform {platform}")
    if family == "attention" and facts.model is not None:
        facts = facts._replace(model=without_states(facts.model))
    if family == "attention" and (unread := unread_groups(facts.model, spec)):
        return Candidate(slot, spec, {}, unread)
    values = {name: statement.value for name, statement in user.items()}
    context = DeclaredReadsContext(f"platform {platform}", member, facts, ARGUMENTS.keys(), values)
    result: object = call_plugin(f"platform {platform}", member, spec.check, context)
    if isinstance(result, Unfit):
        return Candidate(slot, spec, {}, result.reasons or ("it gives no reason",))
    if family != "sampling" and values.get("enable_deterministic_inference") and not spec.batch_invariant:
        return Candidate(slot, spec, {}, (_NOT_INVARIANT,))
    if not isinstance(result, Requires):
        reason, remedy = f"check returned {type(result).__name__}", "It must return Requires or Unfit."
        raise PluginError(f"platform {platform}", member, reason, remedy)
    if result.slots and slot not in result.slots:
        return Candidate(slot, spec, {}, (f"it fits only {' or '.join(result.slots)} here",))
    requires = dict(result.values)
    if slot in _CAPTURED and "graphs" in facts.capabilities and not spec.graphs:
        requires["disable_graphs"] = (True,)  # a replayed graph would use the lengths, or experts, of the captured step
    if family == "attention" and facts.model is not None and not facts.model.has_pool:
        requires |= WHOLE_PROMPTS
    reasons: list[str] = []
    unmet: list[str] = []
    for name, allowed in requires.items():
        check_requirement(name, allowed, platform, member)
        if name in user and user[name].value not in allowed:
            value = ARGUMENTS[name].show(user[name].value)
            reasons.append(f"requires {requirement_text(name, allowed)}, not {value} (set by {user[name].owner})")
            unmet.append(name)
    return Candidate(slot, spec, requires, tuple(reasons), tuple(unmet))


def _without_layers(candidate: Candidate, layers: Sequence[LayerKind]) -> Candidate:
    """The candidate, unfit if it is an attention backend without a trait that one of the model's layers has."""
    if BACKEND_SLOTS[candidate.slot][0] != "attention":
        return candidate
    missing = unsupported_layers(layers, partial(missing_traits, candidate.spec.layer_traits))
    # That of latent groups may be among the candidate's already, without what else the same layers have.
    reasons = (reason for reason in candidate.reasons if not any(clause.startswith(reason) for clause in missing))
    return candidate._replace(reasons=(*reasons, *missing))


def _without_ops(slot: BackendSlot, facts: Facts, values: Mapping[str, Any], ops: Sequence[OpSpec]) -> BackendSlot:
    """The slot of experts, with a reason for each candidate that lacks an op which the model needs."""
    assert facts.model is not None
    quantization, online = values.get("quantization"), values.get("torchao_config")
    method = chosen(facts.model, quantization, online, dequantize=False) or method_of(facts.model)
    is_dequantized = facts.model.format == "gguf" or bool(values.get("dequantize_weights"))
    layer_ops = () if method is None or (method.dequantizable and is_dequantized) else method.ops
    needed = needed_ops(facts.model, values, facts.capabilities, layer_ops)
    if layer_ops and method is not None and not method.online and not has_quantized_experts(facts.model):
        needed = (EXPERTS,)
    full = values.get(PRECISION) == FULL_PRECISION
    candidates = tuple(
        candidate._replace(reasons=(*candidate.reasons, *missing_ops(ops, candidate.spec.name, needed, full=full)))
        for candidate in slot.candidates
    )
    return slot._replace(candidates=candidates)


def _slot_rejections(slot: BackendSlot, platform: str, user: Mapping[str, Statement]) -> Iterator[Rejection]:
    if slot.eligible():
        return
    names = [candidate.spec.name for candidate in slot.candidates]
    if slot.user_choice is None and (rejected := _unmet_by_all(slot, platform, user)) is not None:
        yield rejected
        return
    if slot.user_choice is None:
        alike_by_reasons: dict[tuple[str, ...], list[str]] = {}
        for candidate in slot.candidates:
            alike_by_reasons.setdefault(candidate.reasons, []).append(candidate.spec.name)
        reasons = "; ".join(f"{', '.join(alike)}: {', '.join(why)}" for why, alike in alike_by_reasons.items())
        yield Rejection(
            "no_backend_fits" if names else "no_backend",
            f"{slot.family} backend",
            None,
            "automatic choice",
            reasons or f"platform {platform} has none",
            _no_backend_remedy(slot, user),
        )
        return
    chosen, argument = slot.user_choice, ARGUMENTS[slot.user_choice.argument]
    named = next((candidate for candidate in slot.candidates if candidate.spec.name == chosen.value), None)
    if named is None:
        closest = nearest(chosen.value, names)
        yield Rejection(
            "unknown_backend",
            chosen.argument,
            argument.show(chosen.value),
            chosen.owner,
            f"platform {platform} has no {slot.family} backend of that name",
            (f"Did you mean {closest}? " if closest else "") + f"Available backends: {', '.join(names) or 'none'}.",
        )
        return
    others = [candidate.spec.name for candidate in slot.candidates if not candidate.reasons]
    advice = f"Choose one that fits ({', '.join(others)}), or" if others else "Change the conflicting setting, or"
    yield Rejection(
        "backend_unfit",
        chosen.argument,
        argument.show(chosen.value),
        chosen.owner,
        "; ".join(named.reasons),
        f"{advice} leave {argument.flag} out.",
    )


def _no_backend_remedy(slot: BackendSlot, user: Collection[str]) -> str:
    """`user`: the arguments that the user has set; nobody can change settings that are none of them."""
    reasons = " ".join(reason for candidate in slot.candidates for reason in candidate.reasons)
    if any(re.search(rf"\b{name}\b", reasons) for name in user):
        remedy = "Change the conflicting settings"
    else:
        remedy = "Serve another model, or choose another platform with --device" if slot.candidates else _OTHER_PLATFORM
    return f"{remedy}, or set --model-impl to transformers." if slot.family == MOE_FAMILY else f"{remedy}."


def _unmet_by_all(slot: BackendSlot, platform: str, user: Mapping[str, Statement]) -> Rejection | None:
    """The refusal of the one value of the user that no backend of the slot allows, if nothing else is in the way."""
    unmet = {candidate.unmet if len(candidate.unmet) == len(candidate.reasons) else () for candidate in slot.candidates}
    if len(unmet) != 1 or len(names := unmet.pop()) != 1:
        return None
    (name,) = names
    argument, statement = ARGUMENTS[name], user[name]
    required = [
        f"{candidate.spec.name} requires {requirement_text(name, candidate.requires[name])}"
        for candidate in slot.candidates
    ]
    allowed = dict.fromkeys(argument.show(value) for candidate in slot.candidates for value in candidate.requires[name])
    return Rejection(
        "no_backend_fits",
        name,
        argument.show(statement.value),
        statement.owner,
        f"no {slot.family} backend of platform {platform} can use it: {'; '.join(required)}",
        f"Leave {argument.flag} out, or set it to {' or '.join(allowed)}.",
    )


def _conflicts(picks: Sequence[Candidate]) -> list[str]:
    """Clauses that say why these backends cannot work together; empty if they can."""
    conflicts: list[str] = []
    attention = {pick.slot: pick for pick in picks if BACKEND_SLOTS[pick.slot][0] == "attention"}
    if len({pick.spec.kv_order for pick in attention.values()}) > 1:
        orders = [f"{slot} {pick.spec.name} uses {pick.spec.kv_order}" for slot, pick in attention.items()]
        conflicts.append("prefill and decode must use the same axis order of the KV pool, but " + ", ".join(orders))
    for name, allowed in _requirements(picks).items():
        if not allowed:
            clauses = [
                f"{pick.spec.name} requires {requirement_text(name, pick.requires[name])}"
                for pick in {pick.spec.name: pick for pick in picks if name in pick.requires}.values()
            ]
            conflicts.append(", but ".join(clauses))
    return conflicts


def _requirements(picks: Sequence[Candidate]) -> dict[str, tuple[Any, ...]]:
    """For each argument that a backend requires, the values that all backends allow, in the order of the first one."""
    merged: dict[str, tuple[Any, ...]] = {}
    for pick in picks:
        for name, values in pick.requires.items():
            merged[name] = (
                tuple(value for value in merged[name] if value in values) if name in merged else tuple(values)
            )
    return merged


def _tie_rejections(slot: BackendSlot, pick: Candidate) -> Iterator[Rejection]:
    equal = [candidate.spec.name for candidate in slot.eligible() if candidate.spec.priority == pick.spec.priority]
    if slot.user_choice is None and len(equal) > 1:
        yield Rejection(
            "equal_backends",
            f"{slot.family} backend",
            None,
            "automatic choice",
            f"{' and '.join(equal)} fit and have the same priority {pick.spec.priority}",
            f"Choose one with {ARGUMENTS[BACKEND_SLOTS[slot.name][1][-1]].flag}.",
        )


def _backend_choice(slot: BackendSlot, pick: Candidate, picks: Sequence[Candidate]) -> BackendChoice:
    if slot.user_choice is not None:
        reason = f"set by {slot.user_choice.owner}"
    elif pick is slot.eligible()[0]:
        reason = f"it has the highest priority ({pick.spec.priority}) of the backends that fit"
    else:
        reason = "it has the highest priority of the backends that are compatible with those of the other slots"
    rejected = tuple(
        (candidate.spec.name, candidate.reasons or (_why_not_picked(slot, candidate, pick, picks),))
        for candidate in slot.candidates
        if candidate is not pick
    )
    return BackendChoice(slot.name, slot.family, pick.spec, reason, rejected)


def _why_not_picked(slot: BackendSlot, other: Candidate, pick: Candidate, picks: Sequence[Candidate]) -> str:
    """Why a candidate that fits was not picked."""
    if slot.user_choice is not None:
        return f"fits, but {slot.user_choice.owner} selects {pick.spec.name}"
    swapped = [other if candidate is pick else candidate for candidate in picks]
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
        owners = {
            f"{BACKEND_SLOTS[backend.slot][0]} backend {backend.spec.name}"
            for backend in picks
            if name in backend.requires
        }
        owner = " and ".join(sorted(owners))
        value = user[name].value if name in user else values[0]
        verb = "require" if len(owners) > 1 else "requires"
        reason = f"{owner} {verb} {requirement_text(name, values)}"
        statements.append(Statement(name, value, Layer.BACKEND, owner, reason))
    for slot, pick in zip(slots, picks, strict=True):
        reason, owner = "automatic choice found that it is the best backend that fits", "automatic choice"
        if slot.user_choice:
            reason, owner = f"{slot.user_choice.argument} was set by {slot.user_choice.owner}", slot.user_choice.owner
        statements.append(Statement(slot.name, pick.spec.name, Layer.BACKEND, owner, reason))
    names = {pick.spec.name for pick in picks if BACKEND_SLOTS[pick.slot][0] == "attention"}
    if len(names) == 1 and "attention_backend" not in user:
        reason = "prefill and decode both use it"
        statements.append(Statement("attention_backend", names.pop(), Layer.BACKEND, "automatic choice", reason))
    return tuple(statements)


def _no_combination_rejection(slots: Sequence[BackendSlot], platform: str, conflicts: Sequence[str]) -> Rejection:
    choices = sorted(
        {f"{choice.argument} by {choice.owner}" for slot in slots if (choice := slot.user_choice) is not None}
    )
    return Rejection(
        "backends_disagree",
        "backends of platform " + platform,
        None,
        ", ".join(choices) or "automatic choice",
        "; ".join(conflicts),
        "Choose compatible backends, or leave them out.",
    )


def _distinct(rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    return tuple(dict.fromkeys(rejections))
