"""The context in which features and pairs are judged: one variant of a platform, with one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srv.args.config import ARGUMENTS
from srv.args.context import Facts
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import Manifest
from srv.specs import ModelFacts
from srv_matrix.judge import baseline
from srv_matrix.records import Kind, Level, Record, Status


@dataclass(frozen=True)
class VariantContext:
    """One variant of a platform with a model. `values`: the defaults of all arguments there."""

    manifest: Manifest
    variant: str
    device: DeviceFacts
    facts: Facts
    values: Mapping[str, Any]

    def record(
        self,
        kind: Kind,
        name: str,
        statuses: tuple[Status, Status],
        code_and_reason: tuple[str, str] = ("", ""),
        declared_by: str = "",
    ) -> Record:
        """A record of this variant. `statuses`: what the platform declares, and what core implements."""
        declared_by = declared_by or f"platform {self.manifest.name}"
        undeclared = statuses[0] in (Status.UNKNOWN, Status.PLANNED)
        return Record(
            f"{kind}:{name}",
            kind,
            self.manifest.name,
            self.variant,
            *statuses,
            reason_code=code_and_reason[0],
            reason=code_and_reason[1],
            declared_by="" if undeclared else declared_by,
            base=None if undeclared else Level.E1,
        )


def make_variant_context(manifest: Manifest, variant: str, model: ModelFacts) -> VariantContext:
    """The context of a variant, with its own profile as the device."""
    device = manifest.facts.profiles[variant]
    facts = Facts(device, model, manifest.facts.capabilities(device))
    defaults = baseline(model, manifest, device).values
    values = {name: defaults.get(name, argument.default) for name, argument in ARGUMENTS.items()}
    return VariantContext(manifest, variant, device, facts, values)
