"""Finds problems of the Python environment that prevent a server from starting or make it slow. Torch-free.

Imports nothing that it checks: packages are read by their metadata, and torch is imported in a child process.
Must not know any platform. An "error" here prevents every server from starting; a "warning" may not.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from srv.platform.doctor import ChildExit, run_child
from srv.platform.finding import Finding
from srv.platform.manifest import AUTOLOAD

AUTOLOAD_GROUP = "torch.backends"
THREADS_VARIABLE = "OMP_NUM_THREADS"
KERNELS_PACKAGE = "srv_kernels"
IMPORT_TIMEOUT_S = 60.0
_LIBRARIES = (".so", ".dylib", ".dll", ".pyd")


def findings(environment: Mapping[str, str], timeout_s: float = IMPORT_TIMEOUT_S) -> list[Finding]:
    """All findings about the environment, including "ok"; takes as long as importing torch does."""
    results = [*requirements("srv"), *kernels(), *threads(environment, os.cpu_count() or 1)]
    if importlib.util.find_spec("torch") is not None:
        results += [*torch_builds(sys.path), *torch_import(environment, timeout_s)]
    return results


def requirements(distribution: str) -> Iterator[Finding]:
    """Check the distribution's requirements against the installed versions."""
    try:
        required = [Requirement(text) for text in importlib.metadata.requires(distribution) or ()]
    except importlib.metadata.PackageNotFoundError:
        remedy = f"Install it (pip install {distribution}); a bare checkout on PYTHONPATH has no entry points."
        yield Finding("requirements", "error", f"{distribution} is not installed as a distribution", remedy)
        return
    required = [
        requirement
        for requirement in required
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    problems = [
        problem for requirement in required if (problem := _requirement_problem(requirement, distribution)) is not None
    ]
    yield from problems
    if not problems:
        yield Finding(
            "requirements",
            "ok",
            f"all {len(required)} requirements of {distribution} are installed in a matching version",
        )


def _requirement_problem(required: Requirement, distribution: str) -> Finding | None:
    install = f'pip install "{required.name}{required.specifier}"'
    try:
        version = importlib.metadata.version(required.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("requirements", "error", f"{required.name} is not installed", f"Install it: {install}")
    if required.specifier.contains(version, prereleases=True):
        return None
    reason = f"{required.name} {version} is installed, but {distribution} requires {required.specifier}"
    return Finding("requirements", "warning", reason, f"Install a matching version: {install}")


def kernels() -> Iterator[Finding]:
    """Check that the kernels' distribution has a compiled library. `requirements` reports a missing distribution."""
    spec = importlib.util.find_spec(KERNELS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return
    libraries = [
        path.name
        for folder in spec.submodule_search_locations
        for path in sorted(Path(folder).rglob("native/*"))
        if path.suffix in _LIBRARIES
    ]
    if libraries:
        yield Finding("kernels", "ok", f"srv-kernels has its compiled library {', '.join(libraries)}")
    else:
        remedy = "Install a C++ compiler (such as g++) and reinstall srv-kernels; its native kernels are faster."
        yield Finding("kernels", "warning", "srv-kernels was built without its compiled library", remedy)


def threads(environment: Mapping[str, str], processors: int) -> Iterator[Finding]:
    """Check OMP_NUM_THREADS: the number of threads of host operators, whatever device the model runs on."""
    text = environment.get(THREADS_VARIABLE)
    if text is None:
        return
    name, unset = f"{THREADS_VARIABLE} = {text!r} (set by the environment)", f"Unset {THREADS_VARIABLE}"
    if not text.isdecimal() or int(text) == 0:
        remedy = f"{unset}, or give a number above zero."
        yield Finding("threads", "warning", f"{name} is not a number of threads, and is ignored or misread", remedy)
    elif int(text) > processors:
        reason = f"{name} is more than the {processors} processors of this machine: threads wait for one another"
        yield Finding("threads", "warning", reason, f"{unset}, or give {processors} or less.")
    elif int(text) == 1 and processors > 2:
        reason = f"{name} leaves {processors - 1} of {processors} processors unused by operators on the host"
        yield Finding("threads", "warning", reason, f"{unset} if this is not intended.")
    else:
        yield Finding("threads", "ok", name)


def torch_builds(path: list[str]) -> Iterator[Finding]:
    """Find more than one torch on the import path: the first is imported, and extensions built for others fail."""
    folders = {Path(entry or ".").resolve() / "torch" for entry in path}
    folders = {folder for folder in folders if (folder / "__init__.py").is_file()}
    installed = [
        distribution
        for distribution in importlib.metadata.distributions()
        if canonicalize_name(distribution.name or "") == "torch"
    ]
    if len(folders) > 1 or len(installed) > 1:
        where = ", ".join(sorted(str(folder) for folder in folders))
        versions = ", ".join(distribution.version for distribution in installed) or "without metadata"
        reason = f"there are {max(len(folders), len(installed))} torch builds on the import path ({versions}): {where}"
        yield Finding("torch builds", "warning", reason, "Keep one: uninstall the others, or fix PYTHONPATH.")


def torch_import(environment: Mapping[str, str], timeout_s: float = IMPORT_TIMEOUT_S) -> Iterator[Finding]:
    """Check that `import torch` works; if not, find out whether a backend extension that it autoloads is the cause."""
    version, exited = _import_torch(environment, timeout_s)
    if version is not None:
        yield from _compare_versions(version)
        return
    version, retried = _import_torch({**environment, AUTOLOAD: "0"}, timeout_s)
    if version is None:
        remedy = "Reinstall torch; if it names a library, install that, or the build of torch for this machine."
        yield Finding("torch", "error", f"import torch {retried.text}", remedy)
        return
    yield _autoload_finding(exited)
    yield from _compare_versions(version, f" with {AUTOLOAD}=0, as servers are started")


def _import_torch(environment: Mapping[str, str], timeout_s: float) -> tuple[str | None, ChildExit]:
    """The version of torch if a child could import it, and how the child exited."""
    program = (
        "import sys; sys.path.extend(each for each in sys.argv[1:] if each not in sys.path);"
        "import torch; print(torch.__version__)"
    )
    path = [os.path.abspath(entry) for entry in sys.path]
    with tempfile.TemporaryDirectory(prefix="srv-doctor-") as name:
        folder = Path(name)
        exited = run_child(["-c", program, *path], folder, timeout_s, environment=environment)
        printed = (folder / "stdout").read_text(encoding="utf-8", errors="replace").split()
    return (printed[-1] if exited.status == 0 and printed else None), exited


def _compare_versions(imported: str, how: str = "") -> Iterator[Finding]:
    """Check that the imported torch is the installed one, and not another that comes first on the path."""
    try:
        installed = importlib.metadata.version("torch")
        same = Version(imported).release == Version(installed).release
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        installed, same = "unknown", True
    if same:
        yield Finding("torch", "ok", f"version {imported} can be imported{how}")
    else:
        reason = f"import torch loads {imported}, but torch {installed} is installed"
        yield Finding("torch", "warning", reason, "Look for a second torch on PYTHONPATH, and reinstall this one.")


def _autoload_finding(exited: ChildExit) -> Finding:
    """The finding for an import that fails only because of backend extensions that torch autoloads."""
    extensions = list(importlib.metadata.entry_points(group=AUTOLOAD_GROUP))
    culprits = [
        extension for extension in extensions if f"backend extension: {extension.name}." in exited.last_line
    ] or extensions
    packages = " and ".join(
        sorted({extension.dist.name if extension.dist is not None else extension.name for extension in culprits})
    )
    reason = (
        f"import torch {exited.text}: torch loads {packages} automatically (entry-point group {AUTOLOAD_GROUP}), and"
        " that fails, as a backend extension does without its driver"
    )
    remedy = f"Set {AUTOLOAD}=0, or uninstall {packages}, or install the driver that it needs."
    return Finding("torch", "warning", reason, remedy)
