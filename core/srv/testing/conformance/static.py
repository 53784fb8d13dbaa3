"""L0: the manifest, the probe, and resolution with the plugin's defaults and constraints. No device, no torch."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from srv.args.backends import REQUIRED_FAMILIES, USED_FAMILIES, unused_backends
from srv.args.resolve import resolve
from srv.args.spec import Argument
from srv.args.statement import Resolved, UserStatement
from srv.args.support import by_argument, on_variant, support_of_value
from srv.errors import PluginError, Refusal
from srv.platform.capabilities import OPS_OF
from srv.platform.experts import EXPERT_OPS, MOE_FAMILY, with_added
from srv.platform.facts import BackendSpec, DeviceFacts, OpCall
from srv.platform.import_wall import HEAVY_PREFIXES
from srv.platform.manifest import AUTOLOAD, ProbeResult
from srv.platform.op_choice import choose_op
from srv.platform.registry import find_all_backends
from srv.testing.conformance.facts import DTYPES, MIXTURE, MODEL_OPS, OP_SIZE, WINDOWED, small_model
from srv.testing.conformance.kit import PROBE_SECONDS, Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.values import candidate_statements, implemented, user_input, user_statement

# Every command imports the manifests of the platforms that it lists, and each probe imports its own once more.
IMPORT_SECONDS = 2.0
_SURELY_SLOW = 3
_TIMED_IMPORT = """
import importlib, sys, time
import srv.platform.registry
started = time.perf_counter()
importlib.import_module(sys.argv[1])
print(time.perf_counter() - started)
"""
OFF_SWITCHES = ("disable_graphs", "disable_overlap_schedule", "disable_radix_cache")
_OP_SIZES = ("dim", "head_dim", "rotary_dim", "inputs", "outputs")  # of the ops of models and capabilities
_LARGE_OP_SIZE = 8192
# What functions are asked about: clauses, with the arguments of `small_model`.
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    " with heads of 256": {"head_dim": 256},
    " with experts": {"fields": MIXTURE},
    " with a window": {"fields": WINDOWED},
}
_PROBE_FAULTS = ("probe_crashed", "probe_raised", "probe_garbage")


def found(kit: Kit) -> str:
    """One distribution provides the platform; other checks validate its manifest."""
    error = kit.installed.error
    if error is not None and error.code == "contested":
        raise _as_fault(error)
    return f"{kit.installed.distribution} {kit.installed.version} provides it, as {kit.installed.target}"


def loads(kit: Kit) -> str:
    """The entry point can be imported; other checks look for forbidden imports and patches."""
    error = kit.installed.error
    if error is not None and error.code == "import_failed":
        raise _as_fault(error)
    return f"{kit.installed.target} is imported"


def import_time(kit: Kit) -> str:
    """Importing the manifest is quick. A slow first import is measured again, with the files in the page cache."""
    _raise_if_refused(kit)
    seconds = kit.import_seconds
    if IMPORT_SECONDS < seconds < _SURELY_SLOW * IMPORT_SECONDS:
        seconds = min(seconds, _import_seconds(kit.installed.target.partition(":")[0]))
    if seconds > IMPORT_SECONDS:
        raise Fault(f"the manifest takes {seconds:.1f} s to import; at most {IMPORT_SECONDS:g} s are allowed")
    return f"it takes {seconds:.2f} s to import (at most {IMPORT_SECONDS:g} s)"


def _import_seconds(module: str) -> float:
    """How long a new process takes to import a module, after the parts of srv that read manifests."""
    environment = {**os.environ, AUTOLOAD: "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", _TIMED_IMPORT, module]
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
    )
    return float(process.stdout.splitlines()[-1])


def import_purity(kit: Kit) -> str:
    """The manifest imports no heavy package, neither in this process nor in the probe's new child process."""
    _raise_if_refused(kit, "impure")
    if kit.installed.error is None and kit.probe_result.code == "manifest_impure":
        raise Fault(kit.probe_result.reason)
    return "neither torch nor anything built on it is imported with the manifest"


def patches(kit: Kit) -> str:
    """Importing the manifest does not change srv."""
    _raise_if_refused(kit, "patches_core")
    return "no name or function of srv has changed"


def versions(kit: Kit) -> str:
    """The plugin supports this contract version and this version of srv."""
    _raise_if_refused(kit, "version")
    manifest = kit.manifest
    return f"written for contract {manifest.api[0]}.{manifest.api[1]}, works with srv {manifest.core}"


def members(kit: Kit) -> str:
    """Every member is known and of its type."""
    _raise_if_refused(kit, "contract", "unknown_member")
    return "every member is known and of its type"


def signatures(kit: Kit) -> str:
    """Every function can be called as core calls it."""
    _raise_if_refused(kit, "signature")
    return "every function of the manifest can be called as core calls it"


def reasons(kit: Kit) -> str:
    """Defaults, contributions, constraints and declarations have a reason."""
    _raise_if_refused(kit, "text")
    facts = kit.manifest.facts
    count = len(facts.defaults) + len(facts.contributions) + len(facts.constraints) + len(facts.support)
    return f"each of {count} defaults, contributions, constraints and declarations has a reason"


def call_purity(kit: Kit) -> str:
    """No function of the manifest imports torch when it is called: `srv plan` calls them all, without a device."""
    profiles, count = kit.manifest.facts.profiles, 0  # capabilities has been called when the manifest was validated
    if imported := _heavy_modules():
        raise Fault(f"a function of the manifest, such as capabilities, imports {min(imported, key=len)}")
    for name, device in profiles.items():
        for what, call in _calls(kit, device):
            count += 1
            with suppress(Exception):  # other checks report what a function raises
                call()
            if imported := _heavy_modules():
                raise Fault(f"on profile {name}, {what} imports {min(imported, key=len)}")
    return f"{count} calls import neither torch nor anything built on it"


def _calls(kit: Kit, device: DeviceFacts) -> Iterator[tuple[str, Callable[[], object]]]:
    """What `srv plan` calls for a profile; the last calls every function of defaults, constraints and backends."""
    facts = kit.manifest.facts
    yield "worker_env", partial(kit.manifest.worker_env, device, 0)
    for spec in facts.ops:
        for dtype, size in itertools.product(DTYPES, (OP_SIZE, _LARGE_OP_SIZE)):
            what = f"the check of OpSpec {spec.name} of {spec.op} in {dtype} at {size}"
            yield what, partial(spec.check, device, _op_call(dtype, size))
    for dtype, (model, shape) in itertools.product(DTYPES, _MODELS.items()):
        yield f"resolving a small {dtype} model{model}", partial(_resolve, kit, device, dtype, **shape)


def _heavy_modules() -> set[str]:
    """The imported packages that no manifest may import."""
    return {name for name in sys.modules if name.partition(".")[0].startswith(HEAVY_PREFIXES)}


def _op_call(dtype: str, size: int = OP_SIZE) -> OpCall:
    return OpCall(dtype, dict.fromkeys(_OP_SIZES, size))


def worker_env(kit: Kit) -> str:
    """The environment of workers is a mapping of str to str, for every profile."""
    manifest = kit.manifest
    for name, device in manifest.facts.profiles.items():
        env: object = manifest.worker_env(device, 0)
        if not (isinstance(env, Mapping) and all(isinstance(part, str) for item in env.items() for part in item)):
            raise Fault(f"worker_env returned {env!r} for profile {name}, which is not a mapping of str to str")
    return f"{len(manifest.facts.profiles)} profiles"


def resolves(kit: Kit) -> str:
    """With default arguments, every profile resolves for a small model in every dtype that it declares."""
    count = 0
    for name, device, dtype in _profile_dtypes(kit):
        try:
            _resolve(kit, device, dtype)
        except Refusal as refusal:
            raise Fault(f"with default arguments, profile {name} refuses a small {dtype} model: {refusal}") from refusal
        count += 1
    return f"{count} pairs of profile and dtype resolve with default arguments"


def features_off(kit: Kit) -> str:
    """Each feature that core can turn off is accepted as turned off: alone, and all of them together."""
    together = tuple(user_statement(name, True) for name in OFF_SWITCHES)
    count = 0
    for name, device, dtype in _profile_dtypes(kit, every_dtype=False):
        for statements in (*((feature,) for feature in together), together):
            try:
                _resolve(kit, device, dtype, *statements)
            except Refusal as refusal:
                what = " and ".join(statement.argument for statement in statements)
                raise Fault(f"on profile {name}, {what} is refused: {refusal}") from refusal
        count += 1
    return f"{', '.join(OFF_SWITCHES)} on {count} profiles"


def user_values(kit: Kit) -> str:
    """A user's value is used unchanged, or refused with code, reason and remedy."""
    accepted = refused = 0
    for name, device, dtype in _profile_dtypes(kit, every_dtype=False):
        for argument in implemented():
            for statement in candidate_statements(argument, kit.manifest):
                try:
                    resolved = _resolve(kit, device, dtype, statement)
                except Refusal as refusal:
                    _check_refusal(refusal, argument.flag, name)
                    refused += 1
                    continue
                value = resolved.config.get(argument.name)
                if value != statement.value and not argument.asks_for_automatic(statement.value):
                    shown = f"{argument.show(value)} but the user set {argument.show(statement.value)}"
                    raise Fault(f"on profile {name}, {argument.name} becomes {shown}")
                accepted += 1
    return f"{accepted} values of {len(implemented())} arguments are used unchanged, {refused} are refused"


def _check_refusal(refusal: Refusal, flag: str, profile: str) -> None:
    for rejection in refusal.rejections:
        if not (rejection.code and rejection.reason.strip() and rejection.remedy.strip()):
            raise Fault(f"on profile {profile}, {flag} is refused without code, reason and remedy: {rejection}")


def declared(kit: Kit) -> str:
    """No value that is declared supported violates a constraint of the same plugin."""
    constraints = {(constraint.argument, constraint.code) for constraint in kit.manifest.facts.constraints}
    count = 0
    for name, device, dtype in _profile_dtypes(kit, every_dtype=False):
        for argument, value in _declared_supported(kit, device):
            count += 1
            try:
                _resolve(kit, device, dtype, user_statement(argument.name, value))
            except Refusal as refusal:
                for rejection in refusal.rejections:
                    if (rejection.what, rejection.code) in constraints:
                        shown = f"{argument.name} = {argument.show(value)}"
                        raise Fault(
                            f"on profile {name}, {shown} is declared supported, but refused: {rejection}"
                        ) from refusal
    return f"{count} values are declared supported, and no constraint of the plugin refuses one"


def _declared_supported(kit: Kit, device: DeviceFacts) -> Iterator[tuple[Argument, Any]]:
    """Arguments that core implements, with the values that the plugin declares supported on a device."""
    support = by_argument(on_variant(device.variant, kit.manifest.facts.support))
    for argument in implemented():
        declared = support.get(argument.name, ())
        for value in dict.fromkeys(
            value for declaration in declared for value in (*declaration.values, *declaration.only)
        ):
            verdict = support_of_value(argument, value, declared)
            if verdict is not None and verdict.status == "supported":
                yield argument, value


def ops(kit: Kit) -> str:
    """The facts list an op for all that models and capabilities need, in each dtype, on every profile."""
    facts, count = kit.manifest.facts, 0
    if not facts.ops:
        raise NotApplicable("PlatformFacts.ops lists no ops")
    for name, device, dtype in _profile_dtypes(kit):
        declared = facts.capabilities(device)
        needed = {
            op: f"the capability {capability}"
            for capability, op_names in OPS_OF.items()
            if capability in declared
            for op in op_names
        }
        for op, why in (dict.fromkeys(MODEL_OPS, "every model") | needed).items():
            choice = choose_op(facts.ops, device, op, _op_call(dtype))
            if choice.spec is None:
                reasons = "; ".join(f"{spec}: {reason}" for spec, reason in choice.rejected) or "none is listed"
                raise Fault(
                    f"on profile {name}, {why} needs {op} in {dtype}, but PlatformFacts.ops has none: {reasons}"
                )
            count += 1
    return f"{count} ops of profiles and dtypes"


def families(kit: Kit) -> str:
    """There is a backend of each family that a server needs."""
    specs = dict(_backends(kit))
    missing = [family for family in REQUIRED_FAMILIES if not specs.get(family)]
    if missing:
        raise Fault(f"it declares no backend of the family {' and '.join(missing)}")
    return "; ".join(
        f"{family}: {', '.join(spec.name for spec in family_specs)}"
        for family, family_specs in specs.items()
        if family_specs
    )


def used(kit: Kit) -> str:
    """This version of srv uses every backend family; otherwise the check is skipped and names the unused backends."""
    unused = unused_backends(kit.manifest, find_all_backends(kit.name))
    if unused:
        raise NotApplicable(f"{unused}. Nothing runs or tests them")
    return f"this version chooses from {', '.join(USED_FAMILIES)}"


def targets(kit: Kit) -> str:
    """Each backend's target exists. Its module is parsed, not imported, because that may need the device."""
    count = 0
    for family, specs in _backends(kit):
        for spec in specs:
            if family == MOE_FAMILY:
                _require_ops(kit, spec)
            for target in [op.target for op in spec.ops] if family == MOE_FAMILY else [spec.target]:
                reason = _target_error(target)
                if reason:
                    raise Fault(f"{family} backend {spec.name} points to {target}, but {reason}")
                count += 1
    return f"{count} targets exist"


def _require_ops(kit: Kit, spec: BackendSpec) -> None:
    """Fault unless a backend of experts, which has no target, has ops of its name."""
    specs = with_added(kit.manifest.facts.ops, [spec])
    if not any(other.name == spec.name and other.op in EXPERT_OPS for other in specs):
        raise Fault(
            f"moe backend {spec.name} has none of the ops {', '.join(EXPERT_OPS)}",
            "List OpSpecs with the backend's name in PlatformFacts.ops, or in BackendSpec.ops if a package adds it.",
        )


def probe_answers(kit: Kit) -> str:
    """The probe returns a result, whatever it finds, and the same one in another process."""
    result = kit.probe_result
    if result.code in _PROBE_FAULTS:
        raise Fault(result.reason)
    again = kit.probe()
    if (again.available, again.code, again.device) != (result.available, result.code, result.device):
        raise Fault(
            f"asked twice, it first finds {_found(result)}, and then {_found(again)}",
            "Report only what stays the same; release what the probe opens, and keep nothing for the next process.",
        )
    return "it finds a device" if result.available else f"it finds no usable device: {result.reason} [{result.code}]"


def _found(result: ProbeResult) -> str:
    return str(result.device) if result.available else f"no usable device: {result.reason} [{result.code}]"


def probe_timeout(kit: Kit) -> str:
    """The probe ends within its time limit."""
    if kit.probe_result.code in ("probe_timeout", "manifest_timeout"):
        raise Fault(kit.probe_result.reason)
    return f"it answers within {PROBE_SECONDS:g} s"


def probe_device(kit: Kit) -> str:
    """The probe's device has a variant and capabilities in the manifest."""
    device = kit.probe_result.device
    if device is None:
        raise NotApplicable(f"the device is not available: {kit.probe_result.reason}")
    if device.variant not in kit.manifest.variants and not kit.probe_result.notes and kit.probe_result.available:
        variants = ", ".join(kit.manifest.variants)
        raise Fault(f"it found the variant {device.variant!r}, which Manifest.variants ({variants}) does not name")
    kit.manifest.facts.capabilities(device)
    return f"{device.count} x {device.name or device.variant}, {device.memory_bytes} bytes"


def _raise_if_refused(kit: Kit, *codes: str) -> None:
    """Fault if the manifest was refused with one of these codes; NotApplicable if it was with another."""
    error = kit.installed.error
    if error is None:
        return
    if error.code in codes:
        raise _as_fault(error)
    raise NotApplicable(f"the manifest was refused: {error.member}: {error.reason}")


def _as_fault(error: PluginError) -> Fault:
    return Fault(f"{error.distribution}: {error.member}: {error.reason}", f"{error.remedy}.")


def _profile_dtypes(kit: Kit, every_dtype: bool = True) -> Iterator[tuple[str, DeviceFacts, str]]:
    """Profiles with the dtypes that they declare, or only the first dtype unless `every_dtype`."""
    for name, device in kit.manifest.facts.profiles.items():
        capabilities = kit.manifest.facts.capabilities(device)
        dtypes = [dtype for dtype in DTYPES if dtype in capabilities]
        if not dtypes:
            raise Fault(f"profile {name} declares none of the capabilities float32, bfloat16 and float16")
        for dtype in dtypes if every_dtype else dtypes[:1]:
            yield name, device, dtype


def _resolve(kit: Kit, device: DeviceFacts, dtype: str, *statements: UserStatement, **shape: Any) -> Resolved:
    """Resolve a small model, with this dtype unless a statement sets it. shape: arguments of `small_model`."""
    dtypes = () if any(statement.argument == "dtype" for statement in statements) else (user_statement("dtype", dtype),)
    extra = find_all_backends(kit.name)
    user, model = user_input(*statements, *dtypes), small_model(dtype, **shape)
    return resolve(user, manifest=kit.manifest, device=device, model=model, backends=extra)


def _backends(kit: Kit) -> Iterator[tuple[str, tuple[BackendSpec, ...]]]:
    for family, more in find_all_backends(kit.name).items():
        yield family, (*kit.manifest.facts.backends.get(family, ()), *more)


def _target_error(target: str) -> str:
    """Why "module:name" does not exist, as a clause; empty if it does, or if its module has no source."""
    module, _, name = target.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # noqa: BLE001 - importing the parent package may raise anything
        return f"its package cannot be imported ({type(error).__name__}: {error})"
    if spec is None:
        return f"there is no module {module}"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    names = _bound_names(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    first = name.partition(".")[0]
    return "" if first in names or "*" in names or "__getattr__" in names else f"{module} has no {first}"


def _bound_names(module: ast.Module) -> set[str]:
    """Names that a module binds, also within conditions and `try`; "*" for a star import."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names
