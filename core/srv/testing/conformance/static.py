"""L0: the manifest, its statements and the probe, without a device. Imports no torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from srv.args.backends import USED_FAMILIES, unused_backends
from srv.args.resolve import resolve
from srv.args.spec import Argument
from srv.args.statement import Resolved, UserStatement
from srv.args.support import by_argument, on_variant, support_of_value
from srv.errors import PluginError, Refusal
from srv.platform.facts import BackendSpec, DeviceFacts
from srv.platform.registry import find_all_backends
from srv.testing.conformance.facts import small_model
from srv.testing.conformance.kit import PROBE_SECONDS, Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.values import implemented, says, statements, user_input

_PROBE_FAULTS = ("probe_crashed", "probe_raised", "probe_garbage")


def found(kit: Kit) -> str:
    """One distribution brings the platform; whether its manifest is any good is for the other checks."""
    error = kit.found.error
    if error is not None and error.code == "contested":
        raise _fault(error)
    return f"{kit.found.distribution} {kit.found.version} brings it, as {kit.found.target}"


def loads(kit: Kit) -> str:
    """The entry point can be imported; that it imports or patches what it must not is for the other checks."""
    error = kit.found.error
    if error is not None and error.code == "import_failed":
        raise _fault(error)
    return f"{kit.found.target} is imported"


def import_purity(kit: Kit) -> str:
    """Neither in this process nor in the probe's child, which starts empty, does it ask for a heavy package."""
    _refused(kit, "impure")
    if kit.found.error is None and kit.probed.code == "manifest_impure":
        raise Fault(kit.probed.reason)
    return "neither torch nor anything built on it is imported with the manifest"


def patches(kit: Kit) -> str:
    """srv is as it was after the manifest was imported."""
    _refused(kit, "patches_core")
    return "every name and function of srv is as it was"


def versions(kit: Kit) -> str:
    """The contract version and the versions of srv that the plugin asks for include this one."""
    _refused(kit, "version")
    manifest = kit.manifest
    return f"written for contract {manifest.api[0]}.{manifest.api[1]}, works with srv {manifest.core}"


def members(kit: Kit) -> str:
    """No unknown member, each of the right type."""
    _refused(kit, "contract", "unknown_member")
    return "every member is known and of its type"


def signatures(kit: Kit) -> str:
    """Every function can be called as core calls it."""
    _refused(kit, "signature")
    return "probe, create, worker_env and every statement can be called as core calls them"


def reasons(kit: Kit) -> str:
    """Defaults, contributions, constraints and declarations say why."""
    _refused(kit, "text")
    facts = kit.manifest.facts
    count = len(facts.defaults) + len(facts.contributions) + len(facts.constraints) + len(facts.support)
    return f"each of {count} statements has its reason"


def worker_env(kit: Kit) -> str:
    """The environment of workers: texts by name, for every profile."""
    manifest = kit.manifest
    for name, device in manifest.facts.profiles.items():
        given: object = manifest.worker_env(device, 0)
        texts = isinstance(given, Mapping) and all(isinstance(word, str) for pair in given.items() for word in pair)
        if not texts:
            raise Fault(f"worker_env gives {given!r} for profile {name}, which are not texts by name")
    return f"{len(manifest.facts.profiles)} profiles"


def resolves(kit: Kit) -> str:
    """With nothing set, every profile resolves for a small model in every dtype that it declares."""
    count = 0
    for name, device, dtype in _situations(kit):
        try:
            _resolve(kit, device, dtype)
        except Refusal as refusal:
            raise Fault(f"with nothing set, profile {name} refuses a small {dtype} model: {refusal}") from refusal
        count += 1
    return f"{count} pairs of profile and dtype resolve with nothing set"


def user_values(kit: Kit) -> str:
    """What a user sets is taken as it is, or refused with code, reason and remedy."""
    taken = refused = 0
    for name, device, dtype in _situations(kit, every_dtype=False):
        for argument in implemented():
            for said in statements(argument, kit.manifest):
                try:
                    resolved = _resolve(kit, device, dtype, said)
                except Refusal as refusal:
                    _check_refusal(refusal, argument.flag, name)
                    refused += 1
                    continue
                value = resolved.config.get(argument.name)
                if value != said.value and not argument.asks_for_automatic(said.value):
                    shown = f"{argument.show(value)} where a user set {argument.show(said.value)}"
                    raise Fault(f"on profile {name}, {argument.name} becomes {shown}")
                taken += 1
    return f"{taken} values of {len(implemented())} arguments are taken as they are, {refused} are refused"


def _check_refusal(refusal: Refusal, flag: str, profile: str) -> None:
    for each in refusal.rejections:
        if not (each.code and each.reason.strip() and each.remedy.strip()):
            raise Fault(f"on profile {profile}, {flag} is refused without code, reason and remedy: {each}")


def declared(kit: Kit) -> str:
    """No value that is declared supported breaks a constraint of the same plugin."""
    mine = {(each.argument, each.code) for each in kit.manifest.facts.constraints}
    count = 0
    for name, device, dtype in _situations(kit, every_dtype=False):
        for argument, value in _declared_supported(kit, device):
            count += 1
            try:
                _resolve(kit, device, dtype, says(argument.name, value))
            except Refusal as refusal:
                for each in refusal.rejections:
                    if (each.what, each.code) in mine:
                        shown = f"{argument.name} = {argument.show(value)}"
                        raise Fault(
                            f"on profile {name}, {shown} is declared supported, and refused: {each}"
                        ) from refusal
    return f"{count} values are declared supported, and no constraint of the plugin refuses one"


def _declared_supported(kit: Kit, device: DeviceFacts) -> Iterator[tuple[Argument, Any]]:
    """Arguments that core implements, with the values that the plugin names as supported on a device."""
    said = by_argument(on_variant(device.variant, kit.manifest.facts.support))
    for argument in implemented():
        here = said.get(argument.name, ())
        for value in dict.fromkeys(value for each in here for value in (*each.values, *each.only)):
            verdict = support_of_value(argument, value, here)
            if verdict is not None and verdict.status == "supported":
                yield argument, value


def families(kit: Kit) -> str:
    """There is a backend of each family without which nothing can be served."""
    specs = dict(_backends(kit))
    missing = [family for family in USED_FAMILIES if not specs.get(family)]
    if missing:
        raise Fault(f"it declares no backend of the family {' and '.join(missing)}")
    return "; ".join(f"{family}: {', '.join(spec.name for spec in each)}" for family, each in specs.items() if each)


def used(kit: Kit) -> str:
    """Every backend is of a family that this version chooses from; not applicable, naming them, where some are not."""
    unused = unused_backends(kit.manifest, find_all_backends(kit.name))
    if unused:
        raise NotApplicable(f"{unused}. Nothing runs or tests them")
    return f"this version chooses from {' and '.join(USED_FAMILIES)}"


def targets(kit: Kit) -> str:
    """Each backend's target is there. Its module is read, not imported: it may need the device."""
    count = 0
    for family, specs in _backends(kit):
        for spec in specs:
            reason = _missing(spec.target)
            if reason:
                raise Fault(f"{family} backend {spec.name} points to {spec.target}, but {reason}")
            count += 1
    return f"{count} targets are there"


def probe_answers(kit: Kit) -> str:
    """The probe gives a result, whatever it finds."""
    result = kit.probed
    if result.code in _PROBE_FAULTS:
        raise Fault(result.reason)
    return "it finds a device" if result.available else f"it says no: {result.reason} [{result.code}]"


def probe_timeout(kit: Kit) -> str:
    """The probe ends within its time."""
    if kit.probed.code == "probe_timeout":
        raise Fault(kit.probed.reason)
    return f"it answers within {PROBE_SECONDS:g} s"


def probe_device(kit: Kit) -> str:
    """What the probe found is a device that the manifest can speak of."""
    device = kit.probed.device
    if device is None:
        raise NotApplicable(f"there is no such device here: {kit.probed.reason}")
    if device.variant not in kit.manifest.variants and not kit.probed.notes and kit.probed.available:
        known = ", ".join(kit.manifest.variants)
        raise Fault(f"it found the variant {device.variant!r}, which Manifest.variants ({known}) does not name")
    kit.manifest.facts.capabilities(device)
    return f"{device.count} x {device.name or device.variant}, {device.memory_bytes} bytes"


def _refused(kit: Kit, *codes: str) -> None:
    """Fault if the manifest was refused for one of these reasons; NotApplicable if for another."""
    error = kit.found.error
    if error is None:
        return
    if error.code in codes:
        raise _fault(error)
    raise NotApplicable(f"the manifest was refused: {error.member}: {error.reason}")


def _fault(error: PluginError) -> Fault:
    return Fault(f"{error.distribution}: {error.member}: {error.reason}", f"{error.remedy}.")


def _situations(kit: Kit, every_dtype: bool = True) -> Iterator[tuple[str, DeviceFacts, str]]:
    """Profiles with the dtypes that they declare; the first of them alone unless `every_dtype`."""
    for name, device in kit.manifest.facts.profiles.items():
        capabilities = kit.manifest.facts.capabilities(device)
        dtypes = [dtype for dtype in ("float32", "bfloat16", "float16") if dtype in capabilities]
        if not dtypes:
            raise Fault(f"profile {name} declares none of the capabilities float32, bfloat16 and float16")
        for dtype in dtypes if every_dtype else dtypes[:1]:
            yield name, device, dtype


def _resolve(kit: Kit, device: DeviceFacts, dtype: str, *said: UserStatement) -> Resolved:
    """A small model with this dtype set, unless the statement is about the dtype itself."""
    dtypes = () if any(each.argument == "dtype" for each in said) else (says("dtype", dtype),)
    extra = find_all_backends(kit.name)
    return resolve(
        user_input(*said, *dtypes), manifest=kit.manifest, device=device, model=small_model(dtype), backends=extra
    )


def _backends(kit: Kit) -> Iterator[tuple[str, tuple[BackendSpec, ...]]]:
    for family, more in find_all_backends(kit.name).items():
        yield family, (*kit.manifest.facts.backends.get(family, ()), *more)


def _missing(target: str) -> str:
    """Why "module:name" cannot be there, a clause; empty if it is, or if its module cannot be read."""
    module, _, name = target.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # noqa: BLE001 - whatever the parent package does when it is imported
        return f"its package cannot be imported ({type(error).__name__}: {error})"
    if spec is None:
        return f"there is no module {module}"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    names = _names(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    first = name.partition(".")[0]
    return "" if first in names or "*" in names or "__getattr__" in names else f"{module} has no {first}"


def _names(module: ast.Module) -> set[str]:
    """Names that a module binds, also within conditions and `try`; "*" if it imports all of another's."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((each.asname or each.name).partition(".")[0] for each in node.names)
    return names
