"""Pairs of arguments whose valid values depend on each other on one variant, with all dependencies found.

There are three kinds of dependencies: constraints that read another argument; requirements of a backend, for common
models and for models with other kinds of attention; and backends of two slots that cannot share a KV pool. They are
found by trying values: a dependency that applies only to models or values not tried here is described by its remedy,
or not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from srv.args.backends import BACKEND_SLOTS, on_one_rank
from srv.args.config import ARGUMENTS, SPELLINGS
from srv.args.context import DeclaredReadsContext, Facts, call_plugin
from srv.args.defaults import CONSTRAINTS, DEVICE_CONSTRAINTS
from srv.args.prerequisites import PREREQUISITES
from srv.platform.facts import BackendSpec, Constraint, DeviceFacts, Requires, Unfit
from srv.platform.manifest import Manifest
from srv.specs import ModelFacts
from srv_matrix.records import Record, Status, lower
from srv_matrix.sample import recurrent_model
from srv_matrix.sweep import values_of
from srv_matrix.variant_context import VariantContext

CORE = "srv"
_ORDER = {name: position for position, name in enumerate(ARGUMENTS)}
_SEVERAL_DEVICES = 4  # for dependencies that hosts with one device do not show
_DEVICE, _CAPABILITIES = ":device", ":capabilities"  # among the names of arguments that are read
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@dataclass(frozen=True, slots=True)
class Dependency:
    """A dependency between two arguments. `owner`: core, or the platform that declares it."""

    one: str
    other: str
    code: str
    reason: str
    owner: str

    @property
    def pair(self) -> tuple[str, str]:
        """The two arguments in the order of their declaration, whichever of them the dependency refuses."""
        first, second = sorted((self.one, self.other), key=_ORDER.__getitem__)
        return first, second


Tree: TypeAlias = dict[tuple[Any, ...], "str | tuple[str | None]"]
Answers: TypeAlias = dict[tuple[int, str], tuple[Constraint, Tree]]  # by the id of the constraint, which they hold


def pairs(context: VariantContext, answers: Answers) -> Iterator[Record]:
    """One record for each pair of arguments with a dependency.

    `answers`: of constraints, found before with the same model and manifests; those that are found here are added.
    """
    by_pair: dict[tuple[str, str], list[Dependency]] = {}
    for dependency in (*_by_constraints(context, answers), *_by_backends(context), *_by_shared_pool(context)):
        by_pair.setdefault(dependency.pair, []).append(dependency)
    for (one, other), dependencies in by_pair.items():
        core = lower(_core_status(one), _core_status(other))
        code = "planned" if core is Status.PLANNED else dependencies[0].code
        reason = "; ".join(dict.fromkeys(dependency.reason for dependency in dependencies))
        owners = ", ".join(dict.fromkeys(dependency.owner for dependency in dependencies))
        yield context.record("pair", f"{one}+{other}", (Status.LIMITED, core), (code, reason), owners)


def _core_status(argument: str) -> Status:
    return Status.PLANNED if ARGUMENTS[argument].arg.planned else Status.LIMITED


def _values(context: VariantContext, argument: str) -> tuple[Any, ...]:
    """Its default on the variant, the values of the sweep, and a few more, because sizes need more than boundaries."""
    declared, family = ARGUMENTS[argument], ARGUMENTS[argument].arg.family
    names = [spec.name for spec in context.manifest.facts.backends.get(family, ())] if family else []
    more: list[Any] = [] if names else list(SPELLINGS.published.get(argument, ()))
    if declared.kind.base is int and declared.kind.many:
        more = [(2, 3)]
    elif declared.kind.base is int:
        more = [2, 3]
    elif declared.kind.many:
        more = [("x", "y")]
    tried = [context.values[argument], *values_of(declared, names), *more]
    return tuple(dict.fromkeys(value for value in tried if value is None or declared.validation_error(value) is None))


class _RecordingContext(DeclaredReadsContext):
    """A context that records which arguments are read, in their order."""

    def __init__(
        self, owner: str, member: str, facts: Facts, reads: Collection[str], values: Mapping[str, Any]
    ) -> None:
        super().__init__(owner, member, facts, reads, values)
        self.read: dict[str, None] = {}

    def __getitem__(self, argument: str) -> Any:
        self.read[argument] = None
        return super().__getitem__(argument)


class _FactsRecordingContext(_RecordingContext):
    """One that records facts, too, but for the model."""

    @property
    def device(self) -> DeviceFacts:
        self.read[_DEVICE] = None
        return super().device

    @property
    def capabilities(self) -> frozenset[str]:
        self.read[_CAPABILITIES] = None
        return super().capabilities


# ---- constraints


def _by_constraints(context: VariantContext, answers: Answers) -> Iterator[Dependency]:
    models: dict[str, ModelFacts | None] = {**_models(context), " if no model is known": None}
    several = replace(context.device, count=_SEVERAL_DEVICES)
    for owner, constraint in _constraints(context.manifest):
        if _cannot_be_set(context, constraint.argument, answers):
            continue
        asked_values, bare = (
            [
                _Asked(
                    owner,
                    constraint,
                    replace(context, facts=facts._replace(device=device, model=model)),
                    label,
                    answers,
                )
                for device, (label, model) in itertools.product((context.device, several), models.items())
            ]
            for facts in (context.facts, context.facts._replace(capabilities=frozenset()))
        )
        for other in constraint.reads:
            if other in ARGUMENTS and other != constraint.argument and len(_values(context, other)) > 1:
                reason = _describe_refusal(context, constraint, other, asked_values)
                # Without a reason, the platform may not have the backend, or may have the capability, that it is about.
                if reason or not (
                    _is_about_a_backend(constraint) or _describe_refusal(context, constraint, other, bare)
                ):
                    text = reason or _undescribed(constraint, other)
                    yield Dependency(constraint.argument, other, constraint.code, text, owner)


def _constraints(manifest: Manifest) -> Iterator[tuple[str, Constraint]]:
    # Of USER_CONSTRAINTS, only the prerequisites: the others concern drafters of other distributions.
    yield from ((CORE, constraint) for constraint in (*CONSTRAINTS, *DEVICE_CONSTRAINTS, *PREREQUISITES))
    yield from ((f"platform {manifest.name}", constraint) for constraint in manifest.facts.constraints)


def _cannot_be_set(context: VariantContext, argument: str, answers: Answers) -> bool:
    """Whether the variant refuses every value but the default whatever else is set: then nothing depends on others."""
    several = replace(context.device, count=_SEVERAL_DEVICES)
    on_several = replace(context, facts=context.facts._replace(device=several))
    others = [value for value in _values(context, argument) if value != ARGUMENTS[argument].default]
    return any(
        all(
            _Asked(owner, constraint, on_several, "", answers).answer({argument: value}) is not None for value in others
        )
        for owner, constraint in _constraints(context.manifest)
        if constraint.argument == argument and not constraint.reads
    )


def _describe_refusal(context: VariantContext, constraint: Constraint, other: str, questions: Sequence[_Asked]) -> str:
    """Describe two values that the constraint refuses together, although it accepts one of them with another value.

    If no two values alone are refused, up to two further arguments that it reads are varied too, and are part of the
    description. `questions`: the constraint with each model, on one device and then on several. "" if none are found;
    of a constraint on a backend, because the platform does not have the backend that it is about.
    """
    one = constraint.argument
    further = [name for name in constraint.reads if name in ARGUMENTS and name not in (one, other)]
    counts = range(min(2, len(further)) + 1)
    tried = {name: _values(context, name) for name in (one, other, *further)}
    for asking, count in itertools.product(questions, counts):
        for names in itertools.combinations(further, count):
            for chosen in itertools.product(*(tried[name] for name in names)):
                further_values = dict(zip(names, chosen, strict=True))
                for value in tried[one]:
                    refusal = _refusal(asking, (other, tried[other]), {one: value, **further_values})
                    if refusal:
                        return refusal + asking.label
    return ""


def _is_about_a_backend(constraint: Constraint) -> bool:
    return any(name in ARGUMENTS and ARGUMENTS[name].arg.family for name in (constraint.argument, *constraint.reads))


def _undescribed(constraint: Constraint, other: str) -> str:
    return f"{constraint.argument} depends on {other} and other arguments. {constraint.remedy}".removesuffix(".")


class _Asked:
    """A constraint with one model on one number of devices, and its answers so far. `label`: of the model.

    The answers form a tree by what the constraint reads, in its order, because most answers follow from few arguments:

        tp_size ─┬─ 1 ─► None
                 └─ 2 ── model_impl ─┬─ "transformers" ─► "the layers of transformers ..."
                                     └─ ...

    The device and its capabilities are among what is read, so that all variants share the tree of a model.
    """

    def __init__(self, owner: str, constraint: Constraint, on: VariantContext, label: str, answers: Answers) -> None:
        self.constraint, self.label = constraint, label
        self._owner, self._facts = owner, on.facts
        count = on.facts.device.count if on.facts.device else 0
        device = (on.manifest.name, on.variant, count)
        self._known = {**on.values, _DEVICE: device, _CAPABILITIES: on.facts.capabilities}
        _, self._tree = answers.setdefault((id(constraint), label), (constraint, {}))

    def answer(self, values: Mapping[str, Any]) -> str | None:
        """The reason of a refusal of these values, and the defaults of all other arguments; or None."""
        path: tuple[Any, ...] = ()
        while isinstance(answer := self._tree.get(path), str):
            path = (*path, values[answer] if answer in values else self._known.get(answer))
        return answer[0] if answer is not None else self._ask(values)

    def _ask(self, values: Mapping[str, Any]) -> str | None:
        reads = {self.constraint.argument, *self.constraint.reads}
        member = f"constraint {self.constraint.code} on {self.constraint.argument}"
        read = {name: values.get(name, self._known.get(name)) for name in (*reads, _DEVICE, _CAPABILITIES)}
        context = _FactsRecordingContext(self._owner, member, self._facts, reads, read)
        reason = call_plugin(self._owner, member, self.constraint.check, context)
        path: tuple[Any, ...] = ()
        for name in context.read:
            self._tree[path] = name
            path = (*path, read[name])
        self._tree[path] = (reason,)
        return reason


def _refusal(question: _Asked, varied: tuple[str, Sequence[Any]], values: Mapping[str, Any]) -> str:
    """The first refusal of `values` with a value of the `varied` argument; "" unless another value is accepted."""
    one, (other, candidates) = question.constraint.argument, varied
    verdicts = [(tried, question.answer({**values, other: tried})) for tried in candidates]
    refused = [(tried, reason) for tried, reason in verdicts if reason is not None]
    if not refused or len(refused) == len(verdicts):
        return ""
    tried, reason = refused[0]
    further = [f"{name} {_show(name, value)}" for name, value in values.items() if name != one]
    others = ", ".join([f"{other} {_show(other, tried)}", *further])
    return f"not {one} {_show(one, values[one])} with {others}: {reason}"


def _show(argument: str, value: Any) -> str:
    return ARGUMENTS[argument].show(value)


# ---- backends


class _OfModel(_RecordingContext):
    """For the check of a backend, to which the model depends on `tp_size`."""

    @property
    def model(self) -> ModelFacts | None:
        self.read["tp_size"] = None
        return super().model


def _models(context: VariantContext) -> Mapping[str, ModelFacts]:
    """The common model, and variations of it whose families have their own dependencies, by their label in reasons."""
    common = context.facts.model
    if common is None:
        return {}
    latent = replace(common, architecture="DeepseekV3ForCausalLM", heads=128, config={**common.config, **_LATENT})
    sinks = replace(common, architecture="GptOssForCausalLM")
    # Half of these columns are not whole quantization blocks.
    blocks = replace(common, config={**common.config, "intermediate_size": 11008}, column_block=256)
    slow = replace(common, format="gguf", quantization="gguf:IQ3_S", stored_types={"IQ3_S": 8_000_000_000})
    bare = replace(common, format="config")
    return {
        "": common,
        " for latent attention": latent,
        " for GPT-OSS": sinks,
        " for K-quants": blocks,
        " for recurrent layers": recurrent_model(),
        " for IQ3_S": slow,
        " for a model without weights": bare,
    }


def _by_backends(context: VariantContext) -> Iterator[Dependency]:
    """The requirements of each backend: with all arguments unset, and with each value of an argument that it reads."""
    owner = f"platform {context.manifest.name}"
    for spec, names in _backends_by_argument(context.manifest):
        common: set[tuple[str, str]] = set()
        for label, model in _models(context).items():
            unset, read = _check_backend(context, spec, model, {names[0]: spec.name})
            slots = unset.slots if isinstance(unset, Requires) else ()
            further = [name for name in read if name not in names]
            for required, demand in _requirements(context, spec, model, unset, further):
                if label and (required, demand) in common:
                    continue
                if not label:
                    common.add((required, demand))
                for name in slots or names:
                    reason = f"{name} {spec.name} {demand}{label}"
                    yield Dependency(name, required, "no_backend_fits", reason, owner)


def _backends_by_argument(manifest: Manifest) -> Iterator[tuple[BackendSpec, tuple[str, ...]]]:
    """All backends, each with the arguments that can select it."""
    for family, specs in manifest.facts.backends.items():
        names = dict.fromkeys(
            name for kind, arguments in BACKEND_SLOTS.values() if kind == family for name in reversed(arguments)
        )
        yield from ((spec, tuple(names)) for spec in specs)


def _check_backend(
    context: VariantContext, spec: BackendSpec, model: ModelFacts, values: Mapping[str, Any]
) -> tuple[Requires | Unfit, tuple[str, ...]]:
    """The result of the backend's check if a user sets these values, and the arguments that it read."""
    owner, member = f"platform {context.manifest.name}", f"backend {spec.name}"
    facts = Facts(context.device, on_one_rank(model, values.get("tp_size", 1)), context.facts.capabilities)
    recording = _OfModel(owner, member, facts, ARGUMENTS.keys(), values)
    return call_plugin(owner, member, spec.check, recording), tuple(recording.read)


def _requirements(
    context: VariantContext, spec: BackendSpec, model: ModelFacts, unset: Requires | Unfit, read: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Pairs (argument, requirement) of a backend that fits the model if nothing else is set.

    `unset`: its result in that case. `read`: the arguments that its check reads.
    """
    if not isinstance(unset, Requires):
        return
    backends = {
        name: spec.name
        for backend, names in _backends_by_argument(context.manifest)
        if backend is spec
        for name in names[:1]
    }
    for required, values in unset.values.items():
        yield required, _requires(required, values)
    for name in read:
        for value in _values(context, name):
            answer = unset if value is None else _check_backend(context, spec, model, {**backends, name: value})[0]
            if isinstance(answer, Unfit):
                yield name, f"does not fit {name} {_show(name, value)}: {', '.join(answer.reasons)}"
                break
            if name not in unset.values and value not in answer.values.get(name, (value,)):
                yield name, _requires(name, answer.values[name])
                break


def _requires(argument: str, values: Sequence[Any]) -> str:
    return f"requires {argument} {', '.join(_show(argument, value) for value in values)}"


# ---- two slots


def _by_shared_pool(context: VariantContext) -> Iterator[Dependency]:
    """Prefill and decode backends that cannot share a KV pool, because its layout or other requirements differ."""
    owner = f"platform {context.manifest.name}"
    both = [name for name, (family, _) in BACKEND_SLOTS.items() if family == "attention"]
    specs = context.manifest.facts.backends.get("attention", ())
    for label, model in _models(context).items():
        fitting = [
            (spec, result)
            for spec in specs
            if isinstance(result := _check_backend(context, spec, model, {})[0], Requires)
        ]
        for (one, first), (other, second) in itertools.combinations(fitting, 2):
            reason = _incompatibility(one, first, other, second)
            if reason:
                general = BACKEND_SLOTS[both[0]][1][-1]
                for slots in itertools.combinations((general, *both), 2):
                    text = f"not {slots[0]} {one.name} with {slots[1]} {other.name}: {reason}{label}"
                    yield Dependency(*slots, "backends_disagree", text, owner)
                return


def _incompatibility(one: BackendSpec, first: Requires, other: BackendSpec, second: Requires) -> str:
    if one.kv_order != other.kv_order:
        return f"one pool cannot have both axis orders {one.kv_order} and {other.kv_order}"
    for name in first.values.keys() & second.values.keys():
        if not set(first.values[name]) & set(second.values[name]):
            return f"one {_requires(name, first.values[name])}, the other {_requires(name, second.values[name])}"
    return ""
