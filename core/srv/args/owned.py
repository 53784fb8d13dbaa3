"""Defaults and contributions with their owners: core's own, and those of the platform. Must not know their values."""

from __future__ import annotations

from dataclasses import dataclass

from srv.args.defaults import CONTRIBUTIONS, DEVICE_DEFAULTS, GENERIC_DEFAULTS, MODEL_DEFAULTS
from srv.args.statement import Layer
from srv.errors import PluginError
from srv.platform.facts import Contribution, Default
from srv.platform.manifest import Manifest


@dataclass(frozen=True, slots=True)
class OwnedDefault:
    """A default with its layer and its owner.

    `skip_if_unsupported`: a default of core that is ignored if the platform declares its value unsupported.
    """

    default: Default
    layer: Layer
    owner: str
    skip_if_unsupported: bool = False


def owned_defaults(manifest: Manifest | None, chosen_because: str | None) -> list[OwnedDefault]:
    """Core's defaults and the platform's. `chosen_because`: why this platform was chosen, if the user did not."""
    owned = [OwnedDefault(default, Layer.MODEL, "model") for default in MODEL_DEFAULTS]
    owned += [OwnedDefault(default, Layer.GENERIC, "srv") for default in GENERIC_DEFAULTS]
    if manifest is not None:
        name = manifest.name
        owned += [OwnedDefault(default, Layer.GENERIC, "srv", skip_if_unsupported=True) for default in DEVICE_DEFAULTS]
        owned += [OwnedDefault(default, Layer.PLATFORM, f"platform {name}") for default in manifest.facts.defaults]
        if chosen_because is not None:
            owned.append(OwnedDefault(Default("device", lambda _: name, chosen_because), Layer.GENERIC, "srv"))
    return owned


def owned_contributions(manifest: Manifest | None) -> list[tuple[str, Contribution]]:
    """Contributions to quantities with their owners; the platform's may replace some of core's."""
    if manifest is None:
        return []
    from_platform = [(f"platform {manifest.name}", contribution) for contribution in manifest.facts.contributions]
    from_core = {(contribution.quantity, contribution.name): contribution for contribution in CONTRIBUTIONS}
    names = frozenset(from_core)
    for owner, contribution in from_platform:
        for name in contribution.replaces:
            if (contribution.quantity, name) not in names:
                member, reason = (
                    f"contribution {contribution.name} to {contribution.quantity}",
                    f"srv has no part {name} of it",
                )
                raise PluginError(owner, member, reason, "Its `replaces` must name parts of srv.")
            from_core.pop((contribution.quantity, name), None)
    return [("srv", contribution) for contribution in from_core.values()] + from_platform
