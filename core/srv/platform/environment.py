"""Mistakes of the Python environment that keep any server from starting, or make it slow. Torch-free.

Imports nothing that it judges: packages are read by their metadata, and torch is imported in a child process.
Knows no platform. An "error" here stops every server; a "warning" need not.
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

from srv.platform.doctor import Ended, run_child
from srv.platform.finding import Finding
from srv.platform.manifest import AUTOLOAD

AUTOLOAD_GROUP = "torch.backends"
THREADS = "OMP_NUM_THREADS"
KERNELS = "srv_kernels"
IMPORT_TIMEOUT_S = 60.0
_LIBRARIES = (".so", ".dylib", ".dll", ".pyd")


def findings(environment: Mapping[str, str], timeout_s: float = IMPORT_TIMEOUT_S) -> list[Finding]:
    """Everything of the environment, good or bad; takes as long as importing torch does."""
    told = [*requirements("srv"), *kernels(), *threads(environment, os.cpu_count() or 1)]
    if importlib.util.find_spec("torch") is not None:
        told += [*builds(sys.path), *torch_import(environment, timeout_s)]
    return told


def requirements(distribution: str) -> Iterator[Finding]:
    """The distribution's own requirements, by their installed versions."""
    try:
        wanted = [Requirement(each) for each in importlib.metadata.requires(distribution) or ()]
    except importlib.metadata.PackageNotFoundError:
        remedy = f"Install it (pip install {distribution}); a bare checkout on PYTHONPATH has no entry points."
        yield Finding("requirements", "error", f"{distribution} is not installed as a distribution", remedy)
        return
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    faults = [fault for each in wanted if (fault := _fault(each, distribution)) is not None]
    yield from faults
    if not faults:
        yield Finding("requirements", "ok", f"all {len(wanted)} of {distribution} are installed and fit")


def _fault(wanted: Requirement, distribution: str) -> Finding | None:
    install = f'pip install "{wanted.name}{wanted.specifier}"'
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("requirements", "error", f"{wanted.name} is not installed", f"Install it: {install}")
    if wanted.specifier.contains(version, prereleases=True):
        return None
    reason = f"{wanted.name} is {version}, but {distribution} is made for {wanted.specifier}"
    return Finding("requirements", "warning", reason, f"Install a version that fits: {install}")


def kernels() -> Iterator[Finding]:
    """Whether the kernels' distribution brings a compiled library. Its absence is told by `requirements`."""
    spec = importlib.util.find_spec(KERNELS)
    if spec is None or not spec.submodule_search_locations:
        return
    found = [
        each.name
        for folder in spec.submodule_search_locations
        for each in sorted(Path(folder).rglob("native/*"))
        if each.suffix in _LIBRARIES
    ]
    if found:
        yield Finding("kernels", "ok", f"srv-kernels has its compiled library {', '.join(found)}")
    else:
        remedy = (
            "Install a C++ compiler (such as g++) and reinstall srv-kernels; a server on the host is faster for it."
        )
        yield Finding("kernels", "warning", "srv-kernels was built without its compiled library", remedy)


def threads(environment: Mapping[str, str], processors: int) -> Iterator[Finding]:
    """OMP_NUM_THREADS: how many threads operators on the host use, wherever the model is."""
    text = environment.get(THREADS)
    if text is None:
        return
    name, unset = f"{THREADS} = {text!r} (set by the environment)", f"Unset {THREADS}"
    if not text.isdecimal() or int(text) == 0:
        remedy = f"{unset}, or give a number above zero."
        yield Finding("threads", "warning", f"{name} is no number of threads, and is ignored or misread", remedy)
    elif int(text) > processors:
        reason = f"{name} is more than the {processors} processors here: threads wait for one another"
        yield Finding("threads", "warning", reason, f"{unset}, or give {processors} or less.")
    elif int(text) == 1 and processors > 2:
        reason = f"{name} leaves {processors - 1} of {processors} processors unused where the host computes"
        yield Finding("threads", "warning", reason, f"{unset} if that was not meant.")
    else:
        yield Finding("threads", "ok", name)


def builds(path: list[str]) -> Iterator[Finding]:
    """More than one torch on the import path: the first is imported, and others' extensions do not load in it."""
    folders = {Path(entry or ".").resolve() / "torch" for entry in path}
    folders = {each for each in folders if (each / "__init__.py").is_file()}
    known = [each for each in importlib.metadata.distributions() if canonicalize_name(each.name or "") == "torch"]
    if len(folders) > 1 or len(known) > 1:
        where = ", ".join(sorted(str(each) for each in folders))
        versions = ", ".join(each.version for each in known) or "without metadata"
        reason = f"there are {max(len(folders), len(known))} torch builds on the import path ({versions}): {where}"
        yield Finding("torch builds", "warning", reason, "Keep one: uninstall the others, or mend PYTHONPATH.")


def torch_import(environment: Mapping[str, str], timeout_s: float = IMPORT_TIMEOUT_S) -> Iterator[Finding]:
    """Whether `import torch` works here; if not, whether a vendor's package that loads itself is to blame."""
    version, ended = _import_torch(environment, timeout_s)
    if version is not None:
        yield from _same_version(version)
        return
    without, again = _import_torch({**environment, AUTOLOAD: "0"}, timeout_s)
    if without is None:
        remedy = "Reinstall torch; if it names a library, install that, or the build of torch for this machine."
        yield Finding("torch", "error", f"import torch {again.text}", remedy)
        return
    yield _blamed(ended)
    yield from _same_version(without, f" with {AUTOLOAD}=0, as servers are started")


def _import_torch(environment: Mapping[str, str], timeout_s: float) -> tuple[str | None, Ended]:
    """torch's own version if a child could import it, and how the child ended."""
    program = (
        "import sys; sys.path.extend(each for each in sys.argv[1:] if each not in sys.path);"
        "import torch; print(torch.__version__)"
    )
    path = [os.path.abspath(entry) for entry in sys.path]
    with tempfile.TemporaryDirectory(prefix="srv-doctor-") as name:
        folder = Path(name)
        ended = run_child(["-c", program, *path], folder, timeout_s, environment=environment)
        said = (folder / "stdout").read_text(encoding="utf-8", errors="replace").split()
    return (said[-1] if ended.status == 0 and said else None), ended


def _same_version(imported: str, how: str = "") -> Iterator[Finding]:
    """The version that is imported is the one that is installed, or another torch is in its way."""
    try:
        installed = importlib.metadata.version("torch")
        same = Version(imported).release == Version(installed).release
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        installed, same = "unknown", True
    if same:
        yield Finding("torch", "ok", f"imports, as version {imported}{how}")
    else:
        reason = f"import torch gives {imported}, but torch {installed} is installed"
        yield Finding("torch", "warning", reason, "Look for a second torch on PYTHONPATH, and reinstall this one.")


def _blamed(ended: Ended) -> Finding:
    """The finding for an import that fails only because packages load themselves into torch."""
    points = list(importlib.metadata.entry_points(group=AUTOLOAD_GROUP))
    named = [each for each in points if f"backend extension: {each.name}." in ended.last_line] or points
    who = " and ".join(sorted({each.dist.name if each.dist is not None else each.name for each in named}))
    reason = (
        f"import torch {ended.text}: {who} loads itself into torch (entry-point group {AUTOLOAD_GROUP}) and fails,"
        " as a vendor's package does without its driver"
    )
    remedy = f"Set {AUTOLOAD}=0, or uninstall {who}, or install the driver that it wants."
    return Finding("torch", "warning", reason, remedy)
