"""Records of native decoders in the quantization methods of checkpoints: the feature `model:ARCHITECTURE/METHOD`.

Each is judged as a launch is, with the forms of `checkpoint_forms`. Two things save most of the time:

- An architecture that a variant refuses unquantized is refused in every method, for that reason.
- Variants of a platform that have the same capabilities, and give the same answers for a common mixture in every form,
  share their answers for all others. `tests/support_matrix/test_weight_methods.py` compares some with a launch's own.

This module writes no page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from srv.models import derive
from srv.models.blueprint import Part
from srv.models.families.registry import weight_mapping
from srv.models.families.trees import native_tree, pooled_of
from srv.models.layers.moe_config import expert_names
from srv.specs import ModelFacts
from srv_matrix.checkpoint_forms import METHODS, forms, in_form
from srv_matrix.judge import OF_ANY_MODEL, Verdict, model_verdict
from srv_matrix.records import Record, Status
from srv_matrix.variant_context import VariantContext

COMMON = "Qwen3MoeForCausalLM"  # has linear layers and experts
OF_CORE = "unsupported_quantization"  # the code of refusals on every platform
NamedForms: TypeAlias = tuple[tuple[str, ModelFacts], ...]


class JudgedForms(NamedTuple):
    """`statuses`: as the platform declares it, and of core alone. `refusal`: code and reason, or two empty texts."""

    statuses: tuple[Status, Status]
    refusal: tuple[str, str]


class QuantizedModel(NamedTuple):
    """A sample model of one architecture in the forms of each method, by their names."""

    architecture: str
    forms: Mapping[str, NamedForms]


def method_of(feature: str) -> str | None:
    """The method of a feature of a model; None if it is in another format, or if the feature is none of a model."""
    name = feature.rpartition("/")[2] if feature.startswith("model:") else ""
    return name if name in METHODS else None


def quantized_models(models: Sequence[ModelFacts]) -> tuple[QuantizedModel, ...]:
    """`models`: unquantized ones of native architectures. Those that generate no text are left out."""
    quantized = []
    for model in models:
        if pooled_of(model.architecture, model.config) is None:
            layers = _layers(model, native_tree(model.architecture, model.config))
            quantized.append(
                QuantizedModel(model.architecture, {method: _in_forms(model, method, layers) for method in METHODS})
            )
    return tuple(quantized)


def _in_forms(model: ModelFacts, method: str, layers: Sequence[str]) -> NamedForms:
    return tuple((form.name, in_form(model, method, form, layers)) for form in forms(method, model.architecture))


def _layers(model: ModelFacts, tree: Part) -> tuple[str, ...]:
    """The linear layers by the names of srv, with those of experts; fused where checkpoints have them fused."""
    ops, mapping = derive.model_ops(tree, model.dtype), weight_mapping(model.architecture)
    fused_names = [matrix.names for matrix in ops.matrices if not matrix.embedding and not matrix.role]
    for experts in ops.experts:
        fused_names += expert_names(experts.prefix, experts.sizes["experts"], experts.activation)
    return tuple(name for names in fused_names for name in mapping.fused(names))


def weight_methods(
    contexts: Sequence[VariantContext],
    models: Sequence[QuantizedModel],
    unquantized: Mapping[tuple[str, str], Mapping[str, Record]],
) -> Iterator[Record]:
    """The records of all variants. `unquantized`: those of the architectures as they are, by platform and variant."""
    common = next((model for model in models if model.architecture == COMMON), None)
    shared: dict[tuple[object, ...], _Answers] = {}
    for context in contexts:
        answers = _Answers(context)
        same = () if common is None else tuple(answers.of(common, method, context.variant) for method in METHODS)
        answers = shared.setdefault((context.manifest.name, same), answers)
        records = unquantized[context.manifest.name, context.variant]
        for model in models:
            record = records[model.architecture]
            for method in METHODS:
                works = record.status.works
                judged = _combined(answers.of(model, method, context.variant)) if works else _unquantized(record)
                yield context.record("model", f"{model.architecture}/{method}", *judged)


def _unquantized(record: Record) -> JudgedForms:
    """A refusal that does not depend on the method. It refers to the unquantized cell, whose reason may be long."""
    reason = f"a launch refuses it unquantized as well: {record.feature} has the reason"
    return JudgedForms((record.declared, record.core), (record.reason_code, reason))


def _combined(verdicts: Sequence[tuple[str, Verdict]]) -> JudgedForms:
    """Whether a launch accepts every form, some, or none; with the first refusal. `verdicts`: by the names of forms."""
    refused = [(name, verdict) for name, verdict in verdicts if not verdict.accepted]
    if not refused:
        return JudgedForms((Status.SUPPORTED, Status.SUPPORTED), ("", ""))
    (name, verdict), some = refused[0], len(refused) < len(verdicts)
    status = Status.LIMITED if some else Status.UNSUPPORTED
    statuses = (Status.SUPPORTED, status) if verdict.code == OF_CORE else (status, Status.SUPPORTED)
    reason = f"not with {name}: {verdict.reason}" if some else verdict.reason
    return JudgedForms(statuses, (verdict.code, reason))


class _Answers:
    """The verdicts on one variant, each asked for once; other variants may share them."""

    def __init__(self, context: VariantContext) -> None:
        self._context = context
        self._known: dict[tuple[str, str], tuple[tuple[str, Verdict], ...]] = {}
        self._of_any_model: dict[tuple[str, str], Verdict] = {}

    def of(self, model: QuantizedModel, method: str, variant: str) -> tuple[tuple[str, Verdict], ...]:
        """The verdict on each form by its name. `variant`: which one reasons name."""
        key = model.architecture, method
        if key not in self._known:
            self._known[key] = tuple((name, self._judged(method, name, facts)) for name, facts in model.forms[method])
        if variant == self._context.variant:
            return self._known[key]
        variant_name = re.compile(rf"\b{re.escape(self._context.variant)}\b")
        return tuple(
            (name, replace(verdict, reason=variant_name.sub(variant, verdict.reason)))
            for name, verdict in self._known[key]
        )

    def _judged(self, method: str, form: str, model: ModelFacts) -> Verdict:
        if (method, form) in self._of_any_model:
            return self._of_any_model[method, form]
        answer = model_verdict(model, self._context.manifest, self._context.device)
        answer = replace(answer, reason=answer.reason.removeprefix(f"{model.path}: "))
        if answer.code in OF_ANY_MODEL:
            self._of_any_model[method, form] = answer
        return answer
