"""Checks of level 0, which need no device, in the order in which they run. Torch-free."""

from __future__ import annotations

from srv.testing.conformance.model import Check, Level

_LOADED = ("manifest.found", "manifest.loads")
_MANIFEST = ("manifest",)


def _static_check(name: str, summary: str, target: str, remedy: str, after: tuple[str, ...] = _MANIFEST) -> Check:
    return Check(name, Level.L0, summary, f"static:{target}", remedy, after=after, seconds=45.0)


L0 = (
    _static_check(
        "manifest.found",
        "exactly one distribution provides a platform of this name",
        "found",
        'Register the manifest once, in the entry-point group "srv.platforms", under the name that --device takes.',
        (),
    ),
    _static_check(
        "manifest.loads",
        "the manifest can be imported",
        "loads",
        "Make `python -c 'import your_package.manifest'` work.",
        _LOADED,
    ),
    _static_check(
        "manifest.import_time",
        "importing the manifest takes at most 2 seconds, because every command imports the manifests that it lists",
        "import_time",
        "Look for drivers and devices in the probe, which has a process of its own; import heavy packages there too.",
        _LOADED,
    ),
    _static_check(
        "manifest.import_purity",
        "importing the manifest imports neither torch nor a package that is built on it",
        "import_purity",
        "Move the import into `create`, or into a function of the probe.",
        _LOADED,
    ),
    _static_check(
        "manifest.patches",
        "importing the manifest does not change srv",
        "patches",
        "Extend srv through the manifest and the platform object; assign nothing to its modules or classes.",
        _LOADED,
    ),
    _static_check(
        "manifest.versions",
        "the plugin supports this contract version and this version of srv",
        "versions",
        "Set Manifest.api and Manifest.core to what the plugin was written for and tested with.",
        _LOADED,
    ),
    _static_check(
        "manifest.members",
        "every member of the manifest is known and of its type",
        "members",
        "Use only the members of srv.platform.manifest.Manifest and srv.platform.facts.PlatformFacts.",
        _LOADED,
    ),
    _static_check(
        "manifest.signatures",
        "every function of the manifest can be called as core calls it",
        "signatures",
        "Accept the parameters that srv.platform.manifest.Manifest documents, and require no others.",
        _LOADED,
    ),
    _static_check(
        "manifest.reasons",
        "each default, contribution, constraint and declaration has a reason",
        "reasons",
        "Write a clause that an operator understands.",
        _LOADED,
    ),
    _static_check(
        "manifest.call_purity",
        "no function of the manifest imports torch, or a package that is built on it, when it is called",
        "call_purity",
        "Decide by the device facts alone; move the import into `create`, a backend, or the probe.",
    ),
    _static_check(
        "manifest.worker_env",
        "worker_env returns a mapping of str to str for every profile",
        "worker_env",
        "Return a mapping of str to str that depends only on the device facts and the rank.",
    ),
    _static_check(
        "probe.timeout",
        "the probe ends within its time limit",
        "probe_timeout",
        "Query the driver with a time limit below ProbeContext.timeout_s.",
    ),
    _static_check(
        "probe.answers",
        "the probe returns a ProbeResult, whatever it finds, and the same one in another process",
        "probe_answers",
        "Return ProbeResult(False, reason, remedy, code) if the device cannot be used; raise nothing.",
        ("manifest", "probe.timeout"),
    ),
    _static_check(
        "probe.device",
        "the probed device has capabilities, and a variant that the manifest names",
        "probe_device",
        "Add the variant to Manifest.variants, or a note for a variant that is not known yet.",
        ("manifest", "probe"),
    ),
    _static_check(
        "backends.families",
        "there are backends for attention and for sampling",
        "families",
        "Declare a BackendSpec of each of these families in PlatformFacts.backends.",
    ),
    _static_check(
        "backends.used",
        "this version of srv uses every backend family",
        "used",
        "Nothing needs to be done: the unused backends are ignored.",
    ),
    _static_check(
        "backends.targets",
        "the target of each backend exists",
        "targets",
        'Correct BackendSpec.target ("package.module:Class").',
    ),
    _static_check(
        "plan.ops",
        "PlatformFacts.ops has the ops of models and of every capability, in each dtype, on every profile",
        "ops",
        "Add an OpSpec for it, or remove the capability on such devices.",
    ),
    _static_check(
        "plan.resolves",
        "with default arguments, a small model resolves on every profile in every dtype that it declares",
        "resolves",
        "Correct what the message names; a Default, Contribution or Constraint may read only what it lists in `reads`.",
        ("manifest", "backends.families"),
    ),
    _static_check(
        "plan.features_off",
        "a user can turn off graphs, overlap and the prefix cache on every profile",
        "features_off",
        "No default or constraint may need these features: core offers to turn them off, and the kit does.",
        ("manifest", "plan.resolves", "backends.families"),
    ),
    _static_check(
        "plan.user_values",
        "a user's value is used unchanged, or refused with code, reason and remedy",
        "user_values",
        "No function may change the context that it receives: refuse a value with a Constraint instead.",
        ("manifest", "plan.resolves"),
    ),
    _static_check(
        "plan.declared",
        "no constraint of the plugin refuses a value that it declares supported",
        "declared",
        "Correct the Support or the Constraint: one of them is wrong.",
        ("manifest", "plan.resolves", "plan.user_values"),
    ),
)
