"""Checks of level 0, in the order in which they run: what can be said of a plugin without its device. Torch-free."""

from __future__ import annotations

from srv.testing.conformance.model import Check, Level

_LOADED = ("manifest.found", "manifest.loads")
_MANIFEST = ("manifest",)


def _static(name: str, summary: str, target: str, remedy: str, after: tuple[str, ...] = _MANIFEST) -> Check:
    return Check(name, Level.L0, summary, f"static:{target}", remedy, after=after, seconds=45.0)


L0 = (
    _static(
        "manifest.found",
        "exactly one distribution brings a platform of this name",
        "found",
        'Register the manifest once, in the entry-point group "srv.platforms", under the name that --device takes.',
        (),
    ),
    _static(
        "manifest.loads",
        "the manifest can be imported",
        "loads",
        "Make `python -c 'import your_package.manifest'` work.",
        _LOADED,
    ),
    _static(
        "manifest.import_purity",
        "importing the manifest imports neither torch nor what is built on it",
        "import_purity",
        "Move the import into `create`, or into a function of the probe.",
        _LOADED,
    ),
    _static(
        "manifest.patches",
        "importing the manifest changes nothing of srv",
        "patches",
        "Extend srv through the manifest and the platform object; assign nothing to its modules or classes.",
        _LOADED,
    ),
    _static(
        "manifest.versions",
        "the contract and the versions of srv that the plugin was made for include this one",
        "versions",
        "Set Manifest.api and Manifest.core to what the plugin was written for and tested with.",
        _LOADED,
    ),
    _static(
        "manifest.members",
        "every member of the manifest is known, and of its type",
        "members",
        "Give the members of srv.platform.manifest.Manifest and srv.platform.facts.PlatformFacts, no others.",
        _LOADED,
    ),
    _static(
        "manifest.signatures",
        "every function of the manifest can be called as core calls it",
        "signatures",
        "Take the parameters that srv.platform.manifest.Manifest documents, and need no others.",
        _LOADED,
    ),
    _static(
        "manifest.reasons",
        "each default, contribution, constraint and declaration says why",
        "reasons",
        "Write a clause for an operator who reads it.",
        _LOADED,
    ),
    _static(
        "manifest.worker_env",
        "worker_env gives texts by name for every profile",
        "worker_env",
        "Return a mapping of str to str, from the device facts and the rank alone.",
    ),
    _static(
        "probe.timeout",
        "the probe ends within its time",
        "probe_timeout",
        "Ask the driver with a time limit of its own, less than ProbeContext.timeout_s.",
    ),
    _static(
        "probe.answers",
        "the probe gives a ProbeResult, whatever it finds",
        "probe_answers",
        "Return ProbeResult(False, reason, remedy, code) where the device cannot be used; raise nothing.",
        ("manifest", "probe.timeout"),
    ),
    _static(
        "probe.device",
        "what the probe finds is of a variant that the manifest names, and has capabilities",
        "probe_device",
        "Name the variant in Manifest.variants, or add a note for a variant that is not known yet.",
        ("manifest", "probe"),
    ),
    _static(
        "backends.families",
        "there are backends for attention and for sampling",
        "families",
        "Declare a BackendSpec of each of these families in PlatformFacts.backends.",
    ),
    _static(
        "backends.used",
        "every backend is of a family that this version of srv chooses from",
        "used",
        "Nothing needs to be done: they are left alone.",
    ),
    _static(
        "backends.targets",
        "what each backend's target names is there",
        "targets",
        'Correct BackendSpec.target ("package.module:Class").',
    ),
    _static(
        "plan.resolves",
        "with nothing set, a small model resolves on every profile, in every dtype that it declares",
        "resolves",
        "Correct the statement that is named; each may read only what it lists in `reads`.",
        ("manifest", "backends.families"),
    ),
    _static(
        "plan.user_values",
        "what a user sets is taken as it is, or refused with code, reason and remedy; never replaced",
        "user_values",
        "A statement must change nothing that it is shown: refuse a value with a Constraint instead.",
        ("manifest", "plan.resolves"),
    ),
    _static(
        "plan.declared",
        "no value that is declared supported is refused by a constraint of the same plugin",
        "declared",
        "Correct the Support or the Constraint: one of them is not true.",
        ("manifest", "plan.resolves", "plan.user_values"),
    ),
)
